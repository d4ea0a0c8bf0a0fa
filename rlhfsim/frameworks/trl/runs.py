"""What TRL runs."""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.frameworks.runs import Runs, known_by
from rlhfsim.frameworks.says import Places, Same, Says
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.heads import Head
from rlhfsim.specs.placement.weight_paths import APART

_HEAD = Head(
    train_bytes=4,
    score_bytes=2,
    source="TRL 1.16.0, trainer/utils.py, selective_log_softmax: its kernel reads BF16 logits and "
    "writes their gradient",
)
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
    heads={"deepspeed": _HEAD, "fsdp2": _HEAD},
    pads=True,
    says=Says(
        sharing=Places(sleep=(0, 2)),
        alone=Places(sleep=(0,)),
        same=(
            Same(aspect="cut", roles=("actor", "reference", "reward")),
            Same(aspect="scoring", roles=("actor", "reference", "reward")),
        ),
        sequences_of_batch=True,
        whole_updates=True,
    ),
    algorithms=("grpo", "dr-grpo", "dapo", "gspo", "cispo", "rloo", "dpo", "kto"),  # those with a command
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
        "old log-probs of the rollout",
        "old log-probs of the training pass",
    ),
    source="TRL 1.16.0: its configuration classes, read 2026-11-22; in process or beside vllm serve",
)
