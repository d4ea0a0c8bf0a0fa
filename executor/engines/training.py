"""The way in for workers: join the process group, then build the engine that a layout asks for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal

from executor.engines.protocols import ChannelSpec, EngineSpec, ScoringEngine, TrainingEngine
from executor.engines.teachers import Teachers
from executor.machine.facts import LEAST_DRIVER
from executor.sockets import listener
from rlhfsim.errors import RlhfsimError


def check_device(*, gpu: bool) -> bool:
    """Whether this process computes on a GPU; DeepSpeed is told the same, whatever its parent was told.

    Raises:
        RlhfsimError: its slot is a GPU (`gpu`) that torch cannot use.
    """
    import torch

    from executor.engines import device

    if device.available():
        os.environ.pop("DS_ACCELERATOR", None)
        return True
    if gpu:
        raise RlhfsimError(
            "gpu-not-usable",
            f"a process was given a GPU (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}) "
            f"that torch {torch.__version__} cannot use: {device.why_not()}",
            help="rlhfsim check-machine there compares the driver with the CUDA of torch: install a newer "
            f"driver (CUDA 13: {LEAST_DRIVER[13]} or later), or torch built for that driver",
        )
    os.environ["DS_ACCELERATOR"] = "cpu"
    return False


def rendezvous(host: str, ranks: int) -> Any:
    """The store of a process group on a port that the kernel picks; rank 0 keeps it and `start` joins it.

    A port that is looked for and let go could be another's by then. PyTorch hands the server that a process
    has to every multi-tenant store of its port, and rank 0 makes such a one (its rendezvous.py).
    """
    from torch import distributed

    store: Any = distributed.TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__
    socket = listener(host, 0)  # the store listens at all interfaces unless it is handed a socket
    port = int(socket.getsockname()[1])
    options = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    return store(host, port, ranks, master_listen_fd=socket.detach(), **options)


def start(
    rank: int, world: int, local_rank: int, host: str, port: int, timeout_s: float, *, gpu: bool = False
) -> None:
    """Join the process group of this worker's pool: NCCL where there is a GPU, else gloo.

    `timeout_s` bounds the rendezvous and every collective; `gpu`: the worker was given one.
    """
    import torch

    from executor.engines import device

    if threads := os.environ.get("OMP_NUM_THREADS"):  # a fork was born with torch, and with fewer
        torch.set_num_threads(int(threads))
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_SIZE": str(world),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }
    own = device.use(local_rank) if check_device(gpu=gpu) else None
    torch.distributed.init_process_group(
        "nccl" if own else "gloo",
        timeout=timedelta(seconds=timeout_s),
        # a bound device makes torch split later groups off this one; a single rank has nobody to split from
        device_id=own if world > 1 else None,
    )


def stop() -> None:
    """Leave the process group; engines must be closed before."""
    import torch.distributed

    for module in ("executor.engines.deepspeed.process_groups", "executor.engines.fsdp2.engine"):
        if module in sys.modules:
            sys.modules[module].forget()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def library(spec: EngineSpec) -> Literal["pipeline", "DeepSpeed", "FSDP2", "transformers"]:
    """What runs an engine: DeepSpeed (its pipeline for pp > 1) or FSDP2 with an optimizer, or where weights
    are sharded (ZeRO-3, tp > 1) or, with FSDP2, on the host; else transformers alone."""
    layout = spec.layout
    sharded = spec.optimizer is not None or layout.zero == 3 or layout.tp > 1
    if spec.backend == "fsdp2":
        return "FSDP2" if sharded or layout.pp > 1 or layout.offload_params != "none" else "transformers"
    if layout.pp > 1:
        return "pipeline"
    return "DeepSpeed" if sharded else "transformers"


def engine_class(spec: EngineSpec) -> Callable[[EngineSpec], TrainingEngine | ScoringEngine]:
    """What builds the engine of `spec`; to import it is most of the time of a small one."""
    match library(spec):
        case "pipeline":
            from executor.engines.pipeline.engine import PipelineEngine

            return PipelineEngine
        case "DeepSpeed":
            from executor.engines.deepspeed.engine import DeepSpeedEngine

            return DeepSpeedEngine
        case "FSDP2":
            from executor.engines.fsdp2.engine import Fsdp2Engine

            return Fsdp2Engine
        case "transformers":
            from executor.engines.transformers.engine import TransformersEngine

            return TransformersEngine


def build(spec: EngineSpec) -> TrainingEngine | ScoringEngine | Teachers:
    """The engine of `spec`; a collective of all its ranks."""
    engines = [engine_class(one)(one) for one in spec.each]
    return Teachers(engines) if spec.others else engines[0]


def sender(channels: Mapping[int, ChannelSpec], rank: int) -> Any:
    """This rank's end of the channels of its group, by sending rank; None where it only gathers."""
    from executor.weight_transfer.channel import Sender

    spec = next(iter(channels.values()))
    if spec.native:
        from executor.engines.vllm.transfer import Follower, NativeSender

        return Sender(channels[rank], NativeSender) if rank in channels else Follower(spec, rank)
    return Sender(channels[rank]) if rank in channels else None
