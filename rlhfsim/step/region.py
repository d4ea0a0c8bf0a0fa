"""How far a plan lies from the runs that are known, and what that does to its intervals.

    a profile that was calibrated, on the runs behind it:
        distance d of a phase: from their hull, in e-folds (specs.calibration)
        upper side of the interval: ln(high / s) -> sqrt(ln(high / s)^2 + (drift d)^2), the lower side alike
        the step: with the mean of d over the phases of its critical chain, weighted by their seconds
    any other, on the published runs: the discrepancy of the model (`step.measured`), alike for all phases

Not known here: which of the five coordinates matters to which phase; all count alike.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rlhfsim.kernels.cost import Z90
from rlhfsim.plan import NearestRun, Plan, PlannedModel, PredictedPhase, Prediction
from rlhfsim.specs.hardware.calibrated import Point, Provenance, distance
from rlhfsim.specs.hardware.hardware import Cluster, NodeGroup, Profile
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.lengths import stats
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.engine_mode import bias, pool_of
from rlhfsim.step.measured import COEFFICIENTS, Conditions, Near, mixer_of, nearest, spread
from rlhfsim.step.measured import FAR as FAR_RUN
from rlhfsim.step.measured import widened as wider

FAR = math.log(2)
"""Distance from which people are told: a factor of 2 in one coordinate."""
SHORT = 0.02
"""Share of the step below which a phase is not worth a warning."""
T = TypeVar("T", PredictedPhase, Prediction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """One phase of a plan, seen from the calibrated region."""

    phase: str
    profile: str
    distance: float | None
    """e-folds; None: the runs did not have this phase."""


def point(phase: str, models: Sequence[PlannedModel], workload: Workload, placement: Placement) -> Point:
    """Where a phase of a plan lies (`specs.hardware.calibrated.COORDINATES`)."""
    role = phase.split(".")[0]
    params = {model.role: model.params for model in models}
    pool = pool_of(phase, placement)
    numbers = (
        params.get(role) or params["actor"],
        workload.num_sequences,
        stats(workload.prompt_len).mean,
        stats(workload.response_len).mean,
        placement.pool(pool).gpus,
    )
    a, b, c, d, e = (math.log(max(1.0, float(x))) for x in numbers)
    return a, b, c, d, e


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
    plan = _as_measured(plan, profiles)
    prediction, drift = plan.prediction, max(drifts)
    chain = [p for p in prediction.phases if p.critical]
    total = sum(p.seconds for p in chain) or 1.0
    mean = sum(p.seconds * away.get(p.name, 0.0) for p in chain) / total
    phases = tuple(_wider(p, p.seconds, drift * away.get(p.name, 0.0)) for p in prediction.phases)
    return replace(
        plan, prediction=_wider(replace(prediction, phases=phases), prediction.step_s, drift * mean)
    )


def _as_measured(plan: Plan, profiles: Sequence[Profile]) -> Plan:
    """The plan with the intervals that runs of its framework gave to phases.

    They take the place of the coefficients' own: a factor was measured with the coefficients as they are, so
    that its interval holds their doubt. Of the step: calls are as far off as each other, since what a
    framework adds it adds to all; moves and the controller rest on other coefficients, off by themselves.
    """
    cluster = Cluster(
        node_groups=tuple(
            NodeGroup(profile=p, gpus=h.gpus, gpus_per_node=h.gpus_per_node)
            for p, h in zip(profiles, plan.hardware, strict=True)
        ),
        framework=plan.framework,
    )
    phases, told = [], set[str]()
    for phase in plan.prediction.phases:
        factor = bias(phase.name, plan.placement, plan.workload, cluster)
        if factor is not None:
            low, high = (phase.seconds * x / factor.value for x in (factor.low, factor.high))
            phase = replace(phase, low_s=low, high_s=high)
            told.add(phase.name)
        phases.append(phase)
    if tuple(phases) == plan.prediction.phases:
        return plan
    step = plan.prediction.step_s
    below, above = apart([p for p in phases if p.critical], told)
    known = replace(plan.prediction, phases=tuple(phases), low_s=max(0.0, step - below), high_s=step + above)
    return replace(plan, prediction=known)


def apart(phases: Sequence[PredictedPhase], told: Container[str]) -> tuple[float, float]:
    """Seconds of a sum below and above it: phases in `told` move together, apart from others."""
    below, above = [0.0, 0.0], [0.0, 0.0]
    for p in phases:
        below[p.name in told] += p.seconds - p.low_s
        above[p.name in told] += p.high_s - p.seconds
    return math.hypot(*below), math.hypot(*above)


def conditions(plan: Plan) -> Conditions:
    """What a plan runs on what, as measured runs are compared."""
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
    )


def _beside_published_runs(plan: Plan, profile: Profile) -> Plan:
    """The plan with the model's discrepancy in its intervals, and the published run that is most like it."""
    question = conditions(plan)
    found = nearest(question)
    away = found.distance if found else FAR_RUN
    more = Z90 * spread(profile[COEFFICIENTS[question.kind]], away)
    prediction = plan.prediction
    phases = tuple(_wider(p, p.seconds, more) for p in prediction.phases)
    wide = _wider(replace(prediction, phases=phases), prediction.step_s, more)
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
