"""Memory that others hold where a process of the run works, measured before its engines are built.

On a GPU by NVML, which makes no context on it and counts what the driver keeps for itself; without one the
host's, where CPU engines work. Processes are named where the container shows them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import psutil

from executor.coordination.failures import answers
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.units import format as shown

NAMED = 3
"""Processes that are named, largest first."""
SAID_SHARE = 0.05
"""Share of the memory: less is what a driver or an idle desktop holds."""


@frozen
class Held:
    """What others hold of one memory."""

    where: str
    """`GPU 3 of node-a`, `the host memory of node-a`."""
    bytes: float
    total: float
    holders: tuple[tuple[str, int, float], ...] = ()
    """Name (empty: not known), process id, bytes; largest first."""

    @property
    def counts(self) -> bool:
        """Whether it is more than what is always there."""
        return self.bytes > SAID_SHARE * self.total

    def __str__(self) -> str:
        named = ", ".join(
            f"{name or 'process'} {pid} {shown(size, 'byte')}" for name, pid, size in self.holders
        )
        text = f"others hold {shown(self.bytes, 'byte')} of {shown(self.total, 'byte')} on {self.where}"
        return f"{text} ({named})" if named else text


def measure(actors: Mapping[str, Any], limit_s: float) -> dict[str, Held]:
    """By part of the run; a process that cannot tell is left out, its start will say why."""
    found = answers({part: actor.held_by_others.remote() for part, actor in actors.items()}, limit_s)
    return {part: one for part, one in found.items() if isinstance(one, Held)}


def summary(held: Mapping[str, Held]) -> list[str]:
    """A line for each memory of which others hold much."""
    return sorted({str(one) for one in held.values() if one.counts})


def held_by_others(*, gpu: bool) -> Held:
    """Memory that others hold on the fullest GPU of this process, or on its host.

    Raises:
        RlhfsimError: a GPU without NVML.
    """
    host = os.uname().nodename
    if not gpu:
        return _of_host(host, _own())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    found = [_of_gpu(_nvml(), name.strip(), host) for name in visible if name.strip()]
    return max(found, key=lambda one: one.bytes / one.total)


def _nvml() -> Any:
    from ray._private.thirdparty.pynvml import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise RlhfsimError("no-nvml", f"NVML does not answer: {error}", help="install the driver") from error
    return pynvml


def _of_gpu(nvml: Any, name: str, host: str) -> Held:
    """By number or UUID, as CUDA_VISIBLE_DEVICES has it."""
    by = nvml.nvmlDeviceGetHandleByIndex if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID
    device = by(int(name) if name.isdigit() else name)
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    sizes = {p.pid: float(p.usedGpuMemory or 0) for p in nvml.nvmlDeviceGetComputeRunningProcesses(device)}
    holders = _largest({pid: size for pid, size in sizes.items() if size})
    return Held(
        where=f"GPU {name} of {host}", bytes=float(memory.used), total=float(memory.total), holders=holders
    )


def _of_host(host: str, own: set[int]) -> Held:
    memory = psutil.virtual_memory()
    sizes = {
        process.pid: float(process.info["memory_info"].rss)
        for process in psutil.process_iter(["memory_info"])
        if process.info["memory_info"] is not None
    }
    mine = sum(size for pid, size in sizes.items() if pid in own)
    return Held(
        where=f"the host memory of {host}",
        bytes=max(0.0, float(memory.total - memory.available) - mine),
        total=float(memory.total),
        holders=_largest({pid: size for pid, size in sizes.items() if pid not in own}),
    )


def _own() -> set[int]:
    """This process, its ancestors and what Ray's node started."""
    me = psutil.Process()
    family = [me, *me.parents()]
    node = next((process for process in family if process.name() == "raylet"), me)
    return {process.pid for process in [*family, *node.children(recursive=True)]}


def _largest(sizes: Mapping[int, float]) -> tuple[tuple[str, int, float], ...]:
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:NAMED]
    return tuple((_name(pid), pid, size) for pid, size in largest)


def _name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:  # of another container
        return ""
