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
from rlhfsim.interchange.dispatching import in_megatron
from rlhfsim.interchange.export import Setting
from rlhfsim.interchange.fields import Fields
from rlhfsim.interchange.rows import rows_of
from rlhfsim.interchange.table import Table, drafting
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
"""Estimators that are read, in addition to those that are written."""
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
VERSIONS = 2.0
"""Policy versions over which the fully asynchronous rollout generates: it keeps no limit."""
GENERATE = "custom_generate_function_path"
CONTEXT = "rollout_max_context_len"
DRAFTING = {"ngram": "NGRAM", "mtp": "EAGLE", "eagle": "EAGLE3", "draft": "STANDALONE"}
"""What drafts -> SGLang's algorithm."""
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
        yield Setting(f"--decoder-{end}-pipeline-num-layers", count, f"of {layers} layers")


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
    yield Setting(f"{prefix}-algorithm", DRAFTING[drafted.method], drafting(plan))
    if drafted.method != "ngram":
        yield Setting(f"{prefix}-num-steps", drafted.draft_tokens)
        yield Setting(f"{prefix}-eagle-topk", 1)
    yield Setting(f"{prefix}-num-draft-tokens", drafted.draft_tokens + 1, "the last token too")
    if drafted.method in ("draft", "eagle"):
        yield Setting(f"{prefix}-draft-model-path", "${DRAFT_MODEL}")
    if drafted.trained:
        yield Setting("--mtp-num-layers", 1)
        yield Setting("--enable-mtp-training", True, "so that its acceptance does not fall")
        yield Setting("--mtp-loss-scaling-factor", 0.2, "as in its documentation")


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


# --- the table ---------------------------------------------------------------------------------------------


def _engine(plan: Plan, field: str) -> int | None:
    """A limit of a whole engine, all its attention-data-parallel groups together."""
    layout = plan.placement.rollout.layout if plan.placement.rollout else None
    return getattr(layout, field) * layout.attention_dp if layout else None


def _chunked(plan: Plan) -> bool:
    software = plan.placement.software
    return software is not None and software.head == CHUNKED


TABLE = Table(
    lambda: rows_of(
        "slime",
        {
            "ESTIMATORS": ESTIMATORS,
            "SUMS": SUMS,
            "ends": _ends,
            "drafting": _drafting,
            "exchange": in_megatron("actor", "--", flag=True),
            "experts_tp": lambda read: read["actor.tp"] if read["actor.ep"] > 1 else 1,
            "gpus_per_node": lambda plan: plan.hardware[0].gpus_per_node,
            "prefilled": lambda read: 8192 * read["rollout.attention_dp"],
            "rollout_gpus": lambda read: read["actor.gpus"] if read["shared"] else None,
            "samples": lambda read: read["workload.prompts"] * read["workload.samples"],
            "submitted": _submitted,
        },
    ),
    _rest,
    {
        "engine.running": lambda plan: _engine(plan, "max_num_seqs"),
        "engine.sent": lambda plan: _engine(plan, "max_num_seqs"),
        "engine.tokens": lambda plan: _engine(plan, "max_batched_tokens"),
        "chunked": _chunked,
        "on_disk": lambda plan: plan.placement.weight_path in ("disk", "delta-disk"),
    },
)
