"""Transports that move flat buckets between CPUs: broadcast through a process group, and shared memory."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.engines.protocols import ChannelSpec
from executor.weight_transfer import shared_memory
from executor.weight_transfer.control import Control
from executor.weight_transfer.packing import Bucket, GatheredWeights, Load, pack, parts_of, unpack
from rlhfsim.errors import RlhfsimError

BUFFERS = 2
"""One is filled while the other travels."""


@dataclass
class SentBuckets(ABC):
    """Sender of buckets: fill a buffer, publish its header, let it travel."""

    spec: ChannelSpec
    control: Control
    prefix: str = ""
    count: int = 0
    buffers: list[Tensor] = field(default_factory=list)
    travelling: dict[int, Any] = field(default_factory=dict)
    """Number of a bucket that receivers still read -> what `_start` returned of it."""

    def send(self, prefix: str, version: int, weights: GatheredWeights) -> int:
        """Move everything; the number of buckets."""
        self.prefix, self.count, self.travelling = prefix, 0, {}
        self.buffers = self._new_buffers()
        tensors = (named for bucket in weights for named in bucket)
        for bucket in pack(tensors, self.spec.bucket_bytes, self._free_buffer):
            self.control.put(f"{prefix}bucket/{self.count}", bucket.header())
            self.travelling[self.count] = self._start(bucket)
            self.count += 1
        self.control.put(f"{prefix}bucket/{self.count}", {"end": True})
        return self.count

    def finish(self, version: int) -> None:
        """Wait for what travels, drop headers and buffers: between transfers their memory is training's."""
        for number in list(self.travelling):
            self._settle(number)
        self.buffers = []
        self.control.forget([f"{self.prefix}bucket/{i}" for i in range(self.count + 1)])

    def _free_buffer(self, number: int) -> Tensor:
        """The buffer of bucket `number`, once nobody reads the bucket that it held."""
        self._settle(number - BUFFERS)
        return self.buffers[number % BUFFERS]

    def _settle(self, number: int) -> None:
        if number in self.travelling:
            self._wait(number, self.travelling.pop(number))

    @abstractmethod
    def close(self) -> None:
        """Remove buffers or the group."""

    @abstractmethod
    def _new_buffers(self) -> list[Tensor]:
        """The buffers of a transfer, which receivers can reach."""

    @abstractmethod
    def _start(self, bucket: Bucket) -> Any:
        """Let a bucket travel whose header is published; what `_wait` is given."""

    @abstractmethod
    def _wait(self, number: int, started: Any) -> None:
        """Wait until all receivers have bucket `number`."""


@dataclass
class ReceivedBuckets(ABC):
    """Receiver of buckets."""

    spec: ChannelSpec
    control: Control
    index: int
    prefix: str = ""
    buckets: int = 0

    def receive(self, prefix: str, load: Load) -> int:
        """Load everything in the order sent; the number of buckets."""
        self.prefix, self.buckets = prefix, 0
        self._begin()
        for tensors in unpack(self._received()):
            load(tensors)
        return self.buckets

    def _received(self) -> Iterator[Bucket]:
        while True:
            number = self.buckets
            header = self.control.take(f"{self.prefix}bucket/{number}", f"the sender's bucket {number}")
            if "end" in header:
                return
            bucket = Bucket(self._fetch(number, header["bytes"]), parts_of(header["parts"]))
            self.buckets += 1
            yield bucket

    @abstractmethod
    def _begin(self) -> None:
        """Join the sender."""

    @abstractmethod
    def _fetch(self, number: int, size: int) -> Tensor:
        """The bytes of a bucket, (size,) uint8."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group or drop the mappings."""


class _Group:
    """A gloo group in addition to the default one: the sender is rank 0, receiver i rank i + 1."""

    def __init__(self, spec: ChannelSpec, control: Control, rank: int) -> None:
        self.spec, self.control = spec, control
        start = time.monotonic()
        store = dist.PrefixStore(f"group/{spec.name}", control.store)  # type: ignore[attr-defined]
        try:
            self.group: Any = dist.ProcessGroupGloo(
                store, rank, spec.receivers + 1, timedelta(seconds=spec.timeout_s)
            )
        except RuntimeError as error:
            raise self._error("the group of sender and receivers to form", start, error) from error

    def broadcast(self, flat: Tensor) -> Any:
        """Start rank 0's broadcast."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self.group.broadcast([flat], options)

    def wait(self, work: Any, what: str) -> None:
        """Wait for a broadcast."""
        start = time.monotonic()
        try:
            work.wait(timedelta(seconds=self.spec.timeout_s))
        except RuntimeError as error:
            raise self._error(what, start, error) from error

    def _error(self, what: str, start: float, error: Exception) -> RlhfsimError:
        """The other side's own words if it left some; else whether time ran out or a connection broke."""
        if (reported := self.control.failure()) is not None:
            return reported
        waited = time.monotonic() - start
        late = waited >= 0.9 * self.spec.timeout_s
        return RlhfsimError(
            "weight-sync-timeout" if late else "weight-sync-failed",
            f"channel {self.spec.name!r} (broadcast): waited {waited:.1f} s for {what}: "
            f"{str(error).splitlines()[0]}",
            help="check that all workers of the channel still run and reach each other's network interface",
        )


class BroadcastSender(SentBuckets):
    """Through a process group, one bucket on its way while the next is filled."""

    group: _Group | None = None

    def _new_buffers(self) -> list[Tensor]:
        self.group = self.group or _Group(self.spec, self.control, 0)
        return [torch.zeros(self.spec.bucket_bytes, dtype=torch.uint8) for _ in range(BUFFERS)]

    def _start(self, bucket: Bucket) -> Any:
        assert self.group is not None
        return self.group.broadcast(bucket.flat)

    def _wait(self, number: int, started: Any) -> None:
        assert self.group is not None
        self.group.wait(started, f"the receivers to take bucket {number}")

    def close(self) -> None:
        """Leave the group."""
        self.travelling, self.buffers, self.group = {}, [], None


class BroadcastReceiver(ReceivedBuckets):
    """The other end of the group."""

    group: _Group | None = None

    def _begin(self) -> None:
        self.group = self.group or _Group(self.spec, self.control, self.index + 1)  # waits for the sender

    def _fetch(self, number: int, size: int) -> Tensor:
        assert self.group is not None
        flat = torch.empty(size, dtype=torch.uint8)
        self.group.wait(self.group.broadcast(flat), f"the bytes of bucket {number}")
        return flat

    def close(self) -> None:
        """Leave the group."""
        self.group = None


class SharedSender(SentBuckets):
    """Double-buffered shared memory; buffer i is written again when all receivers copied bucket i out."""

    @property
    def _paths(self) -> list[Path]:
        return [shared_memory.path_of(self.spec, str(i)) for i in range(BUFFERS)]

    def _new_buffers(self) -> list[Tensor]:
        buffers = [shared_memory.create(path, self.spec.bucket_bytes) for path in self._paths]
        self.control.put(self.prefix + "files", [str(path) for path in self._paths])
        return buffers

    def _start(self, bucket: Bucket) -> None:
        """Its bytes are there."""

    def _wait(self, number: int, started: None) -> None:
        keys = [f"{self.prefix}ack/{number}/{i}" for i in range(self.spec.receivers)]
        self.control.wait(keys, f"the receivers to copy bucket {number}")
        self.control.forget(keys)

    def finish(self, version: int) -> None:
        """Wait until all is copied out, and remove the buffers."""
        super().finish(version)
        self.control.forget([self.prefix + "files"])
        self.close()

    def close(self) -> None:
        """Remove the buffers."""
        self.buffers = []
        shared_memory.remove(self._paths)


class SharedReceiver(ReceivedBuckets):
    """Copies each bucket out and says so."""

    mapped: Sequence[Tensor] = ()

    def _begin(self) -> None:
        files = self.control.take(self.prefix + "files", "the sender's shared buffers")
        self.mapped = [shared_memory.attach(Path(file), self.spec.bucket_bytes) for file in files]

    def _fetch(self, number: int, size: int) -> Tensor:
        flat = self.mapped[number % BUFFERS][:size].clone()
        self.control.put(f"{self.prefix}ack/{number}/{self.index}", True)
        return flat

    def close(self) -> None:
        """Drop the mappings."""
        self.mapped = ()
