"""What vLLM runs with where a framework has no key for it: read in scripts, given by the search, as vLLM has it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.openrlhf.keys import PREFILL, SEQUENCES
from rlhfsim.interchange.trl.keys import SHARED_PREFILL
from rlhfsim.search.request import Request
from rlhfsim.search.rollout_layouts import rollout_layouts
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.presets import preset
from tests.frameworks.test_accepted import workload

OPENRLHF = (
    "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen2.5-7B --actor.num_nodes 1 "
    "--actor.num_gpus_per_node 8 --train.colocate_all --vllm.num_engines 4 --vllm.tensor_parallel_size 2 "
    "--rollout.n_samples_per_prompt 8 --algo.advantage.estimator group_norm --reward.remote_url http://reward"
)
TRL = (
    "accelerate launch --num_processes 8 -m trl.scripts.grpo --model_name_or_path Qwen/Qwen2.5-7B --use_vllm true "
    "--per_device_train_batch_size 8 --num_generations 8 --vllm_mode colocate"
)


def _engine(text: str) -> tuple[int, int]:
    configuration, settings = read_configuration(text, {})
    layout = configuration.run(settings).rollout
    return layout.max_num_seqs, layout.max_batched_tokens


def test_engines_of_openrlhf_have_what_vllm_gives_without_a_usage_context() -> None:
    assert _engine(OPENRLHF) == (SEQUENCES, PREFILL)


def test_vllm_itself_has_these_numbers_for_an_engine_without_a_usage_context() -> None:
    scheduler = pytest.importorskip("vllm.config.scheduler").SchedulerConfig
    assert (scheduler.DEFAULT_MAX_NUM_SEQS, scheduler.DEFAULT_MAX_NUM_BATCHED_TOKENS) == (SEQUENCES, PREFILL)


def test_an_engine_in_the_processes_that_train_with_trl_prefills_4096_tokens() -> None:
    assert _engine(TRL) == (8, SHARED_PREFILL)
    assert _engine(TRL.replace("colocate", "server"))[1] != SHARED_PREFILL


@pytest.mark.parametrize(
    ("name", "shares", "tokens"),
    [
        ("openrlhf", True, PREFILL),
        ("openrlhf", False, PREFILL),
        ("trl", True, SHARED_PREFILL),
        ("trl", False, 8192),
    ],
)
def test_the_search_takes_the_budget_that_no_key_changes(name: str, shares: bool, tokens: int) -> None:
    cluster = replace(parse_cluster(8, "h100"), framework=name)
    asked = Request(cluster=cluster, workload=workload("grpo"), backend="deepspeed", framework=name)
    layouts = rollout_layouts(asked, preset("qwen2.5-7b"), 8, cluster.node_group, shares=shares)
    assert layouts
    assert {layout.max_batched_tokens for layout in layouts} == {tokens}
