"""A plan as verl's Hydra overrides (verl 0.9.1: `verl/trainer/config/ppo_trainer.yaml` and its groups)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.export import Exporter, Setting, Unsaid, Written, script, the_rollout
from rlhfsim.interchange.given_data import under_torchrun
from rlhfsim.interchange.instead import ONE_PASS, Instead, instead, instead_of, layers_whole
from rlhfsim.interchange.launch_script import needs_of
from rlhfsim.interchange.nearest import like_actor, with_layouts, with_schedule
from rlhfsim.interchange.predictions import title_of
from rlhfsim.interchange.training_keys import written_for
from rlhfsim.interchange.verl import given_keys
from rlhfsim.interchange.verl.engines import GROUPS, pack_limits
from rlhfsim.interchange.verl.keys import TABLE
from rlhfsim.interchange.verl.releases import RELEASES
from rlhfsim.interchange.verl.reward_model import reward_unsaid
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import RolePlacement

NEEDS = needs_of("verl")
LEFT_OPEN: Mapping[str, tuple[str, ...]] = {
    **TABLE.left_open,
    "actor.recompute": TABLE.keys_of("actor.recompute")[:1],
    "actor.offload_optimizer": TABLE.keys_of("actor.hosted", "actor.leaves", "reference.hosted"),
    "rollout.sleep": TABLE.keys_of("rollout.sleep"),
    "actor.zero": TABLE.keys_of("actor.zero"),
}
"""Keys whose defaults hold where a typed plan leaves a field open; micro-batches have none."""


def write(plan: Plan) -> Written:
    """The plan in verl's keys.

    Raises:
        RlhfsimError: an algorithm that no trainer of verl runs, or a batch that it cannot cut.
    """
    if plan.workload.algorithm == given_keys.ALGORITHM:
        return written_for(plan, "verl", given_keys.TABLE.write(plan), _unsaid_of_given(plan))
    the_rollout(plan, "verl's main_ppo")
    work = plan.workload
    if work.prompts % work.mini_batches:
        raise RlhfsimError(
            "batch-not-cut-by-prompts",
            f"verl counts a mini-batch in prompts: {work.prompts} prompts do not split into "
            f"{work.mini_batches} mini-batches",
            help="design with --mini-batches that divides --prompts",
        )
    return written_for(plan, "verl", TABLE.write(plan), _unsaid(plan))


@cache
def rows() -> tuple[Instead, ...]:
    """What is run in place of fields that no key says."""
    return instead_of("verl", {})


def _unsaid(plan: Plan) -> Iterator[Unsaid]:
    yield from instead(plan, *rows())
    placement = plan.placement
    layout = placement.rollout.layout if placement.rollout else None
    if layout is not None and layout.engine == "sglang" and (layout.dispatcher or layout.speculation):
        yield Unsaid(
            "how SGLang dispatches to experts or drafts",
            "its own choice, without drafts: both are written for vLLM alone",
            nearest=with_layouts(plan, "rollout", dispatcher=None, speculation=None),
        )
    apart = placement.rollout is not None and placement.rollout.pool != placement.actor.pool
    if apart and not placement.schedule.asynchronous:
        yield Unsaid(
            "a rollout on GPUs of its own that waits for every update",
            "samples may be one version old (separate_async with max_off_policy_threshold=1)",
            nearest=with_schedule(plan, staleness=1, partial_rollout=True, streaming=False),
            of=("schedule",),
        )
    for role, placed in placement.trainers.items():
        if role == "reward":
            yield from reward_unsaid(plan, placed)
            continue
        if role != "actor" and plan.placement.backend == "megatron":
            yield from _other_groups(plan, role, placed)
        yield from _packs(plan, role, placed.layout)


def _unsaid_of_given(plan: Plan) -> Iterator[Unsaid]:
    yield from instead(plan, layers_whole(), ONE_PASS)
    yield from _packs(plan, "actor", plan.placement.actor.layout)


def _packs(plan: Plan, role: str, layout: Layout) -> Iterator[Unsaid]:
    """Packs that verl refuses, or has not."""
    if layout.pack_tokens is None:
        return
    train, _ = pack_limits(plan, layout)
    if train > layout.pack_tokens:
        yield Unsaid(
            f"packs of {layout.pack_tokens} tokens for the {role}",
            f"{train} are written: verl refuses packs shorter than the longest sample",
            nearest=with_layouts(plan, role, pack_tokens=train),
            of=(f"{role}.layout.pack_tokens", f"{role}.layout.score_pack_tokens"),
        )
    elif role == "critic" and layout.score_pack_tokens not in (None, train):
        yield Unsaid(
            f"packs of {layout.score_pack_tokens} tokens while the critic scores",
            f"{train}: verl's trainer takes one limit for the critic's training and scoring",
            nearest=with_layouts(plan, role, score_pack_tokens=None),
            of=("critic.layout.score_pack_tokens",),
        )


def _other_groups(plan: Plan, role: str, placed: RolePlacement) -> Iterator[Unsaid]:
    """Megatron's groups are initialised once in a process, by whichever role comes first."""
    own, actors = ({n: getattr(x.layout, n) for n in GROUPS} for x in (placed, plan.placement.actor))
    if own != actors:
        said = ", ".join(f"{name} {value}" for name, value in own.items() if value != actors[name])
        yield Unsaid(
            f"{said} for the {role}, not the actor's",
            "both share a process, whose groups verl initialises once: for the first role",
            nearest=like_actor(plan, role),
            of=tuple(f"{role}.layout.{field.name}" for field in fields(Layout)),
        )


def hydra(setting: Setting) -> str:
    """`key=value` as bash and Hydra read it."""
    value = setting.value
    if value is None:
        return f"{setting.key}=null"
    if isinstance(value, str) and "$" in value:
        return f'{setting.key}="{value}"'
    return f"{setting.key}={value}"


def files(plan: Plan, written: Written) -> dict[str, str]:
    """The launch script."""
    command = "exec python3 -m verl.trainer.main_ppo"
    if plan.workload.algorithm == given_keys.ALGORITHM:
        command, written = under_torchrun(written, given_keys.STARTS)
    return {"launch.sh": script(title_of(plan, "verl 0.9.1"), NEEDS, written, hydra, command)}


EXPORT = Exporter(
    timed=lambda plan: plan.workload.generates,  # sft_trainer.py prints loss, rate and learning rate
    version="0.9.1",
    write=write,
    files=files,
    start="bash launch.sh",
    needs=NEEDS,
    releases=RELEASES,
    left_open=LEFT_OPEN,
    install='pip install "verl[vllm]==0.9.1"',
)
