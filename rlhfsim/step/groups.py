"""How biased and how far off predictions are, by group of what was predicted, from publishers left out.

    P50 = s e^c                    c: sum of the centres of a question's groups, from wide to narrow
    P10 = P50 e^-u, P90 = P50 e^u'     u^2 = (k w)^2 + (z_90 doubt)^2

w is the side of the interval that coefficients and discrepancy give (`step.measured`), k the product of the
widths of the groups, `doubt` the deviation of c. A group that no row had takes those of the wider ones.
`groups.csv` is estimated by `lab.scoreboard.group_law` and written by `python -m lab.fits.discrepancy`.

Memory has no groups: components' own intervals hold its peaks. Phases are widened, not centred: the bias is
one of whole steps, and medians of published phases lie on both sides of what is predicted (docs/planners.md).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import NamedTuple

from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Z90
from rlhfsim.step.measured import Conditions

FILE = "groups.csv"
LEVELS = ("kind", "model_kind", "dispatcher", "kernels", "gpu")
"""Fields of `Conditions` that name groups, from wide to narrow."""
Group = tuple[str, str]
"""A level and the word that rows of the group have there."""


class Estimate(NamedTuple):
    """A number with P10 and P90 of it."""

    value: float
    low: float
    high: float


@frozen
class Effect:
    """What a group adds to the wider ones."""

    rows: int
    publishers: int
    centre: Estimate
    """ln of the median of true over predicted, shrunk to 0."""
    width: Estimate
    """Factor on the width of the interval, shrunk to 1."""


@frozen
class GroupLaw:
    """Centres and widths of one kind of prediction."""

    doubt: float
    """Standard deviation of the centre, ln."""
    effects: Mapping[Group, Effect]

    def centre(self, conditions: Conditions) -> float:
        """ln of P50 over the prediction."""
        return math.fsum(e.centre.value for e in self._of(conditions))

    def quantiles(
        self, value: float, low: float, high: float, conditions: Conditions
    ) -> tuple[float, float, float]:
        """P10, P50 and P90 of what is predicted as `value`, `low` and `high` with the model's discrepancy."""
        factor = math.prod(e.width.value for e in self._of(conditions))
        middle, doubt = value * math.exp(self.centre(conditions)), Z90 * self.doubt
        down = math.log(value / min(value, low)) if low > 0 else math.inf
        up = math.log(max(high, value) / value)
        return (
            middle * math.exp(-math.hypot(factor * down, doubt)),
            middle,
            middle * math.exp(math.hypot(factor * up, doubt)),
        )

    def _of(self, conditions: Conditions) -> list[Effect]:
        return [self.effects[g] for g in groups_of(conditions) if g in self.effects]


def groups_of(conditions: Conditions) -> tuple[Group, ...]:
    """The groups of a question, from wide to narrow; where no experts are sent, no dispatcher is a group."""
    named = ((level, str(getattr(conditions, level))) for level in LEVELS)
    return tuple(group for group in named if group != ("dispatcher", "none"))


# --- the file -------------------------------------------------------------------------------------


@cache
def laws() -> Mapping[str, GroupLaw]:
    """Kind -> the law that ships; a kind without one has intervals of its own."""
    text = (resources.files("rlhfsim.step") / FILE).read_text(encoding="utf-8")
    effects: dict[str, dict[Group, Effect]] = {}
    doubts: dict[str, float] = {}
    for row in csv.DictReader(io.StringIO(text)):
        kind = row["kind"]
        effects.setdefault(kind, {})[row["level"], row["group"]] = Effect(
            rows=int(row["rows"]),
            publishers=int(row["publishers"]),
            centre=_read(row, "centre"),
            width=_read(row, "width"),
        )
        doubts[kind] = float(row["doubt"])
    return {kind: GroupLaw(doubt=doubts[kind], effects=found) for kind, found in effects.items()}


def _read(row: Mapping[str, str], name: str) -> Estimate:
    return Estimate(*(float(row[f"{name}{end}"]) for end in ("", "_low", "_high")))
