"""Design questions drawn by seed: models, clusters, algorithms and what may compete."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from rlhfsim.search.request import SWITCHES, Request, second_pool_for_rollout
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.workload.lengths import Fixed, LogNormal
from rlhfsim.specs.workload.workload import Reward, Rules, Workload

MODELS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("qwen2.5-0.5b", (1, 2, 4, 8)),
    ("qwen2.5-1.5b", (1, 4, 8, 16)),
    ("llama-3.2-3b", (4, 8, 16)),
    ("qwen2.5-7b", (4, 8, 16, 32)),
    ("8b", (4, 8, 16, 64)),
    ("14b", (8, 16, 32)),
    ("qwen2.5-32b", (16, 32, 64)),
    ("mixtral-8x7b", (16, 32, 64)),
    ("qwen1.5-moe-a2.7b", (8, 16)),
    ("70b", (32, 64, 128)),
    ("72b", (64, 128, 256)),
    ("405b", (256, 512)),
)
"""Model and sizes of a cluster on which it is asked for."""
GPUS = ("h100", "h100", "a100", "h200", "b200", "h20")
ALGORITHMS = ("ppo", "grpo", "grpo", "rloo", "reinforce++", "dpo", "kto")
GROUPED = ("grpo", "rloo")
"""Algorithms with several responses a prompt."""

SEARCH_S = 3.0
"""Longest search, on a busy machine too: every plan must launch, also one that is not yet the best."""


def question(seed: int) -> Request:
    """Question number `seed`."""
    draw = random.Random(seed)
    model, sizes = draw.choice(MODELS)
    per_node = draw.choice((8, 8, 4))
    gpus = draw.choice(sizes)
    algorithm = draw.choice(ALGORITHMS)
    allow = frozenset(draw.sample(sorted(SWITCHES.keys() - {"lend"}), draw.choice((0, 0, 1, 2))))
    request = Request(
        cluster=parse_cluster(gpus=gpus, gpu=draw.choice(GPUS), gpus_per_node=min(per_node, gpus)),
        workload=_workload(draw, algorithm, model),
        objective=draw.choice(("time", "time", "tokens", "memory")),
        allow=allow,
        max_staleness=draw.choice((1, 2, 4)),
        time_limit=SEARCH_S,
    )
    return _with_constraint(draw, request)


def _workload(draw: random.Random, algorithm: Any, model: str) -> Workload:
    prompt = draw.choice((256, 1024, 2048))
    positions = resolve_model(model).max_position or 2**31
    longest = min(draw.choice((512, 1024, 4096, 8192, 16384, 32768)), positions - prompt)
    lengths = draw.choice((Fixed(value=longest), LogNormal(mean=longest / 3, sigma=0.8, max=longest)))
    rewards = (Reward(model="same"), Reward(rules=Rules()), Reward(model="same", rules=Rules()))
    return Workload(
        algorithm=algorithm,
        model=model,
        prompts=draw.choice((64, 128, 256, 512)),
        samples=draw.choice((4, 8, 16)) if algorithm in GROUPED else 1,
        prompt_len=Fixed(value=prompt),
        response_len=lengths,
        mini_batches=draw.choice((1, 1, 2, 4)),
        epochs=draw.choice((1, 1, 2)),
        packing=draw.choice((True, True, False)),
        kl=draw.choice((True, True, False)),
        reward=draw.choice(rewards),
    )


def _with_constraint(draw: random.Random, request: Request) -> Request:
    """Often one more wish: an architecture, a weight path, something forbidden, or another kind of GPU for
    the rollout."""
    if not request.workload.generates:
        return request
    wish = draw.choice(("none", "none", "architecture", "path", "forbid", "kinds"))
    if wish == "architecture":
        return replace(request, architecture=draw.choice(("naive", "smart", "hybrid", "disaggregated")))
    if wish == "path":
        return replace(request, weight_path=draw.choice(("ipc", "broadcast", "host", "disk")))
    if wish == "forbid":
        return replace(request, forbid=frozenset({draw.choice(("ipc", "broadcast", "offload", "recompute"))}))
    if wish == "kinds":
        [group] = request.cluster.node_groups
        cluster = parse_cluster(
            gpus=group.gpus,
            gpu=group.profile.name,
            gpus_per_node=group.gpus_per_node,
            rollout_gpus=group.gpus,
            rollout_gpu="h20",
        )
        return second_pool_for_rollout(replace(request, cluster=cluster))
    return request
