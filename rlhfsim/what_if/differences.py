"""What differs between two plans, two runs, or a plan and a run: only what changed.

    question    workload, models, hardware, run    what was asked
    choice      architecture, layouts, schedule     what was chosen
    outcome     seconds, money, energy, memory      what was predicted, or measured where a side is a run

Not known here: whether one outcome is surely better than another. Two intervals that overlap say nothing
about two plans that share their doubts (`rlhfsim design` cancels those).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from math import isclose
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from rlhfsim.calibration.observation import Observation, read_run
from rlhfsim.frozen import frozen
from rlhfsim.plan import AskedRun, Plan, Quantiles, read_plan
from rlhfsim.units import Dimension
from rlhfsim.verdict import limit_text
from rlhfsim.what_if.work import By, StepWork, work_of

Leaf = str | float | bool | None
DERIVED = frozenset({"shape_hash", "params", "active_params"})
"""Fields that follow from others of the plan: the others are shown."""
LABELS = ("role", "name")
"""Fields by which items of a list are told apart."""
LEAST = 0.005
"""Relative change below which two outcomes count as equal: less than half a per cent; of probabilities the
difference itself."""
RUN, RENT = "run", "price of the run"
"""Figures of the whole run, which a plan has where it was asked for one."""
SHARES = (10, 90)
"""Percentiles of measured steps."""


@frozen
class Value:
    """One figure of an outcome, SI units."""

    value: float
    unit: Dimension
    likelihood: bool = False
    """Whether it is a probability."""
    interval: tuple[float, float] | None = None
    """P10 and P90: of the prediction, or over the counted steps of a run."""

    def scaled(self, factor: float) -> Value:
        """So many times the figure."""
        ends = self.interval and (self.interval[0] * factor, self.interval[1] * factor)
        return replace(self, value=self.value * factor, interval=ends)


@frozen
class Side:
    """One of the two: a plan as predicted, or a run as measured."""

    title: str
    plan: Plan
    outcome: Mapping[str, Value]
    measured: bool


@frozen
class ChangedField:
    """A field of the question or of the choice that is another; None: that side has no such field."""

    path: str
    before: Leaf
    after: Leaf


@frozen
class ChangedFigure:
    """A figure of the outcome that is another; None: that side does not have it."""

    name: str
    before: Value | None
    after: Value | None

    @property
    def relative(self) -> float | None:
        """after / before - 1."""
        if self.before is None or self.after is None or self.before.value == 0:
            return None
        return self.after.value / self.before.value - 1

    @property
    def overlaps(self) -> bool | None:
        """Whether the two intervals have a value in common; None where a side has none."""
        one = self.before.interval if self.before is not None else None
        other = self.after.interval if self.after is not None else None
        return None if one is None or other is None else one[0] <= other[1] and other[0] <= one[1]


@frozen
class Difference:
    """Everything that changed."""

    before: Side
    after: Side
    question: tuple[ChangedField, ...]
    choice: tuple[ChangedField, ...]
    outcome: tuple[ChangedFigure, ...]
    other_work: tuple[str, ...] = ()
    """What of the work differs (fields of `StepWork`): a step then compares by the sample or the token."""

    @property
    def empty(self) -> bool:
        """Whether nothing changed."""
        return not (self.question or self.choice or self.outcome)


def read_side(path: str | Path) -> Side:
    """A plan.json as predicted, or the folder of a run as measured.

    Raises:
        RlhfsimError: neither, or one that cannot be read.
    """
    where = Path(path)
    if where.is_dir():
        run = read_run(where)
        return Side(title=str(path), plan=run.plan, outcome=measured(run), measured=True)
    plan = read_plan(where, as_priced=True)
    return Side(title=str(path), plan=plan, outcome=predicted(plan), measured=False)


def diff(before: Side, after: Side) -> Difference:
    """What changed from one side to the other."""
    one, other = before.plan, after.plan
    works = work_of(one), work_of(other)
    sides = [
        {**_each(side, work, works[0].by(works[1])), **side.outcome}
        for side, work in zip((before, after), works, strict=True)
    ]
    return Difference(
        before=before,
        after=after,
        question=tuple(changes(asked(one, other), asked(other, one))),
        choice=tuple(changes(chosen(one), chosen(other))),
        outcome=tuple(changed_figures(*sides, seconds_only=before.measured != after.measured)),
        other_work=works[0].unlike(works[1]),
    )


def _each(side: Side, work: StepWork, by: By) -> dict[str, Value]:
    """The step, and its price, of a sample or a token; nothing where the work is the same."""
    return {
        f"{name}, per {by}": side.outcome[name].scaled(work.amount(1.0, by))
        for name in ("step", "price of a step")
        if by != "work" and name in side.outcome
    }


# --- what a plan says, as fields ------------------------------------------------------------------


def asked(plan: Plan, other: Plan) -> dict[str, Leaf]:
    """Workload, models, hardware, the run, and what may compete where both were searched, by dotted path."""
    data = plan.to_dict()
    named = {key: data[key] for key in ("hardware", "oversubscription", "workload", "models")}
    fields = dict(leaves(named)) | dict(leaves({"run": _run(plan.run)} if plan.run else {}))
    if plan.choice is None or other.choice is None:
        return fields
    request = {key: value for key, value in data["choice"]["asked"].items() if key != "price"}  # hardware's
    return fields | dict(leaves({"request": request}))


def _run(run: AskedRun) -> dict[str, Leaf]:
    """The run by field; a target by its name."""
    targets = {target.name: limit_text(target) for target in run.targets}
    return {"steps": run.steps, **targets, "confidence": run.confidence}


def chosen(plan: Plan) -> dict[str, Leaf]:
    """Architecture and placement by dotted path."""
    data = plan.to_dict()
    return dict(leaves({key: data[key] for key in ("architecture", "role_placement")} | data["placement"]))


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Every number, text and truth value with its dotted path; items of a list by their label."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            if key not in DERIVED:
                yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, list) and any(isinstance(item, Mapping | list) for item in data):
        for i, item in enumerate(data):
            yield from leaves(item, path + _label(item, i, len(data)))
    elif isinstance(data, list):
        yield path, ", ".join(map(str, data))
    else:
        yield path, data


def _label(item: Any, number: int, count: int) -> str:
    """`.actor` where the item says who it is, nothing where it is the only one, else `[1]`."""
    for key in LABELS:
        if isinstance(item, Mapping) and item.get(key):
            return f".{item[key]}"
    return "" if count == 1 else f"[{number}]"


def changes(before: Mapping[str, Leaf], after: Mapping[str, Leaf]) -> Iterator[ChangedField]:
    """Fields that differ, in the order of the two plans; None and absent are the same."""
    for path in dict.fromkeys(chain(before, after)):
        one, other = before.get(path), after.get(path)
        if one != other:
            yield ChangedField(path=path, before=one, after=other)


# --- what comes out -------------------------------------------------------------------------------


def predicted(plan: Plan) -> dict[str, Value]:
    """Figures of the prediction by name."""
    prediction = plan.prediction
    figures = {
        "step": Value(value=prediction.step_s, unit="s", interval=(prediction.low_s, prediction.high_s)),
        "tokens per second and GPU": Value(value=prediction.tokens_per_s_per_gpu, unit="1"),
        "energy of a step": Value(value=prediction.kwh_per_step * 3.6e6, unit="J"),
        "peak GPU memory": Value(value=prediction.peak_memory_bytes, unit="byte"),
        "peak host memory": Value(value=prediction.host_peak_bytes, unit="byte"),
        "probability of running out of memory": Value(
            value=prediction.probability_out_of_memory, unit="1", likelihood=True
        ),
    }
    if prediction.usd_per_step is not None:
        figures["price of a step"] = Value(value=prediction.usd_per_step, unit="usd")
    figures |= _of_run(plan)
    for phase in prediction.phases:
        known = figures.get(phase.name)
        figures[phase.name] = _joined(
            known, Value(value=phase.seconds, unit="s", interval=(phase.low_s, phase.high_s))
        )
    return figures


def _of_run(plan: Plan) -> Iterator[tuple[str, Value]]:
    """Time and rent of the run that was asked for, and the probability of each of its targets."""
    odds = plan.run.odds if plan.run else None
    if plan.run_s is not None:
        yield RUN, Value(value=plan.run_s, unit="s", interval=_ends(odds.run_s if odds else None))
    if plan.run_usd is not None:
        yield RENT, Value(value=plan.run_usd, unit="usd", interval=_ends(odds.usd if odds else None))
    for target in plan.run.targets if plan.run else ():
        if target.probability is not None:
            yield f"probability: {target.name}", Value(value=target.probability, unit="1", likelihood=True)


def _ends(drawn: Quantiles | None) -> tuple[float, float] | None:
    return drawn and (drawn[0], drawn[2])


def _joined(known: Value | None, more: Value) -> Value:
    """A phase that a step has twice takes the sum."""
    if known is None or known.interval is None or more.interval is None:
        return more
    ends = known.interval[0] + more.interval[0], known.interval[1] + more.interval[1]
    return Value(value=known.value + more.value, unit=more.unit, interval=ends)


def measured(run: Observation) -> dict[str, Value]:
    """Medians of the counted steps by name."""
    figures = {}
    for name, seconds in {"step": run.step_s, **run.phases}.items():
        if seconds:
            low, high = np.percentile(seconds, SHARES)
            figures[name] = Value(value=median(seconds), unit="s", interval=(float(low), float(high)))
    return figures


def _alike(one: Value, other: Value) -> bool:
    """Whether two figures count as equal."""
    if one.likelihood and other.likelihood:
        return abs(one.value - other.value) < LEAST
    return isclose(one.value, other.value, rel_tol=LEAST)


def changed_figures(
    before: Mapping[str, Value], after: Mapping[str, Value], *, seconds_only: bool = False
) -> Iterator[ChangedFigure]:
    """Figures that differ by more than `LEAST`; of a plan and a run only what both can have: seconds."""
    for name in dict.fromkeys(chain(before, after)):
        one, other = before.get(name), after.get(name)
        either = one or other
        if seconds_only and either is not None and (either.unit != "s" or name == RUN):
            continue
        if one is None or other is None or not _alike(one, other):
            yield ChangedFigure(name=name, before=one, after=other)
