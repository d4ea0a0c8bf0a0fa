"""A vLLM engine of two workers beside two trainer ranks, weights carried by vLLM's own engines.

CUDA and NCCL are those of `fake_cuda`. Usage: python native_facts.py FOLDER; writes FOLDER/facts.json.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fake_cuda
import torch.distributed as dist
from vllm_rig import disagreement, engine_at, model_at, perturb, requests

from executor.engines import training
from executor.engines.protocols import ChannelSpec, Link
from executor.engines.vllm import start
from executor.tasks import tiny
from executor.weight_transfer.packing import GatheredWeights, Named

RANKS, ROUNDS = 2, 2
SMALLEST = 10_000
"""Bytes of a bucket; the largest tensors are larger, which vLLM's packing refuses where its buffer is not."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def channels_of(transport: str, folder: Path) -> dict[int, ChannelSpec]:
    """ipc: each rank to the worker on its GPU; broadcast: rank 0 to both."""
    senders = {0: 1, 1: 1} if transport == "ipc" else {0: 2}
    return {
        rank: ChannelSpec(
            name=f"{transport}-{rank}",
            transport=transport,  # type: ignore[arg-type]
            host="127.0.0.1",
            port=free_port(),
            receivers=count,
            folder=str(folder),
            bucket_bytes=SMALLEST,
            timeout_s=120,
            device="cuda",
        )
        for rank, count in senders.items()
    }


def train(rank: int, base: Path, port: int, routes: dict[str, dict[int, ChannelSpec]], answers: Any) -> None:
    """A trainer rank: new weights, then a transfer, twice over each route."""
    fake_cuda.install(f"GPU-{rank}")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    model, version = model_at(base), 0
    for transport, channels in routes.items():
        end = training.sender(channels, rank)
        here = rank in channels

        def gather(here: bool = here) -> Iterator[list[Named]]:
            for name, parameter in model.named_parameters():
                yield [(name, parameter.detach())] if here else []

        for _ in range(ROUNDS):
            version += 1
            perturb(model, version)
            answers.get()
            sent = end.send(GatheredWeights(gather), version)
            answers.task_done()
            if sent is not None:
                (base.parent / f"sent-{transport}-{version}-{rank}.json").write_text(json.dumps(asdict(sent)))
        end.close()
    dist.destroy_process_group()
    fake_cuda.forget()


def main(folder: Path) -> dict[str, Any]:
    base = tiny.build(folder / "model", layers=2)
    start.WORKER = "fake_cuda.FakedReceiver"
    routes = {transport: channels_of(transport, folder) for transport in ("ipc", "broadcast")}
    context = multiprocessing.get_context("fork")  # torch and vLLM are imported once
    gates = [context.JoinableQueue() for _ in range(RANKS)]
    port = free_port()
    ranks = [
        context.Process(target=train, args=(rank, base, port, routes, gates[rank]), daemon=True)
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    engine, model = engine_at(base, tp=RANKS), model_at(base)
    facts: dict[str, Any] = {}
    for transport, channels in routes.items():
        if transport == "ipc":
            engine.connect([Link(channels[rank], 0) for rank in range(RANKS)])
        else:
            engine.connect([Link(channels[0], worker) for worker in range(RANKS)])
        seen: dict[str, Any] = {"stale": [], "synced": [], "received": []}
        for _ in range(ROUNDS):
            version = engine.version + 1
            perturb(model, version)
            seen["stale"].append(disagreement(model, requests(4), engine.generate(requests(4))))
            for gate in gates:
                gate.put(version)
            seen["received"].append(asdict(engine.receive(version)))
            for gate in gates:
                gate.join()
            seen["synced"].append(disagreement(model, requests(4), engine.generate(requests(4))))
        facts[transport] = seen
    for rank in ranks:
        rank.join(60)
    engine.close()
    facts["bytes"] = 4 * sum(p.numel() for p in model.parameters())
    facts["sent"] = {path.stem: json.loads(path.read_text()) for path in folder.glob("sent-*.json")}
    facts["exits"] = [rank.exitcode for rank in ranks]
    return facts


if __name__ == "__main__":
    root = Path(sys.argv[1])
    begun = time.monotonic()
    facts = main(root)
    facts["seconds"] = time.monotonic() - begun
    (root / "facts.json").write_text(json.dumps(facts, indent=1))
