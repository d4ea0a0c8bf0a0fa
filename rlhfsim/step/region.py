"""How far a plan lies from the runs that are known, and what that does to its intervals.

    a profile that was calibrated, on the runs behind it:
        distance d of a phase: from their hull, in e-folds (specs.calibration)
        u^2 = w^2 + r^2 (1 - exp(-(drift d)^2 / r^2))      w: ln(high / s) on the runs, the lower side alike
        r^2 = ln(high / s)^2 of the plan that no run is near (below) - w^2, at least 0
        the step: with the mean of d over the phases of its critical chain, weighted by their seconds
    any other, on the published runs: the discrepancy of the model (`step.measured`), alike for all phases;
        the step also by its groups (`step.groups`), whose bias is its P50

Near the runs an interval grows by the drift; far from them it is that of a plan without calibrated runs: a
run makes no plan less certain, and what runs scatter by (in w) and the drift tell of one spread, a variogram
with its sill (Matheron 1963, Econ. Geol. 58, 1246).

Not known here: which of the five coordinates matters to which phase; all count alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Z90
from rlhfsim.plan import NearestRun, Plan, PlannedModel, PredictedPhase, Prediction
from rlhfsim.specs.hardware.calibrated import Point, Provenance, distance
from rlhfsim.specs.hardware.hardware import Cluster, NodeGroup, Profile
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.lengths import stats
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.engine_mode import bias, point_of, pool_of
from rlhfsim.step.groups import laws
from rlhfsim.step.measured import (
    COEFFICIENTS,
    Conditions,
    Near,
    dispatcher_of,
    kernels_of,
    mixer_of,
    nearest,
    spread,
)
from rlhfsim.step.measured import FAR as FAR_RUN
from rlhfsim.step.measured import widened as wider

FAR = math.log(2)
"""Distance from which people are told: a factor of 2 in one coordinate."""
SHORT = 0.02
"""Share of the step below which a phase is not worth a warning."""
T = TypeVar("T", PredictedPhase, Prediction)


@frozen
class Outside:
    """One phase of a plan, seen from the calibrated region."""

    phase: str
    profile: str
    distance: float | None
    """e-folds; None: the runs did not have this phase."""


def point(phase: str, models: Sequence[PlannedModel], workload: Workload, placement: Placement) -> Point:
    """Where a phase of a plan lies (`specs.hardware.calibrated.COORDINATES`)."""
    return point_of(_params(phase, models), pool_of(phase, placement), placement, workload)


def _params(phase: str, models: Sequence[PlannedModel]) -> float:
    """Parameters of the model of the phase's role."""
    params = {model.role: model.params for model in models}
    return params.get(phase.split(".")[0]) or params["actor"]


def outside(plan: Plan, profiles: Sequence[Profile]) -> tuple[Outside, ...]:
    """Distance of every phase that ran on a calibrated profile; `profiles` as in `plan.hardware`."""
    items = []
    for phase in plan.prediction.phases:
        pool = pool_of(phase.name, plan.placement)
        profile = profiles[plan.placement.pool(pool).hardware]
        if profile.calibration is not None:
            away = _away(profile.calibration, phase.name, plan)
            items.append(Outside(phase=phase.name, profile=profile.name, distance=away))
    return tuple({item.phase: item for item in items}.values())


def _away(known: Provenance, phase: str, plan: Plan) -> float | None:
    points = known.region.get(phase)
    return distance(points, point(phase, plan.models, plan.workload, plan.placement)) if points else None


def widened(plan: Plan, profiles: Sequence[Profile]) -> Plan:
    """The plan with intervals that hold what its coefficients do not say, wider away from the known runs."""
    drifts = [p.calibration.drift.value for p in profiles if p.calibration is not None]
    if not drifts:
        return plan if plan.nearest else _beside_published_runs(plan, profiles[0])
    away = {item.phase: item.distance or 0.0 for item in outside(plan, profiles)}
    far = _beside_published_runs(plan, profiles[0]).prediction
    near, drift = _as_measured(plan, profiles).prediction, max(drifts)
    chain = [p for p in near.phases if p.critical]
    total = sum(p.seconds for p in chain) or 1.0
    mean = sum(p.seconds * away.get(p.name, 0.0) for p in chain) / total
    phases = tuple(
        _farther(p, q, p.seconds, drift * away.get(p.name, 0.0))
        for p, q in zip(near.phases, far.phases, strict=True)
    )
    return replace(plan, prediction=_farther(replace(near, phases=phases), far, near.step_s, drift * mean))


def _farther(near: T, far: T, seconds: float, drifted: float) -> T:
    """The interval `drifted` (drift d) away from runs on which it is `near`, and far from which `far`."""
    if drifted <= 0 or seconds <= 0:
        return near
    over, far_over = (math.log(max(side.high_s, seconds) / seconds) for side in (near, far))
    high = _between(over, far_over, drifted)
    if near.low_s <= 0:
        return replace(near, high_s=seconds * math.exp(high))
    least = math.log(seconds / min(far.low_s, seconds)) if far.low_s > 0 else math.inf
    low = _between(math.log(seconds / min(near.low_s, seconds)), least, drifted)
    return replace(near, low_s=seconds * math.exp(-low), high_s=seconds * math.exp(high))


def _between(near: float, far: float, drifted: float) -> float:
    """u: one side of an interval, in ln."""
    room = far**2 - near**2
    if room <= 0:
        return near
    share = drifted**2 if math.isinf(room) else -room * math.expm1(-(drifted**2) / room)
    return math.sqrt(near**2 + share)


def _as_measured(plan: Plan, profiles: Sequence[Profile]) -> Plan:
    """The plan with the intervals that runs of its framework gave to phases.

    They take the place of the coefficients' own: a factor was measured with the coefficients as they are, so
    that its interval holds their doubt. Of the step: calls share a part of it, since what a framework adds it
    adds to all; the rest, moves and the controller are off by themselves.
    """
    cluster = Cluster(
        node_groups=tuple(
            NodeGroup(profile=p, gpus=h.gpus, gpus_per_node=h.gpus_per_node, fabric=h.fabric, wan=h.wan)
            for p, h in zip(profiles, plan.hardware, strict=True)
        ),
        framework=plan.framework,
    )
    phases, told = [], dict[str, float]()
    for phase in plan.prediction.phases:
        params = _params(phase.name, plan.models)
        known = bias(phase.name, params, plan.placement, plan.workload, cluster)
        if known is not None:
            factor = known.factor
            low, high = (phase.seconds * x / factor.value for x in (factor.low, factor.high))
            phase = replace(phase, low_s=low, high_s=high)
            told[phase.name] = known.common
        phases.append(phase)
    if tuple(phases) == plan.prediction.phases:
        return plan
    step = plan.prediction.step_s
    below, above = apart([p for p in phases if p.critical], told)
    measured = replace(
        plan.prediction, phases=tuple(phases), low_s=max(0.0, step - below), high_s=step + above
    )
    return replace(plan, prediction=measured)


def apart(phases: Sequence[PredictedPhase], told: Mapping[str, float]) -> tuple[float, float]:
    """Seconds of a sum below and above it; `told`: share of a phase's variance that moves with others."""
    sides = ([(p, p.seconds - p.low_s) for p in phases], [(p, p.high_s - p.seconds) for p in phases])
    below, above = (
        math.hypot(
            math.fsum(off * math.sqrt(told.get(p.name, 0.0)) for p, off in side),
            *(off * math.sqrt(1 - told[p.name]) for p, off in side if p.name in told),
            math.fsum(off for p, off in side if p.name not in told),
        )
        for side in sides
    )
    return below, above


def conditions(plan: Plan, profile: Profile) -> Conditions:
    """What a plan runs on what, as measured runs are compared; `profile`: of its first GPUs."""
    actor = next(m for m in plan.models if m.role == "actor")
    work = plan.workload
    return Conditions(
        kind="rlhf.step" if plan.placement.rollout else "training",
        framework=plan.framework or "",
        backend=plan.placement.backend,
        gpu=plan.hardware[0].profile,
        model=actor.name,
        params=actor.params,
        moe=actor.active_params < actor.params,
        length=max(1.0, stats(work.prompt_len).mean + stats(work.response_len).mean),
        gpus=sum(h.gpus for h in plan.hardware),
        algorithm=work.algorithm,
        precision="bf16",
        mixer=mixer_of(actor.name),
        dispatcher=dispatcher_of(plan.placement.actor.layout),
        kernels=kernels_of(profile),
    )


def _beside_published_runs(plan: Plan, profile: Profile) -> Plan:
    """The plan with the model's discrepancy in its intervals, and the published run that is most like it."""
    question = conditions(plan, profile)
    found = nearest(question)
    away = found.distance if found else FAR_RUN
    base = profile[COEFFICIENTS[question.kind]]
    more = Z90 * spread(base, away)
    prediction = plan.prediction
    phases = tuple(_wider(p, p.seconds, more) for p in prediction.phases)
    wide = _wider(replace(prediction, phases=phases), prediction.step_s, more)
    if base > 0 and (law := laws().get(question.kind)):  # 0: the coefficients say all
        low, median, high = law.quantiles(wide.step_s, wide.low_s, wide.high_s, question)
        wide = replace(wide, low_s=low, centre=median / wide.step_s, high_s=high)
    return replace(plan, prediction=wide, nearest=_planned(found) if found else None)


def _planned(found: Near) -> NearestRun:
    run = found.run.conditions
    return NearestRun(
        framework=f"{run.framework} {found.run.release}".strip(),
        model=run.model,
        gpu=run.gpu,
        gpus=run.gpus,
        algorithm=run.algorithm,
        error=found.run.error,
        distance=found.distance,
        near=found.near,
        differs=found.differs,
        source=found.run.source,
    )


def _wider(item: T, seconds: float, more: float) -> T:
    """The interval with `more`, in ln seconds, added in squares on both sides."""
    low, high = wider(seconds, item.low_s, item.high_s, more)
    return replace(item, low_s=low, high_s=high)


def warnings(plan: Plan, profiles: Sequence[Profile]) -> tuple[str, ...]:
    """A sentence for the phases that matter and lie far from the calibrated region; those as far as each
    other share one."""
    sentences: dict[str, list[str]] = {}
    seconds = {p.name: p.seconds for p in plan.prediction.phases}
    for item in outside(plan, profiles):
        if seconds[item.phase] < SHORT * plan.prediction.step_s:
            continue
        if item.distance is None:
            text = f"no run behind profile {item.profile} had it; as uncertain as before calibration"
        elif item.distance > FAR:
            text = (
                f"a factor of {math.exp(item.distance):.2g} away from the runs behind profile {item.profile} "
                "in model, batch, lengths and GPUs taken together; intervals are wider"
            )
        else:
            continue
        sentences.setdefault(text, []).append(item.phase)
    return tuple(f"{', '.join(phases)}: {text}" for text, phases in sentences.items())
