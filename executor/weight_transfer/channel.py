"""Weights from a trainer to the rollout engine's workers: both ends of a channel.

    broadcast  flat buckets through a process group of their own (gloo, NCCL)
    ipc        two buckets in shared memory (/dev/shm; on GPU: CUDA IPC handles), each reused only once
               every receiver has copied it out
    host       one flat file of the whole model in host shared memory, gone after the transfer
    disk       safetensors files on a shared file system, written atomically

A transfer is begun and ended through the store of `Control`; every receiver takes part in every transfer, and
a side that was restarted needs a new channel. Both ends compute a checksum; the sender compares them. CUDA
IPC hands over memory of one GPU: sender and receiver must sit on it, so a co-located trainer with several
GPUs opens one channel a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from executor.engines.protocols import ChannelSpec
from executor.samples import Transfer
from executor.weight_transfer.buckets import BroadcastReceiver, BroadcastSender, SharedReceiver, SharedSender
from executor.weight_transfer.control import Control
from executor.weight_transfer.files import ReceivedFolder, ReceivedHostFile, SentFolder, SentHostFile
from executor.weight_transfer.merge import merged
from executor.weight_transfer.packing import Digest, Named
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.placement.weight_paths import Transport

Buckets = Iterator[list[Named]]


class Outgoing(Protocol):
    """What one transport does at the sender."""

    def send(self, prefix: str, version: int, buckets: Buckets, digest: Digest) -> int:
        """Move everything; the number of buckets. Keys start with `prefix`."""

    def finish(self, version: int) -> None:
        """Called once all receivers are done with it."""

    def close(self) -> None:
        """Leave nothing behind."""


class Incoming(Protocol):
    """What one transport does at a receiver."""

    buckets: int

    def tensors(self, prefix: str, version: int, digest: Digest) -> Iterator[Named]:
        """Everything in the order sent; a tensor is valid until the iterator ends, or longer."""

    def close(self) -> None:
        """Let go of groups and mappings."""


_OUTGOING: Mapping[Transport, Callable[[ChannelSpec, Control], Outgoing]] = {
    "broadcast": BroadcastSender,
    "ipc": SharedSender,
    "host": SentHostFile,
    "disk": SentFolder,
}
_INCOMING: Mapping[Transport, Callable[[ChannelSpec, Control, int], Incoming]] = {
    "broadcast": BroadcastReceiver,
    "ipc": SharedReceiver,
    "host": ReceivedHostFile,
    "disk": ReceivedFolder,
}


class Sender:
    """The trainer's end; made and used by rank 0 of the trainer group. Hosts the store."""

    def __init__(self, spec: ChannelSpec) -> None:
        self.spec = spec
        self.control = Control(spec, master=True)
        self.route = _OUTGOING[spec.transport](spec, self.control)
        self.transfers = 0

    def send(self, buckets: Buckets, version: int) -> Transfer:
        """Send weights to all receivers; returns when every one of them has them.

        `buckets` is read to its end even on failure: behind it stands a collective in which other ranks wait.
        """
        prefix, self.transfers = f"{self.transfers}/", self.transfers + 1
        start, digest = time.monotonic(), Digest(self.spec.device)
        try:
            self.control.put(prefix + "begin", version)
            self._gather(prefix)
            count = self.route.send(prefix, version, buckets, digest)
            self._confirm(prefix, digest.hex())
            self.route.finish(version)
        except BaseException as error:
            self.control.fail(_reason(error))
            self.route.close()
            for _ in buckets:
                pass
            raise
        return _transfer(version, count, start, digest)

    def close(self) -> None:
        """Remove files and groups; the channel cannot be used again."""
        self.route.close()
        self.control.close()

    def _gather(self, prefix: str) -> None:
        """Wait until every receiver takes part, before any weight is gathered for it."""
        keys = [f"{prefix}ready/{index}" for index in range(self.spec.receivers)]
        for index, key in enumerate(keys):
            self.control.wait([key], f"receiver {index} of {len(keys)} to take part")
        self.control.forget(keys)

    def _confirm(self, prefix: str, checksum: str) -> None:
        """Wait until every receiver is done and saw the same bytes."""
        receivers = range(self.spec.receivers)
        for index in receivers:
            seen = self.control.take(
                f"{prefix}done/{index}", f"receiver {index} of {len(receivers)} to finish loading"
            )
            if seen != checksum:
                raise RlhfsimError(
                    "weight-sync-checksum",
                    f"channel {self.spec.name!r}: receiver {index} saw checksum {seen[:12]}, "
                    f"sent was {checksum[:12]}",
                )
        self.control.forget([f"{prefix}begin", *(f"{prefix}done/{index}" for index in receivers)])


class Receiver:
    """One engine worker's end. Connects at the first transfer, so that either side may be made first."""

    def __init__(self, spec: ChannelSpec, index: int) -> None:
        assert 0 <= index < spec.receivers, f"receiver {index} of {spec.receivers}"
        self.spec = spec
        self.index = index
        self.transfers = 0
        self.transfer: Transfer | None = None
        """Of the last complete `receive`."""
        self._control: Control | None = None
        self._route: Incoming | None = None

    def receive(self, version: int) -> Iterator[Named]:
        """Full weights by Hugging Face name; the transfer is confirmed when the iterator is exhausted."""
        self.transfer = None
        start, digest = time.monotonic(), Digest(self.spec.device)
        control, route = self._connected()
        prefix, self.transfers = f"{self.transfers}/", self.transfers + 1
        try:
            self._join(control, prefix, version)
            tensors = route.tensors(prefix, version, digest)
            if self.spec.adapters_only:
                tensors = merged(tensors, self.spec.base_model, self.spec.lora_scale)
            yield from tensors
            control.put(f"{prefix}done/{self.index}", digest.hex())
        except BaseException as error:  # GeneratorExit too: the loader gave up in the middle
            control.fail(f"receiver {self.index}: {_reason(error)}")
            route.close()  # a broken connection ends the sender's broadcast at once
            raise
        self.transfer = _transfer(version, route.buckets, start, digest)

    def close(self) -> None:
        """Let go of groups, mappings and the store."""
        if self._route is not None:
            self._route.close()
        if self._control is not None:
            self._control.close()

    def _connected(self) -> tuple[Control, Incoming]:
        if self._control is None or self._route is None:
            self._control = Control(self.spec, master=False)
            self._route = _INCOMING[self.spec.transport](self.spec, self._control, self.index)
        return self._control, self._route

    def _join(self, control: Control, prefix: str, version: int) -> None:
        sent = control.take(prefix + "begin", f"the sender to begin version {version}")
        if sent != version:
            raise RlhfsimError(
                "weight-sync-version",
                f"channel {self.spec.name!r}: receiver {self.index} expects version {version}, "
                f"the sender sends {sent}",
            )
        control.put(f"{prefix}ready/{self.index}", True)


def _transfer(version: int, buckets: int, start: float, digest: Digest) -> Transfer:
    seconds = time.monotonic() - start
    return Transfer(
        version=version, bytes=digest.bytes, buckets=buckets, seconds=seconds, checksum=digest.hex()
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, RlhfsimError):
        return error.message
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def to_host(tensors: Iterator[Named]) -> list[tuple[str, Tensor]]:
    """Private host copies of everything received, for a load at a later time."""
    return [(name, torch.empty_like(tensor, device="cpu").copy_(tensor)) for name, tensor in tensors]
