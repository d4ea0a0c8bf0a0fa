"""Numbers as they are written in files: with unit, interval and source."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlhfsim import units
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.loading import checked


class Unit(BeforeValidator):
    """Numbers of a dimension, which text may say with a unit."""

    dimension: units.Dimension

    def __init__(self, dimension: units.Dimension) -> None:
        """In base units of `dimension`."""
        super().__init__(lambda value: units.parse(value, dimension))
        object.__setattr__(self, "dimension", dimension)


Bytes = Annotated[float, Unit("byte"), Field(ge=0)]
BytesPerSecond = Annotated[float, Unit("byte/s"), Field(ge=0)]
FlopPerSecond = Annotated[float, Unit("flop/s"), Field(ge=0)]
Seconds = Annotated[float, Unit("s"), Field(ge=0)]
Watts = Annotated[float, Unit("W"), Field(ge=0, le=1e7)]
UsdPerHour = Annotated[float, Unit("usd/h"), Field(ge=0, le=10_000)]
Ratio = Annotated[float, Unit("1"), Field(ge=0)]

MAX_MAGNITUDE = 1e24
"""Larger numbers are slips, and their products would overflow."""
Amount = Annotated[float, Field(ge=0, le=MAX_MAGNITUDE)]
"""Seconds, bytes, dollars, tokens: none is negative or absurd."""
Finite = Annotated[float, Field(ge=-MAX_MAGNITUDE, le=MAX_MAGNITUDE)]
AboveZero = Annotated[float, Field(ge=1e-9, le=MAX_MAGNITUDE)]
"""What a logarithm is taken of, or what is divided by; smaller ones are slips."""
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Field(ge=1e6, le=MAX_MAGNITUDE)
"""What is divided by; below a million bytes or FLOP (a second) the unit was forgotten: 3350 for 3350 GB/s."""
Text = Annotated[str, Field(min_length=1, max_length=2000)]
"""Words that must be there, such as a source."""

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]
"""Number formats of matrix products; `fp8` and `fp4` cover every scaling recipe."""
BYTES_PER_ELEMENT: dict[str, float] = {
    **{"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "fp4": 0.5},
    "mxfp4": 0.5 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}
"""Storage of one element; of block formats MXFP4 (8 bits for 32) and NVFP4 (for 16) are with their scales."""


@checked
@frozen
class Bandwidth:
    """A datasheet rate with its source."""

    value: Annotated[BytesPerSecond, Positive]
    """Per GPU (or per node where the field says so), one direction, byte/s."""
    source: Text


@checked
@frozen
class Capacity:
    """A datasheet size with its source."""

    value: Annotated[Bytes, Positive]
    source: Text


@checked
@frozen
class Peak:
    """A datasheet compute rate with its source."""

    value: Annotated[FlopPerSecond, Positive]
    """Dense, without structured sparsity."""
    source: Text


def _base_units(value: object) -> object:
    return units.parse_any(value)[0] if isinstance(value, str) else value


Number = Annotated[float, BeforeValidator(_base_units), Field(ge=0, le=MAX_MAGNITUDE)]
"""A non-negative number in base units; text may carry a unit of any dimension (`1.5 us`, `10 GB/s`)."""


@checked
@frozen
class Coefficient:
    """An empirical number: value, interval and source; the unit of calibration.

    `low` and `high` are the 10th and 90th percentile of what we believe.
    """

    value: Number
    """In base units of `dimension`."""
    low: Number
    high: Number
    source: Text
    dimension: units.Dimension = "1"
    """What is measured; in files the units of the three numbers say it."""

    def __post_init__(self) -> None:
        """Check that the interval holds the value."""
        if not self.low <= self.value <= self.high:
            raise RlhfsimError(
                "interval-without-value",
                f"interval [{self.low}, {self.high}] does not hold the value {self.value}",
                help="give low <= value <= high",
            )


def _with_dimension(data: object) -> object:
    """The dimension, read from the units of the three numbers, which must agree."""
    if not isinstance(data, Mapping) or "dimension" in data:
        return data
    dimensions = set()
    for key in ("value", "low", "high"):
        if isinstance(data.get(key), str):
            with suppress(RlhfsimError):  # the field itself reports a bad number, with its place
                dimensions.add(units.parse_any(data[key])[1])
    if len(dimensions) > 1:
        raise RlhfsimError(
            "mixed-units",
            f"value, low and high have different units: {', '.join(sorted(dimensions))}",
            help="give all three in one unit",
        )
    return {**data, "dimension": dimensions.pop()} if dimensions else data


CoefficientText = Annotated[Coefficient, BeforeValidator(_with_dimension)]
"""A coefficient as it is written in a file."""
