"""A plan with what a framework runs in place of something it cannot be told, and what that costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan, Prediction
from rlhfsim.specs.placement.placement import RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.workload import Reward, Rules
from rlhfsim.units import Dimension, format

NEGLIGIBLE = 5e-4
"""Share of a step or of a GPU that is not worth a word."""


def with_workload(plan: Plan, **changes: Any) -> Plan:
    """The plan for a workload with other fields."""
    return replace(plan, workload=replace(plan.workload, **changes))


def with_placement(plan: Plan, **changes: Any) -> Plan:
    """The plan with other fields of its placement."""
    return replace(plan, placement=replace(plan.placement, **changes))


def without_reward(plan: Plan) -> Plan:
    """The plan whose rewards are rules, without a reward model and the GPUs that it has alone."""
    placement = plan.placement
    used = {role.pool for name, role in placement.roles.items() if name != "reward"}
    pools = tuple(pool for pool in placement.pools if pool.name in used)
    return replace(
        plan,
        workload=replace(plan.workload, reward=Reward(model=None, rules=Rules())),
        placement=replace(placement.having(reward=None), pools=pools),
    )


def with_schedule(plan: Plan, **changes: Any) -> Plan:
    """The plan with other fields of its schedule."""
    return with_placement(plan, schedule=replace(plan.placement.schedule, **changes))


def with_rollout(plan: Plan, rollout: RolloutPlacement, **changes: Any) -> Plan:
    """The plan whose rollout has other fields of its layout; `sleep` is one of the role's."""
    role = {name: changes.pop(name) for name in ("sleep", "residency") if name in changes}
    return with_placement(plan, rollout=replace(rollout, layout=replace(rollout.layout, **changes), **role))


def with_roles(plan: Plan, change: Callable[[str, RolePlacement], RolePlacement]) -> Plan:
    """The plan with each trained and scoring role changed."""
    return with_placement(
        plan, **{name: change(name, role) for name, role in plan.placement.trainers.items()}
    )


def with_layouts(plan: Plan, *names: str, **changes: Any) -> Plan:
    """The plan in which some trained and scoring roles have other fields of their layouts."""

    def changed(name: str, role: RolePlacement) -> RolePlacement:
        return replace(role, layout=replace(role.layout, **changes)) if name in names else role

    return with_roles(plan, changed)


def like_actor(plan: Plan, name: str, **changes: Any) -> Plan | None:
    """The plan in which a role has the actor's layout; None where its other fields forbid that."""
    role = replace(plan.placement.trainers[name], layout=plan.placement.actor.layout, **changes)
    try:
        return with_placement(plan, **{name: role})
    except RlhfsimError:  # a reference cannot be swapped in place of an actor that is gone
        return None


def cost(plan: Prediction, nearest: Prediction) -> str:
    """What the nearest costs against the plan: seconds of a step, bytes of the fullest GPU, risk."""
    seconds, held = nearest.step_s - plan.step_s, nearest.peak_memory_bytes - plan.peak_memory_bytes
    parts = []
    if abs(seconds) > NEGLIGIBLE * plan.step_s:
        parts.append(f"{_signed(seconds, 's')} a step ({seconds / plan.step_s:+.1%})")
    if abs(held) > NEGLIGIBLE * plan.capacity_bytes:
        parts.append(f"{_signed(held, 'byte')} on the fullest GPU")
    host = nearest.host_peak_bytes - plan.host_peak_bytes
    if abs(host) > NEGLIGIBLE * plan.capacity_bytes:
        parts.append(f"{_signed(host, 'byte')} of host memory")
    before, after = plan.probability_out_of_memory, nearest.probability_out_of_memory
    if abs(after - before) > 0.01:
        parts.append(f"risk of running out {before:.1%} -> {after:.1%}")
    return ", ".join(parts) or "no cost that is predicted"


def _signed(value: float, unit: Dimension) -> str:
    return f"{'+' if value > 0 else '-'}{format(abs(value), unit)}"
