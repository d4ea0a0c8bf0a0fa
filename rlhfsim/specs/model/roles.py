"""The models of one step: who plays which role."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.workload.roles import TABLE, ByRole, Role
from rlhfsim.specs.workload.workload import Workload

SAME = "same"
"""In a workload: the shape of the policy."""
NO_MODELS: Mapping[str, ModelSpec] = {}


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class Models:
    """The shape of the model of every role that the step has; with a head of one value where it gives one."""

    roles: Mapping[str, ModelSpec]

    def __init__(self, roles: Mapping[str, ModelSpec] = NO_MODELS, **named: ModelSpec | None) -> None:
        """`named`: single roles, over those of `roles`; None: the step has no such role."""
        object.__setattr__(self, "roles", ByRole({**roles, **named}))

    @property
    def actor(self) -> ModelSpec:
        """The policy; where it is trained into a reward model, that model."""
        return self.roles["actor"]

    def of(self, role: str) -> ModelSpec:
        """The model of a role that is present; an absent one is our own bug."""
        model = self.roles.get(role)
        assert model is not None, f"the step has no {role} model"
        return model

    def params_of(self, phase: str) -> float:
        """Parameters of the model of the role that a phase begins with; the actor's where there is none."""
        return _params(self.roles.get(phase.split(".")[0], self.actor))


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

    needed = [(role, name) for role in TABLE if (name := role.model(workload)) is not None]
    roles = {role.name: _shape(role, name, named) for role, name in needed if not role.generates}
    if workload.algorithm == "reward_model":
        roles["actor"] = policy.with_value_head()
    return Models(roles)


def _shape(role: Role, name: str, named: Callable[[str], ModelSpec]) -> ModelSpec:
    """The model of a role; several that share its samples as one."""
    first, *others = map(named, map(str.strip, name.split(",")) if role.several else [name])
    model = first if role.head == "causal" else first.with_value_head()
    return replace(model, others=tuple(others)) if others else model
