"""DeepSpeed's own reading of configurations and layouts, without a process group.

`python -m executor.engines.deepspeed.configuration` reads a list of `{"config", "pp", "dp", "tp"}` on stdin
and writes a list: `{"refusal"}`, or what DeepSpeed made of it: `{"zero", "train_batch", "groups"}`, the
groups as its own topology forms them (ranks by axis).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

AXES = {"pipeline": "pipe", "data": "data", "tensor": "model"}
"""Our names of DeepSpeed's axes."""


def main() -> None:
    """Answer every request of stdin."""
    answers, sys.stdout = sys.stdout, sys.stderr  # DeepSpeed logs on stdout
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    json.dump([_answer(request) for request in json.load(sys.stdin)], answers)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    from deepspeed.runtime import config
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    pp, dp, tp = (request[name] for name in ("pp", "dp", "tp"))
    # what DeepSpeed asks of process groups that are not there
    ranks = pp * dp * tp
    config.dist = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda group=None: ranks)
    model_parallel = SimpleNamespace(get_data_parallel_world_size=lambda: dp)
    try:
        parsed = config.DeepSpeedConfig(dict(request["config"]), mpu=model_parallel)
    except Exception as error:  # whatever DeepSpeed raises is its answer
        return {"refusal": " ".join(str(error).split())[:300]}
    topology = PipeModelDataParallelTopology(num_pp=pp, num_dp=dp, num_mp=tp)
    return {
        "zero": int(parsed.zero_optimization_stage),
        "train_batch": int(parsed.train_batch_size),
        "groups": {name: topology.get_axis_comm_lists(axis) for name, axis in AXES.items()},
    }


if __name__ == "__main__":
    main()
