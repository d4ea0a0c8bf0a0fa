"""Bad input is refused by name before anything starts, with exit code 2 on the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import runs
import torch

from executor.coordination import cluster
from executor.engines.transformers import heads
from executor.engines.transformers.heads import has_head
from executor.launch import LaunchOptions, launch
from executor.settings import Checkpoints, Data
from executor.tasks import tiny
from executor.weight_transfer.shared_memory import SHARED, prefix
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan, write_plan


@pytest.fixture(scope="module")
def plan(tiny_model: Path) -> Plan:
    return runs.plan("naive", "grpo", tiny_model, layout={"dp": 2, "zero": 2})


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(cluster, "connect", refuse)


def _refused(plan: Plan, tmp_path: Path, model: Path, **changes: object) -> RlhfsimError:
    out = tmp_path / "run"
    with pytest.raises(RlhfsimError) as error:
        launch(plan, runs.settings(model, **changes), LaunchOptions(out=out), runs.Quiet())
    assert error.value.help or error.value.place
    return error.value


def test_wrong_model_path_is_named(plan: Plan, tmp_path: Path) -> None:
    error = _refused(plan, tmp_path, tmp_path / "nowhere")
    assert error.code == "no-model"
    assert "nowhere" in error.message
    assert not (tmp_path / "run").exists()


def test_model_folder_without_tokenizer_is_refused(plan: Plan, tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    assert _refused(plan, tmp_path, model).code == "no-tokenizer"


@pytest.mark.parametrize("text", ['{"eos_token_id": "x"}', '{"eos_token_id": [1, [2]]}', "[]", "[" * 100_000])
def test_a_generation_config_whose_stops_are_none_is_refused(
    text: str, plan: Plan, tiny_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "generation_config.json").write_text(text)
    place = _refused(plan, tmp_path, model).place
    assert place is not None
    assert place.file == str(model / "generation_config.json")


def test_model_folder_without_weights_is_refused(plan: Plan, tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    assert _refused(plan, tmp_path, model).code == "no-weights"


def test_a_folder_with_another_model_than_planned_is_refused(
    plan: Plan, tiny_model: Path, tmp_path: Path
) -> None:
    model = tiny.config(shutil.copytree(tiny_model, tmp_path / "model"), layers=3)
    error = _refused(plan, tmp_path, model)
    assert error.code == "other-model-than-planned"
    assert "3 layers, planned 2;" in error.message
    assert "parameters, planned" in error.message
    assert f"--model {model}/config.json" in str(error.help)


@pytest.mark.parametrize("key", ["max_position_embeddings", "num_attention_heads"])
def test_sizes_of_a_model_that_are_text_are_refused_where_they_stand(
    plan: Plan, tiny_model: Path, tmp_path: Path, key: str
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {key: "512"}))
    error = _refused(plan, tmp_path, model)
    assert key in str(error)


def test_a_background_save_with_fsdp2_is_refused_with_the_reason(tiny_model: Path, tmp_path: Path) -> None:
    backend = {"placement": {"backend": "fsdp2"}, "layout": {"dp": 2, "zero": 3}}
    made = runs.plan("naive", "sft", tiny_model, **backend)
    error = _refused(made, tmp_path, tiny_model, checkpoints=Checkpoints(background=True), rewards=None)
    assert error.code == "checkpoint-background"
    assert "collectives while it writes" in error.message


def test_empty_data_is_refused(plan: Plan, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    error = _refused(plan, tmp_path, tiny_model, data=Data(task="file", path=str(tmp_path / "empty.jsonl")))
    assert "empty.jsonl" in str(error)


def test_run_folder_that_holds_something_is_refused(plan: Plan, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    assert _refused(plan, tmp_path, tiny_model).code == "run-folder-not-empty"


def test_resume_where_no_run_is_says_so(plan: Plan, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    with pytest.raises(RlhfsimError, match="no run in this folder"):
        launch(
            plan, runs.settings(tiny_model), LaunchOptions(out=tmp_path / "run", resume=True), runs.Quiet()
        )


def test_run_folder_of_a_launch_that_was_killed_at_once_can_be_used(
    tiny_model: Path, plan: Plan, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    for name in ("logs", "checkpoints", "scratch"):
        (out / name).mkdir(parents=True)
    (out / ".lock").touch()
    with pytest.raises(AssertionError, match="Ray was started"):
        launch(plan, runs.settings(tiny_model), LaunchOptions(out=out), runs.Quiet())


def test_shared_memory_that_a_killed_run_left_is_removed_at_the_next_launch(
    tiny_model: Path, plan: Plan, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    left = SHARED / f"{prefix(str(out / 'scratch' / 'weights'))}weights-1-whole"
    left.touch()
    with pytest.raises(AssertionError, match="Ray was started"):
        launch(plan, runs.settings(tiny_model), LaunchOptions(out=out), runs.Quiet())
    assert not left.exists()


def test_slots_that_are_not_there_are_counted_node_by_node(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [cluster.RayNode(id="a", address="10.0.0.1", slots=1)]
    monkeypatch.setattr(cluster, "nodes", lambda resource: there)
    with pytest.raises(
        RlhfsimError, match=r"the plan needs 2 slots \(1 node of 2\), the cluster has 1 \(1 node of 1\)"
    ) as error:
        cluster.check(plan, cluster.SLOT)
    assert error.value.code == "cluster-too-small"
    assert "--scale" in str(error.value.help)


def test_command_line_exits_with_2_for_a_plan_of_another_schema(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, plan)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"schema": "rlhfsim.plan/99"}))
    code, said = _launched(str(path), "--out", str(tmp_path / "run"))
    assert code == 2, said
    assert "not a plan of schema rlhfsim.plan/2" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_command_line_exits_with_2_for_a_model_that_is_not_there(plan: Plan, tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", plan)
    code, said = _launched(
        str(tmp_path / "plan.json"), "--model", str(tmp_path / "nowhere"), "--out", str(tmp_path / "run")
    )
    assert code == 2, said
    assert "error[no-model]" in said
    assert "Traceback" not in said


def _launched(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "rlhfsim.cli.main", "launch", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_reward_model_that_has_not_learnt_to_score_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    both = {"reward": {"model": "same", "rules": {"seconds_per_sample": "1 ms", "workers": 2}}}
    made = runs.plan("naive", "grpo", tiny_model, layout={"dp": 2, "zero": 2}, workload=both)
    error = _refused(made, tmp_path, tiny_model, reward_head="trained")
    assert error.code == "reward-model-untrained"
    assert "score.weight" in error.message
    headed = shutil.copytree(tiny_model, tmp_path / "headed")
    config = json.loads((headed / "config.json").read_text())
    torch.save({"v_head.weight": torch.ones(1, config["hidden_size"])}, headed / "pytorch_model.bin")
    assert has_head(str(headed))
    loaded = heads.load(str(headed), "score", "fp32")
    assert loaded.head.weight.sum() == config["hidden_size"]
    tokenizer = json.loads((headed / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 999, "content": "<other>"})
    (headed / "tokenizer.json").write_text(json.dumps(tokenizer))
    error = _refused(made, tmp_path, tiny_model, reward_head="trained", reward_model=str(headed))
    assert error.code == "reward-model-tokens"


def test_a_student_without_a_teacher_that_reads_its_tokens_is_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    teacher = shutil.copytree(tiny_model, tmp_path / "teacher")
    work = {"reference": str(teacher / "config.json"), "reward": {}}
    made = runs.plan("hybrid", "distillation", tiny_model, workload=work)
    assert _refused(made, tmp_path, tiny_model, rewards=None).code == "teacher-missing"
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 999, "content": "<other>"})
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    error = _refused(made, tmp_path, tiny_model, rewards=None, reference_model=str(teacher))
    assert error.code == "reference-tokens"
    alone = runs.plan("hybrid", "grpo", tiny_model, workload={"kl": False})
    error = _refused(alone, tmp_path, tiny_model, reference_model=str(tiny_model))
    assert error.code == "reference-model-unused"


def test_settings_that_the_plan_has_no_use_for_are_refused(
    plan: Plan, tiny_model: Path, tmp_path: Path
) -> None:
    model_alone = {"reward": {"model": "same"}}
    made = runs.plan("naive", "grpo", tiny_model, layout={"dp": 2, "zero": 2}, workload=model_alone)
    assert _refused(made, tmp_path, tiny_model).code == "rewards-unused"
    pairs = runs.plan("naive", "dpo", tiny_model)
    error = _refused(pairs, tmp_path, tiny_model)
    assert (error.code, "dpo learns from the data alone" in str(error)) == ("rewards-unused", True)
    for key in ("reward", "critic"):
        error = _refused(plan, tmp_path, tiny_model, **{f"{key}_model": str(tiny_model)})
        assert error.code == f"{key}-model-unused"
