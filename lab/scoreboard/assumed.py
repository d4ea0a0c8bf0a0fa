"""Whether assumptions.yaml holds entries: exact keys, known columns, a source each, no id twice in a section."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.specs.loading import Source, parse_yaml
from rlhfsim.validation.assumptions import TABLE_OF
from rlhfsim.validation.rows import TABLES

_KEYS = {"id", "match", "set", "source"}


def check(text: str, name: str) -> None:
    """Refuse what is no file of assumptions.

    Raises:
        RlhfsimError: unknown section, key or column, a missing source, or an id that is given twice.
    """
    source = parse_yaml(text, name)
    if not isinstance(source.data, dict):
        raise RlhfsimError("not-a-mapping", "the file must map kinds to lists", place=source.place())
    for kind in source.data.keys() - TABLE_OF.keys():
        raise unknown_name("kind", str(kind), TABLE_OF, place=source.place((kind,)))
    for kind in TABLE_OF:
        _section(kind, source.data.get(kind) or [], source)


def _section(kind: str, data: Sequence[Any], source: Source) -> None:
    for i, entry in enumerate(data):
        _entry(kind, entry, source, (kind, i))
    ids = [str(entry["id"]) for entry in data]
    for i, name in enumerate(ids):
        if name in ids[:i]:
            raise RlhfsimError(
                "duplicate-assumption",
                f"{kind} has two entries {name!r}",
                place=source.place((kind, i)),
                help="give each its own id",
            )


def _entry(kind: str, data: Any, source: Source, path: tuple[str | int, ...]) -> None:
    if not isinstance(data, dict) or data.keys() != _KEYS or not str(data["source"] or "").strip():
        raise _bad("an entry needs exactly id, match, set and source", source, path)
    table = TABLES[TABLE_OF[kind]]
    for part in ("match", "set"):
        if not isinstance(data[part], dict) or (part == "set" and not data[part]):
            raise _bad(f"{part} must map columns to values", source, path)
        for column in sorted(map(str, data[part].keys() - table.columns)):
            raise unknown_name("column", column, table.columns, place=source.place(path))


def _bad(message: str, source: Source, path: tuple[str | int, ...]) -> RlhfsimError:
    return RlhfsimError("bad-assumption", message, place=source.place(path), help="see docs/validation.md")
