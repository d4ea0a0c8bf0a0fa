"""NeMo-RL and slime cannot be set up here: the rules of their sources are, on exports and on their own recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from rlhfsim.interchange.configuration.described import Lengths, placement_of, workload_of
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.export import export
from rlhfsim.interchange.table import bare
from tests.frameworks.as_planned import differences, planned
from tests.frameworks.drawn import drawn_plans, estimated

NAMES = ("nemo-rl", "slime")
PLANS = 60
ONE_NODE = {"cluster.gpus_per_node": 8}
MEGATRON = {"policy.megatron_cfg.enabled": True, "policy.dtensor_cfg.enabled": False}
SLIME = {
    "actor_num_nodes": 1,
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 8,
    "rollout_max_response_len": 8192,
    "global_batch_size": 256,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "recompute_granularity": "full",
    "use_dynamic_batch_size": True,
    "advantage_estimator": "grpo",
    "use_kl_loss": True,
    "rollout_num_gpus_per_engine": 2,
    "hf_checkpoint": "qwen2.5-7b",
}
RECIPES: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {
    ("nemo-rl", "examples/configs/recipes/llm/grpo-llama3.1-8b-instruct-2n8g-fsdp2tp1-noncolocated.yaml"): (
        ONE_NODE
        | {
            "grpo.num_prompts_per_step": 64,
            "grpo.num_generations_per_prompt": 32,
            "policy.train_micro_batch_size": 1,
            "policy.logprob_batch_size": 2,
            "policy.max_total_sequence_length": 4096,
            "policy.dynamic_batching.enabled": True,
            "policy.sequence_packing.enabled": False,
            "policy.generation.colocated.enabled": False,
            "policy.generation.colocated.resources.gpus_per_node": 8,
            "policy.generation.colocated.resources.num_nodes": 1,
            "cluster.num_nodes": 2,
        },
        {
            "actor.layout.dp": 8,
            "actor.updates": 4,
            "actor.rank_samples": 64,
            "actor.score_pack_tokens": 8192,
            "actor.residency": "resident",
            "rollout.layout.dp": 8,
        },
    ),
    ("nemo-rl", "examples/configs/recipes/llm/grpo-math-qwen3-30ba3b-megatron-tp4-32k.yaml"): (
        ONE_NODE
        | MEGATRON
        | {
            "grpo.num_prompts_per_step": 64,
            "policy.train_micro_batch_size": 1,
            "policy.logprob_batch_size": 1,
            "policy.max_total_sequence_length": 32768,
            "policy.sequence_packing.enabled": False,
            "policy.megatron_cfg.tensor_model_parallel_size": 4,
            "policy.megatron_cfg.expert_model_parallel_size": 8,
            "policy.megatron_cfg.sequence_parallel": True,
            "policy.megatron_cfg.activation_checkpointing": True,
            "policy.generation.vllm_cfg.tensor_parallel_size": 4,
            "policy.generation.vllm_cfg.enforce_eager": True,
            "cluster.num_nodes": 4,
        },
        {
            "actor.layout.dp": 8,
            "actor.updates": 2,
            "actor.score_micro_batch": 1,
            "actor.residency": "offloaded",
        },
    ),
    ("nemo-rl", "examples/configs/recipes/llm/grpo-dapomath17k-dsv3-megatron.yaml"): (
        ONE_NODE
        | MEGATRON
        | {
            "policy.train_micro_batch_size": 1,
            "policy.logprob_batch_size": 1,
            "policy.max_total_sequence_length": 16384,
            "policy.megatron_cfg.activation_checkpointing": True,
            "policy.megatron_cfg.tensor_model_parallel_size": 8,
            "policy.megatron_cfg.expert_model_parallel_size": 32,
            "policy.megatron_cfg.pipeline_model_parallel_size": 8,
            "policy.megatron_cfg.context_parallel_size": 4,
            "policy.megatron_cfg.sequence_parallel": True,
            "policy.generation.vllm_cfg.tensor_parallel_size": 32,
            "cluster.num_nodes": 32,
        },
        {"actor.layout.dp": 1, "actor.train_pack_tokens": 4096, "rollout.layout.dp": 8},
    ),
    ("slime", "scripts/run-qwen3-4B.sh"): (
        SLIME | {"actor_num_gpus_per_node": 8, "max_tokens_per_gpu": 9216, "colocate": True},
        {"actor.layout.dp": 4, "actor.updates": 1, "actor.residency": "offloaded", "rollout.layout.dp": 4},
    ),
    ("slime", "scripts/run-qwen3-30B-A3B.sh"): (
        SLIME
        | {
            "actor_num_gpus_per_node": 8,
            "tensor_model_parallel_size": 4,
            "expert_model_parallel_size": 8,
            "expert_tensor_parallel_size": 1,
            "max_tokens_per_gpu": 20480,
            "optimizer_cpu_offload": True,
            "rollout_num_gpus_per_engine": 8,
            "colocate": True,
        },
        {"actor.layout.dp": 2, "actor.rank_samples": 128, "actor.layout.etp": 1, "rollout.layout.tp": 8},
    ),
    ("slime", "scripts/run-glm4-9B.sh"): (
        SLIME
        | {
            "actor_num_gpus_per_node": 4,
            "rollout_num_gpus": 4,
            "context_parallel_size": 2,
            "max_tokens_per_gpu": 4608,
        },
        {
            "actor.layout.dp": 1,
            "actor.residency": "resident",
            "rollout.sleeps": False,
            "rollout.layout.dp": 2,
        },
    ),
}
"""Framework and file (NVIDIA-NeMo/RL at 7ea279abf, THUDM/slime at 624b824a8) -> values of keys that decide, and
what they come to, worked out by hand."""


def rules(name: str) -> Any:
    return import_module(f"tests.frameworks.set_up.{name.replace('-', '_')}")


def derived(name: str, said: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = rules(name).derived({bare(key): value for key, value in said.items()})
    return made


def different(name: str, count: int) -> dict[int, list[str]]:
    found = {}
    for i, plan in enumerate(drawn_plans(name, count)):
        made = derived(name, export(plan, name, frozenset()).written.values)
        if wrong := list(differences(plan, name, made)):
            found[i] = wrong
    return found


@pytest.mark.parametrize("name", NAMES)
def test_some_exports_are_set_up_as_planned(name: str) -> None:
    assert different(name, 6) == {}


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_exports_are_set_up_as_planned(name: str) -> None:
    assert different(name, PLANS) == {}


@pytest.mark.parametrize(("name", "file"), RECIPES)
def test_a_recipe_of_theirs_is_read_as_its_rules_say(name: str, file: str) -> None:
    said, by_hand = RECIPES[name, file]
    made = derived(name, said)
    assert {quantity: made[quantity] for quantity in by_hand} == by_hand
    configuration = import_module(f"rlhfsim.interchange.{name.replace('-', '_')}.configuration").CONFIGURATION
    run = configuration.run(FrameworkSettings({"policy.model_name": "qwen2.5-7b", **said}, file))
    work = workload_of(run, Lengths(prompt=1.0, response=1.0, longest=None))
    read = planned(replace(estimated(), workload=work, placement=placement_of(run, work)))
    assert {quantity: read[quantity] for quantity in made} == made


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "nemo-rl",
            ONE_NODE | {"policy.dtensor_cfg.tensor_parallel_size": 4, "policy.logprob_batch_size": 1},
        ),
        ("nemo-rl", ONE_NODE | {"policy.dtensor_cfg.tensor_parallel_size": 3}),
        ("slime", SLIME | {"actor_num_gpus_per_node": 5, "max_tokens_per_gpu": 1, "colocate": True}),
    ],
)
def test_what_their_set_up_stops_at_is_refused(name: str, said: dict[str, Any]) -> None:
    with pytest.raises(rules(name).Refused):
        derived(name, said)
