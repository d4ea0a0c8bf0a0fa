"""Trusted functions called in a worker process with a wall-clock limit for each call.

The user's reward function and the regular expression of the format rule may run for ever on some response; a
thread cannot be stopped, a process can. The worker starts as a fresh interpreter (not a fork of this one,
which may hold threads and a device) with the same import path, the
working directory first. Not a sandbox: the code is the user's own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import subprocess
import sys
import traceback
from typing import Any, BinaryIO

from executor.rewards import protocol
from executor.targets import resolve

START_S = 60.0
"""Until a worker is up."""


class CallTimeout(Exception):
    """The call ran past its limit and was killed."""


class CallError(Exception):
    """The call raised; the message is the last line of its traceback."""


class _Died(CallError):
    """The worker process ended in the middle of a call."""


class TrustedProcess:
    """An interpreter of its own with the import path of this one, for code of the user's own."""

    def __init__(self, module: str, folder: str) -> None:
        """Start it with `serve` of a module; modules are looked for in `folder` first."""
        path = dict.fromkeys([folder, *(entry or folder for entry in sys.path)])
        boot = f"import sys; sys.path[:] = {list(path)!r}; from {module} import serve; serve()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", boot], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin
        assert self.process.stdout
        self.requests, self.replies = self.process.stdin, self.process.stdout

    def send(self, message: Any) -> None:
        """One message to it.

        Raises:
            OSError: it has ended.
        """
        protocol.write_message(self.requests, pickle.dumps(message))

    def receive(self, timeout_s: float, who: str) -> Any:
        """Its next message.

        Raises:
            TimeoutError: `who` did not answer in time.
            EOFError: it ended.
        """
        return pickle.loads(protocol.receive(self.replies.fileno(), timeout_s, who))

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        for stream in (self.requests, self.replies):
            with contextlib.suppress(OSError):
                stream.close()


class Caller:
    """One worker process; not for several threads at once."""

    def __init__(self) -> None:
        self._worker: TrustedProcess | None = None

    def call(self, target: str, *args: Any, timeout_s: float) -> Any:
        """`module:function` of `args`.

        Raises:
            CallTimeout: no result in time; the next call gets a new worker.
            CallError: the function raised, cannot be imported, or twice took its process with it.
        """
        try:
            return self._exchange(self._loaded(target), (target, args), timeout_s)
        except _Died:  # perhaps somebody else killed it
            return self._exchange(self._loaded(target), (target, args), timeout_s)

    def close(self) -> None:
        """Kill the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    def _loaded(self, target: str) -> TrustedProcess:
        """The worker, started and with the function imported: its time is not the sample's."""
        worker = self._worker
        if worker is None or worker.process.poll() is not None:
            self.close()
            worker = self._worker = TrustedProcess("executor.rewards.calls", os.getcwd())
            self._exchange(worker, (target, None), START_S)
        return worker

    def _exchange(
        self, worker: TrustedProcess, message: tuple[str, tuple[Any, ...] | None], timeout_s: float
    ) -> Any:
        try:
            worker.send(message)
            returned, value = worker.receive(timeout_s, "the worker")
        except TimeoutError:
            self.close()
            raise CallTimeout(f"no result within {timeout_s:g} s") from None
        except (OSError, EOFError):
            self.close()
            raise _Died("its process ended") from None
        if not returned:
            raise CallError(value)
        return value


def matches(pattern: str, text: str) -> bool:
    """Whether the pattern is found in the text; `.` also matches line ends."""
    return re.search(pattern, text, re.DOTALL) is not None


def served() -> tuple[BinaryIO, BinaryIO]:
    """Requests and replies of the process that serves; what its functions print goes to stderr."""
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return pipes


def serve() -> None:
    """The worker: answer calls until stdin closes."""
    requests, replies = served()
    while (request := protocol.read_message(requests)) is not None:
        target, args = pickle.loads(request)
        try:
            function = resolve(target)
            reply = pickle.dumps((True, function(*args) if args is not None else None))
        except BaseException as error:
            reply = pickle.dumps((False, "".join(traceback.format_exception_only(error)).strip()))
        protocol.write_message(replies, reply)
