"""Tables of candidates beside the page: one process a table, with its progress, ended when nobody looks.

It gives way to the searches of answers (`os.nice`), which stay as fast as without it.
"""

from __future__ import annotations

import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Thread

from rlhfsim.desk.state import Question, query
from rlhfsim.errors import RlhfsimError
from rlhfsim.search.parallel import ENDED, how_ended
from rlhfsim.search.request import Request
from rlhfsim.search.requirements import Requirement
from rlhfsim.what_if.choose import ClusterOption, choose

MAX_RUNNING = 4
"""Tables that are kept, one a page."""
LEFT_S = 30.0
"""A search that no page has looked at for so long is ended."""
NICE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What `rlhfsim choose` is asked."""

    asked: tuple[Request, ...]
    targets: tuple[Requirement, ...]
    steps: int | None
    confidence: float


ReadCandidates = Callable[[str], Candidates]
"""From a query to the candidates; importable, since another process calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskComparison:
    """A table, as far as it is known."""

    question: Question
    """Options of `rlhfsim choose`."""
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    total: int = 0
    """Candidates that are designed, and all."""
    targets: tuple[Requirement, ...] = ()
    steps: int | None = None
    options: tuple[ClusterOption, ...] = ()
    """Once all are designed."""
    trouble: RlhfsimError | None = None

    @property
    def running(self) -> bool:
        """Whether more is to come."""
        return not self.options and self.trouble is None


class Comparisons:
    """The tables of all pages."""

    def __init__(self, read: ReadCandidates) -> None:
        """Nothing starts before it is asked for."""
        self._read = read
        self._running: OrderedDict[str, _Running] = OrderedDict()

    def start(self, page: str, question: Question) -> None:
        """Design a page's candidates; what it compared before is given up."""
        self.stop(page)
        self._running[page] = _Running(self._read, question)
        while len(self._running) > MAX_RUNNING:
            self.stop(next(iter(self._running)))

    def stop(self, page: str) -> None:
        """End and forget a page's table."""
        running = self._running.pop(page, None)
        if running is not None:
            running.end()

    def known(self, page: str) -> DeskComparison | None:
        """The page's table; None where it asked for none."""
        running = self._running.get(page)
        return running.looked_at() if running else None

    def close(self) -> None:
        """End all."""
        for page in list(self._running):
            self.stop(page)


class _Running:
    """One table and its process."""

    def __init__(self, read: ReadCandidates, question: Question) -> None:
        self._known, self._looked = DeskComparison(question=question), time.monotonic()
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(read, query(question), theirs))
        self._process.start()
        theirs.close()
        self._thread = Thread(target=self._listen, daemon=True)
        self._thread.start()

    def looked_at(self) -> DeskComparison:
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
            ended = RlhfsimError(ENDED, f"the comparison was ended: {how}", help="press Compare again")
            self._known = replace(self._known, trouble=ended)
        self.end()


def serve(read: ReadCandidates, question: str, pipe: Connection) -> None:
    """The searching process; Ctrl-C is left to the page."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(NICE)
    tell(read, question, pipe)


def tell(read: ReadCandidates, question: str, pipe: Connection) -> None:
    """Fields of a `Comparison` as they become known."""
    done = count(1)
    with suppress(OSError):
        try:
            asked = read(question)
            pipe.send({"total": len(asked.asked), "targets": asked.targets, "steps": asked.steps})
            options = choose(
                asked.asked,
                asked.targets,
                asked.steps,
                confidence=asked.confidence,
                progress=lambda: pipe.send({"done": next(done)}),
            )
            pipe.send({"options": options})
        except RlhfsimError as error:
            pipe.send({"trouble": error})
