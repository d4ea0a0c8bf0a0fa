"""What SkyRL runs."""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.specs.frameworks.runs import COMMON, Examples, Runs, known_by
from rlhfsim.specs.frameworks.says import Places, Same, Says
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.heads import Head
from rlhfsim.specs.placement.weight_paths import APART, EVERYWHERE

RUNS = Runs(
    name="skyrl",
    title="SkyRL",
    algorithms=(*COMMON, "dapo", "sft"),  # sft: train/main_sft.py
    trainers={
        "fsdp2": replace(
            BACKENDS["fsdp2"],
            tensor_parallel=False,
            expert_parallel=False,
            interleaves_recompute=False,
            zero_stages_tp=(),
            zero_stages=(2, 3),
        ),
        "megatron": replace(
            BACKENDS["megatron"],
            virtual_stages=False,
            zero_stages=(1,),
            zero_stages_tp=(1,),
            zero_stages_pp=(1,),
        ),
    },
    shares="micro_batch",
    known_trainers=known_by("run on GPUs", "fsdp2", "megatron"),
    critics=("fsdp2",),  # validate_megatron_cfg of train/utils/utils.py refuses one
    examples=Examples(
        dense="fsdp2",
        largest=80e9,
        source="launch scripts in examples/ of SkyRL a956457: "
        "dense policies to 32B: 64 FSDP, 16 Megatron; mixtures of experts: 2, 18",
    ),
    says=Says(  # WorkerDispatch: what shares GPUs goes to the host while another works, all else stays
        moves_with="any",
        sharing=Places(
            between={"actor": ("leaves",), "critic": ("leaves",), "reference": ("leaves",)}, sleep=(2,)
        ),
        alone=Places(
            between={"actor": ("stays",), "critic": ("stays",), "reference": ("stays",)}, sleep=(0,)
        ),
        same=(
            Same(aspect="scoring", roles=("actor", "critic", "reference")),
            Same(aspect="training", roles=("actor", "critic")),
        ),
        rollout_with="all",
        groups=(frozenset({"actor", "reference"}),),
        interrupts="continuous",
        each_update=True,
        whole_updates=True,
        adapters_alone=("fsdp2",),
    ),
    heads={
        "fsdp2": Head(
            train_bytes=4,
            score_bytes=2,
            source="SkyRL 0.4.0, workers/model_wrapper.py and utils/torch_utils.py: cross-entropy of "
            "flash-attn on BF16 logits, their BF16 gradient; entropy in chunks of logprobs_chunk_size",
        ),
        "megatron": Head(
            train_bytes=8,
            score_bytes=6,
            source="SkyRL 0.4.0, distributed/megatron/model_utils.py, ChunkedDistributedLogprob (default: "
            "1,024 tokens): FP32 logits and their FP32 gradient; BF16 logits and their FP32 copy before",
        ),
    },
    rules_ahead=lambda work: True,  # agent_loop of skyrl_gym_generator.py, generator.batched: false
    weight_paths={
        "ipc": known_by("run on GPUs", "same GPU"),
        "broadcast": known_by("run on GPUs", *APART),
        "p2p": known_by("run on GPUs", *APART),
        "lora": known_by("run on GPUs", *EVERYWHERE),
        "delta-disk": known_by("run on GPUs", *APART),
    },
    features=known_by(
        "run on GPUs",
        "one step off",
        "gated delta net or Mamba-2 layers",
        "staleness above 1",
        "partial rollouts",
        "dynamic sampling",
        "environments",
        "roles on GPUs of their own",
        "rollout tensor parallelism",
        "rollout pipeline parallelism",
        "rollout expert parallelism",
        "rollout attention data parallelism",
        "rollout replicas across nodes",
        "speculative decoding",
        "MTP layers trained with the policy",
        "router replay",
        "FP8 rollout",
        "FP8 KV cache",
        "offload to the host",
        "partial optimizer offload",
        "HSDP",
        "LoRA",
        "LoRA with tensor or pipeline parallelism",
        "BF16 gradients",
        "FP32 gradient sums",
        "FP8 training",
        "micro-batches by tokens",
        "old log-probs of the rollout",
    ),
    only_with={
        "speculative decoding": ("megatron",),
        "MTP layers trained with the policy": ("megatron",),
        "router replay": ("megatron",),
        "FP8 rollout": ("megatron",),
        "FP8 training": ("megatron",),
        "BF16 gradients": ("megatron",),
        "partial optimizer offload": ("megatron",),
    },
    dispatchers=("alltoall",),
    rollout_dispatchers=("allgather", "deepep-ll"),
    source="SkyRL 0.4.0: its configuration classes, validate_cfg and trainer.build_models, read 2026-11-23; "
    "asynchronous schedules by the entry points under examples/train of its repository (a9564572e)",
)
