"""From observed runs to calibrated coefficients: values, intervals, what is not identified, and errors.

    observations -> evidence -> identified coefficients -> posterior -> errors by leaving runs out

A phase that is off by more than `UNKNOWN_MISMATCH` the same way in all runs is fitted again as a bias. Where
the fit predicts the steps of left-out runs (`left_out`) worse than the old profile does, coefficients keep
their old values, those first whose return helps most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlhfsim.calibration.biases import Known, bias_priors, known_biases
from rlhfsim.calibration.evidence import Datum, evidence, with_ends
from rlhfsim.calibration.identify import Unidentified, fitted, moved_by
from rlhfsim.calibration.interval import stretched
from rlhfsim.calibration.left_out import PhaseError, errors_of, groups, left_out, worsening
from rlhfsim.calibration.observation import Observation
from rlhfsim.calibration.posterior import UNKNOWN_MISMATCH, Posterior, PriceModel, quantile
from rlhfsim.calibration.predict import RunPricer, check_profile, pricer_of
from rlhfsim.calibration.priors import bounds, priors
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.step.engine_mode import biased

FELT = 0.05
"""Elasticity from which a phase counts as data about a coefficient."""
OUTLIER = 0.4
"""Weight below which a datum is named as an outlier: a residual of 2.3 sigma."""
WORSENS = "kept as it was: steps of runs left out would be predicted worse"
FEW_RUNS = 3
"""Fewer distinct runs say little about how the model errs from run to run."""


@frozen
class Calibrated:
    """One coefficient before and after."""

    name: str
    before: Coefficient
    after: Coefficient
    n: int
    """Data that depend on it, as believed or as fitted."""
    runs: int
    """Runs that depend on it."""


@frozen
class Calibration:
    """What a set of runs says about a profile."""

    profile: Profile
    """The profile before."""
    observations: tuple[Observation, ...]
    coefficients: tuple[Calibrated, ...]
    biases: tuple[Known, ...]
    """Factors of the framework's phases, in addition to the coefficients."""
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
    found, off = _calibrated_with(observations, before, frozenset(), errors=errors)
    if not off:
        return found
    again, _ = _calibrated_with(observations, before, off, errors=errors)
    words = f"off the same way in all runs, a bias: {', '.join(sorted(off))}"
    return replace(again, notes=(words, *again.notes))


def _calibrated_with(
    observations: Sequence[Observation], before: Profile, off: frozenset[str], *, errors: bool
) -> tuple[Calibration, frozenset[str]]:
    """The calibration where phases of `off` may have a bias, and further phases that should (errors are then
    not looked for)."""
    cases = tuple(with_ends(pricer_of(o, before, off), before) for o in observations)
    data, notes = evidence(cases)
    if not data:
        raise RlhfsimError(
            "too-few-data",
            "no phase of these runs can be fitted",
            help="; ".join(notes[:3]) or "give runs of rlhfsim launch",
        )
    model = PriceModel(cases, data)
    believed = _believed(before, cases)
    known = [*bias_priors(model), *priors(believed, sorted(model.read())).values()]
    felt = moved_by(model, known)
    given = (_named(model, d) for d, moves in zip(data, felt, strict=True) if not moves)
    notes = (*notes, *(f"{name}: no coefficient moves it, the plan was given its time" for name in given))
    model = model.only([i for i, moves in enumerate(felt) if moves])
    posterior, left = fitted(model, known)
    if not posterior.priors:
        raise RlhfsimError(
            "too-few-data",
            f"{len(model.data)} times of {len(cases)} runs tell no coefficient: no interval would become "
            "narrower",
            help="give more runs, longer ones, or runs that differ in batch, lengths and layout",
        )
    same = frozenset() if off else _same_way(model, posterior)
    scored: tuple[PhaseError, ...] = ()
    if errors and not same:
        parts = left_out(model, known, posterior)
        if held := worsening(model, parts, posterior):
            known = [p for p in known if p.name not in held]
            posterior, left = fitted(model, known)
            left += [Unidentified(name=name, reason=WORSENS) for name in sorted(held)]
            parts = left_out(model, known, posterior)
        scored = errors_of(model, parts)
    calibration = Calibration(
        profile=before,
        observations=tuple(observations),
        coefficients=tuple(_calibrated(believed, model, posterior)),
        biases=tuple(known_biases(model, posterior)),
        unidentified=tuple(left),
        errors=scored,
        data=len(model.data),
        mismatch=dict(posterior.tau),
        outliers=tuple(_outliers(model, posterior)),
        notes=(*_seen(observations), *notes, *_few(posterior, observations)),
    )
    return calibration, same


def _same_way(model: PriceModel, posterior: Posterior) -> frozenset[str]:
    """Phases of engines that are off by more than `UNKNOWN_MISMATCH` in all runs, at least two, and by more
    than they differ: no outliers, whatever their weight in the fit."""
    cases, residuals = model.cases, dict[str, list[float]]()
    for datum, residual in zip(model.data, posterior.residuals, strict=True):
        if not datum.within and biased(datum.phase) and cases[datum.run].framework:
            residuals.setdefault(datum.phase, []).append(float(residual))
    off = set()
    for phase, values in residuals.items():
        least, most = min(map(abs, values)), max(map(abs, values))
        one_sided = min(values) > 0 or max(values) < 0
        if len(values) >= 2 and one_sided and least > max(UNKNOWN_MISMATCH, most - least):
            off.add(phase)
    return frozenset(p for p in off if not any(p in case.modes for case in cases))


def _named(model: PriceModel, datum: Datum) -> str:
    """`runs/a, actor.train`."""
    return f"{model.cases[datum.run].seen.name}, {datum.phase}"


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


def _calibrated(profile: Profile, model: PriceModel, posterior: Posterior) -> list[Calibrated]:
    wide = quantile(posterior.spare)
    below, above = stretched(model, posterior, wide)
    slopes = np.maximum(
        np.abs(posterior.slopes), np.abs(model.slopes({}, [p.name for p in posterior.priors]))
    )
    rows = []
    for k, (item, theta) in enumerate(zip(posterior.priors, posterior.theta, strict=True)):
        if item.is_bias:
            continue
        before = profile.coefficient(item.name)
        felt = [d for d, slope in zip(model.data, slopes[:, k], strict=True) if slope >= FELT]
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


def _outliers(model: PriceModel, posterior: Posterior) -> list[str]:
    return [
        f"{_named(model, d)}: {np.exp(residual):.2g} times the fit"
        for d, residual, weight in zip(model.data, posterior.residuals, posterior.weights, strict=True)
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
