"""What each framework refuses or does otherwise, found in a user's configuration before it starts."""

from __future__ import annotations

from typing import Any

import pytest

from rlhfsim.interchange.configuration.configuration import configuration_names
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout
from tests.frameworks.test_accepted import workload

OPENRLHF = (
    "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen2.5-7B --actor.num_gpus_per_node 8 "
    "--algo.advantage.estimator group_norm --train.colocate_all --vllm.tensor_parallel_size 2 "
    "--reward.remote_url http://x --rollout.batch_size 128 "
)
TRL = "trl grpo --model_name_or_path Qwen/Qwen2.5-7B --num_processes 8 --per_device_train_batch_size 2 "
NEMO = """
policy:
  model_name: Qwen/Qwen2.5-7B
  train_global_batch_size: 500
  max_total_sequence_length: 8192
  dtensor_cfg: {enabled: true, tensor_parallel_size: 1}
  sequence_packing: {enabled: true, train_mb_tokens: 4096}
  generation: {vllm_cfg: {async_engine: false}, colocated: {enabled: false, resources: {num_nodes: 1, gpus_per_node: 8}}}
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 16, async_grpo: {enabled: true}}
loss_fn: {use_importance_sampling_correction: true}
cluster: {gpus_per_node: 8, num_nodes: 2}
"""
SLIME = (
    "python3 slime/train.py --hf-checkpoint Qwen/Qwen2.5-7B --colocate --rollout-batch-size 32 "
    "--n-samples-per-prompt 8 --rollout-max-response-len 16384 --use-dynamic-batch-size --max-tokens-per-gpu 9216 "
)
SKYRL = (
    "python -m skyrl.train.entrypoints.main_base trainer.placement.policy_num_gpus_per_node=8 "
    "trainer.train_batch_size=128 generator.n_samples_per_prompt=5 "
)
AREAL = (
    "python3 -m areal.launcher.local actor.path=Qwen/Qwen2.5-7B actor.backend=fsdp:d8 rollout.backend=vllm:d8 "
    "cluster.n_nodes=1 cluster.n_gpus_per_node=8 train_dataset.batch_size=64 gconfig.max_new_tokens=16384 "
)
VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen2.5-7B "
CASES = {
    "verl, micro-batches": (VERL + "actor_rollout_ref.rollout.n=8", "nothing says one", True),
    "OpenRLHF, a group of one": (OPENRLHF + "--vllm.num_engines 4", "group of one", True),
    "OpenRLHF, engines": (
        OPENRLHF + "--vllm.num_engines 2 --rollout.n_samples_per_prompt 8",
        "2 engines of 2",
        True,
    ),
    "OpenRLHF, batch": (
        OPENRLHF + "--vllm.num_engines 4 --rollout.n_samples_per_prompt 8 --train.batch_size 100",
        "DeepSpeed refuses it",
        True,
    ),
    "OpenRLHF, awake": (
        OPENRLHF + "--vllm.num_engines 4 --rollout.n_samples_per_prompt 8",
        "never sleep hold 95%",
        False,
    ),
    "TRL, groups": (TRL + "--num_generations 6 --use_vllm true", "no whole groups of 6", True),
    "TRL, mode": (TRL + "--use_vllm true --vllm_mode colocated", "'colocated' passes the parser", True),
    "TRL, generate": (TRL, "the training modules generate", False),
    "NeMo-RL, packs": (NEMO, "no pack has room for it", True),
    "NeMo-RL, asynchronous": (NEMO, "async_engine=false", True),
    "NeMo-RL, updates": (NEMO, "updates of 500 out of a batch of 1,024", True),
    "NeMo-RL, no prompts": (NEMO.replace("64", "0"), "updates of 500 out of a batch of 0", True),
    "NeMo-RL, no update": (NEMO.replace("500", "0"), "updates of 0 out of a batch of 1,024", True),
    "slime, budget": (SLIME, "a micro-batch of its own", False),
    "slime, updates": (SLIME + "--global-batch-size 128 --num-steps-per-rollout 4", "refuses both", True),
    "SkyRL, updates": (
        SKYRL + "trainer.policy_mini_batch_size=100",
        "updates of 100 out of a batch of 128",
        True,
    ),
    "AReaL, cluster": (AREAL, "take 16 GPUs, the cluster has 8", True),
    "AReaL, budget": (AREAL + "actor.mb_spec.max_tokens_per_mb=8192", "AReaL stops", True),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_framework_refuses_is_found(case: str) -> None:
    text, what, stops = CASES[case]
    configuration, settings = read_configuration(text, {})
    found = list(configuration.findings(settings, configuration.run(settings)))
    assert configuration.title == case.partition(",")[0]
    assert any(what in f.what and f.stops == stops for f in found), [f.what for f in found]


def test_every_framework_has_findings_of_its_own() -> None:
    titles = {case.partition(",")[0] for case in CASES}
    assert len(titles) == len(configuration_names())


def test_the_search_leaves_out_layouts_whose_ranks_do_not_share_the_samples() -> None:
    asked = workload("grpo", prompts=64, samples=8, mini_batches=4)

    def code(name: str, backend: Backend, **layout: Any) -> str | None:
        lacks = framework(name).lacks_layout(backend, Layout(zero=3, **layout), asked, "actor")
        return lacks.code if lacks else None

    assert code("verl", "fsdp2", dp=3) == "batch-not-shared"
    assert code("verl", "fsdp2", dp=8) is None
    assert code("nemo-rl", "fsdp2", dp=256) == "batch-not-shared", "an update has 128 samples"
    assert code("openrlhf", "deepspeed", dp=8, micro_batch=3) == "batch-not-shared"
    assert code("openrlhf", "deepspeed", dp=8, pack_tokens=8192) is None
