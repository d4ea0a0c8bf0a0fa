"""Storage of the working directory: write with fsync, and read back past the page cache."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from executor.microbench.setup import ProbeSetup
from rlhfsim.specs.hardware.measured import Measured, summarise
from rlhfsim.units import MIB

CHUNK = 8 * int(MIB)
FULL, QUICK = 32, 8
"""Chunks in the file."""


def measure(setup: ProbeSetup) -> list[Measured]:
    """Rates of one sequential file, byte/s."""
    chunks, repeats = (QUICK, 4) if setup.quick else (FULL, 6)
    path, size = setup.scratch / "block", chunks * CHUNK
    written, read, way = [], [], ""
    for _ in range(repeats):
        written.append(size / _write(path, chunks))
        seconds, way = _read(path)
        read.append(size / seconds)
        path.unlink()
    where = f"{size // int(MIB)} MiB on {filesystem(setup.scratch)}"
    return [
        summarise("storage_write", written, "byte/s", f"{where}, sequential, fsync included"),
        summarise("storage_read", read, "byte/s", f"{where}, sequential, {way}"),
    ]


def _write(path: Path, chunks: int) -> float:
    block = os.urandom(CHUNK)
    started = time.perf_counter()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for _ in range(chunks):
            os.write(handle, block)
        os.fsync(handle)
    finally:
        os.close(handle)
    return time.perf_counter() - started


def _read(path: Path) -> tuple[float, str]:
    """Seconds, and how the page cache was kept out: O_DIRECT, or dropped where the file system refuses it."""
    try:
        handle, way = os.open(path, os.O_RDONLY | os.O_DIRECT), "page cache bypassed (O_DIRECT)"
    except OSError:
        handle, way = os.open(path, os.O_RDONLY), "page cache dropped (posix_fadvise)"
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    with mmap.mmap(-1, CHUNK) as buffer:  # page-aligned, as O_DIRECT asks
        try:
            started = time.perf_counter()
            while os.readv(handle, [buffer]):
                pass
            return time.perf_counter() - started, way
        finally:
            os.close(handle)


def filesystem(path: Path) -> str:
    """Type of the file system under a path: ext4, overlay, tmpfs."""
    resolved, kind_of_longest = Path(os.path.realpath(path)), "unknown"
    longest = -1
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        if resolved.is_relative_to(mount) and len(mount) > longest:
            longest, kind_of_longest = len(mount), kind
    return kind_of_longest
