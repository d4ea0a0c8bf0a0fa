"""What `rlhfsim launch` runs: Ray, DeepSpeed or FSDP2, vLLM."""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.specs.frameworks.runs import FEATURES, Known, Runs, known_by
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS

_NOT_RUN = {
    "oversampling",
    "further roles",
    "speculative decoding",
    "MTP layers trained with the policy",
    "EAGLE-3 heads trained with the policy",
    "router replay",
    "largest logits of a teacher",
    "prefill apart from decode",
    "MXFP4 rollout",
    "NVFP4 rollout",
    "BF16 layers in an FP8 rollout",
    "double buffering",
    "rollout by the training modules",
    "rollout expert parallelism",
    "rollout attention data parallelism",
    "offload to NVMe",
    "reference swapped in place of the actor",
    "partial optimizer offload",  # DeepSpeed's ratio moves whole sub-groups, of 1e9 elements
    "FP8 training",
    "LoRA on a 4-bit base",
    "LoRA with tensor or pipeline parallelism",
    "BF16 gradients",  # DeepSpeed's are; FSDP2 reduces in FP32
    "gated delta net or Mamba-2 layers",  # its packs would leak a state from one sample into the next
    "sparse attention",
    "old log-probs of the training pass",
    "AMD GPUs",  # the pinned wheels are for CUDA
}
_WRITTEN: dict[str, Known] = {  # they need a GPU, and none has run them
    "rollout pipeline parallelism": "written only",
    "FP8 rollout": "written only",
    "FP8 KV cache": "written only",
    "8-bit Adam": "written only",
}
RUNS = Runs(
    name="rlhfsim",
    title="our own executor",
    trainers={
        "deepspeed": replace(BACKENDS["deepspeed"], context_parallel=False),
        "fsdp2": replace(
            BACKENDS["fsdp2"],
            tensor_parallel=False,
            context_parallel=False,
            expert_parallel=False,
            zero_stages_tp=(),
            interleaves_recompute=False,
            trains_pieces=False,
        ),
    },
    known_trainers={"deepspeed": "run on CPUs", "fsdp2": "run on CPUs"},
    frees_experts=True,  # executor/engines/deepspeed/experts.py
    weight_paths={
        path: known_by("run on CPUs", *rules.transports)
        for path, rules in WEIGHT_PATHS.items()
        if rules.transports
    },
    features=known_by("run on CPUs", *FEATURES.keys() - _NOT_RUN) | _WRITTEN,
    algorithms=None,
    rules_ahead=lambda work: True,  # executor/rewards/ahead.py
    only_with={"8-bit Adam": ("deepspeed",)},  # bitsandbytes does not know FSDP2's shards
    pipeline_types=("llama", "qwen2", "qwen3"),
    # a reload of vLLM 0.32 leaves the sinks as they were (seen on a CPU); engines load models of text alone
    kinds_not_run=("weight sync of attention sinks", "vision towers"),
    source="tests/executor: every layout, path and schedule on CPUs with a tiny model, several nodes as Ray "
    "nodes of one machine; no GPU was at hand",
)
