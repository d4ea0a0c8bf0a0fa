"""All-reduce among the local ranks: gloo between two processes on a CPU, NCCL between the GPUs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from executor.microbench.setup import ProbeSetup, unavailable
from rlhfsim.specs.hardware.measured import Measured, summarise
from rlhfsim.units import KIB, MIB

SIZES = (1 * KIB, 16 * KIB, 256 * KIB, 4 * MIB, 64 * MIB)
QUICK = (1 * KIB, 256 * KIB, 16 * MIB)
WARM = 2
CPU_RANKS = 2


def measure(setup: ProbeSetup) -> list[Measured]:
    """Seconds of an all-reduce by (ranks, bytes), and of the start of a group with its first collective."""
    cuda = setup.device == "cuda"
    ranks = torch.accelerator.device_count() if cuda else CPU_RANKS
    if ranks < 2:
        raise unavailable("this machine has one GPU, so there is nobody to exchange with")
    sizes, repeats, groups = (QUICK, 6, 4) if setup.quick else (SIZES, 15, 5)
    backend = "nccl" if cuda else "gloo"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    results = mp.get_context("spawn").SimpleQueue()
    arguments = (ranks, backend, setup.scratch, sizes, repeats, groups, results)
    start: Any = mp.spawn  # type: ignore[attr-defined]
    start(_rank, args=arguments, nprocs=ranks)
    starts, times = results.get()
    how = f"{backend}, {ranks} processes of this machine"
    points = [summarise("group_start", starts, "s", f"start and first collective of a group, {how}")]
    return points + [
        summarise("all_reduce", taken, "s", how, at=(float(ranks), size)) for size, taken in times.items()
    ]


def _rank(
    rank: int,
    ranks: int,
    backend: str,
    scratch: Path,
    sizes: tuple[float, ...],
    repeats: int,
    groups: int,
    results: Any,
) -> None:
    torch.set_num_threads(1)
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.accelerator.set_device_index(rank)
    starts = []
    for group in range(groups):
        if group:
            dist.destroy_process_group()
        started = time.perf_counter()
        dist.init_process_group(
            backend, init_method=f"file://{scratch}/group{group}", rank=rank, world_size=ranks
        )
        dist.all_reduce(torch.ones(1, device=device))
        starts.append(time.perf_counter() - started)
    times = {size: _all_reduce(size, repeats, device) for size in sizes}
    dist.destroy_process_group()
    if rank == 0:
        results.put((starts[1:], times))  # the first also waits for the slowest process to import
    os._exit(0)  # an interpreter that goes down aborts if a thread of gloo wants it once more


def _all_reduce(size: float, repeats: int, device: str) -> list[float]:
    tensor = torch.ones(int(size) // 4, device=device)
    seconds = []
    for _ in range(WARM + repeats):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        if device != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[WARM:]
