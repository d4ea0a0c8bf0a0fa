"""Bytes of this process and of its GPU: after a call, and at most during it.

    allocated, peak        tensors of this process (torch's allocator), after the call and at most during it
    reserved               what torch's allocator holds of the device, freed blocks that it keeps included
    device, device_peak    used on the GPU by all of its processes, as the driver counts: contexts, NCCL too
    host, host_peak        resident set of this process

The driver keeps no peak: `device_peak` is the larger of what was used before the call, and what is used after
it with what torch held more in between; what another process held only meanwhile is missed. Without a GPU
tensors and device are the resident set, whose peak (VmHWM) Linux forgets on request (proc(5), `clear_refs`);
where it does not, peak and present are one.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rlhfsim.units import KIB

log = logging.getLogger(__name__)
CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
FORGET_PEAK = "5"
"""Written to `clear_refs`: the peak of the resident set begins again."""
Reading = dict[str, float]


class Meter:
    """What one call takes: `start` before it, `read` after it."""

    def __init__(self) -> None:
        self._host_peak = False
        self._device = 0.0
        """Used on the GPU when the call began."""

    def start(self) -> None:
        """Forget earlier peaks."""
        try:
            CLEAR_REFS.write_text(FORGET_PEAK)
            self._host_peak = True
        except OSError as error:  # another kernel, or a container without the right
            log.info("the peak of the resident set is not known: %s", error)
        if (gpu := _accelerator()) is not None:
            gpu.reset_peak_memory_stats()
            self._device = _used(gpu)

    def read(self) -> Reading:
        """Bytes by the keys above."""
        import psutil  # not of the base install, whose dry run reads the plan's ledger here

        host = float(psutil.Process().memory_info().rss)
        most = max(host, _resident_peak()) if self._host_peak else host
        if (gpu := _accelerator()) is None:
            device = {"allocated": host, "peak": most, "device": host, "device_peak": most}
        else:
            used, reserved = _used(gpu), float(gpu.memory_reserved())
            device = {
                "allocated": float(gpu.memory_allocated()),
                "peak": float(gpu.max_memory_allocated()),
                "reserved": reserved,
                "device": used,
                "device_peak": max(self._device, used + float(gpu.max_memory_reserved()) - reserved),
            }
        return device | {"host": host, "host_peak": most}


def _accelerator() -> Any:
    """torch.accelerator; None without a GPU."""
    import torch

    from executor.engines import device

    return torch.accelerator if device.available() else None


def _used(gpu: Any) -> float:
    free, total = gpu.get_memory_info()
    return float(total - free)


def _resident_peak() -> float:
    [line] = [line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM")]
    return float(line.split()[1]) * KIB
