"""Fields by name, out of a plan and into the description of a run: the middle of every framework's keys.

A field is a path of the plan (`workload.prompts`, `schedule.staleness`), where a role's layout counts as the
role (`actor.tp`), or one of `PLANNED`, which several keys need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Protocol

from rlhfsim.interchange.configuration.described import RunDescription, rollout_layout, training_layout
from rlhfsim.interchange.export import longest_prompt, longest_response, nodes_of
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.specs.workload.roles import GENERATING, MODELS


class Fields(Protocol):
    """Values by field, of a plan or of a configuration."""

    def __getitem__(self, name: str) -> Any: ...


def _generated(plan: Plan) -> int | None:
    sampling = plan.workload.dynamic_sampling
    return sampling.prompts_of(plan.workload.prompts) if sampling else None


def leaves(placed: RolePlacement | None) -> bool:
    """Whether states of a role leave its GPUs between its calls."""
    return placed is not None and (placed.offload_between or placed.residency == "offloaded")


def shares(plan: Plan) -> bool:
    """Whether the rollout has the GPUs that train."""
    return plan.placement.together("actor", "rollout")


PLANNED: Mapping[str, Callable[[Plan], Any]] = {
    "shared": shares,
    "packs": lambda plan: plan.placement.actor.layout.pack_tokens is not None,
    "kl": lambda plan: plan.placement.role("reference") is not None,
    "in_reward": lambda plan: plan.workload.algorithm in ("ppo", "reinforce++"),
    "leaves": lambda plan: leaves(plan.placement.actor),
    "alpha": lambda plan: 2 * plan.workload.lora.rank if plan.workload.lora else None,
    "generated": _generated,
    "limit.prompt": longest_prompt,
    "limit.response": longest_response,
    "limit.total": lambda plan: longest_prompt(plan) + longest_response(plan),
    "samples_of_update": lambda plan: plan.workload.num_sequences // plan.workload.mini_batches,
    "prompts_of_update": lambda plan: plan.workload.prompts // plan.workload.mini_batches,
}
"""Fields that are not paths: whether the rollout shares the GPUs that train, whether micro-batches are packs,
whether a KL term is there and in the reward, whether the actor's states leave their GPUs, the scale of
adapters, prompts of a generation batch that is filtered, lengths, samples or prompts of an optimizer step."""


_PLACED = ("pool", "residency", "offload_between")
ROLES = dict.fromkeys(MODELS, _PLACED) | dict.fromkeys(GENERATING, ("pool", "sleep"))
"""Role -> its fields other than those of its layout, and than `nodes` and GPUs of `each` of its pool."""


class PlanFields:
    """Fields of a plan, those that only some frameworks have among them."""

    def __init__(self, plan: Plan, own: Mapping[str, Callable[[Plan], Any]]) -> None:
        """`own`: fields in addition to `PLANNED`."""
        self._plan, self._planned = plan, {**PLANNED, **own}

    def __getitem__(self, name: str) -> Any:
        """The value of a field; None where its role is missing."""
        if name in self._planned:
            return self._planned[name](self._plan)
        root, _, path = name.partition(".")
        found: Any = self._plan.workload if root == "workload" else getattr(self._plan.placement.keyed, root)
        if found is not None and root in ROLES and path not in ROLES[root]:
            if path in ("nodes", "each"):
                return nodes_of(self._plan, self._plan.placement.pool(found.pool).gpus)[path == "each"]
            found = _as_said(found.layout)
        for part in path.split(".") if path else ():
            found = None if found is None else getattr(found, part)
        return found


def _as_said(layout: Layout | RolloutLayout) -> Layout | RolloutLayout:
    """A layout with what follows of other fields: packs while scoring, sequences that TP 1 does not cut."""
    if isinstance(layout, RolloutLayout):
        return layout
    return replace(
        layout,
        score_pack_tokens=layout.score_pack_tokens or layout.pack_tokens,
        score_micro_batch=None if layout.pack_tokens else layout.sequences(scoring=True),
        sequence_parallel=layout.sequence_parallel and layout.tp > 1,
    )


DESCRIBED = {
    "actor.gpus": "gpus",
    "actor.each": "gpus_per_node",
    "limit.prompt": "max_prompt",
    "limit.response": "max_response",
    "limit.total": "max_tokens",
    "actor.residency": "actor_residency",
    "actor.offload_between": "optimizer_leaves",
    "reference.residency": "scoring_residency",
    "workload.critic": "critic",
    "workload.reward.model": "reward_model",
    "workload.lora.rank": "lora_rank",
    "workload.lora.base": "lora_base",
}
"""Field -> that of a description, where it is not the last part of its name."""
_RUN = {field.name for field in fields(RunDescription)}
_LAYOUT = {
    "actor": [f.name for f in fields(Layout)],
    "rollout": ["gpus", *(f.name for f in fields(RolloutLayout))],
}


def cut(read: Fields, gpus: int, *, role: str = "actor", **changes: Any) -> Layout:
    """The layout of a role as rows say it, on so many GPUs."""
    said = {name: read[f"{role}.{name}"] for name in _LAYOUT["actor"] if name not in changes} | changes
    split = said.pop("sequence_parallel") or (said["tp"] or 1) == 1
    return training_layout(
        gpus, sequence_parallel=split, **{name: value for name, value in said.items() if value is not None}
    )


def described(said: dict[str, Any]) -> RunDescription:
    """The run that fields say; `layout` and `rollout` may be there as a whole."""
    layout, rollout = (
        {k: said.pop(f"{role}.{k}") for k in _LAYOUT[role] if f"{role}.{k}" in said} for role in _LAYOUT
    )
    named = {DESCRIBED.get(name, name.rpartition(".")[2]): value for name, value in said.items()}
    run = {name: value for name, value in named.items() if name in _RUN}
    if "layout" not in run:
        split = layout.pop("sequence_parallel", False) or layout.get("tp", 1) == 1
        run["layout"] = training_layout(said["actor.gpus"], sequence_parallel=split, **layout)
    if "rollout" not in run:
        gpus = rollout.pop("gpus", said["actor.gpus"])
        run.setdefault("rollout_gpus", None if said["shared"] else gpus)
        run["rollout"] = rollout_layout(gpus, replicas=rollout.pop("dp", None), **rollout)
    return RunDescription(**run)
