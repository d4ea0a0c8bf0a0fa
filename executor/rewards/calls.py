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
from typing import Any

from executor.rewards import protocol
from executor.targets import resolve

_BOOT = "import sys; sys.path[:] = {path!r}; from executor.rewards.calls import serve; serve()"
_START_S = 60.0


class CallTimeout(Exception):
    """The call ran past its limit and was killed."""


class CallError(Exception):
    """The call raised; the message is the last line of its traceback."""


class _Died(CallError):
    """The worker process ended in the middle of a call."""


class Caller:
    """One worker process; not for several threads at once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, target: str, *args: Any, timeout_s: float) -> Any:
        """`module:function` of `args`.

        Raises:
            CallTimeout: no result in time; the next call gets a new worker.
            CallError: the function raised, cannot be imported, or twice took its process with it.
        """
        try:
            self._load(target)
            return self._exchange((target, args), timeout_s)
        except _Died:  # perhaps somebody else killed it
            self._load(target)
            return self._exchange((target, args), timeout_s)

    def close(self) -> None:
        """Kill the worker."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream
            with contextlib.suppress(OSError):
                stream.close()

    def _load(self, target: str) -> None:
        """Start the worker and import the function: its time is not the sample's."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        path = dict.fromkeys([os.getcwd(), *(entry or os.getcwd() for entry in sys.path)])
        boot = _BOOT.format(path=list(path))
        command = [sys.executable, "-c", boot]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._exchange((target, None), _START_S)

    def _exchange(self, message: tuple[str, tuple[Any, ...] | None], timeout_s: float) -> Any:
        process = self._process
        assert process
        assert process.stdin
        assert process.stdout
        try:
            protocol.write_message(process.stdin, pickle.dumps(message))
            reply = protocol.receive(process.stdout.fileno(), timeout_s, "the worker")
        except TimeoutError:
            self.close()
            raise CallTimeout(f"no result within {timeout_s:g} s") from None
        except (OSError, EOFError):
            self.close()
            raise _Died("its process ended") from None
        returned, value = pickle.loads(reply)
        if not returned:
            raise CallError(value)
        return value


def matches(pattern: str, text: str) -> bool:
    """Whether the pattern is found in the text; `.` also matches line ends."""
    return re.search(pattern, text, re.DOTALL) is not None


def serve() -> None:
    """The worker: answer calls until stdin closes. What functions print goes to stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while (request := protocol.read_message(requests)) is not None:
        target, args = pickle.loads(request)
        try:
            function = resolve(target)
            reply = pickle.dumps((True, function(*args) if args is not None else None))
        except BaseException as error:
            reply = pickle.dumps((False, "".join(traceback.format_exception_only(error)).strip()))
        protocol.write_message(replies, reply)
