"""What of a plan AReaL has no key for."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.interchange.export import Unsaid
from rlhfsim.interchange.instead import Instead, instead, layers_whole, served_reward
from rlhfsim.interchange.nearest import with_layouts
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.engine_numbers import VLLM

ROWS = (
    layers_whole("critic"),
    Instead(
        "rollout.max_batched_tokens",
        VLLM.max_batched_tokens,
        "max_batched_tokens {} of the rollout",
        "vLLM's own, {}",
    ),
    Instead(
        "actor.residency",
        "offloaded",
        "a policy that stays beside the rollout",
        "both leave their GPUs in turn",
        "shared actor.offload_params=none",
        also=("actor.offload_between",),
    ),
    Instead(
        "rollout.sleep",
        2,
        "a rollout that stays beside the policy",
        "both leave their GPUs in turn",
        "shared rollout.sleep=0",
    ),
    Instead("workload.packing", True, "padded micro-batches", "samples are packed"),
    Instead(
        "actor.sequence_parallel",
        True,
        "tensor parallelism without sequence parallelism",
        "both together",
        "actor.tp>1",
    ),
    Instead(
        "actor.residency",
        "offloaded",
        "an optimizer that leaves while the weights stay",
        "both leave",
        "actor.residency=resident actor.offload_between",
    ),
    Instead("workload.critic", "same", "a critic of {}", "the policy's checkpoint", "critic"),
    Instead(
        "schedule.partial_rollout",
        True,
        "a rollout that ends before every update",
        "it is interrupted and goes on under the new weights",
        "schedule.one_step_off",
    ),
    Instead("schedule.queue", None, "a queue of {:g} batches", "as many as staleness admits"),
    served_reward("rewards come from a function of the script"),
    Instead("workload.environment", None, "an environment", "it is the workflow of the script", priced=False),
)


def unsaid_of(plan: Plan) -> Iterator[Unsaid]:
    """Everything in a plan that AReaL cannot be told, with what it does instead."""
    yield from instead(plan, *ROWS)
    layout = plan.placement.actor.layout
    for name in ("actor", "critic"):
        yield from _of_scoring(plan, name)
    if layout.score_pack_tokens not in (None, layout.pack_tokens):
        yield Unsaid(
            f"packs of {layout.score_pack_tokens} tokens for the policy's log-probs",
            f"{layout.pack_tokens}, as in training; the reference keeps its own",
            nearest=with_layouts(plan, "actor", "critic", score_pack_tokens=None),
            of=("actor.layout.score_pack_tokens", "critic.layout.score_pack_tokens"),
        )


def _of_scoring(plan: Plan, name: str) -> Iterator[Unsaid]:
    """A batch is scored in as many micro-batches as an update trains in (`mb_spec.n_mbs`)."""
    placed = plan.placement.role(name)
    scores = name == "critic" or plan.workload.old_logprobs == "recompute"
    if placed is None or placed.layout.pack_tokens or not scores:
        return
    size, together = (
        placed.layout.sequences(scoring=True),
        placed.layout.micro_batch * plan.workload.mini_batches,
    )
    if size != together:
        yield Unsaid(
            f"micro-batches of {size} samples while the {name} scores",
            f"as many micro-batches as in training, of {together} samples",
            nearest=with_layouts(plan, name, score_micro_batch=together),
            of=(f"{name}.layout.score_micro_batch",),
        )
