"""Logs of other frameworks, written here as they write them, read into runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlhfsim.calibration.observation import Observation, read_run
from rlhfsim.cli.import_run import import_run as command
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.logs.framework import framework_named, framework_names
from rlhfsim.interchange.logs.imported import Choices, Imported, import_run
from rlhfsim.interchange.logs.records import Log, Record, lines, merged, number, read_trainer_state, total
from rlhfsim.interchange.logs.run_folder import trace_of
from rlhfsim.specs.workload.lengths import LogNormal

VERL_CONFIG = """
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-7B-Instruct}
  actor: {strategy: fsdp, ppo_mini_batch_size: 64, use_kl_loss: true}
  rollout: {n: 8, tensor_model_parallel_size: 2, response_length: "${data.max_response_length}"}
data: {train_batch_size: 256, max_response_length: 4096}
algorithm: {adv_estimator: grpo}
trainer: {nnodes: 2, n_gpus_per_node: 8}
"""
NEMO_CONFIG = """
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 16}
loss_fn: {reference_policy_kl_penalty: 0.01}
policy:
  model_name: Qwen/Qwen3-8B
  train_global_batch_size: 512
  max_total_sequence_length: 4096
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1}
  generation: {max_new_tokens: "${policy.max_total_sequence_length}", vllm_cfg: {tensor_parallel_size: 2}}
cluster: {gpus_per_node: 8, num_nodes: 2}
"""
OPENRLHF_SCRIPT = r"""#!/bin/bash
# PPO on one node
NODES=1
python3 -m openrlhf.cli.train_ppo_ray \
   --actor.num_nodes $NODES --actor.num_gpus_per_node ${GPUS:-8} \
   --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --train.colocate_all \
   --actor.model_name_or_path meta-llama/Llama-3.1-8B-Instruct \
   --algo.advantage.estimator group_norm --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 \
   --train.batch_size 1024 --ds.zero_stage 3 --vllm.enable_sleep --ds.packing_samples \
   --rollout.max_new_tokens 2048 --reward.remote_url localhost:5000
"""
TRL_CONFIG = {
    "model_name_or_path": "Qwen/Qwen2.5-1.5B",
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "max_completion_length": 1024,
    "use_vllm": True,
    "beta": 0.04,
}


def verl_step(i: int, **more: float) -> dict[str, float]:
    return {
        "actor/pg_loss": 0.1,
        "response_length/mean": 1500.0,
        "response_length/max": 4096.0,
        "prompt_length/mean": 200.0,
        "timing_s/gen": 40.0 + i,
        "timing_s/old_log_prob": 8.0,
        "timing_s/ref": 7.0,
        "timing_s/adv": 0.3,
        "timing_s/reward": 0.4,
        "timing_s/update_actor": 30.0,
        "timing_s/update_weights": 5.0,
        "timing_s/step": 92.0 + i,
        **more,
    }


def write_tensorboard(folder: Path, steps: Mapping[int, Mapping[str, float]]) -> Path:
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(folder))
    for step, values in steps.items():
        for name, value in values.items():
            writer.add_scalar(name, value, step)
    writer.add_text("notes", "not a number", 1)
    writer.close()
    return next(folder.glob("*tfevents*"))


def verl_console(steps: int, start: int = 1) -> str:
    text = "\x1b[36m(TaskRunner pid=4242, ip=10.0.0.1)\x1b[0m Training Progress:   0%|  | 0/9\r\n"
    for i in range(start, start + steps):
        items = " - ".join(
            f"{k}:np.float64({v})" if "ref" in k else f"{k}:{v}" for k, v in verl_step(i).items()
        )
        text += (
            f"\x1b[36m(TaskRunner pid=4242)\x1b[0m step:{i} - {items}\n(WorkerDict pid=9) some warning: 3\n"
        )
    return text


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "verl.yaml"
    path.write_text(VERL_CONFIG)
    return path


def read(path: Path, framework: str, *configs: Path, **choices: Any) -> Imported:
    return import_run(path, framework_named(framework), Choices(gpu="h100", configs=configs, **choices))


def observed(run: Imported, tmp_path: Path, *arguments: str) -> Observation:
    del run
    result = CliRunner().invoke(command, [*arguments, "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return read_run(tmp_path / "out")


@pytest.mark.parametrize(
    ("longest", "cut", "sigma"), [(4096.0, 0.0593, 0.8), (4096.0, None, 0.8), (2000.0, 0.0, 0.08)]
)
def test_responses_spread_as_the_share_that_is_cut_or_the_longest_says(
    tmp_path: Path, config: Path, longest: float, cut: float | None, sigma: float
) -> None:
    more = {"response_length/max": longest} | ({} if cut is None else {"response_length/clip_ratio": cut})
    rows = ({"step": i, "data": verl_step(i, **more)} for i in range(1, 4))
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    responses = read(path, "verl", config).setup.workload.response_len
    assert isinstance(responses, LogNormal)
    assert responses.maximum == 4096
    assert responses.sigma == pytest.approx(sigma, abs=0.02)


def test_every_form_of_one_verl_run_gives_the_same_times(tmp_path: Path, config: Path) -> None:
    steps = {i: verl_step(i) for i in range(1, 4)}
    (tmp_path / "c.log").write_text(verl_console(3))
    (tmp_path / "m.jsonl").write_text(
        "".join(json.dumps({"step": i, "data": v}) + "\n" for i, v in steps.items())
    )
    paths = [tmp_path / "c.log", tmp_path / "m.jsonl", write_tensorboard(tmp_path / "tb", steps)]
    found = [read(path, "verl", config) for path in paths]
    for run in found:
        assert [s.logged for s in run.steps] == [1, 2, 3]
        assert [s.values["timing_s/gen"] for s in run.steps] == pytest.approx([41, 42, 43])
        assert run.mapped == found[0].mapped
        assert run.setup == found[0].setup


def test_a_verl_configuration_becomes_workload_placement_and_cluster(tmp_path: Path, config: Path) -> None:
    (tmp_path / "c.log").write_text(verl_console(3))
    run = read(tmp_path / "c.log", "verl", config)
    work, placement = run.setup.workload, run.setup.placement
    assert (work.algorithm, work.prompts, work.samples, work.mini_batches) == ("grpo", 256, 8, 4)
    assert (placement.actor.layout.dp, placement.actor.layout.zero) == (16, 3)
    assert placement.rollout is not None
    assert (placement.rollout.layout.tp, placement.rollout.layout.dp) == (2, 8)
    assert run.setup.cluster.gpus == 16
    assert "actor_rollout_ref.rollout.max_num_seqs" in run.settings.assumed
    assert run.lengths.response == 1500


def test_older_verl_times_the_weight_sync_with_generation(tmp_path: Path, config: Path) -> None:
    rows = [{k: v for k, v in verl_step(i).items() if "update_weights" not in k} for i in (1, 2)]
    (tmp_path / "m.jsonl").write_text(
        "".join(json.dumps({"step": i, "data": v}) + "\n" for i, v in enumerate(rows))
    )
    run = read(tmp_path / "m.jsonl", "verl", config)
    assert "actor.sync" in run.mapped["timing_s/gen"]
    newer = import_run(
        _file(tmp_path / "n.jsonl", [verl_step(1)]),
        framework_named("verl"),
        Choices(gpu="h100", configs=(config,)),
    )
    assert "actor.sync" not in newer.mapped["timing_s/gen"]
    assert "actor.sync" in newer.mapped["timing_s/update_weights"]


def _file(path: Path, rows: list[dict[str, float]]) -> Path:
    path.write_text("".join(json.dumps({"step": i, "data": v}) + "\n" for i, v in enumerate(rows)))
    return path


def test_times_without_a_counterpart_are_named(tmp_path: Path, config: Path) -> None:
    path = _file(
        tmp_path / "m.jsonl",
        [verl_step(i, **{"timing_s/magic": 3.0, "timing_s/generate_sequences": 30.0}) for i in range(3)],
    )
    run = read(path, "verl", config)
    assert run.unmapped_times == ("timing_s/magic",)
    assert run.unmapped == ("actor/pg_loss",)


def test_one_step_off_policy_times_the_wait_for_samples(tmp_path: Path, config: Path) -> None:
    more = tmp_path / "apart.yaml"
    more.write_text("rollout: {nnodes: 1, n_gpus_per_node: 8}\n")
    run = read(_file(tmp_path / "m.jsonl", [verl_step(i) for i in range(3)]), "verl", config, more)
    assert run.setup.placement.architecture == "async"
    assert run.mapped["timing_s/gen"] == ("actor.generate.wait",)
    assert {s.name for s in trace_of(run, "x").spans if s.kind == "wait"} == {"actor.generate.wait"}


def test_a_checkpoint_is_taken_out_of_the_step_that_holds_it(tmp_path: Path, config: Path) -> None:
    rows = [verl_step(i) for i in range(4)]
    rows[2] |= {"timing_s/save_checkpoint": 60.0, "timing_s/step": rows[2]["timing_s/step"] + 60.0}
    run = read(_file(tmp_path / "m.jsonl", rows), "verl", config)
    assert [s.values["timing_s/step"] for s in run.steps] == [92, 93, 94, 95]
    assert any("1 step holds an evaluation or a checkpoint: its time" in note for note in run.notes)


def test_a_step_whose_timers_leave_no_room_for_its_checkpoint_is_left_out(
    tmp_path: Path, config: Path
) -> None:
    rows = [verl_step(i) for i in range(4)]
    rows[2]["timing_s/save_checkpoint"] = 60.0
    run = read(_file(tmp_path / "m.jsonl", rows), "verl", config)
    assert [s.logged for s in run.steps] == [0, 1, 3]
    assert any("1 step holds an evaluation or a checkpoint: left out" in note for note in run.notes)


def test_generation_is_told_from_the_weights_that_its_timer_holds(tmp_path: Path, config: Path) -> None:
    plain = {k: v for k, v in verl_step(1).items() if "update_weights" not in k}
    reshard = {**plain, "timing_s/generate_sequences": 30.0, "timing_s/reshard": 6.0}
    run = read(_file(tmp_path / "r.jsonl", [reshard, reshard]), "verl", config)
    first = run.steps[0].values
    assert (first["timing_s/gen, weights"], first["timing_s/generate_sequences"]) == (6.0, 35.0)
    assert run.mapped["timing_s/generate_sequences"] == ("actor.generate",)
    assert "actor.sync" in run.mapped["timing_s/gen, weights"]
    slowest = {**plain, "timing_s/generate_sequences": 30.0, "timing_s/generation_timing/max": 33.0}
    run = read(_file(tmp_path / "s.jsonl", [slowest, slowest]), "verl", config)
    assert run.steps[0].values["timing_s/gen, weights"] == 41.0 - 33.0


def test_the_first_verl_names_its_timers_otherwise_and_rolls_out_log_probs(
    tmp_path: Path, config: Path
) -> None:
    row = {
        "timing/gen": 20.0,
        "timing/ref": 5.0,
        "timing/adv": 0.1,
        "timing/update_actor": 19.0,
        "response_length/mean": 300.0,
        "prompt_length/mean": 100.0,
    }
    run = read(_file(tmp_path / "m.jsonl", [row, row]), "verl", config)
    assert {"actor.generate", "actor.sync", "actor.logprob"} <= set(run.mapped["timing_s/gen"])
    assert sum(s.seconds for s in trace_of(run, "x").spans if s.step == 0) == pytest.approx(44.1)


def test_openrlhf_arguments_and_log_lines_are_read(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text(OPENRLHF_SCRIPT)
    log = tmp_path / "job.log"
    text = ""
    for i in (1, 2, 3):
        values = {
            "policy_loss": 0.1,
            "timing/make_experience": 9.0,
            "timing/ppo_train": 25.0 + i,
            "timing/broadcast": 2.0,
            "rollout/response_length_mean": 700.0,
            "timing/generation": 31.0,
            "timing/step_total": 67.0 + i,
            "note": "text",
        }
        text += f"(PPOTrainer pid=77) INFO 08-13 19:25:45 ppo_trainer.py:547] Global step {i}: {values}\n"
    log.write_text(text)
    run = read(log, "openrlhf", script, prompt_tokens=250)
    work, placement = run.setup.workload, run.setup.placement
    assert (work.algorithm, work.prompts, work.samples, work.mini_batches, work.packing) == (
        "grpo",
        128,
        8,
        1,
        True,
    )
    assert placement.rollout is not None
    assert (placement.rollout.layout.tp, placement.rollout.layout.dp, placement.rollout.sleep) == (2, 4, 1)
    assert run.setup.cluster.gpus == 8
    assert set(run.mapped["timing/make_experience"]) >= {"reference.logprob", "actor.logprob"}
    assert [s.values["timing/ppo_train"] for s in run.steps] == [26, 27, 28]
    with pytest.raises(RlhfsimError, match="lengths of prompts"):
        read(log, "openrlhf", script)


def test_openrlhf_in_tensorboard_has_a_prefix(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text(OPENRLHF_SCRIPT)
    values = {
        "train/timing/generation": 31.0,
        "train/timing/ppo_train": 25.0,
        "train/timing/step_total": 60.0,
        "train/rollout/response_length_mean": 700.0,
    }
    run = read(
        write_tensorboard(tmp_path / "tb", {1: values, 2: values}), "openrlhf", script, prompt_tokens=250
    )
    assert set(run.mapped) == {"timing/generation", "timing/ppo_train"}
    assert any("actor.sync" in note for note in run.notes)


def test_nemo_rl_blocks_on_the_console_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(NEMO_CONFIG)
    text = ""
    for i in (1, 2):
        text += (
            f"\n{'=' * 25} Step {i}/100 {'=' * 25}\n▶ Preparing batch...\n\n📊 Training Results:\n"
            "  • Loss: 0.0123\n  • Mean Generation Length: 1234.5000\n\n⏱️  Timing:\n"
            f"  • Total step time: {80 + i:.2f}s\n  • generation: 40.10s (50.1%)\n"
            "  • policy_training: 20.00s (25.0%)\n  • policy_and_reference_logprobs: 8.00s (10.0%)\n"
            "  • prepare_for_generation/total: 5.00s (6.2%)\n"
            "  • prepare_for_generation/transfer_and_update_weights: 3.00s (3.7%)\n  • strange_thing: 1.00s (1.2%)\n"
        )
    (tmp_path / "job.log").write_text(text)
    run = read(tmp_path, "nemo-rl", prompt_tokens=150)
    assert [s.values["timing/train/total_step_time"] for s in run.steps] == [81, 82]
    assert run.lengths.response == 1234.5
    assert run.unmapped_times == ("timing/train/strange_thing",)
    assert run.setup.placement.backend == "megatron"
    assert run.setup.workload.mini_batches == 2
    assert run.setup.workload.response_len.maximum == 4096 - 150  # of prompt and response together
    assert {"actor.logprob", "reference.logprob"} <= set(
        run.mapped["timing/train/policy_and_reference_logprobs"]
    )


def test_nemo_rl_asynchronous_run_has_pools_of_its_own(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(NEMO_CONFIG)
    more = {
        "grpo.async_grpo.enabled": "true",
        "policy.generation.colocated.enabled": "false",
        "policy.generation.colocated.resources.num_nodes": "1",
    }
    row = {
        "timing/train/exposed_generation": 12.0,
        "timing/train/policy_training": 30.0,
        "timing/train/weight_sync": 4.0,
        "timing/train/total_step_time": 50.0,
        "train/mean_gen_tokens_per_sample": 900.0,
        "train/mean_prompt_length": 150.0,
    }
    run = read(write_tensorboard(tmp_path / "tb", {1: row, 2: row}), "nemo-rl", config, given=more)
    assert [p.gpus for p in run.setup.placement.pools] == [8, 8]
    assert run.mapped["timing/train/exposed_generation"] == ("actor.generate.wait",)
    assert run.mapped["timing/train/weight_sync"] == ("actor.sync",)


def test_trl_state_gives_steps_and_prompt_lengths(tmp_path: Path) -> None:
    (tmp_path / "training_args.json").write_text(json.dumps(TRL_CONFIG))
    tokens = 8 * 8 * 4 * (500 + 120)
    history = [
        {
            "step": i,
            "loss": 0.1,
            "step_time": 10.0 + i,
            "completions/mean_length": 500.0,
            "num_tokens": float(i * tokens),
        }
        for i in (1, 2, 3)
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    run = read(tmp_path, "trl", given={"num_processes": "8"})
    assert [s.values["step_time"] for s in run.steps] == [11, 12, 13]
    assert run.lengths.prompt == pytest.approx(120)
    assert run.setup.workload.prompts == 32
    with pytest.raises(RlhfsimError, match="num_processes"):
        read(tmp_path, "trl")


def test_trl_training_is_what_generation_leaves_of_the_step(tmp_path: Path) -> None:
    (tmp_path / "training_args.json").write_text(json.dumps(TRL_CONFIG))
    rows: list[dict[str, float]] = []
    for i in (1, 2):  # as W&B has them: rows of their own before the row of the step
        rows += [
            {"_step": 10 * i, "profiling/Time taken: GRPOTrainer.sync_weights": 1.0},
            {"_step": 10 * i + 1, "profiling/Time taken: GRPOTrainer.vLLM.generate": 6.0},
            {"_step": 10 * i + 2, "train/step_time": 12.0, "train/completions/mean_length": 500.0},
        ]
    (tmp_path / "wandb.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read(tmp_path, "trl", given={"num_processes": "8"}, prompt_tokens=100)
    found = {(s.name, s.step): s.seconds for s in trace_of(run, "x").spans}
    assert found["actor.train", 1] == pytest.approx(5.0)
    assert found["actor.generate", 1] == pytest.approx(6.0)


def test_trl_prints_dicts_without_a_step(tmp_path: Path) -> None:
    (tmp_path / "training_args.json").write_text(json.dumps(TRL_CONFIG))
    line = "{'loss': '0.0012', 'step_time': '12.5', 'completions/mean_length': 500.0, 'epoch': 0.01}\n"
    (tmp_path / "out.log").write_text("  0%| | 0/9 [00:00<?]\r" + line * 3)
    run = read(tmp_path, "trl", given={"num_processes": "8"}, prompt_tokens=100)
    assert [s.values["step_time"] for s in run.steps] == [12.5] * 3


def test_an_imported_folder_is_a_run(tmp_path: Path, config: Path) -> None:
    log = tmp_path / "c.log"
    log.write_text(verl_console(4))
    run = read(log, "verl", config)
    seen = observed(
        run, tmp_path, str(log), "--framework", "verl", "--config", str(config), "--gpu", "h100", "--json"
    )
    assert seen.step_s == pytest.approx((94, 95, 96))
    assert seen.phases["actor.generate"] == pytest.approx((42, 43, 44))
    assert seen.response_tokens == pytest.approx(1500)
    assert seen.prompt_tokens == pytest.approx(200)
    assert seen.covers["actor.sync"] == ("actor.generate.load", "actor.sync")
    again = CliRunner().invoke(
        command,
        [
            str(log),
            "--framework",
            "verl",
            "--config",
            str(config),
            "--gpu",
            "h100",
            "--out",
            str(tmp_path / "out"),
        ],
    )
    assert isinstance(again.exception, RlhfsimError)
    assert again.exception.code == "folder-not-empty"


def test_a_folder_with_logs_is_a_framework_and_nothing_lists_it() -> None:
    assert set(framework_names()) >= {"verl", "openrlhf", "nemo-rl", "trl"}
    assert all(framework_named(name).name == name for name in framework_names())


# --- bad logs -------------------------------------------------------------------------------------


def test_a_cut_off_event_file_gives_its_whole_records(tmp_path: Path, config: Path) -> None:
    path = write_tensorboard(tmp_path / "tb", {i: verl_step(i) for i in (1, 2, 3)})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    run = read(path, "verl", config)
    assert 1 <= len(run.steps) < 3
    assert any("no whole record" in note for note in run.notes)
    path.write_bytes(b"junk" * 20)
    with pytest.raises(RlhfsimError, match="no whole record"):
        read(path, "verl", config)


def test_an_event_file_that_lost_bytes_in_the_middle_gives_the_records_before(
    tmp_path: Path, config: Path
) -> None:
    path = write_tensorboard(tmp_path / "tb", {i: verl_step(i) for i in (1, 2, 3)})
    whole = bytearray(path.read_bytes())
    at = whole.rindex(b"timing_s/step") - 2
    whole[at : at + 2] = b"\xff\xff"
    path.write_bytes(whole)
    run = read(path, "verl", config)
    assert [step.logged for step in run.steps][:2] == [1, 2]
    assert any("no whole record" in note for note in run.notes)


def test_a_log_history_that_is_no_list_is_refused() -> None:
    for history in (1.5, "x", {"a": 1}, None):
        with pytest.raises(RlhfsimError, match="no log_history with steps"):
            read_trainer_state(json.dumps({"log_history": history}), "trainer_state.json")


def test_cut_off_and_broken_lines_are_named(tmp_path: Path, config: Path) -> None:
    path = _file(tmp_path / "m.jsonl", [verl_step(i) for i in range(3)])
    path.write_text(path.read_text() + '{"step": 3, "data": {"timing_s/ge')
    assert any("cut off" in note for note in read(path, "verl", config).notes)
    log = tmp_path / "c.log"
    log.write_text(verl_console(3)[:-400])
    run = read(log, "verl", config)
    assert [s.logged for s in run.steps] == [1, 2]


def test_steps_with_impossible_times_are_named(tmp_path: Path, config: Path) -> None:
    rows = [
        verl_step(0),
        verl_step(1, **{"timing_s/gen": -1.0}),
        verl_step(2, **{"timing_s/ref": float("nan")}),
        verl_step(3),
    ]
    run = read(_file(tmp_path / "m.jsonl", rows), "verl", config)
    assert [s.logged for s in run.steps] == [0, 3]
    assert any("timing_s/gen is -1" in note for note in run.notes)
    with pytest.raises(RlhfsimError, match="none of 1 steps"):
        read(_file(tmp_path / "n.jsonl", [rows[1]]), "verl", config)


@pytest.mark.parametrize("text", ["", "hello\nworld\n", "{}\n", "[1, 2]\n", '{"a": 1}\n'])
def test_a_log_without_metrics_is_refused(tmp_path: Path, config: Path, text: str) -> None:
    for name in ("a.log", "a.jsonl"):
        (tmp_path / name).write_text(text)
        with pytest.raises(RlhfsimError) as error:
            read(tmp_path / name, "verl", config)
        assert error.value.code in ("no-step-times", "no-metrics")


def test_a_log_of_another_framework_is_refused_by_name(tmp_path: Path, config: Path) -> None:
    (tmp_path / "c.log").write_text(verl_console(2))
    with pytest.raises(RlhfsimError, match="NeMo-RL"):
        read(tmp_path / "c.log", "nemo-rl", config)


def test_restarted_steps_count_once(tmp_path: Path, config: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a.log").write_text(verl_console(3))
    (tmp_path / "run" / "b.log").write_text(
        verl_console(3, start=3).replace("timing_s/gen:43.0", "timing_s/gen:99.0")
    )
    run = read(tmp_path / "run", "verl", config)
    assert [s.logged for s in run.steps] == [1, 2, 3, 4, 5]
    assert run.steps[2].values["timing_s/gen"] == 99
    assert any("are given twice" in note for note in run.notes)


def test_tensorboard_rounds_without_being_another_value() -> None:
    one = Log(records=(Record(step=1, values={"a": 1.23456789}),))
    other = Log(records=(Record(step=1, values={"a": 1.2345679, "b": 2.0}),))
    assert merged([one, other]).notes == ()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.5", 1.5),
        ("np.float64(2e-3)", 2e-3),
        ("12.3s", 12.3),
        ("tensor(4.)", 4.0),
        ("abc", None),
        ("1.5.2", None),
        (True, None),
        (-(10**400), -math.inf),
    ],
)
def test_numbers_are_read_as_python_prints_them(text: object, value: float | None) -> None:
    assert number(text) == value


def test_prefixes_of_ray_and_colours_are_dropped() -> None:
    text = "\x1b[36m(main_task pid=17, ip=10.0.0.2)\x1b[0m step:1 - a:2 [repeated 3x across cluster]\n\nplain (x) text\n"
    assert list(lines(text)) == ["step:1 - a:2", "plain (x) text"]


def test_references_of_a_configuration_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "a: {b: 4, c: '${.b}', d: '${oc.select:a.none,7}', e: '${mul:${a.b},2}', f: '${a.f}', m: '${mul:3,2}'}\n"
        "g: '${a.c}'\nh: {i: '${..g}'}\n"
    )
    _, s = read_configuration([path], {"z": "null"}, "verl")
    assert [s.find(key) for key in ("a.c", "a.d", "g", "a.m", "h.i")] == [4, 7, 4, 6, 4]
    assert s.find("a.f") is None
    assert s.find("z") is None


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    path = write_tensorboard(tmp_path / "tb", {1: verl_step(1)})
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(RlhfsimError) as error:
        read(path, "verl")
    assert "rlhfsim[tensorboard]" in (error.value.help or "")


@pytest.mark.parametrize("seconds", ["5e-324", "-1.0", "1e9", "nan", "inf"])
def test_a_step_with_a_time_that_cannot_be_is_left_out_by_name(
    seconds: str, tmp_path: Path, config: Path
) -> None:
    log = tmp_path / "c.log"
    log.write_text(verl_console(3).replace("timing_s/gen:43.0", f"timing_s/gen:{seconds}"))
    run = read(log, "verl", config)
    assert [step.logged for step in run.steps] == [1, 2]
    assert any("timing_s/gen is" in note for note in run.notes)


def test_infinities_that_cancel_have_no_sum() -> None:
    assert math.isnan(total([-math.inf, math.inf]))
    assert math.isnan(total([1e308, 1e308]))
    assert total([1.0, math.inf]) == math.inf
    assert total([0.1] * 10) == 1.0
