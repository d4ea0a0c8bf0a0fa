"""What NeMo-RL runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlhfsim.specs.frameworks.runs import COMMON, Examples, Runs, known_by
from rlhfsim.specs.frameworks.says import Between, Places, Same, Says
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.heads import Head
from rlhfsim.specs.placement.weight_paths import APART

DTENSOR = Head(
    train_bytes=12,
    score_bytes=8,
    source="NeMo-RL 7ea279abf, models/automodel/train.py and distributed/model_utils.py (logprob_chunk_size "
    "unset): FP32 logits (output_dtype of FSDP2), log-softmax; then it, its gradient and that of the logits",
)
MEGATRON = Head(
    train_bytes=12,
    score_bytes=12,
    source="NeMo-RL 7ea279abf, distributed/model_utils.py, DistributedLogprob: FP32 logits, the same less "
    "their maximum, and log-softmax",
)
ALONE: Mapping[str, tuple[Between, ...]] = {"actor": ("optimizer leaves",), "reference": ("leaves",)}
"""Moves in distillation without a rollout: `offload_before_refit` of the student while the teacher scores."""
FEATURES = known_by(
    "run on GPUs",
    "one step off",
    "gated delta net or Mamba-2 layers",
    "sparse attention",
    "staleness above 1",
    "partial rollouts",
    "dynamic sampling",
    "environments",
    "rollout tensor parallelism",
    "rollout pipeline parallelism",
    "rollout expert parallelism",
    "rollout replicas across nodes",
    "speculative decoding",
    "EAGLE-3 heads trained with the policy",
    "router replay",
    "FP8 rollout",
    "FP8 KV cache",
    "BF16 layers in an FP8 rollout",
    "offload to the host",
    "reference swapped in place of the actor",
    "partial optimizer offload",
    "LoRA",
    "BF16 gradients",
    "FP32 gradient sums",
    "FP8 training",
    "micro-batches by tokens",
    "largest logits of a teacher",
    "old log-probs of the rollout",
    "old log-probs of the training pass",
)
NOT_DISTILLED = (
    "one step off",
    "staleness above 1",
    "partial rollouts",
    "dynamic sampling",
    "router replay",
    "EAGLE-3 heads trained with the policy",
    "LoRA",
)
"""Features of which algorithms/distillation.py, or its base configuration, has no key."""
RUNS = Runs(
    name="nemo-rl",
    title="NeMo-RL",
    algorithms=(*COMMON, "dapo", "gspo", "distillation", "sft", "reward_model", "dpo"),
    trainers={
        "megatron": replace(  # no key for virtual stages; its base has the distributed optimizer
            BACKENDS["megatron"],
            virtual_stages=False,
            zero_stages=(1,),
            zero_stages_tp=(1,),
            zero_stages_pp=(1,),
        ),
        "fsdp2": replace(BACKENDS["fsdp2"], zero_stages=(3,)),
    },
    shares="update",
    known_trainers=known_by("run on GPUs", "megatron", "fsdp2"),
    heads={"fsdp2": DTENSOR, "megatron": MEGATRON},
    padded_heads={"fsdp2": replace(DTENSOR, score_bytes=12, source=f"{DTENSOR.source}; a contiguous copy")},
    examples=Examples(
        dense="fsdp2",
        largest=15e9,
        source="examples/configs of NeMo-RL 7ea279a: "
        "dense policies to 15B: 70 DTensor, 57 Megatron; larger ones: 7, 8; mixtures of experts: 13, 64",
    ),
    says=Says(  # offload_before_refit moves its optimizer to the host, offload_after_refit its weights; its
        # engine sleeps at level 1, in each release from 0.3 on (vllm_worker.py, line 1309)
        moves_with="rollout",
        sharing=Places(between=dict.fromkeys(("actor", "critic"), ("leaves",)), sleep=(1,)),
        alone=Places(between=dict.fromkeys(("actor", "critic"), ("stays",)), sleep=(0,)),
        same=(
            Same(aspect="cut", roles=("actor", "reference")),
            Same(aspect="scoring", roles=("actor", "reference")),
            Same(aspect="leaves", roles=("actor", "reference")),
        ),
        packs=True,
        whole_updates=True,
    ),
    always_swaps=True,  # use_reference_model of both workers, whatever the configuration
    frees_gradients=("megatron",),  # prepare_for_lp_inference of megatron_policy_worker.py
    weight_paths={
        "ipc": known_by("run on GPUs", "same GPU"),
        "broadcast": known_by("run on GPUs", *APART),
        "p2p": known_by("run on GPUs", *APART),
    },
    features=FEATURES,
    only_with={
        "FP8 training": ("megatron",),  # policy.megatron_cfg.fp8_cfg
        "router replay": ("megatron",),
        "BF16 gradients": ("megatron",),  # reduce_dtype is FP32 (models/dtensor/parallelize.py, line 747)
    },
    differs={
        "distillation": {
            "features": {name: known for name, known in FEATURES.items() if name not in NOT_DISTILLED},
            "always_swaps": False,
            "says": Says(
                moves_with="rollout",
                sharing=Places(between=dict.fromkeys(("actor", "reference"), ("leaves",)), sleep=(1,)),
                alone=Places(between=ALONE, sleep=(0,)),
                packs=True,
                whole_updates=True,
            ),
        }
    },
    dispatchers=("alltoall", "deepep", "hybridep"),
    rollout_dispatchers=("allgather", "deepep-ll"),
    source="NeMo-RL 7ea279a: its configuration, read 2026-11-22; speculative decoding: arXiv 2604.26779; "
    "no role has GPUs of its own but the rollout; distillation: algorithms/distillation.py and "
    "9 recipes of its own test suite on 4 to 16 GPUs (tests/test_suites/llm/distillation-qwen3-32b-*.sh)",
)
