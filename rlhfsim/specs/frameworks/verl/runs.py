"""What verl runs."""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.specs.frameworks.runs import COMMON, Examples, Runs, known_by
from rlhfsim.specs.frameworks.says import Places, Same, Says
from rlhfsim.specs.frameworks.verl.heads import MEGATRON, PADDED, UNPADDED
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.weight_paths import APART

RUNS = Runs(
    name="verl",
    title="verl",
    trainers={
        "megatron": replace(  # use_distributed_optimizer
            BACKENDS["megatron"], zero_stages=(1,), zero_stages_tp=(1,), zero_stages_pp=(1,)
        ),
        "fsdp2": replace(
            BACKENDS["fsdp2"],
            tensor_parallel=False,
            expert_parallel=False,
            zero_stages_tp=(),
            zero_stages=(2, 3),
        ),
    },
    examples=Examples(
        dense="fsdp2",
        largest=80e9,
        source="launch scripts in examples/ of verl b178a3c: "
        "dense policies to 72B: 91 FSDP, 22 Megatron; mixtures of experts: 2, 10",
    ),
    says=Says(  # trainer.v1: separate_async has no mode that waits, and goes on with new weights
        moves_with="any",
        sharing=Places(sleep=(0, 2), between={"reward": ("leaves",)}),
        alone=Places(sleep=(0,), between={"reward": ("stays",)}),
        own_gpus=("reward",),
        own_gpus_apart=("reward",),
        same=(  # one process initialises Megatron's groups once: whichever role comes first
            Same(aspect="groups", roles=("actor", "critic", "reference"), backends=("megatron",)),
            Same(aspect="virtual stages", roles=("actor", "critic"), backends=("megatron",)),
        ),
        waits_apart=False,
        interrupts="always",
        whole_updates=True,
        packed_contexts=("fsdp2",),
    ),
    algorithms=(*COMMON, "dapo", "gspo", "cispo", "sft"),  # sft: trainer/sft_trainer.py
    serves_reward=True,
    filters_on_arrival=True,  # _resolve_filter_groups_metric of trainer/ppo/v1/trainer_base.py
    hosts_reference=(
        "fsdp2",
    ),  # CPUOffloadPolicy where forward_only (workers/engine/fsdp/transformer_impl.py)
    copies_each=True,  # fsdp_size makes a mesh of two dimensions, nothing puts its all-reduce off
    shares="batch",
    known_trainers=known_by("run on GPUs", "megatron", "fsdp2"),
    heads={"fsdp2": UNPADDED, "megatron": MEGATRON},
    padded_heads={"fsdp2": PADDED},
    rules_ahead=lambda work: not work.has_reward_model,  # enable_agent_reward_loop of ray_trainer.py
    weight_paths={
        "ipc": known_by("run on GPUs", "same GPU"),
        "broadcast": known_by("run on GPUs", *APART),
        "p2p": known_by("run on GPUs", *APART),
        "lora": known_by("run on GPUs", "same GPU", *APART),
    },
    features=known_by(
        "run on GPUs",
        "one step off",
        "gated delta net or Mamba-2 layers",
        "sparse attention",
        "staleness above 1",
        "partial rollouts",
        "late groups thrown away",
        "trainer's GPUs lent to the rollout",
        "dynamic sampling",
        "environments",
        "reward model on GPUs of its own",
        "rollout tensor parallelism",
        "rollout expert parallelism",
        "rollout attention data parallelism",
        "rollout replicas across nodes",
        "speculative decoding",
        "MTP layers trained with the policy",
        "router replay",
        "prefill apart from decode",
        "FP8 rollout",
        "offload to the host",
        "partial optimizer offload",
        "HSDP",
        "LoRA",
        "BF16 gradients",
        "FP32 gradient sums",
        "AMD GPUs",
        "micro-batches by tokens",
        "old log-probs of the rollout",
    ),
    only_with={
        "router replay": ("megatron",),
        "BF16 gradients": ("megatron",),  # FSDP keeps them in FP32, whatever `reduce_dtype` is
    },
    dispatchers=("alltoall", "deepep"),
    rollout_dispatchers=("allgather", "deepep-ll"),
    other_engines=("sglang",),
    source="verl 0.9.1: its configuration, read 2026-11-22; reference and critic share the training pool, "
    "a reward model has its own where the rollout has; roles of a process share Megatron's groups "
    "(workers/engine/megatron/transformer_impl.py, _init_device_mesh); "
    "AMD: rocm.docs.amd.com/projects/verl (verl 0.9.0 on MI300X to MI355X), read 2026-11-22",
)
