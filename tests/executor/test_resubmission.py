"""The line that starts a run, given again: it goes on, is done, or says what is another than before.

Engines are faked: an iteration takes the hash of its prompts, of its settings and of what came before.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import yaml

from executor.coordination import checkpoints
from executor.coordination.run_folder import settings_hash
from executor.coordination.tracking import MetricsFile, read_metrics
from executor.restart_loop import RestartLoop
from executor.run import Ended
from rlhfsim.cli.main import cli
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import read_plan, write_plan
from rlhfsim.run_folder import inputs_folder
from rlhfsim.trace import Trace, write_trace

ITERATIONS, PROMPTS = 5, 8
SETTINGS = {
    "iterations": ITERATIONS,
    "data": {"path": "d.jsonl", "answer_column": "solution"},
    "rewards": [{"kind": "function", "target": "own_reward:score"}],
    "optimizer": {"learning_rate": 1e-3},
}
REWARD = "def score(prompt, response, answer, meta):\n    return float(response == answer)\n"


class Killed(BaseException):
    """By the scheduler."""


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """`done`: iterations after which the run is killed."""
    stop = {"done": 10**9}

    def until_the_end(loop: RestartLoop, newest: checkpoints.Checkpoint | None) -> Ended:
        run, state = loop.run, newest.progress.rng["state"] if newest else ""
        rows = list(newest.progress.metrics) if newest else []
        settings, first = run.job.settings, len(rows)
        metrics = MetricsFile(run.files.metrics, first)
        for step in range(first, settings.iterations):
            seen = [(p.prompt, p.answer) for p in run.prompter.source.batch(step * PROMPTS, PROMPTS)]
            state = hashlib.sha256(f"{state}{seen}{settings.optimizer.learning_rate}".encode()).hexdigest()
            rows.append({"value": float(int(state[:6], 16))})
            metrics.log(step, rows[-1])
            _save(run, len(rows), state, rows)
            if len(rows) == stop["done"]:
                raise Killed
        trace = Trace(
            source="measured", rlhfsim_version="0", plan_hash="", steps=max(1, len(rows) - first), spans=()
        )
        write_trace(run.files.trace, trace)
        return Ended(trace=trace, rows=tuple(rows), evaluations={})

    monkeypatch.setattr(RestartLoop, "until_the_end", until_the_end)
    return stop


def _save(run: Any, done: int, state: str, rows: list[Any]) -> None:
    def write(folder: Path) -> None:
        for role, shape in owner.world.items():
            for rank in range(shape["ranks"]):
                (folder / role / f"rank-{rank}").write_text(state)

    owner = checkpoints.identity(run.job.plan, settings_hash(run.job.settings), run.contents)
    progress = checkpoints.RunProgress(
        iteration=done, weight_version=done, data_position={}, rng={"state": state}, metrics=tuple(rows)
    )
    checkpoints.begin(run.files.checkpoints, progress, owner, write, keep=2)()


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with plan, settings, data, model and reward function, and no run."""
    shutil.copytree(tiny_model, tmp_path / "model")
    write_plan(tmp_path / "plan.json", runs.plan("hybrid", "grpo", tmp_path / "model"))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(SETTINGS))
    (tmp_path / "own_reward.py").write_text(REWARD)
    rows = [{"prompt": f"{i}+1=", "solution": str(i + 1)} for i in range(40)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


DOCUMENTED = ("plan.json", "--model", "model", "--settings", "run.yaml", "--out", "run", "--resume")


def _launch(*arguments: str) -> None:
    cli.main(["launch", *arguments], standalone_mode=False)


def _state(folder: Path = Path("run")) -> str:
    newest = checkpoints.newest(folder / "checkpoints")
    assert newest is not None
    return str(newest.progress.rng["state"])


def _inputs(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("plan.json", "settings.yaml", "contents.json")}


def test_the_documented_line_starts_goes_on_and_is_done(
    place: Path, stop_after: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    _launch(*[a if a != "run" else "undisturbed" for a in DOCUMENTED])
    stop_after["done"] = 2
    with pytest.raises(Killed):
        _launch(*DOCUMENTED)
    before = _inputs(place / "run")
    stop_after["done"] = 4
    with pytest.raises(Killed):
        _launch(*DOCUMENTED)
    stop_after["done"] = 10**9
    _launch(*DOCUMENTED)
    assert _state() == _state(place / "undisturbed")
    assert [int(row["step"]) for row in read_metrics(place / "run" / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    written = {p: p.stat().st_mtime_ns for p in (place / "run" / "checkpoints").rglob("*")}
    _launch(*DOCUMENTED)
    assert "has done its 5 iterations" in " ".join(capsys.readouterr().out.split())
    assert {p: p.stat().st_mtime_ns for p in (place / "run" / "checkpoints").rglob("*")} == written
    assert _inputs(place / "run") == before
    assert not (place / "run" / "amendments").exists()


def test_a_kill_before_the_trace_was_written_leaves_a_run_that_is_done(
    place: Path, stop_after: dict[str, int]
) -> None:
    stop_after["done"] = ITERATIONS
    with pytest.raises(Killed):
        _launch(*DOCUMENTED)
    _launch(*DOCUMENTED)
    assert (place / "run" / "trace.json").is_file()


@pytest.mark.parametrize(
    "line", [("--resume", "run"), ("plan.json", "--out", "run", "--resume"), ("run", "--resume")]
)
def test_the_folder_alone_has_everything(
    line: tuple[str, ...], place: Path, stop_after: dict[str, int]
) -> None:
    stop_after["done"] = 2
    with pytest.raises(Killed):
        _launch(*DOCUMENTED)
    stop_after["done"] = 10**9
    _launch(*line)
    _launch(*[a if a != "run" else "undisturbed" for a in DOCUMENTED])
    assert _state() == _state(place / "undisturbed")


def test_a_run_goes_on_from_another_directory(
    place: Path, stop_after: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after["done"] = 2
    line = (*DOCUMENTED, "--set", "rewards=[{kind: digits}]")
    with pytest.raises(Killed):
        _launch(*line)
    stop_after["done"] = 10**9
    monkeypatch.chdir(place.parent)
    _launch("--resume", str(place / "run"))
    assert len(read_metrics(place / "run" / "metrics.jsonl")) == ITERATIONS


def test_more_iterations_extend_the_run_and_are_recorded(place: Path, stop_after: dict[str, int]) -> None:
    _launch(*DOCUMENTED)
    before = _inputs(place / "run")
    _launch("--resume", "run", "--iterations", "8")
    assert _inputs(place / "run") == before
    entry = yaml.safe_load((place / "run" / "amendments" / "0001.yaml").read_text())
    assert entry["after_iteration"] == ITERATIONS
    [change] = entry["changes"]
    assert (change["part"], change["what"]) == ("iterations", ["iterations was 5, is 8"])
    assert change["from"] != change["to"]
    longer = [*[a if a != "run" else "undisturbed" for a in DOCUMENTED], "--iterations", "8"]
    _launch(*longer)
    assert _state() == _state(place / "undisturbed")
    _launch("--resume", "run")  # eight from now on
    assert len(list((place / "run" / "amendments").glob("*.yaml"))) == 1


def _other_rows(place: Path) -> tuple[str, ...]:
    path = place / "d.jsonl"
    path.write_text(path.read_text().replace('"solution": "7"', '"solution": "8"'))
    return ()


def _other_weights(place: Path) -> tuple[str, ...]:
    path = place / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return ()


def _other_code(place: Path) -> tuple[str, ...]:
    (place / "own_reward.py").write_text(REWARD.replace("==", "!="))
    return ()


def _other_plan(place: Path) -> tuple[str, ...]:
    layout = {"dp": 1, "zero": 0, "micro_batch": 4, "recompute": "none"}
    write_plan(place / "plan.json", runs.plan("hybrid", "grpo", place / "model", layout=layout))
    return ()


def _edited_plan(place: Path) -> tuple[str, ...]:
    """By hand: the hash in it is as before."""
    data = json.loads((place / "plan.json").read_text())
    data["placement"]["actor"]["layout"]["micro_batch"] = 4
    (place / "plan.json").write_text(json.dumps(data))
    return ()


def _set(pair: str) -> Callable[[Path], tuple[str, ...]]:
    return lambda place: ("--set", pair)


CHANGES = {
    "rows": ("data", _other_rows, "the rows differ"),
    "column": ("data", _set("data.shuffle=false"), "data.shuffle was true, is false"),
    "weights": ("model", _other_weights, "the files of a model differ"),
    "code": ("rewards", _other_code, "the code of a function differ"),
    "rule": ("rewards", _set("rewards=[{kind: digits}]"), "rewards was"),
    "plan": ("plan", _other_plan, "micro_batch was 8, is 4"),
    "edited plan": ("plan", _edited_plan, "micro_batch was 8, is 4"),
    "rate": ("settings", _set("optimizer.learning_rate=1e-2"), "learning_rate was 0.001, is 0.01"),
}


@pytest.mark.parametrize(("part", "change", "words"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_refused_and_with_its_name_recorded(
    part: str, change: Callable[[Path], tuple[str, ...]], words: str, place: Path, stop_after: dict[str, int]
) -> None:
    stop_after["done"] = 2
    with pytest.raises(Killed):
        _launch(*DOCUMENTED)
    before = _inputs(place / "run")
    options = change(place)
    with pytest.raises(RlhfsimError) as caught:
        _launch(*DOCUMENTED, *options)
    assert caught.value.code == "run-changed"
    assert f"{part}: " in caught.value.message
    assert words in caught.value.message
    assert f"--change {part}" in str(caught.value.help)
    assert _inputs(place / "run") == before
    assert not (place / "run" / "amendments").exists()
    stop_after["done"] = 3
    with pytest.raises(Killed):
        _launch(*DOCUMENTED, *options, "--change", part)
    entry = yaml.safe_load((place / "run" / "amendments" / "0001.yaml").read_text())
    assert (entry["number"], entry["after_iteration"]) == (1, 2)
    [recorded] = entry["changes"]
    assert recorded["part"] == part
    assert recorded["from"] != recorded["to"]
    assert any(words in text for text in recorded["what"])
    assert _inputs(place / "run") == before
    stop_after["done"] = 10**9
    _launch("--resume", "run")  # the amended inputs count, and nothing is another than they
    assert len(list((place / "run" / "amendments").glob("*.yaml"))) == 1
    assert read_plan(inputs_folder(place / "run") / "plan.json").to_dict() is not None


def test_every_checkpoint_has_the_hashes_of_data_model_and_rewards(
    place: Path, stop_after: dict[str, int]
) -> None:
    _launch(*DOCUMENTED)
    newest = checkpoints.newest(place / "run" / "checkpoints")
    assert newest is not None
    assert newest.identity.contents == json.loads((place / "run" / "contents.json").read_text())
    assert set(newest.identity.contents) == {"data", "model", "rewards", "settings"}


def test_settings_that_are_named_again_as_they_were_are_no_change(
    place: Path, stop_after: dict[str, int]
) -> None:
    stop_after["done"] = 2
    with pytest.raises(Killed):
        _launch(*DOCUMENTED)
    (place / "part.yaml").write_text("optimizer: {learning_rate: 0.001}\n")
    stop_after["done"] = 10**9
    _launch("--resume", "run", "--settings", "part.yaml", "--set", "data.path=./d.jsonl", "--change", "data")
    assert not (place / "run" / "amendments").exists()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (("--resume", "nowhere-folder"), "nothing-to-resume"),
        (("plan.json", "--out", "run", "--change", "data"), "bad-option"),
        (("--resume", "nowhere-folder", "--out", "other"), "bad-option"),
        (("plan.json", "--out", "run", "--resume", "--change", "dat"), "unknown-part-of-a-run"),
    ],
)
def test_what_cannot_go_on_is_refused(
    line: tuple[str, ...], code: str, place: Path, stop_after: dict[str, int]
) -> None:
    (place / "nowhere-folder").mkdir()
    with pytest.raises(RlhfsimError) as caught:
        _launch(*line)
    assert caught.value.code == code
    assert not (place / "run").exists()


def test_ranks_that_cannot_read_the_checkpoint_are_refused_before_anything_is_recorded(
    place: Path, stop_after: dict[str, int]
) -> None:
    stop_after["done"] = 2
    with pytest.raises(Killed):
        _launch(*DOCUMENTED)
    layout = {"dp": 1, "tp": 2, "zero": 0, "micro_batch": 8, "recompute": "none"}
    write_plan(place / "plan.json", runs.plan("hybrid", "grpo", place / "model", layout=layout))
    with pytest.raises(RlhfsimError, match=r"actor\.tp was 1, is 2") as caught:
        _launch(*DOCUMENTED, "--change", "plan")
    assert caught.value.code == "checkpoint-of-other-ranks"
    assert not (place / "run" / "amendments").exists()


def test_more_data_parallel_ranks_go_on_once_the_plan_may_change(
    place: Path, stop_after: dict[str, int]
) -> None:
    stop_after["done"] = 2
    with pytest.raises(Killed):
        _launch(*DOCUMENTED)
    stop_after["done"] = 10**9
    layout = {"dp": 2, "zero": 0, "micro_batch": 8, "recompute": "none"}
    write_plan(place / "plan.json", runs.plan("hybrid", "grpo", place / "model", layout=layout))
    with pytest.raises(RlhfsimError, match=r"actor\.layout\.dp was 1, is 2"):
        _launch(*DOCUMENTED)
    _launch(*DOCUMENTED, "--change", "plan")
    assert len(read_metrics(place / "run" / "metrics.jsonl")) == ITERATIONS
