from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from executor.coordination.run_folder import RunFiles, environment, occupy, settings_hash, write_inputs
from executor.machine import facts
from executor.settings import Optimizer, RewardRule, Settings, Tracking
from rlhfsim.api import estimate_file
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan, read_plan
from rlhfsim.specs.loading import load

NVIDIA_SMI = (Path(__file__).parent / "recorded" / "nvidia_smi.xml").read_text()
SETTINGS = Settings(
    model="some/folder",
    rewards=(RewardRule(kind="format", pattern="<a>\\d+</a>", weight=0.5), RewardRule(kind="answer")),
    optimizer=Optimizer(learning_rate=1e-5),
    variables={"A": "yes"},
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return estimate_file("xtuner-rlhf")


def write(files: RunFiles, plan: Plan) -> None:
    write_inputs(
        files,
        plan=plan,
        settings=SETTINGS,
        trainers={
            "deepspeed": {"actor": {"zero_optimization": {"stage": 2}}, "critic": {}},
            "fsdp2": {"reference": {"weights": "bf16"}},
        },
        vllm={"tensor_parallel_size": 2},
    )


def test_everything_lies_under_its_name(tmp_path: Path, plan: Plan) -> None:
    with occupy(tmp_path / "new" / "run") as files:
        write(files, plan)
    names = {p.relative_to(files.root).as_posix() for p in files.root.rglob("*")}
    assert names == {
        ".lock",
        "plan.json",
        "settings.yaml",
        "contents.json",
        "vllm.json",
        "environment.json",
        "logs",
        "checkpoints",
        "scratch",
        "deepspeed",
        "deepspeed/actor.json",
        "deepspeed/critic.json",
        "fsdp2",
        "fsdp2/reference.json",
    }
    assert json.loads((files.trainers["deepspeed"] / "actor.json").read_text()) == {
        "zero_optimization": {"stage": 2}
    }
    assert read_plan(files.plan) == plan


def test_settings_are_read_back_equal(tmp_path: Path, plan: Plan) -> None:
    with occupy(tmp_path) as files:
        write(files, plan)
    assert load(Settings, files.settings) == SETTINGS


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(RlhfsimError, match="holds something already"), occupy(tmp_path):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["note.txt"]


def test_an_attempt_that_ended_before_its_first_step_can_be_made_again(tmp_path: Path, plan: Plan) -> None:
    for _ in range(2):
        with occupy(tmp_path) as files:
            write(files, plan)
    files.metrics.write_text("{}\n")
    with pytest.raises(RlhfsimError, match="holds something already"), occupy(tmp_path):
        pass


def test_the_plan_of_somebody_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("mine")
    with pytest.raises(RlhfsimError, match="holds something already"), occupy(tmp_path):
        pass


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    with occupy(tmp_path) as files:
        assert files.checkpoints.is_dir()


def test_a_run_can_be_resumed_in_its_folder(tmp_path: Path, plan: Plan) -> None:
    with occupy(tmp_path) as files:
        write(files, plan)
        files.metrics.write_text("{}\n")
    with occupy(tmp_path, resume=True) as files:
        write(files, plan)
    assert files.metrics.read_text() == "{}\n"


def test_an_empty_folder_is_taken_by_the_line_that_resumes_too(tmp_path: Path) -> None:
    with occupy(tmp_path / "run", resume=True) as files:
        assert files.checkpoints.is_dir()


def test_what_is_no_run_cannot_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(RlhfsimError, match="no run in this folder"), occupy(tmp_path, resume=True):
        pass


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RlhfsimError, match="is a file"), occupy(tmp_path / "run"):
        pass


def test_two_runs_do_not_share_a_folder(tmp_path: Path, plan: Plan) -> None:
    with occupy(tmp_path) as files:
        write(files, plan)
        with pytest.raises(RlhfsimError, match="another run"), occupy(tmp_path, resume=True):
            pass
    with occupy(tmp_path, resume=True):
        pass


def test_the_environment_names_versions_and_gpus_and_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_said", lambda _: NVIDIA_SMI)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = environment()
    assert found["libraries"]["numpy"]
    assert found["libraries"]["torch"].startswith("2.")
    assert found["libraries"]["vllm"]
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 2**20
    assert found["devices"] == [facts.parse_query(NVIDIA_SMI)[1][1].name]
    assert platform.node() not in json.dumps(found).split('"')


def test_the_hash_of_settings_sees_what_is_learnt_and_not_for_how_long() -> None:
    other = Settings(optimizer=Optimizer(learning_rate=2e-5))
    longer = Settings(iterations=99, tracking=Tracking(tensorboard=False))
    assert settings_hash(other) != settings_hash(Settings())
    assert settings_hash(longer) == settings_hash(Settings())


def test_a_folder_that_cannot_rename_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a mounted bucket does."""

    def no_rename(self: Path, target: Path) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(Path, "rename", no_rename)
    with pytest.raises(RlhfsimError, match="operation not supported") as told, occupy(tmp_path / "run"):
        pass
    assert told.value.code == "folder-cannot-rename"
    monkeypatch.undo()
    with occupy(tmp_path / "run") as files:
        assert not list(files.checkpoints.iterdir()), "the trial leaves nothing"
