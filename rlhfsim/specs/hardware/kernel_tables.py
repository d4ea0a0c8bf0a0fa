"""The `curves` of a profile as they are written in its file: form, shapes and ranges of every table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, WrapValidator

from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.frozen import frozen
from rlhfsim.specs.loading import checked
from rlhfsim.specs.quantities import MAX_MAGNITUDE, Text

AXES: Mapping[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "decode": ("kv_streams", "context", "queries_per_kv", "head_dim"),
    "prefill": ("kv_streams", "length", "queries_per_kv", "head_dim"),
    "mla_decode": ("batch", "context", "heads"),
    "mla_prefill": ("batch", "length", "heads"),
    "moe": ("rows", "experts", "ffn", "hidden", "spread"),
    "collective": ("ranks", "bytes"),
}
"""Coordinates of a table by the first part of its name (`gemm/fp8`)."""
DIGITS = 2
"""Base-36 digits of one loss."""
MAX_KNOT = 1e15
Factor = Annotated[float, Field(gt=0, le=100, strict=True)]
Rate = Annotated[float, Field(ge=1, le=MAX_MAGNITUDE, strict=True)]


@checked
@frozen
class KernelTable:
    """Losses of one kind of kernel at the knots of a grid."""

    source: Text
    interval: tuple[Factor, Factor]
    """P10 and P90 of predicted / measured on shapes that were held out."""
    axes: dict[str, str]
    """Coordinate -> its knots, ascending, separated by blanks."""
    loss: Annotated[str, Field(pattern="^[0-9a-z]*$")]
    """Two base-36 digits a node: 100 ln(t / roofline)."""

    def __post_init__(self) -> None:
        """The interval is in order, and there is a loss for every node."""
        nodes = math.prod(len(_knots(name, text)) for name, text in self.axes.items())
        if not self.interval[0] <= self.interval[1]:
            raise _bad(f"interval {list(self.interval)} is not in order", "give P10, then P90")
        if len(self.loss) != nodes * DIGITS:
            raise _bad(
                f"loss has {len(self.loss)} digits, its axes have {nodes} nodes",
                f"give {DIGITS} digits a node",
            )


@checked
@frozen
class Lender:
    """Another profile whose tables stand in for those that were never measured."""

    name: Annotated[Text, Field(validation_alias="from")]
    reason: str = ""
    widen: Annotated[float, Field(ge=1, le=100, strict=True)] = 1.0
    """Factor on both ends of the intervals."""
    compute: Factor = 1.0
    hbm: Factor = 1.0
    link: Factor = 1.0


@checked
@frozen
class Curves:
    """The whole section."""

    package: str = ""
    fitted_on: str = ""
    loss: str = ""
    peaks: dict[str, Rate] = field(default_factory=dict)
    """Rates of the GPU that was measured, which its rooflines used."""
    tables: dict[str, KernelTable] = field(default_factory=dict)
    borrow: Lender | None = None

    def __post_init__(self) -> None:
        """Tables are of known kinds, over their own coordinates, and have the peaks that they need."""
        for name, table in self.tables.items():
            axes = AXES.get(name.split("/")[0])
            if axes is None:
                raise unknown_name("kernel table", name[:60], AXES)
            if tuple(table.axes) != axes:
                raise _bad(f"table {name!r} has the axes {', '.join(table.axes)}", f"give {', '.join(axes)}")
        if self.tables and not {"bf16", "fp16", "fp32"} & set(self.peaks):
            raise _bad("peaks holds none of bf16, fp16, fp32", "give the rates of the GPU that was measured")


def _knots(name: str, text: str) -> list[float]:
    """Coordinates of an axis.

    Raises:
        RlhfsimError: fewer than two, not ascending, or out of range.
    """
    try:
        knots = [float(word) for word in text.split()]
    except ValueError:
        knots = []
    least = 2.0 if name == "ranks" else 0.0
    ascending = all(low < high for low, high in pairwise(knots))
    if len(knots) < 2 or not ascending or not (least <= knots[0] and knots[0] > 0 and knots[-1] <= MAX_KNOT):
        raise _bad(
            f"axis {name!r} is no ascending list of numbers",
            f"give two or more, ascending, {'from 2' if least else 'above 0'} to {MAX_KNOT:g}",
        )
    return knots


def _bad(message: str, help: str) -> RlhfsimError:
    return RlhfsimError("bad-curves", message, help=help)


def _as_given(value: Any, check: Callable[[Any], Any]) -> Any:
    """The section itself, which is hashed and written as it is, once it is checked."""
    check(value)
    return value


if TYPE_CHECKING:
    CurvesText = Mapping[str, Any]
else:
    CurvesText = Annotated[Curves, WrapValidator(_as_given)]
"""The section as it is written in a file."""
