"""Why a plan is predicted faster than a recipe, in words taken from the terms of both predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlhfsim.memory.kv_cache import engine_bytes, rollout_weights
from rlhfsim.plan import Plan, PredictedPhase
from rlhfsim.present.words import listed
from rlhfsim.search.explain import WORDS
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.specs.workload.lengths import stats
from rlhfsim.specs.workload.micro_batch import batch_lengths
from rlhfsim.units import GB

LEAST_SHARE = 0.1
"""A phase is named as a reason from this share of the seconds saved."""
MOST_PHASES = 3
MOVES = ("load", "unload")
CLEARLY = 1.25
"""A quantity is named as a cause where it differs by this factor."""
SENT = ("p2p", "broadcast")
"""Weight paths between GPUs that the network may join."""
FLOP_PER_PARAM = 6.0
"""FLOP of a token and parameter in training, forward and backward."""


@dataclass(frozen=True, slots=True)
class Saving:
    """What one phase (or the moves around one) takes less in the plan."""

    phase: str
    """`actor.train`, `actor.train moves`."""
    before: float
    """Seconds."""
    after: float
    resource: str
    """In which most of it is saved."""
    saved_s: float
    """Seconds saved in that resource."""


def savings(recipe: Plan, plan: Plan) -> Iterator[Saving]:
    """The phases that account for the seconds between the two steps, the largest first."""
    gain = recipe.prediction.step_s - plan.prediction.step_s
    one, other = _grouped(recipe), _grouped(plan)
    order = sorted(one, key=lambda name: _seconds(other, name) - _seconds(one, name))
    for name in order[:MOST_PHASES]:
        before, after = _seconds(one, name), _seconds(other, name)
        if before - after < LEAST_SHARE * abs(gain):
            continue
        less = {r: s - other.get(name, {}).get(r, 0.0) for r, s in one[name].items()}
        resource = max(less, key=lambda r: less[r])
        yield Saving(name, before, after, resource, less[resource])


def _grouped(plan: Plan) -> dict[str, dict[str, float]]:
    """Seconds by resource of each phase; the moves around a call together."""
    found: dict[str, dict[str, float]] = {}
    for phase in plan.prediction.phases:
        name, _, last = phase.name.rpartition(".")
        into = found.setdefault(f"{name} moves" if last in MOVES else phase.name, {})
        for resource, seconds in phase.by_resource_s.items():
            into[resource] = into.get(resource, 0.0) + seconds
    return found


def _seconds(groups: dict[str, dict[str, float]], name: str) -> float:
    return math.fsum(groups.get(name, {}).values())


def reason(recipe: Plan, plan: Plan) -> str:
    """`actor.train 661 -> 146 s, most of it launches and framework (500 micro-batches -> 41); ...`."""
    return "; ".join(_told(recipe, plan, saving) for saving in savings(recipe, plan))


def _told(recipe: Plan, plan: Plan, saving: Saving) -> str:
    causes = list(dict.fromkeys(_causes(recipe, plan, saving)))
    why = f" ({', '.join(causes)})" if causes else ""
    word = WORDS.get(saving.resource, f"the {saving.resource}")
    return (
        f"{saving.phase} {_short(saving.before)} -> {_short(saving.after)} s, "
        f"{_short(saving.saved_s)} s of it {word}{why}"
    )


def _short(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.1f}"


# --- causes ---------------------------------------------------------------------------------------------


def _causes(recipe: Plan, plan: Plan, saving: Saving) -> Iterator[str]:
    """The settings of the two that move the saved term."""
    role, _, kind = saving.phase.partition(".")
    if kind.startswith("sync"):
        yield from _sync_causes(recipe, plan)
    elif kind.startswith("generate"):
        yield from _rollout_causes(recipe, plan)
    elif kind.endswith("moves"):
        yield f"the {role} does not leave its GPUs" if _stays(plan, role) else "less is moved"
    elif isinstance(plan.placement.roles.get(role), RolePlacement):
        yield from _role_causes(recipe, plan, role, saving)


def _stays(plan: Plan, role: str) -> bool:
    placed = plan.placement.roles.get(role)
    return isinstance(placed, RolePlacement) and placed.residency == "resident" and not placed.offload_between


def _sync_causes(recipe: Plan, plan: Plan) -> Iterator[str]:
    one, other = recipe.placement, plan.placement
    if one.weight_path != other.weight_path:
        yield f"weight path {one.weight_path} -> {other.weight_path}"
    before, after = one.actor.layout.pp, other.actor.layout.pp
    if after < before:
        yield f"{before} pipeline stages send in turn -> {after}"


def _rollout_causes(recipe: Plan, plan: Plan) -> Iterator[str]:
    one, other = recipe.placement.rollout, plan.placement.rollout
    if one is None or other is None:
        return
    before, after = running(recipe), running(plan)
    if after > CLEARLY * before:
        yield f"{before:,.0f} sequences at a time in all replicas -> {after:,.0f}"
    a, b = one.layout, other.layout
    if b.gpus > CLEARLY * a.gpus:
        yield f"{a.gpus} GPUs generate -> {b.gpus}"
    if b.cuda_graphs and not a.cuda_graphs:
        yield "CUDA graphs"
    if (a.replica_gpus, a.tp, a.ep) != (b.replica_gpus, b.tp, b.ep):
        yield f"replicas {a.label} -> {b.label}"
    if recipe.placement.schedule != plan.placement.schedule:
        yield "another schedule"


def running(plan: Plan) -> float:
    """Sequences of mean length that all replicas of a plan generate at a time."""
    rollout = plan.placement.rollout
    assert rollout is not None
    work = plan.workload
    profile = load_profile(plan.hardware[plan.placement.pool(rollout.pool).hardware].profile)
    held = engine_bytes(models_of(work).actor, rollout, profile=profile)
    mean = stats(work.prompt_len).mean + stats(work.response_len).mean / 2
    layout = rollout.layout
    each = min(held.kv_tokens / mean, layout.max_num_seqs * layout.attention_dp)
    return min(each * layout.dp, work.num_sequences)


def _role_causes(recipe: Plan, plan: Plan, role: str, saving: Saving) -> Iterator[str]:
    before, after = recipe.placement.roles.get(role), plan.placement.roles[role]
    if not isinstance(before, RolePlacement) or not isinstance(after, RolePlacement):
        return
    a, b, train = before.layout, after.layout, saving.phase.endswith("train")
    if _streams(plan, saving.phase) and not _streams(recipe, saving.phase):
        yield "it works while others still generate"
    if b.gpus > CLEARLY * a.gpus:
        yield f"{a.gpus} GPUs -> {b.gpus}"
    one, other = (micro_batches(p, x, train=train) for p, x in ((recipe, a), (plan, b)))
    if saving.resource != "compute" and one > CLEARLY * other:
        gathers = ", each gathers the weights" if a.zero == 3 and saving.resource == "network" else ""
        yield f"{one:,.0f} micro-batches a rank{gathers} -> {other:,.0f}"
    if train and a.recompute != "none" and b.recompute == "none":
        yield "layers are not computed twice"
    if train and a.offload_optimizer != "none" and b.offload_optimizer == "none":
        yield "Adam runs on the GPU"
    if a.label != b.label:
        yield f"{a.label} -> {b.label}"


def _streams(plan: Plan, phase: str) -> bool:
    return any(p.name == phase and p.work_s is not None for p in plan.prediction.phases)


def micro_batches(plan: Plan, layout: Layout, *, train: bool) -> float:
    """Micro-batches of a call on each data-parallel rank, at least."""
    work = plan.workload
    if train:
        return batch_lengths(work).micro_batches(layout) * work.mini_batches * work.epochs
    pack = layout.pack(scoring=True)
    mean = stats(work.prompt_len).mean + stats(work.response_len).mean
    each = max(1.0, pack / mean) if pack else layout.micro_batch
    return math.ceil(work.num_sequences / (layout.dp * each))


# --- what to hold it against ----------------------------------------------------------------------------


def training_rate(plan: Plan) -> str | None:
    """At which share of its GPUs' peak a plan trains; None where it does not say."""
    phase = next((p for p in plan.prediction.phases if p.name == "actor.train"), None)
    if phase is None:
        return None
    layout = plan.placement.actor.layout
    assert not isinstance(layout, RolloutLayout)
    return f"it trains at {training_share(plan, phase, layout):.0%} of the GPUs' peak".replace("%", " %")


def training_share(plan: Plan, phase: PredictedPhase, layout: Layout) -> float:
    """6 x active parameters x tokens over GPUs, seconds and dense peak; what is computed twice is not counted."""
    work = plan.workload
    tokens = work.num_sequences * (stats(work.prompt_len).mean + stats(work.response_len).mean) * work.epochs
    active = next(m.active_params for m in plan.models if m.role == "actor")
    profile = load_profile(plan.hardware[plan.placement.pool(plan.placement.actor.pool).hardware].profile)
    peak = profile.peak[work.train_precision].value
    return FLOP_PER_PARAM * active * tokens / (layout.gpus * (phase.work_s or phase.seconds) * peak)


def sync_rate(plan: Plan) -> str | None:
    """At which rate every rollout GPU receives its weights over the network; None where nothing is sent."""
    phase = next((p for p in plan.prediction.phases if p.name == "actor.sync"), None)
    rollout = plan.placement.rollout
    if phase is None or rollout is None or plan.placement.weight_path not in SENT or not phase.seconds:
        return None
    size = rollout_weights(models_of(plan.workload).actor, rollout.layout)
    return f"each rollout GPU receives its weights at {size / GB / phase.seconds:.1f} GB/s"


def nearest(plan: Plan) -> str | None:
    """The published run that is most like the plan, with our error there; None where none says anything."""
    run = plan.nearest
    if run is None or not run.near:
        return None
    return (
        f"nearest measured run: {run.framework}, {run.model} on {run.gpus} {run.gpu}, our error there "
        f"{run.error:+.0%}".replace("%", " %")
    )


def believed(plan: Plan, *, proven: bool) -> str:
    """What speaks for the plan's seconds, in a sentence."""
    proof = "no plan of the space is predicted faster" if proven else "not proven, better plans may exist"
    told = [
        proof,
        *filter(None, [training_rate(plan), sync_rate(plan), nearest(plan) or "nothing near was measured"]),
    ]
    return listed(told)
