"""Values between a program and its verifier as plain data: exact built-in types, nothing that can act.

A JSON value represents itself, and a list a list; every other kind is {"t": tag, "v": content}. For
what is no data each side hands out numbers. Objects of classes that both sides know (of a problem's `prefix`)
go by value: their class's name and their attributes. No message is trusted: it is bounded in size and depth,
every tag says what its content must be, and decoding runs no code of the other side. Standard library only:
both sides run in the sandbox.
"""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import fractions
import json
import math
import os
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

_LENGTH = struct.Struct("!Q")
MAX_MESSAGE = 32 * 2**20
"""Bytes."""
MAX_DEPTH = 250
"""Depth of containers in containers; Python's own recursion ends soon after."""
_SMALL = 2**63
_PLAIN = (bool, str, float, type(None))
_TYPES: dict[str, Any] = {
    t.__name__: t
    for t in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple, type(None))
}
"""The only functions of ours that a program may name: they cannot do anything."""
_TEMPORAL = {t.__name__: t for t in (datetime.date, datetime.datetime, datetime.time)}
_NUMBERS = "biufcSU?"
"""Kinds of numpy arrays that are data."""
_ITEMS: dict[type, str] = {
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    collections.deque: "deque",
    type({}.keys()): "list",
    type({}.values()): "list",
    type({}.items()): "list",
}
_OF_TEXT: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": lambda text: text.encode("latin-1"),
    "bytearray": lambda text: bytearray(text, "latin-1"),
    "Decimal": decimal.Decimal,
    "type": _TYPES.__getitem__,
    **{name: kind.fromisoformat for name, kind in _TEMPORAL.items()},
}
_OF_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "list": list,
    "dict": lambda pairs: dict(map(_pair, pairs)),
    "counter": lambda pairs: collections.Counter(dict(map(_pair, pairs))),
    "range": lambda numbers: range(*_exact(numbers, int, 3)),
    "complex": lambda parts: complex(*_exact(parts, float, 2)),
    "fraction": lambda parts: fractions.Fraction(*_exact(parts, int, 2)),
    "timedelta": lambda parts: datetime.timedelta(*_exact(parts, int, 3)),
}


class Refused(TypeError):
    """A value that cannot be sent."""


class Malformed(ValueError):
    """A message that no codec writes."""


def exact(value: Any, kind: type) -> Any:
    """The value, where it is of this very type.

    Raises:
        Malformed: it is of another, or of one below.
    """
    if type(value) is not kind:
        raise Malformed(f"{type(value).__name__} in place of {kind.__name__}")
    return value


def _exact(values: list[Any], kind: type, count: int) -> list[Any]:
    if len(values) != count:
        raise Malformed(f"{len(values)} parts in place of {count}")
    return [exact(value, kind) for value in values]


def _pair(item: Any) -> list[Any]:
    if len(exact(item, list)) != 2:
        raise Malformed("a pair of another length")
    return item  # type: ignore[no-any-return]


class ValueCodec:
    """Values to and from data; what is no data goes through `export` and `meet`."""

    def __init__(self, export: Callable[[Any], Any], meet: Callable[[str, Any], Any]) -> None:
        self.classes: Mapping[str, type] = {}
        """By name: known on both sides."""
        self._export, self._meet = export, meet

    def encode(self, value: Any) -> Any:
        """Data that JSON writes."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if -_SMALL <= value < _SMALL else {"t": "int", "v": hex(value)}
        if kind is list:
            return [self.encode(item) for item in value]
        if (items := _items(value, kind)) is not None:
            return {"t": items[0], "v": [self.encode(item) for item in items[1]]}
        if kind in (bytes, bytearray):
            return {"t": kind.__name__, "v": bytes(value).decode("latin-1")}
        if kind is decimal.Decimal or _TEMPORAL.get(kind.__name__) is kind:
            return {"t": kind.__name__, "v": str(value) if kind is decimal.Decimal else value.isoformat()}
        if kind is type and value in _TYPES.values():
            return {"t": "type", "v": value.__name__}
        if self.classes.get(kind.__name__) is kind:
            return {"t": "instance", "v": [kind.__name__, self.encode(dict(vars(value)))]}
        if (special := self._of_libraries(value, kind)) is not None:
            return special
        return self._export(value)

    def decode(self, data: Any, depth: int = 0) -> Any:
        """The value of data that JSON read.

        Raises:
            Malformed: no codec writes it; other errors come from values that no type takes.
        """
        if depth > MAX_DEPTH:
            raise Malformed(f"deeper than {MAX_DEPTH}")
        if type(data) is list:
            return [self.decode(item, depth + 1) for item in data]
        if type(data) is not dict:
            return data
        if data.keys() != {"t", "v"}:
            raise Malformed("a value without tag and content")
        tag, content = exact(data["t"], str), data["v"]
        if tag in _OF_ITEMS:
            return _OF_ITEMS[tag]([self.decode(item, depth + 1) for item in exact(content, list)])
        if tag in _OF_TEXT:
            return _OF_TEXT[tag](exact(content, str))
        match tag:
            case "named":
                name, fields, items = exact(content, list)
                fields = [exact(field, str) for field in exact(fields, list)]
                return collections.namedtuple(exact(name, str), fields)(
                    *self.decode(exact(items, list), depth + 1)
                )
            case "array":
                return _array(*exact(content, list))
            case "instance":
                name, state = exact(content, list)
                return self._instance(exact(name, str), exact(self.decode(state, depth + 1), dict))
        return self._meet(tag, content)

    def _instance(self, name: str, state: dict[Any, Any]) -> Any:
        """An object of a class that is known here, with attributes that hide none of its methods."""
        made: Any = object.__new__(self.classes[name])
        for key, value in state.items():
            if not exact(key, str).startswith("__") and not callable(getattr(type(made), key, None)):
                vars(made)[key] = value
        return made

    def _of_libraries(self, value: Any, kind: type) -> Any:
        """Named tuples and numpy's numbers and arrays; None: another kind."""
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return {"t": "named", "v": [kind.__name__, list(kind._fields), self.encode(list(value))]}
        numpy = sys.modules.get("numpy")
        if numpy is None or not isinstance(value, (numpy.generic, numpy.ndarray)):
            return None
        if isinstance(value, numpy.generic):
            return self.encode(value.item())
        if value.dtype.kind not in _NUMBERS:
            return self.encode(value.tolist())
        shape, content = list(value.shape), value.tobytes().decode("latin-1")
        return {"t": "array", "v": [value.dtype.str, shape, content]}


def _items(value: Any, kind: type) -> tuple[str, list[Any]] | None:
    """Tag and parts of a container or of a number in parts; None: neither."""
    if kind in _ITEMS:
        return _ITEMS[kind], list(value)
    if kind in (dict, collections.OrderedDict, collections.defaultdict):
        return "dict", [list(pair) for pair in value.items()]
    if kind is collections.Counter:
        return "counter", [list(pair) for pair in value.items()]
    if kind is range:
        return "range", [value.start, value.stop, value.step]
    if kind is complex:
        return "complex", [value.real, value.imag]
    if kind is fractions.Fraction:
        return "fraction", [value.numerator, value.denominator]
    if kind is datetime.timedelta:
        return "timedelta", [value.days, value.seconds, value.microseconds]
    return ("list", value.tolist()) if kind is array.array else None


def _array(dtype: Any, shape: Any, text: Any) -> Any:
    numpy = sys.modules["numpy"]
    kind = numpy.dtype(exact(dtype, str))
    if kind.kind not in _NUMBERS:
        raise Malformed(f"an array of {dtype}")
    sizes = [exact(size, int) for size in exact(shape, list)]
    data = exact(text, str).encode("latin-1")
    if math.prod(sizes) * kind.itemsize != len(data) or min(sizes, default=0) < 0:
        raise Malformed("an array of another size")
    array = numpy.ndarray(sizes, kind, bytearray(data))
    if kind.kind == "U":
        array.tolist()  # letters that there are
    return array if kind.kind != "b" else array.view("u1") != 0


def renew(old: Any, new: Any) -> None:
    """Give a container the content of another of its kind; its parts stay where they are of a kind too."""
    match old:
        case list() if isinstance(new, list):
            for index, (before, after) in enumerate(zip(old, new, strict=False)):
                new[index] = _renewed(before, after)
            old[:] = new
        case dict() if isinstance(new, dict):
            kept = {key: _renewed(old[key], value) if key in old else value for key, value in new.items()}
            old.clear()
            old.update(kept)
        case set() if isinstance(new, set):
            old.intersection_update(new)
            old.update(new)
        case collections.deque() | bytearray() if type(new) is type(old):
            old.clear()
            old.extend(new)
        case _ if type(old) is type(new) and type(old).__dictoffset__ and not isinstance(old, type):
            renew(vars(old), vars(new))


def _renewed(before: Any, after: Any) -> Any:
    if type(before) is not type(after) or not (
        isinstance(before, (list, dict, set, collections.deque, bytearray)) or type(before).__dictoffset__
    ):
        return after
    renew(before, after)
    return before


class Channel:
    """Messages over two pipes, each JSON after its length."""

    def __init__(self, read: int, write: int) -> None:
        self.read, self._write = read, write

    def send(self, message: Any) -> None:
        """Write one message.

        Raises:
            OSError: nobody reads.
        """
        body = json.dumps(message).encode()
        data = memoryview(_LENGTH.pack(len(body)) + body)
        while data:
            data = data[os.write(self._write, data) :]

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: the other side has ended.
            ValueError: it is no JSON, or too long.
            RecursionError: it is too deep.
        """
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if size > MAX_MESSAGE:
            raise Malformed(f"a message of {size} bytes")
        return json.loads(self._exactly(size))

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            if not (part := os.read(self.read, min(count - len(data), 2**20))):
                raise EOFError
            data += part
        return bytes(data)
