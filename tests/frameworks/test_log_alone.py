"""Runs that are read from the console log alone, what they leave open, and what contradicts what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest
from click.testing import CliRunner

from rlhfsim.calibration.comparison.limits import phase_times
from rlhfsim.calibration.comparison.side_by_side import read as side_by_side
from rlhfsim.calibration.observation import read_run
from rlhfsim.cli.compare import compare
from rlhfsim.cli.import_run import import_run as command
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.logs.framework import framework_named
from rlhfsim.interchange.logs.imported import Choices, Imported, import_run

RAY = "\x1b[36m(TaskRunner pid=4242)\x1b[0m "
CONFIG: Mapping[str, Any] = {
    "actor_rollout_ref": {
        "actor": {"strategy": "fsdp", "ppo_mini_batch_size": 64, "use_kl_loss": True, "ppo_epochs": 1},
        "model": {"path": "/workspace/models/Qwen2.5-7B-Instruct", "use_remove_padding": True},
        "ref": {"fsdp_config": {"param_offload": False}},
        "rollout": {"n": 8, "tensor_model_parallel_size": 2, "gpu_memory_utilization": 0.5},
    },
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_batch_size": 256, "max_response_length": 4096},
    "trainer": {"nnodes": 1, "n_gpus_per_node": 8, "logger": ["console"]},
}
TOKENS = 256 * 8 * 1700.0
SECONDS = 125.0
"""Of training a step."""
FLOP = TOKENS * (6 * 7.6156e9 + 12 * 28 * 28 * 128 * 1700)


def step(i: int, **more: float) -> dict[str, float]:
    return {
        "prompt_length/mean": 200.0,
        "response_length/mean": 1500.0,
        "response_length/max": 4096.0,
        "timing_s/gen": 90.0 + i,
        "timing_s/old_log_prob": 30.0,
        "timing_s/ref": 29.0,
        "timing_s/update_actor": SECONDS,
        "timing_s/update_weights": 5.0,
        "timing_s/step": 285.0 + i,
        "perf/total_num_tokens": TOKENS,
        "perf/time_per_step": 285.0 + i,
        "perf/throughput": TOKENS / (285.0 + i) / 8,
        **more,
    }


def log(folder: Path, *, config: Mapping[str, Any] = CONFIG, head: str = "", **more: float) -> Path:
    """A job's console: a head, the configuration as verl prints it, three steps."""
    lines = ["2026-08-20 06:50:29,276\tINFO worker.py:1832 -- Started a local Ray instance.", head]
    lines += [RAY + line for line in pformat(config).splitlines()]
    for i in range(3):
        items = " - ".join(f"{name}:{value}" for name, value in step(i, **more).items())
        lines.append(f"{RAY}step:{i + 1} - {items}")
    path = folder / "job.log"
    path.write_text("\n".join(lines) + "\n")
    return path


def read(path: Path, **choices: Any) -> Imported:
    return import_run(path, None, Choices(**choices))


def changed(section: str, key: str, value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(CONFIG))
    at = copy
    for part in section.split("."):
        at = at[part]
    at[key] = value
    return dict(copy)


def test_the_log_alone_is_enough(tmp_path: Path) -> None:
    path = log(tmp_path, head="GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)")
    result = CliRunner().invoke(command, [str(path), "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    seen = read_run(tmp_path / "out")
    assert seen.plan.hardware[0].profile == "h100_sxm"
    assert (seen.plan.workload.prompts, seen.plan.workload.samples) == (256, 8)
    assert seen.date == "2026-08-20"
    assert seen.plan.workload.has_reference


def test_the_mfu_of_a_log_gives_its_gpu_away(tmp_path: Path) -> None:
    for peak, gpu in ((312e12, "a100_sxm"), (1336e12, "mi300x"), (989e12, "h100_sxm")):
        mfu = FLOP / (SECONDS * 8 * peak)
        run = read(log(tmp_path, **{"perf/mfu/actor": mfu}))
        assert run.setup.cluster.node_groups[0].profile.name == gpu
    assert any("h800_sxm and h200_sxm would fit too: say so with --gpu" in note for note in run.notes)
    run = read(log(tmp_path, **{"perf/mfu/actor": mfu}), gpu="h200")
    assert run.setup.cluster.node_groups[0].profile.name == "h200_sxm"


def test_metadata_of_wandb_beside_the_log_name_the_gpu(tmp_path: Path) -> None:
    metadata = tmp_path / "wandb-metadata.json"
    metadata.write_text('{"gpu": "NVIDIA A100-SXM4-80GB", "gpu_count": 8}')
    assert read(log(tmp_path)).setup.cluster.node_groups[0].profile.name == "a100_sxm"
    metadata.write_text('{"gpu": "NVIDIA A30"}')
    with pytest.raises(RlhfsimError, match="says NVIDIA A30, which has no profile"):
        read(log(tmp_path))


def test_what_nothing_says_is_asked_for_at_once(tmp_path: Path) -> None:
    config = changed("actor_rollout_ref.model", "path", "/runs/sft/global_step_58")
    with pytest.raises(RlhfsimError) as error:
        read(log(tmp_path, config=config, head="total_gpu_memory (79.33GiB)"))
    message = str(error.value)
    assert "which model /runs/sft/global_step_58 is" in message
    assert "on which GPU it ran" in message
    assert "h100_sxm" in message
    assert "l4" not in message.split("would fit")[0]


def test_a_model_that_nothing_says_is_asked_for_by_its_option(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    history.write_text('{"step": 1, "step_time": 9.0, "completions/mean_length": 100.0}\n')
    config = tmp_path / "config.yaml"
    config.write_text("num_generations: 8\nper_device_train_batch_size: 8\nnum_processes: 8\n")
    with pytest.raises(RlhfsimError, match="model_name_or_path") as error:
        import_run(history, framework_named("trl"), Choices(gpu="h100", configs=(config,)))
    assert "add --model NAME --" in (error.value.help or "")


def test_a_model_without_a_name_is_known_by_the_shape_that_the_log_prints(tmp_path: Path) -> None:
    shape = {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    }
    printed = "Model config after override: Qwen2Config " + json.dumps(shape, indent=2)
    config = changed("actor_rollout_ref.model", "path", "/runs/sft/global_step_58")
    run = read(log(tmp_path, config=config, head=printed), gpu="h100")
    assert run.setup.workload.model == "qwen2-7b"  # Qwen2.5-7B has the same


@pytest.mark.parametrize(
    ("section", "key", "value", "both", "remedy"),
    [
        ("actor_rollout_ref.rollout", "n", 4, ("2,048 samples", "256 prompts x 4"), "rollout.n=8"),
        ("trainer", "n_gpus_per_node", 4, ("8 GPUs", "says 4"), "trainer.n_gpus_per_node="),
        ("actor_rollout_ref.actor", "use_kl_loss", False, ("29 s", "no reference"), "use_kl_in_reward=true"),
        ("data", "max_response_length", 1024, ("4,096 tokens", "1,024"), "max_response_length=4096"),
        ("actor_rollout_ref.model", "path", "Qwen/Qwen2.5-72B", ("TFLOP/s", "PFLOP/s"), "model.path=NAME"),
    ],
)
def test_a_log_that_contradicts_its_configuration_is_refused_with_both_numbers(
    tmp_path: Path, section: str, key: str, value: Any, both: tuple[str, str], remedy: str
) -> None:
    with pytest.raises(RlhfsimError) as error:
        read(log(tmp_path, config=changed(section, key, value)), gpu="h100")
    assert error.value.code == "log-contradicts-configuration"
    assert all(number in error.value.message for number in both), error.value.message
    assert remedy in (error.value.help or "")


def test_memory_beyond_the_gpu_is_another_gpu_but_a_sleeping_pool_counts_twice(tmp_path: Path) -> None:
    with pytest.raises(RlhfsimError, match="reserved"):
        read(log(tmp_path, **{"perf/max_memory_reserved_gb": 130.0}), gpu="h100")
    assert read(log(tmp_path, **{"perf/max_memory_reserved_gb": 99.0}), gpu="h100").steps


def test_timers_that_exceed_their_step_ran_beside_it(tmp_path: Path) -> None:
    with pytest.raises(RlhfsimError, match="something runs at the same time"):
        read(log(tmp_path, **{"timing_s/step": 200.0}), gpu="h100")


def test_micro_batches_of_all_gpus_together_are_divided(tmp_path: Path) -> None:
    config = changed("actor_rollout_ref.actor", "ppo_micro_batch_size", 64)
    config["actor_rollout_ref"]["actor"]["ppo_micro_batch_size_per_gpu"] = None
    assert read(log(tmp_path, config=config), gpu="h100").setup.placement.actor.layout.micro_batch == 8


def test_samples_that_are_not_packed_are_padded_to_the_limits(tmp_path: Path) -> None:
    config = changed("data", "max_prompt_length", 1024)
    padded = changed("actor_rollout_ref.model", "use_remove_padding", False) | {"data": config["data"]}
    work = read(log(tmp_path, config=padded), gpu="h100").setup.workload
    assert work.prompt_len.maximum + work.response_len.maximum == 1024 + 4096
    work = read(log(tmp_path, config=config, **{"prompt_length/max": 300.0}), gpu="h100").setup.workload
    assert (work.packing, work.prompt_len.maximum) == (True, 300)


def test_a_setting_corrects_the_printed_configuration(tmp_path: Path) -> None:
    path = log(tmp_path, config=changed("actor_rollout_ref.rollout", "n", 4))
    run = read(path, gpu="h100", given={"actor_rollout_ref.rollout.n": "8"})
    assert run.setup.workload.samples == 8


def imported(tmp_path: Path, config: Mapping[str, Any] = CONFIG, *options: str, **more: float) -> Path:
    out = tmp_path / "out"
    result = CliRunner().invoke(
        command,
        [str(log(tmp_path, config=config, **more)), "--gpu", "h100", "--out", str(out), *options],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    return out


def test_a_comparison_says_where_the_time_went_and_which_key_would_have_saved_it(tmp_path: Path) -> None:
    out = imported(tmp_path, changed("actor_rollout_ref.rollout", "enforce_eager", True))
    shown = CliRunner().invoke(compare, [str(out)], catch_exceptions=False).output
    assert "decodes eagerly" in shown
    assert "actor_rollout_ref.rollout.enforce_eager=False" in shown
    data = json.loads(CliRunner().invoke(compare, [str(out), "--json"], catch_exceptions=False).output)
    assert data["changes"][0]["predicted_step_s"] < data["step"]["predicted_s"]
    assert {row["name"] for row in data["where"]} >= {"actor.generate", "actor.train"}


def test_what_torch_counted_is_compared_with_the_pool_of_an_engine_in_its_process(tmp_path: Path) -> None:
    counted = {"perf/max_memory_allocated_gb": 66.0, "perf/max_memory_reserved_gb": 99.0}
    rows = {}
    for version in ("0.5", "0.8"):
        (tmp_path / version).mkdir()
        out = imported(tmp_path / version, CONFIG, "--set", f"verl_version={version}", **counted)
        rows[version] = {row.phase: row for row in side_by_side(out).memory if row.measured}
    inside, beside = (rows[version]["all, allocated by torch"] for version in ("0.5", "0.8"))
    assert inside.measured == beside.measured == 66 * 2**30
    assert inside.predicted == pytest.approx((beside.predicted or 0) + inside.roles["rollout"])
    assert 30e9 < inside.roles["rollout"] < 40e9  # half of the GPU, less what is not in the pool
    assert "rollout" not in beside.roles
    reserved = rows["0.5"]["all, reserved by torch"]
    assert reserved.measured == 99 * 2**30
    assert (reserved.predicted or 0) > (inside.predicted or 0)


def test_the_parts_of_a_phase_add_up_and_its_mfu_is_that_of_its_tokens(tmp_path: Path) -> None:
    answer = side_by_side(imported(tmp_path))
    times = {t.name: t for t in phase_times(answer.plan, answer.run, answer.found.rows)}
    train = times["actor.train"]
    assert train.gpu_s + train.framework_s + train.beyond_s == pytest.approx(SECONDS)
    assert f"MFU {TOKENS * 6 * 7.6156e9 / SECONDS / 8 / 989e12:.0%}" in train.why
    assert "micro-batches of 1,700 tokens (1 sample)" in train.why


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"actor_rollout_ref.rollout.tensor_model_parallel": "2"}, "rollout.tensor_model_parallel_size"),
        ({"trainer.colour": "blue"}, "it would change nothing"),
        ({"actor_rollout_ref.actor.use_kl_loss": "yess"}, "not true or false"),
    ],
)
def test_a_setting_that_would_change_nothing_is_refused(
    given: dict[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(RlhfsimError) as error:
        import_run(log(tmp_path), None, Choices(gpu="h100", given=given))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        (
            "validation generation end\n[Model Response]\n",
            "neither a configuration",
            "logs of AReaL, NeMo-RL",
        ),
        (
            f"{RAY}{dict(CONFIG)!r}\n{RAY}step:0 - val/test_score:0.1\n",
            "no time that verl logs",
            "a training step has ended; this one has only val/test_score",
        ),
        (
            f"{RAY}step:1 - perf/mfu/actor:0.12 - response_length/mean:300 - prompt_length/mean:100 - "
            "timing_s/gen:20 - timing_s/step:30\n",
            "configuration; nor on which GPU it ran (its MFU may tell, once the configuration is known)",
            "add --config FILE",
        ),
    ],
)
def test_a_log_that_lacks_much_says_all_of_it_at_once(
    tmp_path: Path, text: str, message: str, remedy: str
) -> None:
    path = tmp_path / "job.log"
    path.write_text(text)
    with pytest.raises(RlhfsimError) as error:
        read(path)
    assert message in error.value.message
    assert remedy in (error.value.help or "")
    assert str(path) in str(error.value.place)
