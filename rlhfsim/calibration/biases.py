"""What a framework's runs have in common beyond the coefficients: a bias by framework, phase and engine mode.

    ln factor = b(framework) + b(framework, phase) + b(framework, phase, mode)      b ~ N(0, s^2) of its level

The three are fitted together with the coefficients (`posterior`), each pulled to 0 by its own prior: what all
phases share goes to the framework, what a mode alone shows to the mode, and a phase or mode that no run had
takes what its framework or phase shows. The scatter between runs (tau) is no bias: it stays in the interval.

    variance of ln seconds of another run's call = a^T C a + s^2 of each level that no run had + tau_f^2

a: 1 for the levels of the entry, and the elasticity of the call for every coefficient that was fitted with
them: what factor and coefficients can only tell together is no doubt of the call. P10 and P90 are of the t
distribution where tau was estimated from these runs, of the normal one where it is the prior: a few times of
one run leave that prior no less certain. Of that variance the calls of a step share what the level of the
framework has of it; the rest is each phase's own.

What a run takes beyond the factor is no noise to a plan like it: that residual r is stored with the factor
and fades with the distance (`specs.hardware.calibrated`), over as far as `DRIFT` needs to make up tau:

    log_i = r_i tau^2 / (tau^2 + scatter_i^2)      reach = tau z90 / drift

of a phase that `MAJORITY` runs had, times the weight of the fit, so that an odd run is not repeated. A weight
sync has none: its path is chosen before the layouts are known.

A mode whose runs fitted the framework's costs (`Costs.fitted_modes`) has the level of the mode alone, with
the doubt `UNKNOWN_MISMATCH` of such a fit: other modes say nothing of it, nor it of them. So has, with the
doubt `LEVEL`, a phase that is off the same way in all runs, where a framework's phases have none in common.

Not known here: how biases of one framework go together with those of another.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from rlhfsim.calibration.evidence import Datum
from rlhfsim.calibration.posterior import UNKNOWN_MISMATCH, Posterior, PriceModel, quantile
from rlhfsim.calibration.predict import nodes_of
from rlhfsim.calibration.priors import DRIFT, REACH, Prior
from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Z90
from rlhfsim.specs.frameworks.costs import costs_of
from rlhfsim.specs.hardware.calibrated import ANY, FrameworkBiases, NearRun, PhaseBias, bias_of
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.step.engine_mode import point_of, pool_of

Entry = tuple[str, str, str]
"""Framework, phase, mode."""
LEVEL = 0.3
"""Standard deviation of ln factor at each of the three levels: prior, a factor of 1.35 each, 1.7 in all.
Set before any run was fitted; the phases of published NeMo-RL steps scatter by 0.3 (`lab.fits.rlhf`)."""
MAJORITY = 3
"""Runs from which one may be odd: of two, neither is."""
LEAST_SHARE = 0.05
"""Share of a clock below which it tells nothing of a call under it."""
LEAST_LOG = 0.005
"""Residual below which a run says nothing beyond the factor."""


@frozen
class Known:
    """What runs told about one phase of a framework in one engine mode."""

    framework: str
    phase: str
    mode: str
    runs: int
    """That had it."""
    factor: Coefficient
    """Measured over priced, P10 to P90 of another run."""
    common: float = 1.0
    """Share of the variance of ln factor that the calls of a step have in common."""
    near: tuple[NearRun, ...] = ()
    """What each run took beyond the factor."""


def bias_priors(model: PriceModel) -> list[Prior]:
    """Every bias that may move a datum, as believed before: a factor of 1."""
    entries = [entry for d in model.data for entry in timed_entries(model, d)]
    widths = {node: _width(entry) for entry in entries for node in nodes_of(*entry)}
    reach = math.log(REACH)
    return [
        Prior(name=name, mean=0.0, below=width, above=width, least=-reach, most=reach)
        for name, width in sorted(widths.items())
    ]


def _width(entry: Entry) -> float:
    """Standard deviation of each of the levels of a phase."""
    framework, _, mode = entry
    return UNKNOWN_MISMATCH if mode in costs_of(framework).fitted_modes else LEVEL


def timed_entries(model: PriceModel, datum: Datum) -> list[Entry]:
    """Every phase under the clock of a datum that may have a bias."""
    case, clock = model.cases[datum.run], datum.phase
    phases = case.seen.covers.get(clock, (clock,))
    return [(case.framework, phase, case.modes[phase]) for phase in phases if phase in case.modes]


def known_biases(model: PriceModel, posterior: Posterior) -> list[Known]:
    """Factors of every phase and mode, of those that no run had too."""
    rows: dict[Entry, set[int]] = defaultdict(set)
    for d in model.data:
        for entry in timed_entries(model, d):
            framework, phase, _ = entry
            names = ((framework, ANY, ANY), (framework, phase, ANY), entry)
            for name in names[-len(nodes_of(*entry)) :]:
                rows[name].add(d.run)
    return [_known(model, posterior, entry, runs) for entry, runs in sorted(rows.items())]


def _known(model: PriceModel, posterior: Posterior, entry: Entry, runs: set[int]) -> Known:
    framework, phase, mode = entry
    before = bias_of(model.cases[min(runs)].profile.biases.get(framework), phase, mode)
    had = [not d.within and entry in timed_entries(model, d) for d in model.data]
    rows = [i for i, holds in enumerate(had) if holds]
    near = _near(model, posterior, entry) if mode else ()
    factor, common = _factor(posterior, entry, rows, before.factor.value if before else 1.0)
    return Known(
        framework=framework,
        phase=phase,
        mode=mode,
        runs=len(runs),
        factor=factor,
        common=common,
        near=(*(before.near if before else ()), *near),
    )


def _near(model: PriceModel, posterior: Posterior, entry: Entry) -> Iterable[NearRun]:
    """What the runs of an entry took beyond its factor."""
    phase = entry[1]
    runs = Counter(d.phase for d in model.data)
    for d, residual, weight in zip(model.data, posterior.residuals, posterior.weights, strict=True):
        case, tau = model.cases[d.run], posterior.tau.get(d.phase, 0.0)
        if d.within or tau <= 0 or phase.endswith(".sync") or entry not in timed_entries(model, d):
            continue
        share = tau**2 / (tau**2 + d.scatter**2) * (weight if runs[d.phase] >= MAJORITY else 1.0)
        log, placement = float(residual * share), case.setting.placement
        if abs(log) < LEAST_LOG:
            continue
        params = case.setting.models.params_of(phase)
        at = point_of(params, pool_of(phase, placement), placement, case.setting.workload)
        yield NearRun(at=at, log=log, reach=tau * Z90 / DRIFT.value)


def _factor(
    posterior: Posterior, entry: Entry, rows: Sequence[int], before: float
) -> tuple[Coefficient, float]:
    """The factor of one entry, for a run that was not measured, and the share of its variance that calls
    have in common; `rows`: data that had it."""
    _, phase, mode = entry
    column = {p.name: k for k, p in enumerate(posterior.priors)}
    levels = nodes_of(*entry)
    taken = [column[name] for name in levels[: 1 + bool(phase) + bool(mode)] if name in column]
    mean = float(posterior.theta[taken].sum())
    variance = _doubt(posterior, taken, rows)
    variance += (len(levels) - len(taken)) * _width(entry) ** 2
    taus = [tau for name, tau in posterior.tau.items() if name == phase] or list(posterior.tau.values())
    variance += float(np.mean(np.square(taus))) if taus else UNKNOWN_MISMATCH**2
    wide = quantile(posterior.spare) if posterior.tau_known else Z90
    value, by = before * math.exp(mean), math.exp(wide * math.sqrt(variance))
    whole = column.get(levels[0]) if len(levels) > 1 else None
    shared = posterior.own[whole, whole] if whole is not None else 0.0
    factor = Coefficient(value=value, low=value / by, high=value * by, source="calibrated")
    return factor, float(min(1.0, shared / variance)) if variance > 0 else 1.0


def _doubt(posterior: Posterior, levels: Sequence[int], rows: Sequence[int]) -> float:
    """a^T C a: mean over the data that had the entry; of one that none had, of its levels alone."""
    own, slopes = posterior.own, posterior.slopes[list(rows)]
    shares = slopes[:, levels[-1:]].sum(axis=1)
    if not (shares > LEAST_SHARE).any():
        return float(own[np.ix_(levels, levels)].sum())
    calls = slopes[shares > LEAST_SHARE] / shares[shares > LEAST_SHARE, None]
    return float(np.mean(np.einsum("ij,jk,ik->i", calls, own, calls)))


def section(known: Sequence[Known], source: str) -> dict[str, FrameworkBiases]:
    """The key `biases` of a profile; `source`: day, device and versions of the runs."""
    grouped: dict[str, list[Known]] = defaultdict(list)
    for row in known:
        grouped[row.framework].append(row)
    return {
        framework: FrameworkBiases(
            runs=max(row.runs for row in rows),
            phases=tuple(
                PhaseBias(
                    phase=row.phase,
                    mode=row.mode,
                    factor=replace(row.factor, source=f"{source}; {row.runs} runs had it"),
                    common=row.common,
                    near=row.near,
                )
                for row in rows
            ),
        )
        for framework, rows in grouped.items()
    }


def factors_of_phases(model: PriceModel) -> dict[str, float]:
    """One factor a phase, whatever the framework and mode: geometric mean of measured over priced."""
    logs: dict[str, list[float]] = defaultdict(list)
    for d in model.data:
        priced = model.seconds(d.run, {})[d.phase]
        logs[d.phase].append(d.log - math.log(priced))
    return {phase: math.exp(float(np.mean(values))) for phase, values in logs.items()}
