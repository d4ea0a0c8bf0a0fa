"""Control plane of a weight channel: a key-value store hosted by the sender, in which no wait is endless.

Keys live under the number of the transfer, so that a late reader never sees an old value. A side that fails
says so under `failed`; the other one looks there while it waits and stops with the same words.

Messages are JSON, and a code that only who knows the secret of the channel can make.

Nothing that comes from a socket is unpickled. What vLLM's transfer engines hand over other than JSON's own
values (CUDA IPC handles: tuples, bytes, dtypes, four classes of torch) has a form of its own.
"""

from __future__ import annotations

import base64
import hmac
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from executor.engines.protocols import ChannelSpec
from executor.sockets import listener
from rlhfsim.errors import RlhfsimError

SHORTEST_S, LONGEST_S, PAUSE = 0.0002, 0.01, 0.02
"""Between two looks at a key, a share of what was waited so far: so little can a look come too late. (The
store's own wait logs each time it gives up.)"""
_CLASSES: dict[str, type] = {
    "Tensor": torch.Tensor,
    "Parameter": torch.nn.Parameter,
    "TypedStorage": torch.storage.TypedStorage,
    "UntypedStorage": torch.UntypedStorage,
}
"""Classes that an IPC handle names (torch.multiprocessing.reductions.reduce_tensor)."""


class Control:
    """One end's view of the store."""

    def __init__(self, spec: ChannelSpec, *, master: bool) -> None:
        self.spec = spec
        self.master = master
        side = "host" if master else "reach"
        try:
            self.store = dist.TCPStore(  # type: ignore[attr-defined]
                spec.host,
                spec.port,
                None,
                master,
                timedelta(seconds=spec.timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener(spec.host, spec.port).detach() if master else None,
            )
        except (RuntimeError, OSError) as error:
            raise self._timeout(
                f"cannot {side} the store at {spec.host}:{spec.port} ({_first_line(error)})"
            ) from error

    def put(self, key: str, value: Any) -> None:
        """Publish a value."""
        with self._reaching(f"could not publish {key}"):
            self.store.set(key, seal(self.spec.secret, key, value))

    def take(self, key: str, what: str) -> Any:
        """The value of a key, waited for.

        Raises:
            RlhfsimError: it did not come, or was not written by an end of this channel.
        """
        [value] = self.wait([key], what)
        return value

    def wait(self, keys: Sequence[str], what: str) -> list[Any]:
        """The values of all keys once they exist; `what` is told to the person when they do not in time."""
        start = time.monotonic()
        while not self._exist(keys, what):
            failure = self.failure()
            if failure is not None:
                raise failure
            waited = time.monotonic() - start
            if waited >= self.spec.timeout_s:
                raise self._timeout(f"waited {self.spec.timeout_s:g} s for {what}")
            time.sleep(min(max(PAUSE * waited, SHORTEST_S), LONGEST_S))
        return [self._read(key) for key in keys]

    def fail(self, reason: str) -> None:
        """Tell the other side; says nothing when it is gone."""
        try:
            if not self.store.check(["failed"]):
                self.store.set("failed", seal(self.spec.secret, "failed", reason))
        except RuntimeError:
            pass  # nobody is left to tell, and the caller raises the reason itself

    def failure(self) -> RlhfsimError | None:
        """What the other side said when it failed."""
        if not self._exist(["failed"], "the other side"):
            return None
        reason = self._read("failed")
        return RlhfsimError(
            "weight-sync-failed", f"channel {self.spec.name!r}: the other side failed: {reason}"
        )

    def forget(self, keys: Sequence[str]) -> None:
        """Drop keys of a finished transfer."""
        for key in keys:
            self.store.delete_key(key)

    def close(self) -> None:
        """Leave the store; the sender's end closes it for everybody."""
        del self.store

    def _read(self, key: str) -> Any:
        with self._reaching(f"while reading {key}"):
            message = self.store.get(key)
        return unseal(self.spec.secret, key, message)

    def _exist(self, keys: Sequence[str], what: str) -> bool:
        with self._reaching(f"while waiting for {what}"):
            there: bool = self.store.check(list(keys))
        return there

    def _timeout(self, message: str) -> RlhfsimError:
        return RlhfsimError(
            "weight-sync-timeout",
            f"channel {self.spec.name!r} ({self.spec.transport}): {message}",
            help="check that the other side still runs and calls the same transfer, or raise limits.sync_s",
        )

    @contextmanager
    def _reaching(self, message: str) -> Iterator[None]:
        """What is done to the store inside; `message` is said where the store is lost."""
        try:
            yield
        except RuntimeError as error:
            raise RlhfsimError(
                "weight-sync-failed",
                f"channel {self.spec.name!r}: connection to the sender's store lost {message} "
                f"({_first_line(error)})",
            ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


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
