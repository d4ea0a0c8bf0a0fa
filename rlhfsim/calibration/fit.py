"""From observed runs to calibrated coefficients: values, intervals, what is not identified, and errors.

    observations -> evidence -> identified coefficients -> posterior -> errors by leaving runs out

Errors are |predicted / measured - 1| of medians. Left out together are all runs of one plan with one
measured length: a repeat of the same run would make the error of the other look small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from rlhfsim.calibration.biases import Known, bias_priors, factors_of_phases, known_biases
from rlhfsim.calibration.by_length import with_ends
from rlhfsim.calibration.evidence import Datum, evidence
from rlhfsim.calibration.identify import Unidentified, blurred, identify, moved_by, settled
from rlhfsim.calibration.interval import stretched
from rlhfsim.calibration.observation import Observation
from rlhfsim.calibration.posterior import Posterior, PriceModel, fit, quantile
from rlhfsim.calibration.predict import NODES, REST, STEP, RunPricer, check_profile, pricer_of
from rlhfsim.calibration.priors import Prior, bounds, priors
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.quantities import Coefficient

ROUNDS = 5
"""Most times that coefficients are dropped and the rest fitted again."""
FELT = 0.05
"""Elasticity from which a phase counts as data about a coefficient."""
OUTLIER = 0.4
"""Weight below which a datum is named as an outlier: a residual of 2.3 sigma."""
FEW_RUNS = 3
"""Fewer distinct runs say little about how the model errs from run to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """One coefficient before and after."""

    name: str
    before: Coefficient
    after: Coefficient
    n: int
    """Data that depend on it, as believed or as fitted."""
    runs: int
    """Runs that depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a set of runs says about a profile."""

    profile: Profile
    """The profile before."""
    observations: tuple[Observation, ...]
    coefficients: tuple[Calibrated, ...]
    biases: tuple[Known, ...]
    """Factors of the framework's phases, which stand beside the coefficients."""
    unidentified: tuple[Unidentified, ...]
    errors: tuple[PhaseError, ...]
    data: int
    """Data that were fitted."""
    mismatch: dict[str, float]
    """Standard deviation of ln seconds from run to run that the model does not explain, by phase."""
    outliers: tuple[str, ...]
    notes: tuple[str, ...]
    """What was left out, and what these runs are too few for."""


def calibrate(
    observations: Sequence[Observation], profile: Profile | None = None, *, errors: bool = True
) -> Calibration:
    """The profile's coefficients, as these runs show them; `errors` also leaves runs out one by one.

    Raises:
        RlhfsimError: no runs, runs of other hardware, or nothing in them that a coefficient explains.
    """
    before = profile or _profile_of(observations)
    check_profile(observations, before)
    cases = tuple(with_ends(pricer_of(o, before), o, before) for o in observations)
    data, notes = evidence(observations, cases)
    if not data:
        raise RlhfsimError(
            "too-few-data",
            "no phase of these runs can be fitted",
            help="; ".join(notes[:3]) or "give runs of rlhfsim launch",
        )
    model = PriceModel(cases, data)
    believed = _believed(before, cases)
    known = [*bias_priors(cases, data), *priors(believed, sorted(model.read())).values()]
    felt = moved_by(model, known)
    notes = (*notes, *(_given(d, observations) for d, moves in zip(data, felt, strict=True) if not moves))
    rows = [i for i, moves in enumerate(felt) if moves]
    model, data = model.only(rows), tuple(data[i] for i in rows)
    posterior, left = fitted(model, data, known)
    if not posterior.priors:
        raise RlhfsimError(
            "too-few-data",
            f"{len(data)} times of {len(cases)} runs tell no coefficient: no interval would become narrower",
            help="give more runs, longer ones, or runs that differ in batch, lengths and layout",
        )
    scored = _errors(model, data, known, posterior, observations, cases) if errors else ()
    return Calibration(
        profile=before,
        observations=tuple(observations),
        coefficients=tuple(_calibrated(believed, model, posterior, data)),
        biases=tuple(known_biases(cases, data, posterior)),
        unidentified=tuple(left),
        errors=scored,
        data=len(data),
        mismatch=dict(posterior.tau),
        outliers=tuple(_outliers(posterior, data, observations)),
        notes=(*_seen(observations), *notes, *_few(posterior, observations)),
    )


def _given(datum: Datum, observations: Sequence[Observation]) -> str:
    return (
        f"{observations[datum.run].name}, {datum.phase}: no coefficient moves it, the plan was given its time"
    )


def _believed(profile: Profile, cases: Sequence[RunPricer]) -> Profile:
    """The profile with the software costs of the runs' framework; pooled ones if it had several."""
    ran = {(c.setting.cluster.framework, c.setting.placement.backend) for c in cases}
    return cases[0].profile if len(ran) == 1 else profile


def _profile_of(observations: Sequence[Observation]) -> Profile:
    names = list(dict.fromkeys(h.profile for o in observations for h in o.plan.hardware))
    if not names:
        raise RlhfsimError("too-few-data", "there are no runs", help="give folders that rlhfsim launch wrote")
    if len(names) > 1:
        raise RlhfsimError(
            "several-profiles",
            f"these runs used several profiles: {', '.join(names)}",
            help="calibrate one kind of GPU at a time: --profile NAME",
        )
    return load_profile(names[0])


# --- the fit --------------------------------------------------------------------------------------


def fitted(
    model: PriceModel, data: Sequence[Datum], known: Sequence[Prior]
) -> tuple[Posterior, list[Unidentified]]:
    """The posterior of what can be identified, and what cannot.

    What turns out wider than it should, with the noise as estimated, is dropped and the rest fitted again.
    """
    chosen, left = identify(model, data, known)
    start: Posterior | None = None
    for _ in range(ROUNDS):
        others = [p for p in known if p.name in {u.name for u in left}]
        posterior = fit(model, data, chosen, others, start)
        kept, reason = settled(posterior), "the runs scatter too much to tell"
        if len(kept) == len(chosen):
            worst, reason = (
                blurred(model, posterior),
                "what is not known of others that move the same phases hides it",
            )
            kept = [p for p in chosen if p is not worst]
        if len(kept) == len(chosen):
            break
        left += [Unidentified(name=p.name, reason=reason) for p in chosen if p not in kept]
        chosen, start = kept, posterior.of(kept)
    return posterior, left


def _calibrated(
    profile: Profile, model: PriceModel, posterior: Posterior, data: Sequence[Datum]
) -> list[Calibrated]:
    wide = quantile(posterior.spare)
    below, above = stretched(model, data, posterior, wide)
    slopes = np.maximum(
        np.abs(posterior.slopes), np.abs(model.slopes({}, [p.name for p in posterior.priors]))
    )
    rows = []
    for k, (item, theta) in enumerate(zip(posterior.priors, posterior.theta, strict=True)):
        if item.name.startswith(NODES):
            continue
        before = profile.coefficient(item.name)
        felt = [d for d, slope in zip(data, slopes[:, k], strict=True) if slope >= FELT]
        value, low, high = (
            float(np.exp(theta + wide * deviation)) for deviation in (0.0, -below[k], above[k])
        )
        smallest, largest = bounds(item.name, before.value)
        after = replace(
            before,
            value=value,
            low=min(value, max(low, smallest)),
            high=max(value, min(high, largest)),
            source="calibrated",
        )
        rows.append(
            Calibrated(
                name=item.name, before=before, after=after, n=len(felt), runs=len({d.run for d in felt})
            )
        )
    return rows


# --- what people should know ----------------------------------------------------------------------


def _seen(observations: Sequence[Observation]) -> list[str]:
    return [f"{o.name}, {note}" for o in observations for note in o.left_out]


def _outliers(posterior: Posterior, data: Sequence[Datum], observations: Sequence[Observation]) -> list[str]:
    return [
        f"{observations[d.run].name}, {d.phase}: {np.exp(residual):.2g} times the fit"
        for d, residual, weight in zip(data, posterior.residuals, posterior.weights, strict=True)
        if weight < OUTLIER
    ]


def _few(posterior: Posterior, observations: Sequence[Observation]) -> list[str]:
    notes = []
    distinct = len(set(groups(observations)))
    if distinct < FEW_RUNS:
        notes.append(
            f"{distinct} distinct run{'s' * (distinct != 1)}: intervals hold near them only; {FEW_RUNS} or "
            "more say how the model errs between runs"
        )
    if not posterior.tau_known:
        notes.append(
            "too few data to tell how the model errs between runs: intervals rest on a prior for that"
        )
    return notes


# --- leaving runs out -----------------------------------------------------------------------------


def groups(observations: Sequence[Observation]) -> list[str]:
    """Runs of one plan and one measured length share a group: repeats are left out together."""
    return [
        f"{o.plan.input_hash} {_rounded(o.prompt_tokens)} {_rounded(o.response_tokens)}" for o in observations
    ]


def _rounded(tokens: float | None) -> str:
    return "-" if tokens is None else f"{np.log(max(1.0, tokens)):.1f}"


def _errors(
    model: PriceModel,
    data: Sequence[Datum],
    known: Sequence[Prior],
    whole: Posterior,
    observations: Sequence[Observation],
    cases: Sequence[RunPricer],
) -> tuple[PhaseError, ...]:
    """Every phase and step of every run, predicted by a fit on the other groups."""
    names, errors = groups(observations), []
    for group in dict.fromkeys(names):
        out = [i for i, name in enumerate(names) if name == group]
        rows = [i for i, d in enumerate(data) if d.run not in out]
        values = _without(model, data, rows, known, whole) if rows else None
        factors = factors_of_phases(cases, [data[row] for row in rows])
        for i in out:
            errors += _scored(model, i, observations[i], values, _by_factors(cases[i], factors))
    return tuple(errors)


def _without(
    model: PriceModel, data: Sequence[Datum], rows: Sequence[int], known: Sequence[Prior], whole: Posterior
) -> dict[str, float]:
    """Coefficients fitted on some rows; what they cannot tell keeps its prior."""
    part, some = model.only(rows), [data[i] for i in rows]
    chosen, _ = identify(part, some, known)
    same = {p.name for p in chosen} == {p.name for p in whole.priors}
    if same:  # derivatives where all runs settled are near enough; the values are fitted anew
        return fit(part, some, whole.priors, start=replace(whole, slopes=whole.slopes[rows])).values
    return fitted(part, some, known)[0].values


def _by_factors(case: RunPricer, factors: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase and of the step with one factor a phase, and no fit."""
    before = case.seconds()
    after = {phase: seconds * factors.get(phase, 1.0) for phase, seconds in before.items()}
    if STEP not in factors:
        timed = sum(after[name] - before[name] for name in case.clocks)
        after[STEP] = before[STEP] + timed + after[REST] - before[REST]
    return after


def _scored(
    model: PriceModel,
    i: int,
    run: Observation,
    values: dict[str, float] | None,
    by_factors: Mapping[str, float],
) -> list[PhaseError]:
    before = model.seconds(i, {})
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
