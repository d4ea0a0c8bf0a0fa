"""What NeMo-RL cannot say of a plan, and what it does instead (NVIDIA-NeMo/RL at 7ea279a)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace

from rlhfsim.frameworks.export import Unsaid, longest_prompt, longest_response, of_old_logprobs, scored_alike
from rlhfsim.frameworks.nearest import like_actor, with_layouts, with_placement, with_rollout, with_workload
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import RolloutPlacement


def of_preferences(plan: Plan) -> Iterator[Unsaid]:
    """Of a plan that run_dpo.py runs."""
    yield from _of_pairs(plan)
    yield from _of_training(plan)
    yield from _of_reference(plan)


def of_rollouts(plan: Plan, rollout: RolloutPlacement) -> Iterator[Unsaid]:
    """Of a plan that run_grpo.py or run_ppo.py runs."""
    placement, layout = plan.placement, plan.placement.actor.layout
    yield from _of_training(plan)
    yield from _of_packs(plan)
    yield from _of_reference(plan)
    colocated = rollout.pool == placement.actor.pool
    if colocated and not placement.actor.offload_between and layout.offload_params == "none":
        yield Unsaid(
            what="optimizer states that stay on the GPUs during a rollout",
            instead="a colocated policy moves them to the host",
            nearest=with_placement(plan, actor=replace(placement.actor, offload_between=True)),
            of=("actor.offload_between",),
        )
    if colocated and rollout.sleep != 2:
        yield Unsaid(
            what=f"sleep {rollout.sleep}",
            instead="a colocated rollout drops weights and KV cache",
            nearest=with_rollout(plan, rollout, sleep=2),
            of=("rollout.sleep",),
        )
    if rollout.layout.bf16_attention:
        yield Unsaid(
            what="attention of an FP8 rollout in BF16",
            instead="quantization_ignored_layer_kws by hand",
            of=("rollout.layout.bf16_attention", "workload.rollout_bf16_attention"),
        )
    yield from of_old_logprobs(plan)
    if placement.reward is not None:
        yield Unsaid(
            what="a reward model",
            instead="rewards come from an environment: env.* of the base",
            of=("roles",),
        )


def _of_pairs(plan: Plan) -> Iterator[Unsaid]:
    work, placed = plan.workload, plan.placement.actor
    roles, layout = ("actor", "reference"), placed.layout
    pairs = max(1, layout.micro_batch // 2)
    if layout.pack_tokens is not None or layout.micro_batch != 2 * pairs:
        yield Unsaid(
            what="micro-batches of packs" if layout.pack_tokens else f"micro-batches of {layout.micro_batch}",
            instead=f"micro-batches count pairs: {2 * pairs} sequences",
            nearest=with_layouts(
                plan, *roles, micro_batch=2 * pairs, pack_tokens=None, score_pack_tokens=None
            ),
            of=tuple(
                f"{role}.layout.{name}"
                for role in roles
                for name in ("micro_batch", "pack_tokens", "score_pack_tokens")
            ),
        )
    if work.packing:
        yield Unsaid(
            what="packed micro-batches",
            instead="pairs are padded",
            nearest=with_workload(plan, packing=False),
            of=("workload.packing",),
        )
    if work.mini_batches > 1:
        yield Unsaid(
            what=f"steps of {work.mini_batches} updates",
            instead=f"steps of one, of {work.prompts // work.mini_batches} pairs",
            of=("workload.mini_batches", "workload.prompts"),
        )
    if placed.offload_between:
        yield Unsaid(
            what="optimizer states that leave between the calls",
            instead="they stay: no rollout needs the room",
            nearest=with_placement(plan, actor=replace(placed, offload_between=False)),
            of=("actor.offload_between",),
        )


def _of_training(plan: Plan) -> Iterator[Unsaid]:
    placement = plan.placement
    if placement.actor.layout.vp > 1:
        yield Unsaid(
            what=f"virtual pipeline stages {placement.actor.layout.vp}",
            instead="one a GPU",
            nearest=with_layouts(plan, "actor", "critic", vp=1),
            of=("actor.layout.vp",),
        )


def _of_reference(plan: Plan) -> Iterator[Unsaid]:
    placement = plan.placement
    reference = placement.reference
    if reference is not None and not scored_alike(plan, reference):
        yield Unsaid(
            what=f"the reference's own layout {reference.layout.label}",
            instead="its weights are swapped into the policy's modules",
            nearest=like_actor(plan, "reference"),
            of=tuple(f"reference.layout.{f.name}" for f in fields(Layout)),
        )
    if reference is not None and reference.residency != "swapped":
        yield Unsaid(
            what=f"a reference that is {reference.residency}",
            instead="it is swapped",
            nearest=like_actor(plan, "reference", residency="swapped"),
            of=("reference.residency",),
        )


def _of_packs(plan: Plan) -> Iterator[Unsaid]:
    layout = plan.placement.actor.layout
    if plan.workload.packing and layout.pack_tokens is None:
        longest = longest_prompt(plan) + longest_response(plan)
        yield Unsaid(
            what=f"micro-batches of {layout.micro_batch} packed sequences",
            instead=f"packs of {layout.micro_batch * longest} tokens",
            nearest=with_layouts(
                plan,
                *("actor", "critic", "reference"),
                micro_batch=1,
                pack_tokens=math.ceil(layout.micro_batch * longest / layout.cp),
            ),
            of=tuple(
                f"{role}.layout.{name}"
                for role in ("actor", "critic", "reference")
                for name in ("micro_batch", "pack_tokens", "score_pack_tokens")
            ),
        )
