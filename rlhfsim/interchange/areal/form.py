"""Settings by dotted key as one nested YAML file, each below its reason."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rlhfsim.interchange.export import Setting, Value, Written


def nested(written: Written) -> str:
    """The file; keys are written in the order in which their first part is met."""
    settings = [setting for section in written.sections for setting in section.settings]
    return "\n".join(_lines([(setting.key.split("."), setting) for setting in settings], 0)) + "\n"


def _lines(rows: list[tuple[list[str], Setting]], depth: int) -> Iterator[str]:
    space = "  " * depth
    for name in dict.fromkeys(parts[0] for parts, _ in rows):
        group = [(parts[1:], setting) for parts, setting in rows if parts[0] == name]
        parts, setting = group[0]
        if parts:
            yield f"{space}{name}:"
            yield from _lines(group, depth + 1)
            continue
        if setting.why:
            yield f"{space}# {setting.why}"
        yield f"{space}{name}: {scalar(setting.value)}"


def scalar(value: Value) -> str:
    """A value as YAML reads it back; lists are written as they are."""
    return value if isinstance(value, str) and value.startswith("[") else json.dumps(value)
