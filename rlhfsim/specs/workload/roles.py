"""The roles that models play in a step: one table, from which planner, executor and pages take their names.

A role more is a row more, and where its model is named: a field of `Workload` (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeVar

from rlhfsim.frozen import frozen
from rlhfsim.specs.workload.workload import Workload

Kind = Literal["generate", "logprob", "score", "value", "train", "sync"]
Head = Literal["causal", "value", "score"]
T = TypeVar("T")


@frozen
class Role:
    """A model in a step: which calls it has, and what is known about it without a plan."""

    name: str
    model: Callable[[Workload], str | None]
    """Name of its model, or `same` as the policy; None: the step has no such role."""
    scoring: Kind | None = None
    """Its forward pass over the samples, which the trained roles wait for."""
    scores: Callable[[Workload], bool] = lambda work: True
    """Whether a step that has the role has that pass."""
    generates: bool = False
    """It is the engine of the policy."""
    trained: bool = False
    policy: bool = False
    """It has the weights of the policy, or of the frozen base of its adapters."""
    several: bool = False
    """Models with commas between their names share its samples."""
    head: Head = "causal"
    launched: bool = False
    """Frameworks and our executor know it; one of your own is priced and simulated alone."""
    colour: str
    pattern: str
    """A pattern of `present.html.theme`."""

    @property
    def does(self) -> str:
        """What it does, in words."""
        return "generates" if self.generates else "is trained" if self.trained else "scores"


TABLE = (
    Role(
        name="actor",
        model=lambda work: work.model,
        scoring="logprob",
        scores=lambda work: work.generates and work.old_logprobs == "recompute" and not work.distils,
        trained=True,
        policy=True,
        launched=True,
        colour="red",
        pattern="/",
    ),
    Role(
        name="rollout",
        model=lambda work: work.model if work.generates else None,
        generates=True,
        policy=True,
        launched=True,
        colour="blue",
        pattern="",
    ),
    Role(
        name="critic",
        model=lambda work: work.critic if work.has_critic else None,
        scoring="value",
        trained=True,
        head="value",
        launched=True,
        colour="green",
        pattern="x",
    ),
    Role(
        name="reference",
        model=lambda work: work.reference if work.has_reference else None,
        scoring="logprob",
        policy=True,
        several=True,
        launched=True,
        colour="purple",
        pattern=".",
    ),
    Role(
        name="reward",
        model=lambda work: work.reward.model if work.has_reward_model else None,
        scoring="score",
        head="score",
        launched=True,
        colour="orange",
        pattern="-",
    ),
)
"""In the order of their keys in files and of their options."""


def _names(those: Callable[[Role], bool]) -> tuple[str, ...]:
    return tuple(role.name for role in TABLE if those(role))


NAMES = _names(lambda role: True)
GENERATING = _names(lambda role: role.generates)
MODELS = _names(lambda role: not role.generates)
"""Roles with weights on a training engine."""
TRAINED = _names(lambda role: role.trained)
"""Roles that learn; the others are frozen."""
FROZEN = _names(lambda role: not role.trained and not role.generates)
POLICY = _names(lambda role: role.policy)
ROLES = (*MODELS, *GENERATING)
PLACED = (*GENERATING, *MODELS)
"""All, in the order in which plans list them."""
_RANK = {name: rank for rank, name in enumerate(PLACED)}
ENDS = (*_names(lambda role: role.trained and role.policy), *GENERATING)
"""Roles that the weight sync joins."""
BY_NAME: Mapping[str, Role] = {role.name: role for role in TABLE}


class ByRole(dict[str, T]):
    """What each role has that is there, in the order in which plans list roles; hashed, so never changed."""

    def __init__(self, given: Mapping[str, T | None] | Iterable[tuple[str, T | None]]) -> None:
        """None: there is no such role. A name that the table lacks is our own bug."""
        there = ((name, value) for name, value in dict(given).items() if value is not None)
        super().__init__(sorted(there, key=lambda item: _RANK[item[0]]))

    def __hash__(self) -> int:  # type: ignore[override]  # of a dict there is none
        return hash(tuple(self.items()))
