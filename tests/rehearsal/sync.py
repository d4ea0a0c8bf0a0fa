"""Weights from a trainer process to a vLLM engine, both on the rehearsal device: every transport, and what breaks them.

`sync.py engine FOLDER` starts `sync.py trainer FOLDER` and writes FOLDER/sync.json.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import runs
import torch
import vllm_device
from vllm_rig import channel, disagreement, engine_at, model_at, perturb, requests

from executor.coordination import gpu_faults
from executor.coordination.engine_memory import EngineMemory
from executor.coordination.failures import PartFailed
from executor.coordination.gpu_faults import fault_of, stop_of
from executor.engines import training
from executor.engines.protocols import ChannelSpec
from executor.engines.vllm.engine import VllmEngine
from executor.resolve import Job
from executor.settings import Settings
from executor.tasks import tiny
from executor.weight_transfer.packing import GatheredWeights, Named
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import LedgerEntry
from rlhfsim.units import MIB

ROUNDS, LIMIT_S = 2, 60.0
SMALLEST = 10_000
"""Bytes of a bucket: several calls a transfer."""
ADAPTED, SCALE = "model.layers.0.self_attn.q_proj.weight", 2.0


# --- the trainer's process --------------------------------------------------------------------------


class Trainer:
    """A model on the device, and the sending end of one channel at a time."""

    def __init__(self, folder: Path) -> None:
        self.host = model_at(folder)
        self.model = model_at(folder).to("cuda")
        self.end: Any = None
        self.on_host = False
        self.adapters: list[Named] = []

    def open(self, spec: ChannelSpec) -> None:
        """A new channel in place of the last one."""
        if self.end is not None:
            self.end.close()
        self.end, self.on_host = training.sender({0: spec}, 0), spec.native is None

    @torch.no_grad()
    def learn(self, seed: int) -> None:
        """New weights."""
        perturb(self.host, seed)
        for there, here in zip(self.model.parameters(), self.host.parameters(), strict=True):
            there.copy_(here)

    def adapt(self, seed: int) -> None:
        """New adapters of one weight."""
        draw = torch.Generator().manual_seed(seed)
        rows, columns = dict(self.model.named_parameters())[ADAPTED].shape
        sides = {"A": torch.randn(4, columns, generator=draw), "B": torch.randn(rows, 4, generator=draw)}
        self.adapters = [(f"{ADAPTED}.lora_{side}", 0.1 * sides[side].to("cuda")) for side in "AB"]

    def no_adapters(self) -> None:
        """Whole weights from now on."""
        self.adapters = []

    def send(self, version: int) -> dict[str, Any]:
        """What was sent, and the bytes that stay on the device."""

        def gather() -> Iterator[list[Named]]:
            named = self.adapters or [(n, p.detach()) for n, p in self.model.named_parameters()]
            for one in named:
                yield [one]

        before = torch.cuda.memory_allocated()
        sent = asdict(self.end.send(GatheredWeights(gather, on_host=self.on_host), version))
        return sent | {"left": torch.cuda.memory_allocated() - before}

    def break_(self, how: str) -> None:
        """From now on: buffers are announced before their bytes are there, taken back, or die with this process."""
        from vllm.distributed.weight_transfer import packed_tensor

        from executor.engines.vllm.transfer import StoreClient

        update = StoreClient.update_weights

        def taken_back(client: Any, info: Any) -> None:
            torch.ops.rehearsal.revoke()
            update(client, info)

        def killed(client: Any, info: Any) -> None:
            client.control.put(f"{client.prefix}call/{client.calls}", ["update_weights", info])
            os.kill(os.getpid(), signal.SIGKILL)

        class Hasty(torch.Stream):
            def synchronize(self) -> None: ...

        if how == "not waited for":
            packed_tensor.torch.cuda.current_stream = lambda *_: Hasty(device="cuda")  # type: ignore[assignment]
        else:
            StoreClient.update_weights = taken_back if how == "taken back" else killed  # type: ignore[method-assign]


def serve(folder: Path, address: str) -> None:
    """Do what the engine's process asks, until it closes."""
    trainer = Trainer(folder)
    with Client(address) as asked:
        while True:
            try:
                name, *arguments = asked.recv()
            except EOFError:
                return
            try:
                asked.send(getattr(trainer, name)(*arguments))
            except Exception as error:
                asked.send(error if isinstance(error, RlhfsimError) else RuntimeError(str(error)))


# --- the engine's process ---------------------------------------------------------------------------


class Remote:
    """A trainer in a process of its own."""

    def __init__(self, folder: Path, base: Path) -> None:
        address = str(folder / f"trainer-{len(list(folder.glob('trainer-*')))}")
        with Listener(address) as listener:
            self.process = subprocess.Popen([sys.executable, __file__, "trainer", str(base), address])
            self._connection: Connection[Any, Any] = listener.accept()

    def ask(self, name: str, *arguments: Any) -> Any:
        """What the trainer answers, or raises."""
        self._connection.send((name, *arguments))
        try:
            answer = self._connection.recv()
        except EOFError:
            return None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self.process.wait(60)


def transfer(engine: VllmEngine, trainer: Remote, version: int) -> tuple[Any, Any]:
    """Both ends of one transfer: what each says, or raised."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(outcome, lambda: trainer.ask("send", version))
        got = outcome(lambda: asdict(engine.receive(version)))
        return sent.result(), got


def carried(engine: VllmEngine, trainer: Remote, model: Any, folder: Path, transport: str) -> dict[str, Any]:
    """Rounds of new weights over a transport."""
    spec = channel(engine, transport, folder, device="cuda", bucket_bytes=SMALLEST, timeout_s=LIMIT_S)
    trainer.ask("open", spec)
    seen: dict[str, Any] = {
        "native": spec.native,
        "stale": [],
        "synced": [],
        "agree": [],
        "left": [],
        "calls": [],
    }
    for _ in range(ROUNDS):
        version = engine.version + 1
        perturb(model, version)
        trainer.ask("learn", version)
        seen["stale"].append(disagreement(model, requests(4), engine.generate(requests(4))))
        engine.sleep(2 if version % 2 else 1)
        sent, got = transfer(engine, trainer, version)
        if isinstance(got, Exception) or isinstance(sent, Exception):
            raise RuntimeError(f"{transport}: sent {sent}, got {got}")
        engine.wake()
        seen["agree"].append(sent["checksum"] == got["checksum"])
        seen["left"].append(sent["left"])
        seen["calls"].append(got["buckets"])
        seen["synced"].append(disagreement(model, requests(4), engine.generate(requests(4))))
    return seen


def adapters(engine: VllmEngine, trainer: Remote, base: Path, folder: Path) -> dict[str, Any]:
    """Adapters alone travel; the engine merges them into the base weights."""
    spec = channel(
        engine,
        "ipc",
        folder,
        device="cuda",
        timeout_s=LIMIT_S,
        adapters_only=True,
        base_model=str(base),
        lora_scale=SCALE,
    )
    trainer.ask("open", spec)
    version = engine.version + 1
    trainer.ask("adapt", version)
    sent, got = transfer(engine, trainer, version)
    if isinstance(got, Exception) or isinstance(sent, Exception):
        raise RuntimeError(f"adapters: sent {sent}, got {got}")
    draw = torch.Generator().manual_seed(version)
    merged = model_at(base)
    weight = dict(merged.named_parameters())[ADAPTED]
    a, b = torch.randn(4, weight.shape[1], generator=draw), torch.randn(weight.shape[0], 4, generator=draw)
    with torch.no_grad():
        weight.add_(SCALE * (0.1 * b) @ (0.1 * a))
    return {"bytes": got["bytes"], "synced": disagreement(merged, requests(4), engine.generate(requests(4)))}


def broken(folder: Path, base: Path, how: str, engine: VllmEngine) -> dict[str, str]:
    """The messages of both ends of a transfer by CUDA IPC that a fault meets."""
    trainer = Remote(folder, base)
    spec = channel(engine, "ipc", folder, device="cuda", bucket_bytes=SMALLEST, timeout_s=LIMIT_S)
    trainer.ask("open", spec)
    trainer.ask("break_", how)
    sent, got = transfer(engine, trainer, engine.version + 1)
    trainer.close()
    said = {}
    for end, part in ((sent, "actor rank 0"), (got, "rollout replica 0")):
        if isinstance(end, Exception):
            failed = PartFailed(part, "raised", str(end), "actor.sync")
            fault = fault_of(failed)
            told = stop_of(failed, fault) if fault else end
            said[part] = f"{getattr(told, 'code', '')}: {told} {getattr(told, 'help', '')}"
    return said


def sizes(value: float) -> dict[str, float]:
    """Of a ledger's row."""
    return {"bytes": value, "low_bytes": value, "high_bytes": value}


def keeps_memory(engine: VllmEngine, base: Path) -> str:
    """What an engine that sleeps and keeps its KV cache is stopped with, by its own readings."""
    plan = runs.plan("hybrid", "grpo", base)
    kv, others = 32 * MIB, 64 * MIB
    prediction = replace(
        plan.prediction,
        capacity_bytes=others + 16 * MIB,
        ledger=(
            LedgerEntry(pool="all", role="rollout", phase="generate", component="kv_cache", **sizes(kv)),
            LedgerEntry(pool="all", role="actor", phase="train", component="weights", **sizes(others)),
        ),
    )
    gpu_faults.KEPT_BYTES = 1 * MIB  # of an engine that is a thousand times smaller
    job = Job(
        plan=replace(plan, prediction=prediction), settings=Settings(), model="", gpu=True, max_prompt=1
    )
    told = ""
    for kept in (False, True):
        engine.forget_peaks()
        if kept:
            vllm_device.Sleeper.KEEPS = ("kv_cache",)
        move = lambda *_, **__: engine.sleep(1) or {"rollout replica 0": engine.memory()}  # noqa: E731
        try:
            EngineMemory(job, move, lambda _: None).rest(2)
        except RlhfsimError as error:
            told = f"{error.code}: {error.message} {error.help}"
        assert kept or not told, told
        engine.wake()
    return told


FAULTS = ("not waited for", "taken back", "killed")


def main(folder: Path) -> None:
    base = tiny.build(folder / "tiny", layers=2)
    engine, model, trainer = engine_at(base), model_at(base), Remote(folder, base)
    found: dict[str, Any] = {"adapters": adapters(engine, trainer, base, folder)}
    trainer.ask("no_adapters")
    for transport in ("ipc", "broadcast", "host", "disk"):
        found[transport] = carried(engine, trainer, model, folder, transport)
    trainer.close()
    found["keeps"] = keeps_memory(engine, base)
    engine.close()
    for how in FAULTS:
        engine = engine_at(base)
        found[how] = broken(folder, base, how, engine)
        engine.close()
    (folder / "sync.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "trainer":
        serve(Path(sys.argv[2]), sys.argv[3])
    else:
        main(Path(sys.argv[2]))
