"""The dataflow of model calls in one step: the one definition that planner and executor share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhfsim.specs.workload.workload import Workload

Role = Literal["actor", "critic", "reference", "reward", "rules"]
Kind = Literal["generate", "logprob", "score", "value", "train", "sync"]
TRAINED: tuple[Role, ...] = ("actor", "critic")
"""Roles that learn; the others are frozen."""
CallName = str
"""`role.kind`, as in `actor.generate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One role doing one kind of work."""

    role: Role
    kind: Kind
    needs: tuple[CallName, ...] = ()
    """Calls of this step whose output it reads."""

    @property
    def name(self) -> CallName:
        """`actor.generate`."""
        return f"{self.role}.{self.kind}"


def dataflow(workload: Workload) -> tuple[Call, ...]:
    """The calls of one step in a valid order.

    PPO: generate -> {reference.logprob, reward.score, critic.value, actor.logprob} ->
    {critic.train, actor.train} -> actor.sync. GRPO, RLOO and REINFORCE++ drop the critic; DPO and
    KTO drop the rollout, the reward and the sync; on-policy distillation is generate -> reference.logprob ->
    actor.train, the reference being the teacher; SFT and reward models are actor.train alone: the actor is
    the model that is trained, whatever it becomes.
    """
    scoring = _scoring_calls(workload)
    ready = tuple(call.name for call in scoring) or (("actor.generate",) if workload.generates else ())
    calls = [Call(role="actor", kind="generate")] if workload.generates else []
    calls += scoring
    if workload.has_critic:
        calls.append(Call(role="critic", kind="train", needs=ready))
    calls.append(Call(role="actor", kind="train", needs=ready))
    if workload.generates:
        calls.append(Call(role="actor", kind="sync", needs=("actor.train",)))
    return tuple(calls)


def _scoring_calls(workload: Workload) -> list[Call]:
    source = ("actor.generate",) if workload.generates else ()
    calls = []
    if workload.generates and workload.reward.rules is not None:
        calls.append(Call(role="rules", kind="score", needs=source))
        if workload.rules_first:
            source = ("rules.score",)
    if workload.has_reward_model:
        calls.append(Call(role="reward", kind="score", needs=source))
    if workload.has_reference:
        calls.append(Call(role="reference", kind="logprob", needs=source))
    if workload.has_critic:
        calls.append(Call(role="critic", kind="value", needs=source))
    if workload.generates and workload.old_logprobs == "recompute" and not workload.distils:
        calls.append(Call(role="actor", kind="logprob", needs=source))
    return calls
