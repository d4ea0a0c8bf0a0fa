"""Searches beside the page: one process that answers the newest questions of every open page.

The first answer is given at once; the proof runs in a process forked from it, which is ended as soon as no
page asks its question any longer. Where processes cannot be forked (Windows, macOS), a proof that began
runs to its end before the next question is looked at.
"""

from __future__ import annotations

import signal
import traceback
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Condition, Thread
from typing import TypeVar

from rlhfsim.desk.answer import Answer, Asked, complete, failed, first, proven
from rlhfsim.errors import RlhfsimError
from rlhfsim.search.parallel import forked, may_fork

Read = Callable[[str], Asked]
"""From the query of an address to the question; importable, since another process calls it."""
MAX_ANSWERS, MAX_PAGES = 64, 16
"""Answers that are kept, and pages that are listened to; each asks two questions at most."""
TICK = 0.1
"""Seconds after which a running proof hears of newer questions."""
A = TypeVar("A")


class Searches:
    """The page's end: asks, and keeps what came."""

    def __init__(self, read: Read) -> None:
        """Starts the process that searches; it ends with this one."""
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(read, theirs))
        self._process.start()
        theirs.close()
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._pages: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._news = Condition()
        Thread(target=self._listen, daemon=True).start()

    def ask(self, page: str, questions: tuple[str, ...]) -> None:
        """What a page wants to know now; what it asked before is given up, unless another page asks it."""
        with self._news, suppress(OSError):
            if self._pages.get(page) != questions:
                self._pipe.send((page, questions))
            _keep(self._pages, page, questions, MAX_PAGES)

    def answer(self, question: str, wait_s: float = 0.0) -> Answer | None:
        """What is known; None where nothing came in that time."""
        with self._news:
            self._news.wait_for(lambda: question in self._answers, timeout=wait_s)
            return self._answers.get(question)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                question, answer = self._pipe.recv()
                with self._news:
                    _keep(self._answers, question, answer)
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
        """Newer questions; what is known of them is told again, since the page may have dropped it."""
        while self._pipe.poll():
            page, questions = self._pipe.recv()
            _keep(self._pages, page, questions, MAX_PAGES)
            for question in questions:
                if question in self._known:
                    self._tell(question, self._known[question])

    def _answer_first(self) -> None:
        for question in self._asked():
            if question not in self._known:
                self._tell(question, self._answered(first, question))

    def _asked(self) -> list[str]:
        return list(dict.fromkeys(q for questions in reversed(self._pages.values()) for q in questions))

    def _tell(self, question: str, answer: Answer) -> None:
        _keep(self._known, question, answer)
        self._pipe.send((question, answer))

    def _away(self, stage: Callable[[Asked], Answer], question: str) -> None:
        """A stage from a process of its own, which ends where nobody asks any longer."""
        if not may_fork():
            return self._tell(question, self._answered(stage, question))
        for result in forked(partial(self._answered, stage), [question], 1, tick=TICK):
            if result is not None:
                return self._tell(question, result[1])
            self._hear()
            if question not in self._asked():
                return None
            self._answer_first()
        return None

    def _answered(self, stage: Callable[[Asked], Answer], question: str) -> Answer:
        """The answer, or why there is none; a bug of ours is told where the desk was started."""
        try:
            return stage(self._read(question))
        except RlhfsimError as error:
            return failed(error)
        except Exception as error:
            traceback.print_exc()
            return failed(RlhfsimError("internal-error", f"this is a bug in rlhfsim: {error!r}"))
