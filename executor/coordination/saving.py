"""When a run saves its state: as its failures and the cost of a save ask, and before it stops for a signal;
and how: while its steps run, where the engines write from copies in host memory.

    D* = sqrt(2 C M)        Young 1974, CACM 17(9): useful seconds between two saves

Legend: C seconds that a save takes, M mean seconds between failures of the whole job.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from executor.coordination import checkpoints
from executor.coordination.failures import PartFailed
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.profiles import load_profile

WRITTEN_S = 0.2
"""Between two looks at ranks that write."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def mtbf(plan: Plan) -> float:
    """Mean seconds between failures of the whole job, by the published rate in its profile."""
    try:
        profile = load_profile(plan.hardware[0].profile)
    except RlhfsimError:  # of the machine where the plan was made
        profile = load_profile("h100-sxm")
    return float(profile.coefficient("mtbf_per_gpu").value) / sum(part.gpus for part in plan.hardware)


@dataclass(slots=True, kw_only=True)
class SaveTimes:
    """Which iterations end with a save."""

    every: int | None
    """Iterations; 0: only the last one; None: by time."""
    iterations: int
    mtbf_s: float
    """Mean seconds between failures of the whole job."""
    cost_s: float
    """Seconds of a save; predicted until one was made."""
    _since: float = field(default_factory=lambda: time.monotonic())

    @property
    def interval_s(self) -> float:
        """Between two saves by time."""
        return math.sqrt(2 * self.cost_s * self.mtbf_s)

    def due(self, done: int) -> bool:
        """After `done` iterations."""
        if done == self.iterations:
            return True
        if self.every is None:
            return time.monotonic() - self._since >= self.interval_s
        return self.every > 0 and done % self.every == 0

    def saved(self, seconds: float) -> None:
        """A save is done and took so long."""
        self._since, self.cost_s = time.monotonic(), seconds


class Writers(Protocol):
    """Who writes the ranks' files."""

    def save(self, folder: Path, *, background: bool = False) -> None:
        """Every trained role's state; with `background` it goes on when this has returned."""

    def written(self) -> bool:
        """Whether all of it is on disk."""


@dataclass(slots=True, kw_only=True)
class Saver:
    """Saves checkpoints one after the other; the files of one may be written while the next steps run."""

    root: Path
    keep: int
    best: bool
    """The one with the highest score stays too."""
    background: bool
    say: Callable[[str], None]
    done: Callable[[checkpoints.Checkpoint], None]
    """Told of every one that is whole, in the thread of the run."""
    failures: int = 0
    """Writes that failed in the background."""
    again: bool = False
    """The last one failed: the next is due at once, in the foreground."""
    _writing: Future[checkpoints.Checkpoint] | None = None
    _iteration: int = 0
    _abandoned: threading.Event = field(default_factory=threading.Event)

    @property
    def busy(self) -> bool:
        """Whether one is still being written."""
        return self._writing is not None

    def improves(self, score: float) -> bool:
        """Whether no checkpoint there is was evaluated as well."""
        before = checkpoints.best_of(self.root) if self.best else (self.root, math.inf)
        return before is None or score > before[1]

    def save(
        self,
        progress: checkpoints.RunProgress,
        identity: checkpoints.RunIdentity,
        writers: Writers,
        *,
        last: bool,
    ) -> None:
        """Begin one, the one before finished; `last`: it is whole when this returns.

        Raises:
            RlhfsimError: it was not written in the foreground, or its ranks did not begin.
        """
        self.look(wait=True)
        beside = self.background and not last and not self.again

        def write(folder: Path) -> Callable[[], None] | None:
            writers.save(folder, background=beside)
            return (lambda: self._wait(writers)) if beside else None

        finish = checkpoints.begin(self.root, progress, identity, write, self.keep, best=self.best)
        self.again = False
        if not beside:
            self.done(finish())
            return
        self._iteration = progress.iteration
        pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing = pool.submit(finish)
        pool.shutdown(wait=False)

    def look(self, *, wait: bool = False) -> None:
        """Whether the one in the background is whole by now; an error there is said and counted."""
        if self._writing is None or not (wait or self._writing.done()):
            return
        writing, self._writing = self._writing, None
        try:
            self.done(writing.result())
        except PartFailed as failure:
            if failure.cause == "died":  # the run ends with it
                return
            self._failed(str(failure))
        except Exception as error:
            self._failed(error.message if isinstance(error, RlhfsimError) else str(error))

    def _failed(self, reason: str) -> None:
        self.failures, self.again = self.failures + 1, True
        self.say(
            f"the checkpoint of iteration {self._iteration} was not written in the background: {reason}; "
            "older ones remain, and the next iteration saves in the foreground"
        )

    def _wait(self, writers: Writers) -> None:
        while not writers.written():
            if self._abandoned.wait(WRITTEN_S):
                raise InterruptedError("the attempt ended while its checkpoint was written")

    def abandon(self) -> None:
        """The attempt ends: what its ranks have not written is given up, what they have is finished."""
        self._abandoned.set()

    def close(self) -> None:
        """Wait for the thread; the processes of an attempt that failed have ended before."""
        if self._writing is not None:
            with suppress(Exception):
                self.done(self._writing.result())
        self._writing = None


@dataclass(slots=True)
class StopRequest:
    """Whether somebody asked the run to stop."""

    number: int | None = None
    """Number of the signal."""

    def follow(self) -> None:
        """Stop, where that was asked.

        Raises:
            KeyboardInterrupt: for SIGINT.
            SystemExit: for SIGTERM, with the exit code that shells give it.
        """
        if self.number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.number is not None:
            raise SystemExit(128 + self.number)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit here, outside `stop_requests`; in another thread it does what it did.

    Handlers that `ray.init` sets do not stay: one exits with the signal's number as the code, one lets three
    seconds pass and aborts the process. And Ray's calls may end with another code than that of the exception.
    """
    code = 128 + signal.SIGTERM
    asked = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        asked.set()
        raise SystemExit(code)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except SystemExit as error:
        ours = asked.is_set() or error.code == signal.SIGTERM
        raise (SystemExit(code) if ours else error) from error.__cause__
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None: set by a library below Python


@contextmanager
def stop_requests(say: Callable[[str], None]) -> Iterator[StopRequest]:
    """The first Ctrl-C or SIGTERM is a request, the second one acts at once; in another thread both do.

    A thread says that it was heard: the signal may come in the middle of a line that the main thread prints,
    and no stream takes a second one from there.
    """
    request, before, words = StopRequest(), dict[int, Any](), list[threading.Thread]()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        before.clear()

    def ask(number: int, frame: FrameType | None) -> None:
        request.number = number
        restore()
        heard = f"{signal.Signals(number).name}: the run saves its state after this iteration; again: at once"
        words.append(threading.Thread(target=say, args=(heard,)))
        words[-1].start()

    if threading.current_thread() is threading.main_thread():
        before |= {number: signal.signal(number, ask) for number in SIGNALS}
    try:
        yield request
    finally:
        restore()
        for thread in words:
            thread.join()
