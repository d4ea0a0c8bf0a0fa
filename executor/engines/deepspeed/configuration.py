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
    config.dist = _Ranks(pp * dp * tp)
    try:
        parsed = config.DeepSpeedConfig(dict(request["config"]), mpu=_DataParallel(dp))
    except Exception as error:  # whatever DeepSpeed raises is its answer
        return {"refusal": " ".join(str(error).split())[:300]}
    topology = PipeModelDataParallelTopology(num_pp=pp, num_dp=dp, num_mp=tp)
    return {
        "zero": int(parsed.zero_optimization_stage),
        "train_batch": int(parsed.train_batch_size),
        "groups": {name: topology.get_axis_comm_lists(axis) for name, axis in AXES.items()},
    }


class _Ranks:
    """What `DeepSpeedConfig` asks of a process group that is not there."""

    def __init__(self, world: int) -> None:
        self._world = world

    def get_rank(self) -> int:
        return 0

    def get_world_size(self, group: Any = None) -> int:
        return self._world


class _DataParallel:
    """What it asks of a model-parallel unit."""

    def __init__(self, dp: int) -> None:
        self._dp = dp

    def get_data_parallel_world_size(self) -> int:
        return self._dp


if __name__ == "__main__":
    main()
