"""When a run saves, and how it stops when it is asked to."""

from __future__ import annotations

import io
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from executor.coordination import cluster, saving
from executor.coordination.checkpoints import Checkpoint, RunIdentity, RunProgress, best_of, newest
from executor.coordination.failures import PartFailed
from executor.coordination.saving import Saver, SaveTimes, ended_by_sigterm, stop_requests

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


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
            with pytest.raises(ends):
                stop.follow()
            os.kill(os.getpid(), number)
        assert acted == [number]
        os.kill(os.getpid(), number)
        assert acted == [number, number]
        assert len(said) == 1
        assert number.name in said[0]
    finally:
        signal.signal(number, before)


class Preempted(io.RawIOBase):
    """A stream during whose first write the process gets a SIGTERM."""

    def __init__(self) -> None:
        self.written = b""

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        if not self.written:
            signal.raise_signal(signal.SIGTERM)
        self.written += bytes(data)
        return len(bytes(data))


def test_a_signal_that_comes_while_a_line_is_printed_is_heard_and_said() -> None:
    stream = Preempted()
    console = Console(file=io.TextIOWrapper(io.BufferedWriter(stream), encoding="utf-8"))
    with stop_requests(console.print) as stop:
        console.print("the first iteration")
        with pytest.raises(SystemExit):
            stop.follow()
    assert b"the first iteration" in stream.written
    assert b"SIGTERM: the run saves its state" in stream.written


class Ranks:
    """One rank, which writes in a thread when it is let."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may, self.error = threading.Event(), error
        self.asked = list[bool]()
        self._thread = threading.Thread()

    def save(self, folder: Path, *, background: bool = False) -> None:
        def work() -> None:
            if background:
                self.may.wait(10)
            with suppress(FileNotFoundError):  # given up
                (folder / "actor" / "rank-0.bin").write_bytes(b"state")

        self.asked.append(background)
        self._thread = threading.Thread(target=work)
        self._thread.start()
        if not background:
            self._thread.join()

    def written(self) -> bool:
        if self.may.is_set() and self.error is not None:
            raise self.error
        return not self._thread.is_alive()


WHOSE = RunIdentity(plan_hash="a", settings_hash="s", world={"actor": {"ranks": 1}})


def progress(iteration: int, score: float | None = None) -> RunProgress:
    return RunProgress(iteration=iteration, weight_version=0, data_position={}, rng={}, score=score)


def saver(
    root: Path, said: Callable[[str], None], done: Callable[[Checkpoint], None], keep: int = 1
) -> Saver:
    return Saver(root=root, keep=keep, best=True, background=True, say=said, done=done)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_sigterm_while_nothing_is_trained_ends_the_run_with_the_exit_code_of_shells() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def hit() -> None:
        with ended_by_sigterm():
            with stop_requests(lambda text: None):
                pass
            with suppress(SystemExit):
                signal.raise_signal(signal.SIGTERM)
            raise SystemExit(1)  # what a call of Ray makes of it

    with pytest.raises(SystemExit) as ended:
        hit()
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_checkpoint_is_written_beside_the_next_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "WRITTEN_S", 0.001)
    said, done, ranks = list[str](), list[Checkpoint](), Ranks()
    saves = saver(tmp_path, said.append, done.append)
    saves.save(progress(1), WHOSE, ranks, last=False)
    saves.look()  # the run goes on while the rank writes
    assert saves.busy
    assert newest(tmp_path) is None
    [unfinished] = names(tmp_path)
    assert unfinished.startswith(".unfinished-step-000001")
    ranks.may.set()
    saves.save(progress(2), WHOSE, ranks, last=True)  # waits for the one before, then for its own
    assert (ranks.asked, said) == ([True, False], [])
    assert [one.progress.iteration for one in done] == [1, 2]
    assert names(tmp_path) == ["step-000002"]


@pytest.mark.parametrize(
    "error", [PartFailed("actor rank 0", "raised", "[Errno 28] No space left on device"), ValueError("odd")]
)
def test_an_error_in_the_background_is_said_and_counted_and_the_next_save_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(saving, "WRITTEN_S", 0.001)
    said, done, ranks = list[str](), list[Checkpoint](), Ranks()
    saves = saver(tmp_path, said.append, done.append)
    saves.save(progress(1), WHOSE, ranks, last=True)
    ranks.may.set()
    ranks.error = error
    saves.save(progress(2), WHOSE, ranks, last=False)
    saves.look(wait=True)
    assert (saves.failures, saves.again, saves.busy) == (1, True, False)
    assert "iteration 2 was not written" in said[0]
    assert ("no space left on device" if isinstance(error, PartFailed) else "odd") in said[0]
    assert names(tmp_path) == ["step-000001"]  # the last whole one, and nothing half-written
    saves.save(progress(3), WHOSE, ranks, last=False)
    assert (ranks.asked, saves.again) == ([False, True, False], False)
    assert names(tmp_path) == ["step-000003"]


def test_an_attempt_that_ends_leaves_the_last_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "WRITTEN_S", 0.001)
    done, ranks = list[Checkpoint](), Ranks()
    saves = saver(tmp_path, lambda _: None, done.append)
    saves.save(progress(1), WHOSE, ranks, last=True)
    saves.save(progress(2), WHOSE, ranks, last=False)
    saves.abandon()
    saves.close()
    assert [one.progress.iteration for one in done] == [1]
    assert names(tmp_path) == ["step-000001"]
    ranks.may.set()


def test_best_and_newest_stay(tmp_path: Path) -> None:
    saves = saver(tmp_path, lambda _: None, lambda _: None, keep=2)
    for iteration, score in enumerate([0.2, 0.7, None, 0.7, 0.5, None, 0.1], 1):
        if score is not None:
            assert saves.improves(score) == (iteration in (1, 2))
        saves.save(progress(iteration, score), WHOSE, Ranks(), last=True)
    assert names(tmp_path) == ["step-000004", "step-000006", "step-000007"]
    assert best_of(tmp_path) == (tmp_path / "step-000004", 0.7)
    (tmp_path / "step-000004" / "manifest.json").unlink()
    assert best_of(tmp_path) == (tmp_path / "step-000007", 0.1)  # what is not whole is no best


def test_a_sigterm_while_ray_starts_has_the_exit_code_of_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def terminated(*_: object) -> str:  # as the handler that Ray sets
        raise SystemExit(signal.SIGTERM)

    monkeypatch.setattr(cluster, "connect", terminated)
    with pytest.raises(SystemExit) as ended, cluster.joined(None, None, {}, 1.0):  # type: ignore[arg-type]
        pass
    assert ended.value.code == 128 + signal.SIGTERM


LAST_MOMENTS = {
    "the slots are given back": "reserve",
    "Ray shuts down": "shutdown",
    "its logs are copied": "session_logs",
}


@pytest.mark.parametrize("moment", LAST_MOMENTS)
def test_a_sigterm_in_the_last_moments_of_a_run_has_the_exit_code_of_any_other(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, hits = signal.getsignal(signal.SIGTERM), LAST_MOMENTS[moment]

    def ray_starts(**_: object) -> None:  # sets the handler that Ray sets for a driver
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))

    def hit(name: str) -> Callable[..., None]:
        return lambda *_: signal.raise_signal(signal.SIGTERM) if name == hits else None

    slots = SimpleNamespace(release=hit("reserve"))
    monkeypatch.setattr(cluster.ray, "init", ray_starts)
    monkeypatch.setattr(cluster.ray, "shutdown", hit("shutdown"))
    monkeypatch.setattr(cluster, "session_logs", hit("session_logs"))
    monkeypatch.setattr(cluster, "places", lambda _: [(0, 0)])
    monkeypatch.setattr(cluster, "check", lambda *_: None)
    monkeypatch.setattr(cluster, "reserve", lambda *_: slots)
    monkeypatch.setattr(cluster, "keep_private", lambda **_: None)
    with (
        pytest.raises(SystemExit) as ended,
        cluster.joined(None, None, {}, 1.0, logs=Path()),  # type: ignore[arg-type]
    ):
        pass
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before  # not Ray's, which ends the process with 15
