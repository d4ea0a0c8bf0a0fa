"""vLLM on the rehearsal device: its V1 model runner, model classes, scheduler and cache with every tensor there.

The kernels are those of vLLM's CPU wheel on the same bytes. In place of what needs CUDA's driver: the allocator
of sleep mode (`Sleeper` gives the storages up and takes them again), and NCCL between trainer and workers
(vllm_platform.py, gloo on the same bytes). Not here: model runner V2, CUDA graphs, vLLM's own CUDA kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
from vllm.model_executor.layers import utils as layers
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker as GPUWorker

ON_DEVICE = torch.device("cuda")


class Runner(CPUModelRunner):
    """vLLM's V1 runner for GPUs; of the CPU's only what stands for CUDA kernels."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        GPUModelRunner.__init__(self, vllm_config, device)
        self.use_cuda_graph = False

    def _sync_device(self) -> None:
        torch.accelerator.synchronize()


class Sleeper(SleepModeBackend):
    """What vLLM's CUDA allocator does: level 1 keeps weights in host memory, level 2 loses them, both lose KV."""

    KEEPS: tuple[str, ...] = ()
    """Parts that a fault leaves on the device."""

    def __init__(self, worker: Any) -> None:
        super().__init__()
        self._worker = worker
        self._asleep: dict[str, list[tuple[torch.UntypedStorage, int, Tensor | None]]] = {}

    def _storages(self, tag: str) -> list[torch.UntypedStorage]:
        runner = self._worker.model_runner
        if tag == "kv_cache":
            tensors = [
                t for entry in runner.kv_caches for t in ([entry] if isinstance(entry, Tensor) else entry)
            ]
        else:
            tensors = [*runner.model.parameters(), *runner.model.buffers()]
        unique = {
            t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.is_cuda and t.numel()
        }
        return list(unique.values())

    def _leave(self, tag: str, *, kept: bool) -> None:
        for storage in self._storages(tag):
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            copy = whole.cpu() if kept else None
            self._asleep.setdefault(tag, []).append((storage, storage.nbytes(), copy))
            storage.resize_(0)

    def suspend(self, level: int = 1) -> None:
        """Free weights and KV cache."""
        for tag in {"weights", "kv_cache"} - self._asleep.keys() - set(self.KEEPS):
            self._leave(tag, kept=tag == "weights" and level == 1)
        torch.accelerator.empty_cache()

    def discard(self, tags: tuple[str, ...]) -> None:
        """Free some parts and lose what they hold."""
        for tag in set(tags) - self._asleep.keys():
            self._leave(tag, kept=False)
        torch.accelerator.empty_cache()

    def resume(self, tags: list[str] | None = None) -> None:
        """Memory again, with what was kept; else it holds anything."""
        for tag in tags or list(self._asleep):
            for storage, size, copy in self._asleep.pop(tag, []):
                storage.resize_(size)
                whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                if copy is not None:
                    whole.copy_(copy)
                elif tag == "kv_cache":  # the CPU's kernel multiplies rows that nobody wrote by 0
                    whole.zero_()


class Worker(CPUWorker):
    """A worker whose weights, KV cache and activations are on the device."""

    sleep, wake_up, discard = GPUWorker.sleep, GPUWorker.wake_up, GPUWorker.discard
    _sleeper: Sleeper | None = None

    @property
    def sleep_mode_backend(self) -> SleepModeBackend:
        """In place of the allocator's."""
        self._sleeper = self._sleeper or Sleeper(self)
        return self._sleeper

    def init_device(self) -> None:
        """As on a CPU, then everything is made on the device."""
        from vllm.v1.worker import cpu_worker

        torch.accelerator.set_device_index(self.local_rank)
        layers.dispatch_cpu_unquantized_gemm = _plain_linear
        own = torch.device("cuda", self.local_rank)
        cpu_worker.CPUModelRunner = lambda config, _: Runner(config, own)  # type: ignore[misc,assignment]
        self.vllm_config.device_config.device = ON_DEVICE
        super().init_device()
        self.device = own


def _plain_linear(layer: nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear
