"""What bounds a sample of prompt and response, where a framework cuts the whole or the turns add up."""

from __future__ import annotations

from typing import Any

import pytest

from rlhfsim.interchange.configuration.configuration import configuration_named
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.specs.workload.lengths import stats
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.doctor.case import Case

SLIME = {
    "hf_checkpoint": "qwen3-4b",
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": 4,
    "colocate": True,
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 8,
    "rollout_max_response_len": 8192,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 9216,
    "tensor_model_parallel_size": 2,
}
TURNS = {"custom_generate_function_path": "generate_with_retool.generate"}


def _case(framework: str, **settings: Any) -> Case:
    return Case(
        configuration=configuration_named(framework), settings=FrameworkSettings(settings, "run"), gpu="h100"
    )


def _workload(framework: str, **settings: Any) -> Workload:
    return _case(framework, **settings).under({}).specs.workload


def _longest(framework: str, **settings: Any) -> float:
    work = _workload(framework, **settings)
    return stats(work.prompt_len).mean + work.response_len.maximum


def test_nemo_rl_cuts_prompt_and_response_together() -> None:
    said = {"policy.model_name": "qwen2.5-7b", "cluster.gpus_per_node": 8, "cluster.num_nodes": 1}
    whole = {"policy.max_total_sequence_length": 4096, "policy.generation.max_new_tokens": 4096}
    assert _longest("nemo-rl", **said, **whole) == pytest.approx(4096)


def test_skyrl_ends_a_conversation_of_turns_at_its_input_limit_and_one_more_turn() -> None:
    said = {"trainer.policy.model.path": "qwen2.5-7b", "trainer.placement.policy_num_gpus_per_node": 8}
    said |= {"trainer.max_prompt_length": 1024, "generator.sampling_params.max_generate_length": 500}
    turns = {"generator.max_turns": 4, "generator.max_input_length": 4096}
    assert _workload("skyrl", **said).response_len.maximum == 500
    assert _longest("skyrl", **said, **turns) == pytest.approx(4096 + 500)
    assert _workload("skyrl", **said, **turns | {"generator.max_turns": 1}).response_len.maximum == 500


def test_slime_cuts_samples_of_a_users_own_turns_at_its_context_or_after_the_turns_that_are_said() -> None:
    assert _workload("slime", **SLIME).response_len.maximum == 8192
    assert _longest("slime", **SLIME, **TURNS, rollout_max_context_len=32768) == pytest.approx(32768)
    said = _workload("slime", **SLIME, **TURNS, **{"environment.turns": 4})
    assert said.response_len.maximum == 4 * 8192


def test_slime_names_turns_that_nothing_cuts() -> None:
    def found(**settings: Any) -> list[str]:
        case = _case("slime", **settings)
        described = case.under({})
        return [f.what for f in case.configuration.findings(described.settings, described.run)]

    assert [w for w in found(**SLIME, **TURNS) if "turns add up" in w]
    assert not [w for w in found(**SLIME, **TURNS, rollout_max_context_len=32768) if "turns add up" in w]
    assert not [w for w in found(**SLIME) if "turns add up" in w]
