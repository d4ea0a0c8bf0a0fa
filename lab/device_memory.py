"""Memory of the calls of a step on the rehearsal device, beside the ledger of their plan at the same moments.

    python -m lab.device_memory                     # 18 small plans, two ranks: about 3 min of CPU
    python -m lab.device_memory "dpo zero3" "sft zero1"
    python -m lab.device_memory --engines           # vLLM's weights and KV cache, and both ends of a weight sync

Tensors alone are compared; contexts, NCCL, CUDA graphs and fragmentation are constants of the profiles with their
sources. The device, the plans and what is scaled down: tests/rehearsal/held.py and engine_held.py.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rlhfsim.units import MB

TESTS = Path(__file__).resolve().parents[1] / "tests"
RANKS = 2
MEMORY = 2 * 2**30
"""Bytes of each rank's device."""
CLOSE = 0.05
"""Share of the measured bytes that the ledger may be off."""
Rows = Sequence[Mapping[str, Any]]


def measured(folder: Path, cases: Sequence[str] = ()) -> dict[str, Rows]:
    """Case -> moments of a step with the bytes that were read and planned."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    path = os.pathsep.join([str(TESTS.parent), str(TESTS / "executor"), str(TESTS / "rehearsal")])
    own = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "REHEARSAL_BYTES": str(MEMORY)}
    own.pop("DS_ACCELERATOR", None)
    program = [sys.executable, str(TESTS / "rehearsal/device.py"), str(TESTS / "rehearsal/held.py")]
    logs = [folder / f"rank-{rank}.log" for rank in range(RANKS)]
    running = [
        subprocess.Popen(
            [*program, str(rank), port, str(folder), *cases],
            env=own,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    for process, log in zip(running, logs, strict=True):
        if process.wait():
            raise RuntimeError(log.read_text()[-3000:])
    found: dict[str, Rows] = json.loads((folder / "held.json").read_text())
    return found


def measured_engines(folder: Path, cases: Sequence[str] = ()) -> dict[str, Rows]:
    """The same of vLLM engines that generate, sleep, receive weights and wake, and of the trainer that sends."""
    places = ("rehearsal/start", "", "executor", "rehearsal")
    path = os.pathsep.join([str(TESTS.parent), *(str(TESTS / place) for place in places)])
    own = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "REHEARSAL_BYTES": str(MEMORY)}
    own |= {"REHEARSAL_GPUS": str(folder / "gpu-")}
    own.pop("DS_ACCELERATOR", None)
    program = [sys.executable, str(TESTS / "rehearsal/engine_held.py"), str(folder), *cases]
    ran = subprocess.run(program, env=own, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(ran.stderr[-3000:])
    found: dict[str, Rows] = json.loads((folder / "engine_held.json").read_text())
    return found


def wrong(row: Mapping[str, Any]) -> bool:
    """Whether a moment is off by more than `CLOSE`, or above a bound."""
    if row.get("bound"):
        return bool(row["measured"] > row["planned"])
    return abs(off(row) or 0.0) > CLOSE


def off(row: Mapping[str, Any]) -> float | None:
    """Share by which the plan says more than was read; None where nothing is there."""
    return row["planned"] / max(1.0, row["measured"]) - 1 if row["planned"] else None


def table(found: Mapping[str, Rows]) -> Iterator[str]:
    """A line a moment, with what the plan's bytes are."""
    for case, rows in found.items():
        yield case
        for row in rows:
            share = off(row)
            parts = ", ".join(f"{name} {size / MB:.1f}" for name, size in row["parts"].items())
            yield (
                f"  {row['phase']:26}{row['measured'] / MB:8.2f}{row['planned'] / MB:8.2f} MB"
                f"{'  bound ' if row.get('bound') else '' if share is None or not row['measured'] else f'{share:+8.1%}'}  {parts}"
            )


@click.command()
@click.argument("cases", nargs=-1)
@click.option("--engines", is_flag=True, help="vLLM's engines, not the trainers.")
def main(cases: tuple[str, ...], engines: bool) -> None:
    """Exit code 1 where a moment is off by more than `CLOSE`."""
    with tempfile.TemporaryDirectory() as folder:
        found = (measured_engines if engines else measured)(Path(folder), cases)
    print(*table(found), sep="\n")
    further = [row for rows in found.values() for row in rows if wrong(row)]
    print(f"{sum(map(len, found.values()))} moments, {len(further)} off by more than {CLOSE:.0%}")
    sys.exit(1 if further else 0)


if __name__ == "__main__":
    main()
