"""Work in forked processes, and where nothing is forked."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.search import parallel
from rlhfsim.search.parallel import beside, forked, mapped, may_fork, serial

AFTER_RAY = """
import ray
from rlhfsim.search.parallel import mapped, may_fork
assert may_fork()
ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
ray.shutdown()
assert not may_fork()
assert mapped(lambda x: x * x, range(3)) == [0, 1, 4]
"""


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes whatever the machine and the threads of other tests."""
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    monkeypatch.setattr(parallel, "may_fork", lambda: not parallel.ALONE.get())


@pytest.fixture
def threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for the kernel's list of the threads of a process called python, whose main thread is 1."""
    monkeypatch.setattr(parallel, "THREADS", tmp_path / "task")
    for task in (tmp_path, tmp_path / "task" / "1", tmp_path / "task" / "2"):
        task.mkdir(parents=True, exist_ok=True)
        (task / "comm").write_text("python\n")
    return tmp_path / "task"


@pytest.mark.usefixtures("two")
def test_results_come_in_order_from_other_processes() -> None:
    found = mapped(lambda x: (x, os.getpid()), range(20))
    assert [x for x, _ in found] == list(range(20))
    assert os.getpid() not in {process for _, process in found}
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("two")
def test_a_process_forks_none_itself() -> None:
    nested = mapped(lambda _: mapped(lambda _: os.getpid(), range(4)), range(2))
    assert all(len(set(inner)) == 1 for inner in nested)


@pytest.mark.usefixtures("two")
def test_an_error_in_a_process_is_raised_here() -> None:
    with pytest.raises(ZeroDivisionError):
        mapped(lambda x: 1 // x, [1, 0, 2])
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("two")
def test_a_process_that_is_killed_is_told() -> None:
    with pytest.raises(RlhfsimError, match="was ended: signal 9"):
        mapped(lambda _: os.kill(os.getpid(), signal.SIGKILL), range(4))


def test_processes_end_whatever_handlers_they_inherited() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        results = forked(lambda _: signal.pause(), range(2), 2)
        assert next(results) is None
        results.close()  # type: ignore[attr-defined]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert multiprocessing.active_children() == []


def test_threads_named_like_the_process_do_not_forbid_a_fork(threads: Path) -> None:
    assert may_fork()
    with serial():
        assert not may_fork()


def test_threads_of_other_names_forbid_it(threads: Path) -> None:
    (threads / "2" / "comm").write_text("event_engine\n")
    assert not may_fork()


def test_a_thread_that_ends_meanwhile_does_not_count(threads: Path) -> None:
    (threads / "2" / "comm").unlink()
    assert may_fork()


@pytest.mark.slow
def test_nothing_is_forked_once_ray_has_run() -> None:
    pytest.importorskip("ray")
    subprocess.run([sys.executable, "-c", AFTER_RAY], check=True, timeout=120)


def test_two_tasks_side_by_side_are_one_here_and_one_in_a_process_of_its_own(two: None) -> None:
    here, there = beside(os.getpid, os.getpid)
    assert here == os.getpid() != there
    with serial():
        assert beside(os.getpid, os.getpid) == (here, here)


def test_an_error_in_either_of_two_tasks_is_raised(two: None) -> None:
    def fails() -> int:
        raise RlhfsimError("planted", "on purpose")

    for tasks in ((fails, os.getpid), (os.getpid, fails)):
        with pytest.raises(RlhfsimError, match="on purpose"):
            beside(*tasks)
