"""What of a plan AReaL has no key for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlhfsim.frameworks.export import Unsaid
from rlhfsim.frameworks.nearest import (
    with_layouts,
    with_placement,
    with_rollout,
    with_schedule,
    with_workload,
)
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.engine_numbers import VLLM
from rlhfsim.specs.placement.placement import RolloutPlacement


def unsaid_of(plan: Plan, rollout: RolloutPlacement) -> Iterator[Unsaid]:
    """Everything in a plan that AReaL cannot be told, with what it does instead."""
    yield from _engine(plan, rollout)
    yield from _training(plan)
    schedule = plan.placement.schedule
    if schedule.one_step_off:
        yield Unsaid(
            what="a rollout that ends before every update",
            instead="it is interrupted and goes on under the new weights",
            nearest=with_schedule(plan, partial_rollout=True),
            of=("schedule",),
        )
    if schedule.queue is not None:
        yield Unsaid(
            what=f"a queue of {schedule.queue:g} batches",
            instead="as many as staleness admits",
            nearest=with_schedule(plan, queue=None),
            of=("schedule",),
        )
    if plan.placement.reward is not None:
        yield Unsaid(
            what="a reward model", instead="rewards come from a function of the script", of=("roles",)
        )
    if plan.workload.environment is not None:
        yield Unsaid(what="an environment", instead="it is the workflow of the script")


def _engine(plan: Plan, rollout: RolloutPlacement) -> Iterator[Unsaid]:
    tokens, actor = rollout.layout.max_batched_tokens, plan.placement.actor
    if tokens != VLLM.max_batched_tokens:
        yield Unsaid(
            what=f"max_batched_tokens {tokens} of the rollout",
            instead=f"vLLM's own, {VLLM.max_batched_tokens}",
            nearest=with_rollout(plan, rollout, max_batched_tokens=VLLM.max_batched_tokens),
            of=("rollout.layout.max_batched_tokens",),
        )
    shared = rollout.pool == actor.pool
    if shared and actor.residency == "resident" and actor.layout.offload_params == "none":
        yield Unsaid(
            what="a policy that stays beside the rollout",
            instead="both leave their GPUs in turn",
            nearest=with_placement(plan, actor=replace(actor, residency="offloaded")),
            of=("actor.residency", "actor.offload_between"),
        )
    if shared and rollout.sleep == 0:
        yield Unsaid(
            what="a rollout that stays beside the policy",
            instead="both leave their GPUs in turn",
            nearest=with_rollout(plan, rollout, sleep=2),
            of=("rollout.sleep",),
        )


def _training(plan: Plan) -> Iterator[Unsaid]:
    work, actor = plan.workload, plan.placement.actor
    layout = actor.layout
    if layout.pack_tokens is None and work.mini_batches > 1 and work.old_logprobs == "recompute":
        yield Unsaid(
            what=f"micro-batches of {layout.micro_batch} samples for old log-probs",
            instead=f"as many micro-batches as in training, of {work.mini_batches} times the samples",
        )
    if layout.score_pack_tokens not in (None, layout.pack_tokens):
        yield Unsaid(
            what=f"packs of {layout.score_pack_tokens} tokens for the policy's log-probs",
            instead=f"{layout.pack_tokens}, as in training; the reference keeps its own",
        )
    if not work.packing:
        yield Unsaid(
            what="padded micro-batches",
            instead="samples are packed",
            nearest=with_workload(plan, packing=True),
            of=("workload.packing",),
        )
    if layout.tp > 1 and not layout.sequence_parallel:
        yield Unsaid(
            what="tensor parallelism without sequence parallelism",
            instead="both together",
            nearest=with_layouts(plan, "actor", sequence_parallel=True),
            of=("actor.layout.sequence_parallel",),
        )
    if actor.offload_between and actor.residency == "resident":
        yield Unsaid(
            what="an optimizer that leaves while the weights stay",
            instead="both leave",
            nearest=with_placement(plan, actor=replace(actor, residency="offloaded")),
            of=("actor.residency",),
        )
    if work.critic != "same" and plan.placement.critic is not None:
        yield Unsaid(
            what=f"a critic of {work.critic}",
            instead="the policy's checkpoint",
            nearest=with_workload(plan, critic="same"),
            of=("workload.critic",),
        )
