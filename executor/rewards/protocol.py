"""JSON messages over a pipe, each after its length; standard library only."""

from __future__ import annotations

import json
import struct
from typing import IO, Any


def read_message(stream: IO[bytes]) -> Any:
    """The next message; None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    body = stream.read(struct.unpack("!I", head)[0])
    return json.loads(body)


def write_message(stream: IO[bytes], message: Any) -> None:
    """Send one message."""
    body = json.dumps(message).encode()
    stream.write(struct.pack("!I", len(body)) + body)
    stream.flush()
