"""What a framework's runs have in common beyond the coefficients: a bias by framework, phase and engine mode.

    ln factor = b(framework) + b(framework, phase) + b(framework, phase, mode)      b ~ N(0, s^2) of its level

The three are fitted together with the coefficients (`posterior`), each pulled to 0 by its own prior: what all
phases share goes to the framework, what a mode alone shows to the mode, and a phase or mode that no run had
takes what its framework or phase shows. The scatter between runs (tau) is no bias: it stays in the interval.

    variance of ln seconds of another run's call = a^T C a + s^2 of each level that no run had + tau_f^2

a: 1 for the levels of the entry, and the elasticity of the call for every coefficient that was fitted beside
them: what factor and coefficients can only tell together is no doubt of the call. P10 and P90 are of the t
distribution where tau was estimated from these runs, of the normal one where it is the prior: a few times of
one run leave that prior no less certain. Of that variance the calls of a step share what the level of the
framework has of it; the rest is each phase's own.

What a run takes beyond the factor is no noise to a plan like it: that residual r stands beside the factor and
fades with the distance (`specs.hardware.calibrated`), over as far as `DRIFT` needs to make up tau:

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
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhfsim.calibration.evidence import Datum
from rlhfsim.calibration.posterior import UNKNOWN_MISMATCH, Posterior, quantile
from rlhfsim.calibration.predict import NODES, RunPricer, nodes_of
from rlhfsim.calibration.priors import DRIFT, REACH, Prior
from rlhfsim.kernels.cost import Z90
from rlhfsim.specs.frameworks.costs import costs_of
from rlhfsim.specs.hardware.calibrated import ANY, FrameworkBiases, NearRun, PhaseBias, bias_of
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.step.engine_mode import point_of, pool_of

LEVEL = 0.3
"""Standard deviation of ln factor at each of the three levels: prior, a factor of 1.35 each, 1.7 in all.
Set before any run was fitted; the phases of published NeMo-RL steps scatter by 0.3 (`lab.fits.rlhf`)."""
MAJORITY = 3
"""Runs from which one may be odd: of two, neither is."""
LEAST_SHARE = 0.05
"""Share of a clock below which it tells nothing of a call under it."""
LEAST_LOG = 0.005
"""Residual below which a run says nothing beyond the factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


def bias_priors(cases: Sequence[RunPricer], data: Sequence[Datum]) -> list[Prior]:
    """Every bias that may move a datum, as believed before: a factor of 1."""
    groups = [nodes for d in data for nodes in timed_nodes(cases[d.run], d.phase)]
    widths = {node: _width(nodes) for nodes in groups for node in nodes}
    reach = math.log(REACH)
    return [
        Prior(name=name, mean=0.0, below=width, above=width, least=-reach, most=reach)
        for name, width in sorted(widths.items())
    ]


def _width(nodes: Sequence[str]) -> float:
    """Standard deviation of each of the levels of a phase."""
    framework, _, mode = _levels(nodes)
    return UNKNOWN_MISMATCH if mode in costs_of(framework).fitted_modes else LEVEL


def timed_nodes(case: RunPricer, clock: str) -> Iterable[tuple[str, ...]]:
    """The biases of every phase under a clock of a run."""
    phases = case.covers.get(clock, (clock,))
    modes = case.modes
    return tuple(nodes_of(case.framework, phase, modes[phase]) for phase in phases if phase in modes)


def known_biases(cases: Sequence[RunPricer], data: Sequence[Datum], posterior: Posterior) -> list[Known]:
    """Factors of every phase and mode, of those that no run had too."""
    rows: dict[tuple[str, str, str], set[int]] = {}
    for d in data:
        for nodes in timed_nodes(cases[d.run], d.phase):
            framework, phase, mode = _levels(nodes)
            names = ((framework, ANY, ANY), (framework, phase, ANY), (framework, phase, mode))
            for name in names[-len(nodes) :]:
                rows.setdefault(name, set()).add(d.run)
    return [_known(cases, data, posterior, entry, runs) for entry, runs in sorted(rows.items())]


Entry = tuple[str, str, str]
"""Framework, phase, mode."""


def _known(
    cases: Sequence[RunPricer], data: Sequence[Datum], posterior: Posterior, entry: Entry, runs: set[int]
) -> Known:
    framework, phase, mode = entry
    before = bias_of(cases[min(runs)].profile.biases.get(framework), phase, mode)
    rows = [i for i, d in enumerate(data) if mode and not d.within and _had(cases[d.run], d.phase, entry)]
    near = _near(cases, data, posterior, entry) if mode else ()
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


def _had(case: RunPricer, clock: str, entry: Entry) -> bool:
    """Whether a clock of a run covers a phase in this mode."""
    return entry in map(_levels, timed_nodes(case, clock))


def _near(
    cases: Sequence[RunPricer], data: Sequence[Datum], posterior: Posterior, entry: Entry
) -> Iterable[NearRun]:
    """What the runs of an entry took beyond its factor."""
    phase = entry[1]
    runs = Counter(d.phase for d in data)
    for d, residual, weight in zip(data, posterior.residuals, posterior.weights, strict=True):
        case, tau = cases[d.run], posterior.tau.get(d.phase, 0.0)
        if d.within or tau <= 0 or phase.endswith(".sync") or not _had(case, d.phase, entry):
            continue
        share = tau**2 / (tau**2 + d.scatter**2) * (weight if runs[d.phase] >= MAJORITY else 1.0)
        log, placement = float(residual * share), case.setting.placement
        if abs(log) < LEAST_LOG:
            continue
        params = case.setting.models.params_of(phase)
        at = point_of(params, pool_of(phase, placement), placement, case.setting.workload)
        yield NearRun(at=at, log=log, reach=tau * Z90 / DRIFT.value)


def _levels(nodes: Sequence[str]) -> tuple[str, str, str]:
    framework, phase, mode = nodes[-1].removeprefix(NODES).split(" > ")
    return framework, phase, mode


def _factor(
    posterior: Posterior, entry: Entry, rows: Sequence[int], before: float
) -> tuple[Coefficient, float]:
    """The factor of one entry, for a run that was not measured, and the share of its variance that calls
    have in common; `rows`: data that had it."""
    framework, phase, mode = entry
    column = {p.name: k for k, p in enumerate(posterior.priors)}
    levels = nodes_of(framework, phase or ANY, mode or ANY)
    taken = [column[name] for name in levels[: 1 + bool(phase) + bool(mode)] if name in column]
    mean = float(posterior.theta[taken].sum())
    variance = _doubt(posterior, taken, rows)
    variance += (len(levels) - len(taken)) * _width(levels) ** 2
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
    grouped: dict[str, list[Known]] = {}
    for row in known:
        grouped.setdefault(row.framework, []).append(row)
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


def factors_of_phases(cases: Sequence[RunPricer], data: Sequence[Datum]) -> dict[str, float]:
    """One factor a phase, whatever the framework and mode: geometric mean of measured over priced."""
    logs: dict[str, list[float]] = {}
    for d in data:
        priced = cases[d.run].seconds()[d.phase]
        logs.setdefault(d.phase, []).append(d.log - math.log(priced))
    return {phase: math.exp(float(np.mean(values))) for phase, values in logs.items()}
