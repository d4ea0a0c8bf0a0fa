"""Whole-process time and memory of the commands that must be quick, beside their limits.

    python benchmarks/design_speed.py [--runs 5]

Prints the median wall and CPU seconds and the largest resident memory; a fixed Python loop, timed in
the same run, tells how busy the machine is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A command and its limits."""

    title: str
    arguments: tuple[str, ...]
    wall_limit_s: float
    memory_limit_mb: float | None


CASES = (
    Case(
        "design 64 GPUs 70B",
        ("design", "--gpus", "64", "--model", "70b", "--out", "{out}"),
        3.0,
        400,
    ),
    Case(
        "design 1,024 GPUs 405B",
        ("design", "--gpus", "1024", "--model", "405b", "--out", "{out}"),
        10.0,
        None,
    ),
    Case("--help", ("--help",), 0.4, None),
)


def run(arguments: tuple[str, ...]) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak MB of one process."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "plan.json")
        command = [
            sys.executable,
            "-m",
            "rlhfsim.cli.main",
            *(a.format(out=out) for a in arguments),
        ]
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def loop_seconds() -> float:
    """A loop of ten million additions: near 0.5 s on an idle machine of today."""
    begin, total = time.perf_counter(), 0
    for i in range(10_000_000):
        total += i
    return time.perf_counter() - begin


def main() -> None:
    """Print one row for each case."""
    parser = argparse.ArgumentParser(
        description="Whole-process time and memory of the quick commands"
    )
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    print(f"python loop of 10M additions: {loop_seconds():.2f} s")
    print(f"{'command':<26}{'wall s':>9}{'CPU s':>9}{'MB':>7}   limit")
    for case in CASES:
        run(case.arguments)  # warms the file cache
        rows = [run(case.arguments) for _ in range(runs)]
        wall, cpu = (statistics.median(row[i] for row in rows) for i in (0, 1))
        memory = max(row[2] for row in rows)
        limit = f"{case.wall_limit_s:g} s" + (
            f", {case.memory_limit_mb:g} MB" if case.memory_limit_mb else ""
        )
        ok = wall <= case.wall_limit_s and (
            case.memory_limit_mb is None or memory <= case.memory_limit_mb
        )
        print(
            f"{case.title:<26}{wall:>9.2f}{cpu:>9.2f}{memory:>7.0f}   {limit}  {'ok' if ok else 'MISSED'}"
        )


if __name__ == "__main__":
    main()
