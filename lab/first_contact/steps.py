"""Training steps whose memory is seen: plain modules, the executor's DeepSpeed engine, FSDP2 on one rank.

On a CUDA device the caching allocator says what was allocated; on a CPU the dispatcher does (lab/oracle).
"""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Iterator
from datetime import date
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from executor.engines import training
from executor.engines.protocols import EngineSpec, MiniBatch
from executor.engines.transformers.heads import HeadedModel
from executor.samples import LossSpec, Sample
from executor.settings import Optimizer
from lab.oracle.live_bytes import LiveBytes
from lab.oracle.step import build, configuration
from rlhfsim.memory import activations, states
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout

GIB = 2**30


class _Peak:
    """The most bytes of tensors since it was made."""

    def __init__(self) -> None:
        self.live: LiveBytes | None = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            self.live = LiveBytes()

    def __enter__(self) -> _Peak:
        if self.live is not None:
            self.live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.live is not None:
            self.live.__exit__(*error)

    @property
    def bytes(self) -> int:
        """On a CPU only of tensors that operations made meanwhile."""
        return self.live.peak if self.live is not None else torch.cuda.max_memory_allocated()


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def plain_step(preset: str, *, layers: int | None, tokens: int, recompute: bool) -> int:
    """Peak bytes beside the weights of forward and backward; gradients leave as they come."""
    with _device():
        model = build(preset, layers, attention_name="sdpa")
        if recompute:
            cast(Any, model.backbone).gradient_checkpointing_enable({"use_reentrant": False})
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        weights = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        with _Peak() as peak:
            if peak.live is not None:
                peak.live.follow([*model.parameters(), *model.buffers()], "weights")
                weights = peak.live.reset()
            _loss(model, tokens).backward()
        return peak.bytes - weights


def _loss(model: HeadedModel, tokens: int) -> torch.Tensor:
    row = torch.zeros(1, tokens, dtype=torch.int64)
    positions, places = torch.arange(tokens)[None], torch.arange(tokens)
    return cast(torch.Tensor, model(row, positions, places, torch.zeros_like(places))[0].sum())


def engine_steps(small: bool) -> Iterator[dict[str, Any]]:
    """ZeRO 0, 1 and 3 of the executor's engine on one rank, two steps each."""
    name, layers, tokens = ("smollm2-135m", 1, 64) if small else ("qwen2.5-0.5b", None, 8192)
    cases = [(1, "full")] if small else [(0, "full"), (1, "full"), (1, "none"), (3, "full")]
    with TemporaryDirectory() as folder, _alone():
        causal = cast(Any, AutoModelForCausalLM).from_config(
            configuration(name, layers), dtype=torch.bfloat16
        )
        causal.save_pretrained(folder)
        del causal
        for zero, recompute in cases:
            layout = Layout(zero=zero, recompute=cast(Any, recompute))
            seen = _engine_peak(folder, layout, tokens)
            model = resolve_model(name)
            expected = training_step(model.scaled(layers) if layers else model, layout, "deepspeed", tokens)
            what = f"{name}, ZeRO-{zero}, {tokens} tokens, recompute {recompute}"
            row = {"what": what, "unit": "GiB", "expected": expected / GIB, "seen": seen / GIB}
            more = {"memory": scored("DeepSpeed", name, f"zero{zero}", tokens, recompute, seen)}
            yield {"what": f"{what}: two steps", "seen": "ran"} if small else row | more


def _engine_peak(folder: str, layout: Layout, tokens: int) -> int:
    spec = EngineSpec(
        role="actor", model=folder, layout=layout, optimizer=Optimizer(), precision="bf16", total_steps=2
    )
    engine = cast(Any, training.build(spec))
    response = tokens // 2
    floats = np.zeros(response, dtype=np.float32)
    sample = Sample(
        id=0,
        group=0,
        prompt=np.zeros(tokens - response, dtype=np.int64),
        response=np.ones(response, dtype=np.int64),
        old_logprobs=floats - 4,
        advantages=floats + 1,
    )
    batch = MiniBatch(samples=(sample,), global_tokens=response, global_sequences=1)
    with _Peak() as peak:
        for _ in range(2):
            engine.train(batch, LossSpec(name="policy", settings={}))
    engine.close()
    del engine
    gc.collect()
    return peak.bytes


def fsdp_step(small: bool) -> Iterator[dict[str, Any]]:
    """FP32 shards, BF16 compute, resharding after forward, torch's AdamW."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    name, layers, tokens = ("smollm2-135m", 1, 64) if small else ("qwen2.5-0.5b", None, 8192)
    with _alone():
        with _device():
            model = build(name, layers, attention_name="sdpa").float()
        cast(Any, model.backbone).gradient_checkpointing_enable({"use_reentrant": False})
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in cast(Any, model.backbone).layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        with _Peak() as peak, _device():
            for _ in range(2):
                _loss(model, tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
        seen = peak.bytes
        spec = resolve_model(name)
        layout = Layout(zero=3, recompute="full")
        expected = training_step(spec.scaled(layers) if layers else spec, layout, "fsdp2", tokens)
        what = f"{name}, one rank, {tokens} tokens, recompute full"
        row = {"what": what, "unit": "GiB", "expected": expected / GIB, "seen": seen / GIB, "tolerance": 0.2}
        more = {"memory": scored("PyTorch FSDP2", name, "FSDP1", tokens, "full", seen)}
        yield {"what": f"{what}: two steps", "seen": "ran"} if small else row | more


def scored(
    framework: str, model: str, sharded: str, tokens: int, recompute: str, seen: float
) -> dict[str, Any]:
    """The row of such a peak in the scoreboard's table of memory."""
    return {
        "kind": "training",
        "model": model,
        "model_config_key": model,
        "gpus": 1,
        "gpu_type": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "framework": f"rlhfsim, {framework}",
        **{"tp": 1, "pp": 1, "cp": 1, "dp": 1, "fsdp_or_zero": sharded},
        **{"seq_len": tokens, "micro_batch": 1, "precision": "bf16", "recompute": recompute},
        "peak_mem_gib_per_gpu": round(seen / GIB, 3),
        "measured_or_analytic": "measured",
        "notes": "allocated by torch in two steps of the executor's engine, one pack",
        "source": f"first contact, {date.today().isoformat()}, torch {torch.__version__}",
        "as_published": f"{seen / GIB:.3f} GiB",
    }


def training_step(model: ModelSpec, layout: Layout, backend: Backend, tokens: int) -> float:
    """Peak of a training call on one GPU without context and fragmentation."""
    part = states.shard(model, layout, backend)
    held = activations.training_activations(
        model, layout, backend, activations.MicroBatches(tokens=tokens, count=1)
    )
    extra = (
        held.peak
        + states.gathered_bytes(part, layout, backend) * (layout.zero == 3)
        + states.gradient_buffer_bytes(part, layout, backend)
    )
    return states.trained_states(part, layout, backend).total + max(
        extra, states.step_bytes(part, layout, backend)
    )


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A process group of this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    training.start(0, 1, 0, "127.0.0.1", port, 60.0)
    try:
        yield
    finally:
        training.stop()
