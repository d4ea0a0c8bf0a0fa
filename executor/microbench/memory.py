"""Copies: inside device memory, by all cores at once, through serialisation, and between GPU and host."""

from __future__ import annotations

import io
import os
import time
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
import torch.multiprocessing as mp

from executor.microbench.setup import ProbeSetup
from rlhfsim.specs.hardware.measured import Measured, summarise
from rlhfsim.units import MIB

COPIED = 256 * int(MIB)
"""Bytes of one copy, far beyond any cache; a quarter in a quick run."""
SERIALISED = 64 * int(MIB)
BARRIER_S = 60.0


def measure(setup: ProbeSetup) -> list[Measured]:
    """Rates of copies, byte/s; reads and writes of device memory count both."""
    size = COPIED // (4 if setup.quick else 1)
    copies = [_copy(setup, size)]
    return copies + (
        _host_device(setup, size) if setup.device == "cuda" else [_together(setup, size), _serialised(setup)]
    )


def _copy(setup: ProbeSetup, size: int) -> Measured:
    x = torch.ones(size // 4, device=setup.device)
    y = torch.empty_like(x)
    taken = setup.samples(lambda: y.copy_(x), 20, 8)
    who = "one thread" if setup.device == "cpu" else "one GPU"
    return summarise(
        "memory_copy",
        [2 * size / t for t in taken],
        "byte/s",
        f"copy of {size // int(MIB)} MiB, {who}, read plus write",
    )


def _serialised(setup: ProbeSetup) -> Measured:
    """How a tensor leaves a process on a CPU: written by torch into bytes, then read back."""
    tensor = torch.ones(SERIALISED // 4)

    def there_and_back() -> None:
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)

    taken = setup.samples(there_and_back, 10, 5)
    return summarise(
        "serialised_copy",
        [2 * SERIALISED / t for t in taken],
        "byte/s",
        f"torch.save and torch.load of {SERIALISED // int(MIB)} MiB in memory, bytes one way",
    )


def _together(setup: ProbeSetup, size: int) -> Measured:
    """All cores copy at once; a round lasts as long as its slowest process."""
    cores, rounds = len(os.sched_getaffinity(0)), setup.repeats(12, 6)
    context = mp.get_context("spawn")
    barrier, results = context.Barrier(cores), context.SimpleQueue()
    workers = [
        context.Process(target=_copier, args=(barrier, results, size, rounds), daemon=True)
        for _ in range(cores)
    ]
    for worker in workers:
        worker.start()
    times = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    rates = [2 * size * cores / max(each) for each in zip(*times, strict=True)]
    return summarise(
        "memory_copy_all",
        rates,
        "byte/s",
        f"copy of {size // int(MIB)} MiB by {cores} processes at once, read plus write",
    )


def _copier(barrier: Barrier, results: Any, size: int, rounds: int) -> None:
    torch.set_num_threads(1)
    x = torch.ones(size // 4)
    y = torch.empty_like(x)
    y.copy_(x)
    seconds = []
    for _ in range(rounds):
        barrier.wait(BARRIER_S)
        started = time.perf_counter()
        y.copy_(x)
        seconds.append(time.perf_counter() - started)
    results.put(seconds)


def _host_device(setup: ProbeSetup, size: int) -> list[Measured]:
    """Pinned copies both ways, pageable ones, and the start of a copy; run over fakes alone."""
    on_gpu = torch.ones(size // 4, device="cuda")
    pinned, plain = torch.ones(size // 4).pin_memory(), torch.ones(size // 4)
    few = torch.ones(16).pin_memory()
    target = torch.empty(16, device="cuda")
    moved = f"{size // int(MIB)} MiB"

    def rate(name: str, call: Any, words: str) -> Measured:
        return summarise(name, [size / t for t in setup.samples(call, 20, 8)], "byte/s", words)

    def small() -> None:
        target.copy_(few, non_blocking=True)
        torch.accelerator.synchronize()

    return [
        rate(
            "host_to_device",
            lambda: on_gpu.copy_(pinned, non_blocking=True),
            f"pinned copy of {moved} to the GPU",
        ),
        rate(
            "device_to_host",
            lambda: pinned.copy_(on_gpu, non_blocking=True),
            f"pinned copy of {moved} from the GPU",
        ),
        rate("pageable_copy", lambda: on_gpu.copy_(plain), f"pageable copy of {moved} to the GPU"),
        summarise("copy_latency", setup.samples(small, 20, 8), "s", "pinned copy of 64 B and wait"),
    ]
