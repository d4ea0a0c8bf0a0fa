"""The environments of a replica, in a process of their own: they take no time of the engine's, and one that
blocks or ends its process harms no more than the conversations that it answers.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import queue
import subprocess
import threading
import time
from typing import Any, NamedTuple

from executor.rewards import protocol
from executor.rewards.calls import START_S, TrustedProcess
from executor.samples import Fault
from executor.settings import EnvironmentSettings
from rlhfsim.errors import RlhfsimError

GRACE_S = 5.0
"""After the time limit of a call, until the process counts as stuck."""
END_S = 5.0
"""Until a process that is asked to end is killed."""


class Answered(NamedTuple):
    """What an environment said."""

    conversation: int
    value: Any
    """`Observed` of a step, a prompt or None of a reset."""
    fault: Fault | None
    seconds: float


class EnvironmentProcess:
    """Calls go out at most `concurrency` at a time, in the order they came; answers come back in any.

    Of a class with `at_once` no more than so many go out: time limits count work, not waiting for a place.
    """

    def __init__(self, settings: EnvironmentSettings, folder: str | None = None) -> None:
        """Start the process; modules are looked for in `folder` first, by default the working directory.

        Raises:
            RlhfsimError: the environment cannot be made.
        """
        self.settings, self._folder = settings, folder or os.getcwd()
        self._waiting: collections.deque[tuple[int, str, Any]] = collections.deque()
        self._asked: dict[int, float] = {}
        """Conversation -> when its call went out."""
        self._alive: set[int] = set()
        """Conversations whose environment lives in this process."""
        self._start()

    @property
    def busy(self) -> bool:
        """Whether answers are to come."""
        return bool(self._asked or self._waiting)

    def ask(self, conversation: int, method: str, argument: Any = None) -> None:
        """Call `reset`, `step` or `close` of a conversation's environment."""
        self._waiting.append((conversation, method, argument))
        self._send()

    def answers(self, wait_s: float) -> list[Answered]:
        """What has come; waits for the first where calls run."""
        got: list[Answered] = []
        try:
            answer = self._replies.get(timeout=wait_s) if wait_s > 0 and self.busy else None
            while True:
                got += self._taken(answer)
                answer = self._replies.get_nowait()
        except queue.Empty:
            pass
        overdue = time.monotonic() - self.settings.timeout_s - GRACE_S
        stuck = [conversation for conversation, sent in self._asked.items() if sent < overdue]
        got += self._lost(Fault("timeout", "its process was stuck")) if stuck else []
        self._send()
        return got

    def close(self) -> None:
        """End the process; what it made is cleared away by itself, unless it hangs."""
        with contextlib.suppress(OSError):
            self._worker.requests.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._worker.process.wait(END_S)
        self._worker.end()

    def _taken(self, answer: Answered | None) -> list[Answered]:
        if answer is None:
            return []
        if answer.conversation < 0:  # the process ended
            return self._lost(Fault("error", "its process ended"))
        if self._asked.pop(answer.conversation, None) is None:
            return []
        return [answer]

    def _lost(self, fault: Fault) -> list[Answered]:
        """A new process; the calls that ran failed, and so will the next of its other conversations."""
        lost = [Answered(number, None, fault, 0.0) for number in self._asked]
        self._worker.end()
        self._asked.clear()
        self._alive.clear()
        self._start()
        return lost

    def _send(self) -> None:
        while self._waiting and len(self._asked) < self._at_once:
            number, method, argument = self._waiting.popleft()
            if method == "reset":
                self._alive.add(number)
            elif number not in self._alive:
                if method != "close":
                    self._asked[number] = time.monotonic()
                    fault = Fault("error", "its process ended in another conversation")
                    self._replies.put(Answered(number, None, fault, 0.0))
                continue
            if method == "close":
                self._alive.discard(number)
            else:
                self._asked[number] = time.monotonic()
            with contextlib.suppress(OSError):  # it ended: the reader says so
                self._worker.send((number, method, argument))

    def _start(self) -> None:
        self._worker = TrustedProcess("executor.environments.server", self._folder)
        self._replies: queue.SimpleQueue[Answered] = queue.SimpleQueue()
        try:
            self._worker.send(self.settings)
            said = self._worker.receive(START_S, "environments")
        except (OSError, EOFError, TimeoutError) as error:
            said = f"its process did not start: {error}"
        if isinstance(said, str):
            self._worker.end()
            raise RlhfsimError(
                "environment-class", said, help="try it: python -c 'import MODULE; MODULE.CLASS()'"
            )
        self._at_once = min(self.settings.concurrency, said)
        threading.Thread(target=_read, args=(self._worker.replies, self._replies), daemon=True).start()


def _read(stream: Any, replies: queue.SimpleQueue[Answered]) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed under the reader
        while (body := protocol.read_message(stream)) is not None:
            replies.put(Answered(*pickle.loads(body)))
    replies.put(Answered(-1, None, None, 0.0))
