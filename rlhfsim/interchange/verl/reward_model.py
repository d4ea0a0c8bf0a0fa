"""verl's reward model, which an inference engine of its own serves: its keys, written and read.

Source: verl 0.9.1, trainer/config/reward/reward.yaml and experimental/reward_loop/reward_model.py: replicas
of tensor-parallel GPUs behind a router; on the actor's GPUs they sleep between their calls (level 1:
weights on the host), and trainer_separate_async.py asks for GPUs of their own. Before 0.7 the trainer's
workers scored; such a configuration is read as whole copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.described import RoleDescription, training_layout
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.export import Setting, Unsaid, longest_prompt, longest_response, nodes_of
from rlhfsim.interchange.nearest import with_layouts
from rlhfsim.interchange.predictions import call
from rlhfsim.interchange.verl.versions import REWARD_TP, SERVERS, VERSION, before, default
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.placement import RolePlacement

PREFIX = "reward.reward_model"
ENGINE = f"{PREFIX}.rollout"
LEGACY = "reward_model"
OWN_GPUS = f"{PREFIX}.enable_resource_pool"
USUAL_SHARE, SPARE = 0.5, 0.05
"""Share of a GPU that verl gives the engine unless told, and what is left free in addition to a share."""
BATCHED_TOKENS = 8192
"""Default of max_num_batched_tokens."""


def reward_settings(plan: Plan) -> Iterator[Setting]:
    """The reward model of a plan, if it has one.

    Raises:
        RlhfsimError: it shares GPUs with the actor, and the rollout does not.
    """
    placement, placed = plan.placement, plan.placement.role("reward")
    if placed is None:
        return
    apart = placed.pool != placement.actor.pool
    if not apart and placement.rollout and placement.rollout.pool != placement.actor.pool:
        raise RlhfsimError(
            "reward-model-shares-gpus",
            "verl's separate_async refuses a reward model on the actor's GPUs",
            help="give it a pool of its own, or design for it: rlhfsim design ... --framework verl",
        )
    yield Setting(f"{PREFIX}.enable", True)
    yield Setting(OWN_GPUS, apart)
    if apart:
        nodes, each = nodes_of(plan, plan.placement.pool(placed.pool).gpus)
        yield Setting(f"{PREFIX}.nnodes", nodes)
        yield Setting(f"{PREFIX}.n_gpus_per_node", each)
    yield Setting(f"{PREFIX}.model_path", "${REWARD_MODEL}")
    yield Setting(f"{ENGINE}.name", "vllm")
    why = call(plan, "reward.score")
    yield Setting(REWARD_TP, placed.layout.tp, why)
    yield Setting(f"{ENGINE}.free_cache_engine", placed.residency == "offloaded")
    yield Setting(f"{ENGINE}.max_num_batched_tokens", _tokens(plan, placed))
    why = "at most what the plan leaves next to the other roles"
    yield Setting(f"{ENGINE}.gpu_memory_utilization", _share(plan, placed.pool), why)


def reward_unsaid(plan: Plan, placed: RolePlacement) -> Iterator[Unsaid]:
    """What of it verl has no key for."""
    if placed.layout.pack(scoring=True) != (tokens := _tokens(plan, placed)):
        same = {"micro_batch": 1, "pack_tokens": tokens, "score_pack_tokens": None}
        yield Unsaid(
            f"micro-batches of {placed.layout.micro_batch} samples of the reward model",
            f"its engine batches up to {tokens:,} tokens",
            nearest=with_layouts(plan, "reward", **same),
            of=tuple(f"reward.layout.{name}" for name in same),
        )


def _tokens(plan: Plan, placed: RolePlacement) -> int:
    """Tokens of a batch of the engine: the longest sample, or as many as the plan's micro-batch."""
    longest = longest_prompt(plan) + longest_response(plan)
    return max(longest, placed.layout.pack(scoring=True) or placed.layout.micro_batch * longest)


def _share(plan: Plan, pool: str) -> float:
    """Share of a GPU's memory for the engine: the usual one, more for large weights, less next to others."""
    held = [e for e in plan.prediction.ledger if (e.phase, e.pool) == ("reward.score", pool)]
    capacity = plan.prediction.capacity_bytes
    own, whole = (
        math.fsum(e.bytes for e in held if e.role in roles) / capacity
        for roles in ({"reward"}, {e.role for e in held})
    )
    left = 1 - (whole - own) - SPARE
    return math.floor(100 * min(left, max(USUAL_SHARE, own + SPARE))) / 100


def reward_named(s: FrameworkSettings) -> str | None:
    """The reward model of a configuration; None: it has none."""
    if not (s.flag(f"{LEGACY}.enable") or s.flag(f"{PREFIX}.enable")):
        return None
    return s.text(f"{PREFIX}.model_path", f"{LEGACY}.model.path", default="same")


def reward_role(s: FrameworkSettings, gpus: int) -> RoleDescription:
    """The reward model of a configuration."""
    if not s.flag(f"{PREFIX}.enable") and before(s.find(VERSION), SERVERS):
        return RoleDescription(layout=training_layout(gpus, zero=0, recompute="none"))
    own = own_gpus(s)
    if own:
        nodes = s.whole(f"{PREFIX}.nnodes", f"{LEGACY}.nnodes", default=1)
        gpus = nodes * s.whole(f"{PREFIX}.n_gpus_per_node", f"{LEGACY}.n_gpus_per_node", default=8)
    usual = int(default(REWARD_TP, s.find(VERSION)))
    sleeps = s.flag(*_keys("free_cache_engine"), default=True) and not own
    layout = training_layout(
        gpus,
        tp=s.whole(*_keys("tensor_model_parallel_size"), default=min(usual, gpus)),
        zero=0,
        recompute="none",
        sequence_parallel=False,
        pack_tokens=s.whole(*_keys("max_num_batched_tokens"), default=BATCHED_TOKENS),
    )
    return RoleDescription(
        layout=layout,
        residency="offloaded" if sleeps else "resident",
        pool="reward" if own else None,
        gpus=gpus if own else 0,
    )


def own_gpus(s: FrameworkSettings) -> bool:
    """Whether the reward model of a configuration has GPUs of its own."""
    return s.flag(OWN_GPUS, f"{LEGACY}.enable_resource_pool")


def _keys(name: str) -> tuple[str, str]:
    return f"{ENGINE}.{name}", f"{LEGACY}.rollout.{name}"
