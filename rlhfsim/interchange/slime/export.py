"""A plan as slime's command line: its launch script, and what slime cannot be told (624b824)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache

from rlhfsim.errors import RlhfsimError
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
from rlhfsim.interchange.fields import leaves
from rlhfsim.interchange.instead import Instead, instead, instead_of, long_samples
from rlhfsim.interchange.launch_script import needs_of
from rlhfsim.interchange.nearest import like_actor, with_workload
from rlhfsim.interchange.predictions import call, title_of
from rlhfsim.interchange.slime.keys import TABLE
from rlhfsim.interchange.training_keys import written_for
from rlhfsim.plan import Plan
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import Residency, RolloutPlacement
from rlhfsim.units import format

SHAPES = {
    "deepseek-r1": "deepseek-v3",
    "deepseek-v3": "deepseek-v3",
    "glm-4-9b": "glm4-9B",
    "kimi-k2": "kimi-k2",
    "llama-3.1-8b": "llama3.1-8B-Instruct",
    "llama-3.2-3b": "llama3.2-3B-Instruct",
    "mimo-7b": "mimo-7B-rl",
    "moonlight-16b-a3b": "moonlight",
    **{f"qwen2.5-{size.lower()}": f"qwen2.5-{size}" for size in ("0.5B", "1.5B", "3B", "7B", "32B")},
    **{f"qwen3-{size.lower()}": f"qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    "qwen3-30b-a3b": "qwen3-30B-A3B",
    "qwen3-235b-a22b": "qwen3-235B-A22B",
}
"""Model -> the file of slime's scripts/models with its shape, which slime compares with its config.json."""
NEEDS = needs_of("slime")
BESIDES = ("profile_peak", "cuda_graphs")
"""Components of a vLLM engine inside its share of the memory that SGLang counts outside its own."""


@cache
def rows() -> tuple[Instead, ...]:
    """What is run in place of fields that no key says."""
    return instead_of("slime", {})


def write(plan: Plan) -> Written:
    """The plan in slime's flags.

    Raises:
        RlhfsimError: a batch that it cannot cut.
    """
    rollout = the_rollout(plan, "slime")
    _check(plan)
    return written_for(plan, "slime", TABLE.write(plan), _unsaid(plan, rollout))


def _check(plan: Plan) -> None:
    work, layout = plan.workload, plan.placement.actor.layout
    each = work.num_sequences // work.mini_batches
    if each % (layout.dp * layout.micro_batch):
        raise RlhfsimError(
            "batch-not-cut-by-ranks",
            f"an optimizer step of {each} samples does not split into micro-batches of {layout.micro_batch} "
            f"for {layout.dp} ranks",
            help="design with --mini-batches, --prompts and --samples whose share is a multiple of the ranks",
        )


def _unsaid(plan: Plan, rollout: RolloutPlacement) -> Iterator[Unsaid]:
    """Everything in a plan that slime cannot be told, with what it does instead."""
    yield from _engine(plan, rollout)
    yield from instead(plan, *rows())
    yield from _roles(plan)
    yield from _batches(plan)
    schedule = plan.placement.schedule
    if schedule.continuous:
        yield Unsaid(
            f"a limit of {schedule.staleness:g} policy version{'s' * (schedule.staleness != 1)}",
            "--sglang-server-concurrency groups an engine are under way, however old",
            of=("schedule",),
        )


def _engine(plan: Plan, rollout: RolloutPlacement) -> Iterator[Unsaid]:
    yield Unsaid("vLLM, whose speed is priced", "the rollout runs on SGLang")
    ledger = plan.prediction.ledger
    share = rollout.layout.memory_utilization
    besides = sum(
        entry.bytes
        for entry in ledger
        if (entry.phase, entry.role) == ("actor.generate", "rollout") and entry.component in BESIDES
    )
    yield Unsaid(
        f"memory_utilization {share:g} with all that an engine holds",
        f"SGLang's share is weights and KV cache; {format(besides, 'byte')} of activations and "
        "graphs come on top: lower --sglang-mem-fraction-static where they do not fit",
    )


def _roles(plan: Plan) -> Iterator[Unsaid]:
    placement, actor = plan.placement, plan.placement.actor
    reference, critic = placement.role("reference"), placement.role("critic")
    swapped: Residency = "offloaded" if critic is not None or leaves(actor) else "swapped"
    alike = reference is None or (scored_alike(plan, reference) and reference.residency == swapped)
    if reference is not None and not alike:
        yield Unsaid(
            f"the reference's own place ({reference.layout.label}, {reference.residency})",
            "its weights lie in host memory and are swapped into the policy's modules",
            nearest=like_actor(plan, "reference", residency=swapped),
            of=("reference.residency", *(f"reference.layout.{field.name}" for field in fields(Layout))),
        )
    if critic is not None and critic.layout != actor.layout:
        yield Unsaid(
            f"the critic's own layout {critic.layout.label}",
            "the policy's",
            nearest=like_actor(plan, "critic"),
            of=tuple(f"critic.layout.{field.name}" for field in fields(Layout)),
        )


def _batches(plan: Plan) -> Iterator[Unsaid]:
    work, layout = plan.workload, plan.placement.actor.layout
    reuses = framework("slime").reuses_logprobs(work)
    pack = layout.pack_tokens and layout.pack_tokens * layout.cp
    yield from long_samples(longest_prompt(plan) + longest_response(plan), pack)
    if reuses and work.old_logprobs == "recompute":
        saved = call(plan, "actor.logprob")
        yield Unsaid(
            f"old log-probs from a pass of their own{f' ({saved})' if saved else ''}",
            "a rollout that is one optimizer step takes them from the training pass",
            nearest=with_workload(plan, old_logprobs="reused"),
            of=("workload.old_logprobs",),
        )
    if work.old_logprobs == "reused" and not reuses:
        yield Unsaid(
            "old log-probs of the training pass",
            f"{work.title} computes them in a pass of their own",
            nearest=with_workload(plan, old_logprobs="recompute"),
            of=("workload.old_logprobs",),
        )
    sampling = work.dynamic_sampling
    if sampling is not None and sampling.prompts_of(work.prompts) < work.prompts:
        yield Unsaid(
            f"generation batches of {sampling.prompts_of(work.prompts)} prompts",
            f"at least the {work.prompts} of the step",
            nearest=with_workload(plan, dynamic_sampling=replace(sampling, gen_prompts=work.prompts)),
        )


def files(plan: Plan, written: Written) -> dict[str, str]:
    """The launch script: a Ray job, on the cluster that runs or on one of this node."""
    head = title_of(plan, "slime 624b824")
    program = "train_async.py" if plan.placement.schedule.asynchronous else "train.py"
    known = SHAPES.get(next(m.name for m in plan.models if m.role == "actor"))
    shape = f"${{SLIME}}/scripts/models/{known}.sh" if known else "${MODEL_ARGS_FILE}"
    environment = '{"env_vars": {"PYTHONPATH": "%s", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}'
    command = "\n".join(
        [
            f'source "{shape}"',
            "ray status > /dev/null 2>&1 || ray start --head --disable-usage-stats",
            "exec ray job submit --address=http://127.0.0.1:8265 \\",
            f'    --runtime-env-json="$(printf \'{environment}\' "${{MEGATRON}}")" \\',
            f'    -- python3 "${{SLIME}}/{program}" "${{MODEL_ARGS[@]}}"',
        ]
    )
    return {"launch.sh": script(head, NEEDS, written, argument, command)}


EXPORT = Exporter(
    version="624b824",
    write=write,
    files=files,
    left_open=TABLE.left_open,
    start="bash launch.sh",
    needs=NEEDS,
    install='pip install "ray[default]"  # and slime, Megatron-LM and SGLang of its image',
)
