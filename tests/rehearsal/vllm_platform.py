"""The rehearsal device as a platform of vLLM, and the communicator of its weight transfer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.platforms.cpu import CpuPlatform

SENDS_WITHOUT_LIMIT_S = 3600.0
"""NCCL's calls have no time limit of their own."""


class Platform(CpuPlatform):
    """vLLM's CPU platform, with devices to count, pinned memory and sleep mode."""

    device_control_env_var = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Workers of vllm_device.py; nothing is compiled or captured."""
        from vllm.config import CompilationMode, CUDAGraphMode

        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm_device.Worker"
        super().check_and_update_config(vllm_config)

    @classmethod
    def device_count(cls) -> int:
        """What torch counts."""
        return int(torch.accelerator.device_count())

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Copies from it arrive late."""
        return True

    @classmethod
    def is_sleep_mode_available(cls) -> bool:
        """See `Sleeper`."""
        return True


class Communicator:
    """What vLLM's weight transfer asks of a PyNcclCommunicator."""

    def __init__(self, group: Any, device: object, **_: object) -> None:
        limit = timedelta(seconds=SENDS_WITHOUT_LIMIT_S)
        self.rank, self.world_size = group.rank, group.world_size
        self._store = dist.PrefixStore("rehearsal-nccl", group.store)  # type: ignore[attr-defined]
        self._group: Any = dist.ProcessGroupGloo(self._store, group.rank, group.world_size, limit)

    def broadcast(self, tensor: Tensor, src: int, stream: object = None) -> None:
        """In the order of the current stream."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([torch.ops.rehearsal.on_host(tensor)], options).wait()

    def destroy(self) -> None:
        """Leave the group."""
        del self._group, self._store
