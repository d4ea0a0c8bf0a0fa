"""A run that is killed again and again, and whose line is submitted again, ends like one that nothing hit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import runs
import survival

from executor.coordination import checkpoints
from executor.coordination.run_folder import settings_text
from executor.coordination.tracking import read_metrics
from executor.launch import LaunchOptions, launch
from executor.settings import Optimizer
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import write_plan

pytestmark = pytest.mark.slow
PATIENCE_S = 240.0
"""For a start on a busy machine."""


def _command(tmp_path: Path, model: Path, folder: Path, address: str) -> list[str]:
    """The command line of the run."""
    write_plan(tmp_path / "plan.json", survival.plan(model))
    (tmp_path / "run.yaml").write_text(settings_text(survival.settings(model)))
    return [
        sys.executable,
        "-m",
        "rlhfsim.cli.main",
        "launch",
        str(tmp_path / "plan.json"),
        "--settings",
        str(tmp_path / "run.yaml"),
        "--out",
        str(folder),
        "--address",
        address,
        "--resume",
    ]


def _hear_interrupts() -> None:
    """A shell lets its background jobs ignore Ctrl-C, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _ended(command: list[str], output: Path, when: Callable[[], bool], how: signal.Signals) -> int:
    """Start, send the signal at the moment `when` comes true; the exit code."""
    with (
        output.open("w") as out,
        subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, preexec_fn=_hear_interrupts
        ) as process,
    ):
        deadline = time.monotonic() + PATIENCE_S
        while not when():
            assert process.poll() is None, output.read_text()[-3000:]
            assert time.monotonic() < deadline, f"the moment did not come: {output.read_text()[-3000:]}"
            time.sleep(0.001)
        os.kill(process.pid, how)
        return process.wait(timeout=60)


def _gone(processes: dict[str, int]) -> None:
    """Ray ends the workers of a driver that is gone, and frees their slots."""
    deadline = time.monotonic() + 30.0
    while left := [part for part, pid in processes.items() if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _steps(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    return [int(row["step"]) for row in read_metrics(path)] if path.exists() else []


def test_killed_run_ends_bit_for_bit_like_an_uninterrupted_one(
    survivor: Path, tiny_model: Path, tmp_path: Path, ray_address: str
) -> None:
    folder = tmp_path / "run"
    command = _command(tmp_path, tiny_model, folder, ray_address)
    saved = folder / "checkpoints"
    # in the middle of the second iteration: nothing is saved yet
    assert (
        _ended(command, tmp_path / "1.txt", lambda: _steps(folder) == [0], signal.SIGKILL) == -signal.SIGKILL
    )
    assert checkpoints.newest(saved) is None
    _gone(survival.processes(folder))
    # while the second checkpoint is written
    writes = lambda: any(saved.glob(".unfinished-step-000004*/actor/*"))  # noqa: E731  one moment
    assert _ended(command, tmp_path / "2.txt", writes, signal.SIGKILL) == -signal.SIGKILL
    assert "it begins again" in (tmp_path / "2.txt").read_text()
    found = checkpoints.newest(saved)
    assert found is not None
    assert found.progress.iteration == 2
    assert list(saved.glob(".unfinished-*"))
    # preempted after the third iteration: the next one ends, and is saved
    three = lambda: _steps(folder)[-1:] == [2]  # noqa: E731
    assert _ended(command, tmp_path / "3.txt", three, signal.SIGTERM) == 128 + signal.SIGTERM
    said = " ".join((tmp_path / "3.txt").read_text().split())
    assert "restoring the state after iteration 2" in said
    assert "SIGTERM: the run saves its state after this iteration" in said
    assert re.search(r"interrupted; resume with --resume: the checkpoint after iteration [34] is whole", said)
    assert not list(saved.glob(".unfinished-*"))
    # to the end, by the folder alone
    alone = [*command[:4], str(folder), "--address", ray_address, "--resume"]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert survival.weights(folder) == survival.weights(survivor)
    assert survival.metrics(folder) == survival.metrics(survivor)
    assert [path.name for path in sorted(saved.iterdir())] == ["step-000004", "step-000006"]


def test_a_finished_run_is_done_and_takes_no_other_settings_without_a_word(
    survivor: Path, tiny_model: Path
) -> None:
    heard, options = runs.Quiet(), LaunchOptions(out=survivor, resume=True)
    ended = launch(survival.plan(tiny_model), survival.settings(tiny_model), options, heard).ended
    assert len(ended.rows) == survival.ITERATIONS
    assert heard.rows == []
    assert "has done its 6 iterations" in heard.phases[-1]
    wanted = replace(survival.settings(tiny_model), optimizer=Optimizer(learning_rate=2e-3))
    with pytest.raises(RlhfsimError, match=r"learning_rate was 0\.001, is 0\.002") as error:
        launch(survival.plan(tiny_model), wanted, options, heard)
    assert error.value.code == "run-changed"


@pytest.mark.long
def test_kills_at_random_moments_leave_no_trace_in_what_is_learnt(
    survivor: Path, tiny_model: Path, tmp_path: Path, ray_address: str
) -> None:
    """KILLS of them (20 unless the environment says so), by SIGKILL and SIGTERM in turn."""
    rng, kills, finished = np.random.default_rng(0), int(os.environ.get("KILLS", "20")), list[Path]()
    folder, hit = tmp_path / "run-0", 0
    while hit < kills or not finished or finished[-1] != folder:
        command = _command(tmp_path, tiny_model, folder, ray_address)
        began, moment = time.monotonic(), rng.uniform(1.0, 90.0) if hit < kills else PATIENCE_S
        how = (signal.SIGKILL, signal.SIGTERM)[hit % 2]
        with (
            (tmp_path / f"{hit}.txt").open("w") as out,
            subprocess.Popen(command, stdout=out, stderr=out) as run,
        ):
            try:
                code = run.wait(moment)
            except subprocess.TimeoutExpired:
                run.send_signal(how)
                code, hit = run.wait(PATIENCE_S), hit + 1
        with (tmp_path / "kills.txt").open("a") as report:
            seconds = time.monotonic() - began
            report.write(f"{folder.name}: {how.name} after {seconds:.1f} s, exit {code}, {_steps(folder)}\n")
        # before Ray is joined SIGTERM ends a process as Python does, later with the exit code that shells have
        assert code in (0, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM), (
            tmp_path / f"{hit}.txt"
        ).read_text()[-3000:]
        if (folder / "scratch" / "processes.json").exists():
            _gone(survival.processes(folder))
        if code == 0:
            finished.append(folder)
            folder = tmp_path / f"run-{len(finished)}" if hit < kills else folder
    for folder in finished:
        assert survival.weights(folder) == survival.weights(survivor)
        assert survival.metrics(folder) == survival.metrics(survivor)
