"""Engines that sleep predicted seconds: they test topology, order and waits without models or GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from executor.engines.protocols import EngineSpec, MiniBatch
from executor.samples import Completion, Floats, GenerationRequest, LossSpec, Sample, Transfer

if TYPE_CHECKING:
    import torch

STEPS = 8
"""Scheduler steps in which a fake rollout finishes."""
_ACCOUNT = {"allocated": 0.0, "host": 0.0}


def _nothing(self: object, *_: object) -> None:
    """Nothing is kept, loaded, connected or freed."""


class FakeTraining:
    """A training and scoring engine without a model"""

    def __init__(self, spec: EngineSpec, seconds: Mapping[str, float]) -> None:
        self._role = spec.role
        self._seconds = seconds

    def _sleep(self, kind: str) -> None:
        time.sleep(self._seconds.get(f"{self._role}.{kind}", 0.0))

    def _zeros(self, kind: str, samples: Sequence[Sample]) -> list[Floats]:
        self._sleep(kind)
        return [np.zeros(s.num_tokens, np.float32) for s in samples]

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Zeros."""
        return self._zeros("logprob", samples)

    reference_logprobs = logprobs

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """Zeros."""
        return self._zeros("value", samples)

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Zeros."""
        self._sleep("score")
        return [0.0 for _ in samples]

    def train(self, batch: MiniBatch, loss: LossSpec) -> Mapping[str, float]:
        """No metrics."""
        self._sleep("train")
        return {}

    def sync(self) -> None:
        """The weight sync's seconds."""
        self._sleep("sync")

    def buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Nothing to send."""
        return iter(())

    def adapters(self) -> list[tuple[str, torch.Tensor]]:
        """Nothing to send."""
        return []

    def offload(self, folder: Path | None = None, *, weights: bool = True) -> None:
        """Sleep a move."""
        self._sleep("train.unload")

    def reload(self) -> None:
        """Sleep a move."""
        self._sleep("train.load")

    def memory(self) -> Mapping[str, float]:
        """Nothing held."""
        return _ACCOUNT

    save = load = close = _nothing


class FakeRollout:
    """A rollout engine that answers with zeros in `STEPS` steps of equal length."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._step_s = seconds.get("actor.generate", 0.0) / STEPS
        self._waiting: list[tuple[GenerationRequest, int]] = []
        self._version = 0

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue; lengths spread evenly over the steps."""
        self._waiting += [(r, 1 + i % STEPS) for i, r in enumerate(requests)]

    def step(self) -> list[Completion]:
        """Those whose time has come."""
        time.sleep(self._step_s)
        aged = [(r, left - 1) for r, left in self._waiting]
        self._waiting = [(r, left) for r, left in aged if left > 0]
        return [self._completion(r) for r, left in aged if left == 0]

    def _completion(self, request: GenerationRequest) -> Completion:
        tokens = max(1, request.max_tokens // 2)
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

    def abort(self) -> list[int]:
        """Drop all."""
        dropped = [r.id for r, _ in self._waiting]
        self._waiting = []
        return dropped

    def receive(self, channel: str, version: int) -> Transfer:
        """Take the version over."""
        self._version = version
        return Transfer(version=version, bytes=0, buckets=0, seconds=0.0, checksum="")

    def stage(self, channel: str, version: int) -> None:
        """Take the version at commit."""
        self._staged = version

    def staged(self) -> bool:
        """At once."""
        return True

    def commit(self) -> Transfer:
        """Take the version over."""
        return self.receive("", self._staged)

    def memory(self) -> Mapping[str, float]:
        """Nothing held."""
        return {**_ACCOUNT, "kv": 0.0}

    connect = sleep = wake = close = _nothing
