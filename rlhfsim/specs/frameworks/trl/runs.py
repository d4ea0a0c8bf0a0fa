"""What TRL runs."""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.specs.frameworks.runs import Runs, known_by
from rlhfsim.specs.frameworks.says import Places, Same, Says
from rlhfsim.specs.frameworks.trl.heads import TILED, WHOLE
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.software import default_software
from rlhfsim.specs.placement.weight_paths import APART

SHARED_PREFILL = 4096
"""`max_num_batched_tokens` of an engine in the training processes, on every GPU.

Source: TRL 0.19.0 to 1.16.0, generation/vllm_generation.py (line 359; until 0.27 in trainer/grpo_trainer.py).
"""

ACCELERATED = replace(default_software("fsdp2"), reduce_bytes=2.0, sums_whole=True, whole_reference=True)
"""FSDP as accelerate sets it up: gradients are reduced in BF16, and once a step.

Source: accelerate 1.15.0, set_mixed_precision of FullyShardedDataParallelPlugin (utils/dataclasses.py, line
2109: `reduce_dtype` is that of the weights) and no_sync (accelerator.py, line 1133), which transformers
5.19.0 enters for all micro-batches of a step but the last unless `sync_each_batch` is set (trainer.py, line
1882); TRL 0.29 to 1.16.0, prepare_fsdp (models/utils.py, line 338 of 1.16.0): `fully_shard` of a reference
without its layers.
"""

IN_TURN = replace(default_software("deepspeed"), overlaps_reduction=False, plain_bytes=4.0)
"""DeepSpeed without `overlap_comm`, its default under ZeRO-1 and ZeRO-2; without DeepSpeed (ZeRO-0) weights
in FP32, as they are loaded (`trl.keys.DTYPE`).

Source: accelerate 1.15.0, DeepSpeedPlugin (utils/dataclasses.py), which writes no such key; DeepSpeed 0.19.8,
overlap_comm_valid of runtime/zero/config.py (tests/executor/test_deepspeed_buckets.py).
"""

RUNS = Runs(
    name="trl",
    title="TRL",
    trainers={
        "deepspeed": replace(
            BACKENDS["deepspeed"],
            tensor_parallel=False,
            pipeline_parallel=False,
            context_parallel=False,
            zero_stages_tp=(),
            zero_stages_pp=(),
            tp_with_pp="no",
        ),
        "fsdp2": replace(
            BACKENDS["fsdp2"],
            tensor_parallel=False,
            context_parallel=False,
            expert_parallel=False,
            zero_stages=(2, 3),
            zero_stages_tp=(),
        ),
    },
    known_trainers=known_by("run on GPUs", "deepspeed", "fsdp2"),
    heads=dict.fromkeys(("deepspeed", "fsdp2"), TILED),
    software={"deepspeed": IN_TURN, "fsdp2": ACCELERATED},
    differs={"dpo": {"heads": dict.fromkeys(("deepspeed", "fsdp2"), WHOLE)}},
    pads=True,
    says=Says(
        sharing=Places(sleep=(0, 2)),
        alone=Places(sleep=(0,)),
        same=(
            Same(aspect="cut", roles=("actor", "reference", "reward")),
            Same(aspect="scoring", roles=("actor", "reference", "reward")),
        ),
        sequences_of_batch=True,
        prefill={True: SHARED_PREFILL},
        whole_updates=True,
    ),
    algorithms=(  # those with a command
        *("grpo", "dr-grpo", "dapo", "gspo", "cispo", "rloo"),
        *("sft", "reward_model", "dpo", "kto"),
    ),
    weight_paths={"ipc": known_by("run on GPUs", "same GPU"), "broadcast": known_by("run on GPUs", *APART)},
    features=known_by(
        "run on GPUs",
        "gated delta net or Mamba-2 layers",
        "rollout tensor parallelism",
        "rollout pipeline parallelism",
        "rollout replicas across nodes",
        "FP8 rollout",
        "LoRA",
        "LoRA on a 4-bit base",
        "8-bit Adam",
        "AMD GPUs",
        "old log-probs of the rollout",
        "old log-probs of the training pass",
    ),
    source="TRL 1.16.0: its configuration classes, read 2026-11-22; in process or beside vllm serve; "
    "AMD: README of TRL 1.17.0, 'trainers now run on AMD Instinct GPUs through PyTorch's ROCm build'",
)
