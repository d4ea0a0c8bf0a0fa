"""Time of the collectives between the GPUs of one replica in an engine's step."""

from __future__ import annotations

import numpy as np

from rlhfsim.kernels import collectives
from rlhfsim.kernels.device import Device, group
from rlhfsim.rollout.engine_step import EngineStep, Floats, nothing, on
from rlhfsim.rollout.matrices import ACTIVATION_BYTES
from rlhfsim.specs.model.model import ModelSpec


def tp_all_reduce(device: Device, model: ModelSpec, rows: Floats, tp: int) -> EngineStep:
    """All-reduce of n h activations over TP (G4): inside a node the faster of custom one- or two-shot and
    NCCL."""
    return collective(device, "all_reduce", rows * model.hidden * ACTIVATION_BYTES, tp)


def collective(device: Device, op: collectives.Op, size: Floats, ranks: int) -> EngineStep:
    """A collective over neighbouring GPUs: curves inside one domain, hierarchical beyond.

    Engines' own all-reduce opens handles of CUDA IPC, which hold inside a node: ranks of several nodes in one
    NVLink domain use NCCL (vLLM `CustomAllreduce`, issue 52778; SGLang's second version crosses nodes since
    July 2026, with an allocator that is not the default: issue 36429, where Llama-4 Scout at TP8 over two
    GB300 nodes loses 10.7 us an all-reduce without it; 18 here).
    """
    if ranks == 1:
        return nothing()
    where = group(ranks, 1, device.domain)
    if where.domains > 1:
        times = {
            "all_reduce": collectives.all_reduce,
            "all_gather": collectives.all_gather,
            "reduce_scatter": collectives.reduce_scatter,
        }
        scalar = np.vectorize(lambda s: times[op](device, float(s), where), otypes=[float])
        return on("network", scalar(size))
    seconds = device.curves.collective(op, size, ranks)
    if op == "all_reduce" and ranks <= device.gpus_per_node:
        seconds = np.minimum(seconds, device.curves.custom_all_reduce(size, ranks))
    return on("nvlink", seconds)
