"""slime: the flags of train.py and train_async.py, Megatron's and SGLang's among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhfsim.frameworks.configuration.configuration import Configuration
from rlhfsim.frameworks.configuration.described import RunDescription, rollout_layout, training_layout
from rlhfsim.frameworks.configuration.engines import dynamic_sampling, environment
from rlhfsim.frameworks.configuration.settings import FrameworkSettings
from rlhfsim.frameworks.slime.findings import findings
from rlhfsim.frameworks.slime.heads import CHUNKED
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.software import Software, default_software
from rlhfsim.specs.workload.workload import Algorithm, OldLogprobs

ESTIMATORS: dict[str, Algorithm] = {
    "grpo": "grpo",
    "gspo": "grpo",
    "cispo": "grpo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++",
    "ppo": "ppo",
}
"""--advantage-estimator -> algorithm here."""
CONCURRENCY = 512
"""Samples that slime sends to an engine at a time, where the flag is not given."""
SHARE = 0.85
"""SGLang works its share of the memory out; about this much on GPUs of 80 GB."""
VERSIONS = 2.0
"""Policy versions over which the fully asynchronous rollout generates: it keeps no limit."""


# Flags and defaults: slime/utils/arguments.py, slime/backends/*/arguments.py (624b824).
def describe(s: FrameworkSettings, means: Mapping[str, float]) -> RunDescription:
    """The run that the flags describe."""
    per_node = s.whole("actor_num_gpus_per_node", default=8)
    gpus, shared = per_node * s.whole("actor_num_nodes", default=1), s.flag("colocate")
    own = None if shared else s.whole("rollout_num_gpus")
    prompts, samples = s.whole("rollout_batch_size"), s.whole("n_samples_per_prompt", default=1)
    batch = s.whole("global_batch_size", default=prompts * samples)
    updates = s.whole("num_steps_per_rollout", default=max(1, round(prompts * samples / max(1, batch))))
    algorithm = ESTIMATORS.get(s.text("advantage_estimator", default="grpo"), "grpo")
    plain = algorithm == "grpo" and s.flag("disable_grpo_std_normalization")
    model = s.model("hf_checkpoint")
    leaves = algorithm == "ppo" or (shared and not s.flag("no_offload_train")) or s.flag("offload_train")
    disk = s.text("update_weight_transport", default="nccl") == "disk"
    stale, continuous = _schedule(s)
    return RunDescription(
        algorithm="dr-grpo" if plain else algorithm,
        model=model,
        prompts=prompts,
        samples=samples,
        mini_batches=max(1, updates),
        packing=True,
        kl=s.flag("use_kl_loss") or s.share("kl_coef", default=0.0) != 0,
        old_logprobs=_old_logprobs(s, updates, algorithm),
        gradients="bf16" if s.flag("grad_reduce_in_bf16") else "backend",
        software=_software(s),
        **_sampling(s, prompts),
        max_prompt=s.whole("rollout_max_prompt_len", default=0) or None,
        max_response=s.whole("rollout_max_response_len", default=0) or None,
        backend="megatron",
        gpus=gpus,
        gpus_per_node=per_node,
        rollout_gpus=own,
        layout=_layout(s, gpus, model),
        actor_residency="offloaded" if leaves else "resident",
        optimizer_leaves=leaves,
        scoring_residency="offloaded" if leaves else "swapped",
        train_precision="fp8" if s.find("fp8_format") else "bf16",
        rollout=_rollout(s, own or s.whole("rollout_num_gpus", default=gpus), model),
        sleep=2 if shared and not s.flag("no_offload_rollout") else 0,
        weight_path="disk" if disk else "ipc" if shared else "broadcast",
        staleness=stale,
        partial_rollout=continuous,
    )


def _sampling(s: FrameworkSettings, prompts: int) -> dict[str, Any]:
    """Groups that a filter throws away, prompts beyond the batch, and turns that a user's own code plays."""
    each = s.whole("over_sampling_batch_size", default=prompts)
    if s.find("custom_generate_function_path") is not None:
        return {"environment": environment(s)}
    if s.find("dynamic_sampling_filter_path") is not None:
        return {"dynamic_sampling": dynamic_sampling(s, prompts, each, None)}
    return {"oversampling": max(0.0, each / max(1, prompts) - 1)}


def _schedule(s: FrameworkSettings) -> tuple[float, bool]:
    """Policy versions of lag, and whether samples go on over an update."""
    if "fully_async" in str(s.find("rollout_function_path") or ""):
        return s.share("rollout_staleness", default=VERSIONS), True
    interval = s.count("update_weights_interval")
    listed = s.find("rank") is not None  # with all defaults, as Megatron prints its arguments
    stale = "async" in str(s.find("entry_point") or "") or (interval or 0) > listed
    return float(stale and not s.flag("colocate")), False


def _old_logprobs(s: FrameworkSettings, updates: int, algorithm: Algorithm) -> OldLogprobs:
    """Those of the rollout if asked for; of the training pass where a rollout is one optimizer step."""
    if s.flag("use_rollout_logprobs"):
        return "rollout"
    apart = algorithm == "ppo" or s.text("advantage_estimator", default="grpo") == "gspo"
    reused = updates == 1 and not apart and s.share("kl_coef", default=0.0) == 0
    return "reused" if reused else "recompute"


def _software(s: FrameworkSettings) -> Software | None:
    """Log-probs in chunks; None: of all tokens at once (its default, -1)."""
    if str(s.find("log_probs_chunk_size") or -1).startswith("-"):
        return None
    return replace(default_software("megatron"), head=CHUNKED)


def _layout(s: FrameworkSettings, gpus: int, model: str) -> Layout:
    tp, pp = (s.whole(f"{name}_model_parallel_size", default=1) for name in ("tensor", "pipeline"))
    ep = s.whole("expert_model_parallel_size", default=1)
    granularity = s.text("recompute_granularity", default="none")
    hosted = s.flag("optimizer_cpu_offload")
    return training_layout(
        gpus,
        tp=tp,
        pp=pp,
        cp=s.whole("context_parallel_size", default=1),
        ep=ep,
        etp=s.whole("expert_tensor_parallel_size", default=tp if ep > 1 else 1),
        vp=_virtual_stages(s, pp, model),
        zero=1,
        sequence_parallel=s.flag("sequence_parallel") or tp == 1,
        **_micro_batch(s),
        recompute=granularity if granularity in ("full", "selective") else "none",
        offload_optimizer="cpu" if hosted else "none",
        offload_fraction=s.share("optimizer_offload_fraction", default=1.0) if hosted else 1.0,
    )


def _virtual_stages(s: FrameworkSettings, pp: int, model: str) -> int:
    if s.find("num_layers_per_virtual_pipeline_stage") is None:
        return s.whole("num_virtual_stages_per_pipeline_rank", default=1)
    layers = s.whole("num_layers", default=resolve_model(model).num_layers)
    return max(1, layers // (max(1, pp) * s.whole("num_layers_per_virtual_pipeline_stage", least=1)))


def _micro_batch(s: FrameworkSettings) -> dict[str, Any]:
    if not s.flag("use_dynamic_batch_size"):
        return {"micro_batch": max(1, s.whole("micro_batch_size", default=1))}
    limit = s.whole("max_tokens_per_gpu")
    scored = s.whole("log_probs_max_tokens_per_gpu", default=limit)
    return {"pack_tokens": limit, "score_pack_tokens": scored}


def _rollout(s: FrameworkSettings, gpus: int, model: str) -> RolloutLayout:
    engine = s.whole("rollout_num_gpus_per_engine", default=1, least=1)
    pp = s.whole("sglang_pp_size", "sglang_pipeline_parallel_size", default=1, least=1)
    groups = s.whole("sglang_dp_size", "sglang_data_parallel_size", default=1, least=1)
    sent = s.whole("sglang_server_concurrency", default=CONCURRENCY)
    running = min(sent, s.whole("sglang_max_running_requests", default=sent))
    if s.find("sglang_speculative_algorithm"):
        s.assumed["sglang_speculative_algorithm"] = "none: its acceptance is not in the configuration"
    return rollout_layout(
        gpus,
        tp=max(1, engine // (pp * groups)),
        pp=pp,
        replicas=max(1, gpus // engine),
        attention_dp=groups,
        ep=s.whole("sglang_ep_size", "sglang_expert_parallel_size", default=1),
        max_num_seqs=max(1, running // groups),
        memory_utilization=s.share("sglang_mem_fraction_static", default=SHARE),
        max_batched_tokens=max(1, s.whole("sglang_chunked_prefill_size", default=8192 * groups) // groups),
        cuda_graphs=not s.flag("sglang_disable_cuda_graph"),
        precision="fp8" if "fp8" in model.lower() else "bf16",
        kv_precision="fp8" if "fp8" in str(s.find("sglang_kv_cache_dtype") or "") else "bf16",
    )


CONFIGURATION = Configuration(
    name="slime",
    title="slime",
    describe=describe,
    findings=findings,
    entries=(r"(?i)slime\S*/train(_async)?\.py",),
    shown=("train.py of slime",),
    keys=(
        "hf_checkpoint",
        "ref_load",
        "rollout_num_gpus",
        "rollout_max_",
        "sglang_",
        "use_dynamic_batch_size",
        "log_probs_max_tokens_per_gpu",
        "num_steps_per_rollout",
    ),
)
