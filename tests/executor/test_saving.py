"""When a run saves, and how it stops when it is asked to."""

from __future__ import annotations

import math
import os
import signal

import pytest

from executor.coordination import saving
from executor.coordination.saving import SaveTimes, stop_requests


def test_saves_come_by_iterations_or_only_at_the_end() -> None:
    def ends(every: int) -> list[int]:
        times = SaveTimes(every=every, iterations=7, mtbf_s=1.0, cost_s=1.0)
        return [done for done in range(1, 8) if times.due(done)]

    assert (ends(0), ends(3)) == ([7], [3, 6, 7])


def test_by_time_they_follow_what_one_costs_and_how_often_the_job_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(saving.time, "monotonic", lambda: now)
    times = SaveTimes(every=None, iterations=1000, mtbf_s=8e5, cost_s=60.0)
    assert times.interval_s == pytest.approx(math.sqrt(2 * 60 * 8e5))
    assert not times.due(1)
    now += times.interval_s + 1
    assert times.due(2)
    times.saved(15.0)
    assert not times.due(3)
    assert times.interval_s == pytest.approx(math.sqrt(2 * 15 * 8e5))
    now += times.interval_s + 1
    assert times.due(4)


@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_asks_and_the_second_one_acts_as_before(
    number: signal.Signals, ends: type[BaseException]
) -> None:
    said, acted = list[str](), list[int]()
    before = signal.signal(number, lambda n, _: acted.append(n))
    try:
        with stop_requests(said.append) as stop:
            stop.follow()
            os.kill(os.getpid(), number)
            assert number.name in said[0]
            with pytest.raises(ends):
                stop.follow()
            os.kill(os.getpid(), number)
        assert acted == [number]
        os.kill(os.getpid(), number)
        assert acted == [number, number]
        assert len(said) == 1
    finally:
        signal.signal(number, before)
