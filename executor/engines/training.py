"""The way in for workers: join the process group, then build the engine that a layout asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

from executor.engines.protocols import ChannelSpec, EngineSpec, ScoringEngine, TrainingEngine


def start(rank: int, world: int, local_rank: int, host: str, port: int, timeout_s: float) -> None:
    """Join the process group of this worker's pool: NCCL where there is a GPU, else gloo.

    `timeout_s` bounds the rendezvous and every collective.
    """
    import torch

    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_SIZE": str(world),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }
    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
    torch.distributed.init_process_group(
        "nccl" if device else "gloo",
        timeout=timedelta(seconds=timeout_s),
        # a bound device makes torch split later groups off this one; a single rank has nobody to split from
        device_id=device if world > 1 else None,
    )


def stop() -> None:
    """Leave the process group; engines must be closed before."""
    import torch.distributed

    from executor.engines.deepspeed import process_groups

    process_groups.forget()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def library(spec: EngineSpec) -> Literal["pipeline", "DeepSpeed", "transformers"]:
    """What runs an engine: DeepSpeed's pipeline for pp > 1; DeepSpeed with an optimizer, or where weights are
    sharded (ZeRO-3, tp > 1); else transformers alone."""
    layout = spec.layout
    if layout.pp > 1:
        return "pipeline"
    sharded = layout.zero == 3 or layout.tp > 1
    return "DeepSpeed" if spec.optimizer is not None or sharded else "transformers"


def build(spec: EngineSpec) -> TrainingEngine | ScoringEngine:
    """The engine of `spec`; a collective of all its ranks."""
    match library(spec):
        case "pipeline":
            from executor.engines.pipeline.engine import PipelineEngine

            return PipelineEngine(spec)
        case "DeepSpeed":
            from executor.engines.deepspeed.engine import DeepSpeedEngine

            return DeepSpeedEngine(spec)
        case "transformers":
            from executor.engines.transformers.engine import TransformersEngine

            return TransformersEngine(spec)


def sender(channels: Mapping[int, ChannelSpec], rank: int) -> Any:
    """This rank's end of the channels of its group, by sending rank; None where it only gathers."""
    from executor.weight_transfer.channel import Sender

    spec = next(iter(channels.values()))
    if spec.native:
        from executor.engines.vllm.transfer import Follower, NativeSender

        return Sender(channels[rank], NativeSender) if rank in channels else Follower(spec, rank)
    return Sender(channels[rank]) if rank in channels else None
