"""NeMo-RL at 7ea279abf: ranks, batches and residency by the rules of its source, which cannot be built here.

File and line below are of NVIDIA-NeMo/RL at that commit. `BASE` holds what its examples set where an export
or a recipe says nothing (examples/configs/grpo_math_1B.yaml, lines 127 to 443; dpo.yaml, 47 to 48).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Values = Mapping[str, Any]
GEN = "policy.generation"
VLLM, RESOURCES = f"{GEN}.vllm_cfg", f"{GEN}.colocated.resources"
DEGREES = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}
ENGINE = {f"megatron_cfg.{name}_parallel_size": 1 for name in DEGREES.values()} | {
    "megatron_cfg.expert_tensor_parallel_size": 1,
    "megatron_cfg.activation_checkpointing": False,
    "megatron_cfg.optimizer.optimizer_cpu_offload": False,
    "megatron_cfg.enabled": False,
    "dtensor_cfg.enabled": True,
    "dtensor_cfg.tensor_parallel_size": 1,
    "dtensor_cfg.context_parallel_size": 1,
    "dtensor_cfg.expert_parallel_size": 1,
    "dtensor_cfg.cpu_offload": False,
    "dtensor_cfg.activation_checkpointing": False,
    "sequence_packing.enabled": True,
    "dynamic_batching.enabled": False,
}
BASE: dict[str, Any] = {
    "cluster.num_nodes": 1,
    "cluster.gpus_per_node": 1,
    "grpo.num_prompts_per_step": 32,
    "grpo.num_generations_per_prompt": 16,
    "grpo.skip_reference_policy_logprobs_calculation": False,
    "loss_fn.reference_policy_kl_penalty": 0.01,
    "policy.train_global_batch_size": 512,
    "policy.train_micro_batch_size": 4,
    "policy.max_total_sequence_length": 512,
    f"{GEN}.colocated.enabled": True,
    f"{VLLM}.tensor_parallel_size": 1,
    f"{VLLM}.pipeline_parallel_size": 1,
    f"{VLLM}.gpu_memory_utilization": 0.6,
    f"{VLLM}.enforce_eager": False,
    **{f"policy.{name}": value for name, value in ENGINE.items()},
    **{f"value.{name}": value for name, value in ENGINE.items()},
    "value.sequence_packing.enabled": False,
}
PAIRS = {"policy.train_global_batch_size": 128, "policy.train_micro_batch_size": 2}


class Refused(Exception):
    """Why its set-up stops."""


def derived(said: Values) -> dict[str, Any]:
    """Fields of a plan that NeMo-RL makes of a configuration."""
    loop = next((name for name in ("dpo", "ppo") if any(key.startswith(f"{name}.") for key in said)), "grpo")
    s = {**BASE, **(PAIRS if loop == "dpo" else {}), **said}
    trained, generates = _pools(s) if loop != "dpo" else (_world(s), 0)
    shared = loop != "dpo" and s[f"{GEN}.colocated.enabled"]
    made: dict[str, Any] = {"train.gpus": trained}
    for role, model in {"actor": "policy", **({"critic": "value"} if loop == "ppo" else {})}.items():
        made |= {
            f"{role}.{key}": value for key, value in _role(s, model, trained, loop, shared=shared).items()
        }
    if loop == "dpo" or (
        s["loss_fn.reference_policy_kl_penalty"] and not s["grpo.skip_reference_policy_logprobs_calculation"]
    ):
        made |= _reference(made, shared=shared)
    return made | (_rollout(s, generates, loop, shared=shared) if loop != "dpo" else {})


def _world(s: Values) -> int:
    return int(s["cluster.num_nodes"] * s["cluster.gpus_per_node"])


def _pools(s: Values) -> tuple[int, int]:
    """GPUs that train and that generate (algorithms/grpo.py, 857 to 914)."""
    nodes, each = s["cluster.num_nodes"], s["cluster.gpus_per_node"]
    if s[f"{GEN}.colocated.enabled"]:
        return nodes * each, nodes * each
    own, own_nodes = s.get(f"{RESOURCES}.gpus_per_node"), s.get(f"{RESOURCES}.num_nodes")
    if nodes == 1:
        if not own or own_nodes not in (None, 1) or own >= each:
            raise Refused(f"{own} GPUs of {each} generate on one node")
        return each - own, own
    if own != each or not own_nodes or own_nodes >= nodes:
        raise Refused(f"{own_nodes} nodes of {own} GPUs generate, of {nodes} nodes of {each}")
    return (nodes - own_nodes) * each, own_nodes * each


def _role(s: Values, model: str, gpus: int, loop: str, *, shared: bool) -> dict[str, Any]:
    megatron = s[f"{model}.megatron_cfg.enabled"]
    made = _megatron(s, model) if megatron else _dtensor(s, model)
    tp, cp = made["layout.tp"], made["layout.cp"]
    ranks, rest = divmod(gpus, tp * cp * made.get("layout.pp", 1))
    if rest or not ranks:  # models/policy/lm_policy.py, 228 to 245
        raise Refused(f"{gpus} GPUs are no whole number of model copies")
    each = s.get(f"{model}.train_global_batch_size", s["policy.train_global_batch_size"])
    prompts, samples = _batch(s, loop)
    pairs = 2 if loop == "dpo" else 1
    made |= {
        "gpus": gpus,
        "layout.dp": ranks,
        "rank_samples": pairs * (each // ranks),  # dtensor_policy_worker_v2.py, 417; megatron_..., 786
        "updates": s.get("ppo.ppo_epochs", 4 if loop == "ppo" else 1)  # algorithms/ppo.py, 193 and 1609
        * (prompts * samples // each if loop != "dpo" else 1),  # 424; 793
        **_micro_batches(s, model, tp, cp, loop),
    }
    if made.get("layout.offload_params") != "cpu":  # grpo.py, 2342 and 2416: optimizer, then weights
        made |= {"residency": "offloaded" if shared else "resident", "leaves": shared}
    return made


def _batch(s: Values, loop: str) -> tuple[int, int]:
    if loop == "dpo":
        return s["policy.train_global_batch_size"], 1
    names = ("num_prompts_per_step", "num_generations_per_prompt")
    prompts, samples = (s.get(f"{loop}.{name}", s[f"grpo.{name}"]) for name in names)
    return prompts, samples


def _megatron(s: Values, model: str) -> dict[str, Any]:
    """lm_policy.py, 129 to 131; models/megatron/setup.py for the rest."""
    group = f"{model}.megatron_cfg"
    optimizer = f"{group}.optimizer.optimizer"
    share = s.get(f"{optimizer}_offload_fraction", 1.0) if s[f"{optimizer}_cpu_offload"] else 0
    checkpoints = s[f"{group}.activation_checkpointing"]
    return {
        **{f"layout.{n}": s[f"{group}.{name}_parallel_size"] for n, name in DEGREES.items()},
        "layout.etp": s[f"{group}.expert_tensor_parallel_size"],
        "layout.offload_optimizer": "cpu" if share else "none",
        "layout.recompute": s.get(f"{group}.recompute_granularity") or "full" if checkpoints else "none",
    }


def _dtensor(s: Values, model: str) -> dict[str, Any]:
    """lm_policy.py, 186 to 187."""
    group = f"{model}.dtensor_cfg"
    return {
        **{
            f"layout.{n}": s[f"{group}.{name}_parallel_size"]
            for n, name in (("tp", "tensor"), ("cp", "context"))
        },
        "layout.ep": s[f"{group}.expert_parallel_size"],
        "layout.offload_params": "cpu" if s[f"{group}.cpu_offload"] else "none",
        "layout.recompute": "full" if s[f"{group}.activation_checkpointing"] else "none",
    }


def _micro_batches(s: Values, model: str, tp: int, cp: int, loop: str) -> dict[str, Any]:
    """Tokens on a GPU, or samples, of training and of scoring (lm_policy.py, 470 to 525; lm_value.py, 255 to 347)."""
    size = s.get(f"{model}.train_micro_batch_size", s["policy.train_micro_batch_size"])
    scored = s.get(f"{model}.logprob_batch_size", size)
    if model == "policy" and tp >= 4 and loop != "dpo" and scored != size:
        raise Refused(f"logprob_batch_size {scored} is not train_micro_batch_size {size} (lm_policy.py, 208)")
    packing = next((p for p in ("sequence_packing", "dynamic_batching") if s[f"{model}.{p}.enabled"]), None)
    if packing is None or loop == "dpo":
        if loop == "dpo":  # algorithms/dpo.py, 321
            size = scored = 2 * size
        sizes = {"train_micro_batch": size, "score_micro_batch": scored}
        return sizes | {"train_pack_tokens": None, "score_pack_tokens": None}
    counts = {"train": ("train", size), "score": ("logprob", scored)}
    longest = s["policy.max_total_sequence_length"]
    tokens = {
        kind: s.get(f"{model}.{packing}.{name}_mb_tokens", n * longest) for kind, (name, n) in counts.items()
    }
    return {f"{kind}_pack_tokens": -(-count // cp) for kind, count in tokens.items()}


def _reference(made: Values, *, shared: bool) -> dict[str, Any]:
    """The policy's workers with other weights (megatron_policy_worker.py, 1971: use_reference_model)."""
    names = ("gpus", "layout.dp", "layout.cp", "layout.tp", "score_pack_tokens", "score_micro_batch")
    found = {f"reference.{name}": made[f"actor.{name}"] for name in names if f"actor.{name}" in made}
    if "actor.residency" in made:
        found["reference.residency"] = "offloaded" if shared else "swapped"
    return found


def _rollout(s: Values, gpus: int, loop: str, *, shared: bool) -> dict[str, Any]:
    """Engines (models/generation/vllm/vllm_generation.py, 119 to 126; vllm_worker.py, 1309: sleep(level=1))."""
    tp, pp = s[f"{VLLM}.tensor_parallel_size"], s[f"{VLLM}.pipeline_parallel_size"]
    if gpus % (tp * pp):
        raise Refused(f"{gpus} GPUs are no whole number of engines of {tp * pp}")
    prompts, samples = _batch(s, loop)
    return {
        "rollout.gpus": gpus,
        "rollout.layout.tp": tp,
        "rollout.layout.pp": pp,
        "rollout.layout.dp": gpus // (tp * pp),
        "rollout.layout.memory_utilization": s[f"{VLLM}.gpu_memory_utilization"],
        "rollout.layout.cuda_graphs": not s[f"{VLLM}.enforce_eager"],
        "rollout.sleep": 1 if shared else 0,
        "workload.prompts": prompts,
        "workload.samples": samples,
    }
