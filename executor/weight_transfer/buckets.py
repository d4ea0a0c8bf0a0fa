"""Transports that move flat buckets: broadcast through a process group, and shared memory on one machine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from executor.engines.protocols import ChannelSpec
from executor.weight_transfer import shared
from executor.weight_transfer.control import Control
from executor.weight_transfer.packing import Bucket, Digest, Named, pack, pieces_of, unpack
from rlhfsim.errors import RlhfsimError

BUFFERS = 2
"""One is filled while the other travels."""


class SentBuckets:
    """Sender of `broadcast` and `ipc`: fill a buffer, publish its header, let the link carry it."""

    def __init__(self, spec: ChannelSpec, control: Control) -> None:
        self.spec = spec
        self.control = control
        self.link: _SendLink | None = None

    def send(self, prefix: str, version: int, buckets: Iterable[list[Named]], digest: Digest) -> int:
        """Move everything; the number of buckets."""
        link = self.link = self.link or self._make()
        link.begin(prefix)
        tensors = (named for bucket in buckets for named in bucket)
        count = 0
        for bucket in pack(tensors, self.spec.bucket_bytes, link.buffer):
            digest.add(bucket)
            link.deliver(count, bucket)
            count += 1
        self.control.put(f"{prefix}bucket/{count}", {"end": True})
        self.count = count
        self.prefix = prefix
        return count

    def finish(self, version: int) -> None:
        """Drop the headers."""
        assert self.link is not None
        self.link.finish()
        self.control.forget([f"{self.prefix}bucket/{i}" for i in range(self.count + 1)])

    def close(self) -> None:
        """Remove buffers or the group."""
        if self.link is not None:
            self.link.close()
        self.link = None

    def _make(self) -> _SendLink:
        if self.spec.transport == "broadcast":
            return _BroadcastOut(self.spec, self.control)
        return _SharedOut(self.spec, self.control)


class ReceivedBuckets:
    """Receiver of `broadcast` and `ipc`."""

    def __init__(self, spec: ChannelSpec, control: Control, index: int) -> None:
        self.spec, self.control, self.index = spec, control, index
        self.buckets = 0
        self.link: _ReceiveLink | None = None

    def tensors(self, prefix: str, version: int, digest: Digest) -> Iterator[Named]:
        """Everything in the order sent; the tensors stay valid."""
        self.buckets = 0
        self.link = self.link or self._make()  # forming the group waits for the sender
        return unpack(self._received(self.link, prefix, digest))

    def close(self) -> None:
        """Leave the group or drop the mappings."""
        if self.link is not None:
            self.link.close()
        self.link = None

    def _make(self) -> _ReceiveLink:
        maker = _BroadcastIn if self.spec.transport == "broadcast" else _SharedIn
        return maker(self.spec, self.control, self.index)

    def _received(self, link: _ReceiveLink, prefix: str, digest: Digest) -> Iterator[Bucket]:
        while True:
            header = self.control.take(
                f"{prefix}bucket/{self.buckets}", f"the sender's bucket {self.buckets}"
            )
            if "end" in header:
                return
            bucket = Bucket(link.fetch(prefix, self.buckets, header), pieces_of(header))
            digest.add(bucket)
            self.buckets += 1
            yield bucket


class _SendLink(Protocol):
    def begin(self, prefix: str) -> None: ...
    def buffer(self, number: int) -> Tensor: ...
    def deliver(self, number: int, bucket: Bucket) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


class _ReceiveLink(Protocol):
    def fetch(self, prefix: str, number: int, header: dict[str, Any]) -> Tensor: ...
    def close(self) -> None: ...


class _Group:
    """A process group beside the default one: the sender is rank 0, receiver i rank i + 1."""

    def __init__(self, spec: ChannelSpec, control: Control, rank: int) -> None:
        self.spec, self.control = spec, control
        start = time.monotonic()
        store = dist.PrefixStore(f"group/{spec.name}", control.store)  # type: ignore[attr-defined]
        timeout = timedelta(seconds=spec.timeout_s)
        self.group: Any
        try:
            if spec.device == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self.group = dist.ProcessGroupNCCL(store, rank, spec.receivers + 1, options)
            else:
                self.group = dist.ProcessGroupGloo(store, rank, spec.receivers + 1, timeout)
        except RuntimeError as error:
            raise self._error("the group of sender and receivers to form", start, error) from error

    def broadcast(self, flat: Tensor) -> Any:
        """Start rank 0's broadcast."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self.group.broadcast([flat], options)

    def wait(self, work: Any, what: str) -> None:
        """Wait for a broadcast; NCCL's own wait has no limit (trl#6797), so it is polled."""
        start = time.monotonic()
        try:
            while self.spec.device == "cuda" and not work.is_completed():
                if time.monotonic() - start > self.spec.timeout_s:
                    self.group.abort()
                    raise RuntimeError("time is up")
                time.sleep(0.0005)
            work.wait(timedelta(seconds=self.spec.timeout_s))
        except RuntimeError as error:
            raise self._error(what, start, error) from error

    def close(self) -> None:
        """Leave the group."""
        self.group = None

    def _error(self, what: str, start: float, error: Exception) -> RlhfsimError:
        """The other side's own words if it left some; else whether time ran out or a connection broke."""
        told = self.control.failure()
        if told is not None:
            return told
        waited = time.monotonic() - start
        late = waited >= 0.9 * self.spec.timeout_s
        return RlhfsimError(
            "weight-sync-timeout" if late else "weight-sync-failed",
            f"channel {self.spec.name!r} (broadcast): waited {waited:.1f} s for {what}: {str(error).splitlines()[0]}",
            help="check that all workers of the channel still run and reach each other's network interface",
        )


class _BroadcastOut:
    def __init__(self, spec: ChannelSpec, control: Control) -> None:
        self.spec, self.control = spec, control
        self.group = _Group(spec, control, 0)
        self.buffers: list[Tensor] = []
        self.works: dict[int, tuple[int, Any]] = {}

    def begin(self, prefix: str) -> None:
        self.prefix = prefix
        self.buffers = [_buffer(self.spec) for _ in range(BUFFERS)]

    def buffer(self, number: int) -> Tensor:
        self._settle(number % BUFFERS)
        return self.buffers[number % BUFFERS]

    def deliver(self, number: int, bucket: Bucket) -> None:
        self.control.put(f"{self.prefix}bucket/{number}", bucket.header())
        self.works[number % BUFFERS] = (number, self.group.broadcast(bucket.flat))

    def finish(self) -> None:
        for slot in list(self.works):
            self._settle(slot)
        self.buffers = []  # the memory belongs to training between syncs

    def close(self) -> None:
        self.works, self.buffers = {}, []
        self.group.close()

    def _settle(self, slot: int) -> None:
        if slot in self.works:
            number, work = self.works.pop(slot)
            self.group.wait(work, f"the receivers to take bucket {number}")


class _BroadcastIn:
    def __init__(self, spec: ChannelSpec, control: Control, index: int) -> None:
        self.spec = spec
        self.group = _Group(spec, control, index + 1)

    def fetch(self, prefix: str, number: int, header: dict[str, Any]) -> Tensor:
        flat = torch.empty(header["bytes"], dtype=torch.uint8, device=self.spec.device)
        self.group.wait(self.group.broadcast(flat), f"the bytes of bucket {number}")
        return flat

    def close(self) -> None:
        self.group.close()


class _SharedOut:
    """Double-buffered shared memory; buffer i is written again when all receivers copied bucket i out."""

    def __init__(self, spec: ChannelSpec, control: Control) -> None:
        self.spec, self.control = spec, control
        self.paths = [shared.shared_path(spec, str(i)) for i in range(BUFFERS)]
        self.buffers: list[Tensor] = []
        self.sent: list[int] = []

    def begin(self, prefix: str) -> None:
        self.prefix, self.sent = prefix, []
        if self.spec.device == "cuda":
            self.buffers = [_buffer(self.spec) for _ in range(BUFFERS)]
            handles: list[Any] = [shared.cuda_handle(flat) for flat in self.buffers]
        else:
            self.buffers = [shared.create(path, self.spec.bucket_bytes) for path in self.paths]
            handles = [str(path) for path in self.paths]
        self.control.put(prefix + "handles", handles)

    def buffer(self, number: int) -> Tensor:
        if number >= BUFFERS:
            self._await(number - BUFFERS)
        return self.buffers[number % BUFFERS]

    def deliver(self, number: int, bucket: Bucket) -> None:
        if self.spec.device == "cuda":
            torch.cuda.current_stream().synchronize()  # the reader's stream knows nothing of ours
        self.control.put(f"{self.prefix}bucket/{number}", bucket.header())
        self.sent.append(number)

    def finish(self) -> None:
        for number in list(self.sent):
            self._await(number)
        self.control.forget([self.prefix + "handles"])
        self.close()

    def close(self) -> None:
        self.buffers = []
        shared.remove(self.paths)

    def _await(self, number: int) -> None:
        if number not in self.sent:
            return
        keys = [f"{self.prefix}ack/{number}/{i}" for i in range(self.spec.receivers)]
        self.control.wait(keys, f"the receivers to copy bucket {number}")
        self.control.forget(keys)
        self.sent.remove(number)


class _SharedIn:
    def __init__(self, spec: ChannelSpec, control: Control, index: int) -> None:
        self.spec, self.control, self.index = spec, control, index
        self.prefix = ""
        self.buffers: list[Tensor] = []

    def fetch(self, prefix: str, number: int, header: dict[str, Any]) -> Tensor:
        if prefix != self.prefix:
            self._attach(prefix)
        flat = self.buffers[number % BUFFERS][: header["bytes"]].clone()
        if self.spec.device == "cuda":
            torch.cuda.current_stream().synchronize()
        self.control.put(f"{prefix}ack/{number}/{self.index}", True)
        return flat

    def close(self) -> None:
        self.buffers = []

    def _attach(self, prefix: str) -> None:
        handles = self.control.take(prefix + "handles", "the sender's shared buffers")
        self.prefix = prefix
        self.buffers = [shared.attach_handle(self.spec, handle) for handle in handles]


def _buffer(spec: ChannelSpec) -> Tensor:
    return torch.zeros(spec.bucket_bytes, dtype=torch.uint8, device=spec.device)
