"""Which machine this is: device, cores, memory, peak by its vector units and clock, versions."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path

import torch

from executor.engines import device
from executor.machine.facts import libraries, memory
from rlhfsim.specs.hardware.measured import Machine

FLOP_A_CYCLE = (("avx512f", 64, "AVX-512"), ("avx2", 32, "AVX2"), ("asimd", 16, "NEON"), ("sse2", 8, "SSE"))
"""FP32 FLOP of one core in a cycle where it starts two fused multiply-adds of full width, the most that
server cores do (Intel and AMD optimisation manuals)."""


def describe() -> Machine:
    """This machine, as this process sees it."""
    cuda = device.available()
    info = Path("/proc/cpuinfo").read_text()
    peak, source = cpu_peak(info)
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return Machine(
        kind="cuda" if cuda else "cpu",
        title=device.name() if cuda else model[1].strip() if model else "unknown CPU",
        date=datetime.now(UTC).date().isoformat(),
        cores=len(os.sched_getaffinity(0)),
        memory=memory("MemTotal"),
        free=memory("MemAvailable"),
        peak=0.0 if cuda else peak,
        peak_source="" if cuda else source,
        gpus=torch.accelerator.device_count() if cuda else 0,
        gpu_memory=device.total_bytes() if cuda else 0.0,
        versions=tuple(libraries("torch", "vllm", "deepspeed").items()),
    )


def cpu_peak(info: str) -> tuple[float, str]:
    """FP32 FLOP/s of one core from the text of /proc/cpuinfo, and how; 0 where it does not say."""
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    clock = [float(mhz) for mhz in re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", info, re.MULTILINE)]
    if flags is None or not clock:
        return 0.0, "unknown: /proc/cpuinfo gives no clock"
    have = set(flags[1].split())
    for flag, flop, name in FLOP_A_CYCLE:
        if flag in have:
            ghz = max(clock) / 1000
            return (
                flop * ghz * 1e9,
                f"{name}, two fused multiply-adds a cycle at {ghz:.2f} GHz (/proc/cpuinfo)",
            )
    return 0.0, "unknown vector units"
