"""The models of one step: who plays which role."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.workload.dataflow import Role
from rlhfsim.specs.workload.workload import Workload

SAME = "same"
"""In a workload: the shape of the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The shape of every role's model; None where the step has no such role."""

    actor: ModelSpec
    """With a value head where it becomes a reward model."""
    critic: ModelSpec | None = None
    """With a value head."""
    reference: ModelSpec | None = None
    reward: ModelSpec | None = None
    """With a value head."""

    def of(self, role: Role | str) -> ModelSpec:
        """The model of a role that is present; an absent one is our own bug."""
        model: ModelSpec | None = getattr(self, role)
        assert model is not None, f"the step has no {role} model"
        return model

    def params_of(self, phase: str) -> float:
        """Parameters of the model of the role that a phase begins with; the actor's where there is none."""
        model: ModelSpec | None = getattr(self, phase.split(".")[0], None)
        return _params(model or self.actor)


@lru_cache(maxsize=256)
def _params(model: ModelSpec) -> float:
    """Asked for at every price."""
    return float(model.num_params)


def models_of(workload: Workload) -> Models:
    """The models a workload names: presets, aliases, paths of a `config.json`, or `same`.

    Raises:
        RlhfsimError: a name that is no preset, alias or readable file.
    """
    policy = resolve_model(workload.model)
    if workload.router_replay and policy.moe is None:
        raise RlhfsimError(
            "router-replay-without-experts",
            f"router replay needs experts, {workload.model} has none",
            help="leave out --router-replay (router_replay: true)",
        )

    def named(name: str) -> ModelSpec:
        return policy if name == SAME else resolve_model(name)

    reward = workload.reward.model if workload.has_reward_model else None
    return Models(
        actor=policy.with_value_head() if workload.algorithm == "reward_model" else policy,
        critic=named(workload.critic).with_value_head() if workload.has_critic else None,
        reference=_of_one_role(map(named, workload.references)) if workload.has_reference else None,
        reward=named(reward).with_value_head() if reward is not None else None,
    )


def _of_one_role(models: Iterable[ModelSpec]) -> ModelSpec:
    """Models that share a role's samples, as one."""
    first, *others = models
    return replace(first, others=tuple(others)) if others else first
