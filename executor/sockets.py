"""Where a run's own servers listen: at one address of the machine, never at all of its interfaces."""

from __future__ import annotations

import socket


def listener(host: str, port: int) -> socket.socket:
    """A socket that listens at this address alone; port 0: a free one.

    Raises:
        OSError: the address is not this machine's, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)
