"""What NeMo-RL cannot say of a plan, and what it does instead (NVIDIA-NeMo/RL at 7ea279a)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from functools import cache

from rlhfsim.interchange.export import Unsaid, longest_prompt, longest_response, scored_alike
from rlhfsim.interchange.instead import Instead, instead, instead_of, layers_whole, scored_as_trained
from rlhfsim.interchange.nearest import like_actor, with_layouts
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import Residency, RolePlacement

ALIKE = 4
"""Tensor parallelism from which on it refuses a `logprob_batch_size` other than `train_micro_batch_size`, as
results of its kernels then depend on the batch (models/policy/lm_policy.py, line 208)."""


def alike(plan: Plan) -> bool:
    """Whether log-probs are computed in the micro-batches of training."""
    return not plan.workload.generates or plan.placement.actor.layout.tp >= ALIKE


TOP_K = 64
"""`distillation.topk_logits_k` of its base, where a plan has none."""
DISTILS = "workload.algorithm=distillation"


@cache
def rows() -> tuple[Instead, ...]:
    """What is run in place of fields that no key says."""
    return instead_of("nemo-rl", {"TOP_K": TOP_K})


SIZES = ("score_micro_batch", "pack_tokens", "score_pack_tokens")
"""Fields of a layout that say a micro-batch otherwise than `micro_batch`."""


def unsaid_of(plan: Plan) -> Iterator[Unsaid]:
    """Everything in a plan that NeMo-RL cannot be told, with what it does instead."""
    taught = plan.workload.distils
    alone = alike(plan) and not taught
    yield from instead(
        plan, *rows(), layers_whole("critic"), *([scored_as_trained("reference")] if alone else [])
    )
    yield from _of_packs(plan) if plan.placement.rollout else _of_pairs(plan)
    yield from _of_split(plan) if taught else _of_reference(plan)


def refuses_split(plan: Plan, role: RolePlacement) -> bool:
    """Whether sequence parallelism of a role is refused (algorithms/distillation.py, line 270)."""
    packs = plan.workload.packing or role.layout.pack_tokens is not None
    return plan.workload.distils and plan.placement.backend == "fsdp2" and packs


def _of_split(plan: Plan) -> Iterator[Unsaid]:
    for name in ("actor", "reference"):
        role = plan.placement.trainers[name]
        if role.layout.tp > 1 and role.layout.sequence_parallel and refuses_split(plan, role):
            yield Unsaid(
                f"sequence parallelism of the {name} in packed micro-batches",
                "distillation on DTensor refuses it: only weights are cut",
                nearest=with_layouts(plan, name, sequence_parallel=False),
                of=(f"{name}.layout.sequence_parallel",),
            )


def _of_pairs(plan: Plan) -> Iterator[Unsaid]:
    work, placed = plan.workload, plan.placement.actor
    roles, layout = ("actor", "reference"), placed.layout
    pairs = max(1, layout.micro_batch // 2)
    if layout.pack_tokens is not None or layout.micro_batch != 2 * pairs:
        yield Unsaid(
            "micro-batches of packs" if layout.pack_tokens else f"micro-batches of {layout.micro_batch}",
            f"micro-batches count pairs: {2 * pairs} sequences",
            nearest=with_layouts(plan, *roles, **dict.fromkeys(SIZES), micro_batch=2 * pairs),
            of=tuple(f"{role}.layout.{name}" for role in roles for name in ("micro_batch", *SIZES)),
        )
    if work.mini_batches > 1:
        yield Unsaid(
            f"steps of {work.mini_batches} updates",
            f"steps of one, of {work.prompts // work.mini_batches} pairs",
            of=("workload.mini_batches", "workload.prompts"),
        )


def _of_reference(plan: Plan) -> Iterator[Unsaid]:
    placement = plan.placement
    reference = placement.role("reference")
    if reference is not None and not scored_alike(plan, reference):
        yield Unsaid(
            f"the reference's own layout {reference.layout.label}",
            "its weights are swapped into the policy's modules",
            nearest=like_actor(plan, "reference"),
            of=tuple(f"reference.layout.{f.name}" for f in fields(Layout)),
        )
    shared = placement.together("actor", "rollout")
    away = placement.actor.residency == "offloaded" and shared
    runs: Residency = "offloaded" if away else "swapped"
    if reference is not None and reference.residency != runs:
        yield Unsaid(
            f"a reference that is {reference.residency}",
            "it is loaded from the host" if away else "it is swapped",
            nearest=like_actor(plan, "reference", residency=runs),
            of=("reference.residency",),
        )


def _of_packs(plan: Plan) -> Iterator[Unsaid]:
    longest, placement = longest_prompt(plan) + longest_response(plan), plan.placement
    like = ("actor", "critic") if plan.workload.distils else ("actor", "critic", "reference")
    for name, roles in (("actor", like), ("reference", ("reference",))):
        placed = placement.role(name)
        if placed is None or (name == "reference" and not plan.workload.distils):
            continue
        layout, scored = placed.layout, name == "reference" or not alike(plan)
        if not plan.workload.packing or layout.pack_tokens is not None:
            continue
        sizes = {"pack_tokens": layout.micro_batch, "score_pack_tokens": layout.sequences(scoring=scored)}
        packs = {field: math.ceil(size * longest / layout.cp) for field, size in sizes.items()}
        most = layout.sequences(scoring=name == "reference")
        yield Unsaid(
            f"micro-batches of {most} packed sequences",
            f"packs of {most * longest} tokens",
            nearest=with_layouts(plan, *roles, micro_batch=1, score_micro_batch=None, **packs),
            of=tuple(f"{role}.layout.{size}" for role in roles for size in ("micro_batch", *SIZES)),
        )
