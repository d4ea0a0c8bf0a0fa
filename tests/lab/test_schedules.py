"""Fifty schedules of faults in the coordination layer end exact; planted faults of ours are found by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from executor.coordination import manifest
from executor.coordination.engine_memory import EngineMemory
from executor.coordination.replica import Returned
from executor.coordination.router import RequestRouter
from lab.schedules.schedule import ASYNCHRONOUS, CASES, schedule, undisturbed

COUNT, COUNT_ASYNCHRONOUS = 50, 24
_GIVEN_BACK, _WOKEN = RequestRouter._given_back, EngineMemory.for_generation


def _lost(requests: RequestRouter, *asked: Any) -> Returned:
    """Without the first."""
    back = _GIVEN_BACK(requests, *asked)
    return back._replace(requests=back.requests[1:])


def _unsent(memory: EngineMemory, step: int) -> None:
    """As if a sleep had kept the weights."""
    memory._lost = False
    _WOKEN(memory, step)


@pytest.fixture(autouse=True, scope="module")
def measured() -> None:
    """Undisturbed runs, which say when faults may come, are measured once: before any fault is planted."""
    for name in (*CASES, *ASYNCHRONOUS):
        undisturbed(name)


@pytest.mark.parametrize("first", range(0, COUNT, 10))
def test_schedules_end_with_the_bits_of_an_undisturbed_run_and_every_refusal_has_its_reason(
    first: int,
) -> None:
    wrong = [(o.seed, o.wrong) for o in map(schedule, range(first, first + 10)) if o.wrong]
    assert not wrong, "again, one by one: python -m lab.schedules --seed SEED --count 1"


def test_asynchronous_schedules_train_each_group_once_on_tokens_that_are_young_enough() -> None:
    outcomes = (schedule(seed, tuple(ASYNCHRONOUS)) for seed in range(COUNT_ASYNCHRONOUS))
    wrong = [(o.seed, o.wrong) for o in outcomes if o.wrong]
    assert not wrong, "again, one by one: python -m lab.schedules --asynchronous --seed SEED --count 1"


@pytest.mark.parametrize(
    ("seed", "broken", "by", "found"),
    [
        (172, "executor.coordination.buffer.Buffer._in_time", lambda *_: True, "thrown away"),
        (21, "executor.algorithms.iteration.Position.__contains__", lambda *_: False, "groups were trained"),
        (0, "executor.coordination.buffer.Buffer.oldest_allowed", -9, "oldest allowed"),
        (8, "executor.coordination.router.RequestRouter._given_back", _lost, "run-failed"),
        (4, "executor.coordination.engine_memory.EngineMemory.for_generation", _unsent, "lost weights"),
        (8, "executor.coordination.router.RequestRouter.leave", lambda *_: Returned([], 0), "lost weights"),
    ],
    ids=[
        "old groups find no place",
        "what was trained comes again",
        "any token is young enough",
        "a request that moves is lost",
        "lent slots wake without weights",
        "lent slots keep their requests",
    ],
)
def test_a_planted_fault_of_an_asynchronous_run_is_found(
    seed: int, broken: str, by: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broken, by)
    assert found in schedule(seed, tuple(ASYNCHRONOUS)).wrong


@pytest.mark.parametrize("seed", [1028, 1135, 1452])
def test_seeds_that_once_lost_metrics_in_a_power_failure_keep_them(seed: int) -> None:
    assert not schedule(seed).wrong


def test_a_schedule_follows_from_its_seed_alone() -> None:
    first, second = schedule(3), schedule(3)
    assert first.endings == second.endings
    assert first.wrong == second.wrong == ""


@pytest.mark.parametrize(
    ("seeds", "broken", "by"),
    [
        ((28, 57, 60, 125, 165, 205, 221), "lab.schedules.disk.Disk._fsync", lambda self, handle: None),
        (
            (37, 45, 83, 321),
            "executor.coordination.checkpoints.problems",
            lambda *_, **__: manifest.problems(*_, contents=False),
        ),
        ((6,), "executor.coordination.amendments.check_allowed", lambda *_: None),
        (
            (6,),
            "executor.restart_loop.RestartLoop._stopped",
            lambda self, error: error.__cause__ or OSError(),
        ),
    ],
    ids=["nothing is synced", "bytes are not verified", "inputs are not compared", "no reason is given"],
)
def test_a_planted_fault_of_ours_is_found(
    seeds: Sequence[int], broken: str, by: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a lost byte or a flipped bit falls depends on the length of files: several seeds, each likely."""
    monkeypatch.setattr(broken, by)
    assert any(schedule(seed).wrong for seed in seeds)
