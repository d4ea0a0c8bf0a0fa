"""How a vLLM engine is started: its environment, what is refused, its arguments."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

from executor.engines.protocols import EngineNode, RolloutSpec
from rlhfsim.errors import RlhfsimError
from rlhfsim.units import GIB

log = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]
OWN_BYTES = 1.5 * GIB
"""A worker's own context and NCCL buffers, which are there before it looks at what is free."""
ON_CPU = {"custom_ops": ["-rotary_embedding"]}
"""torch's operations in place of vLLM's CPU kernel, which turns latent attention wrongly: of (tokens, heads,
width) it takes the step between heads for that between tokens (vLLM 0.32, csrc/cpu/pos_encoding.cpp)."""
WORKER = "executor.engines.vllm.worker.WeightReceiver"


def environment(device: Device | None = None) -> dict[str, str]:
    """Environment variables of the engine's process, to be set before vllm is imported.

    `device` None: whatever this process sees.
    """
    always = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if (device or current_device()) == "cuda":
        return always
    return always | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with other actors
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }


def stop_tokens(model: str) -> list[int]:
    """End-of-sequence tokens by config, generation config and tokenizer, whichever exist."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    tokens: list[Any] = [
        getattr(AutoConfig.from_pretrained(model, trust_remote_code=False), "eos_token_id", None)
    ]
    for load in (GenerationConfig, AutoTokenizer):
        try:
            tokens.append(getattr(load.from_pretrained(model), "eos_token_id", None))
        except (OSError, ValueError):
            continue  # the folder has none
    flat = [token for entry in tokens for token in (entry if isinstance(entry, list) else [entry])]
    return sorted({int(token) for token in flat if token is not None})


def current_device() -> Device:
    """What this process sees."""
    from executor.engines import device

    return "cuda" if device.available() else "cpu"


def ready(spec: RolloutSpec) -> Device:
    """What the engine will run on, once what cannot be run is refused and its environment is set."""
    device = current_device()
    refuse(spec, device)
    apply(environment(device))
    return device


def refuse(spec: RolloutSpec, device: Device) -> None:
    """Say no to what cannot be run, by name."""
    if spec.quantised and device == "cpu":
        raise RlhfsimError(
            "rollout-quantised-cpu",
            "FP8 rollout weights need a GPU; this process sees none",
            help="set the rollout layout's precision to bf16",
        )
    if spec.layout.attention_dp > 1:
        raise RlhfsimError(
            "rollout-attention-dp",
            f"attention data parallelism {spec.layout.attention_dp} inside one replica is not launched",
            help="use layout.dp replicas",
        )


def apply(variables: Mapping[str, str]) -> None:
    """Set what is not set; vllm reads some of it while it is imported."""
    late = [key for key in variables if key not in os.environ]
    if late and "vllm" in sys.modules:
        log.warning("vllm is already imported; set too late: %s", ", ".join(late))
    for key in late:
        os.environ[key] = variables[key]


def prepare() -> None:
    """Import vLLM with its environment."""
    apply(environment())
    from vllm import LLM  # noqa: F401  here for what its import does


def start(spec: RolloutSpec, device: Device) -> Any:
    """The `vllm.LLM` of one replica."""
    from vllm import LLM

    return LLM(**arguments(spec, device, free_share() if device == "cuda" else None))


def follow(spec: RolloutSpec, device: Device, failed: Callable[[], None]) -> Any:
    """The workers of a replica on a node that does not lead; `failed` is called when one ends.

    What `vllm serve --headless` runs on such a node (vllm/entrypoints/cli/serve.py, 0.32).
    """
    from vllm import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    options = arguments(spec, device, free_share() if device == "cuda" else None)
    workers = MultiprocExecutor(
        EngineArgs(**options).create_engine_config(headless=True), monitor_workers=False
    )
    workers.register_failure_callback(failed)
    workers.start_worker_monitor()
    return workers


def free_share() -> float:
    """Share of the memory of the fullest of this process's GPUs that a worker finds free when it starts.

    By NVML: it makes no context on them.
    """
    from vllm.platforms import current_platform
    from vllm.utils import import_utils

    nvml: Any = import_utils.import_pynvml()  # type: ignore[no-untyped-call]
    nvml.nvmlInit()
    try:
        shares: list[float] = []
        for gpu in range(current_platform.device_count()):
            physical = current_platform.device_id_to_physical_device_id(gpu)
            memory = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(physical))
            shares.append((memory.free - OWN_BYTES) / memory.total)
        return min(shares)
    finally:
        nvml.nvmlShutdown()


def arguments(spec: RolloutSpec, device: Device, free: float | None = None) -> dict[str, Any]:
    """What `vllm.LLM` gets; `kv_bytes` are those of each of its workers, whatever its share of the memory.

    `free`: most that the share may be, as vLLM refuses to start where less is free (`request_memory` in
    vllm/v1/worker/utils.py); with given KV bytes the share is used for nothing else.
    """
    layout = spec.layout
    share = layout.memory_utilization if free is None else min(layout.memory_utilization, free)
    ranks = layout.tp * layout.pp
    # vLLM 0.32 rewinds the random generator of a seeded request after each chunk of its prefill but the last,
    # which CPU generators cannot do: whole prompts there, so a batch must hold the longest
    chunked = device == "cuda"
    batched = max(layout.max_batched_tokens, spec.max_num_seqs, 0 if chunked else spec.max_model_len)
    # CPUs share the memory of their host with everything else
    return ({"gpu_memory_utilization": share} if device == "cuda" else {"compilation_config": ON_CPU}) | {
        "model": spec.model,
        "skip_tokenizer_init": True,
        "dtype": "float32" if spec.precision == "fp32" else "bfloat16",
        "quantization": "fp8" if spec.quantised else None,
        "kv_cache_dtype": "fp8" if layout.kv_precision == "fp8" and device == "cuda" else "auto",
        "tensor_parallel_size": layout.tp,
        "pipeline_parallel_size": layout.pp,
        "enable_expert_parallel": layout.ep > 1,
        "distributed_executor_backend": "uni" if ranks == 1 else "mp",
        **_nodes(spec.place),
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": batched,
        "kv_cache_memory_bytes": spec.kv_bytes,
        "enforce_eager": device == "cpu" or not layout.cuda_graphs,
        "enable_sleep_mode": device == "cuda",
        "enable_prefix_caching": True,  # requests carry their weight version as salt: no hit across versions
        "enable_chunked_prefill": chunked,
        # a step must sample with the weights it was called under; None: wherever vLLM can
        "async_scheduling": False if spec.interrupted else None,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
        "seed": spec.seed,
        "worker_extension_cls": WORKER,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }


def _nodes(place: EngineNode) -> dict[str, Any]:
    if place.nodes == 1:
        return {}
    meeting = {"master_addr": place.host, "master_port": place.port}
    return {"nnodes": place.nodes, "node_rank": place.node, **meeting}
