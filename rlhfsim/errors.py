"""Errors meant for people: what is wrong, where, the rule, the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

_DRIVES = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters but tab and line end, marks that reorder a line, halves of characters."""
MAX_LINE = 1500
"""Characters of a line of an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in a user's file (or command line) the bad value is."""

    file: str
    """Path as the user gave it, or `command line`."""
    line: int | None = None
    """1-based line."""
    column: int | None = None
    """1-based column."""
    text: str | None = None
    """The line itself, shown under the message."""

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.file, self.line, self.column) if part)


class RlhfsimError(ValueError):
    """Bad input, told to a person; the CLI prints it and exits with code 2.

    A `ValueError`, so that a check inside a pydantic validator keeps its place in the file.
    """

    def __init__(
        self, code: str, message: str, place: Place | Path | str | None = None, help: str | None = None
    ) -> None:
        """`code` is a stable kebab-case name, `message` a lower-case sentence without full stop, `place` may
        be a file as a whole."""
        super().__init__(code, message, place, help)  # SimPy and pickle build it again from `args`
        self.code = code
        self.message = message
        self.place = Place(file=str(place)) if isinstance(place, Path | str) else place
        self.help = help

    def at(self, place: Place) -> RlhfsimError:
        """The same error with a place, unless it has one already."""
        return self if self.place else RlhfsimError(self.code, self.message, place=place, help=self.help)

    def with_help(self, help: str) -> RlhfsimError:
        """The same error with another remedy."""
        return RlhfsimError(self.code, self.message, place=self.place, help=help)

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {self.message}"]
        if self.place:
            lines.append(f"  --> {self.place}")
            if self.place.text is not None and self.place.line:
                prefix = f"{self.place.line} | "
                lines.append(prefix + self.place.text.rstrip()[:100])
                if self.place.column and self.place.column <= 100:
                    lines.append(" " * (len(prefix) + self.place.column - 1) + "^")
        if self.help:
            lines.append(f"help: {self.help}")
        return "\n".join(map(_plain, lines))


def shown(text: str) -> str:
    """Text that may go to a terminal: what drives one, reorders a line or is half a character escaped."""
    return _DRIVES.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _plain(line: str) -> str:
    """A line of an error: as shown, in one line, and without its middle if long."""
    text = shown(line).replace("\n", "\\n").replace("\t", "\\t")
    return text if len(text) <= MAX_LINE else f"{text[: MAX_LINE - 60]} ... {text[-50:]}"


def unknown_name(kind: str, name: str, known: Iterable[str], *, place: Place | None = None) -> RlhfsimError:
    """An error for a name that is not in a closed list, with the nearest known ones as remedy."""
    names = sorted(known)
    near = get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    listed = ", ".join(near) if near else ", ".join(names[:40]) + (", ..." if len(names) > 40 else "")
    remedy = f"did you mean {listed}" if near else f"known: {listed}"
    return RlhfsimError(
        f"unknown-{kind.replace(' ', '-')}", f"unknown {kind} {name!r}", place=place, help=remedy
    )
