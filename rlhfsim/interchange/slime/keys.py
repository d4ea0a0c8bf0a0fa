"""slime's flags, Megatron's and SGLang's among them: one row each, written from a plan and read.

Flags and defaults: slime/utils/arguments.py, slime/backends/*/arguments.py (THUDM/slime at 624b824).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rlhfsim.interchange.configuration.engines import dynamic_sampling, environment
from rlhfsim.interchange.configuration.settings import NAMED_MODEL, FrameworkSettings
from rlhfsim.interchange.dispatching import in_megatron, in_sglang
from rlhfsim.interchange.export import Setting
from rlhfsim.interchange.fields import Fields
from rlhfsim.interchange.predictions import memory, predicted
from rlhfsim.interchange.table import (
    ABOVE_ZERO,
    FROM_ROLLOUT,
    FixedKey,
    Key,
    Table,
    choice,
    clip_range,
    drafting,
    flag,
    kept,
    like,
    limit,
    marked,
    number,
    of_call,
    of_held,
    whole,
)
from rlhfsim.plan import Plan
from rlhfsim.specs.frameworks.files import heads_of
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.software import Software, default_software
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.workload.workload import Algorithm, OldLogprobs

ESTIMATORS: dict[Algorithm, str] = {
    "ppo": "ppo",
    "grpo": "grpo",
    "dr-grpo": "grpo",
    "dapo": "grpo",
    "gspo": "gspo",
    "reinforce++": "reinforce_plus_plus",
}
OTHERS: dict[str, Algorithm] = {"reinforce_plus_plus_baseline": "reinforce++", "cispo": "grpo"}
"""Estimators that are read, beside those that are written."""
POLICY, STEPS, REFERENCE = "hf_checkpoint", "num_steps_per_rollout", "ref_load"
"""Keys that no row reads."""
SUMS = "--accumulate-allreduce-grads-in-fp32"
"""Sums of gradients as they are priced."""
PUBLISHED = (
    (r"bf16", "bf16"),
    (r"int4|kimi-k2-thinking", "mxfp4"),
    (r"fp8|deepseek-(v3|r1(?!-distill))|kimi-k2|minimax-m2", "fp8"),
)
"""Names of checkpoints -> precision of the rollout: the engine loads --hf-checkpoint as it is, and each sync
quantises by its `quantization_config` (megatron_to_hf/processors). DeepSeek-V3 and R1, Kimi-K2 and MiniMax-M2
are published in FP8, Kimi-K2-Thinking with experts in INT4. INT4 has experts alone in 4 bits
(tools/convert_hf_to_int4.py), 4.1 to 4.5 a weight with its scales; MXFP4, priced in its place, has 4.25."""
MARKS = (
    POLICY,
    REFERENCE,
    STEPS,
    "rollout_num_gpus",
    "rollout_max_",
    "sglang_",
    "use_dynamic_batch_size",
    "log_probs_max_tokens_per_gpu",
)
"""Beginnings of keys that no other framework has."""
CONCURRENCY = 512
"""Samples that slime sends to an engine at a time, where the flag is not given."""
SHARE = 0.85
"""SGLang works its share of the memory out; about this much on GPUs of 80 GB."""
VERSIONS = 2.0
"""Policy versions over which the fully asynchronous rollout generates: it keeps no limit."""
KL_COEFFICIENT = 0.001
"""Above 0, or the reference is not read; how large is not the plan's to say."""
GENERATE = "custom_generate_function_path"
CONTEXT = "rollout_max_context_len"
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
DRAFTING = {"ngram": "NGRAM", "mtp": "EAGLE", "eagle": "EAGLE3", "draft": "STANDALONE"}
"""What drafts -> SGLang's algorithm."""
CHUNK_ROWS = 1024
"""Tokens of a chunk where an export asks for chunks."""
CHUNKED = heads_of("slime")["chunked"]
"""Around the logits with `--log-probs-chunk-size`."""


# --- what no row can say ------------------------------------------------------------------------------------


def _algorithm(s: FrameworkSettings) -> Algorithm:
    name = s.text("advantage_estimator", default="grpo")
    found = OTHERS.get(name) or {word: name for name, word in reversed(ESTIMATORS.items())}.get(name, "grpo")
    return "dr-grpo" if found == "grpo" and s.flag("disable_grpo_std_normalization") else found


def _submitted(plan: Plan) -> int | None:
    """Prompts that are generated together, where they are more than those that are trained on."""
    work, sampling = plan.workload, plan.workload.dynamic_sampling
    prompts = work.prompts if sampling is None else max(work.prompts, sampling.prompts_of(work.prompts))
    prompts = max(prompts, math.ceil(work.prompts * (1 + work.oversampling)))
    return prompts if prompts > work.prompts else None


def _sampling(s: FrameworkSettings, prompts: int) -> dict[str, Any]:
    """Groups that a filter throws away, prompts beyond the batch, and turns that a user's own code plays."""
    each = s.whole("over_sampling_batch_size", default=prompts)
    if s.find(GENERATE) is not None:
        return {"environment": environment(s)}
    if s.find("dynamic_sampling_filter_path") is not None:
        return {"dynamic_sampling": dynamic_sampling(s, prompts, each, None)}
    return {"oversampling": max(0.0, each / max(1, prompts) - 1)}


def _turns(s: FrameworkSettings, response: int | None) -> dict[str, Any]:
    """The limit of a sample of several turns: its own, or that of each turn as often as turns are said.

    `--rollout-max-response-len` cuts one call of the engine (slime/rollout/sglang_rollout.py, 624b824).
    """
    if s.find(GENERATE) is None:
        return {}
    if (whole := s.count(CONTEXT)) is not None:
        return {"limit.total": whole, "limit.response": whole}
    return {"limit.response": response and response * environment(s).turns}


def _schedule(s: FrameworkSettings, read: Fields) -> tuple[float, bool]:
    """Policy versions of lag, and whether samples go on over an update."""
    if "fully_async" in str(s.find("rollout_function_path") or ""):
        return s.share("rollout_staleness", default=VERSIONS), True
    interval = s.count("update_weights_interval")
    listed = s.find("rank") is not None  # with all defaults, as Megatron prints its arguments
    stale = "async" in str(s.find("entry_point") or "") or (interval or 0) > listed
    return float(stale and not read["shared"]), False


def _old_logprobs(s: FrameworkSettings, algorithm: Algorithm, updates: int) -> OldLogprobs:
    """Those of the rollout if asked for; of the training pass where a rollout is one optimizer step."""
    if s.flag("use_rollout_logprobs"):
        return "rollout"
    apart = algorithm in ("ppo", "gspo")
    reused = updates == 1 and not apart and s.share("kl_coef", default=0.0) == 0
    return "reused" if reused else "recompute"


def _ends(plan: Plan) -> Iterator[Setting]:
    layout = plan.placement.actor.layout
    layers = resolve_model(plan.workload.model).num_layers if layout.pp > 1 else 1
    for end, count in ends(layers, layout.pp).items():
        yield Setting(key=f"--decoder-{end}-pipeline-num-layers", value=count, why=f"of {layers} layers")


def ends(layers: int, stages: int) -> dict[str, int]:
    """Layers of the first and the last stage where they do not split evenly: Megatron asks for these."""
    if layers % stages == 0:
        return {}
    each = math.ceil(layers / stages)
    if (last := layers - each * (stages - 1)) > 0:
        return {"last": last}
    if (both := layers - each * (stages - 2)) > 1:
        return {"first": math.ceil(both / 2), "last": both // 2}
    return {"last": layers - (each - 1) * (stages - 1)}


def virtual_stages(s: FrameworkSettings, pp: int, model: str) -> int:
    """Virtual stages of a rank, of which Megatron-Core is told by their number or by the layers of each."""
    if s.find("num_layers_per_virtual_pipeline_stage") is None:
        return s.whole("num_virtual_stages_per_pipeline_rank", default=1)
    layers = s.whole("num_layers", default=resolve_model(model).num_layers)
    return max(1, layers // (max(1, pp) * s.whole("num_layers_per_virtual_pipeline_stage", least=1)))


def chunked_head(s: FrameworkSettings) -> Software | None:
    """Log-probs in chunks; None: of all tokens at once (its default, -1)."""
    if str(s.find("log_probs_chunk_size") or -1).startswith("-"):
        return None
    return replace(default_software("megatron"), head=CHUNKED)


def _drafting(plan: Plan) -> Iterator[Setting]:
    drafted = plan.placement.rollout.layout.speculation if plan.placement.rollout else None
    if drafted is None:
        return
    prefix = "--sglang-speculative"
    yield Setting(key=f"{prefix}-algorithm", value=DRAFTING[drafted.method], why=drafting(plan))
    if drafted.method != "ngram":
        yield Setting(key=f"{prefix}-num-steps", value=drafted.draft_tokens)
        yield Setting(key=f"{prefix}-eagle-topk", value=1)
    yield Setting(key=f"{prefix}-num-draft-tokens", value=drafted.draft_tokens + 1, why="the last token too")
    if drafted.method in ("draft", "eagle"):
        yield Setting(key=f"{prefix}-draft-model-path", value="${DRAFT_MODEL}")
    if drafted.trained:
        yield Setting(key="--mtp-num-layers", value=1)
        yield Setting(key="--enable-mtp-training", value=True, why="so that its acceptance does not fall")
        yield Setting(key="--mtp-loss-scaling-factor", value=0.2, why="as in its documentation")


def _weight_path(s: FrameworkSettings, *, shared: bool) -> WeightPath:
    changes = s.text("update_weight_mode", default="full") == "delta"
    if s.text("update_weight_transport", default="nccl") == "disk":
        return "delta-disk" if changes else "disk"
    return "ipc" if shared else "broadcast"


def _rest(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    algorithm, model, shared = _algorithm(s), s.model(POLICY), read["shared"]
    samples = read["workload.prompts"] * read["workload.samples"]
    usual = max(1, round(samples / max(1, read["samples_of_update"])))
    updates = s.whole(STEPS, default=usual)
    leaves = algorithm == "ppo" or (shared and not s.flag("no_offload_train")) or s.flag("offload_train")
    stale, continuous = _schedule(s, read)
    engine, groups = read["rollout.replica_gpus"], read["rollout.attention_dp"]
    if s.find("sglang_speculative_algorithm"):
        s.assumed["sglang_speculative_algorithm"] = "none: its acceptance is not in the configuration"
    return {
        "workload.algorithm": algorithm,
        "workload.model": model,
        "workload.mini_batches": max(1, updates),
        "workload.packing": True,
        "workload.kl": s.flag("use_kl_loss") or s.share("kl_coef", default=0.0) != 0,
        "workload.old_logprobs": _old_logprobs(s, algorithm, updates),
        **_sampling(s, read["workload.prompts"]),
        **_turns(s, read["limit.response"]),
        "software": chunked_head(s),
        "backend": "megatron",
        "actor.residency": "offloaded" if leaves else "resident",
        "actor.offload_between": leaves,
        "reference.residency": "offloaded" if leaves else "swapped",
        "actor.zero": 1,
        "actor.vp": virtual_stages(s, read["actor.pp"], model),
        "rollout.tp": max(1, engine // (read["rollout.pp"] * groups)),
        "rollout.dp": max(1, read["rollout.gpus"] // engine),
        "rollout.max_num_seqs": max(1, min(read["engine.sent"], read["engine.running"]) // groups),
        "rollout.max_batched_tokens": max(1, read["engine.tokens"] // groups),
        "rollout.precision": _rollout_precision(s, model),
        "weight_path": _weight_path(s, shared=shared),
        "schedule.staleness": stale,
        "schedule.partial_rollout": continuous,
    }


def _rollout_precision(s: FrameworkSettings, model: str) -> str:
    """That of the checkpoint, as its name says it or as it is published; what no name says is assumed."""
    name = str(s.find(NAMED_MODEL) or s.find(POLICY) or model).rstrip("/").rpartition("/")[2].lower()
    found = next((precision for names, precision in PUBLISHED if re.search(names, name)), "bf16")
    if found != "bf16" and found not in name:
        kind = "experts in INT4, priced as MXFP4" if found == "mxfp4" else "FP8, as it is published"
        s.assumed[POLICY] = f"{kind}; a copy in BF16 has that in its name"
    return found


# --- the rows -----------------------------------------------------------------------------------------------

_FP8_ROLLOUT = "rollout.precision=fp8"
_WHERE = (
    Key("actor.nodes", "--actor-num-nodes", 1, why=predicted),
    Key("actor.each", "--actor-num-gpus-per-node", 8),
    FixedKey("--num-gpus-per-node", lambda plan: plan.hardware[0].gpus_per_node),
    Key("rollout.gpus", "--rollout-num-gpus", lambda read: read["actor.gpus"] if read["shared"] else None),
    FixedKey(
        "--update-weights-interval",
        1,
        "!shared schedule.asynchronous",
        "the rollout never waits for an update",
    ),
    FixedKey(
        "--rollout-function-path",
        FULLY_ASYNC,
        "!shared schedule.continuous",
        "samples go on over an update, under the new weights",
    ),
    FixedKey("--offload-train", True, "!shared leaves !critic", memory),
    Key("shared", "--colocate", codec=flag(), why="training and rollout share the GPUs"),
    FixedKey("--no-offload-train", True, "shared !leaves", memory),
    Key("rollout.sleep", "--no-offload-rollout", codec=flag(0, 2), when="shared"),
    FixedKey("--update-weight-mode", "delta", "weight_path=delta-disk", "only changed elements are sent"),
    FixedKey("--update-weight-transport", "disk", "on_disk", of_call("actor.sync")),
    FixedKey("--update-weight-disk-dir", "${SYNC_DIR}", "on_disk"),
    FixedKey("--update-weight-transport", "nccl", "!shared !on_disk", of_call("actor.sync")),
    FixedKey("--update-weight-local-checkpoint-dir", "${LOCAL_CHECKPOINT_DIR}", "weight_path=delta-disk"),
)
_BATCH = (
    FixedKey("--prompt-data", "${PROMPTS}"),
    FixedKey("--num-epoch", 1, why="passes over the prompts; --num-rollout N counts steps"),
    Key("workload.prompts", "--rollout-batch-size", why="prompts"),
    Key("workload.samples", "--n-samples-per-prompt", 1),
    Key(
        "samples_of_update",
        "--global-batch-size",
        lambda read: read["workload.prompts"] * read["workload.samples"],
        why="samples of one optimizer step",
    ),
    FixedKey(
        "--over-sampling-batch-size",
        _submitted,
        why="prompts at a time: what is left when the batch is full is aborted",
    ),
    FixedKey("--dynamic-sampling-filter-path", FILTER, "workload.dynamic_sampling", kept),
    Key("limit.prompt", "--rollout-max-prompt-len", 0, limit()),
    Key("limit.response", "--rollout-max-response-len", 0, limit()),
    Key("limit.total", f"--{CONTEXT.replace('_', '-')}", why="prompt and response", read=False),
    FixedKey(f"--{GENERATE.replace('_', '-')}", "${GENERATE}", "workload.environment"),
)
_ALGORITHM = (
    Key("workload.algorithm", "--advantage-estimator", codec=choice(ESTIMATORS), read=False),
    FixedKey("--disable-grpo-std-normalization", True, "workload.algorithm=dr-grpo"),
    FixedKey("--eps-clip", clip_range(0), "workload.algorithm=gspo"),
    FixedKey("--eps-clip-high", clip_range(1), "workload.algorithm=gspo"),
    FixedKey(
        "--normalize-advantages",
        True,
        "workload.algorithm=reinforce++",
        "slime refuses the estimator without",
    ),
    FixedKey("--kl-coef", KL_COEFFICIENT, "kl in_reward", ABOVE_ZERO),
    FixedKey("--kl-loss-coef", KL_COEFFICIENT, "kl !in_reward", ABOVE_ZERO),
    FixedKey("--use-kl-loss", True, "kl !in_reward"),
    FixedKey("--kl-loss-type", "low_var_kl", "kl !in_reward"),
    FixedKey("--ref-load", "${MODEL}", "kl"),
    Key(
        "workload.old_logprobs", "--use-rollout-logprobs", codec=flag("rollout"), why=FROM_ROLLOUT, read=False
    ),
    FixedKey("--rm-type", "remote_rm", "reward"),
    FixedKey("--rm-url", "${REWARD_URL}", "reward"),
    FixedKey("--rm-type", "${REWARD_TYPE}", "!reward"),
)
_TRAINING = (
    FixedKey(
        "--hf-checkpoint", "${FP8_MODEL}", _FP8_ROLLOUT, "the rollout has the precision of this checkpoint"
    ),
    FixedKey("--hf-checkpoint", "${MODEL}", f"!{_FP8_ROLLOUT}"),
    FixedKey("--load", "${MODEL}"),
    Key("actor.tp", "--tensor-model-parallel-size", 1, why=of_call("actor.train")),
    Key("actor.pp", "--pipeline-model-parallel-size", 1),
    Key("actor.cp", "--context-parallel-size", 1),
    Key("actor.ep", "--expert-model-parallel-size", 1),
    Key(
        "actor.etp",
        "--expert-tensor-parallel-size",
        lambda read: read["actor.tp"] if read["actor.ep"] > 1 else 1,
    ),
    *in_megatron("actor", "--", flag=True),
    _ends,
    Key("actor.vp", "--num-virtual-stages-per-pipeline-rank", 1, quiet=True, read=False),
    Key("actor.sequence_parallel", "--sequence-parallel", codec=flag()),
    Key(
        "actor.recompute",
        "--recompute-granularity",
        "none",
        choice({"full": "full", "selective": "selective"}, "none"),
        why=of_held("actor.train", "actor"),
    ),
    FixedKey("--recompute-method", "uniform", "actor.recompute=full"),
    FixedKey("--recompute-num-layers", 1, "actor.recompute=full"),
    Key("actor.offload_optimizer", "--optimizer-cpu-offload", codec=flag("cpu", "none"), why=memory),
    Key(
        "actor.offload_fraction",
        "--optimizer-offload-fraction",
        1.0,
        number(),
        when="actor.offload_optimizer=cpu",
    ),
    FixedKey("--overlap-cpu-optimizer-d2h-h2d", True, "actor.offload_optimizer=cpu"),
    FixedKey("--use-precision-aware-optimizer", True, "actor.offload_optimizer=cpu"),
    Key("workload.gradients", "--grad-reduce-in-bf16", codec=flag("bf16", "backend")),
    Key(
        "workload.router_replay",
        "--use-rollout-routing-replay",
        codec=flag(),
        why="training takes the experts that the rollout chose",
    ),
    FixedKey(SUMS, True, "!workload.gradients=bf16"),
    FixedKey("--transformer-impl", "transformer_engine", "workload.train_precision=fp8"),
    Key("workload.train_precision", "--fp8-format", codec=marked("fp8", "e4m3", mark="")),
    FixedKey("--fp8-recipe", "blockwise", "workload.train_precision=fp8"),
    FixedKey("--attention-dropout", 0.0, why="Megatron's own is 0.1"),
    FixedKey("--hidden-dropout", 0.0),
    Key("actor.micro_batch", "--micro-batch-size", 1, whole(floor=1), when="!packs"),
    Key("packs", "--use-dynamic-batch-size", codec=flag()),
    Key("actor.pack_tokens", "--max-tokens-per-gpu", when="packs"),
    Key("actor.score_pack_tokens", "--log-probs-max-tokens-per-gpu", like("actor.pack_tokens"), when="packs"),
    FixedKey("--log-probs-chunk-size", CHUNK_ROWS, "chunked", "logits of scoring in chunks of tokens"),
)
_ROLLOUT = (
    Key("rollout.replica_gpus", "--rollout-num-gpus-per-engine", 1, whole(1), why=of_call("actor.generate")),
    Key("rollout.pp", "--sglang-pp-size", 1, whole(1), also=("sglang_pipeline_parallel_size",)),
    Key("rollout.ep", "--sglang-ep-size", 1, also=("sglang_expert_parallel_size",)),
    *in_sglang("--sglang-"),
    Key(
        "rollout.attention_dp",
        "--sglang-dp-size",
        1,
        whole(1),
        also=("sglang_data_parallel_size",),
        quiet=True,
    ),
    FixedKey("--sglang-enable-dp-attention", True, "rollout.attention_dp>1"),
    Key(
        "rollout.memory_utilization",
        "--sglang-mem-fraction-static",
        SHARE,
        number(),
        why=of_held("actor.generate", "rollout"),
    ),
    Key("engine.running", "--sglang-max-running-requests", like("engine.sent"), why="of a whole engine"),
    Key("engine.sent", "--sglang-server-concurrency", CONCURRENCY, why="slime sends no more to an engine"),
    Key("engine.tokens", "--sglang-chunked-prefill-size", lambda read: 8192 * read["rollout.attention_dp"]),
    Key("rollout.cuda_graphs", "--sglang-disable-cuda-graph", codec=flag(False, True)),
    Key("rollout.kv_precision", "--sglang-kv-cache-dtype", codec=marked("fp8", "fp8_e4m3")),
    _drafting,
)


def _engine(plan: Plan, field: str) -> int | None:
    """A limit of a whole engine, all its attention-data-parallel groups together."""
    layout = plan.placement.rollout.layout if plan.placement.rollout else None
    return getattr(layout, field) * layout.attention_dp if layout else None


def _chunked(plan: Plan) -> bool:
    software = plan.placement.software
    return software is not None and software.head == CHUNKED


TABLE = Table(
    {
        "where it runs": _WHERE,
        "batch and lengths": _BATCH,
        "algorithm": _ALGORITHM,
        "training": _TRAINING,
        "rollout": _ROLLOUT,
    },
    _rest,
    {
        "engine.running": lambda plan: _engine(plan, "max_num_seqs"),
        "engine.sent": lambda plan: _engine(plan, "max_num_seqs"),
        "engine.tokens": lambda plan: _engine(plan, "max_batched_tokens"),
        "chunked": _chunked,
        "on_disk": lambda plan: plan.placement.weight_path in ("disk", "delta-disk"),
    },
)
