"""GRPO by real launches on a Ray cluster of rehearsal GPUs, vLLM beside or apart from the trainers.

`launches.py FOLDER GPUS CASE...` writes FOLDER/launches.json; `PYTHONPATH` of Ray's workers holds `start/`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import runs

from executor.settings import Checkpoints, Limits, Settings
from executor.tasks import tiny
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.trace import read_trace

FOLDER = Path(sys.argv[1])
MEMORY = str(256 * 2**20)
"""Bytes of each GPU."""
SLEEP = {"smart": 2, "hybrid": 1}
BUCKET = 2**18
"""Bytes; of the executor's 1 GiB a GPU here would hold none."""
LAUNCHED: dict[str, tuple[str, int, int, int]] = {
    "colocated": ("smart", 2, 2, 1),
    "hybrid": ("hybrid", 2, 2, 1),
    "disaggregated": ("disaggregated", 2, 2, 1),
    "asynchronous": ("async", 2, 3, 1),
    "colocated on eight": ("smart", 8, 3, 8),
    "hybrid on eight": ("hybrid", 8, 2, 8),
    "disaggregated on eight": ("disaggregated", 4, 2, 4),
    "asynchronous on eight": ("async", 4, 3, 4),
}
"""Case -> architecture, trainer ranks, stage of ZeRO, replicas of vLLM."""


def plan_of(name: str, model: Path) -> Plan:
    """Its KV cache is small: every GPU has few bytes."""
    architecture, ranks, zero, replicas = LAUNCHED[name]
    shared = architecture in SLEEP
    rollout = {
        "pool": "all" if shared else "rollout",
        "layout": {"dp": replicas, "memory_utilization": 0.03},
        "sleep": SLEEP.get(architecture, 0),
    }
    pools = [{"name": "train", "gpus": ranks}, {"name": "rollout", "start": ranks, "gpus": replicas}]
    placement = {"rollout": rollout} | ({} if shared else {"pools": pools})
    layout = {"dp": ranks, "zero": zero}
    return runs.plan(architecture, "grpo", model, layout=layout, placement=placement)


def cluster(gpus: int) -> Any:
    """One node whose workers find the device."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
    own, here = os.environ["PYTHONPATH"], str(Path(__file__).parent / "start")
    os.environ["PYTHONPATH"] = f"{here}{os.pathsep}{own}"
    os.environ["REHEARSAL_GPUS"] = str(FOLDER / "gpu-")
    os.environ["REHEARSAL_BYTES"] = MEMORY
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": gpus + 2,
        "num_gpus": gpus,
        "object_store_memory": 128 * 2**20,
        "include_dashboard": False,
    }
    return Cluster(initialize_head=True, head_node_args=head)


def settings(model: Path, **changes: Any) -> Settings:
    """Two iterations; waits that a busy machine needs."""
    limits = Limits(start_s=1200, call_s=600, sync_s=300, retries=0)
    return replace(runs.settings(model, limits=limits, precision="fp32", bucket_bytes=BUCKET), **changes)


def learnt(name: str, model: Path, address: str) -> dict[str, Any]:
    """Rows and spans of a run, whose third iteration comes after a checkpoint and a second launch."""
    plan, wanted = plan_of(name, model), settings(model, checkpoints=Checkpoints(every=2))
    _, heard = runs.run(plan, wanted, FOLDER / name, address)
    outcome, resumed = runs.run(plan, replace(wanted, iterations=3), FOLDER / name, address, resume=True)
    keys = ("step", "mismatch/max_abs_dlogp", "policy/grad_norm", "staleness/max")
    return {
        "rows": [{key: row[key] for key in keys if key in row} for row in (*heard.rows, *resumed.rows)],
        "spans": sorted({span.name for span in read_trace(outcome.files.trace).spans}),
        "memory": {key: value for key, value in heard.rows[-1].items() if key.startswith("memory/")},
    }


def stopped(name: str, plan: Plan, wanted: Settings, address: str) -> dict[str, Any]:
    """The message that a run ends with, and when."""
    start = time.monotonic()
    try:
        runs.run(plan, wanted, FOLDER / name, address)
    except RlhfsimError as error:
        return {
            "code": error.code,
            "message": error.message,
            "help": error.help,
            "seconds": time.monotonic() - start,
        }
    return {"code": "", "message": "it went on"}


def kill_trainer() -> None:
    """SIGKILL to a training rank of the cluster of this program once it trains."""
    while True:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if "ray::Worker.train" in " ".join(process.cmdline()):
                    process.kill()
                    return
        time.sleep(0.05)


def faults(name: str, model: Path, address: str) -> dict[str, Any]:
    """Launches that end by a fault of a GPU."""
    plan, wanted = plan_of("hybrid", model), settings(model)
    match name:
        case "small":
            return stopped(
                name, plan, replace(wanted, variables={"REHEARSAL_BYTES": str(40 * 2**20)}), address
            )
        case "expandable":
            told = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
            return stopped(name, plan, replace(wanted, variables=told), address)
        case "other":
            plan = replace(plan, prediction=replace(plan.prediction, capacity_bytes=80e9))
            return stopped(
                name, plan, replace(wanted, variables={"REHEARSAL_NVML_BYTES": str(42 * 10**9)}), address
            )
        case _:
            threading.Thread(target=kill_trainer, daemon=True).start()
            return stopped(name, plan, wanted, address)


if __name__ == "__main__":
    base = tiny.build(FOLDER / "tiny", layers=2)
    joined = cluster(int(sys.argv[2])).address
    found = {}
    for case in sys.argv[3:]:
        found[case] = learnt(case, base, joined) if case in LAUNCHED else faults(case, base, joined)
        (FOLDER / "launches.json").write_text(json.dumps(found, indent=1))
