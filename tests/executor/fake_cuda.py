"""What vLLM's transfer engines ask of CUDA and NCCL, answered on a CPU: their own code then runs unchanged.

A GPU buffer is a file in /dev/shm, its IPC handle names the file, a GPU is known by its UUID; an NCCL group
is a gloo group. `install` changes torch and vLLM for good: processes of their own only.
"""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.multiprocessing.reductions as reductions
from torch import Tensor

from executor.engines.vllm.worker import WeightReceiver

FILES = "rlhfsim-fake-gpu-"
_empty = torch.empty
_files: dict[int, Path] = {}
"""By address; a later buffer may have that of an earlier one."""
_paths: list[Path] = []


def _on_gpu(size: int) -> Tensor:
    path = Path("/dev/shm") / f"{FILES}{uuid4().hex}"
    buffer = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    _files[buffer.data_ptr()] = path
    _paths.append(path)
    return buffer


def _made(*args: Any, **options: Any) -> Tensor:
    if options.get("device") == "cuda":
        return _on_gpu(args[0])
    return _empty(*args, **options)


def _exported(buffer: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Seven arguments, the last one the device, as torch's own."""
    return None, (str(_files[buffer.data_ptr()]), buffer.numel(), 0, 0, 0, 0, 99)


def _imported(path: str, size: int, *rest: Any) -> Tensor:
    assert rest[-1] != 99, "the receiver puts its own device in"
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def forget() -> None:
    """Remove the buffers of this process."""
    for path in _paths:
        path.unlink(missing_ok=True)


def _nothing(*args: object) -> None:
    """There is no device to wait for."""


class _Group:
    """Of gloo, with the two calls that vLLM's engines make."""

    def __init__(self, address: str, port: int, rank: int, world: int, device: object) -> None:
        limit = timedelta(seconds=60)
        self.store = dist.TCPStore(address, port, world, rank == 0, limit)  # type: ignore[attr-defined]
        self.group: Any = dist.ProcessGroupGloo(self.store, rank, world, limit)
        self.rank = rank

    def broadcast(self, tensor: Tensor, src: int, stream: object = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self.group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        del self.group, self.store


def install(gpu: str) -> None:
    """This process sits on the GPU of that UUID."""
    from vllm.distributed.weight_transfer import ipc_engine, nccl_common, packed_tensor

    stream = SimpleNamespace(synchronize=_nothing)
    torch.empty = _made  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(uuid=gpu)  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment]
    torch.cuda.stream = lambda *_: nullcontext()  # type: ignore[assignment]
    torch.cuda.synchronize = torch.cuda.ipc_collect = _nothing
    torch.accelerator.synchronize = _nothing
    torch.accelerator.current_device_index = lambda: 0
    reductions.rebuild_cuda_tensor = _imported
    packed_tensor.reduce_tensor = ipc_engine.reduce_tensor = _exported  # type: ignore[assignment]
    packed_tensor._get_streams = lambda device, count: [stream] * count  # type: ignore[assignment]
    nccl_common.stateless_init_process_group = _Group  # type: ignore[assignment]


class FakedReceiver(WeightReceiver):
    """Worker i of the engine sits on GPU i."""

    def rlhf_prepare(self) -> None:
        super().rlhf_prepare()
        install(f"GPU-{self.rank}")  # type: ignore[attr-defined]
