"""The surroundings of a command that may be missing: standard streams, the working folder."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any

from rlhfsim.errors import RlhfsimError


class _Stream(io.FileIO):
    """A standard stream whose reader may leave: the rest is dropped, and the command ends as it would."""

    def write(self, data: Any, /) -> int:
        """As a file does; what is full raises once, so that nothing more is said when Python ends."""
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            self._drop()
            return memoryview(data).nbytes
        except OSError:
            self._drop()
            raise

    def _drop(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def prepare() -> None:
    """Standard streams that outlive their readers.

    Raises:
        RlhfsimError: standard output is closed, or the working folder is gone.
    """
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, f"__{name}__") is None]
    for _ in closed:
        os.open(os.devnull, os.O_RDWR)  # takes the lowest number: no file of ours may become a stream
    if "stderr" in closed:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  # open until the process ends
    if "stdout" in closed:
        raise RlhfsimError("closed-output", "standard output is closed")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _tolerant(stream))
    try:
        os.getcwd()
    except OSError as error:
        raise RlhfsimError("no-working-folder", "the working folder no longer exists") from error


def _tolerant(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    with suppress(OSError):
        stream.flush()
    raw = _Stream(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
    )
