"""What AReaL runs."""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.specs.frameworks.runs import COMMON, Examples, Runs, known_by
from rlhfsim.specs.frameworks.says import Places, Says
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.heads import Head
from rlhfsim.specs.placement.weight_paths import APART, EVERYWHERE

RUNS = Runs(
    name="areal",
    title="AReaL",
    algorithms=(*COMMON, "dapo", "gspo", "sft", "reward_model", "dpo"),
    trainers={
        "fsdp2": replace(  # alloc_mode.py: FSDP takes d, t and c alone
            BACKENDS["fsdp2"],
            expert_parallel=False,
            zero_stages=(3,),
            offload_stages=(3,),
            hybrid_stages=(),
            interleaves_recompute=False,
        ),
        "megatron": replace(BACKENDS["megatron"], offload_stages=(), partial_offload=()),
    },
    known_trainers=known_by("run on GPUs", "fsdp2", "megatron"),
    heads={
        "fsdp2": Head(
            train_bytes=6,
            score_bytes=2,
            source="AReaL 1.0.4, utils/functional/vocab_parallel.py without TP: BF16 logits, of which the "
            "compiled loss keeps maxima and sums alone, their gradient, and that of a chunk of 1,024 tokens "
            "in zeros for all the others",
        ),
        "megatron": Head(
            train_bytes=16,
            score_bytes=12,
            source="AReaL 1.0.4, utils/functional/vocab_parallel.py under TP, _VocabParallelLogProbsEntropy: "
            "FP32 logits, the same less their maximum, exponentials, and their product with the logits; the "
            "last is not there while scoring",
        ),
    },
    one_epoch=True,
    examples=Examples(
        dense="fsdp2",
        largest=15e9,
        source="configurations in examples/ of AReaL 4aef98d: "
        "dense policies to 8B: 35 FSDP, 5 Megatron; mixtures of experts: 0, 3",
    ),
    says=Says(  # rl_trainer.py: actor and rollout take turns on GPUs that they share
        moves_with="rollout",
        sharing=Places(between={"actor": ("leaves",), "critic": ("stays", "leaves")}, sleep=(2,)),
        alone=Places(between={"actor": ("stays", "leaves"), "critic": ("stays", "leaves")}, sleep=(0,)),
        rollout_with="actor",
        interrupts="always",
        packs=True,
        whole_updates=True,
    ),
    weight_paths={  # rl_trainer.py: shared GPUs take new weights from disk alone
        "broadcast": known_by("run on GPUs", *APART),
        "disk": known_by("run on GPUs", *EVERYWHERE),
    },
    features=known_by(
        "run on GPUs",
        "one step off",
        "gated delta net or Mamba-2 layers",
        "staleness above 1",
        "partial rollouts",
        "environments",
        "roles on GPUs of their own",
        "rollout tensor parallelism",
        "rollout pipeline parallelism",
        "rollout replicas across nodes",
        "offload to the host",
        "LoRA",
        "BF16 gradients",
        "FP32 gradient sums",
        "micro-batches by tokens",
        "old log-probs of the rollout",
    ),
    other_engines=("sglang",),
    source="AReaL 1.0.4 (PyPI): api/cli_args.py, api/alloc_mode.py, trainer/ (rl, sft, rw, dpo), "
    "examples/math, read 2026-11-23",
)
