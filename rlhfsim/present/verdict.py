"""What a plan takes for granted, what in it changes learning, and what its words mean, in sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict

from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.devices import device_of
from rlhfsim.plan import Plan
from rlhfsim.present.basis import profile_under
from rlhfsim.present.regions import reached
from rlhfsim.present.words import listed, plural
from rlhfsim.rollout.decode import ENGINE_NAMES
from rlhfsim.specs.frameworks.runs import PRICED_ENGINE, framework
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.model.context import longest, stretched
from rlhfsim.specs.model.roles import SAME
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import GROUPED, Environment
from rlhfsim.units import format

SIZE = re.compile(r"[\d.]+[bt](-a\d+b)?")
"""An alias that says a size and no model."""


def is_size(name: str) -> bool:
    """Whether a name leaves open which model of its size is meant."""
    return SIZE.fullmatch(name.strip().lower()) is not None


def cautions(plan: Plan) -> Iterator[str]:
    """What is asked of a model or an algorithm that it was not made for."""
    work = plan.workload
    if work.algorithm in GROUPED and work.samples == 1:
        yield f"{work.title} compares the responses of a prompt, and there is one (--samples 8)"
    try:
        beyond = stretched(work)
    except RlhfsimError:  # a model file of another machine
        return
    if beyond is not None:
        model, factor = beyond
        yield (
            f"prompt and response reach {longest(work):,.0f} tokens, {factor:.2g} times the context of "
            f"{model.name}: RoPE scaling"
        )


def assumed(plan: Plan, *, ranges: bool = True) -> Iterator[str]:
    """Values that stand in for those of the user's own run and move the step; `ranges`: with seconds."""
    work = plan.workload
    twins = ["critic"] * (work.has_critic and work.critic == SAME)
    twins += ["reward model"] * (work.has_reward_model and work.reward.model == SAME)
    if twins:
        yield f"{listed(twins)} of the policy's size"
    if work.generates and (rules := work.reward.rules) is not None:
        each = format(rules.seconds_per_sample, "s")
        yield f"rules take {each} a sample on {rules.workers:,} CPU workers"
    if parts := [f"{format(each, 's')} ({name})" for name, each in asdict(work.custom).items() if each]:
        yield f"own parts of the algorithm take {listed(parts)} a sample"
    if work.generates and (tools := work.environment) is not None:
        turns, each = tools.mean_turns or tools.turns, format(tools.seconds_per_turn, "s")
        answers = f"environments answer {turns:.3g} turns a response, {each} each"
        yield f"{answers}, on {tools.workers:,} CPU workers{_sandboxes(tools)}"
    if isinstance(work.response_len, Fixed):
        yield f"every response has exactly {work.response_len.value:,.0f} tokens"
    yield from plan.assumed
    yield from _dispatcher(plan, ranges=ranges)
    if WEIGHT_PATHS[plan.placement.weight_path].changes_only:
        yield _changed(plan)
    yield from _between_regions(plan)
    if plan.placement.rollout is not None and plan.framework is not None:
        runs, named = framework(plan.framework), plan.placement.rollout.layout.engine
        engine = next((title for title, name in ENGINE_NAMES.items() if name == named), runs.engine)
        if engine != PRICED_ENGINE:
            own = "with its own attention, the rest as " if engine in ENGINE_NAMES else "as "
            yield f"{engine}, with which {runs.title} generates, is priced {own}{PRICED_ENGINE}"


def _sandboxes(tools: Environment) -> str:
    """How sandboxes start, and how many the fleet's memory holds."""
    start, most = format(tools.cold_start, "s"), tools.sandboxes
    made = f"; a sandbox starts in {start}, {tools.warm:,} are ready" if tools.cold_start else ""
    return made + ("" if most is None else f"; memory for {most:,} sandboxes: so many responses at a time")


def _changed(plan: Plan) -> str:
    """How much of the weights changes, where only that is sent."""
    profile = profile_under(plan, plan.placement.actor.pool)
    if profile is None:
        return "few of the weights change in a step: only those are sent"
    share = profile.coefficient("sync_delta_density")
    value, low, high = (f"{x:.2g} %" for x in (100 * share.value, 100 * share.low, 100 * share.high))
    return f"{value} of the weights change in a step ({low} to {high}): only those are sent"


def _between_regions(plan: Plan) -> Iterator[str]:
    """What a transfer reaches on the link to the rollout's region."""
    rollout = plan.placement.rollout
    profile = rollout and profile_under(plan, rollout.pool)
    link = rollout and plan.hardware[plan.placement.pool(rollout.pool).hardware].wan
    if profile and link:
        yield reached(link, device_of(NodeGroup(profile=profile, gpus=1, gpus_per_node=1)))


def _dispatcher(plan: Plan, *, ranges: bool) -> Iterator[str]:
    """What the dispatcher of the experts leaves open, where actor or rollout do not name it."""
    actor, rollout = plan.placement.actor.layout, plan.placement.rollout
    left_open = {}
    if actor.ep > 1 and actor.dispatcher is None:
        left_open["actor.train"] = "training", "--actor dispatcher=deepep"
    if rollout is not None and rollout.layout.open_dispatcher:
        left_open["actor.generate"] = "generation", "--rollout dispatcher=deepep-ll"
    for phase in plan.prediction.phases:
        if phase.name in left_open:
            what, option = left_open[phase.name]
            low, high = (format(x, "s") for x in (phase.low_s, phase.high_s))
            takes = f"takes {low} to {high}" if ranges else "depends on the dispatcher, so intervals are wide"
            yield f"{what} {takes}: name the dispatcher ({option})"


def learning(plan: Plan) -> str:
    """How old samples are when they are trained on, and what else changes what is learnt."""
    changes = list(_changes(plan))
    if plan.placement.schedule.asynchronous:
        return "; ".join(changes)
    updates = plan.workload.epochs * plan.workload.mini_batches
    fresh = "every sample comes from the policy that trains on it"
    if not plan.workload.generates:
        fresh = "on given data"
    elif updates > 1:
        fresh = f"samples are of this step, on which {plural(updates, 'update')} follow each other"
    return "; ".join((fresh, *changes)) if changes else f"{fresh}; nothing here changes what is learnt"


def _changes(plan: Plan) -> Iterator[str]:
    work, schedule, rollout = plan.workload, plan.placement.schedule, plan.placement.rollout
    if schedule.asynchronous:
        versions = plural(round(schedule.staleness), "version")
        yield f"samples are up to {versions} old when they are trained on"
    if schedule.partial_rollout:
        yield "responses go on under new weights"
    if work.lora is not None:
        on = " on a base in 4 bit" if work.lora.base == "nf4" else ""
        yield f"adapters of rank {work.lora.rank}{on} are trained, not all weights"
    if work.generates and work.old_logprobs == "rollout":
        yield "old log-probs are the rollout's"
    if rollout is not None and rollout.layout.precision not in ("bf16", "fp16"):
        yield f"the rollout runs in {rollout.layout.precision.upper()}"
    if rollout is not None and rollout.layout.kv_precision == "fp8":
        yield "the KV cache is FP8"
    if work.train_precision not in ("bf16", "fp16"):
        yield f"training in {work.train_precision.upper()}"
    if work.router_replay:
        yield "training sends tokens to the experts that the rollout chose"
    if work.optimizer == "adam8bit":
        yield "8-bit Adam moments"
    if work.gradients == "bf16" and BACKENDS[plan.placement.backend].gradient_bytes >= 4:
        yield "gradients in BF16"
    if work.oversampling:
        yield "prompts that are slow to finish are not trained on"


MEANINGS = (
    ("TP", "matrices cut"),
    ("PP", "layers cut"),
    ("CP", "sequences cut"),
    ("EP", "experts dealt out"),
    ("DP", "batch dealt out"),
    ("ZeRO-1", "Adam over DP"),
    ("ZeRO-2", "gradients, Adam over DP"),
    ("ZeRO-3", "weights, gradients, Adam over DP"),
    ("HSDP", "over so many only"),
    ("VP", "stages per GPU"),
)
"""Start of a word of a layout label -> what it says."""


def layout_words(plan: Plan) -> str:
    """The words of the layouts of a plan, each decoded once."""
    labels = " ".join(role.layout.label for role in plan.placement.roles.values()).split()
    said = [f"{word}: {meaning}" for word, meaning in MEANINGS if any(x.startswith(word) for x in labels)]
    if plan.placement.rollout is not None:
        said.append(f"x{plan.placement.rollout.layout.dp}: replicas")
    return "; ".join(said)
