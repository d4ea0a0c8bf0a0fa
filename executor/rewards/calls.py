"""Trusted functions called in a worker process with a wall-clock limit for each call.

The user's reward function and the regular expression of the format rule may run for ever on some response; a
thread cannot be stopped, a process can. The worker starts as a fresh interpreter (not a fork of this one, which
may hold threads and a device) with the same import path. Not a sandbox: the code is the user's own.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import re
import select
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

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
            done, value = self._exchange((target, args), timeout_s)
        except _Died:  # perhaps somebody else killed it
            self._load(target)
            done, value = self._exchange((target, args), timeout_s)
        if not done:
            raise CallError(value)
        return value

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
        boot = _BOOT.format(path=[entry or os.getcwd() for entry in sys.path])
        command = [sys.executable, "-c", boot]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        done, value = self._exchange((target, None), _START_S)
        if not done:
            raise CallError(value)

    def _exchange(self, message: Any, timeout_s: float) -> tuple[bool, Any]:
        process = self._process
        assert process
        assert process.stdin
        try:
            _write(process.stdin, message)
            return self._receive(process, time.monotonic() + timeout_s)
        except TimeoutError:
            self.close()
            raise CallTimeout(f"no result within {timeout_s:g} s") from None
        except (OSError, EOFError):
            self.close()
            raise _Died("its process ended") from None

    def _receive(self, process: subprocess.Popen[bytes], deadline: float) -> tuple[bool, Any]:
        assert process.stdout
        (size,) = struct.unpack("!Q", _exactly(process.stdout.fileno(), 8, deadline))
        done, value = pickle.loads(_exactly(process.stdout.fileno(), size, deadline))
        return bool(done), value


def resolve(target: str) -> Callable[..., Any]:
    """The function of `module:function`."""
    module, _, name = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{target} is not a function")
    return found  # type: ignore[no-any-return]


def matches(pattern: str, text: str) -> bool:
    """Whether the pattern is found in the text; `.` also matches line ends."""
    return re.search(pattern, text, re.DOTALL) is not None


def serve() -> None:
    """The worker: answer calls until stdin closes. What functions print goes to stderr."""
    wire_in, wire_out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while head := wire_in.read(8):
        target, args = pickle.loads(wire_in.read(struct.unpack("!Q", head)[0]))
        try:
            function = resolve(target)
            reply = (True, function(*args) if args is not None else None)
            data = pickle.dumps(reply)
        except BaseException as error:
            reason = "".join(traceback.format_exception_only(error)).strip()
            data = pickle.dumps((False, reason))
        wire_out.write(struct.pack("!Q", len(data)) + data)
        wire_out.flush()


def _write(stream: Any, message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(struct.pack("!Q", len(data)) + data)
    stream.flush()


def _exactly(descriptor: int, count: int, deadline: float) -> bytes:
    data = bytearray()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while len(data) < count:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        part = os.read(descriptor, count - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
