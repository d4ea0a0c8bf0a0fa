"""Searches in processes of their own and on Ray."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_scenarios import small

from rlhfsim.errors import RlhfsimError
from rlhfsim.search.request import Request
from rlhfsim.what_if.scenarios import workers
from rlhfsim.what_if.scenarios.answer import asked, whatif
from rlhfsim.what_if.scenarios.designs import DesignResult, Designs
from rlhfsim.what_if.scenarios.workers import local, on_ray

SCENARIO = small(grid={"workload.samples": [2, 4, 8]})


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes whatever the threads of other tests."""
    monkeypatch.setattr(workers, "may_fork", lambda: True)


def requests() -> list[Request]:
    return [case.request for case in asked(SCENARIO).everything]


def test_processes_find_what_one_finds() -> None:
    one = whatif(SCENARIO, Designs(local(1)))
    several = whatif(SCENARIO, Designs(local(2)))
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
    one = whatif(SCENARIO, Designs(local(1)))
    with on_ray() as runner:
        assert whatif(SCENARIO, Designs(runner)).everything == one.everything


@pytest.mark.slow
def test_a_ray_cluster_that_is_not_there_is_told() -> None:
    pytest.importorskip("ray")
    with pytest.raises(RlhfsimError, match="no Ray cluster"), on_ray("nowhere") as runner:
        list(runner(requests()))


class Counted:
    """What searches need of Ray: tasks end in the order in which they were sent."""

    def __init__(self) -> None:
        self.waiting, self.most, self.starts = list[Any](), 0, 0

    def is_initialized(self) -> bool:
        return self.starts > 0

    def init(self, **_: Any) -> None:
        self.starts += 1

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def remote(self, **_: Any) -> Any:
        return lambda function: SimpleNamespace(remote=lambda given: self._sent(function, given))

    def _sent(self, function: Any, given: Any) -> Any:
        self.waiting.append(ran := (lambda: function(given)))
        self.most = max(self.most, len(self.waiting))
        return ran

    def wait(self, pending: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        first = self.waiting.pop(0)
        return [first], [one for one in pending if one is not first]

    def get(self, one: Any) -> Any:
        return one()

    def shutdown(self) -> None:
        self.starts = -self.starts


def test_one_ray_session_serves_all_batches_and_few_tasks_wait(
    monkeypatch: pytest.MonkeyPatch, planted: Any
) -> None:
    ray = Counted()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(workers, "need", lambda *_, **__: None)
    found = next(planted(lambda request: 1.0)([requests()[0]]))[1]
    monkeypatch.setattr(workers, "search", lambda request: found)
    with on_ray() as runner:
        for _ in range(3):
            steps = [step for step in runner(requests() * 25) if step is not None]
            assert sorted(i for i, _ in steps) == list(range(100))
        assert ray.starts == 1
    assert ray.starts == -1
    assert ray.most == workers.AHEAD * 2


@pytest.mark.slow
@pytest.mark.long
def test_a_lost_node_of_a_ray_cluster_changes_no_byte(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    grid = small(grid={"workload.samples": [2, 4, 8], "workload.prompts": [16, 32, 64, 128]})
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    lost = cluster.add_node(num_cpus=1)
    kept = list[DesignResult]()
    try:
        with on_ray(cluster.address) as runner:

            def watched(requests: Sequence[Request]) -> Iterator[tuple[int, DesignResult] | None]:
                for step in runner(requests):
                    kept.extend([] if step is None else [step[1]])
                    if len(kept) == 3:
                        cluster.remove_node(lost, allow_graceful=False)
                    yield step

            whatif(grid, Designs(watched)).write(tmp_path / "ray.csv")
    finally:
        ray.shutdown()
        cluster.shutdown()
    whatif(grid, Designs(local(2))).write(tmp_path / "here.csv")
    assert (tmp_path / "ray.csv").read_bytes() == (tmp_path / "here.csv").read_bytes()
