"""A run that is killed again and again, and whose line is submitted again, ends like one that nothing hit."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import runs
import survival
import torch

from executor.coordination import checkpoints
from executor.coordination.run_folder import settings_text
from executor.coordination.tracking import read_metrics
from executor.launch import LaunchOptions, launch
from executor.settings import Checkpoints, Optimizer
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import write_plan
from rlhfsim.trace import read_trace

pytestmark = pytest.mark.slow
PATIENCE_S = 240.0
"""For a start on a busy machine."""
SIGNALS = (signal.SIGTERM, signal.SIGKILL)
GRACE_S = 30.0
"""Between SIGTERM and SIGKILL: Slurm's KillWait."""


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


def test_a_training_span_tells_forward_loss_backward_and_update_apart(survivor: Path) -> None:
    spans = [span for span in read_trace(survivor / "trace.json").spans if span.name == "actor.train"]
    assert len(spans) >= survival.ITERATIONS
    for span in spans:
        parts = [span.attributes[f"{part}_s"] for part in ("forward", "loss", "backward", "update")]
        assert all(isinstance(part, float) and part > 0 for part in parts)
        assert sum(map(float, parts)) <= span.seconds
        assert float(parts[1]) < float(parts[0]) + float(parts[2])  # a tiny model's loss is its smallest part


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


def _preempt(run: subprocess.Popen[bytes], how: signal.Signals, everybody: bool) -> int:
    """End a job: its first process, or all of them as Slurm does; what ignores SIGTERM is killed afterwards."""
    asked = psutil.Process(run.pid)
    hit = [asked, *asked.children(recursive=True)] if everybody else [asked]
    for number in (how, signal.SIGKILL):
        for process in hit:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = run.wait(GRACE_S)
            psutil.wait_procs(hit, GRACE_S)
            return code
    raise AssertionError("a killed process lives on")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_twenty_preemptions_at_random_moments_leave_no_trace_in_what_is_learnt(
    tiny_model: Path, tmp_path: Path
) -> None:
    """KILLS of them, and their seed, unless the environment says so: RLHFSIM_KILLS=20, RLHFSIM_SEED=0."""
    kills, seed = (int(os.environ.get(f"RLHFSIM_{name}", n)) for name, n in (("KILLS", 20), ("SEED", 0)))
    iterations = 30
    rng, report = np.random.default_rng(seed), tmp_path / "kills.txt"
    write_plan(tmp_path / "plan.json", runs.plan("naive", "grpo", tiny_model))
    every_step = Checkpoints(every=1, keep=2)
    wanted = runs.settings(tiny_model, iterations=iterations, checkpoints=every_step)
    (tmp_path / "run.yaml").write_text(settings_text(wanted))

    def job(folder: Path, output: Path) -> subprocess.Popen[bytes]:
        line = f"launch plan.json --settings run.yaml --out {folder.name} --resume"
        command = [sys.executable, "-m", "rlhfsim.cli.main", *line.split()]
        with output.open("w") as out:
            return subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out)

    assert job(tmp_path / "undisturbed", tmp_path / "undisturbed.txt").wait() == 0
    hit, runs_done = 0, list[Path]()
    while True:
        folder = tmp_path / f"run-{len(runs_done)}"
        output = tmp_path / f"submission-{hit}-{len(runs_done)}.txt"
        # while it starts, or while it iterates and saves
        starting, how, everybody = rng.random() < 0.3, SIGNALS[rng.integers(2)], bool(rng.integers(2))
        delay, before = rng.uniform(0.0, 20.0 if starting else 8.0), _steps(folder)
        run = job(folder, output)
        while run.poll() is None and not starting and _steps(folder) in ([], before):
            time.sleep(0.05)
        try:
            code, word = run.wait(delay if hit < kills else None), "not hit"
        except subprocess.TimeoutExpired:
            code, hit = _preempt(run, how, everybody), hit + 1
            when = "start" if starting else "first iteration"
            word = f"{how.name} to {'all' if everybody else 'one'} {delay:.1f} s after its {when}"
        with report.open("a") as lines:
            lines.write(f"{folder.name}: {word}, exit {code}, {len(_steps(folder))} iterations\n")
        assert code != 2, output.read_text()[-3000:]  # never bad input, whatever the moment
        assert code == 0 or word != "not hit", output.read_text()[-3000:]
        if code == 0:
            runs_done.append(folder)
            if hit >= kills:
                break
    for folder in runs_done:
        assert _states(folder, iterations) == _states(tmp_path / "undisturbed", iterations)
        assert survival.metrics(folder) == survival.metrics(tmp_path / "undisturbed")


def _states(folder: Path, iterations: int) -> dict[str, str]:
    """SHA-256 of all that the ranks wrote at the end: weights, optimizer states, the copy for users.

    Without the states of generators that nobody seeds and nothing draws from: they differ in any two runs.
    """
    last = folder / "checkpoints" / f"step-{iterations:06d}"
    found = {}
    for path in sorted(path for path in last.rglob("*") if path.is_file()):
        if path.suffix == ".pt":
            state = torch.load(path, weights_only=True)
            assert {"module", "optimizer", "steps"} <= set(state)
            found[path.relative_to(last).as_posix()] = hashlib.sha256(
                "".join(_leaves(state | {"random": None})).encode()
            ).hexdigest()
        elif path.name not in ("state.json", "manifest.json"):
            found[path.relative_to(last).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _leaves(value: Any, name: str = "") -> Iterator[str]:
    """Every leaf of nested states, tensors by their bytes."""
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, f"{name}.{key}")
    elif isinstance(value, torch.Tensor):
        yield f"{name} {value.dtype} {hashlib.sha256(value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()}"
    else:
        yield f"{name} {value!r}"
