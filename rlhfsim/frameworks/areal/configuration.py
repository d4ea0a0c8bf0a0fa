"""AReaL: its YAML configuration, with allocations such as `megatron:d4p2t2e8` or `fsdp:d8c2`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, cast

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.areal.findings import findings
from rlhfsim.frameworks.configuration.configuration import Configuration
from rlhfsim.frameworks.configuration.described import (
    ON_HOST,
    RoleDescription,
    RunDescription,
    rollout_layout,
    training_layout,
)
from rlhfsim.frameworks.configuration.settings import FrameworkSettings
from rlhfsim.specs.placement.engine_numbers import VLLM
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.workload.workload import Algorithm, GradientSums

SECTIONS = {"critic": "critic", "reference": "ref"}
"""Role -> its section."""


# Keys and defaults: `PPOConfig` of areal/api/cli_args.py, allocations: areal/api/alloc_mode.py (1.0.4).
def describe(s: FrameworkSettings, means: Mapping[str, float]) -> RunDescription:
    """The run that AReaL's configuration describes."""
    generates, trains = _allocations(s)
    megatron = trains.startswith("megatron")
    gpus, own = _gpus(trains), _gpus(generates)
    shared = s.text("rollout.scheduling_strategy.type", default="separation") == "colocation"
    samples = s.whole("gconfig.n_samples", default=1)
    prompts = s.whole("train_dataset.batch_size", default=1)
    updates = max(1, s.whole("actor.ppo_n_minibatches", default=4))
    each = prompts * samples // updates
    kl = s.share("actor.kl_ctl", default=0.1) > 0
    lag = s.share("rollout.max_head_offpolicyness", default=0)
    rank = s.whole("actor.lora_rank", default=32) if s.flag("actor.use_lora") else 0
    disk = shared or s.text("actor.weight_update_mode", default="xccl") == "disk"
    actor = _layout(s, "actor", trains, each)
    gone = s.flag("enable_offload") and (shared or s.flag("actor.offload"))
    gone = gone and actor.offload_params == "none"
    return RunDescription(
        algorithm=algorithm(s),
        model=s.model("actor.path"),
        critic="same" if _has(s, "critic") else None,
        prompts=prompts,
        samples=samples,
        mini_batches=updates,
        packing=True,
        kl=kl and _has(s, "ref"),
        old_logprobs="recompute" if s.flag("actor.recompute_logprob") else "rollout",
        lora_rank=rank,
        gradients=_gradients(s, megatron),
        max_prompt=s.whole("train_dataset.max_length", default=0) or None,
        max_response=s.whole("gconfig.max_new_tokens", default=16384),
        backend="megatron" if megatron else "fsdp2",
        gpus=gpus,
        gpus_per_node=s.whole("cluster.n_gpus_per_node", default=8),
        rollout_gpus=None if shared else own,
        layout=actor,
        roles={role: _role(s, role, prompts * samples, each) for role in SECTIONS if _has(s, SECTIONS[role])},
        actor_residency="offloaded" if gone else "resident",
        optimizer_leaves=gone,
        rollout=_rollout(s, generates, gpus if shared else own),
        sleep=2 if shared else 0,
        weight_path="disk" if disk else "broadcast",
        staleness=0.0 if shared else lag,
        partial_rollout=not shared and lag > 0,
    )


def algorithm(s: FrameworkSettings) -> Algorithm:
    """The algorithm: a critic's, or the one of the norm of rewards."""
    if _has(s, "critic"):
        return "ppo"
    if s.find("actor.reward_norm.mean_level") != "group":
        return "reinforce++"
    if s.flag("actor.reward_norm.mean_leave1out"):
        return "rloo"
    return "grpo" if s.find("actor.reward_norm.std_level") else "dr-grpo"


def _has(s: FrameworkSettings, section: str) -> bool:
    return s.has(section) and (
        section != "critic" or s.find("critic.is_critic", "critic.backend") is not None
    )


def _allocations(s: FrameworkSettings) -> tuple[str, str]:
    """Those of rollout and training; `allocation_mode`, `sglang:d4+fsdp:d4`, has both."""
    mode = str(s.find("allocation_mode") or "")
    generates, plus, trains = mode.replace(".d", ":d").partition("+")
    if plus and s.find("actor.backend") is None:
        return generates, trains if ":" in trains else f"fsdp:{trains}"
    return s.text("rollout.backend"), s.text("actor.backend")


def _degrees(spelled: str) -> dict[str, int]:
    """`megatron:(attn:d4t4|ffn:d2t2e4)` -> degrees of attention, with those of the experts beside them.

    Raises:
        RlhfsimError: it is no allocation.
    """
    attention, _, experts = spelled.partition("|")
    parts = re.fullmatch(r"(?:\w+:)?\(?(?:attn:)?((?:[dptce]0*[1-9][0-9]{0,6})+)\)?", attention.strip())
    beside = re.fullmatch(r"(?:ffn:)?((?:[dpte]0*[1-9][0-9]{0,6})+)\)", experts.strip())
    if parts is None or (experts and beside is None):
        raise RlhfsimError(
            "bad-setting",
            f"{spelled!r} is no allocation",
            help="write it as megatron:d4p2t2e8, fsdp:d8c2 or megatron:(attn:d4t4|ffn:d2t2e4)",
        )
    sizes = {name: int(size) for name, size in re.findall(r"([dptce])(\d+)", parts[1])}
    if beside is not None:
        cut = {name: int(size) for name, size in re.findall(r"([dpte])(\d+)", beside[1])}
        sizes |= {"e": cut.get("e", 1), "etp": cut.get("t", 1)}
    return sizes


def _gpus(spelled: str) -> int:
    return math.prod(size for name, size in _degrees(spelled).items() if name in "dptc")


def _layout(s: FrameworkSettings, section: str, spelled: str, samples: int) -> Layout:
    """The layout of an engine that is given `samples` at a time."""
    sizes, scores = _degrees(spelled), section == "ref"
    tp, pp, cp, dp = (sizes.get(name, 1) for name in "tpcd")
    cuts: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp}
    if spelled.startswith("megatron"):
        cuts |= {"ep": sizes.get("e", 1), "etp": sizes.get("etp", 1)}
        cuts["zero"] = int(s.flag(f"{section}.megatron.ddp.use_distributed_optimizer", default=True))
        cuts["vp"] = max(1, s.whole(f"{section}.megatron.virtual_pipeline_parallel_size", default=1))
    else:
        cuts |= {"zero": 3, **(ON_HOST if s.flag(f"{section}.fsdp.offload_params") else {})}
    recomputes = not scores and s.flag(f"{section}.gradient_checkpointing")
    kind = s.text(f"{section}.megatron.recompute_granularity", default="full") if recomputes else "none"
    limit = s.count(f"{section}.mb_spec.max_tokens_per_mb")
    number = s.whole(f"{section}.mb_spec.n_mbs", default=1, least=1)
    packs = (
        {"pack_tokens": max(1, limit // cp)} if limit else {"micro_batch": max(1, samples // (dp * number))}
    )
    return training_layout(dp * tp * pp * cp, **cuts, recompute=cast(Any, kind), **packs)


def _role(s: FrameworkSettings, role: str, sequences: int, each: int) -> RoleDescription:
    """A critic or a reference; colocated with the actor it stands in its pool."""
    section = SECTIONS[role]
    spelled = s.text(f"{section}.backend", "actor.backend")
    colocated = s.text(f"{section}.scheduling_strategy.type", default="separation") == "colocation"
    target = s.text(f"{section}.scheduling_strategy.target", default="actor") if colocated else section
    with_actor = target == "actor"
    leaves = s.flag(f"{section}.offload")
    return RoleDescription(
        layout=_layout(s, section, spelled, sequences if role == "reference" else each),
        residency="offloaded" if leaves else "resident",
        optimizer_leaves=leaves and role == "critic",
        pool=None if with_actor else target,
        gpus=0 if with_actor else _gpus(spelled),
    )


def _gradients(s: FrameworkSettings, megatron: bool) -> GradientSums:
    if megatron:
        return "backend" if s.flag("actor.megatron.ddp.grad_reduce_in_fp32", default=True) else "bf16"
    return "bf16" if s.text("actor.grad_reduce_dtype", default="float32") == "bfloat16" else "backend"


def _rollout(s: FrameworkSettings, spelled: str, gpus: int) -> RolloutLayout:
    """Replicas of the engine that the allocation names; SGLang's keys are read as vLLM's."""
    sizes = _degrees(spelled)
    sglang = spelled.startswith("sglang")
    share = ("sglang.mem_fraction_static",) if sglang else ("vllm.gpu_memory_utilization",)
    running = s.count("sglang.max_running_requests" if sglang else "vllm.max_num_seqs")
    return rollout_layout(
        gpus,
        tp=sizes.get("t", 1),
        pp=sizes.get("p", 1),
        max_num_seqs=running or 256,
        max_batched_tokens=s.whole("vllm.max_num_batched_tokens", default=VLLM.max_batched_tokens),
        memory_utilization=s.share(*share, default=0.9),
        cuda_graphs=not s.flag("sglang.disable_cuda_graph" if sglang else "vllm.enforce_eager"),
    )


CONFIGURATION = Configuration(
    name="areal",
    title="AReaL",
    describe=describe,
    findings=findings,
    entries=(r"\bareal\.launcher\.\w+", r"\bareal\.infra\.launcher\.\w+"),
    shown=("areal.launcher.local",),
    keys=(
        "gconfig.",
        "train_dataset.",
        "cluster.name_resolve.",
        "rollout.max_head_offpolicyness",
        "rollout.scheduling_",
        "rollout.backend",
        "actor.scheduling_",
        "actor.mb_spec.",
        "actor.backend",
        "actor.ppo_n_minibatches",
        "allocation_mode",
    ),
)
