"""Every published step as the calibrator of the others: kind `rlhf.calibrated`, one outcome an ordered pair.

Rows of one framework and release are paired, whatever the model, GPUs and staleness. The calibrator's
measured times settle the doubts of its prediction (`calibration.one_run`): phases and the rest of the step
where the row prints them, else the step. The other row is predicted with them. `detail` holds the prediction
without calibration (`COLD`) and with the step's ratio alone (`RATIO`). Nothing here is tuned: tau and the
intervals are those of the profiles and of the fit. Rows that fitted a constant take no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import permutations

from rlhfsim.calibration.one_run import Timed, seconds, settled
from rlhfsim.kernels.cost import Cost
from rlhfsim.validation.outcome import Outcome

KIND = "rlhf.calibrated"
COLD, RATIO, SAME = "cold_s", "ratio_s", "same_model"
"""Keys of an outcome's detail: the prediction before, that by one factor, and
whether the models are one (1 or 0)."""
FRAMEWORKS = ("NeMo-RL", "verl")
"""Whose rows are paired: those that publish several of one release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A row with a measured step and its prediction."""

    outcome: Outcome
    """Of the step."""
    framework: str
    """With its release: `NeMo-RL v0.6`."""
    model: str
    step: Cost
    times: tuple[Timed, ...]
    """What calibrates: phases and rest, or the step."""


def pairs(rows: Iterable[Published]) -> list[Outcome]:
    """Every ordered pair of rows of one framework and release."""
    groups: dict[str, list[Published]] = {}
    for row in rows:
        if row.framework.startswith(FRAMEWORKS) and row.outcome.part == "report":
            groups.setdefault(row.framework, []).append(row)
    return [outcome for group in groups.values() for outcome in _pairs(group)]


def _pairs(group: list[Published]) -> Iterator[Outcome]:
    doubts = {id(row): settled(row.times) for row in group}
    for one, other in permutations(group, 2):
        cold, measured = other.step.seconds, one.outcome.measured
        assert measured is not None
        detail: dict[str, float | str] = {
            COLD: cold,
            RATIO: cold * measured / one.step.seconds,
            SAME: float(one.model == other.model),
            "calibrated_on": f"{one.outcome.file}:{one.outcome.line}",
        }
        yield Outcome(
            kind=KIND,
            file=other.outcome.file,
            line=other.outcome.line,
            source=other.outcome.source,
            label=f"{other.outcome.label}, calibrated on line {one.outcome.line}",
            measured=other.outcome.measured,
            predicted=seconds(other.step, doubts[id(one)]),
            assumptions=other.outcome.assumptions,
            detail=detail,
        )
