"""slime at 624b824a8: ranks, batches and residency by the rules of its source, which cannot be built here.

File and line below are of THUDM/slime at that commit; what is not said has Megatron-LM's or slime's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Values = Mapping[str, Any]
DEGREES = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}


class Refused(Exception):
    """Why its set-up stops."""


def derived(said: Values) -> dict[str, Any]:
    """Fields of a plan that slime makes of its flags."""
    gpus = said["actor_num_nodes"] * said["actor_num_gpus_per_node"]
    shared, critic = bool(said.get("colocate")), said.get("advantage_estimator") == "ppo"
    rollout = said.get("rollout_num_gpus") or (gpus if shared else 0)  # utils/arguments.py, 1951
    leaves, sleeps = _offloads(said, shared=shared, critic=critic)
    actor = _layout(said, gpus) | {"residency": "offloaded" if leaves else "resident", "leaves": leaves}
    roles = {"actor": actor, **({"critic": actor} if critic else {})}  # arguments.py, 1911: the actor's GPUs
    if said.get("use_kl_loss") or said.get("kl_coef"):  # actor.py: _switch_model, of weights on the host
        names = ("gpus", "layout.dp", "layout.cp", "score_pack_tokens", "score_micro_batch")
        away = "offloaded" if leaves else "swapped"
        roles["reference"] = {name: actor[name] for name in names} | {"residency": away}
    made = {f"{role}.{name}": value for role, fields in roles.items() for name, value in fields.items()}
    return made | {"train.gpus": gpus, "rollout.sleeps": sleeps, **_rollout(said, rollout)}


def _offloads(said: Values, *, shared: bool, critic: bool) -> tuple[bool, bool]:
    """Whether trainer and engines leave their GPUs in turn (arguments.py, 1914 to 1964)."""
    train, rollout = (_said(said, f"offload_{name}") for name in ("train", "rollout"))
    if shared:
        train = True if train is None else train
        rollout = True if rollout is None else rollout
    return bool(train) or critic, bool(rollout)


def _said(said: Values, name: str) -> bool | None:
    """A switch that has an opposite; None: neither."""
    if said.get(f"no_{name}"):
        return False
    return True if said.get(name) or said.get("offload") else None


def _layout(said: Values, gpus: int) -> dict[str, Any]:
    """Megatron-Core's groups, and the micro-batches of a step (utils/dp_schedule.py, 95 to 184)."""
    made: dict[str, Any] = {n: said.get(f"{name}_parallel_size", 1) for n, name in DEGREES.items()}
    cp = made["cp"]
    ranks, rest = divmod(gpus, made["tp"] * made["pp"] * cp)
    if rest:
        raise Refused(f"{gpus} GPUs are no whole number of model copies")
    samples = said["rollout_batch_size"] * said["n_samples_per_prompt"]
    steps = said.get("num_steps_per_rollout")
    each = samples // steps if steps else said.get("global_batch_size", samples)  # arguments.py, 1971
    packs = said["max_tokens_per_gpu"] if said.get("use_dynamic_batch_size") else None
    size = said.get("micro_batch_size", 1)
    if each % (ranks * (1 if packs else size)):
        raise Refused(f"a step of {each} samples on {ranks} ranks in micro-batches of {size}")
    experts = said.get("expert_tensor_parallel_size") or (made["tp"] if made["ep"] > 1 else 1)
    return {f"layout.{name}": value for name, value in made.items()} | {
        "gpus": gpus,
        "layout.dp": ranks,
        "layout.etp": experts,
        "layout.recompute": said.get("recompute_granularity") or "none",
        "layout.offload_optimizer": "cpu" if said.get("optimizer_cpu_offload") else "none",
        "layout.sequence_parallel": bool(said.get("sequence_parallel")) and made["tp"] > 1,
        "updates": samples // each,
        "rank_samples": each // ranks,
        "train_pack_tokens": packs,
        "score_pack_tokens": packs and (said.get("log_probs_max_tokens_per_gpu") or packs),  # 1869
        "train_micro_batch": None if packs else size,
        "score_micro_batch": None if packs else size,
    }


def _rollout(said: Values, gpus: int) -> dict[str, Any]:
    """SGLang's engines, whose data-parallel attention divides their TP (sglang_utils/arguments.py, 174 to 183)."""
    each, pp = said.get("rollout_num_gpus_per_engine", 1), said.get("sglang_pp_size", 1)
    if gpus % each or each % pp:
        raise Refused(f"{gpus} GPUs in engines of {each} with {pp} stages")
    groups = said.get("sglang_dp_size", 1) if said.get("sglang_enable_dp_attention") else 1
    return {
        "rollout.gpus": gpus,
        "rollout.layout.dp": gpus // each,
        "rollout.layout.pp": pp,
        "rollout.layout.attention_dp": groups,
        "rollout.layout.tp": each // pp // groups,
        "rollout.layout.ep": said.get("sglang_ep_size", 1),
        "rollout.layout.cuda_graphs": not said.get("sglang_disable_cuda_graph"),
        "workload.prompts": said["rollout_batch_size"],
        "workload.samples": said["n_samples_per_prompt"],
    }
