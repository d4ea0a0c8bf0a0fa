"""Long questions worked on while the page is open: one process a page, what it tells, its end where nobody
looks.

It gives way to the searches of answers (`os.nice`), which stay as fast as without it.
"""

from __future__ import annotations

import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Thread
from typing import Generic, TypeVar

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.search.parallel import ENDED, how_ended

MAX_RUNNING = 4
"""PageTasks that are kept, one a page."""
LEFT_S = 30.0
"""A task that no page has looked at for so long is ended."""
NICE = 5

Work = Callable[[Connection], None]
"""What the process does: it sends fields of the task as they become known; importable."""


@frozen
class PageTask:
    """A long question, as far as its answer is known."""

    began: float = field(default_factory=time.monotonic)
    trouble: RlhfsimError | None = None

    @property
    def complete(self) -> bool:
        """Whether its answer is there."""
        raise NotImplementedError

    @property
    def running(self) -> bool:
        """Whether more is to come."""
        return not self.complete and self.trouble is None


T = TypeVar("T", bound=PageTask)


class PageTasks(Generic[T]):
    """The tasks of all pages."""

    def __init__(self, name: str) -> None:
        """Nothing starts before it is asked for; `name` says what was ended."""
        self._name = name
        self._running: OrderedDict[str, _Running[T]] = OrderedDict()

    def start(self, page: str, task: T, work: Work) -> None:
        """Work on a page's task; the one before is given up."""
        self.stop(page)
        self._running[page] = _Running(self._name, task, work)
        while len(self._running) > MAX_RUNNING:
            self.stop(next(iter(self._running)))

    def stop(self, page: str) -> None:
        """End and forget a page's task."""
        running = self._running.pop(page, None)
        if running is not None:
            running.end()

    def known(self, page: str) -> T | None:
        """The page's task; None where it asked for none."""
        running = self._running.get(page)
        return running.looked_at() if running else None

    def close(self) -> None:
        """End all."""
        for page in list(self._running):
            self.stop(page)


class _Running(Generic[T]):
    """One task and its process."""

    def __init__(self, name: str, task: T, work: Work) -> None:
        self._name, self._known, self._looked = name, task, time.monotonic()
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(work, theirs))
        self._process.start()
        theirs.close()
        self._thread = Thread(target=self._listen, daemon=True)
        self._thread.start()

    def looked_at(self) -> T:
        """What is known; it is kept on as long as somebody looks."""
        self._looked = time.monotonic()
        return self._known

    def end(self) -> None:
        """At once; designs that its workers are in end by themselves."""
        self._process.terminate()
        self._process.join()

    def _listen(self) -> None:
        how = "nobody looked at it any longer"
        try:
            while self._known.running and time.monotonic() - self._looked <= LEFT_S:
                if self._pipe.poll(1.0):
                    self._known = replace(self._known, **self._pipe.recv())
        except (EOFError, OSError):
            self._process.join()
            how = how_ended(self._process.exitcode)
        if self._known.running:
            ended = RlhfsimError(ENDED, f"the {self._name} was ended: {how}", help="press the button again")
            self._known = replace(self._known, trouble=ended)
        self.end()


def serve(work: Work, pipe: Connection) -> None:
    """The working process; Ctrl-C is left to the page."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(NICE)
    told(work, pipe)


def told(work: Work, pipe: Connection) -> None:
    """Work, and say what is wrong with what was asked."""
    with suppress(OSError):
        try:
            work(pipe)
        except RlhfsimError as error:
            pipe.send({"trouble": error})
