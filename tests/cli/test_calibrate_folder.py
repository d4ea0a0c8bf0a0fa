"""`rlhfsim calibrate` on a folder of mixed logs and run folders: sorted, and what is not used is named with why."""

from __future__ import annotations

import json
import re
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from planted_plans import plan, run_folder

from rlhfsim.cli.calibrate import calibrate
from rlhfsim.cli.mixed_runs import read_runs
from rlhfsim.errors import RlhfsimError

CONFIG = {
    "actor_rollout_ref": {
        "actor": {"strategy": "fsdp", "ppo_mini_batch_size": 64, "use_kl_loss": True},
        "model": {"path": "/workspace/models/Qwen2.5-7B-Instruct", "use_remove_padding": True},
        "rollout": {"n": 8, "tensor_model_parallel_size": 2, "gpu_memory_utilization": 0.5},
    },
    "algorithm": {"adv_estimator": "grpo"},
    "data": {"train_batch_size": 256, "max_response_length": 4096},
    "trainer": {"nnodes": 1, "n_gpus_per_node": 8},
}


def verl_log(path: Path, gpu: str, slower: float = 1.0) -> Path:
    """A job's console as verl writes it: device, configuration, four steps."""
    times = {"gen": 90.0, "old_log_prob": 30.0, "ref": 29.0, "update_actor": 125.0, "update_weights": 5.0}
    lines = [gpu, *pformat(CONFIG).splitlines()]
    for i in range(4):
        seconds = {f"timing_s/{name}": value * slower + i for name, value in times.items()}
        step = {
            "prompt_length/mean": 200.0,
            "response_length/mean": 1500.0,
            **seconds,
            "timing_s/step": sum(seconds.values()) + 3.0,
        }
        lines.append(f"step:{i + 1} - " + " - ".join(f"{name}:{value}" for name, value in step.items()))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("everything")
    verl_log(root / "monday.log", "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)")
    verl_log(root / "tuesday.log", "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-2)", slower=1.1)
    verl_log(root / "nowhere.log", "")
    (root / "shopping.log").write_text("milk\n")
    run_folder(root / "other", plan(gpus=4, gpu="a100_sxm"), {})
    return root


def tell(*arguments: str) -> Any:
    result = CliRunner().invoke(calibrate, [*arguments, "--json"], catch_exceptions=False)
    return json.loads(result.stdout)


def test_a_folder_is_sorted_and_what_is_not_used_is_named(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "verl-h100.yaml"
    data = tell(str(folder), "--out", str(out))
    assert [run["name"] for run in data["runs"]] == ["monday", "tuesday"]
    unused = {note.partition(":")[0]: note for note in data["notes"] if "not used" in note}
    assert set(unused) == {"nowhere", "shopping", "other"}
    assert "--gpu NAME" in unused["nowhere"]
    assert "--profile a100_sxm" in unused["other"]
    assert set(yaml.safe_load(out.read_text())["biases"]) == {"verl"}
    assert not re.search(r"(/workspace|/tmp|" + re.escape(str(folder)) + ")", out.read_text())


def test_the_profile_chooses_the_gpu(folder: Path) -> None:
    data = tell(str(folder), "--profile", "a100_sxm")
    assert [run["name"] for run in data["runs"]] == ["other"]
    assert data["biases"] == []


def test_one_log_is_a_run(folder: Path) -> None:
    data = tell(str(folder / "monday.log"))
    assert [run["name"] for run in data["runs"]] == ["monday"]
    assert {b["framework"] for b in data["biases"]} == {"verl"}


def test_a_folder_without_a_run_says_why(tmp_path: Path) -> None:
    (tmp_path / "shopping.log").write_text("milk\n")
    result = CliRunner().invoke(calibrate, [str(tmp_path)])
    assert isinstance(result.exception, RlhfsimError)
    assert result.exception.code == "too-few-data"
    assert "shopping" in result.exception.message


def test_a_link_that_leads_nowhere_among_the_runs_is_named(tmp_path: Path) -> None:
    run_folder(tmp_path / "mine", plan(gpus=4, gpu="a100_sxm"), {})
    (tmp_path / "round.jsonl").symlink_to("round.jsonl")
    _, unused = read_runs([tmp_path], tmp_path / "scratch")
    assert [run.run for run in unused] == ["round"]
