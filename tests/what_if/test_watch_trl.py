"""TRL really trains here, is killed, goes on from its checkpoint, and its log is rotated meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from executor.tasks import tiny
from rlhfsim.what_if.watch import Event, JobWatch, Judgement, Notice
from tests.what_if import trl_job

KILLED_AT = 7


def run(folder: Path, log: Path, watches: list[JobWatch], *arguments: str) -> list[list[Event]]:
    """The job; every line that it prints is appended to its log, and seen at once."""
    said: list[list[Event]] = [[] for _ in watches]
    command = [sys.executable, trl_job.__file__, str(folder), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            with log.open("a") as file:
                file.write(line)
            for watch, events in zip(watches, said, strict=True):
                events += watch.look(0.0)
    return said


@pytest.mark.parallel
@pytest.mark.slow
def test_a_job_of_trl_is_watched_while_it_is_killed_resumed_and_its_log_rotated(tmp_path: Path) -> None:
    tiny.build(tmp_path / "model", layers=1)
    log = tmp_path / "job.log"
    console, folder = JobWatch(log), JobWatch(tmp_path / "out")
    assert [type(event) for event in console.look(0.0)] == [Notice]
    printed, _ = run(tmp_path, log, [console, folder], str(KILLED_AT))
    (first,) = [event for event in printed if isinstance(event, Judgement)]
    assert (first.framework.name, first.found.steps) == ("trl", 5)
    log.rename(tmp_path / "job.log.1")
    run(tmp_path, log, [console, folder])
    for watch in (console, folder):
        [*watch.look(1.0), *watch.look(2.0)]
    assert console.found is not None
    assert folder.found is not None
    # TRL's console has no step: its lines are counted, and the seventh step came twice
    assert console.found.logged == trl_job.STEPS + 1
    assert folder.found.logged == trl_job.STEPS
    state = tmp_path / "out" / f"checkpoint-{trl_job.STEPS}" / "trainer_state.json"
    seconds = [row.get("step_time", 0.0) for row in json.loads(state.read_text())["log_history"]]
    assert folder.found.step.measured_s is not None
    assert 0 < folder.found.step.measured_s <= max(seconds)
