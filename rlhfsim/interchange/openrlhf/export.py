"""A plan as the command line of OpenRLHF (0.11.2: `openrlhf/cli/train_ppo_ray.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache

from rlhfsim.interchange.export import (
    Exporter,
    Unsaid,
    Written,
    argument,
    longest_prompt,
    longest_response,
    scored_alike,
    script,
    the_rollout,
)
from rlhfsim.interchange.given_data import under_torchrun
from rlhfsim.interchange.instead import (
    ONE_PASS,
    Instead,
    generated_as_batch,
    instead,
    instead_of,
    layers_whole,
    long_samples,
)
from rlhfsim.interchange.launch_script import needs_of
from rlhfsim.interchange.nearest import with_layouts, with_placement
from rlhfsim.interchange.openrlhf import given_keys
from rlhfsim.interchange.openrlhf.keys import PREFILL, SEQUENCES, TABLE, scored_together, trained
from rlhfsim.interchange.openrlhf.releases import RELEASES
from rlhfsim.interchange.predictions import title_of
from rlhfsim.interchange.training_keys import written_for
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout

NEEDS = needs_of("openrlhf")
SHARED = ("tp", "cp", "zero", "recompute", "offload_optimizer")
"""What one flag says for all trained and scoring roles (`--ds.*`)."""
STAYS = tuple(
    Instead(
        f"{role}.residency",
        "resident",
        f"a {role} model on the host between its calls, below ZeRO-3",
        "it stays on the GPUs",
        f"{role} !{role}.zero=3",
    )
    for role in ("reference", "reward")
)
"""Roles whose weights only ZeRO-3 keeps on the host."""


@cache
def rows() -> tuple[Instead, ...]:
    """What is run in place of fields that no key says."""
    return instead_of("openrlhf", {"PREFILL": PREFILL, "SEQUENCES": SEQUENCES, "STAYS": STAYS})


def write(plan: Plan) -> Written:
    """The plan in OpenRLHF's flags.

    Raises:
        RlhfsimError: no trainer of such data, or roles that share GPUs as OpenRLHF cannot say.
    """
    if plan.workload.algorithm in given_keys.TRAINERS.values():
        return written_for(plan, "openrlhf", given_keys.TABLE.write(plan), _unsaid_of_given(plan))
    the_rollout(plan, "train_ppo_ray")
    return written_for(plan, "openrlhf", TABLE.write(plan), _unsaid(plan))


def _unsaid_of_given(plan: Plan) -> Iterator[Unsaid]:
    yield from instead(plan, layers_whole(), ONE_PASS, *STAYS)
    reference, actor = plan.placement.role("reference"), plan.placement.actor.layout
    if reference is None:
        return
    whole = replace(actor, zero=3 if actor.zero == 3 else 0)
    if not scored_alike(plan, reference) and not scored_alike(plan, replace(reference, layout=whole)):
        same = replace(reference, layout=actor)
        yield Unsaid(
            "the reference's own layout",
            "as the policy's",
            nearest=with_placement(plan, reference=same),
            of=tuple(f"reference.layout.{f.name}" for f in fields(Layout)),
        )


def _unsaid(plan: Plan) -> Iterator[Unsaid]:
    yield from instead(plan, *rows())
    if not plan.placement.schedule.asynchronous:
        yield from generated_as_batch(plan)
    actor = plan.placement.actor.layout
    for name, role in trained(plan)[1:]:
        for field in SHARED:
            value, ours = getattr(role.layout, field), getattr(actor, field)
            if field == "zero" and name != "critic" and (value == 3) == (ours == 3):
                continue  # what is only scored is sharded or not (get_ds_eval_config)
            if value != ours and not (field in ("recompute", "offload_optimizer") and name != "critic"):
                same = replace(
                    actor,
                    micro_batch=role.layout.micro_batch,
                    pack_tokens=role.layout.pack_tokens,
                    score_micro_batch=role.layout.score_micro_batch,
                    score_pack_tokens=role.layout.score_pack_tokens,
                )
                yield Unsaid(
                    f"{field} {value} of the {name}",
                    f"{ours}, as the actor's",
                    nearest=with_placement(plan, **{name: replace(role, layout=same)}),
                    of=(f"{name}.layout.{field}",),
                )
    together = scored_together(plan)
    apart = [name for name, role in trained(plan) if role.layout.sequences(scoring=True) != together]
    if apart and actor.pack_tokens is None:
        yield Unsaid(
            f"micro-batches of their own while {' and '.join(apart)} score",
            f"{together} samples, as for all that scores",
            nearest=with_layouts(plan, *apart, score_micro_batch=together),
            of=tuple(f"{name}.layout.score_micro_batch" for name in apart),
        )
    longest, pack = longest_prompt(plan) + longest_response(plan), actor.pack_tokens
    yield from long_samples(longest, pack and pack * actor.cp, pack)


def files(plan: Plan, written: Written) -> dict[str, str]:
    """The launch script."""
    head = title_of(plan, "OpenRLHF 0.11.2")
    command = "exec python3 -m openrlhf.cli.train_ppo_ray"
    if plan.workload.algorithm in given_keys.TRAINERS.values():
        starts = {algorithm: entry for entry, algorithm in given_keys.TRAINERS.items()}
        command, written = under_torchrun(written, starts[plan.workload.algorithm])
    return {"launch.sh": script(head, NEEDS, written, argument, command)}


EXPORT = Exporter(
    version="0.11.2",
    write=write,
    files=files,
    left_open=TABLE.left_open,
    start="bash launch.sh",
    needs=NEEDS,
    releases=RELEASES,
    install='pip install "openrlhf[vllm]==0.11.2"',
)
