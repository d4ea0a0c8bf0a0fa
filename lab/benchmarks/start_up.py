"""Where the start of a small run goes: seconds and CPU seconds of every phase, and of every kind of process.

    python lab/benchmarks/start_up.py [--trl-python INTERPRETER_WITH_TRL] [--iterations 3]

The plan and the random model of trl_speed.py (hybrid: two training ranks and two vLLM replicas on two slots). CPU
seconds are those of this process and all below it; on a machine that others use too, they are what a change
is judged by. With --trl-python the seconds of TRL's start and first two iterations.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil


@dataclass(slots=True)
class Clock:
    """What every phase took, in the order in which they ended."""

    seconds: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    _last: tuple[float, float] = field(default_factory=lambda: (time.perf_counter(), 0.0))

    def ends(self, phase: str) -> None:
        """What came since the last one was `phase`; a phase ends once."""
        if phase in self.seconds:
            return
        now = time.perf_counter(), sum(cpu_of_processes().values())
        self.seconds[phase], self.cpu_s[phase] = now[0] - self._last[0], now[1] - self._last[1]
        self._last = now


def cpu_of_processes() -> Counter[str]:
    """CPU seconds of this process and of all that live below it, by kind."""
    me = psutil.Process()
    found = Counter[str]({"driver": sum(me.cpu_times()[:2])})
    for process in me.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found[kind_of(" ".join(process.cmdline()))] += sum(process.cpu_times()[:2])
    return found


def kind_of(command: str) -> str:
    """A process of the run, for people."""
    for word, kind in (
        ("ray::Worker", "training ranks"),
        ("ray::Replica", "rollout replicas"),
        ("ray::IDLE", "idle workers of Ray"),
        ("ray::", "Ray's daemons"),
        ("/ray/", "Ray's daemons"),
    ):
        if word in command:
            return kind
    return "reward processes"


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", help="interpreter of TRL's environment")
    parser.add_argument("--iterations", type=int, default=3)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        case, listener = measure(Path(folder), options.iterations, clock)
        print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
        print(f"{'phase':44}{'s':>8}{'CPU s':>8}")
        for phase, seconds in clock.seconds.items():
            print(f"{phase:44}{seconds:8.2f}{clock.cpu_s[phase]:8.2f}")
        print(f"{'all':44}{sum(clock.seconds.values()):8.2f}{sum(clock.cpu_s.values()):8.2f}")
        further = listener.seconds[1:] or listener.seconds
        print(f"an iteration after the first: {statistics.median(further):.2f} s")
        by_process("until the first iteration is done", listener.first, 1)
        by_process("an iteration", listener.last - listener.first, max(1, len(listener.seconds) - 1))
        if options.trl_python:
            from trl_speed import Theirs, prepare

            theirs = Theirs(options.trl_python, Path(folder))
            prepare(Path(folder), case)
            print(f"TRL with its first two iterations: {theirs.start():.1f} s")
            theirs.close()


def by_process(what: str, cpu_s: Counter[str], count: int) -> None:
    """A line of CPU seconds by kind of process."""
    parts = ", ".join(f"{kind} {seconds / count:.2f}" for kind, seconds in cpu_s.most_common())
    print(f"CPU s, {what}: {parts}")


def measure(folder: Path, iterations: int, clock: Clock) -> tuple[Any, _Listener]:
    """One run; its case, and what was heard of it."""
    import trl_speed

    from executor.launch import LaunchOptions, launch

    clock.ends("imports of the driver")
    case = replace(trl_speed.TINY, iterations=iterations)
    case = trl_speed.prepare(folder, case)
    ours = trl_speed.Ours(folder, case)
    plan, settings = ours._plan(), ours._settings()
    clock.ends("a random model and its plan")
    listener = _Listener(clock)
    with marks(clock):
        launch(plan, settings, LaunchOptions(out=folder / "run", self_check=False), listener)
    clock.ends("last checkpoint, end of the engines and of Ray")
    return case, listener


class _Listener:
    """Ends the phase of the first iteration."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._last = clock, time.perf_counter()
        self.seconds: list[float] = []
        self.first, self.last = Counter[str](), Counter[str]()

    def phase(self, text: str) -> None:
        """Not shown."""

    def finding(self, finding: Any) -> None:
        """Not shown."""

    def iteration(self, row: Any, total: int) -> None:
        """Take the time of it."""
        self.seconds.append(time.perf_counter() - self._last)
        self._clock.ends("first iteration")
        self.last = cpu_of_processes()
        self.first = self.first or self.last
        if row["step"] + 1 == total:
            self._clock.ends("further iterations")
        self._last = time.perf_counter()


@contextlib.contextmanager
def marks(clock: Clock) -> Iterator[None]:
    """Phases end where the executor's own functions begin and end."""
    from executor.coordination import cluster, others, weights
    from executor.coordination.worker_groups import WorkerGroups

    with contextlib.ExitStack() as patches:
        for owner, name, begins, ends in (
            (cluster, "connect", "settings, data, reward processes", "Ray"),
            (others, "measure", "", "processes of ranks and replicas"),
            (WorkerGroups, "_build_rollout", "training engines", "vLLM engines"),
            (weights.WeightRoute, "open", "", "weight channel"),
        ):
            timed = between(clock, getattr(owner, name), begins, ends)
            patches.enter_context(mock.patch.object(owner, name, timed))
        yield


def between(clock: Clock, act: Callable[..., Any], begins: str, ends: str) -> Callable[..., Any]:
    """The function, with the phases that end when it begins and when it ends."""

    def timed(*args: Any, **options: Any) -> Any:
        if begins:
            clock.ends(begins)
        done = act(*args, **options)
        clock.ends(ends)
        return done

    return timed


if __name__ == "__main__":
    main()
