"""Runs predicted by fits that had not seen them: errors before and after, and what a fit makes worse.

Left out together are all runs of one plan with one measured length: a repeat of the same run would make the
error of the other look small. Errors are |predicted / measured - 1| of medians.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from rlhfsim.calibration.biases import factors_of_phases
from rlhfsim.calibration.identify import fitted, identify
from rlhfsim.calibration.observation import Observation
from rlhfsim.calibration.posterior import Posterior, PriceModel, fit
from rlhfsim.calibration.predict import REST, STEP, RunPricer
from rlhfsim.calibration.priors import Prior
from rlhfsim.frozen import frozen

WORSE = 0.01
"""|ln(predicted / measured)| of left-out steps, on average, by which a fit may be worse than no fit."""


@frozen
class PhaseError:
    """How far a phase was off, before and after, in runs that the fit had not seen."""

    run: str
    phase: str
    measured_s: float
    before_s: float
    after_s: float | None
    """None: there is no other run to fit on."""
    factor_s: float | None = None
    """With one factor a phase in place of the fit."""


def groups(observations: Sequence[Observation]) -> list[str]:
    """Runs of one plan and one measured length share a group: repeats are left out together."""
    return [
        f"{o.plan.input_hash} {_rounded(o.prompt_tokens)} {_rounded(o.response_tokens)}" for o in observations
    ]


def _rounded(tokens: float | None) -> str:
    return "-" if tokens is None else f"{np.log(max(1.0, tokens)):.1f}"


Part = tuple[list[int], PriceModel, dict[str, float] | None]
"""Runs of a group that is left out, data of the others, coefficients fitted on these."""


def left_out(model: PriceModel, known: Sequence[Prior], whole: Posterior) -> list[Part]:
    """One a group."""
    names, parts = groups([case.seen for case in model.cases]), list[Part]()
    for group in dict.fromkeys(names):
        out = [i for i, name in enumerate(names) if name == group]
        rows = [i for i, d in enumerate(model.data) if d.run not in out]
        rest = model.only(rows)
        parts.append((out, rest, _values(rest, known, whole, rows) if rows else None))
    return parts


def worsening(model: PriceModel, parts: Sequence[Part], posterior: Posterior) -> set[str]:
    """Coefficients that keep their old values, so that the steps of left-out runs are predicted no worse."""
    names, held = [p.name for p in posterior.priors], set[str]()
    before = _step_loss(model, parts, set(names))
    while _step_loss(model, parts, held) > before + WORSE:
        rest = [name for name in names if name not in held]
        losses = {name: _step_loss(model, parts, held | {name}) for name in rest}
        held.add(min(rest, key=lambda name: losses[name]))
    return held


def _step_loss(model: PriceModel, parts: Sequence[Part], held: set[str]) -> float:
    """Mean |ln(predicted / measured)| of the steps of left-out runs, without what is `held`."""
    logs = [
        abs(math.log(model.seconds(i, kept)[STEP] / median(model.cases[i].seen.step_s)))
        for out, _, values in parts
        if values is not None
        for kept in [{name: value for name, value in values.items() if name not in held}]
        for i in out
        if model.cases[i].seen.step_s
    ]
    return sum(logs) / len(logs) if logs else 0.0


def errors_of(model: PriceModel, parts: Sequence[Part]) -> tuple[PhaseError, ...]:
    """Every phase and step of every run, predicted by a fit on the other groups."""
    errors = []
    for out, rest, values in parts:
        factors = factors_of_phases(rest)
        for i in out:
            errors += _scored(model, i, values, _by_factors(model.cases[i], factors))
    return tuple(errors)


def _values(
    part: PriceModel, known: Sequence[Prior], whole: Posterior, rows: Sequence[int]
) -> dict[str, float]:
    """Coefficients fitted on some rows of the whole; what they cannot tell keeps its prior."""
    chosen, _ = identify(part, known)
    same = {p.name for p in chosen} == {p.name for p in whole.priors}
    if same:  # derivatives where all runs settled are near enough; the values are fitted anew
        return fit(part, whole.priors, start=replace(whole, slopes=whole.slopes[rows])).values
    return fitted(part, known)[0].values


def _by_factors(case: RunPricer, factors: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase and of the step with one factor a phase, and no fit."""
    before = case.seconds()
    after = {phase: seconds * factors.get(phase, 1.0) for phase, seconds in before.items()}
    if STEP not in factors:
        timed = math.fsum(after[name] - before[name] for name in case.clocks)
        after[STEP] = before[STEP] + timed + after[REST] - before[REST]
    return after


def _scored(
    model: PriceModel, i: int, values: dict[str, float] | None, by_factors: Mapping[str, float]
) -> list[PhaseError]:
    run, before = model.cases[i].seen, model.seconds(i, {})
    after = None if values is None else model.seconds(i, values)
    measured = {**run.medians, **({STEP: median(run.step_s)} if run.step_s else {})}
    return [
        PhaseError(
            run=run.name,
            phase=phase,
            measured_s=seconds,
            before_s=before[phase],
            after_s=None if after is None else after[phase],
            factor_s=None if after is None else by_factors[phase],
        )
        for phase, seconds in measured.items()
        if before.get(phase, 0.0) > 0 and seconds > 0 and phase != REST
    ]


def off(predicted: float | None, measured: float) -> float | None:
    """|predicted / measured - 1|."""
    return None if predicted is None else abs(predicted / measured - 1)
