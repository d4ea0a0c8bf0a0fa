"""Dotted paths into questions and documents: which exist, their values, and data with a value replaced.

`cluster.node_groups.0.gpus` counts list items from 0; one past the end of a document's list adds an item, and
`*` is every item of typed data. A text `4x` means four times what the base has there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.units import Dimension

Keys = tuple[int | str, ...]
ITEM = "0"
"""Stands for every item of a list in `known`."""
EVERY = "*"
MAX_DEPTH = 8
_TIMES = re.compile(r"^\s*(\d+(?:\.\d*)?|\.\d+)\s*x\s*$")
DIMENSIONS: dict[str, Dimension] = {
    "price": "usd/h",
    "nic": "byte/s",
    "storage": "byte/s",
    "mtbf": "s",
    "restart": "s",
    "checkpoint": "s",
    "checkpoint_interval": "s",
    "time_limit": "s",
    "seconds_per_sample": "s",
    "seconds_per_turn": "s",
    "cold_start": "s",
    "sandbox_memory": "byte",
    "fleet_memory": "byte",
    **dict.fromkeys(("loss", "advantages", "sampler", "filter", "logger"), "s"),
    "mean": "token",
    "max": "token",
    "min": "token",
    "std": "token",
    "per_version": "1",
}
"""Last part of a path -> what is measured; all others are plain numbers."""


@dataclass(frozen=True, slots=True)
class Names:
    """Mark of the keys of a mapping: the names that exist; whoever reads the mapping refuses others."""

    names: tuple[str, ...]


def keys(path: str) -> Keys:
    """`cluster.node_groups.0.gpus` as keys."""
    return tuple(int(part) if part.isdecimal() else part for part in path.split("."))


def dotted(path: Keys) -> str:
    """Keys as people write them."""
    return ".".join(map(str, path))


def dimension(path: str) -> Dimension:
    """What the number at a path measures."""
    if path.endswith(("prompt_len.value", "response_len.value")):
        return "token"
    return DIMENSIONS.get(path.rsplit(".", 1)[-1], "1")


# --- which paths there are --------------------------------------------------------------------------


@cache
def known(kind: Any) -> frozenset[str]:
    """Every path below a type, list items as `0`."""
    return frozenset(dotted(path) for path in _below(kind, 0))


def _below(kind: Any, depth: int) -> Iterator[Keys]:
    for name, inner in _children(kind):
        yield (name,)
        if depth < MAX_DEPTH:
            yield from ((name, *rest) for rest in _below(inner, depth + 1))


def _children(kind: Any) -> Iterator[tuple[str, Any]]:
    """Names one step below a type, through unions, annotations, lists and mappings."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind, include_extras=True)
        yield from ((f.name, hints[f.name]) for f in fields(kind))
    elif origin is Annotated:
        yield from _children(arguments[0])
    elif origin is tuple:
        yield ITEM, arguments[0]
    elif origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        yield from ((name, arguments[1]) for name in _names(arguments[0]))
    elif origin is not Literal:
        for argument in arguments:
            yield from _children(argument)


def _names(key: Any) -> tuple[str, ...]:
    """Names that a key of a mapping may be; empty: any."""
    if get_origin(key) is Literal:
        return get_args(key)
    return next((mark.names for mark in get_args(key)[1:] if isinstance(mark, Names)), ())


def check_known(path: str, kind: Any, place: Place | None) -> None:
    """Whether a path can exist below a type.

    Raises:
        RlhfsimError: it cannot, with the nearest ones that can.
    """
    pattern = dotted(tuple(ITEM if isinstance(key, int) else key for key in keys(path)))
    if pattern in known(kind):
        return
    near = get_close_matches(pattern, sorted(known(kind)), n=3, cutoff=0.5)
    remedy = (
        f"did you mean {', '.join(near)}" if near else "paths begin with cluster, workload, request or run"
    )
    raise RlhfsimError("unknown-path", f"unknown path {path[:80]!r}", place=place, help=remedy)


# --- reading and replacing --------------------------------------------------------------------------


def value_at(data: Any, path: Keys) -> Any:
    """The value at a path of plain or typed data; None where there is none."""
    for key in path:
        if isinstance(data, Mapping):
            data = data.get(key)
        elif isinstance(data, list | tuple) and isinstance(key, int):
            data = data[key] if key < len(data) else None
        else:
            data = getattr(_keyed(data), str(key), None)
    return data


def _keyed(data: Any) -> Any:
    """Typed data with the keys of files."""
    return getattr(data, "keyed", data)


def put(data: Any, path: Keys, value: Any, place: Place | None = None) -> Any:
    """Data with a value or a function of the value there, at a path; a document without it where None.

    What lies on the way in a document and is absent is made.

    Raises:
        RlhfsimError: a list item beyond the one after the last.
    """
    if not path:
        return value(data) if callable(value) else value
    key, rest = path[0], path[1:]
    if key == EVERY:
        return tuple(put(item, rest, value) for item in data)
    if is_dataclass(data) and not isinstance(data, type):
        return replace(data, **{str(key): put(getattr(_keyed(data), str(key)), rest, value)})
    if isinstance(data, list):
        if not isinstance(key, int) or key > len(data):
            raise RlhfsimError(
                "no-such-item",
                f"there is no item {key!r} in a list of {len(data)}",
                place=place,
                help=f"items count from 0; {len(data)} adds one",
            )
        if value is None and not rest:
            return [*data[:key], *data[key + 1 :]]
        old = data[key] if key < len(data) else None
        return [*data[:key], put(old, rest, value, place), *data[key + 1 :]]
    if isinstance(key, int) and not data:
        return put([], path, value, place)
    if data is not None and not isinstance(data, Mapping):
        raise RlhfsimError(
            "unknown-path",
            f"{key!r} lies below {str(data)[:40]!r}, which is no mapping",
            place=place,
            help="replace the whole value, as in set: {workload.response_len: {kind: fixed, value: 2000}}",
        )
    below = dict(data or {})
    if value is None and not rest:
        below.pop(key, None)
    else:
        below[key] = put(below.get(key), rest, value, place)
    return below


def factor(value: Any) -> float | None:
    """4.0 of `4x`; None of anything else."""
    match = _TIMES.match(value) if isinstance(value, str) else None
    return float(match[1]) if match else None
