"""Engines without models or GPUs: they sleep the predicted seconds and hold the bytes of the plan's ledger.

They test topology, order, waits and memory. What is in memory follows from what an engine is asked to do,
never from what the plan says of that time: bytes at an instant are right only where the calls are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from executor.engines.memory import Reading
from executor.engines.protocols import EngineSpec, MiniBatch
from executor.samples import Completion, Floats, GenerationRequest, LossSpec, Sample, Transfer
from rlhfsim.frozen import frozen
from rlhfsim.plan import LedgerEntry

if TYPE_CHECKING:
    import torch

ROLLOUT = "rollout"
"""The engine's role in the ledger."""
STEPS = 8
"""Scheduler steps in which a fake rollout finishes."""
START = "start"
"""Phase of the ledger in which every role rests."""
ENGINE_PARTS = {"weights": "weights", "kv_cache": "kv_cache", "profile_peak": "kv_cache"}
"""Component of the rollout engine -> the part of it that a sleep takes along."""
KEPT_ASLEEP = "retained"
"""Component of the rollout engine that is there while it sleeps."""
TRAINER_PARTS = ("weights", "optimizer")
"""Components of a trainer that an offload takes along."""


@frozen
class Fakes:
    """What the engines of a dry run go by."""

    seconds: Mapping[str, float]
    """By call and move."""
    ledger: tuple[LedgerEntry, ...] = ()
    """Memory ledger of the plan."""

    def sizes(self, role: str, pool: str | None = None) -> dict[str, dict[str, float]]:
        """Phase -> component -> bytes of a role, in one pool where the role lies in two."""
        table: dict[str, dict[str, float]] = {}
        for entry in self.ledger:
            if entry.role == role and pool in (None, entry.pool):
                table.setdefault(entry.phase, {})[entry.component] = entry.bytes
        return table


@dataclass(slots=True)
class FakeDevice:
    """GPUs that only count: what each process holds on one is in a file of that GPU's folder."""

    gpus: tuple[Path, ...]
    """Folders of the GPUs that this process works on; it holds the same on each."""
    _held: dict[str, float] = field(default_factory=dict)
    _peak: float = 0.0

    def hold(self, role: str, held: float) -> None:
        """A role of this process holds so many bytes from now on."""
        self._held[role] = held
        for gpu in self.gpus:
            gpu.mkdir(parents=True, exist_ok=True)
            fresh = gpu / f".{os.getpid()}"
            fresh.write_text(repr(sum(self._held.values())))
            fresh.replace(gpu / str(os.getpid()))
        self._peak = max(self._peak, self._used())

    def _used(self) -> float:
        """By all processes of the fullest of these GPUs."""
        return max(
            (sum(float(file.read_text()) for file in gpu.glob("[0-9]*")) for gpu in self.gpus), default=0.0
        )

    def start(self) -> None:
        """Forget earlier peaks."""
        self._peak = self._used()

    def read(self) -> Reading:
        """As `memory.Meter.read`."""
        held, used = sum(self._held.values()), self._used()
        device = {"allocated": held, "device": used, "device_peak": max(self._peak, used)}
        return device | {"peak": held, "host": 0.0, "host_peak": 0.0}


def _nothing(self: object, *_: object) -> None:
    """Nothing is kept, loaded or connected."""


class FakeTraining:
    """A training and scoring engine without a model"""

    def __init__(self, spec: EngineSpec, fakes: Fakes, device: FakeDevice) -> None:
        self._role, self._seconds, self._device = spec.role, fakes.seconds, device
        self._sizes = fakes.sizes(spec.role)
        self._away: set[str] = set()
        self._rests = START
        self._hold()

    def _hold(self, call: str = "") -> None:
        """What a call needs, or its role between calls, in addition to the states that are here."""
        sizes = dict(self._sizes.get(call or self._rests, self._sizes.get(START, {})))
        for part in TRAINER_PARTS:
            present = self._sizes if part not in self._away else (START,)
            sizes[part] = max((self._sizes.get(phase, {}).get(part, 0.0) for phase in present), default=0.0)
        self._device.hold(self._role, sum(sizes.values()))

    def _work(self, call: str) -> None:
        self._hold(call)
        time.sleep(self._seconds.get(call, 0.0))
        self._hold()

    def _zeros(self, call: str, samples: Sequence[Sample]) -> list[Floats]:
        self._work(call)
        return [np.zeros(s.num_tokens, np.float32) for s in samples]

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Zeros."""
        return self._zeros(f"{self._role}.logprob", samples)

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Zeros."""
        return self._zeros("reference.logprob", samples)

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """Zeros."""
        return self._zeros(f"{self._role}.value", samples)

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Zeros."""
        self._work(f"{self._role}.score")
        return [0.0 for _ in samples]

    def train(self, batch: MiniBatch, loss: LossSpec) -> Mapping[str, float]:
        """No metrics."""
        self._work(f"{self._role}.train")
        return {}

    def parts_s(self) -> Mapping[str, float]:
        """Its step has no parts."""
        return {}

    def sync(self) -> None:
        """The weight sync's seconds."""
        self._work(f"{self._role}.sync")

    def buckets(
        self, bucket_bytes: int, senders: Collection[int] = (0,)
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Nothing to send."""
        return iter(())

    def adapters(self, senders: Collection[int] = (0,)) -> list[tuple[str, torch.Tensor]]:
        """Nothing to send."""
        return []

    def offload(self, folder: Path | None = None, *, weights: bool = True) -> None:
        """Sleep a move; what moves out is still here meanwhile."""
        time.sleep(self._seconds.get(f"{self._role}.train.unload", 0.0))
        self._away, self._rests = {*TRAINER_PARTS} if weights else {"optimizer"}, START
        self._hold()

    def reload(self, *, states: bool = True) -> None:
        """Sleep a move; what moves in takes its memory at once."""
        self._away = set() if states else self._away - {"weights"}
        load = f"{self._role}.train.load"
        if states:  # what gradients keep from step to step comes along
            self._rests = load
        self._hold()
        time.sleep(self._seconds.get(load, 0.0))

    def close(self) -> None:
        """Nothing is held any more."""
        self._device.hold(self._role, 0.0)

    save = load = _nothing


class FakeRollout:
    """A rollout engine that answers with zeros in `STEPS` steps of equal length."""

    def __init__(self, fakes: Fakes, device: FakeDevice, pool: str | None = None) -> None:
        self._step_s = fakes.seconds.get("actor.generate", 0.0) / STEPS
        self._device, self._sizes = device, fakes.sizes(ROLLOUT, pool)
        self._kept = max((sizes.get(KEPT_ASLEEP, 0.0) for sizes in self._sizes.values()), default=0.0)
        self._waiting: list[tuple[GenerationRequest, int]] = []
        self._version = 0
        self._away: set[str] = set()
        self._hold()

    def _hold(self, call: str = "actor.generate", *, buffers: str = "") -> None:
        sizes = self._sizes.get(call, {})
        parts = {**sizes, KEPT_ASLEEP: self._kept if "kv_cache" in self._away else 0.0}
        held = sum(size for name, size in parts.items() if ENGINE_PARTS.get(name) not in self._away)
        self._device.hold(ROLLOUT, held + self._sizes.get(buffers, {}).get("sync_buffers", 0.0))

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue; lengths spread evenly over the steps."""
        assert not self._away, f"asked to generate without its {' and '.join(sorted(self._away))}"
        self._waiting += [(r, 1 + i % STEPS) for i, r in enumerate(requests)]

    def step(self) -> list[Completion]:
        """Those whose time has come."""
        time.sleep(self._step_s)
        aged = [(r, left - 1) for r, left in self._waiting]
        self._waiting = [(r, left) for r, left in aged if left > 0]
        return [self._completion(r) for r, left in aged if left == 0]

    def _completion(self, request: GenerationRequest, least: int = 1) -> Completion:
        tokens = max(least, request.max_tokens // 2)
        return Completion(
            id=request.id,
            tokens=np.zeros(tokens, np.int64),
            logprobs=np.zeros(tokens, np.float32),
            versions=np.full(tokens, self._version, np.int32),
            finish="stop",
        )

    @property
    def unfinished(self) -> int:
        """Requests left."""
        return len(self._waiting)

    def abort(self, ids: Sequence[int]) -> list[Completion]:
        """Nothing is there of them yet."""
        dropped = [r for r, _ in self._waiting if r.id in ids]
        self._waiting = [(r, left) for r, left in self._waiting if r.id not in ids]
        return [self._completion(replace(r, max_tokens=0), least=0) for r in dropped]

    def receive(self, version: int) -> Transfer:
        """Take the version over."""
        assert "weights" not in self._away, "weights arrive where there is no memory for them"
        self._hold(buffers="actor.sync")
        self._hold()
        self._version = version
        return Transfer(version=version, bytes=0, buckets=0, seconds=0.0, checksum="")

    def stage(self, version: int) -> None:
        """Take the version at commit."""
        self._staged = version

    def staged(self) -> bool:
        """At once."""
        return True

    def commit(self) -> Transfer:
        """Take the version over."""
        return self.receive(self._staged)

    def sleep(self, level: int) -> None:
        """Weights and KV cache leave."""
        self._away |= {"weights", "kv_cache"} if level else set()
        self._hold()

    def release_kv_cache(self) -> None:
        """The KV cache leaves."""
        self._away |= {"kv_cache"}
        self._hold()

    def wake(self, *, kv_cache: bool = True) -> None:
        """They come back."""
        self._away = set() if kv_cache else self._away - {"weights"}
        self._hold()

    def forget_peaks(self) -> None:
        """A call begins."""
        self._device.start()

    def memory(self) -> Reading:
        """What the device counts."""
        return self._device.read()

    def close(self) -> None:
        """Nothing is held any more."""
        self._device.hold(ROLLOUT, 0.0)

    connect: Any = _nothing
