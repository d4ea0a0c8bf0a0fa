"""Weights from the trainer group to every rollout replica: both ends at once, checked.

Where memory is shared there is a channel for each GPU (CUDA IPC) or node (/dev/shm), from the rank that sits
there to the rollout workers on the same GPU or node; else one, from rank 0 to all of them. Every end reports
a checksum of what passed; they must agree.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from uuid import uuid4

from executor.coordination.failures import PartFailed, collect
from executor.coordination.tracing import Tags
from executor.coordination.worker_group import Record, ReplicaPool, WorkerGroup
from executor.engines.protocols import ChannelSpec, Link
from executor.ranks import TransferGroup, transfer_groups
from executor.resolve import Job
from executor.samples import Transfer
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
from rlhfsim.specs.workload.workload import LORA_ALPHA_OVER_RANK


class WeightRoute:
    """The weight path of a plan, open between a trainer group and a rollout pool."""

    def __init__(self, job: Job, trainer: WorkerGroup, scratch: Path, call: str = "actor.sync") -> None:
        """`call`: what its transfers are in spans; the trainer tells its routes apart by it."""
        self._job = job
        self._trainer = trainer
        self._call = call
        self._folder = scratch / "weights"
        self._limit = job.limits.sync
        self._channels: dict[int, ChannelSpec] = {}
        """By sending rank of the trainer."""

    def open(self, rollout: ReplicaPool | None) -> None:
        """Make the channels and join every replica, if there are any; a new set of them needs new ones."""
        self.close()
        groups: Sequence[TransferGroup] = [TransferGroup(sender=0, receivers=())]
        if rollout is not None:
            groups = transfer_groups(self._job.plan, gpu=self._job.gpu)
        self._channels = self._specs({group.sender: len(group.receivers) for group in groups})
        self._trainer.call("open_channels", self._call, self._channels, limit_s=self._limit)
        if rollout is not None:
            links: list[dict[int, Link]] = [{} for _ in rollout.actors]
            for group in groups:
                for number, (replica, worker) in enumerate(group.receivers):
                    links[replica][worker] = Link(self._channels[group.sender], number)
            each = [[of[worker] for worker in sorted(of)] for of in links]
            rollout.call("connect", limit_s=self._limit, each=each)

    def close(self) -> None:
        """Drop the sending ends; what they put on disk goes with them."""
        if self._channels:
            self._trainer.call("close_channels", self._call, limit_s=self._limit)
        self._channels = {}

    def _specs(self, receivers: Mapping[int, int]) -> dict[int, ChannelSpec]:
        """A channel for every sending rank."""
        group = self._trainer
        addresses = collect(
            [group.actors[rank].address.remote() for rank in receivers],
            [group.parts[rank] for rank in receivers],
            "address of the senders",
            self._job.limits.longest_call,
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        rules = WEIGHT_PATHS[self._job.plan.placement.weight_path]
        name = f"weights-{uuid4().hex[:8]}"
        return {
            rank: ChannelSpec(
                name=f"{name}-{rank}",
                transport=rules.transports[self._job.plan.topology],
                host=host,
                port=port,
                receivers=count,
                folder=str(self._folder),
                bucket_bytes=self._job.bucket_bytes,
                adapters_only=rules.adapters_only,
                changes_only=rules.changes_only,
                base_model=self._job.model if rules.adapters_only else "",
                lora_scale=LORA_ALPHA_OVER_RANK,
                timeout_s=self._limit,
                device="cuda" if self._job.gpu else "cpu",
            )
            for (rank, count), (host, port) in zip(receivers.items(), addresses, strict=True)
        }

    def send(self, rollout: ReplicaPool | None, version: int, step: int, record: Record) -> Transfer:
        """One sync.

        Raises:
            PartFailed: an end failed, or the two checksums differ.
        """
        tags = Tags(name=self._call, step=step, version=version)
        if rollout is None:  # the weights become a model folder, which stays until the next one has read it
            self.open(None)
        pool = ThreadPoolExecutor(max_workers=2)
        limit = self._limit * 2 if rollout else self._limit
        sending = pool.submit(self._trainer.call, "send", "actor", self._call, version, tags, limit_s=limit)
        receiving = pool.submit(self._receive, rollout, version, tags, limit)
        pool.shutdown(wait=False)
        both: list[Future[Any]] = [sending, receiving]
        ended, _ = wait(both, return_when=FIRST_EXCEPTION)
        for future in ended:  # the end that failed first says why; the other one only misses it
            future.result()
        record(self._trainer.parts, sending.result())
        replies = zip(self._trainer.parts, sending.result(), strict=True)
        ends: dict[str, Transfer] = {part: reply.value for part, reply in replies if reply.value is not None}
        longest = max(ends.values(), key=lambda transfer: transfer.seconds)
        ends |= dict(zip(rollout.parts if rollout else [], receiving.result(), strict=True))
        for part, transfer in ends.items():
            if transfer.checksum != longest.checksum:
                raise PartFailed(
                    part,
                    "raised",
                    f"its weights are not the trainer's: checksum {transfer.checksum}, "
                    f"sent {longest.checksum}",
                )
        return longest

    def _receive(self, rollout: ReplicaPool | None, version: int, tags: Tags, limit: float) -> list[Transfer]:
        if rollout is None:
            return []
        schedule = self._job.plan.placement.schedule
        if schedule.overlapped_sync:
            return rollout.call("stage", version, tags, limit_s=limit)
        return rollout.call("receive", version, schedule.partial_rollout, tags, limit_s=limit)

    def folder_of(self, version: int) -> str:
        """A model folder with the weights of `version`, for a replica that is created now."""
        if version == 0:
            return self._job.model
        weights = self._folder / self._channels[0].name / f"weights-{version}"
        for path in Path(self._job.model).iterdir():
            if path.suffix in (".json", ".txt", ".model", ".jinja") and "index" not in path.name:
                shutil.copy(path, weights / path.name)
        return str(weights)

    def clean(self) -> None:
        """Remove what was written for transfers."""
        shutil.rmtree(self._folder, ignore_errors=True)
