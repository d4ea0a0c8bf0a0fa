"""What can be tried on one GPU. Written without one at hand: docs/executor.md says that these never ran."""

from __future__ import annotations

import multiprocessing
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import runs
import torch

from executor.algorithms import losses
from executor.engines.protocols import ChannelSpec
from executor.engines.states import Storages
from executor.samples import LossSpec, Sample
from executor.weight_transfer.channel import Receiver, Sender
from executor.weight_transfer.packing import GatheredWeights

pytestmark = pytest.mark.gpu


def samples() -> list[Sample]:
    draw = np.random.default_rng(0)
    return [
        Sample(
            id=i,
            group=i,
            prompt=draw.integers(0, 64, 4),
            response=draw.integers(0, 64, n),
            advantages=draw.normal(size=n).astype(np.float32),
            old_logprobs=draw.normal(-4, 0.3, n).astype(np.float32),
        )
        for i, n in enumerate((3, 7, 1))
    ]


@pytest.mark.parametrize("kind", ["none", "truncated", "masked"])
def test_losses_on_the_gpu_equal_those_on_the_cpu(kind: str) -> None:
    new = torch.randn(3, 7, generator=torch.Generator().manual_seed(1)) - 4
    spec = LossSpec(name="policy", settings={"correction": kind})
    values = []
    for device in ("cpu", "cuda"):
        logprobs = new.to(device).requires_grad_()
        batch = losses.collate(samples(), num_tokens=11, num_sequences=3, logprobs=logprobs, device=device)
        loss, _ = losses.compute(spec, batch)
        loss.backward()
        assert logprobs.grad is not None
        values.append((loss.item(), logprobs.grad.cpu()))
    assert values[0][0] == pytest.approx(values[1][0], abs=1e-5)
    torch.testing.assert_close(values[0][1], values[1][1], atol=1e-5, rtol=1e-5)


def test_device_memory_falls_while_storages_are_away_and_comes_back_unchanged() -> None:
    tensor = torch.randn(2**24, device="cuda")
    before, copy = torch.cuda.memory_allocated(), tensor.cpu()
    away = Storages([tensor])
    assert torch.cuda.memory_allocated() <= before - tensor.numel() * 4
    away.restore()
    assert torch.equal(tensor.cpu(), copy)


def test_buckets_cross_processes_through_cuda_ipc(tmp_path: Path) -> None:
    from executor.engines.vllm.transfer import NativeSender

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spec = ChannelSpec(
        name="ipc",
        transport="ipc",
        host="127.0.0.1",
        port=port,
        receivers=1,
        folder=str(tmp_path),
        bucket_bytes=2**20,
        device="cuda",
    )
    context = multiprocessing.get_context("spawn")
    answer: Any = context.Queue()
    child = context.Process(target=_receive, args=(spec, answer))
    sender = Sender(spec, NativeSender)
    child.start()
    named = [(f"w{i}", torch.full((2**18,), float(i), device="cuda")) for i in range(8)]
    sent = sender.send(GatheredWeights(lambda: iter([named[:4], named[4:]])), 1)
    sums, checksum = answer.get(timeout=60)
    child.join(30)
    sender.close()
    assert checksum == sent.checksum
    assert sums == [float(i) * 2**18 for i in range(8)]


def _receive(spec: ChannelSpec, answer: Any) -> None:
    """A worker without a model: what arrives is summed."""
    from executor.engines.vllm.transfer import NativeReceiver

    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0), model_config=None)
    runner = SimpleNamespace(get_model=torch.nn.Module)
    worker = SimpleNamespace(vllm_config=config, device=torch.device("cuda", 0), model_runner=runner)
    sums: list[float] = []
    receiver = Receiver(spec, 0, partial(NativeReceiver, worker))
    transfer = receiver.receive(1, lambda tensors: sums.extend(float(t.sum()) for _, t in tensors))
    answer.put((sums, transfer.checksum))


def test_a_hybrid_run_on_one_gpu(tmp_path: Path) -> None:
    from executor.launch import LaunchOptions, launch
    from executor.tasks import tiny

    model = tiny.build(tmp_path / "model", layers=2)
    made = runs.plan("hybrid", "grpo", model, layout={"dp": 1, "zero": 0})
    heard = runs.Quiet()
    launch(made, runs.settings(model, logprob_tolerance=0.1), LaunchOptions(out=tmp_path / "run"), heard)
    assert [row["step"] for row in heard.rows] == [0, 1]
