"""Engine, model, requests and channel that `vllm_facts.py` works with."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor.engines.protocols import ChannelSpec, Link, RolloutSpec
from executor.engines.vllm.engine import VllmEngine
from executor.samples import Completion, GenerationRequest, Transfer
from executor.weight_transfer.channel import Sender
from executor.weight_transfer.packing import GatheredWeights
from rlhfsim.specs.placement.layout import RolloutLayout

MAX_LEN = 256


def model_at(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def engine_at(folder: Path, tp: int = 1) -> VllmEngine:
    layout = RolloutLayout(tp=tp, max_batched_tokens=2048)
    return VllmEngine(
        RolloutSpec(
            model=str(folder), layout=layout, max_model_len=MAX_LEN, max_num_seqs=64, kv_bytes=32 * 2**20
        )
    )


def requests(count: int = 12, **changes: Any) -> list[GenerationRequest]:
    """Mixed temperatures (greedy too) and nuclei unless `changes` say otherwise."""
    draw = np.random.default_rng(0)
    made = []
    for i in range(count):
        fields = {
            "max_tokens": 16,
            "temperature": (1.0, 0.7, 0.0)[i % 3],
            "top_p": (1.0, 0.6)[i % 2],
            "seed": i,
        } | changes
        made.append(GenerationRequest(id=i, prompt=draw.integers(4, 60, 5 + i), **fields))
    return made


@torch.no_grad()
def disagreement(model: Any, asked: Sequence[GenerationRequest], got: Sequence[Completion]) -> float:
    """Largest |log-prob of the engine - log-prob of a Hugging Face forward|."""
    worst = 0.0
    for request, completion in zip(asked, got, strict=True):
        ids = torch.tensor(np.concatenate([request.prompt, completion.tokens]))[None]
        logits = model(ids).logits[0] / (request.temperature or 1.0)
        start = len(request.prompt)
        ours = logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
        off = float((ours - torch.tensor(completion.logprobs)).abs().max())
        worst = max(worst, off) if off == off else float("inf")
    return worst


@torch.no_grad()
def perturb(model: Any, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=draw))


def channel(engine: VllmEngine, transport: str, folder: Path, **changes: Any) -> ChannelSpec:
    """A connected channel to all workers of the engine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fields: dict[str, Any] = {
        "name": f"{transport}-{port}",
        "transport": transport,
        "host": "127.0.0.1",
        "port": port,
        "receivers": engine.spec.layout.tp,
        "folder": str(folder / "scratch"),
        "bucket_bytes": 200_000,
        "timeout_s": 30.0,
    }
    spec = ChannelSpec(**(fields | changes))
    engine.connect([Link(spec, worker) for worker in range(spec.receivers)])
    return spec


def weights_of(model: Any, pause_s: float = 0.0) -> Iterator[list[tuple[str, torch.Tensor]]]:
    for name, parameter in model.named_parameters():
        time.sleep(pause_s)
        yield [(name, parameter)]


def sync(engine: VllmEngine, sender: Sender, buckets: Any, version: int) -> Transfer:
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send, GatheredWeights(lambda: buckets), version)
        received = engine.receive(version)
        assert sent.result(30).checksum == received.checksum
    return received
