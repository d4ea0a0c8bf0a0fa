"""The checks in order of value per second, each in a process of its own; needs Python alone.

A process may lack packages, run out of time or die: that is a row of the report, never the end of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "site"
"""Packages that an archive of `pack` brought."""
if SITE.is_dir():
    sys.path.insert(1, str(SITE))
Outcome = Literal["ran", "skipped", "failed", "out of time", "cut off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question to the machine."""

    name: str
    """A function of `probes` in this folder, unless `command` is given."""
    title: str
    value: int
    """How many predictions and claims of the docs rest on the answer, roughly."""
    usual_s: float
    """Seconds that it is thought to take; `limit_s` ends it."""
    limit_s: float
    command: tuple[str, ...] = ()
    """Arguments for this Python: exit status 0 is the answer."""
    needs: tuple[str, ...] = ()
    """Packages without which it is skipped."""
    gpu: bool = False
    """Says nothing on a CPU."""


def _check(name: str, title: str, value: int, usual_s: float, limit_s: float, *needs: str) -> Check:
    return Check(name=name, title=title, value=value, usual_s=usual_s, limit_s=limit_s, needs=needs)


def _gpu_test(name: str, title: str, value: int, usual_s: float, limit_s: float, *needs: str) -> Check:
    test = f"tests/executor/test_gpu.py::{name}"
    command = ("-m", "pytest", "-q", "-n", "0", "-m", "", test)
    check = _check(name, title, value, usual_s, limit_s, "pytest", *needs)
    return replace(check, command=command, gpu=True)


MODEL = ("torch", "transformers", "pydantic")
STACK = ("ray", "deepspeed", "vllm", *MODEL)
CHECKS = tuple(
    sorted(
        (
            _check("machine", "facts of the machine", 10, 5, 60),
            _check("ledger", "peaks of training steps against the memory ledger", 8, 60, 150, *MODEL),
            _check("attention", "attention kernels, and what they allocate", 3, 15, 60, "torch"),
            _check("deepspeed", "peaks of the executor's DeepSpeed engine", 6, 60, 150, "deepspeed", *MODEL),
            _check("copies", "host and device, pageable and pinned", 2, 8, 40, "torch"),
            replace(_check("ipc", "a tensor in another process's hands", 3, 20, 60, "torch"), gpu=True),
            _gpu_test(
                "test_buckets_cross_processes_through_cuda_ipc",
                "buckets over CUDA IPC",
                5,
                30,
                90,
                "pydantic",
            ),
            replace(_check("cpu_adam", "DeepSpeedCPUAdam builds", 1, 60, 120, "deepspeed"), gpu=True),
            _check("fsdp2", "FSDP2 on one rank against the ledger", 2, 25, 90, *MODEL),
            _gpu_test(
                "test_a_hybrid_run_on_one_gpu", "GRPO on one GPU: start, sync, sleep", 10, 150, 240, *STACK
            ),
            _check("dpo", "DPO: killed, resumed", 4, 90, 240, "ray", "deepspeed", "simpy", *MODEL),
            _check("rollout", "vLLM by itself: log-probs, decode, sleep", 5, 90, 150, "vllm", *MODEL),
            _check("measure", "micro-benchmarks of this machine", 8, 150, 400, "torch", "pydantic"),
        ),
        key=lambda check: -check.value / check.usual_s,
    )
)
"""By value per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a check."""

    name: str
    title: str
    small: bool
    """On a CPU, in small."""
    outcome: Outcome = "cut off"
    seconds: float = 0.0
    reason: str = ""
    rows: tuple[dict[str, Any], ...] = ()
    """what, unit, seen; expected or None; `tolerance` of the ratio seen / expected."""


def run(
    checks: Iterable[Check], *, budget_s: float, small: bool, stream: Path, heard: Callable[[Answer], None]
) -> None:
    """All checks in order, as far as the budget goes; what each sees is in `stream` at once."""
    end = time.monotonic() + budget_s
    for check in checks:
        heard(one(check, min(check.limit_s, end - time.monotonic()), small=small, stream=stream))


def one(check: Check, limit_s: float, *, small: bool, stream: Path) -> Answer:
    """A check in its own process, which appends its rows to the stream."""
    begun = time.monotonic()
    append(stream, {"check": check.name, "small": small})
    outcome: Outcome = "skipped"
    reason = _skipped(check, limit_s, small=small)
    if not reason:
        command = check.command or (
            "-m",
            "lab.first_contact.probes",
            check.name,
            str(stream),
            str(int(small)),
        )
        with TemporaryDirectory(prefix="first-contact-") as folder:
            outcome, reason = _process(command, limit_s, Path(folder) / "output")
    ended = {"outcome": outcome, "seconds": time.monotonic() - begun, "reason": reason}
    append(stream, {"check": check.name, **ended})
    return next(answer for answer in answers(stream) if answer.name == check.name)


def append(stream: Path, entry: Mapping[str, Any]) -> None:
    """One line, on the disk when this returns; what was cut off before it stays a line of its own."""
    with stream.open("a", encoding="utf-8") as file:
        file.write(f"\n{json.dumps(entry)}\n")
        file.flush()
        os.fsync(file.fileno())


def answers(stream: Path) -> list[Answer]:
    """What a stream holds, the last run of each check; a line that was cut off is left out."""
    found: dict[str, Answer] = {}
    titles = {check.name: check.title for check in CHECKS}
    for line in stream.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            entry = json.loads(line)
            name = entry.pop("check")
            if "small" in entry:
                found[name] = Answer(name=name, title=titles.get(name, name), **entry)
            elif "row" in entry:
                found[name] = replace(found[name], rows=(*found[name].rows, entry["row"]))
            else:
                found[name] = replace(found[name], **entry)
    return list(found.values())


def _skipped(check: Check, left_s: float, *, small: bool) -> str:
    if left_s < 5:
        return "no time left"
    if small and check.gpu:
        return "needs a GPU"
    from importlib.util import find_spec

    missing = [name for name in check.needs if find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def _process(command: tuple[str, ...], limit_s: float, log: Path) -> tuple[Outcome, str]:
    """Run to the end or to the limit, with everything that it started; the reason is its last line."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(SITE), os.environ.get("PYTHONPATH", "")])
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "out of time", f"{limit_s:.0f} s"
    if status == 0:
        return "ran", ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "failed", lines[-1][:300] if lines else f"exit status {status}"
