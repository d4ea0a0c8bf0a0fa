"""What slime runs."""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.specs.frameworks.runs import Runs, known_by
from rlhfsim.specs.frameworks.says import Places, Same, Says
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.heads import Head
from rlhfsim.specs.placement.weight_paths import APART, EVERYWHERE
from rlhfsim.specs.workload.workload import Workload


def reuses_logprobs(work: Workload) -> bool:
    """Whether the only update of a rollout gives the old log-probs itself (can_reuse_log_probs_in_loss)."""
    beside = work.algorithm == "reinforce++" and not work.has_reference
    return work.one_update and (beside or work.algorithm in ("grpo", "dr-grpo"))


RUNS = Runs(
    name="slime",
    title="slime",
    engine="SGLang",
    trainers={
        "megatron": replace(  # _set_default_megatron_args: always the distributed optimizer
            BACKENDS["megatron"],
            zero_stages=(1,),
            zero_stages_tp=(1,),
            zero_stages_pp=(1,),
            offload_stages=(1,),
            partial_offload=(1,),
        )
    },
    known_trainers=known_by("run on GPUs", "megatron"),
    heads={
        "megatron": Head(
            train_bytes=8,
            score_bytes=8,
            source="slime 0.3.1 (624b824), utils/ppo_utils.py, _VocabParallelLogProbEntropy at temperature "
            "1: FP32 logits and their softmax, which the gradient overwrites",
        )
    },
    algorithms=("ppo", "grpo", "dr-grpo", "dapo", "gspo", "reinforce++", "sft"),  # sft: --loss-type
    one_epoch=True,
    says=Says(  # one layout; with a critic both models leave in turn
        moves_with="rollout",
        sharing=Places(between={"actor": ("stays", "leaves"), "critic": ("leaves",)}, sleep=(0, 2)),
        alone=Places(between={"actor": ("stays", "leaves"), "critic": ("leaves",)}, sleep=(0,)),
        same=(
            Same(aspect="cut", roles=("actor", "critic", "reference")),
            Same(aspect="scoring", roles=("actor", "critic", "reference")),
            Same(aspect="training", roles=("actor", "critic")),
            Same(aspect="leaves", roles=("actor", "critic", "reference")),
        ),
        interrupts="continuous",
        whole_updates=True,
    ),
    reuses_logprobs=reuses_logprobs,
    rules_ahead=lambda work: True,  # generate_and_rm of rollout/sglang_rollout.py, without --group-rm
    always_swaps=True,  # _switch_model of backends/megatron_utils/actor.py
    weight_paths={
        "ipc": known_by("run on GPUs", "same GPU"),
        "broadcast": known_by("run on GPUs", *APART),
        "disk": known_by("run on GPUs", *EVERYWHERE),
        "delta-disk": known_by("run on GPUs", *APART),  # actor.py: delta goes over disk, never colocated
    },
    features=known_by(
        "run on GPUs",
        "one step off",
        "gated delta net or Mamba-2 layers",
        "sparse attention",
        "staleness above 1",
        "partial rollouts",
        "dynamic sampling",
        "oversampling",
        "environments",
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
        "reference swapped in place of the actor",
        "partial optimizer offload",
        "BF16 gradients",
        "FP32 gradient sums",
        "AMD GPUs",
        "FP8 training",
        "micro-batches by tokens",
        "old log-probs of the rollout",
        "old log-probs of the training pass",
    ),
    dispatchers=("alltoall", "deepep"),
    rollout_dispatchers=("allgather", "deepep-ll"),
    source="slime 624b824 (0.3.1): slime/utils/arguments.py, train.py, train_async.py, "
    "rollout/fully_async_rollout.py, scripts/ (low_precision, run-qwen3-4B-amd.sh), read 2026-11-23",
)
