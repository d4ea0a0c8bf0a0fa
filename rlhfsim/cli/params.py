"""Types of option values: a bad one becomes an error that names the option, the value and the rule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from rlhfsim import units
from rlhfsim.errors import Place, RlhfsimError, unknown_name

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic for the type checker only (click < 8.2)

COMMAND_LINE = Place(file="command line")


def bad_option(message: str, help: str) -> RlhfsimError:
    """An error about a value on the command line."""
    return RlhfsimError("bad-option", message, place=COMMAND_LINE, help=help)


def _option(param: click.Parameter | None) -> str:
    return param.opts[0] if param and param.opts else "value"


class Whole(ParamType):
    """A whole number in a range; thousands may be written 1,024 or 1_024."""

    name = "N"

    def __init__(self, low: int, high: int) -> None:
        """Both ends count."""
        self.low, self.high = low, high

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number, or the error of `read`."""
        return self.read(str(value), _option(param))

    def read(self, value: str, option: str) -> int:
        """The number.

        Raises:
            RlhfsimError: no whole number, or outside the range.
        """
        rule = f"give a whole number from {self.low:,} to {self.high:,}"
        text = value.strip()
        digits = text.removeprefix("-").replace(",", "").replace("_", "")
        if not (digits.isascii() and digits.isdecimal()) or len(digits) > 30:
            raise bad_option(f"{option}: {text[:40]!r} is not a whole number", rule)
        number = -int(digits) if text.startswith("-") else int(digits)
        if not self.low <= number <= self.high:
            raise bad_option(f"{option}: {number:,} is out of range", rule)
        return number


class Number(ParamType):
    """A quantity in a range, in base units; text may carry a unit of its dimension."""

    name = "X"

    def __init__(self, low: float, high: float, dimension: units.Dimension = "1") -> None:
        """Both ends count."""
        self.low, self.high, self.dimension = low, high, dimension

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number.

        Raises:
            RlhfsimError: no number, not finite, another unit, or outside the range.
        """
        rule = f"give a number from {self.low:,g} to {self.high:,g}"
        try:
            number = units.parse(str(value), self.dimension)
        except RlhfsimError as error:
            raise bad_option(f"{_option(param)}: {error.message}", rule) from error
        if not (math.isfinite(number) and self.low <= number <= self.high):
            raise bad_option(f"{_option(param)}: {str(value)[:40]} is out of range", rule)
        return number


class OneOf(ParamType):
    """A name of a closed list."""

    name = "NAME"

    def __init__(self, kind: str, names: Iterable[str]) -> None:
        """`kind` says in errors what the names are."""
        self.kind, self.names = kind, tuple(names)

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name, or the error of `read`."""
        return self.read(str(value))

    def read(self, value: str) -> str:
        """The name in its own spelling.

        Raises:
            RlhfsimError: not in the list, with the nearest ones.
        """
        text = value.strip().lower()
        if text not in self.names:
            raise unknown_name(self.kind, value[:40], self.names, place=COMMAND_LINE)
        return text

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Names that begin so."""
        return [CompletionItem(n) for n in self.names if n.startswith(incomplete.lower())]


class Several(OneOf):
    """Names of a closed list, separated by commas."""

    name = "NAME,..."

    def convert(  # type: ignore[override]  # a set where the single choice gives one name
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> frozenset[str]:
        """The names as a set.

        Raises:
            RlhfsimError: one that is not in the list.
        """
        if isinstance(value, frozenset):
            return value
        items = [item for item in str(value).split(",") if item.strip()]
        return frozenset(self.read(item) for item in items)
