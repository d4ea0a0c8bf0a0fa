"""A public run and what its owner changed: Qwen3-8B with verl 0.7 on 8 C550, 1,268 to 928 to 440 s a step.

Its diary (a public repository; three launch scripts, the third step of each log) changes the batch as well: 256
prompts x 5 responses, 256 x 4, 128 x 4. A sample took 0.991, 0.906 and 0.860 s.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rlhfsim.interchange.configuration.configuration import configuration_named
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.what_if.doctor.case import Case, judged
from rlhfsim.what_if.doctor.diagnosis import Diagnosis, diagnose

ACTOR, ROLL, REF = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "ref"))
SCORED, TP = "log_prob_micro_batch_size_per_gpu", "megatron.tensor_model_parallel_size"
C550 = """
name: c550
title: C550 64GB
extends: a100_sxm
memory: {value: 64 GiB, source: the diary}
usable_memory: {value: 63 GiB, source: assumed}
peak: {bf16: {value: 280 TFLOP/s, source: the diary}}
scale_up: {kind: nvlink, bandwidth: {value: 448 GB/s, source: "7 x 128 GB/s both ways, the diary"}, domain: 8}
curves: {borrow: {from: a100_sxm, widen: 1.3, reason: it was never timed}}
"""
FIRST: Mapping[str, object] = {
    "config_name": "ppo_megatron_trainer.yaml",
    "verl_version": "0.7",
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 256,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 4096,
    "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
    f"{ACTOR}.ppo_mini_batch_size": 64,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
    f"{ACTOR}.{TP}": 4,
    f"{ACTOR}.megatron.optimizer_offload": True,
    f"{ACTOR}.megatron.param_offload": True,
    f"{ACTOR}.use_kl_loss": True,
    f"{ROLL}.{SCORED}": 1,
    f"{ROLL}.tensor_model_parallel_size": 4,
    f"{ROLL}.gpu_memory_utilization": 0.6,
    f"{ROLL}.n": 5,
    f"{REF}.{SCORED}": 32,
    f"{REF}.megatron.param_offload": True,
    f"{REF}.{TP}": 1,
    f"{REF}.megatron.sequence_parallel": False,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
}
SECOND: Mapping[str, object] = {
    f"{ROLL}.{SCORED}": 16,
    f"{ROLL}.tensor_model_parallel_size": 2,
    f"{ROLL}.n": 4,
    f"{ROLL}.max_num_batched_tokens": 16384,
}
THIRD: Mapping[str, object] = SECOND | {
    "data.train_batch_size": 128,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2,
    f"{ACTOR}.megatron.param_offload": False,
    f"{ROLL}.{SCORED}": 12,
    f"{ROLL}.gpu_memory_utilization": 0.64,
    f"{ROLL}.max_num_batched_tokens": 32768,
    f"{ROLL}.max_num_seqs": 128,
    f"{REF}.{TP}": 4,
    f"{REF}.megatron.sequence_parallel": True,
    f"{REF}.{SCORED}": 12,
}
MEASURED = {
    "actor.logprob": (143.32 / 1280, 87.19 / 1024, 41.49 / 512),
    "reference.logprob": (98.14 / 1280, 78.86 / 1024, 40.86 / 512),
    "actor.train": (327.78 / 1280, 263.88 / 1024, 114.99 / 512),
}
"""Phase -> seconds a sample in the three logs: timing_s/old_log_prob, ref and update_actor."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    gpu = tmp_path_factory.mktemp("story") / "c550.yaml"
    gpu.write_text(C550)
    return diagnose(
        Case(
            configuration=configuration_named("verl"),
            settings=FrameworkSettings(FIRST, "run.sh"),
            gpu=str(gpu),
            prompt_tokens=154.8,
            response_tokens=4003.3,
        )
    )


def seconds(case: Case, keys: Mapping[str, object], phase: str) -> float:
    plan = judged(case.under(keys), None).plan
    [found] = [p.seconds for p in plan.prediction.phases if p.name == phase]
    return found / plan.workload.num_sequences


def test_the_first_run_fits_as_it_did_for_its_reference_is_cut_like_its_policy(told: Diagnosis) -> None:
    assert told.judged.fits
    reference = told.judged.plan.placement.role("reference")
    assert reference is not None
    assert reference.layout.tp == 4
    [named] = [f for f in told.findings if "share Megatron's groups" in f.what]
    assert named.keys == (f"{REF}.{TP}",)


@pytest.mark.parametrize("phase", MEASURED)
def test_what_the_changes_saved_a_sample_is_predicted_within_thirteen_points(
    told: Diagnosis, phase: str
) -> None:
    """Twelve until the training coefficients of 28 November 2026, which give a launch less time."""
    predicted = [seconds(told.case, keys, phase) for keys in ({}, SECOND, THIRD)]
    for after in (1, 2):
        saved, as_predicted = (1 - s[after] / s[0] for s in (MEASURED[phase], predicted))
        assert as_predicted == pytest.approx(saved, abs=0.13)


def test_larger_micro_batches_of_log_probs_are_advised(told: Diagnosis) -> None:
    """By samples, or by tokens: more than the one sample of 5,120 that a micro-batch has."""
    packs = f"{ROLL}.log_prob_max_token_len_per_gpu"
    keys = [change.keys for change in told.faster]
    assert any(f"{ROLL}.{SCORED}" in each or each.get(packs, 0) > 5120 for each in keys)


def test_parameters_that_stay_save_too_little_to_be_advised(told: Diagnosis) -> None:
    stays = judged(told.case.under({f"{ACTOR}.megatron.param_offload": False}), None)
    assert 0 < 1 - stays.step_s / told.judged.step_s < 0.02
