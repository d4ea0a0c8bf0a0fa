"""A plan as SkyRL 0.4.0 counts it, what of it SkyRL has no key for, and what it runs in its place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.export import Unsaid, longest_prompt, longest_response
from rlhfsim.interchange.instead import Instead, generated_as_batch, instead, instead_of, long_samples
from rlhfsim.interchange.nearest import with_roles, with_rollout
from rlhfsim.interchange.predictions import call
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.placement import RolePlacement, RolloutPlacement

TRAINED = ("actor", "critic")


@cache
def rows() -> tuple[Instead, ...]:
    """What is run in place of fields that no key says."""
    return instead_of("skyrl", {})


def scored_together(plan: Plan) -> int:
    """Samples of a micro-batch of all scoring passes: as the reference's, the critic's or the actor's."""
    placed = plan.placement.role("reference") or plan.placement.role("critic") or plan.placement.actor
    return placed.layout.sequences(scoring=True)


def versions(plan: Plan) -> int:
    """Updates that a sample may lag behind; SkyRL sends weights after each."""
    return max(1, math.ceil(plan.placement.schedule.staleness * plan.workload.mini_batches))


def updates(plan: Plan) -> tuple[int, int]:
    """Prompts of (a batch, an update): with a rollout that never drains, a batch is one update.

    Raises:
        RlhfsimError: the prompts do not split into the updates.
    """
    work = plan.workload
    if work.prompts % work.mini_batches:
        raise RlhfsimError(
            "batch-not-cut-by-prompts",
            f"SkyRL counts a mini-batch in prompts: {work.prompts} prompts do not split into "
            f"{work.mini_batches} mini-batches",
            help="design with --mini-batches that divides --prompts",
        )
    each = work.prompts // work.mini_batches
    return (each if plan.placement.schedule.continuous else work.prompts), each


def unsaid(plan: Plan, rollout: RolloutPlacement) -> Iterator[Unsaid]:
    """Everything, once."""
    apart = rollout.pool != plan.placement.actor.pool
    yield from instead(plan, *rows())
    yield from _residency(plan, apart=apart)
    yield from _schedule(plan)
    yield from _micro_batches(plan)
    yield from _rollout(plan, rollout, apart=apart)


def _between(roles: Iterable[str]) -> tuple[str, ...]:
    """What roles do between their calls, as fields of the plan."""
    return tuple(f"{role}.{name}" for role in roles for name in ("residency", "offload_between"))


def _residency(plan: Plan, *, apart: bool) -> Iterator[Unsaid]:
    """`WorkerDispatch` moves what shares GPUs to the host between its calls, and nothing else."""
    placement = plan.placement

    def as_run(name: str, role: RolePlacement) -> RolePlacement:
        if name == "reward":
            return role  # it is not placed at all
        places = (role.layout.offload_optimizer, role.layout.offload_params)
        if placement.backend == "fsdp2" and "cpu" in places:
            return role  # fsdp_config.cpu_offload takes the place of it
        swapped = not apart or (placement.together("actor", "reference") and name in ("actor", "reference"))
        between = swapped and role.offload_between
        return replace(role, residency="offloaded" if swapped else "resident", offload_between=between)

    nearest = with_roles(plan, as_run)
    for kept in (True, False):
        changed = [
            name
            for name, role in nearest.placement.trainers.items()
            if role != placement.roles[name]
            if (role.residency == "offloaded") == kept
        ]
        if changed and kept:
            yield Unsaid(
                f"states of {' and '.join(changed)} that stay in GPU memory between calls",
                "what shares GPUs goes to the host while another works",
                nearest=nearest,
                of=_between(changed),
            )
        elif changed:
            yield Unsaid(
                f"states of {' and '.join(changed)} that leave GPU memory between calls",
                "what has GPUs of its own stays",
                nearest=nearest,
                of=_between(changed),
            )


def _schedule(plan: Plan) -> Iterator[Unsaid]:
    schedule, work = plan.placement.schedule, plan.workload
    if schedule.continuous and work.mini_batches > 1:
        yield Unsaid(
            f"new weights once in {work.mini_batches} updates",
            f"once an update; once in a step: {call(plan, 'actor.sync')}",
            of=("workload.prompts", "workload.mini_batches", "schedule"),
        )
    yield from generated_as_batch(plan)


def _micro_batches(plan: Plan) -> Iterator[Unsaid]:
    """One size for all trained roles and one for all scoring passes, or one number of tokens."""
    actor, scored = plan.placement.actor.layout, scored_together(plan)
    tokens = actor.pack(scoring=False)

    def as_run(name: str, role: RolePlacement) -> RolePlacement:
        layout, trained = role.layout, name in TRAINED
        if name == "reward":
            return role
        if tokens:
            sizes: dict[str, Any] = {
                "micro_batch": 1,
                "score_micro_batch": None,
                "pack_tokens": tokens // layout.cp,
            }
        else:
            sizes = {"micro_batch": actor.micro_batch if trained else layout.micro_batch, "pack_tokens": None}
            alike = layout.sequences(scoring=True) == scored
            sizes["score_micro_batch"] = layout.score_micro_batch if alike else scored
        return replace(role, layout=replace(layout, **sizes, score_pack_tokens=None))

    nearest = with_roles(plan, as_run)
    if nearest.placement != plan.placement:
        yield Unsaid(
            "micro-batches of their own for roles or for scoring",
            f"{actor.pack_tokens} tokens a GPU everywhere"
            if actor.pack_tokens
            else f"{actor.micro_batch} samples in training, {scored} in scoring",
            nearest=nearest,
        )
    longest = longest_prompt(plan) + longest_response(plan)
    yield from long_samples(longest, actor.pack(scoring=False))


def _rollout(plan: Plan, rollout: RolloutPlacement, *, apart: bool) -> Iterator[Unsaid]:
    adapters = plan.workload.lora is not None and (
        plan.placement.weight_path == "lora" or plan.placement.backend == "fsdp2"
    )
    level = 0 if apart else 1 if adapters else 2
    if rollout.sleep_level != level:
        does = ("all stays", "weights go to the host", "weights and KV cache are dropped")[level]
        yield Unsaid(f"sleep {rollout.sleep_level}", does, nearest=with_rollout(plan, rollout, sleep=level))
    if adapters and not rollout.layout.cuda_graphs:
        yield Unsaid(
            "an eager rollout with adapters",
            "CUDA graphs",
            nearest=with_rollout(plan, rollout, cuda_graphs=True),
        )
