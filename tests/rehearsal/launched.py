"""DPO by a real launch on a Ray cluster of two rehearsal GPUs: an iteration, and one more with --resume.

`launched.py FOLDER` writes FOLDER/launched.json; `PYTHONPATH` of Ray's workers holds `start/`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import runs

from executor.settings import Checkpoints, Data
from executor.tasks import tiny
from rlhfsim.errors import RlhfsimError
from rlhfsim.trace import read_trace

FOLDER, GPUS = Path(sys.argv[1]), 2


def cluster() -> Any:
    """One node of two GPUs whose workers find the device."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
    own, here = os.environ["PYTHONPATH"], str(Path(__file__).parent / "start")
    os.environ["PYTHONPATH"] = f"{here}{os.pathsep}{own}"
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 4, "num_gpus": GPUS, "object_store_memory": 128 * 2**20, "include_dashboard": False}
    return Cluster(initialize_head=True, head_node_args=head)


def main() -> dict[str, Any]:
    """Rows of both launches, counters of memory, and the message of one on a device that is too small."""
    model = tiny.build(FOLDER / "tiny", layers=2)
    pairs = FOLDER / "pairs.jsonl"
    pairs.write_text(
        "".join(json.dumps({"prompt": f"{i}+", "chosen": "1", "rejected": "2"}) + "\n" for i in range(20))
    )
    options: dict[str, Any] = {"layout": {"dp": GPUS, "zero": 3}, "workload": {"prompts": 16}}
    plan = runs.plan("smart", "dpo", model, **options)
    data = Data(path=str(pairs), shuffle=False)
    settings = runs.settings(model, iterations=1, data=data, checkpoints=Checkpoints(every=1))
    address = cluster().address
    first, heard = runs.run(plan, settings, FOLDER / "run", address)
    _, more = runs.run(plan, replace(settings, iterations=2), FOLDER / "run", address, resume=True)
    rows = heard.rows + more.rows
    trace = read_trace(first.files.trace)
    found = {"steps": [row["step"] for row in rows], "losses": [row["dpo/loss"] for row in rows]}
    found |= {"names": sorted(rows[-1]), "spans": sorted({span.name for span in trace.spans})}
    try:
        runs.run(
            plan, replace(settings, variables={"REHEARSAL_BYTES": str(2**19)}), FOLDER / "small", address
        )
    except RlhfsimError as error:
        found |= {"code": error.code, "message": error.message, "help": error.help}
    return found


if __name__ == "__main__":
    (FOLDER / "launched.json").write_text(json.dumps(main()))
