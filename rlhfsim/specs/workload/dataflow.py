"""The dataflow of model calls in one step: the one definition that planner and executor share."""

from __future__ import annotations

from rlhfsim.frozen import frozen
from rlhfsim.specs.workload.roles import TABLE, Kind
from rlhfsim.specs.workload.workload import Workload

CallName = str
"""`role.kind`, as in `actor.generate`."""


@frozen
class Call:
    """One role doing one kind of work."""

    role: str
    """A name in `specs.workload.roles`, or `rules`."""
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
    learning = (role for role in reversed(TABLE) if role.trained and role.model(workload) is not None)
    calls += [Call(role=role.name, kind="train", needs=ready) for role in learning]
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
    for role in reversed(TABLE):
        if role.scoring is not None and role.model(workload) is not None and role.scores(workload):
            calls.append(Call(role=role.name, kind=role.scoring, needs=source))
    return calls
