"""What a key that nobody knows may have meant: the nearest names, else those of its section."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_type_hints

FEW = 12
"""Names of a section up to which all are listed next to the nearest ones, which may be the wrong ones."""


def remedy(kind: Any, trail: Sequence[int | str]) -> str:
    """The help for an unknown key at `trail` in a document of type `kind`."""
    *sections, key = map(str, trail)
    known = {f.name for at in _at(kind, sections) for f in fields(at)}
    near = get_close_matches(key, sorted(known), n=3, cutoff=0.5)
    first = f"did you mean {', '.join(near)}" if near else "remove it"
    if near and len(known) > FEW:
        return first
    where = f" in {'.'.join(sections)}" if sections else ""
    return first + (f"; known{where}: {', '.join(sorted(known))}" if known else "")


def _at(kind: Any, sections: Sequence[str]) -> list[Any]:
    """The dataclasses that may be there; of a union's name (pydantic puts it in a place), the same."""
    kinds = list(_dataclasses(kind))
    for name in sections:
        hints = [get_type_hints(k).get(name) for k in kinds]
        kinds = [inner for hint in hints for inner in _dataclasses(hint)] or kinds
    return kinds


def _dataclasses(kind: Any) -> Iterator[Any]:
    if isinstance(kind, type) and is_dataclass(kind):  # not what Annotated adds, which may be one too
        yield getattr(kind, "in_files", lambda: kind)()
    for inner in get_args(kind):
        yield from _dataclasses(inner)
