"""What a result came from: a hash of its inputs, and the versions of what computed it."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any


@cache
def installed_version(*names: str, missing: str = "unknown") -> str:
    """Version of a library under the first of its names that is installed; `missing` where none is."""
    for name in names:
        with suppress(PackageNotFoundError):
            return version(name)
    return missing


def content_hash(*parts: Any) -> str:
    """A short stable hash of plain data or dataclasses; 1 and 1.0 are the same number."""
    text = json.dumps(
        [_plain(asdict(getattr(p, "keyed", p)) if hasattr(p, "__dataclass_fields__") else p) for p in parts],
        sort_keys=True,
        default=str,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(data: Any) -> Any:
    """Whole floats as integers: a default 0 comes back from a file as 0.0."""
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return int(data) if isinstance(data, float) and data.is_integer() else data
