"""The checks in order of value, each in a process of its own; needs Python alone.

A process may lack packages, run out of time or die: that is a row of the report, never the end of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
Outcome = Literal["ran", "skipped", "failed", "out of time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question to the machine."""

    name: str
    """A function of `probes` in this folder, unless `command` is given."""
    title: str
    limit_s: float
    command: tuple[str, ...] = ()
    """Arguments for this Python: exit status 0 is the answer."""
    needs: tuple[str, ...] = ()
    """Packages without which it is skipped."""
    gpu: bool = False
    """Says nothing on a CPU."""


def _gpu_test(name: str, title: str, limit_s: float, *needs: str) -> Check:
    test = f"tests/executor/test_gpu.py::{name}"
    command = ("-m", "pytest", "-q", "-n", "0", "-m", "", test)
    return Check(name=name, title=title, limit_s=limit_s, command=command, needs=("pytest", *needs), gpu=True)


STACK = ("ray", "deepspeed", "vllm", "transformers", "pydantic")
CHECKS = (
    Check(name="machine", title="facts of the machine", limit_s=60),
    Check(
        name="ledger",
        title="peaks of training steps against the memory ledger",
        limit_s=150,
        needs=("torch", "transformers", "pydantic"),
    ),
    Check(name="attention", title="attention kernels, and what they allocate", limit_s=60, needs=("torch",)),
    Check(
        name="deepspeed",
        title="peaks of the executor's DeepSpeed engine against the ledger",
        limit_s=150,
        needs=("deepspeed", "transformers", "pydantic"),
    ),
    Check(name="copies", title="host and device, pageable and pinned", limit_s=40, needs=("torch",)),
    Check(name="ipc", title="a tensor in another process's hands", limit_s=60, needs=("torch",), gpu=True),
    _gpu_test("test_buckets_cross_processes_through_cuda_ipc", "buckets over CUDA IPC", 90, "pydantic"),
    Check(name="cpu_adam", title="DeepSpeedCPUAdam builds", limit_s=120, needs=("deepspeed",), gpu=True),
    Check(
        name="fsdp2",
        title="FSDP2 on one rank against the ledger",
        limit_s=90,
        needs=("transformers", "pydantic"),
    ),
    _gpu_test("test_a_hybrid_run_on_one_gpu", "GRPO on one GPU: start, sync, sleep, wake", 240, *STACK),
    Check(
        name="dpo",
        title="DPO end to end: killed, resumed, every iteration once",
        limit_s=240,
        needs=("ray", "deepspeed", "transformers", "pydantic", "simpy"),
    ),
    Check(
        name="rollout",
        title="vLLM by itself: start, log-probs, decode curve, sleep and wake",
        limit_s=150,
        needs=("vllm", "transformers", "pydantic"),
    ),
    Check(
        name="measure",
        title="micro-benchmarks of this machine as a profile",
        limit_s=400,
        command=("-m", "rlhfsim.cli", "profile", "measure", "--quick"),
        needs=("torch", "pydantic", "simpy"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a check."""

    name: str
    title: str
    outcome: Outcome
    seconds: float
    reason: str = ""
    rows: tuple[dict[str, Any], ...] = ()
    """what, unit, seen; expected or None; `tolerance` of the ratio seen / expected."""


def run(
    checks: Iterable[Check], *, budget_s: float, small: bool, heard: Callable[[list[Answer]], None]
) -> list[Answer]:
    """All checks in order, as far as the budget goes; `heard` gets the answers so far after each."""
    end, answers = time.monotonic() + budget_s, list[Answer]()
    for check in checks:
        answers.append(one(check, min(check.limit_s, end - time.monotonic()), small=small))
        heard(answers)
    return answers


def one(check: Check, limit_s: float, *, small: bool) -> Answer:
    """A check in its own process."""
    begun = time.monotonic()
    reason = _skipped(check, limit_s, small=small)
    if reason:
        return Answer(name=check.name, title=check.title, outcome="skipped", seconds=0.0, reason=reason)
    with TemporaryDirectory(prefix="first-contact-") as folder:
        file = Path(folder) / "rows.json"
        command = check.command or ("-m", "lab.first_contact.probes", check.name, str(file), str(int(small)))
        outcome, reason = _process(command, limit_s, Path(folder) / "output")
        rows = json.loads(file.read_text()) if file.exists() else []
    seconds = time.monotonic() - begun
    return Answer(
        name=check.name, title=check.title, outcome=outcome, seconds=seconds, reason=reason, rows=tuple(rows)
    )


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
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
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


def as_json(answers: list[Answer]) -> str:
    """Everything, for machines."""
    return json.dumps([asdict(answer) for answer in answers], indent=1) + "\n"
