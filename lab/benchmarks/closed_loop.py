"""The closed loop on this machine: real runs, calibrated on some of them, predicting the others.

    PYTHONPATH=. python lab/benchmarks/closed_loop.py [--out reports] [--runs FOLDER] [--limit SECONDS]

Runs that are in FOLDER already are not repeated, so that an interrupted benchmark goes on. With `--limit` no
run starts after so many seconds. Runs go before other work of the machine where the system allows it. Writes
calibration.md, calibration.json and calibration.svg when all runs
are there. What is run and how it is split: closed_loop_runs.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from closed_loop_runs import SURROUNDINGS, Run, execute, missing, schedule
from process import bind

ROOT = Path(__file__).parents[2]
SLOTS = 4


def main() -> None:
    """Run what is missing, then write the report."""
    parser = argparse.ArgumentParser(description="Closed loop: execute, calibrate, predict")
    parser.add_argument("--out", type=Path, default=ROOT / "reports")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "closed_loop")
    parser.add_argument("--limit", type=float, default=float("inf"))
    parser.add_argument("--only", nargs="+", help="names of runs; no report is written")
    parser.add_argument("--partial", action="store_true", help="report of the runs there are; no new ones")
    asked = parser.parse_args()
    bind()
    go_first()
    asked.runs.mkdir(parents=True, exist_ok=True)
    wanted = [run for run in missing(asked.runs) if not asked.only or run.name in asked.only]
    if wanted and not asked.partial:
        run_all(wanted, asked.runs.absolute(), time.monotonic() + asked.limit)
    left = list(missing(asked.runs))
    if (left or asked.only) and not asked.partial:
        print(f"{len(left)} of {len(schedule())} runs are missing: call again to go on", flush=True)
        return
    from closed_loop_report import write

    write(asked.runs, asked.out)


def go_first() -> None:
    """Ahead of other sessions of the machine, where Linux groups processes by session and we may say so."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-20")


def run_all(wanted: list[Run], runs: Path, deadline: float) -> None:
    """One run after the other on one Ray cluster, until the deadline."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # 15 by default: any other process would go first
    os.environ.setdefault("RAY_worker_niceness", "0")
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": 4,
        "resources": {"slot": SLOTS},
        "object_store_memory": 256 * 2**20,
        "include_dashboard": False,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for i, run in enumerate(wanted):
            if time.monotonic() > deadline:
                break
            print(f"[{i + 1}/{len(wanted)}] {run.name} ({run.role})", flush=True)
            begin = time.monotonic()
            others = execute(run, runs, cluster.address)
            seconds = time.monotonic() - begin
            (runs / run.name / SURROUNDINGS).write_text(json.dumps({"others": others, "seconds": seconds}))
            print(f"    done in {seconds:.0f} s; others kept {others:.2f} cores busy", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
