"""A launch script or a YAML configuration with other values of keys: all else stays as it was written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rlhfsim.errors import RlhfsimError

_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s\\\"']+)"
INDENT = "  "


def edited_script(text: str, keys: Mapping[str, Any], entries: Sequence[str]) -> str:
    """A shell script: values are replaced where they are, new keys follow the entry point.

    Raises:
        RlhfsimError: there is no entry point after which new keys could be written.
    """
    lines, new = text.split("\n"), list[str]()
    for key, value in keys.items():
        word = _word(key)
        found = [i for i, line in enumerate(lines) if line.lstrip()[:1] != "#" and word.search(line)]
        for i in found:
            lines[i] = word.sub(partial(_replaced, value=value), lines[i])
        if not found and (said := _said(key, value)):
            new.append(said)
    return _added("\n".join(_whole(lines)), new, entries)


def _word(key: str) -> re.Pattern[str]:
    """A key with its value as words of a command: `+a.b=1`, `--a 1`, `--a=1`, `--a`."""
    sign, name = ("--", key[2:]) if key.startswith("--") else (r"\+{0,2}", key.lstrip("+"))
    spelled = re.sub(r"[-_]", "[-_]", re.escape(name).replace(r"\-", "-"))
    value = rf"(?:(?:=|[ \t]+)(?!-){_VALUE})?" if sign == "--" else rf"={_VALUE}"
    return re.compile(rf"(?<![\w.+-])(?P<key>{sign}{spelled}){value}(?![\w.-])")


def _said(key: str, value: Any) -> str:
    """A key with its value; a switch without one, and nothing where it is left out."""
    if not key.startswith("--"):
        return f"{key}={'null' if value is None else value}"
    if value is None or value is False:
        return ""
    return key if value is True else f"{key} {value}"


def _replaced(match: re.Match[str], value: Any) -> str:
    return _said(match["key"], value)


def _whole(lines: Sequence[str]) -> Iterator[str]:
    """Lines of a command without those of which a switch that was left out was all."""
    yield from (line for line in lines if line.strip() != "\\")


def _added(text: str, new: Sequence[str], entries: Sequence[str]) -> str:
    """With new arguments behind the entry point, on lines of their own where the command has such."""
    if not new:
        return text
    starts = (match for entry in entries for match in re.finditer(rf"(?m)^[^#\n]*?(?:{entry})\S*", text))
    place = next(starts, None)
    if place is None:
        raise RlhfsimError(
            "fix-without-entry-point",
            f"no entry point of the framework after which {', '.join(new)} could be written",
            help="give the YAML file that the script names, or add these arguments by hand",
        )
    at = place.end()
    end = text.find("\n", at) if "\n" in text[at:] else len(text)
    if text[at:end].strip() == "\\":
        return text[:end] + "".join(f"\n    {said} \\" for said in new) + text[end:]
    return text[:at] + "".join(f" {said}" for said in new) + text[at:]


def edited_yaml(text: str, keys: Mapping[str, Any]) -> str:
    """A YAML file: values are replaced where they are, new keys follow the group that they belong to."""
    lines = text.rstrip("\n").split("\n")
    for key, value in keys.items():
        names = key.lstrip("+-").split(".")
        place, depth = _deepest(lines, names)
        written = json.dumps(value) if not isinstance(value, str) else value
        if depth == len(names):
            head = lines[place][: lines[place].index(":") + 1]
            lines[place] = f"{head} {written}"
            continue
        outer = "" if place < 0 else _space(lines[place]) + INDENT
        rest = names[depth:]
        block = [f"{outer}{INDENT * i}{name}:" for i, name in enumerate(rest)]
        block[-1] += f" {written}"
        lines[place + 1 : place + 1] = block
    return "\n".join(lines) + "\n"


def _deepest(lines: Sequence[str], names: Sequence[str]) -> tuple[int, int]:
    """(line, names) of the deepest part of a key that the file has; (-1, 0) where it has none."""
    best, above = (-1, 0), list[tuple[int, str]]()
    for i, line in enumerate(lines):
        match = re.match(r"( *)([\w.-]+):(?:\s|$)", line)
        if match is None:
            continue
        depth = len(match[1])
        above = [*(pair for pair in above if pair[0] < depth), (depth, match[2])]
        path = [name for _, name in above]
        if path == list(names[: len(path)]) and len(path) > best[1]:
            best = (i, len(path))
    return best


def _space(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]
