"""Every published step as the calibrator of the others: kind `rlhf.calibrated`, one outcome an ordered pair.

Rows of one framework and release are paired, whatever the model, GPUs and staleness. The calibrator's
measured times settle the doubts of its prediction (`one_run`): phases and the rest of the step
where the row prints them, else the step. The other row is predicted with them. `detail` holds the prediction
without calibration (`COLD`) and with the step's ratio alone (`RATIO`). Nothing here is tuned: tau and the
intervals are those of the profiles and of the fit. Rows that fitted a constant take no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import permutations

from lab.scoreboard.one_run import Timed, seconds, settled
from rlhfsim.kernels.cost import Cost, total
from rlhfsim.step.iteration import Iteration
from rlhfsim.validation import assumptions
from rlhfsim.validation.cases.rlhf import specs_of, staleness_of
from rlhfsim.validation.kinds.rlhf import PHASES, priced, timed_cost, timed_names
from rlhfsim.validation.outcome import Outcome
from rlhfsim.validation.rows import Row

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
    """Outcome of the step."""
    framework: str
    """With its release: `NeMo-RL v0.6`."""
    model: str
    step: Cost
    times: tuple[Timed, ...]
    """What calibrates: phases and rest, or the step."""


def outcomes(rows: Iterable[Row], predicted: Iterable[Outcome]) -> list[Outcome]:
    """Every pair of predicted steps of the rows."""
    where = {(row.file, row.line): row for row in rows}
    steps = [o for o in predicted if o.kind == "rlhf.step" and o.predicted is not None]
    return pairs(published(where[o.file, o.line], o) for o in steps if o.part == "report")


def published(row: Row, outcome: Outcome) -> Published:
    """A predicted step of a row with what of it can calibrate."""
    assert outcome.measured is not None
    row, _ = assumptions.apply("rlhf", row)
    asked = specs_of(row)
    step = priced(asked)
    return Published(
        outcome=outcome,
        framework=row.text("framework") or "",
        model=asked.workload.model,
        step=step.cost,
        times=tuple(_times(row, step, outcome.measured)),
    )


def _times(row: Row, step: Iteration, measured_s: float) -> Iterator[Timed]:
    """Phases that a row prints and what they leave of its step; the step alone without them.

    Rows with stale samples print waits, so only their step counts.
    """
    names: set[str] = set()
    printed = 0.0
    for kind, (column, _) in PHASES.items() if staleness_of(row) == 0 else ():
        cost, cell = timed_cost(row, step, kind), row.text(column) or ""
        if cost.seconds > 0 and cell.replace(".", "", 1).isdigit() and float(cell) > 0:
            names |= set(timed_names(row, kind))
            printed += float(cell)
            yield Timed(cost=cost, measured_s=float(cell))
    chain = (step.phases[i] for i in step.critical)
    rest = total(phase.cost for phase in chain if phase.name not in names)
    if rest.seconds > 0 and measured_s > printed:
        yield Timed(cost=rest, measured_s=measured_s - printed)


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
