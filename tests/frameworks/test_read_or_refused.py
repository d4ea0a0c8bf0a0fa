"""Launches that leave roles or engines out, name ZeRO by a file, or belong to a framework that is not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.finding import Finding
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.openrlhf.keys import NOT_ON_RAY

RAY = (
    "python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-7B --actor_num_nodes 1 "
    "--actor_num_gpus_per_node 8 --ref_num_nodes 1 --ref_num_gpus_per_node 8 --vllm_num_engines 4 "
    "--vllm_tensor_parallel_size 2 --zero_stage 3 --micro_train_batch_size 1 --rollout_batch_size 128 "
    "--remote_rm_url http://reward --critic_num_nodes 0 --critic_num_gpus_per_node 0 --reward_num_nodes 0 "
)
TRL = (
    "deepspeed --num_gpus 8 grpo.py --model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 2 "
    "--num_generations 8 --max_completion_length 1024 "
)


def read(source: str | list[Path]) -> tuple[RunDescription, list[Finding]]:
    configuration, settings = read_configuration(source, {})
    run = configuration.run(settings)
    return run, list(configuration.findings(settings, run))


def test_a_critic_on_no_nodes_is_absent_where_the_estimator_has_none() -> None:
    run, _ = read(RAY + "--advantage_estimator reinforce")
    assert set(run.roles) == {"reference"}
    assert (run.gpus, run.rollout_gpus) == (8, 8)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "--advantage_estimator gae",
            "critic_num_nodes x critic_num_gpus_per_node is 0, and estimator gae needs",
        ),
        ("--advantage_estimator rloo --ref_num_nodes 0", "the KL term needs a reference model"),
    ],
)
def test_a_role_that_is_needed_and_has_no_gpu_is_refused_by_its_flags(more: str, message: str) -> None:
    with pytest.raises(RlhfsimError, match=message) as error:
        read(RAY + more)
    assert error.value.code == "role-without-gpus"
    assert "do without it" in (error.value.help or "")


def test_a_reference_on_no_nodes_is_absent_without_a_kl_term() -> None:
    run, _ = read(RAY + "--advantage_estimator rloo --ref_num_nodes 0 --init_kl_coef 0")
    assert run.roles == {}


def test_openrlhf_without_engines_generates_by_the_actor_s_own_modules() -> None:
    run, told = read(
        RAY.replace("--vllm_num_engines 4", "--vllm_num_engines 0") + "--advantage_estimator rloo"
    )
    assert run.rollout_gpus is None
    assert (run.rollout.tp, run.rollout.dp, run.sleep, run.weight_path) == (1, 8, 2, "ipc")
    assert any("without vLLM the training modules generate" in f.what and not f.stops for f in told)


def test_openrlhf_without_ray_has_all_roles_on_the_same_gpus() -> None:
    run, _ = read(
        f"deepspeed --module {NOT_ON_RAY} --pretrain Qwen/Qwen2.5-7B --reward_pretrain qwen2.5-1.5b "
        "--zero_stage 2 --micro_train_batch_size 2"
    )
    assert (run.algorithm, run.reward_model, run.weight_path) == ("ppo", "qwen2.5-1.5b", "none")
    assert {role.pool for role in run.roles.values()} == {None}


@pytest.mark.parametrize(
    ("named", "stage"),
    [("ds_zero3.json", 3), ("configs/zero2_offload.json", 2), ("ds_z3_config.json", 3), ("zero1", 1)],
)
def test_a_stage_that_only_the_name_of_a_file_says_is_read_and_found(named: str, stage: int) -> None:
    run, told = read(f"{TRL} --deepspeed {named}")
    assert (run.gpus, run.layout.zero) == (8, stage)
    assert any(f"ZeRO stage {stage} is taken from the name {named}" in f.what for f in told)


def test_the_stage_of_a_file_wins_over_its_name(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{TRL} --deepspeed zero3.json\n")
    stage = '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'
    (tmp_path / "zero3.json").write_text(stage)
    run, told = read([tmp_path / "run.sh"])
    assert (run.layout.zero, run.layout.offload_optimizer) == (2, "cpu")
    assert not [f for f in told if "taken from the name" in f.what]


def test_a_file_whose_name_says_no_stage_is_asked_for() -> None:
    with pytest.raises(RlhfsimError, match=r"does not say deepspeed_config\.zero_stage"):
        read(f"{TRL} --deepspeed ds.json")


def test_accelerate_s_file_is_read_by_its_name_and_a_script_s_dictionary_by_its_keys() -> None:
    launched = (
        "accelerate launch --config_file my/deepspeed_zero2.yaml --num_processes 8 " + TRL.partition("8 ")[2]
    )
    assert read(launched)[0].layout.zero == 2
    script = (
        "from trl import GRPOConfig\nGRPOConfig(model='Qwen/Qwen2.5-7B', num_processes=8, "
        "deepspeed={'zero_optimization': {'stage': 3, 'offload_param': {'device': 'cpu'}}})\n"
    )
    layout = read(script)[0].layout
    assert (layout.zero, layout.offload_params) == (3, "cpu")


@pytest.mark.parametrize(
    ("text", "title"),
    [
        (
            "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B --num_generations 8",
            "ms-swift",
        ),
        ("python swift/cli/rlhf.py --model Qwen/Qwen2.5-7B --use_vllm true", "ms-swift"),
        ("rlhf_type: grpo\nmodel: Qwen/Qwen2.5-7B\nuse_vllm: true\n", "ms-swift"),
        ("llamafactory-cli train examples/train_lora/llama3_lora_ppo.yaml", "LLaMA-Factory"),
        ("stage: ppo\nfinetuning_type: lora\nper_device_train_batch_size: 1\n", "LLaMA-Factory"),
        ("from unsloth import FastLanguageModel\nfrom trl import GRPOConfig\n", "Unsloth"),
        ("python3 -m verl.trainer.main config=c.yaml worker.rollout.n=5 trainer.n_gpus_per_node=8", "EasyR1"),
        (
            "base_model: Qwen/Qwen2.5-7B\nrl: grpo\nmicro_batch_size: 4\ngradient_accumulation_steps: 2\n",
            "Axolotl",
        ),
        ("python open_instruct/grpo_fast.py --per_device_train_batch_size 1 --beta 0.0", "open-instruct"),
        ("tune run --nproc_per_node 8 full_finetune_distributed --config llama3_1/8B_full", "torchtune"),
        ("pretrain: Qwen/Qwen2.5-7B\nadv_estimator: grpo\nactor_infer:\n  x: 1\n", "ROLL"),
        ("uv run rl --trainer.model.name Qwen/Qwen3-8B", "prime-rl"),
    ],
)
def test_a_framework_that_is_not_read_is_refused_by_name(text: str, title: str) -> None:
    with pytest.raises(RlhfsimError, match=f"configuration of {title}") as error:
        read_configuration(text, {})
    assert error.value.code == "framework-not-read"
    assert "OpenRLHF" in (error.value.help or "")
    assert read_configuration(text, {}, "trl")[0].name == "trl"
