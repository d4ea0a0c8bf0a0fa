"""Keys of the micro-batch of log-probs are read into the policy's layout, and those of the reference."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from rlhfsim.interchange.configuration.described import Lengths, placement_of, workload_of
from rlhfsim.interchange.configuration.settings import FrameworkSettings

ACTOR, ROLL, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
VERL = {"actor_rollout_ref.model.path": "qwen2.5-7b", "algorithm.adv_estimator": "grpo"} | {
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2,
    f"{ROLL}.log_prob_micro_batch_size_per_gpu": 8,
    f"{ACTOR}.use_kl_loss": True,
}
NEMO = {
    "policy.model_name": "qwen2.5-7b",
    "cluster.gpus_per_node": 8,
    "policy.sequence_packing.enabled": False,
    "policy.train_micro_batch_size": 2,
}
SAID: dict[str, tuple[str, dict[str, Any], tuple[int, int, int]]] = {
    "verl": ("verl", VERL | {f"{REF}.log_prob_micro_batch_size_per_gpu": 4}, (2, 8, 4)),
    "verl, of all GPUs": (
        "verl",
        VERL | {f"{ROLL}.log_prob_micro_batch_size_per_gpu": None, f"{ROLL}.log_prob_micro_batch_size": 32},
        (2, 4, 2),
    ),
    "openrlhf": (
        "openrlhf",
        {
            "actor.model_name_or_path": "qwen2.5-7b",
            "algo.advantage.estimator": "group_norm",
            "train.colocate_all": True,
            "vllm.num_engines": 8,
            "train.micro_batch_size": 2,
            "rollout.micro_batch_size": 8,
            "reward.remote_url": "http://reward",
        },
        (2, 8, 8),
    ),
    "nemo-rl": ("nemo-rl", NEMO | {"policy.logprob_batch_size": 8}, (2, 8, 8)),
    "nemo-rl, unsaid": ("nemo-rl", NEMO, (2, 2, 2)),
    "skyrl": (
        "skyrl",
        {
            "trainer.policy.model.path": "qwen2.5-7b",
            "trainer.placement.policy_num_gpus_per_node": 8,
            "generator.inference_engine.num_engines": 8,
            "trainer.micro_train_batch_size_per_gpu": 2,
            "trainer.micro_forward_batch_size_per_gpu": 8,
            "trainer.algorithm.use_kl_loss": True,
        },
        (2, 8, 8),
    ),
}
"""Case -> framework, values of keys, sequences of the policy in training and scoring and of the reference."""


@pytest.mark.parametrize("case", SAID)
def test_micro_batches_of_log_probs_are_read(case: str) -> None:
    name, said, expected = SAID[case]
    configuration = import_module(f"rlhfsim.interchange.{name.replace('-', '_')}.configuration").CONFIGURATION
    run = configuration.run(FrameworkSettings(said, case))
    placement = placement_of(run, workload_of(run, Lengths(prompt=1.0, response=1.0, longest=None)))
    actor, reference = placement.actor.layout, placement.role("reference")
    assert reference is not None
    assert (
        actor.micro_batch,
        actor.sequences(scoring=True),
        reference.layout.sequences(scoring=True),
    ) == expected
