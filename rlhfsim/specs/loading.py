"""From a user's YAML or JSON file to checked, frozen data, with file and line on every error."""

from __future__ import annotations

import json
import os
import re
import reprlib
import stat
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.specs.unknown_keys import remedy

T = TypeVar("T")
MAX_BYTES = 4 * 2**20
"""Larger inputs are refused before they are parsed."""
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
"""Every spec that comes from a file: unknown keys, infinities and NaN are errors."""
checked = with_config(STRICT)
"""Class decorator for a dataclass that is read from files."""


Trail = tuple[int | str, ...]
"""Keys from the document down to a value."""
MAX_DEPTH = 64
"""Deeper nesting is refused: parsers written in C end the interpreter at some depth."""
MAX_VALUES = 50_000
"""Most values that the aliases of a file expand to."""
_MAYBE_ALIAS = re.compile(r"(?:^|[\s,:\[{?-])\*[^\s,\[\]{}*]")
_MAYBE_DEEP = re.compile(rf"^[ ?:-]{{{MAX_DEPTH // 2},}}\S", re.MULTILINE)
"""A block of YAML nests at most twice a column."""
_BRACKETS = re.compile(r"[\[\]{}]")
_STRINGS = re.compile(r'(?<!\\)"(?:[^"\\]|\\.)*"')
_CONTROL = r"\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_MAYBE_CONTROL = re.compile(
    rf"[{_CONTROL}]|\\(?:u00[0189]|u20[26]|ud[89a-f]|x[0189]|[abefvNU0])", re.IGNORECASE
)
_CONTROLS = re.compile(f"[{_CONTROL}]")
"""What drives a terminal, turns the direction of writing, or is no character."""


class _Loader(yaml.CSafeLoader):
    """The safe loader, which also refuses a key that is given twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) != len(node.value):
            seen: set[Hashable] = set()
            for key, _ in node.value:
                name = self.construct_object(key, deep=True)
                if name in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"key {name!r} is given twice", problem_mark=key.start_mark
                    )
                seen.add(name)
        return mapping


class Source:
    """A parsed file that can tell where each value is."""

    def __init__(self, name: str, text: str, data: Any) -> None:
        """`data` is what `text` says; the tree with the marks is built when an error needs a place."""
        self.name = name
        self.data = data
        self.text = text

    def place(self, path: Trail = ()) -> Place:
        """Line and column of the value (or of the nearest parent that exists) at `path`."""
        node = _compose(self.text)
        lines = self.text.splitlines()
        mark = node.start_mark if node else None
        for key in path:
            child = _child(node, key)
            if child is None:
                break
            mark, node = child
        if mark is None:
            return Place(file=self.name)
        text = lines[mark.line] if mark.line < len(lines) else None
        return Place(file=self.name, line=mark.line + 1, column=mark.column + 1, text=text)


def _compose(text: str) -> yaml.Node | None:
    if len(text) > MAX_BYTES:
        return None  # marks of a large trace cost minutes
    try:
        return yaml.compose(text, Loader=yaml.CSafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None  # tabs and lone surrogates are legal JSON but not YAML: no line, keep the data


def _child(node: yaml.Node | None, key: int | str) -> tuple[yaml.Mark, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == str(key):
                return name.start_mark, value
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        return node.value[key].start_mark, node.value[key]
    return None


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """The text of a UTF-8 file of at most `limit` bytes.

    Raises:
        RlhfsimError: missing, unreadable, a directory, not UTF-8, or larger than `limit`.
    """
    place = Place(file=str(path))
    try:
        return read_bytes(path, limit).decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise _unreadable("not a UTF-8 text file", place) from error


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """The content of a regular file of at most `limit` bytes; a pipe or a device is not waited for.

    Raises:
        RlhfsimError: missing, unreadable, no regular file, or larger than `limit`.
    """
    place = Place(file=str(path))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(mode := state.st_mode):
                raise _unreadable("is a directory" if stat.S_ISDIR(mode) else "not a regular file", place)
            content = file.read(limit + 1) if state.st_size <= limit else None
    except RlhfsimError:
        raise
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or "").lower() or "not a path"
        raise _unreadable(reason, place) from error
    if content is None or len(content) > limit:
        raise RlhfsimError(
            "file-too-large",
            f"file is larger than {limit // 2**20} MiB",
            place=place,
            help="give the specification itself, not weights or data",
        )
    return content


def _unreadable(reason: str, place: Place) -> RlhfsimError:
    return RlhfsimError(
        "unreadable-file",
        f"cannot read the file: {reason}",
        place=place,
        help="check the path and its permissions",
    )


def _check_events(text: str, name: str, *, aliases: bool) -> bool:
    """Whether there are aliases, which expand to `MAX_VALUES` at most where they may be; no deep nesting."""
    deep = text.count("[") + text.count("{") > MAX_DEPTH or _MAYBE_DEEP.search(text)
    if not deep and not _MAYBE_ALIAS.search(text):  # the scan for events costs as much as loading
        return False
    aliased, values, within = False, dict[str, int](), [("", 0)]
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        place = Place(file=name, line=event.start_mark.line + 1 if event.start_mark else None)
        match event:
            case yaml.CollectionStartEvent():
                within.append((event.anchor or "", 1))
                if len(within) > MAX_DEPTH + 1:
                    raise _too_deep(place)
                continue
            case yaml.CollectionEndEvent():
                anchor, count = within.pop()
            case yaml.ScalarEvent():
                anchor, count = event.anchor or "", 1
            case yaml.AliasEvent():  # one inside of what it names is never known
                aliased, anchor, count = True, "", values.get(event.anchor or "", MAX_VALUES)
            case _:
                continue
        values[anchor] = count
        within[-1] = within[-1][0], within[-1][1] + count
        if aliased and (not aliases or within[-1][1] > MAX_VALUES):
            raise RlhfsimError(
                "yaml-alias",
                f"YAML aliases stand for more than {MAX_VALUES:,} values"
                if aliases
                else "YAML aliases are not accepted",
                place=place,
                help="write the value out",
            )
    return aliased


def _too_deep(place: Place) -> RlhfsimError:
    return RlhfsimError(
        "nested-too-deep",
        f"nested more than {MAX_DEPTH} levels deep",
        place=place,
        help="is the file damaged?",
    )


def _checked_text(source: Source) -> Source:
    """No text holds characters that drive a terminal: names are shown as they are."""
    if _MAYBE_CONTROL.search(source.text):
        for path, text in _texts(source.data, ()):
            if bad := _CONTROLS.search(text):
                raise RlhfsimError(
                    "control-character",
                    f"a text holds the control character {bad[0]!r}",
                    place=source.place(path),
                    help="remove it",
                )
    return source


def _texts(data: Any, path: Trail) -> Iterator[tuple[Trail, str]]:
    if isinstance(data, str):
        yield path, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _texts(key, path)
            yield from _texts(value, (*path, key))
    elif isinstance(data, list | set | tuple):
        for i, value in enumerate(data):
            yield from _texts(value, (*path, i))


def parse_yaml(text: str, name: str, *, aliases: bool = False) -> Source:
    """A YAML (or JSON) document; aliases are refused (they can explode), or expand to `MAX_VALUES` at most.

    Where there are some, a key that is given twice is not refused.
    """
    try:
        aliased = _check_events(text, name, aliases=aliases)
        data = yaml.load(text, Loader=yaml.CSafeLoader if aliased else _Loader)
    except RlhfsimError:  # a ValueError too
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = Place(
            file=name, line=mark.line + 1 if mark else None, column=mark.column + 1 if mark else None
        )
        raise RlhfsimError(
            "malformed-yaml",
            f"not valid YAML: {error.problem}",
            place=place,
            help="fix the syntax at this place",
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        raise RlhfsimError(
            "malformed-yaml",
            "not valid YAML",
            place=Place(file=name),
            help="check for control characters, bad dates and deep nesting",
        ) from error
    return _checked_text(Source(name, text, data))


def parse_json(text: str, name: str) -> Source:
    """A JSON document with marks.

    Raises:
        RlhfsimError: malformed, with line and column; a key that is given twice; deep nesting.
    """
    _check_depth(text, name)
    twice: list[str] = []

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) != len(pairs):
            names = [key for key, _ in pairs]
            twice.append(next(key for key in names if names.count(key) > 1))
        return data

    try:
        data = json.loads(text, object_pairs_hook=mapping)
    except json.JSONDecodeError as error:
        place = Place(file=name, line=error.lineno, column=error.colno)
        raise RlhfsimError(
            "malformed-json",
            f"not valid JSON: {error.msg.lower()}",
            place=place,
            help="is the file truncated?",
        ) from error
    except (RecursionError, ValueError) as error:
        raise RlhfsimError(
            "malformed-json",
            "not valid JSON",
            place=Place(file=name),
            help="the nesting or a number is absurd",
        ) from error
    if twice:
        second = list(re.finditer(rf"{re.escape(json.dumps(twice[0]))}\s*:", text))[-1]
        raise RlhfsimError(
            "key-twice",
            f"key {twice[0][:40]!r} is given twice",
            place=Place(file=name, line=text.count("\n", 0, second.start()) + 1),
            help="keep one of them",
        )
    return _checked_text(Source(name, text, data))


def _check_depth(text: str, name: str) -> None:
    """Depth of a document small enough for its brackets to be counted; large ones are checked by type."""
    if len(text) > MAX_BYTES or text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > MAX_DEPTH:
            raise _too_deep(Place(file=name))


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """The adapter that reads and writes a kind of data, built once: that takes longer than to use it."""
    return TypeAdapter(kind)


def convert(kind: type[T], source: Source, data: Any = None, path: Trail = ()) -> T:
    """`data` (default: the whole source) as an instance of `kind`.

    Raises:
        RlhfsimError: the first thing wrong, with its place in the file, the rule and a remedy.
    """
    given = source.data if data is None else data
    try:
        value: T = adapter(cast(Hashable, kind)).validate_python(given)
    except ValidationError as error:
        raise _first(error, kind, source, path) from error
    for where, truth in _taken_as_numbers(given, value, path):
        raise RlhfsimError(
            "bad-value",
            f"{'.'.join(map(str, where))!r}: a truth value is no number, got {truth}",
            place=source.place(where),
            help="give a number",
        )
    return value


def _taken_as_numbers(given: Any, value: Any, path: Trail) -> Iterator[tuple[Trail, bool]]:
    """Truth values of a document that became numbers."""
    value = getattr(value, "keyed", value)
    if isinstance(given, bool):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield path, given
    elif isinstance(given, Mapping):
        for key, inner in given.items():
            if isinstance(inner, bool | Mapping | list):
                below = value.get(key) if isinstance(value, Mapping) else getattr(value, str(key), None)
                yield from _taken_as_numbers(inner, below, (*path, key))
    elif isinstance(given, list) and isinstance(value, list | tuple):
        for i, (inner, below) in enumerate(zip(given, value, strict=False)):
            if isinstance(inner, bool | Mapping | list):
                yield from _taken_as_numbers(inner, below, (*path, i))


_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")


def _first(error: ValidationError, kind: Any, source: Source, path: Trail) -> RlhfsimError:
    details = error.errors(include_url=False)
    detail = next((e for e in details if e["type"] in _UNKNOWN_KEY), details[0])  # a typo comes first
    where = path + tuple(part for part in detail["loc"])
    place = source.place(where)
    cause = (detail.get("ctx") or {}).get("error")
    if isinstance(cause, RlhfsimError):
        return cause.at(place)
    name = ".".join(map(str, where)) or "document"
    if detail["type"] in _UNKNOWN_KEY:
        return RlhfsimError("unknown-key", f"unknown key {name!r}", place=place, help=remedy(kind, where))
    if detail["type"].startswith("missing"):
        return RlhfsimError("missing-key", f"{name!r} is missing", place=place, help="add it")
    message = detail["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    return RlhfsimError(
        "bad-value",
        f"{name!r}: {message}, got {_shown(detail.get('input'))}",
        place=place,
        help="see the field's rule in docs/",
    )


_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxlong = _BRIEF.maxother = 60


def _shown(value: object) -> str:
    text = _BRIEF.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def load(kind: type[T], path: Path, prepare: Callable[[Any], Any] | None = None) -> T:
    """A YAML or JSON file as an instance of `kind`; `prepare` may rewrite the raw mapping first."""
    text = read_text(path)
    source = parse_json(text, str(path)) if path.suffix == ".json" else parse_yaml(text, str(path))
    if not isinstance(source.data, Mapping):
        raise RlhfsimError(
            "not-a-mapping", "the file must hold one mapping of keys to values", place=source.place()
        )
    return convert(kind, source, prepare(source.data) if prepare else source.data)
