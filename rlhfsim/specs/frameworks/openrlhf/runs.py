"""What OpenRLHF runs."""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.specs.frameworks.openrlhf.heads import DROPPED, HELD
from rlhfsim.specs.frameworks.runs import COMMON, Runs, known_by
from rlhfsim.specs.frameworks.says import Places, Same, Says
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.software import default_software
from rlhfsim.specs.placement.weight_paths import APART

SEQUENCES, PREFILL = 128, 2048
"""Sequences at a time of its vLLM engines, and tokens of one of their steps, on every GPU.

Source: OpenRLHF 0.9.1 (vLLM 0.13.0) to 0.11.2, trainer/ray/vllm_engine.py, AsyncLLMEngine.from_engine_args
(line 64), which names neither; its usage context is ENGINE_CONTEXT, for which get_batch_defaults of vLLM
0.32 (engine/arg_utils.py, line 2894) has no row, whatever the memory, so that SchedulerConfig's numbers hold.
Until 0.9.0 it started LLM where not asynchronous: 1,024 and 16,384 from 70 GiB (A100: 256 and 8,192).
"""

HOSTED = (3,)
"""ZeRO stages under which `--ref.offload` and `--reward.offload` do something: keep weights on the host.

Source: OpenRLHF 0.8.11 to 0.11.2, get_ds_eval_config of utils/deepspeed/deepspeed.py (line 493 of 0.11.2):
stage 0 where training has another than 3, for which DeepSpeed 0.19.8 reads no `offload_param`
(_configure_distributed_model of runtime/engine.py, line 2093: the module goes to the GPU).
"""
IN_TURN = replace(default_software("deepspeed"), overlaps_reduction=False)
"""DeepSpeed without `overlap_comm`, its default under ZeRO-1 and ZeRO-2.

Source: OpenRLHF 0.8.11 to 0.11.2, get_train_ds_config of utils/deepspeed/deepspeed_utils.py (line 40
of 0.11.2), which asks for it with `--ds.overlap_comm` alone; DeepSpeed 0.19.8, overlap_comm_valid of
runtime/zero/config.py (tests/executor/test_deepspeed_buckets.py).
"""

RUNS = Runs(
    name="openrlhf",
    title="OpenRLHF",
    algorithms=(*COMMON, "dapo", "gspo", "sft", "reward_model", "dpo"),
    trainers={
        "deepspeed": replace(
            BACKENDS["deepspeed"], pipeline_parallel=False, zero_stages_pp=(), tp_with_pp="no"
        )
    },
    shares="micro_batch",
    known_trainers=known_by("run on GPUs", "deepspeed"),
    says=Says(  # one set of --ds.* for all models; vLLM's own limits
        moves_with="rollout",
        sharing=Places(
            between={"actor": ("stays", "optimizer leaves"), "critic": ("stays", "optimizer leaves")},
            sleep=(0, 1),
        ),
        alone=Places(
            between={"actor": ("stays", "optimizer leaves"), "critic": ("stays", "optimizer leaves")},
            sleep=(0,),
        ),
        same=(
            Same(aspect="cut", roles=("actor", "critic", "reference", "reward")),
            Same(aspect="scoring", roles=("actor", "critic", "reference", "reward")),
            Same(aspect="training", roles=("actor", "critic")),
            Same(aspect="between", roles=("actor", "critic")),
        ),
        leaves_under=HOSTED,
        rollout_with="all",
        groups=(frozenset({"actor", "reference"}), frozenset({"critic", "reward"})),
        all_apart="asynchronous",
        sequences=SEQUENCES,
        prefill={True: PREFILL, False: PREFILL},
        whole_updates=True,
        packed_contexts=("deepspeed",),
    ),
    heads={"deepspeed": HELD},
    software={"deepspeed": IN_TURN},
    differs={"dpo": {"heads": {"deepspeed": DROPPED}}},
    weight_paths={"ipc": known_by("run on GPUs", "same GPU"), "broadcast": known_by("run on GPUs", *APART)},
    features=known_by(
        "run on GPUs",
        "one step off",
        "gated delta net or Mamba-2 layers",
        "staleness above 1",
        "partial rollouts",
        "dynamic sampling",
        "environments",
        "reward model on GPUs of its own",
        "roles on GPUs of their own",
        "rollout tensor parallelism",
        "rollout replicas across nodes",
        "offload to the host",
        "LoRA",
        "LoRA on a 4-bit base",
        "FP32 gradient sums",
        "micro-batches by tokens",
    ),
    source="OpenRLHF 0.11.2: its command line, read 2026-11-22; cli/train_sft.py, train_rm.py, train_dpo.py",
)
