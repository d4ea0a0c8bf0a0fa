"""Messages of a weight channel: JSON, and a code that only who knows the secret of the channel can make.

Nothing that comes from a socket is unpickled. What vLLM's transfer engines hand over beside JSON's own values
(CUDA IPC handles: tuples, bytes, dtypes, four classes of torch) has a form of its own.
"""

from __future__ import annotations

import base64
import hmac
import json
from typing import Any

import torch

from rlhfsim.errors import RlhfsimError

_CLASSES: dict[str, type] = {
    "Tensor": torch.Tensor,
    "Parameter": torch.nn.Parameter,
    "TypedStorage": torch.storage.TypedStorage,
    "UntypedStorage": torch.UntypedStorage,
}
"""Classes that an IPC handle names (torch.multiprocessing.reductions.reduce_tensor)."""


def seal(secret: str, key: str, value: Any) -> str:
    """A message that is valid under this key only: HMAC-SHA256 (64 digits), then the value as JSON."""
    body = json.dumps(_plain(value))
    return _code(secret, key, body.encode()) + body


def unseal(secret: str, key: str, message: bytes) -> Any:
    """The value of a message.

    Raises:
        RlhfsimError: it was not made with this secret, or for another key.
    """
    code, body = message[:64], message[64:]
    if not hmac.compare_digest(code, _code(secret, key, body).encode()):
        raise RlhfsimError(
            "weight-sync-forged",
            f"{key} of a weight channel was not written by an end of this run",
            help="somebody else reaches the ports of this run: fence the network of its nodes (SECURITY.md)",
        )
    return _rich(json.loads(body))


def _code(secret: str, key: str, body: bytes) -> str:
    return hmac.new(bytes.fromhex(secret), key.encode() + b"\0" + body, "sha256").hexdigest()


def _plain(value: Any) -> Any:
    """As JSON has it; what JSON lacks becomes an object with one key, its kind."""
    if isinstance(value, tuple):
        return {"tuple": [_plain(v) for v in value]}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {"dict": {k: _plain(v) for k, v in value.items()}}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, type):
        return {"class": next(name for name, known in _CLASSES.items() if known is value)}
    return value


def _rich(value: Any) -> Any:
    if isinstance(value, list):
        return [_rich(v) for v in value]
    if not isinstance(value, dict):
        return value
    [(kind, inner)] = value.items()
    match kind:
        case "tuple":
            return tuple(_rich(v) for v in inner)
        case "dict":
            return {k: _rich(v) for k, v in inner.items()}
        case "bytes":
            return base64.b64decode(inner)
        case "dtype":
            return _dtype(inner)
        case "device":
            return torch.device(inner)
        case _:
            return _CLASSES[inner]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
