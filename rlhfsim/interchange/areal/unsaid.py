"""What of a plan AReaL has no key for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from rlhfsim.interchange.export import Unsaid
from rlhfsim.interchange.instead import Instead, instead, instead_of
from rlhfsim.interchange.nearest import with_layouts
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.engine_numbers import VLLM


@cache
def rows() -> tuple[Instead, ...]:
    """What is run in place of fields that no key says."""
    return instead_of("areal", {"BATCHED": VLLM.max_batched_tokens})


def unsaid_of(plan: Plan) -> Iterator[Unsaid]:
    """Everything in a plan that AReaL cannot be told, with what it does instead."""
    yield from instead(plan, *rows())
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
