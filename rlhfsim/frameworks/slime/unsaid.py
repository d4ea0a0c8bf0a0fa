"""What of a plan slime has no flag for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlhfsim.frameworks.export import Unsaid, call, longest_prompt, longest_response, scored_alike
from rlhfsim.frameworks.nearest import like_actor, with_rollout, with_schedule, with_workload
from rlhfsim.frameworks.slime.runs import reuses_logprobs
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.placement import RolloutPlacement
from rlhfsim.units import format

BESIDES = ("profile_peak", "cuda_graphs")
"""Components of a vLLM engine inside its share of the memory that SGLang counts beside its own."""


def unsaid_of(plan: Plan, rollout: RolloutPlacement) -> Iterator[Unsaid]:
    """Everything in a plan that slime cannot be told, with what it does instead."""
    yield from _engine(plan, rollout)
    yield from _roles(plan)
    yield from _batches(plan)
    yield from _versions(plan)


def _engine(plan: Plan, rollout: RolloutPlacement) -> Iterator[Unsaid]:
    yield Unsaid(what="vLLM, whose speed is priced", instead="the rollout runs on SGLang")
    ledger = plan.prediction.ledger
    share = rollout.layout.memory_utilization
    besides = sum(
        entry.bytes
        for entry in ledger
        if (entry.phase, entry.role) == ("actor.generate", "rollout") and entry.component in BESIDES
    )
    yield Unsaid(
        what=f"memory_utilization {share:g} with all that an engine holds",
        instead=f"SGLang's share is weights and KV cache; {format(besides, 'byte')} of activations and "
        "graphs come on top: lower --sglang-mem-fraction-static where they do not fit",
    )
    if rollout.pool == plan.placement.actor.pool and rollout.sleep == 1:
        yield Unsaid(
            what="sleep 1",
            instead="a sleeping engine drops weights and KV cache",
            nearest=with_rollout(plan, rollout, sleep=2),
        )


def _roles(plan: Plan) -> Iterator[Unsaid]:
    placement, actor = plan.placement, plan.placement.actor
    reference, critic, reward = placement.reference, placement.critic, placement.reward
    swapped = "swapped" if actor.residency == "resident" else "offloaded"
    alike = reference is None or (scored_alike(plan, reference) and reference.residency == swapped)
    if reference is not None and not alike:
        yield Unsaid(
            what=f"the reference's own place ({reference.layout.label}, {reference.residency})",
            instead="its weights lie in host memory and are swapped into the policy's modules",
            nearest=like_actor(plan, "reference", residency=swapped),
        )
    if critic is not None:
        if critic.layout != actor.layout:
            yield Unsaid(
                what=f"the critic's own layout {critic.layout.label}",
                instead="the policy's",
                nearest=like_actor(plan, "critic"),
            )
        if actor.residency == "resident" and not actor.offload_between:
            yield Unsaid(what="a policy and a critic that stay", instead="with a critic slime offloads both")
        if plan.workload.critic != "same":
            yield Unsaid(
                what=f"a critic of {plan.workload.critic}",
                instead="it is made of the policy",
                nearest=with_workload(plan, critic="same"),
            )
    if reward is not None:
        yield Unsaid(
            what="the reward model's GPUs", instead="it is served elsewhere, at REWARD_URL", of=("roles",)
        )
    if actor.residency == "resident" and actor.offload_between:
        yield Unsaid(
            what="an optimizer that leaves while the weights stay", instead="both leave between the calls"
        )


def _batches(plan: Plan) -> Iterator[Unsaid]:
    work, layout = plan.workload, plan.placement.actor.layout
    longest = longest_prompt(plan) + longest_response(plan)
    if layout.pack_tokens is not None and layout.pack_tokens * layout.cp < longest:
        yield Unsaid(
            what=f"samples of {longest} tokens in packs of {layout.pack_tokens * layout.cp}",
            instead="a longer sample is a micro-batch of its own",
        )
    if not work.packing:
        yield Unsaid(
            what="padded micro-batches",
            instead="samples are packed",
            nearest=with_workload(plan, packing=True),
        )
    if reuses_logprobs(work) and work.old_logprobs == "recompute":
        saved = call(plan, "actor.logprob")
        yield Unsaid(
            what=f"old log-probs from a pass of their own{f' ({saved})' if saved else ''}",
            instead="a rollout that is one optimizer step takes them from the training pass",
            nearest=with_workload(plan, old_logprobs="reused"),
            of=("workload.old_logprobs",),
        )
    if work.old_logprobs == "reused" and not reuses_logprobs(work):
        yield Unsaid(
            what="old log-probs of the training pass",
            instead=f"{work.title} computes them in a pass of their own",
            nearest=with_workload(plan, old_logprobs="recompute"),
            of=("workload.old_logprobs",),
        )
    sampling = work.dynamic_sampling
    if sampling is not None and sampling.max_gen_batches is not None:
        yield Unsaid(
            what=f"at most {sampling.max_gen_batches} generation batches",
            instead="no limit",
            nearest=with_workload(plan, dynamic_sampling=replace(sampling, max_gen_batches=None)),
        )
    if sampling is not None and sampling.prompts_of(work.prompts) < work.prompts:
        yield Unsaid(
            what=f"generation batches of {sampling.prompts_of(work.prompts)} prompts",
            instead=f"at least the {work.prompts} of the step",
            nearest=with_workload(plan, dynamic_sampling=replace(sampling, gen_prompts=work.prompts)),
        )


def _versions(plan: Plan) -> Iterator[Unsaid]:
    schedule = plan.placement.schedule
    if schedule.continuous:
        yield Unsaid(
            what=f"a limit of {schedule.staleness:g} policy versions",
            instead="--sglang-server-concurrency groups an engine are under way, however old",
        )
    if schedule.queue is not None:
        yield Unsaid(
            what=f"a queue of {schedule.queue:g} batches",
            instead="slime's own limit",
            nearest=with_schedule(plan, queue=None),
        )
