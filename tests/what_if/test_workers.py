"""Searches in processes of their own and on Ray."""

from __future__ import annotations

import os
import signal

import pytest
from small_scenarios import small

from rlhfsim.errors import RlhfsimError
from rlhfsim.search.request import Request
from rlhfsim.what_if.scenarios import workers
from rlhfsim.what_if.scenarios.answer import asked, whatif
from rlhfsim.what_if.scenarios.designs import DesignResult
from rlhfsim.what_if.scenarios.workers import local, on_ray

SCENARIO = small(grid={"workload.samples": [2, 4, 8]})


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes whatever the threads of other tests."""
    monkeypatch.setattr(workers, "may_fork", lambda: True)


def requests() -> list[Request]:
    return [case.request for case in asked(SCENARIO).everything]


def test_processes_find_what_one_finds() -> None:
    one = whatif(SCENARIO, runner=local(1))
    several = whatif(SCENARIO, runner=local(2))
    assert several.everything == one.everything


@pytest.mark.usefixtures("forks")
def test_an_error_in_a_process_is_the_error_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(request: Request) -> DesignResult:
        raise RlhfsimError("planted", "this fails", help="it must")

    monkeypatch.setattr(workers, "search", fails)
    with pytest.raises(RlhfsimError, match="this fails"):
        list(local(2)(requests()))


@pytest.mark.usefixtures("forks")
def test_a_process_that_is_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(request: Request) -> DesignResult:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    monkeypatch.setattr(workers, "search", dies)
    with pytest.raises(RlhfsimError, match=r"was ended: signal 9 \(SIGKILL\)"):
        list(local(2)(requests()))


@pytest.mark.usefixtures("forks")
def test_whoever_stops_listening_ends_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleeps(request: Request) -> DesignResult:
        signal.pause()
        raise AssertionError

    monkeypatch.setattr(workers, "search", sleeps)
    running = local(2)(requests())
    assert next(running) is None  # both wait for ever
    running.close()  # type: ignore[attr-defined]
    import multiprocessing

    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_ray_finds_what_this_machine_finds() -> None:
    pytest.importorskip("ray")
    one = whatif(SCENARIO, runner=local(1))
    assert whatif(SCENARIO, runner=on_ray()).everything == one.everything


@pytest.mark.slow
def test_a_ray_cluster_that_is_not_there_is_told() -> None:
    pytest.importorskip("ray")
    with pytest.raises(RlhfsimError, match="no Ray cluster"):
        list(on_ray("nowhere")(requests()))
