"""What listens in the processes of a run, sampled while it runs, against what may."""

from __future__ import annotations

import ipaddress
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil

EVERY_S = 0.3
EVERYWHERE = {
    "gcs_server": (1, "GCS of Ray: every node registers there; with Ray's token"),
    "raylet": (2, "scheduler and object manager of Ray: other nodes ask them; with Ray's token"),
    "monitor.py": (1, "metrics of Ray's autoscaler at port 44217: figures, no commands"),
    "driver": (2, "answers of Ray to the process that started the run, which joins twice; with Ray's token"),
    "ray::": (1, "calls to a Ray worker, whatever it runs; Ray has no setting for the address"),
}
"""Process -> ports that it may open at all interfaces, and why (SECURITY.md)."""
Seen = dict[tuple[int, str], set[tuple[str, int]]]
"""(process, program) -> (address, port)."""


@contextmanager
def sampled() -> Iterator[Seen]:
    """Where this process and those below it listen, looked at again and again."""
    seen: Seen = defaultdict(set)
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(EVERY_S):
            with suppress(psutil.Error):
                driver = psutil.Process(os.getpid())
                mine = {p.pid: p for p in [driver, *driver.children(recursive=True)]}
                for one in psutil.net_connections(kind="tcp"):
                    if one.status == psutil.CONN_LISTEN and one.pid in mine:
                        with suppress(psutil.Error, IndexError):
                            name = "driver" if one.pid == driver.pid else _program(mine[one.pid].cmdline())
                            seen[one.pid, name].add((one.laddr.ip, one.laddr.port))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield seen
    finally:
        ended.set()
        watcher.join()


def _program(words: list[str]) -> str:
    """`raylet`, or `ray::` for a worker, whose title names what it runs once it has started."""
    if words[0].startswith("ray::") or any(word.endswith("default_worker.py") for word in words):
        return "ray::"
    scripts = [word for word in words[1:] if word.endswith(".py")]
    return os.path.basename(scripts[0] if scripts else words[0])


def open_to_others(seen: Mapping[tuple[int, str], set[tuple[str, int]]], node: str) -> list[str]:
    """Ports at all interfaces beyond those that may be, and ports at an address that is not the node's."""
    found = []
    for (pid, program), places in seen.items():
        everywhere = [port for host, port in places if ipaddress.ip_address(host).is_unspecified]
        if len(everywhere) > EVERYWHERE.get(program, (0, ""))[0]:
            found.append(f"{program} ({pid}) listens at all interfaces: {sorted(everywhere)}")
        known = [*everywhere, *(port for host, port in places if host == node)]
        other = [(h, p) for h, p in places if p not in known and not ipaddress.ip_address(h).is_loopback]
        found += [f"{program} ({pid}) listens at {host}:{port}" for host, port in other]
    return found
