"""Users' configurations as placements: one reading per framework, from its published defaults.

What a row leaves blank is filled by assumptions.yaml or, where it is no column of the table, by the
constants here, each with its source. A row that cannot be read raises `Skip` with the reason.
"""

from __future__ import annotations

import re
from dataclasses import replace

from rlhfsim.errors import RlhfsimError
from rlhfsim.memory.kv_cache import rollout_weights
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import load_profile, node_group
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, Offload, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, Residency, RolePlacement, RolloutPlacement
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.roles import TRAINED
from rlhfsim.specs.workload.workload import Algorithm, Lora, Reward, Rules, Workload
from rlhfsim.step.calls import CallSetting
from rlhfsim.units import GIB
from rlhfsim.validation.cases.oom_pools import gpu_sets, pools
from rlhfsim.validation.cases.oom_software import software, token_budget
from rlhfsim.validation.cases.rlhf import framework_of, reference_on_host, sleep_level
from rlhfsim.validation.outcome import Skip, needed
from rlhfsim.validation.rows import Row, zero_stage

GPUS = (
    ("H100", "h100"),
    ("H200", "h200"),
    ("H20-96G", "h20"),
    ("A100-80G", "a100"),
    ("A800-80G", "a100"),
    ("A100-40G", "a100-40"),
    ("A100", "a100"),
    ("V100-32G", "v100"),
    ("RTX4090", "rtx-4090"),
    ("RTX3090", "rtx-4090"),
)
"""GPU names and profiles with the same memory; an RTX 3090 has the 24 GB of an RTX 4090."""
NICKNAMES = {
    "llama-2-7b-chat": "llama-2-7b",
    "deepseek 16b actor": "deepseek-moe-16b",
    "7b rm": "",
    "8b rm": "",
    "72b critic": "",
    "qwen2.5-72b actor": "qwen2.5-72b",
    "350m rm": "opt-350m",
    "opt-350m rm": "opt-350m",
    "llama-3-8b rm": "llama-3-8b",
    "qwen-14b": "qwen2.5-14b",
    "1.5b": "qwen2.5-1.5b",
}
"""Names in the table that are no model ids; an empty one is the shape of the actor."""
GRAPHS_INSIDE = "2026"
"""Engines of earlier cases are older than vLLM 0.21: CUDA graphs lie on top of their share of memory."""


def configuration(row: Row) -> CallSetting:
    """The plan of a row.

    Raises:
        Skip: model, GPU, backend or batch is not stated, or cannot be expressed.
    """
    models = _models(row)
    gpus = int(needed(_tokens(row.text("gpus")), "number of GPUs is not stated"))
    workload = _workload(row)
    per_node = max(1, min(8, gpus // int(_tokens(row.text("nodes")) or 1)))
    cluster = Cluster(node_groups=(node_group(_gpu(row), 4096, gpus_per_node=per_node),))
    try:
        placement = _placement(row, workload, models, gpus)
    except Skip:
        raise
    except RlhfsimError as error:
        raise Skip(f"not a layout this tool expresses: {error.message}") from error
    return CallSetting(models=models, placement=placement, workload=workload, cluster=cluster)


# --- models, GPUs, workload -----------------------------------------------------------------------


def _named(text: str, actor: ModelSpec | None) -> ModelSpec:
    name = text.strip().lower()
    name = NICKNAMES.get(name, name)
    if name == "" and actor is not None:
        return actor
    try:
        return resolve_model(name)
    except RlhfsimError as error:
        raise Skip(f"no usable config of {text.strip()}: {error.message}") from error


def _models(row: Row) -> Models:
    text = row.words("model")
    first, *others = re.split(r"\s\+\s|;\s", text)
    actor = _named(first, None)
    scored = _named(others[0], actor) if others else actor
    algorithm = _algorithm(row)
    return Models(
        actor=actor,
        critic=scored.with_value_head() if algorithm == "ppo" else None,
        reference=actor,
        reward=scored.with_value_head() if _reward_model(row) else None,
    )


def _algorithm(row: Row) -> Algorithm:
    text = row.words("algo").lower()
    if "sft" in text:
        raise Skip("supervised fine-tuning, no RLHF step")
    for key, name in (("dpo", "dpo"), ("ppo", "ppo"), ("rloo", "rloo")):
        if key in text and "grpo" not in text:
            return name  # type: ignore[return-value]
    return "grpo"


def _reward_model(row: Row) -> bool:
    """PPO rows name a reward model; GRPO and verl's and NeMo-RL's PPO recipes score by rules."""
    rules = any(name in row.framework for name in ("verl", "NeMo-RL", "TinyZero"))
    return _algorithm(row) == "ppo" and not rules


def _gpu(row: Row) -> str:
    kind = row.words("gpu_type")
    named = next((name for start, name in GPUS if kind.startswith(start)), None)
    of_size = {80.0: "h100", 96.0: "h20"}.get(row.number("gpu_mem_gb") or 0.0)
    return needed(named or of_size, "memory of the GPU is not stated")


def _tokens(text: str | None) -> float | None:
    match = re.search(r"\d+", text or "")
    return float(match[0]) if match else None


def _lengths(row: Row) -> tuple[float, float]:
    """Prompt and response tokens; `4096 total`, `max_len 2048` and `seq_len` count both."""
    response = needed(_tokens(row.text("response_len")), "sequence length is not stated")
    whole = re.search("total|max_len|seq_len", row.words("response_len"))
    if whole:
        return response / 2, response / 2
    return _tokens(row.text("prompt_len")) or 1.0, response


def _workload(row: Row) -> Workload:
    prompt, response = (Fixed(value=tokens) for tokens in _lengths(row))
    rank = re.search(r"lora\D*r(\d+)", row.words("algo").lower())
    lora = "lora" in row.words("algo").lower()
    return Workload(
        algorithm=_algorithm(row),
        reward=Reward(model="same") if _reward_model(row) else Reward(rules=Rules()),
        prompts=row.integer("train_batch") or 512,
        samples=1,
        prompt_len=prompt,
        response_len=response,
        lora=Lora(rank=int(rank[1]) if rank else 32) if lora else None,
    )


# --- layout and placement -------------------------------------------------------------------------


def _backend(row: Row) -> Backend:
    text = row.words("train_backend")
    for start, name in (("fsdp", "fsdp2"), ("megatron", "megatron"), ("deepspeed", "deepspeed")):
        if text.startswith(start):
            return name  # type: ignore[return-value]
    raise Skip("training backend is not stated")


def _layout(row: Row, backend: Backend, gpus: int, micro: int) -> Layout:
    """Training layout on `gpus`; the rollout's tp of FSDP rows is not the trainer's."""
    tp, pp, cp = (row.integer(c) or 1 for c in ("tp", "pp", "cp_sp"))
    stated = zero_stage(row.text("shard"))
    zero = {"fsdp2": 3, "megatron": 1}.get(backend, 3 if stated is None else stated)
    ep, budget = row.integer("ep") or 1, token_budget(row)
    checkpoints = needed(row.text("grad_ckpt"), "gradient checkpointing is not stated")
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        dp=max(1, gpus // (tp * pp * cp)),
        zero=zero,
        micro_batch=1 if budget else micro,
        pack_tokens=budget,
        recompute="none" if checkpoints == "no" else "full",
        offload_optimizer=_train_offload(row),
        offload_params="none",
    )


def _train_offload(row: Row) -> Offload:
    """Adam on the host during training, not merely between phases."""
    text = row.words("offload")
    during = re.search(r"adam_offload|optimizer-cpu-offload|cpu adam|^cpu$|OFFLOAD_FRACTION", text)
    return "cpu" if during and "no adam_offload" not in text else "none"


def _residency(row: Row) -> tuple[Residency, bool]:
    """What happens to a trained role between its calls: weights away, optimizer away.

    NeMo-RL, slime and ms-swift's offload options move the whole policy to the host before the
    engine wakes (NeMo-RL `offload_after_refit`; slime `--colocate`); verl does what its flags say.
    """
    text, framework = row.words("offload"), row.framework
    colocated = row.words("arch").startswith(("colocated", "hybrid"))
    if colocated and framework.startswith(("NeMo-RL", "slime")):
        return "offloaded", True
    between = _train_offload(row) != "cpu"
    params = bool(re.search(r"param|model", text)) and between
    return (
        "offloaded" if params and text != "ref param" else "resident",
        bool(re.search("optimizer", text)) and between,
    )


def _micro(row: Row, column: str) -> int:
    """Sequences per micro-batch; 1 where a token budget rules."""
    if _algorithm(row) == "dpo":  # a micro-batch counts pairs, both run in one forward
        pairs = _tokens(row.text("micro_train"))
        return 2 * int(pairs or 1)
    stated = _tokens(row.text(column))
    if stated is None and row.text("max_tokens_per_gpu"):
        return 1
    if stated is None and column == "micro_logprob":
        return _micro(row, "micro_train")
    return int(needed(stated, "micro-batch is not stated"))


def _placement(row: Row, workload: Workload, models: Models, gpus: int) -> Placement:
    backend = _backend(row)
    sizes, placed_roles = pools(row, gpus)
    if placed_roles.get("actor") not in sizes:
        raise Skip("GPUs of the actor are not stated")
    residency, optimizer_away = _residency(row)
    offload = row.words("offload")
    path: WeightPath = "broadcast" if len(sizes) > 1 else "ipc"
    hosted = reference_on_host(framework_of(row), backend, lora=workload.lora is not None)

    def placed(role: str) -> RolePlacement | None:
        if role not in models.roles or placed_roles.get(role) not in sizes:
            return None
        trained = role in TRAINED
        micro = _micro(row, "micro_train" if trained else "micro_logprob")
        nemo, away = row.framework.startswith("NeMo-RL"), residency
        if not trained:  # NeMo-RL keeps the reference on the host; others as their flags say
            away = "offloaded" if nemo or "ref" in offload else "resident"
        shares = placed_roles[role] == placed_roles["actor"]
        if role == "reference" and residency == "resident" and shares and nemo:
            away = "swapped"
        layout = _layout(row, backend, sizes[placed_roles[role]], micro)
        if role == "reference" and hosted:
            layout, away = replace(layout, offload_params="cpu"), "resident"
        return RolePlacement(
            pool=placed_roles[role], layout=layout, residency=away, offload_between=trained and optimizer_away
        )

    actor = placed("actor")
    assert actor is not None
    return Placement(
        pools=gpu_sets(sizes),
        actor=actor,
        critic=placed("critic"),
        reference=placed("reference") if workload.has_reference else None,
        reward=placed("reward"),
        rollout=_rollout(row, sizes, placed_roles, models),
        weight_path="none" if row.words("arch").startswith("hybrid engine") else path,
        backend=backend,
        software=software(row, backend),
    )


def _rollout(
    row: Row, sizes: dict[str, int], roles: dict[str, str], models: Models
) -> RolloutPlacement | None:
    """The engine with its framework's settings; none where the policy generates with its own modules."""
    engine = row.text("rollout_engine")
    if row.words("arch").startswith("hybrid engine"):
        return _hybrid_engine(row, sizes, roles, models)
    if engine is None and not row.framework.startswith("prime-rl"):
        return None
    if row.text("rollout_tp") is None:
        if roles["rollout"] != roles["actor"]:
            return None  # the engine of another pool is not described: the trainer is judged alone
        raise Skip("tensor parallelism of the engine is not stated")
    pool = roles["rollout"]
    framework = row.framework
    tp = row.integer("rollout_tp") or 1
    share = needed(row.number("gpu_mem_util"), "gpu_memory_utilization is not stated")
    wide = framework.startswith("NeMo-RL") and models.actor.moe is not None and tp > 8
    graphs = not framework.startswith(("verl", "rLLM"))
    if graphs and row.words("date") < GRAPHS_INSIDE:
        profile = load_profile(_gpu(row))
        share += profile["cuda_graph_bytes"] / profile.usable_memory.value
    layout = RolloutLayout(
        tp=8 if wide else tp,
        pp=tp // 8 if wide else 1,
        dp=max(1, sizes[pool] // tp),
        memory_utilization=min(1.0, share),
        cuda_graphs=graphs,
        max_num_seqs=256 if framework.startswith("OpenRLHF") else 1024,
    )
    shared = pool == roles["actor"]
    level = 0 if framework.startswith("ms-swift") or not shared else sleep_level(framework.lower())
    return RolloutPlacement(pool=pool, layout=layout, sleep=level)


def _hybrid_engine(
    row: Row, sizes: dict[str, int], roles: dict[str, str], models: Models
) -> RolloutPlacement:
    """DeepSpeed's hybrid engine: it gathers all layers (pin_parameters, on by default) to generate.

    Its cache holds one micro-batch; the share is set so that little more than the weights fits.
    """
    layout = RolloutLayout(dp=sizes[roles["rollout"]], max_num_seqs=1, max_batched_tokens=512)
    total = load_profile(_gpu(row)).usable_memory.value
    share = (rollout_weights(models.actor, layout) + GIB) / total
    if share > 1:
        raise Skip("the gathered model alone exceeds the GPU")
    return RolloutPlacement(
        pool=roles["rollout"], layout=replace(layout, memory_utilization=share, cuda_graphs=False)
    )
