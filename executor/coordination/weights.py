"""Weights from the trainer group to every rollout replica: one channel, both ends at once, checked.

The sender is rank 0 of the actor's group (all its ranks gather); the receivers are the worker processes of
every replica. Both report a checksum of what passed; they must agree.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray

from executor.coordination.failures import PartFailed
from executor.coordination.rollout import ReplicaPool
from executor.coordination.tracing import Reply, Tags
from executor.coordination.worker_group import WorkerGroup
from executor.engines.protocols import ChannelSpec
from executor.resolve import Job
from executor.samples import Transfer
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
from rlhfsim.specs.workload.workload import LORA_ALPHA_OVER_RANK

Record = Callable[[WorkerGroup, Sequence[Reply]], None]


class WeightRoute:
    """The weight path of a plan, open between a trainer group and a rollout pool."""

    def __init__(self, job: Job, trainer: WorkerGroup, scratch: Path) -> None:
        self._job = job
        self._trainer = trainer
        self._folder = scratch / "weights"
        self._limit = job.limits.sync
        self._channel: ChannelSpec | None = None

    def open(self, rollout: ReplicaPool | None) -> None:
        """Make the channel and join every replica, if there are any; a new set of them needs a new one."""
        self.close()
        each = rollout.receivers_each if rollout else 0
        self._channel = self._spec(each * len(rollout.actors) if rollout else 0)
        self._trainer.call("open_channel", self._channel, limit_s=self._limit)
        if rollout is not None:
            first = [i * each for i in range(len(rollout.actors))]
            rollout.call("connect", self._channel, limit_s=self._limit, each=first)

    def close(self) -> None:
        """Drop the sending end; what it put on disk goes with it."""
        if self._channel is not None:
            self._trainer.call("close_channel", self._channel.name, limit_s=self._limit)
            self._channel = None

    def _spec(self, receivers: int) -> ChannelSpec:
        placement = self._job.plan.placement
        host, port = ray.get(self._trainer.actors[0].address.remote(), timeout=self._job.limits.longest_call)
        self._folder.mkdir(parents=True, exist_ok=True)
        rules = WEIGHT_PATHS[placement.weight_path]
        return ChannelSpec(
            name=f"weights-{uuid4().hex[:8]}",
            transport=rules.transports[self._job.plan.topology],
            host=host,
            port=port,
            receivers=receivers,
            folder=str(self._folder),
            bucket_bytes=self._job.bucket_bytes,
            adapters_only=rules.adapters_only,
            base_model=self._job.model if rules.adapters_only else "",
            lora_scale=LORA_ALPHA_OVER_RANK,
            timeout_s=self._limit,
            device="cuda" if self._job.gpu else "cpu",
        )

    def send(self, rollout: ReplicaPool | None, version: int, step: int, record: Record) -> Transfer:
        """One sync.

        Raises:
            PartFailed: an end failed, or the two checksums differ.
        """
        assert self._channel is not None
        tags = Tags(name="actor.sync", kind="sync", step=step, version=version)
        if rollout is None:  # the weights become a model folder, which stays until the next one has read it
            self.open(None)
        pool = ThreadPoolExecutor(max_workers=2)
        limit = self._limit * 2 if rollout else self._limit
        sending = pool.submit(
            self._trainer.call, "send", "actor", self._channel, version, tags, limit_s=limit
        )
        receiving = pool.submit(self._receive, rollout, version, tags, limit)
        pool.shutdown(wait=False)
        both: list[Future[Any]] = [sending, receiving]
        ended, _ = wait(both, return_when=FIRST_EXCEPTION)
        for future in ended:  # the end that failed first says why; the other one only misses it
            future.result()
        record(self._trainer, sending.result())
        sent: Transfer = sending.result()[0].value
        for index, transfer in enumerate(receiving.result()):
            if transfer.checksum != sent.checksum:
                raise PartFailed(
                    f"rollout replica {index}",
                    "raised",
                    f"its weights are not the trainer's: checksum {transfer.checksum}, sent {sent.checksum}",
                )
        return sent

    def _receive(self, rollout: ReplicaPool | None, version: int, tags: Tags, limit: float) -> list[Transfer]:
        assert self._channel is not None
        if rollout is None:
            return []
        schedule = self._job.plan.placement.schedule
        if schedule.overlapped_sync:
            return rollout.call("stage", self._channel.name, version, tags, limit_s=limit)
        return rollout.call(
            "receive", self._channel.name, version, schedule.partial_rollout, tags, limit_s=limit
        )

    def folder_of(self, version: int) -> str:
        """A model folder with the weights of `version`, for a replica that is created now."""
        if version == 0:
            return self._job.model
        assert self._channel is not None
        weights = self._folder / self._channel.name / f"weights-{version}"
        for path in Path(self._job.model).iterdir():
            if path.suffix in (".json", ".txt", ".model", ".jinja") and "index" not in path.name:
                shutil.copy(path, weights / path.name)
        return str(weights)

    def clean(self) -> None:
        """Remove what was written for transfers."""
        shutil.rmtree(self._folder, ignore_errors=True)
