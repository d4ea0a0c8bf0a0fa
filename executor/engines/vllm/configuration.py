"""vLLM's own judgement of engine arguments, without weights and without a GPU.

`python -m executor.engines.vllm.configuration` reads a list of `{"arguments", "model", "capability",
"memory_bytes"}` on stdin and writes a list: null, or what vLLM refuses. `EngineArgs.create_engine_config`
runs in full (ModelConfig, CacheConfig, ParallelConfig, SchedulerConfig, VllmConfig and what vLLM's CUDA
platform does to them) for a device that is only said to be there. It changes vLLM for good, hence a process
of its own.

Not checked: kernels, whether weights load, whether the KV cache fits in memory with them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import types
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from executor.engines.vllm.start import apply, environment

CUDA_OPS = "vllm._C_stable_libtorch"
"""Compiled for CUDA; the platform's module imports it and configurations do not call it."""


def main() -> None:
    """Answer every request of stdin."""
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM logs on stdout
    requests = json.load(sys.stdin)
    apply(environment("cuda"))
    device = _assumed_device(sorted({architecture(r["model"]) for r in requests}))
    with tempfile.TemporaryDirectory() as folder:
        json.dump([_refusal(request, device, Path(folder)) for request in requests], answers)


def architecture(model: Mapping[str, Any]) -> str:
    """Class of a model's config.json: as it says, or transformers' own for its type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = model.get("architectures") or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model.get("model_type", ""))]
    return str(named[0])


def _refusal(request: Mapping[str, Any], device: Any, folder: Path) -> str | None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    model = {**request["model"], "architectures": [architecture(request["model"])]}
    (folder / "config.json").write_text(json.dumps(model))
    device.capability, device.memory_bytes = tuple(request["capability"]), int(request["memory_bytes"])
    try:
        EngineArgs(**{**request["arguments"], "model": str(folder)}).create_engine_config(
            UsageContext.LLM_CLASS
        )
    except Exception as error:  # whatever vLLM raises is its answer
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return (lines[1] if len(lines) > 1 and "validation error" in lines[0] else lines[0])[:300]
    return None


def _assumed_device(architectures: list[str]) -> Any:
    """vLLM's CUDA platform in place of this machine's own, with a device that is assumed.

    Model classes are looked into first, on the platform that their kernels can be imported on.
    """
    import vllm.platforms as platforms

    registry: Any = import_module("vllm.model_executor.models.registry")
    ops: Any = import_module("vllm._custom_ops")
    current = platforms.current_platform
    for name in architectures:
        if (model := registry.ModelRegistry.models.get(name)) is not None:
            model.load_model_cls()
    registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(
        self.load_model_cls()
    )
    ops.cutlass_scaled_mm_supports_fp8 = lambda capability: capability >= FP8_CAPABILITY
    with suppress(ImportError):  # the CUDA build without a driver
        import_module(CUDA_OPS)
    sys.modules.setdefault(CUDA_OPS, types.ModuleType(CUDA_OPS))
    cuda: Any = import_module("vllm.platforms.cuda")
    from vllm.platforms.interface import DeviceCapability

    class AssumedDevice(cuda.NonNvmlCudaPlatform):  # type: ignore[misc]
        capability, memory_bytes = (9, 0), 0

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*cls.capability)

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return cls.memory_bytes

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "assumed"

        @classmethod
        def device_count(cls) -> int:
            return MAX_DEVICES

        @classmethod
        def is_integrated_gpu(cls, device_id: int = 0) -> bool:
            return False

        def is_cumem_allocator_available(self) -> bool:
            return True

    current.__class__ = AssumedDevice  # modules that imported the platform have this object
    return AssumedDevice


FP8_CAPABILITY = 89
"""From which the compiled kernel has FP8 matrix products (vLLM's scaled_mm_entry.cu)."""
MAX_DEVICES = 72
"""In one node; the plan's own numbers are compared with the cluster, not here."""

if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    main()
