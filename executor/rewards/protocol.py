"""Messages over the pipes to a worker process, each after its length; standard library only."""

from __future__ import annotations

import os
import select
import struct
import time
from typing import IO

_LENGTH = struct.Struct("!Q")


def read_message(stream: IO[bytes]) -> bytes | None:
    """The next message; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    return stream.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else None


def write_message(stream: IO[bytes], body: bytes) -> None:
    """Send one message."""
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def receive(descriptor: int, timeout_s: float, who: str) -> bytes:
    """The next message of a worker that may hang or end.

    Raises:
        TimeoutError: `who` did not answer in time.
        EOFError: it ended.
    """
    deadline = time.monotonic() + timeout_s
    (size,) = _LENGTH.unpack(_exactly(descriptor, _LENGTH.size, deadline, who))
    return _exactly(descriptor, size, deadline, who)


def _exactly(descriptor: int, count: int, deadline: float, who: str) -> bytes:
    data = bytearray()
    poll = select.poll()  # not select: descriptors may be above 1024
    poll.register(descriptor, select.POLLIN)
    while len(data) < count:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError(f"{who} did not answer in time")
        part = os.read(descriptor, count - len(data))
        if not part:
            raise EOFError(f"{who} ended")
        data += part
    return bytes(data)
