"""How far the calibration of one run carries to others: on a folder of runs, and on published rows.

    python -m lab.carry FOLDER     runs of rlhfsim import-run and logs that it reads, as rlhfsim calibrate takes them
    python -m lab.carry            published rows with the seconds of every phase alone

A family is a framework on one kind of GPU with one mode of training. Three questions, each with the error before,
after, and with one factor a phase from the same runs in place of the fit:

    one     calibrated on one run of a family, every other run of it
    left    calibrated on all runs of a family but one, that one
    family  biases of all other families of the framework, each on its own GPU; every run of this one

Everything after is what `rlhfsim estimate` says with the calibrated profile. The step is the logged one; of a row
that prints phases alone their sum, with the interval of its step. Rows whose source fitted a cost of the framework are shown as `fitted on`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, permutations
from pathlib import Path
from statistics import median

from lab.scoreboard.rows import FIT_FILE, FIT_LOGS, rows_of
from rlhfsim.api import estimate
from rlhfsim.calibration.biases import bias_priors, factors_of_phases, known_biases, section
from rlhfsim.calibration.evidence import evidence
from rlhfsim.calibration.fit import calibrate
from rlhfsim.calibration.observation import Observation, read_run
from rlhfsim.calibration.posterior import PriceModel, fit
from rlhfsim.calibration.predict import RunPricer, cluster_with, pricer_of, with_lengths
from rlhfsim.calibration.priors import DRIFT
from rlhfsim.calibration.profile_writer import region
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.logs.framework import around
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.calibrated import Provenance
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.step.engine_mode import biased, mode_of
from rlhfsim.step.region import apart
from rlhfsim.validation import assumptions
from rlhfsim.validation.cases.rlhf import specs_of
from rlhfsim.validation.kinds.rlhf import NEMO, PHASES, WITH_SYNC
from rlhfsim.validation.outcome import Skip
from rlhfsim.validation.rows import Row
from rlhfsim.what_if.replan import calibrated

FRAMEWORKS = {"verl": "verl", "NeMo-RL": "nemo-rl"}
"""As rows name it -> as plans do."""
LEAST_PHASES = 3
"""A row with fewer phases says little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One run predicted: seconds of its step, and whether intervals of its phases hold what was measured."""

    question: str
    family: str
    run: str
    measured_s: float
    before_s: float
    after_s: float
    factor_s: float
    step_held: bool
    held: tuple[bool, ...]
    """By phase."""


# --- runs -----------------------------------------------------------------------------------------


def published() -> Iterator[tuple[Observation, bool]]:
    """Rows of synchronous steps with phases, and whether their source fitted a cost."""
    for row in rows_of("rlhf"):
        name = FRAMEWORKS.get((row.text("framework") or "").split(" ")[0])
        if name is None or row.text("weight_sync_s") == "0.13":
            continue
        try:
            seen = _observed(assumptions.apply("rlhf", row)[0], name)
        except (Skip, RlhfsimError):
            continue
        if seen is not None:
            yield seen, row.file == FIT_FILE or row.source.startswith(FIT_LOGS)


def _observed(row: Row, framework: str) -> Observation | None:
    cells = {
        kind: row.number(column)
        for kind, (column, _) in PHASES.items()
        if (row.text(column) or "").replace(".", "", 1).isdigit()
    }
    if len(cells) < LEAST_PHASES:
        return None
    asked = specs_of(row)
    plan = estimate(asked.placement, asked.workload, replace(asked.cluster, framework=framework))
    if plan.placement.schedule.asynchronous:
        return None
    here = {phase.name for phase in plan.prediction.phases}
    phases, covers = {}, {}
    for kind, seconds in cells.items():
        own = PHASES[kind][1]
        verl = WITH_SYNC if kind == "generation" else around(*own)
        under = verl if framework == "verl" else NEMO.get(kind, own)
        under = tuple(p for p in under if p in here)
        clock = next((p for p in own if p in under), None)
        if clock and seconds:
            phases[clock], covers[clock] = (seconds,), under
    name = f"{row.source.rsplit('/', 1)[-1].split(' ')[0][:34]}:{row.line}"
    return Observation(
        name=name, plan=plan, phases=phases, covers=covers, step_s=(), counted=(0,), device="published"
    )


def folder_of_runs(folder: Path) -> Iterator[Observation]:
    """The runs of a folder; those that cannot be read are named."""
    for path in sorted(p for p in folder.iterdir() if p.is_dir()):
        try:
            yield as_measured(read_run(path))
        except RlhfsimError as error:
            print(f"not used: {path.name}: {error.message}")


def as_measured(run: Observation) -> Observation:
    """The run with its plan predicted by the shipped profile at the lengths that were measured."""
    return replace(run, plan=priced(run, load_profile(run.plan.hardware[0].profile)))


def family(run: Observation) -> str:
    """Framework, GPU and the mode in which the actor trains."""
    mode = mode_of("actor.train", run.plan.placement, run.plan.workload)
    return f"{run.plan.framework}, {run.plan.hardware[0].profile}, {mode}"


def same(row: Observation, run: Observation) -> bool:
    """Whether a published row is the run itself: one size, algorithm and GPU, and nearly the same generation."""
    generated = [x.medians.get("actor.generate", 0.0) for x in (row, run)]
    kind = [
        (round(x.plan.models[0].params, -9), x.plan.workload.algorithm, x.plan.hardware[0].profile)
        for x in (row, run)
    ]
    return kind[0] == kind[1] and min(generated) > 0.85 * max(generated)


# --- predictions ------------------------------------------------------------------------------------


def priced(run: Observation, profile: Profile) -> Plan:
    """What `rlhfsim estimate` says of the run with a profile."""
    workload = with_lengths(run.plan.workload, run.prompt_tokens, run.response_tokens)
    return estimate(run.plan.placement, workload, cluster_with(run.plan, profile))


def scored(question: str, run: Observation, after: Profile, factors: Mapping[str, float]) -> Scored:
    """One run before and after."""
    cold, plan = run.plan, priced(run, after)
    held, sums = [], dict.fromkeys(("measured", "before", "after", "factor"), 0.0)
    for clock, seconds in run.medians.items():
        under = run.covers.get(clock, (clock,))
        then = [p for p in plan.prediction.phases if p.name in under]
        before = sum(p.seconds for p in cold.prediction.phases if p.name in under)
        if not before:
            continue
        below, above = apart(then, {p.name: 1.0 for p in then if biased(p.name)})
        after_s = sum(p.seconds for p in then)
        low, high = after_s - below, after_s + above
        if seconds > 0.01 * sum(run.medians.values()):
            held.append(low <= seconds <= high)
        own = (seconds, before, after_s, before * factors.get(clock, 1.0))
        sums = {name: total + part for (name, total), part in zip(sums.items(), own, strict=True)}
    now = plan.prediction
    low, high = (sums["after"] * side / now.step_s for side in (now.low_s, now.high_s))
    if run.step_s:
        cold_s, low, high = cold.prediction.step_s, now.low_s, now.high_s
        sums = {
            "measured": median(run.step_s),
            "before": cold_s,
            "after": now.step_s,
            "factor": cold_s + sums["factor"] - sums["before"],
        }
    return Scored(
        question=question,
        family=family(run),
        run=run.name,
        measured_s=sums["measured"],
        before_s=sums["before"],
        after_s=sums["after"],
        factor_s=sums["factor"],
        step_held=low <= sums["measured"] <= high,
        held=tuple(held),
    )


def within(runs: Sequence[Observation]) -> Iterator[Scored]:
    """The questions `one` and `left` of a family."""
    base = load_profile(runs[0].plan.hardware[0].profile)
    print("within", family(runs[0]), len(runs), file=sys.stderr, flush=True)
    fits = {run.name: _fitted((run,), base) for run in runs}
    for one, other in permutations(runs, 2):
        yield scored("one", other, *fits[one.name])
    for run in runs if len(runs) > 2 else ():
        yield scored("left", run, *_fitted([r for r in runs if r is not run], base))


def _fitted(runs: Sequence[Observation], base: Profile) -> tuple[Profile, dict[str, float]]:
    cases = [pricer_of(run, base) for run in runs]
    model = PriceModel(cases, evidence(cases)[0])
    return calibrated(calibrate(runs, base, errors=False)), factors_of_phases(model)


def across(runs: Sequence[Observation], others: Sequence[Observation]) -> Iterator[Scored]:
    """The question `family`: biases alone, from runs on any GPU."""
    cases = [pricer_of(run) for run in others]
    model = PriceModel(cases, evidence(cases)[0])
    biases = known_biases(model, fit(model, bias_priors(model)))
    factors = factors_of_phases(model)
    for run in runs:
        base = load_profile(run.plan.hardware[0].profile)
        alone = [replace(known, near=()) for known in biases]  # runs on another GPU are not near
        after = replace(base, biases=section(alone, "other families"), calibration=_origin(others, cases))
        yield scored("family", run, after, factors)


def _origin(runs: Sequence[Observation], cases: Sequence[RunPricer]) -> Provenance:
    base = cases[0].profile.name
    return Provenance(
        base=base,
        date="unknown",
        device="several",
        interconnect="several",
        runs=tuple(run.name for run in runs),
        data=len(runs),
        drift=DRIFT,
        region=region(runs),
    )


# --- the table --------------------------------------------------------------------------------------


def off(predicted: float, measured: float) -> float:
    """|predicted / measured - 1|."""
    return abs(predicted / measured - 1)


def report(rows: Iterable[Scored], fitted_on: set[str]) -> None:
    """Medians by question and family, then every row."""
    known = sorted(rows, key=lambda r: (r.question, r.family, r.run))
    print(
        "question  family                                pairs  before  after  by factor  step held  phases held"
    )
    for (question, name), group in groupby(known, key=lambda r: (r.question, r.family)):
        _line(f"{question:9} {name:36}", list(group))
    for question, group in groupby(known, key=lambda r: r.question):
        _line(f"{question:9} {'all':36}", list(group))
    print("\nrun, measured, before, after, by factor")
    for r in known:
        mark = " (fitted on)" if r.run in fitted_on else ""
        times = " ".join(f"{x:9.2f}" for x in (r.measured_s, r.before_s, r.after_s, r.factor_s))
        print(f"{r.question:7} {r.family:34} {r.run[:40]:40} {times} {'held' if r.step_held else ''}{mark}")


def _line(title: str, rows: Sequence[Scored]) -> None:
    before, after, factor = (
        median(off(float(getattr(r, name)), r.measured_s) for r in rows)
        for name in ("before_s", "after_s", "factor_s")
    )
    phases = [held for r in rows for held in r.held]
    steps = sum(r.step_held for r in rows) / len(rows)
    print(
        f"{title} {len(rows):6} {before:7.0%} {after:6.0%} {factor:10.0%} {steps:10.0%} "
        f"{sum(phases) / len(phases):12.0%} of {len(phases)}"
    )


def main(arguments: Sequence[str]) -> None:
    """Both tables."""
    logs = [run for path in arguments for run in folder_of_runs(Path(path))]
    rows = [(run, fits) for run, fits in published() if not any(same(run, log) for log in logs)]
    runs = [*logs, *(run for run, _ in rows)]
    fitted_on = {run.name for run, fits in rows if fits}
    families: dict[str, list[Observation]] = {}
    for run in runs:
        families.setdefault(family(run), []).append(run)
    results: list[Scored] = []
    for name, members in families.items():
        if len(members) > 1:
            results += within(members)
        mine = members[0].plan.framework
        others = [r for r in runs if r.plan.framework == mine and family(r) != name]
        results += across(members, others) if others else ()
    report(results, fitted_on)


if __name__ == "__main__":
    main(sys.argv[1:])
