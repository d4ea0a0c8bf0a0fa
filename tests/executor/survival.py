"""A run that is to survive: its plan, its settings, and what must be equal at its end."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import runs

from executor.coordination.tracking import read_metrics
from executor.settings import Checkpoints, Limits, Settings
from rlhfsim.plan import Plan

ITERATIONS = 6
OF_TIME = ("time/", "throughput/", "memory/", "utilization/", "overlap/", "latency/", "reward/critical_share")
"""Metrics that no two runs share."""


def plan(model: Path, **changes: Any) -> Plan:
    """PPO with every role: two training ranks, a rollout replica and a reward model on slots of their own."""
    pools = [
        {"name": "train", "gpus": 2},
        {"name": "rollout", "start": 2, "gpus": 1},
        {"name": "reward", "start": 3, "gpus": 1},
    ]
    reward = {"pool": "reward", "layout": {"dp": 1, "micro_batch": 8}}
    workload = {"reward": {"model": "same", "rules": {"seconds_per_sample": "1 ms", "workers": 2}}}
    return runs.plan(
        "disaggregated",
        "ppo",
        model,
        layout={"dp": 2, "zero": 2},
        placement={"pools": pools, "reward": reward},
        workload=workload,
        **changes,
    )


def settings(model: Path, *, every: int = 2, retries: int = 0, **changes: Any) -> Settings:
    """Settings of all runs that are compared."""
    limits = Limits(start_s=240, call_s=120, sync_s=60, retries=retries)
    return runs.settings(
        model, iterations=ITERATIONS, checkpoints=Checkpoints(every=every, keep=2), limits=limits, **changes
    )


def weights(folder: Path) -> dict[str, str]:
    """SHA-256 of the trained models at the end of a run."""
    last = folder / "checkpoints" / f"step-{ITERATIONS:06d}"
    return {
        role: hashlib.sha256((last / role / "model.safetensors").read_bytes()).hexdigest()
        for role in ("actor", "critic")
    }


def metrics(folder: Path) -> list[dict[str, float]]:
    """Rows of a run without what depends on the clock."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(OF_TIME)} for row in rows]


def processes(folder: Path) -> dict[str, int]:
    """Part -> process id of the run that lives in a folder."""
    found: dict[str, int] = json.loads((folder / "scratch" / "processes.json").read_text())
    return found


class Assassin(runs.Quiet):
    """A listener that kills a part of its run a moment after given iterations, once each."""

    def __init__(self, folder: Path, victims: Mapping[int, str], delay_s: float = 0.3) -> None:
        super().__init__()
        self.folder, self.victims, self.delay_s = folder, dict(victims), delay_s
        self.killed: list[tuple[float, str]] = []
        self.restarted: list[tuple[float, str]] = []
        self.resumed: list[float] = []

    def phase(self, text: str) -> None:
        """Note restarts."""
        super().phase(text)
        if "; restart " in text:
            self.restarted.append((time.monotonic(), text))

    def iteration(self, row: Any, total: int) -> None:
        """Kill."""
        super().iteration(row, total)
        if len(self.resumed) < len(self.restarted):
            self.resumed.append(time.monotonic())
        victim = self.victims.pop(int(row["step"]), None)
        if victim is not None:
            threading.Timer(self.delay_s, self._kill, [victim]).start()

    def _kill(self, victim: str) -> None:
        part, pid = next(
            (p, i)
            for p, i in processes(self.folder).items()
            if p.startswith(victim.split()[0]) and p.endswith(victim.split()[-1])
        )
        self.killed.append((time.monotonic(), part))
        os.kill(pid, signal.SIGKILL)

    def report(self) -> list[str]:
        """Seconds to detection and to the next iteration, a line a kill."""
        rows = zip(self.killed, self.restarted, self.resumed, strict=True)
        return [
            f"{part}: found after {found - at:.1f} s, next iteration after {back - at:.1f} s"
            for (at, part), (found, _), back in rows
        ]
