"""From the step of a plan to a whole run: its steps, what staleness adds, and what failures cost.

    steps = S (1 + p v)            S given or read from a curve, p per version of lag, v the plan's lag
    t     = steps x step / goodput
    USD   = steps x USD per step / goodput

S is the user's: a number, or where a measured curve reaches a target. p is an assumption of the
scenario with its source. Not known here: how p depends on the task, or a curve at another batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.provenance import content_hash
from rlhfsim.search.request import CHANGES, STALE, Request, switches_on
from rlhfsim.search.requirements import Requirement
from rlhfsim.simulation.summary import FaultOptions, SimulationOptions, goodput_of
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.model.roles import models_of
from rlhfsim.step.calls import CallSetting
from rlhfsim.units import format, significant
from rlhfsim.what_if.curve_files import rows_of
from rlhfsim.what_if.risk.odds import odds
from rlhfsim.what_if.risk.run import outlook_for
from rlhfsim.what_if.scenarios.designs import DesignResult, Designs, search_key
from rlhfsim.what_if.scenarios.document import FaultsText, RunText
from rlhfsim.what_if.scenarios.points import BASE, PointQuestion
from rlhfsim.what_if.scenarios.result import PointResult, PointTarget


def points(
    cases: Sequence[PointQuestion], designs: Designs, requirements: Sequence[Requirement] = ()
) -> list[PointResult]:
    """Some points with their plans, designed side by side.

    Raises:
        RlhfsimError: a curve that cannot be read or does not reach its target.
    """
    designed = designs.all([case.request for case in cases])
    return [result(case, design, requirements) for case, design in zip(cases, designed, strict=True)]


def result(
    case: PointQuestion, designed: DesignResult, requirements: Sequence[Requirement] = ()
) -> PointResult:
    """A point with its plan and its run, and with which probability it meets what is asked of all points.

    Raises:
        RlhfsimError: a curve that cannot be read or does not reach its target.
    """
    plan, length = designed.plan, steps_of(case)
    prices = [pool.profile.price for pool in case.request.cluster.node_groups]
    point = PointResult(
        name=case.name,
        changes=dict(case.changes),
        before=dict(case.before),
        plan=plan,
        shortage=designed.shortage,
        gap=designed.gap,
        length=length,
        target=case.base.run.target,
        input_hash=content_hash(
            search_key(case.request), [price and price.value for price in prices], case.base.run, length
        ),
    )
    if plan is None:
        return point
    notes = [*_search_notes(case, designed, plan)]
    if length is not None:
        steps, penalty_notes = _with_penalty(length, plan.placement.schedule.staleness, case.base.run)
        share, fault_notes = _goodput(case, plan)
        notes += [*penalty_notes, *fault_notes]
        if share is not None:
            point = _over_run(point, steps, share, counted=case.base.run.faults is not None)
    if plan.prediction.usd_per_step is None:
        notes.append("no price is known for its GPUs")
    return replace(point, notes=tuple(notes), targets=tuple(_targets(case, plan, point.steps, requirements)))


def _targets(
    case: PointQuestion, plan: Plan, steps: float | None, requirements: Sequence[Requirement]
) -> Iterator[PointTarget]:
    """Failures come at the published rate of the profile, whatever the scenario says of them."""
    if requirements:
        length = None if steps is None else max(1, round(steps))
        for verdict in odds(requirements, outlook_for(case.request, plan, length)).verdicts:
            asked = verdict.requirement
            yield PointTarget(
                text=asked.text,
                quantity=asked.quantity,
                actual=verdict.actual,
                met=verdict.met,
                probability=verdict.probability,
            )


def _over_run(point: PointResult, steps: float, share: float, *, counted: bool) -> PointResult:
    """The step of the plan, `steps` times, at a goodput of `share`."""
    assert point.plan is not None
    p, often = point.plan.prediction, steps / share
    return replace(
        point,
        steps=steps,
        run_s=p.step_s * often,
        run_low_s=p.low_s * often,
        run_high_s=p.high_s * often,
        run_usd=None if p.usd_per_step is None else p.usd_per_step * often,
        goodput=share if counted else None,
    )


def _search_notes(case: PointQuestion, designed: DesignResult, plan: Plan) -> Iterator[str]:
    """A search that ended early, and choices that change what is learnt beyond what the workload asks for."""
    if designed.gap > 0:
        percent = significant(100 * designed.gap, 2)
        yield f"the search ended at its time limit: a plan could still be up to {percent} % shorter"
    wanted, planned = case.request.workload, plan.workload
    words = {
        "LoRA": (wanted.lora, planned.lora),
        "an FP8 rollout": (wanted.rollout_precision, planned.rollout_precision),
        "8-bit Adam": (wanted.optimizer, planned.optimizer),
        "log-probs of the rollout": (wanted.old_logprobs, planned.old_logprobs),
    }
    chosen = [name for name, (before, after) in words.items() if before != after]
    if chosen:
        yield f"{' and '.join(chosen)} may change what is learnt; nothing is assumed about that"
    if "request.allow" in case.changes and (unused := _unused(case.request, plan)):
        yield f"{' and '.join(unused)} may compete, and the best plan does without"


def _unused(request: Request, plan: Plan) -> list[str]:
    """Allowed switches that a plan does not use, in words."""
    used = {*switches_on(plan.workload, request.allow), *STALE & {plan.architecture}}
    return [name for name in sorted(request.allow - used) if name in CHANGES or name in STALE]


# --- steps ------------------------------------------------------------------------------------------


def steps_of(case: PointQuestion) -> float | None:
    """Steps of the run without lag; None where the scenario does not say.

    Raises:
        RlhfsimError: as in `reached`.
    """
    run = case.base.run
    if run.curve is None or run.target is None:
        return None if run.steps is None else float(run.steps)
    path = Path(run.curve)
    beside = Path(case.located.name).parent / path
    try:
        return reached(beside if beside.is_file() else path, run.target)
    except RlhfsimError as error:
        raise error.at(case.located.place((BASE, "run", "curve"))) from error


@lru_cache(maxsize=64)
def reached(path: Path, target: float) -> float:
    """The first step at which a measured curve reaches a target, between two rows on a straight line.

    Raises:
        RlhfsimError: no rows of step and value, steps that do not ascend, or a target beyond the last row.
    """
    rows = tuple(rows_of(path))
    if not rows:
        raise RlhfsimError(
            "empty-file", "the curve has no rows", place=Place(file=str(path)), help="two columns: step,value"
        )
    sign = 1.0 if target >= rows[0].value else -1.0
    before = None
    for row in rows:
        if sign * (row.value - target) >= 0:
            if before is None or row.value == before.value:
                return max(1.0, row.step)
            part = (target - before.value) / (row.value - before.value)
            return max(1.0, before.step + part * (row.step - before.step))
        before = row
    best = max(rows, key=lambda r: sign * r.value)
    raise RlhfsimError(
        "target-not-reached",
        f"the curve {path.name} ends at step {significant(rows[-1].step, 6)} and comes to "
        f"{significant(best.value)}, not to {significant(target)}",
        help="give a target that was measured, or a longer curve: it is not extrapolated",
    )


def _with_penalty(length: float, lag: float, run: RunText) -> tuple[float, list[str]]:
    """Steps with what the scenario says that stale samples cost."""
    if lag == 0:
        return length, []
    penalty, given = run.staleness_penalty, significant(length, 6)
    age = f"samples are up to {significant(lag)} version{'s' if lag != 1 else ''} old"
    if penalty is None:
        return length, [f"{age}; no penalty for that is assumed: {given} steps may not suffice"]
    steps = length * (1 + penalty.per_version * lag)
    more = f"{significant(100 * penalty.per_version, 2)} % more steps a version assumed"
    return steps, [f"{age}: {more}, {significant(steps, 6)} in place of {given} ({penalty.source})"]


# --- failures ---------------------------------------------------------------------------------------


def _goodput(case: PointQuestion, plan: Plan) -> tuple[float | None, list[str]]:
    """Share of the time that makes progress; None where a job makes none."""
    faults, workload = case.base.run.faults, case.request.workload
    if faults is None:
        return 1.0, []
    setting = CallSetting(
        models=models_of(workload), placement=plan.placement, workload=workload, cluster=case.request.cluster
    )
    mtbf, published = _mtbf(faults, case.request.cluster)
    options = FaultOptions(
        mtbf_s=mtbf,
        restart_s=faults.restart,
        checkpoint_s=faults.checkpoint,
        interval_s=faults.checkpoint_interval,
    )
    try:
        good = goodput_of(setting, SimulationOptions(faults=options))
    except RlhfsimError as error:
        return None, [error.message]
    assert good is not None
    node, restart, blocked = (format(s, "s") for s in (mtbf, faults.restart, faults.checkpoint))
    often = (
        f"the job fails every {format(good.mtbf_s, 's')}, a checkpoint every {format(good.interval_s, 's')}"
    )
    return good.simulated, [
        f"goodput {significant(100 * good.simulated)} %: {often}",
        f"a node fails every {node}{published}; {restart} to restart, {blocked} a checkpoint "
        f"({faults.source})",
    ]


def _mtbf(faults: FaultsText, cluster: Cluster) -> tuple[float, str]:
    """Mean seconds between failures of a node, and where they come from if nobody gave them."""
    if faults.mtbf is not None:
        return faults.mtbf, ""
    group = cluster.node_group
    rate = group.profile.coefficient("mtbf_per_gpu")
    low, high = (format(x / group.gpus_per_node, "s") for x in (rate.low, rate.high))
    return rate.value / group.gpus_per_node, f" ({low} to {high}: {rate.source})"
