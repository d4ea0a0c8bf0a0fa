"""A reward model that no key of a framework names: where a plan has it, as a comment of its launch holds it.

Its scores come from an environment, a function or an address of the user's. What scores behind these costs
what it costs in the plan, until somebody says otherwise.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

from rlhfsim.frozen import frozen
from rlhfsim.interchange.configuration.described import (
    ROLLOUT,
    RoleDescription,
    RunDescription,
    training_layout,
)
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.plan import Plan
from rlhfsim.specs.loading import Source, convert
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import Residency

SERVED_REWARD = "plan.reward_role"
"""Name of the comment."""
VARIABLES = ("${REWARD_MODEL}", "${REWARD}")
"""What is written in place of the reward model in the launch of a framework whose keys name it."""


@frozen
class ServedReward:
    """The reward model of a plan, as the comment holds it."""

    model: str
    layout: Layout
    residency: Residency = "resident"
    gpus: int
    """GPUs of its pool."""
    beside: str = ""
    """A role that has the same GPUs; empty: it has its own."""


def served_reward(plan: Plan, scripts: str) -> dict[str, Any] | None:
    """The reward model of a plan as JSON; None: it has none, or `scripts`, its launch, name it."""
    placement, placed, model = plan.placement, plan.placement.role("reward"), plan.workload.reward.model
    if placed is None or model is None or any(name in scripts for name in VARIABLES):
        return None
    usual = Layout()
    own = {f.name: getattr(placed.layout, f.name) for f in fields(Layout) if f.init}
    others = (name for name, role in placement.roles.items() if role.pool == placed.pool and name != "reward")
    said = {
        "model": model,
        "layout": {name: value for name, value in own.items() if value != getattr(usual, name)},
        "residency": placed.residency,
        "gpus": placement.pool(placed.pool).gpus,
        "beside": next(others, ""),
    }
    return {name: value for name, value in said.items() if value not in ("", "resident")}


def with_served_reward(s: FrameworkSettings, run: RunDescription) -> RunDescription:
    """A run with the reward model of the comment, where its keys name none.

    Raises:
        RlhfsimError: the comment holds what cannot be.
    """
    said = s.find(SERVED_REWARD)
    if said is None or run.reward_model is not None:
        return run
    read = convert(ServedReward, Source(s.name, "", said))
    pool = _pool(run, read.beside)
    gpus = read.gpus if pool else run.gpus
    own = {f.name: getattr(read.layout, f.name) for f in fields(Layout) if f.init and f.name != "dp"}
    layout = training_layout(_of_pool(run, pool, gpus), **own)
    role = RoleDescription(layout=layout, residency=read.residency, pool=pool, gpus=gpus)
    return replace(run, reward_model=read.model, roles={**run.roles, "reward": role})


def _pool(run: RunDescription, beside: str) -> str | None:
    """Name of the pool that it shares, or of its own; None: that which trains."""
    if beside == "rollout" and run.rollout_gpus is not None:
        return ROLLOUT
    if beside in ("actor", "rollout"):
        return None
    return run.roles[beside].pool if beside in run.roles else "reward"


def _of_pool(run: RunDescription, pool: str | None, gpus: int) -> int:
    """GPUs of the pool as the keys say it now, where they do."""
    shared: Collection[int] = [role.gpus for role in run.roles.values() if pool and role.pool == pool]
    return run.rollout_gpus or gpus if pool == ROLLOUT else next(iter(shared), gpus)
