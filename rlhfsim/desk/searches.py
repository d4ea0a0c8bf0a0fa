"""Searches that run while the page is open: one process that answers the newest questions of every open page.

The first answer comes before every proof; the proof runs in a process forked from it, which is ended as soon
as no page asks its question any longer. Where processes cannot be forked (Windows, macOS), a proof that began
runs to its end before the next question is looked at.

Where a searching process dies (killed, or out of memory), every unfinished question of its pages says so, and
how it was ended; the next question, or a retry, starts another one.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Condition, Thread
from typing import TypeVar

from rlhfsim.desk.answer import (
    FINAL,
    Answer,
    DeskQuestion,
    ReadQuestion,
    complete,
    died,
    failed,
    first,
    proven,
)
from rlhfsim.errors import RlhfsimError
from rlhfsim.search.parallel import ENDED, forked, how_ended, may_fork

Read = Callable[[str], DeskQuestion]
"""From the query of an address to the question; importable, since another process calls it."""
Stage = Callable[[ReadQuestion], Answer]
MAX_ANSWERS, MAX_PAGES = 64, 16
"""Answers that are kept, and pages that are listened to; each asks two questions at most."""
TICK = 0.1
"""Seconds after which a running proof hears of newer questions."""
A = TypeVar("A")


class Searches:
    """The page's end: asks, and keeps what came."""

    def __init__(self, read: Read) -> None:
        """Starts the process that searches; it ends with this one."""
        self._read = read
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._pages: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._began: OrderedDict[str, float] = OrderedDict()
        self._news = Condition()
        self._start()

    def _start(self) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(self._read, theirs))
        self._process.start()
        theirs.close()
        Thread(target=self._listen, args=(self._process, self._pipe), daemon=True).start()

    def ask(self, page: str, questions: tuple[str, ...], *, again: bool = False) -> None:
        """What a page wants to know now; what it asked before is given up, unless another page asks it.

        `again`: also what died before.
        """
        with self._news:
            if again or self._pages.get(page) != questions:
                self._send(page, questions)
            _keep(self._pages, page, questions, MAX_PAGES)

    def _send(self, page: str, questions: tuple[str, ...]) -> None:
        if not self._process.is_alive():
            self._start()
        for question in questions:
            if (known := self._answers.get(question)) is None or known.stage == "died":
                self._answers.pop(question, None)
                _keep(self._began, question, time.monotonic())
        with suppress(OSError):  # it dies just now: `_listen` says so
            self._pipe.send((page, questions))

    def searching_s(self, question: str) -> float:
        """Seconds since a question was asked."""
        began = self._began.get(question)
        return 0.0 if began is None else time.monotonic() - began

    def answer(self, question: str, wait_s: float = 0.0) -> Answer | None:
        """What is known; None where nothing came in that time."""
        with self._news:
            self._news.wait_for(lambda: question in self._answers, timeout=wait_s)
            return self._answers.get(question)

    def close(self) -> None:
        """End the process."""
        self._pages.clear()
        self._process.terminate()
        self._process.join()

    def _listen(self, process: BaseProcess, pipe: Connection) -> None:
        """Keep what a process answers, until it ends; then say how, to every page that waits for more."""
        with suppress(EOFError, OSError):
            while True:
                question, answer = pipe.recv()
                with self._news:
                    _keep(self._answers, question, answer)
                    self._news.notify_all()
        process.join()
        how = f"the searching process was ended: {how_ended(process.exitcode)}"
        with self._news:
            if process is not self._process:  # another one searches already
                return
            for question in {q for questions in self._pages.values() for q in questions}:
                known = self._answers.get(question)
                if known is None or known.stage not in FINAL:
                    _keep(self._answers, question, died(how, known))
            self._news.notify_all()


def _keep(kept: OrderedDict[str, A], key: str, value: A, most: int = MAX_ANSWERS) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)


def serve(read: Read, pipe: Connection) -> None:
    """The searching process, until the page's end of the pipe closes; Ctrl-C is left to the page."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        _Server(read, pipe).run()


class _Server:
    """Questions by page, and how far each is answered."""

    def __init__(self, read: Read, pipe: Connection) -> None:
        self._read, self._pipe = read, pipe
        self._pages: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._known: OrderedDict[str, Answer] = OrderedDict()

    def run(self) -> None:
        """First answers before proofs, the newest page before the others."""
        while True:
            self._hear()
            self._answer_first()
            todo = next((q for q in self._asked() if self._known[q].stage in ("first", "proven")), None)
            if todo is None:
                self._pipe.poll(None)
            else:
                self._away(proven if self._known[todo].stage == "first" else complete, todo)

    def _hear(self) -> None:
        """Newer questions; what is known about them is told again, since the page may have dropped it."""
        while self._pipe.poll():
            page, questions = self._pipe.recv()
            _keep(self._pages, page, questions, MAX_PAGES)
            for question in questions:
                known = self._known.get(question)
                if known is not None and known.stage == "died":  # asked again
                    del self._known[question]
                elif known is not None:
                    self._tell(question, known)

    def _answer_first(self) -> None:
        for question in self._asked():
            if question not in self._known:
                self._tell(question, self._answered(first, question))

    def _asked(self) -> list[str]:
        return list(dict.fromkeys(q for questions in reversed(self._pages.values()) for q in questions))

    def _tell(self, question: str, answer: Answer) -> None:
        _keep(self._known, question, answer)
        self._pipe.send((question, answer))

    def _away(self, stage: Stage, question: str) -> None:
        """A stage from a process of its own, which ends where nobody asks any longer."""
        if not may_fork():
            return self._tell(question, self._answered(stage, question))
        try:
            for result in forked(partial(self._answered, stage), [question], 1, tick=TICK):
                if result is not None:
                    return self._tell(question, result[1])
                self._hear()
                if question not in self._asked():
                    return None
                self._answer_first()
        except RlhfsimError as error:  # the process of the proof was ended
            self._tell(question, died(error.message, self._known.get(question)))
        return None

    def _answered(self, stage: Stage, question: str) -> Answer:
        """The answer, or why there is none; a bug of ours is told where the desk was started."""
        try:
            return stage(partial(self._read, question))
        except RlhfsimError as error:
            return died(error.message, self._known.get(question)) if error.code == ENDED else failed(error)
        except MemoryError:
            return died("memory ran out", self._known.get(question))
        except Exception as error:
            traceback.print_exc()
            return failed(RlhfsimError("internal-error", f"this is a bug in rlhfsim: {error!r}"))
