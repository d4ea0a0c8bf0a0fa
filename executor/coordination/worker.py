"""One rank of a worker group: a process with the engines of the roles that share its GPUs and layout."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from executor.coordination.others import Held, held_by_others
from executor.coordination.tracing import Reply, Tags, Tracer
from executor.engines import training
from executor.engines.fake import FakeDevice, Fakes, FakeTraining
from executor.engines.memory import Meter
from executor.engines.protocols import ChannelSpec, EngineSpec, MiniBatch
from executor.samples import LossSpec, Sample, Transfer
from rlhfsim.frozen import frozen

THREADS = "OMP_NUM_THREADS"
HOST = "RLHFSIM_HOST"
"""Environment variable: the address at which a worker's own servers listen, where it is not its node's."""
LOOPBACK = "127.0.0.1"


@frozen
class ProcessIdentity:
    """Where a process of the run works."""

    pool: str
    gpus: tuple[str, ...] = ()
    """Names of its GPUs, the group of their counters; on slots without GPUs nobody knows what is whose."""
    gpu: bool = False
    """Its slots are GPUs."""
    slots: int | None = None
    """Slots of the plan that share the cores of its node; None: the environment says how many threads."""
    fakes: Fakes | None = None
    """Dry run: engines go by these instead of working."""
    scratch: str = ""
    """Dry run: folder of the fake GPUs."""

    def fake_device(self) -> FakeDevice:
        """Its GPUs in a dry run."""
        return FakeDevice(tuple(Path(self.scratch, gpu) for gpu in self.gpus))


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected inside: what imports and engines make stays, and to look takes long."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class TracedProcess:
    """A process of the run: it tells its clock, gives signs of life and collects spans."""

    def __init__(self, where: ProcessIdentity, group: str) -> None:
        if where.slots is not None:  # before torch is imported; Ray has set 1
            os.environ[THREADS] = str(max(1, len(os.sched_getaffinity(0)) // where.slots))
        self._pool = where.pool
        self._on_gpu, self._fakes, self._device = where.gpu, where.fakes, where.fake_device()
        self._group = group
        self._gpus = where.gpus or (group,)
        self._tracer = Tracer()

    def now(self) -> float:
        """This process's clock, for alignment."""
        return time.time()

    def address(self) -> tuple[str, int]:
        """A port of this host that was free a moment ago."""
        import ray.util

        host = os.environ.get(HOST) or str(ray.util.get_node_ip_address())
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, int(probe.getsockname()[1])

    def whereabouts(self) -> tuple[int, str]:
        """Process id and Ray node: also a sign of life."""
        import ray

        return os.getpid(), str(ray.get_runtime_context().get_node_id())

    def held_by_others(self) -> Held:
        """Memory where this process works that is taken before its engines are built."""
        return held_by_others(gpu=self._on_gpu)

    def _note_memory(self, reading: Mapping[str, float], start_s: float) -> None:
        """What a call that began at `start_s` took at most, and what it left."""
        for gpu in self._gpus:
            self._tracer.counter("memory_bytes", self._pool, reading["device_peak"], gpu, at=start_s)
            self._tracer.counter("memory_bytes", self._pool, reading["device"], gpu)

    def _span(self, role: str, tags: Tags, **attributes: float | str) -> Any:
        return self._tracer.span(
            tags.name, role, tags.kind, self._pool, self._group, tags.step, tags.version, **attributes
        )


@frozen
class WorkerIdentity(ProcessIdentity):
    """Which rank of its group this is."""

    rank: int
    ranks: int
    neighbours: int = 1
    """Ranks of the group on this node, itself included."""


class Worker(TracedProcess):
    """Runs as a Ray actor; methods are called on all ranks of the group in the same order."""

    def __init__(self, identity: WorkerIdentity) -> None:
        super().__init__(identity, f"rank {identity.rank}")
        self._identity = identity
        self._meter: Meter | FakeDevice = Meter() if self._fakes is None else self._device
        self._began = time.time()
        self._store: Any = None
        self._engines: dict[str, Any] = {}
        self._specs: dict[str, EngineSpec] = {}
        self._away: dict[str, Path] = {}
        """Destroyed role -> where its state lies."""
        self._routes: dict[str, tuple[Mapping[int, ChannelSpec], Any]] = {}
        """Weight route -> its channels by sending rank, and this rank's end."""
        self._background: Any = None
        """What still writes the last checkpoint."""

    # --- start ------------------------------------------------------------------------------------

    def rendezvous(self) -> tuple[str, int]:
        """Rank 0: host and port at which the group meets."""
        host, port = self.address()
        if self._fakes is None:
            self._store = training.rendezvous(host, self._identity.ranks)
            port = int(self._store.port)
        return host, port

    def prepare(self, specs: Sequence[EngineSpec]) -> None:
        """Import what these engines are built with, while other processes start; `build` says what fails."""
        if self._fakes is None:
            with uncollected(), suppress(Exception):
                training.check_device(gpu=self._on_gpu)  # DeepSpeed asks for it when it is imported
                for spec in specs:
                    training.engine_class(spec)

    def start(self, host: str, port: int, timeout_s: float) -> None:
        """Join the group; a collective."""
        if self._fakes is None:
            where = self._identity
            training.start(where.rank, where.ranks, 0, host, port, timeout_s, gpu=where.gpu)

    def build(self, spec: EngineSpec) -> Reply:
        """Create the engine of a role; a collective."""
        self._begin()
        self._specs[spec.role] = spec
        with uncollected():
            self._engines[spec.role] = self._built(spec)
        return self._reply(None)

    def _built(self, spec: EngineSpec) -> Any:
        if self._fakes is not None:
            return FakeTraining(spec, self._fakes, self._device)
        return training.build(spec)

    # --- calls ------------------------------------------------------------------------------------

    def forward(self, samples: Sequence[Sample], role: str, method: str, tags: Tags) -> Reply:
        """logprobs, values or scores of this rank's samples."""
        with self._call(role, tags, samples=float(len(samples))):
            value = getattr(self._engines[role], method)(samples)
        return self._reply(value)

    def train(self, batches: Sequence[MiniBatch], role: str, loss: LossSpec, tags: Tags) -> Reply:
        """Optimizer steps, one a mini-batch; their metrics."""
        with self._call(role, tags, optimizer_steps=float(len(batches))) as notes:
            value = [dict(self._engines[role].train(batch, loss)) for batch in batches]
            notes |= {f"{part}_s": seconds for part, seconds in self._engines[role].parts_s().items()}
        return self._reply(value)

    def unload(self, role: str, how: str, folder: str | None, tags: Tags) -> Reply:
        """Out of device memory: its `optimizer` states, `offloaded`, or `recreated` (saved and destroyed)."""
        place = Path(folder) if folder else None
        with self._call(role, tags):
            if how == "recreated":
                self._destroy(role, place)
            else:
                self._engines[role].offload(place, weights=how == "offloaded")
        return self._reply(None)

    def _destroy(self, role: str, folder: Path | None) -> None:
        engine = self._engines.pop(role)
        if self._specs[role].optimizer is not None:
            assert folder is not None, "a trained role is saved before it is destroyed"
            self._away[role] = folder
            engine.save(folder)
        engine.close()

    def load(self, role: str, how: str, tags: Tags) -> Reply:
        """Undo `unload`; `weights`: of them alone, enough for forward passes."""
        with self._call(role, tags):
            if how != "recreated":
                self._engines[role].reload(states=how != "weights")
            else:
                self._engines[role] = self._built(self._specs[role])
                if role in self._away:
                    self._engines[role].load(self._away.pop(role))
        return self._reply(None)

    # --- weights and checkpoints ------------------------------------------------------------------

    def open_channels(self, route: str, channels: Mapping[int, ChannelSpec]) -> None:
        """Ranks with a channel of a route make its sending end and its key-value store."""
        self.close_channels(route)
        sender = None
        if self._fakes is None:
            sender = training.sender(channels, self._identity.rank)
        self._routes[route] = channels, sender

    def close_channels(self, route: str) -> None:
        """Drop the sending end."""
        _, sender = self._routes.pop(route, (None, None))
        if sender is not None:
            sender.close()

    def send(self, role: str, route: str, version: int, tags: Tags) -> Reply:
        """Gather the weights of `role` and send them along a route; a collective."""
        with self._call(role, tags) as notes:
            transfer = self._send(self._engines[role], route, version)
            if transfer is not None:
                notes["bytes"] = float(transfer.bytes)
        return self._reply(transfer)

    def _send(self, engine: Any, route: str, version: int) -> Transfer | None:
        if self._fakes is not None:
            engine.sync()
            return Transfer(version=version, bytes=0, buckets=0, seconds=0.0, checksum="")
        from executor.weight_transfer.packing import GatheredWeights

        channels, sender = self._routes[route]
        spec = next(iter(channels.values()))
        # vLLM joins all ranks at every buffer of CUDA IPC, also those whose GPU has no rollout worker
        senders = range(self._identity.ranks) if spec.native == "ipc" else tuple(channels)

        def gather() -> Iterator[Any]:
            if spec.adapters_only:
                return iter([engine.adapters(senders)])
            buckets: Iterator[Any] = engine.buckets(spec.bucket_bytes, senders)
            return buckets

        weights = GatheredWeights(gather, on_host=spec.transport in ("host", "disk") or spec.changes_only)
        if sender is None:
            weights.exhaust()
            return None
        sent: Transfer | None = sender.send(weights, version)
        return sent

    def save(self, role: str, folder: str, background: bool = False) -> Reply:
        """This rank's share of a checkpoint; `background`: `written` says when it is on disk."""
        self._begin()
        if role in self._engines and background and self._fakes is None:
            from executor.engines.background import Background

            self._background = self._background or Background(self._identity.neighbours)
            self._engines[role].save(Path(folder), self._background)
        elif role in self._engines:
            self._engines[role].save(Path(folder))
        return self._reply(None)

    def written(self) -> bool:
        """Whether all that `save` left to the background is on disk; raises what failed there."""
        background, self._background = self._background, None
        if background is None or background.written():
            return True
        self._background = background
        return False

    def save_and_compare(self, role: str, folder: str, limit: int) -> Reply:
        """Up to `limit` bytes of this rank's states to a file and back; their number."""
        self._begin()
        path = Path(folder) / f"rank-{self._identity.rank}.pt"
        return self._reply(self._engines[role].save_and_compare(path, limit))

    def restore(self, role: str, folder: str) -> Reply:
        """Undo `save`."""
        self._begin()
        self._engines[role].load(Path(folder))
        return self._reply(None)

    def close(self) -> None:
        """End every engine and sender."""
        for route in list(self._routes):
            self.close_channels(route)
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    @contextmanager
    def _call(self, role: str, tags: Tags, **attributes: float | str) -> Iterator[dict[str, float | str]]:
        """One call: its span, and its memory from here on."""
        self._begin()
        with self._span(role, tags, **attributes) as notes:
            yield notes

    def _begin(self) -> None:
        self._began = time.time()
        self._meter.start()

    def _reply(self, value: Any) -> Reply:
        reading = self._meter.read()
        self._note_memory(reading, self._began)
        return Reply(value=value, recorded=self._tracer.take(), memory=reading)
