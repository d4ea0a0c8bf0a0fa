"""`rlhfsim doctor`: a configuration judged, and changes that are keys of its framework."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlhfsim.cli.main import cli
from rlhfsim.errors import RlhfsimError
from rlhfsim.finding import Finding
from rlhfsim.interchange.configuration.configuration import configuration_named
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.present.answers.doctor import page
from rlhfsim.present.answers.tree import Listing
from rlhfsim.what_if.doctor.case import Case, bare, findings, judged
from rlhfsim.what_if.doctor.diagnosis import Diagnosis, diagnose

ROOT = Path(__file__).parents[2]
ROLL, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
VERL = {
    "actor_rollout_ref.model.path": "qwen2.5-7b",
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 128,
    "data.max_prompt_length": 512,
    "data.max_response_length": 2048,
    f"{ACTOR}.ppo_mini_batch_size": 64,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
    f"{ROLL}.log_prob_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4,
    f"{ACTOR}.use_kl_loss": True,
    f"{ROLL}.n": 8,
    f"{ROLL}.tensor_model_parallel_size": 2,
    f"{ROLL}.gpu_memory_utilization": 0.5,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
}
OPENRLHF = {
    "pretrain": "qwen2.5-7b",
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": 8,
    "vllm_num_engines": 4,
    "vllm_tensor_parallel_size": 2,
    "colocate_all_models": True,
    "vllm_gpu_memory_utilization": 0.6,
    "vllm_enable_sleep": True,
    "deepspeed_enable_sleep": True,
    "micro_train_batch_size": 8,
    "train_batch_size": 128,
    "rollout_batch_size": 128,
    "n_samples_per_prompt": 8,
    "generate_max_len": 4096,
    "zero_stage": 3,
    "advantage_estimator": "group_norm",
    "remote_rm_url": "http://reward",
}


def case(name: str = "verl", gpu: str = "h100", **changes: object) -> Case:
    base = VERL if name == "verl" else OPENRLHF
    values = base | {key.replace("__", "."): value for key, value in changes.items()}
    known = {key: value for key, value in values.items() if value is not None}
    return Case(
        configuration=configuration_named(name),
        settings=FrameworkSettings(known, "test"),
        gpu=gpu,
        prompt_tokens=200,
        response_tokens=800,
    )


def findings_of(asked: Case) -> list[Finding]:
    """What is found in a configuration, without the changes that would help."""
    return list(findings(asked, judged(asked.under({}), asked.price)))


@cache
def of_openrlhf() -> Diagnosis:
    """OpenRLHF on eight A100s, switches left at their defaults."""
    return diagnose(case("openrlhf", gpu="a100"))


@cache
def answered(*, fits: bool) -> Diagnosis:
    """verl on 8 GPUs, with micro-batches that fit or not."""
    size = 4 if fits else 128
    return diagnose(case(**{f"{ACTOR}.ppo_micro_batch_size_per_gpu": size}))


def test_a_configuration_that_fits_has_no_fixes() -> None:
    found = answered(fits=True)
    assert found.judged.fits
    assert found.fixes == ()
    assert found.nearest is None


def test_what_makes_it_fit_makes_it_fit_when_it_is_read_again() -> None:
    found = answered(fits=False)
    assert not found.judged.fits
    assert found.fixes
    for change in found.fixes:
        assert judged(found.case.under(change.keys), None).fits


def test_every_step_is_faster_than_the_one_before() -> None:
    for found in (answered(fits=True), answered(fits=False)):
        start = found.fixes[0].judged if found.fixes else found.judged
        times = [start.step_s, *(change.judged.step_s for change in found.faster)]
        assert times == sorted(times, reverse=True)
        assert all(after < 0.98 * before for before, after in pairwise(times))


def test_advice_adds_little_to_the_risk_that_is_printed() -> None:
    full = {f"{ROLL}.max_num_seqs": 2048, "data.max_response_length": 8192, f"{ROLL}.n": 64}
    found = diagnose(replace(case(**full, **{f"{ROLL}.gpu_memory_utilization": 0.6}), response_tokens=5000))
    before = found.judged.risk
    assert before > 0.1
    assert found.faster
    assert all(change.judged.risk <= before + 0.05 for change in found.faster)
    fuller = judged(found.case.under({f"{ROLL}.gpu_memory_utilization": 0.7}), None)
    assert fuller.fits  # and faster, so that it would be first
    assert fuller.step_s < 0.98 * found.judged.step_s
    assert fuller.risk > before + 0.1


def test_eager_decoding_is_turned_off_where_it_costs() -> None:
    found = diagnose(case(**{f"{ROLL}.enforce_eager": True}))
    keys = [key for change in found.faster for key in change.keys]
    assert f"{ROLL}.enforce_eager" in keys


def test_every_key_is_one_of_the_framework() -> None:
    known = (ROOT / "tests/data/framework_keys/verl.txt").read_text().splitlines()
    found = answered(fits=False)
    keys = {bare(key) for change in (*found.fixes, *found.faster) for key in change.keys}
    assert keys
    assert keys <= set(known)


def test_changes_are_spelled_as_the_release_of_the_configuration_spells_them() -> None:
    found = of_openrlhf()
    keys = {key for change in (*found.fixes, *found.faster) for key in change.keys}
    assert "--gradient_checkpointing" in keys or "--micro_train_batch_size" in keys
    assert not any(key.startswith(("--actor.", "--train.micro", "--ds.")) for key in keys)


def test_logits_are_counted_for_the_longest_samples_of_a_micro_batch() -> None:
    padded = {
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 16,
        "actor_rollout_ref.model.use_remove_padding": False,
    }
    text = " ".join(f.what for f in findings_of(case(**padded)))
    assert "40,960 tokens (samples of up to 2,560)" in text  # 16 x 2,560, padded
    assert "152,064 entries of the vocabulary" in text


def test_keys_are_those_of_the_release() -> None:
    verl = configuration_named("verl")
    assert verl.spelled("critic.fsdp.param_offload", "0.7.1") == "critic.model.fsdp_config.param_offload"
    assert verl.spelled("critic.fsdp.param_offload", "0.8") == "critic.fsdp.param_offload"
    parallel = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
    assert verl.spelled(parallel, "0.5") == "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    assert verl.spelled("actor_rollout_ref.actor.fsdp_config.offload_policy", "0.3") is None
    values = VERL | {"algorithm.adv_estimator": "gae", f"{ACTOR}.ppo_micro_batch_size_per_gpu": 64}
    old = case(**(values | {"verl_version": "0.7.1"}))
    found = diagnose(old)
    keys = {key for change in (*found.fixes, *found.faster) for key in change.keys}
    assert keys
    assert not any(key.startswith("critic.fsdp.") for key in keys)


def test_what_is_not_said_is_named_at_once() -> None:
    with pytest.raises(RlhfsimError) as error:
        diagnose(case(**{"actor_rollout_ref.model.path": None}))
    assert error.value.code == "not-enough-said"
    assert "actor_rollout_ref.model.path" in error.value.message
    assert "--model NAME" in (error.value.help or "")


def test_a_sample_longer_than_the_token_budget_stops_verl() -> None:
    packed = {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 2048}
    [stop] = [f for f in findings_of(case(**packed)) if f.stops]
    assert stop.keys == (f"{ACTOR}.ppo_max_token_len_per_gpu",)
    assert "up to 2,560 tokens" in stop.what
    assert stop.remedy == f"{ACTOR}.ppo_max_token_len_per_gpu=2560"
    enough = packed | {f"{ACTOR}.ulysses_sequence_parallel_size": 2}
    assert not [f for f in findings_of(case(**enough)) if f.stops]


def test_a_group_of_one_is_named() -> None:
    assert (f"{ROLL}.n",) in [f.keys for f in findings_of(case(**{f"{ROLL}.n": 1}))]


def test_sequence_parallelism_with_padding_stops_verl() -> None:
    padded = {
        "actor_rollout_ref.model.use_remove_padding": False,
        f"{ACTOR}.ulysses_sequence_parallel_size": 2,
    }
    assert any(f.stops and "padded" in f.what for f in findings_of(case(**padded)))


def test_swap_space_is_counted_on_the_host() -> None:
    swap = {f"{ROLL}.engine_kwargs.vllm.swap_space": 16}
    assert any("128 GiB a node" in f.what for f in findings_of(case(**swap)))


# --- the command ------------------------------------------------------------------------------------


def run(tmp_path: Path, *arguments: str, **changes: object) -> Result:
    values = VERL | changes
    script = tmp_path / "run.sh"
    lines = " \\\n    ".join(f"{key}={value}" for key, value in values.items())
    script.write_text(f"python3 -m verl.trainer.main_ppo \\\n    {lines}\n")
    command = ["doctor", str(script), "--framework", "verl", "--gpu", "h100", *arguments]
    return CliRunner().invoke(cli, command)


def test_the_first_line_says_whether_it_fits(tmp_path: Path) -> None:
    fits = run(tmp_path)
    assert fits.exit_code == 0, fits.output
    assert fits.output.startswith("fits: risk of running out of memory")
    for word in ("\ncost  ", "\nlearning  ", " of peak ", "TP: matrices cut"):  # as on the screen of design
        assert word in fits.output
    unfit = run(tmp_path, "--set", f"{ACTOR}.ppo_micro_batch_size_per_gpu=128")
    assert unfit.exit_code == 1
    assert unfit.output.startswith("does not fit: breaks in ")
    assert "any one of these makes it fit" in unfit.output


def test_assumptions_name_lengths_and_defaults_of_the_release(tmp_path: Path) -> None:
    old = run(tmp_path, "--version", "0.4").output
    assert "responses of 819 tokens on average (40% of the limit of 2,048)" in old
    assert f"{ROLL}.enforce_eager=True" in old.split("assumed")[1].replace("\n", "")
    told = run(tmp_path, "--response-len", "mean=700").output
    assert "responses of" not in told.split("assumed")[1]
    assert ("the latest known here" in told, "the latest known here" in old) == (True, False)


def test_json_says_the_same(tmp_path: Path) -> None:
    found = run(tmp_path, "--json", "--set", f"{ACTOR}.ppo_micro_batch_size_per_gpu=128")
    data = json.loads(found.output)
    assert data["fits"] is False
    assert data["fullest"]["component"] == "activations"
    assert data["fullest"]["bytes"] > data["fullest"]["capacity_bytes"]
    assert data["fixes"][0]["keys"]
    assert data["assumed"]["defaults"][f"{ROLL}.max_num_seqs"] == 256


def test_a_model_that_nobody_knows_is_named_by_its_key(tmp_path: Path) -> None:
    found = run(tmp_path, "--set", "actor_rollout_ref.model.path=runs/global_step_58")
    assert isinstance(found.exception, RlhfsimError)
    told = str(found.exception)
    assert "actor_rollout_ref.model.path is 'runs/global_step_58', whose shape is not known" in told
    assert "--model Qwen/Qwen2.5-7B" in told


def test_a_risk_is_said_no_surer_than_public_cases_were_right(tmp_path: Path) -> None:
    sure = ["--set", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", "--set", f"{ROLL}.gpu_memory_utilization=0.2"]
    shown = run(tmp_path, *sure).output
    assert "risk of running out of memory below 5 %" in shown
    assert "not said nearer to 0 than 5%" in shown
    data = json.loads(run(tmp_path, *sure, "--json").output)
    assert (
        data["probability_out_of_memory"] == data["plan"]["prediction"]["probability_out_of_memory"] == 0.05
    )


def test_a_switch_that_nobody_gave_is_a_stated_assumption_with_both_risks() -> None:
    absent = of_openrlhf()
    named = {key: change for change in absent.absent for key in change.keys}
    with_it = named["--gradient_checkpointing"]
    assert absent.judged.risk - with_it.judged.risk > 0.1
    given = diagnose(case("openrlhf", gpu="a100", gradient_checkpointing=True))
    assert "--gradient_checkpointing" not in {key for change in given.absent for key in change.keys}
    [assumed] = next(s.blocks for s in page(absent).sections if s.key == "assumed")
    assert isinstance(assumed, Listing)
    said = "--gradient_checkpointing is not in what you gave: risk above 95 %"
    assert any(said in line for line in assumed.items)


def test_a_policy_in_a_folder_that_is_not_here_is_asked_for_by_name() -> None:
    case = Case(
        configuration=configuration_named("verl"),
        settings=FrameworkSettings(VERL | {"actor_rollout_ref.model.path": "/root/my-sft"}, "run.sh"),
        gpu="h100",
    )
    with pytest.raises(RlhfsimError, match=r"/root/my-sft.*whose shape is not known") as refused:
        case.under({})
    assert "--model" in str(refused.value.help)


def test_a_slow_run_of_qwen3_8b_is_told_what_made_a_public_one_faster() -> None:
    """The question of `test_public_story` on H100s, with longer responses: rollout TP 2 in place of 4 and larger
    micro-batches of log-probs. Parameters that stay save 1 % by these prices, too little to be named."""
    slow = {
        "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
        "data.train_batch_size": 256,
        "data.max_prompt_length": 1024,
        "data.max_response_length": 8192,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
        f"{ACTOR}.fsdp_config.param_offload": True,
        f"{ACTOR}.fsdp_config.optimizer_offload": True,
        f"{ROLL}.tensor_model_parallel_size": 4,
        f"{ROLL}.gpu_memory_utilization": 0.6,
        f"{ROLL}.log_prob_micro_batch_size_per_gpu": 1,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 1,
    }
    asked = replace(case(**slow), prompt_tokens=300, response_tokens=3000)
    found = diagnose(asked)
    named = {key: value for change in found.faster for key, value in change.keys.items()}
    assert named[f"{ROLL}.tensor_model_parallel_size"] == 2
    assert any("log_prob" in key for key in named)
    step_s = found.judged.plan.prediction.step_s
    stays = {f"{ACTOR}.fsdp_config.param_offload": False, f"{ACTOR}.fsdp_config.optimizer_offload": False}
    saved = 1 - judged(asked.under(stays), asked.price).plan.prediction.step_s / step_s
    assert 0 < saved < 0.02
    assert not stays.keys() & named.keys()
