"""What a field takes: its range, its unit, its choices and its default, as its annotation says them.

Options of the command line ask here, so that each range is written once, where files are checked by it.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import Field
from pydantic.fields import FieldInfo

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.hardware.hardware import MAX_GPUS
from rlhfsim.specs.quantities import Ratio, Seconds, Unit
from rlhfsim.specs.workload.lengths import MAX_TOKENS
from rlhfsim.units import DAY, Dimension

Lag = Annotated[float, Field(ge=1, le=64)]
"""Most policy versions between generation and training, where that is not 0."""
Risk = Annotated[Ratio, Field(ge=0.001, le=0.3)]
"""Probability of running out of memory that a plan may carry."""
SearchTime = Annotated[Seconds, Field(ge=0.1, le=DAY)]
PoolGpus = Annotated[int, Field(ge=1, le=MAX_GPUS)]
Tokens = Annotated[float, Unit("token"), Field(ge=1, le=MAX_TOKENS)]
"""A mean of prompts or responses."""
Steps = Annotated[int, Field(ge=1, le=1_000_000_000)]
"""Steps of a whole run."""


@frozen
class FieldValues:
    """Values of a field."""

    kind: type
    """`int`, `float` or `str`."""
    low: float | None = None
    """Both ends count; None: no end."""
    high: float | None = None
    dimension: Dimension = "1"
    choices: tuple[str, ...] = ()
    """Empty: any."""
    default: Any = None


def taken_by(owner: type, name: str) -> FieldValues:
    """What a field of a dataclass takes; an end that does not count is refused where its file is checked."""
    default = next(field.default for field in fields(owner) if field.name == name)
    return taken(_hints(owner)[name], None if default is MISSING else default)


@cache
def _hints(owner: type) -> dict[str, Any]:
    return get_type_hints(owner, include_extras=True)


def taken(hint: Any, default: Any = None) -> FieldValues:
    """What an annotated type takes."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if get_origin(kind) is Literal:
        return FieldValues(kind=str, choices=get_args(kind), default=default)
    rules = [rule for mark in marks if isinstance(mark, FieldInfo) for rule in mark.metadata]
    lows = [rule.ge for rule in rules if hasattr(rule, "ge")]
    highs = [rule.le for rule in rules if hasattr(rule, "le")]
    units = [mark.dimension for mark in marks if isinstance(mark, Unit)]
    return FieldValues(
        kind=kind,
        low=max(lows, default=None),
        high=min(highs, default=None),
        dimension=units[0] if units else "1",
        default=default,
    )


def whole(text: str, low: int, high: int, name: str) -> int:
    """The whole number of a text in a range, both ends included; 1,024 and 1_024 are 1024.

    Raises:
        RlhfsimError: another text, or a number outside the range; `name` says of what.
    """
    rule = f"give a whole number from {low:,} to {high:,}"
    digits = text.strip().replace(",", "").replace("_", "")
    unsigned = digits.removeprefix("-")
    if not (unsigned.isascii() and unsigned.isdecimal()) or len(digits) > 30:
        raise RlhfsimError("bad-value", f"{name}: {text.strip()[:40]!r} is not a whole number", help=rule)
    if not low <= (number := int(digits)) <= high:
        raise RlhfsimError("bad-value", f"{name}: {number:,} is out of range", help=rule)
    return number
