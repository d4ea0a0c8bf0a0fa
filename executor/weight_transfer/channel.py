"""Weights from a trainer to the rollout engine's workers: both ends of a channel.

    broadcast  flat buckets through a gloo group of their own
    ipc        two buckets in /dev/shm, each reused only once every receiver has copied it out
    host       one flat file of the whole model in host shared memory, gone after the transfer
    disk       safetensors files on a shared file system, written atomically

Between GPUs vLLM's own engines carry broadcast and ipc (`executor.engines.vllm.transfer`): a route that a
sender or receiver is given. A transfer is begun and ended through the store of `Control`; every receiver
takes part in every transfer, and a side that was restarted needs a new channel. Both ends compute a checksum;
the sender compares them. Where only changes travel (`changes_only`: positions and new values of the elements
that changed since the last transfer), both ends keep a copy in host memory, the checksums are of the whole
weights, and the bytes are those that travelled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from executor.engines.protocols import ChannelSpec
from executor.samples import Transfer
from executor.weight_transfer.buckets import BroadcastReceiver, BroadcastSender, SharedReceiver, SharedSender
from executor.weight_transfer.control import Control
from executor.weight_transfer.files import ReceivedFolder, ReceivedHostFile, SentFolder, SentHostFile
from executor.weight_transfer.merge import merged
from executor.weight_transfer.packing import Digest, GatheredWeights, Load, Named, num_bytes
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.placement.weight_paths import Transport


class Outgoing(Protocol):
    """What one transport does at the sender."""

    def send(self, prefix: str, version: int, weights: GatheredWeights) -> int:
        """Move everything; the number of buckets. Keys start with `prefix`."""

    def finish(self, version: int) -> None:
        """Called once all receivers are done with it."""

    def close(self) -> None:
        """Leave nothing behind."""


class Incoming(Protocol):
    """What one transport does at a receiver."""

    def receive(self, prefix: str, load: Load) -> int:
        """Give everything to `load` in the order sent; the number of buckets."""

    def close(self) -> None:
        """Let go of groups and mappings."""


OutgoingRoute = Callable[[ChannelSpec, Control], Outgoing]
IncomingRoute = Callable[[ChannelSpec, Control, int], Incoming]
_OUTGOING: Mapping[Transport, OutgoingRoute] = {
    "broadcast": BroadcastSender,
    "ipc": SharedSender,
    "host": SentHostFile,
    "disk": SentFolder,
}
_INCOMING: Mapping[Transport, IncomingRoute] = {
    "broadcast": BroadcastReceiver,
    "ipc": SharedReceiver,
    "host": ReceivedHostFile,
    "disk": ReceivedFolder,
}


MERGED_AT_ONCE = 32
"""Tensors: float32 copies of a whole model would not fit into host memory."""
POSITIONS, VALUES = "#positions", "#values"
"""What follows a tensor's name where only its changes travel."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Elements are compared and copied as bits: -0.0 is not 0.0, and NaN is itself."""


class Sender:
    """The trainer's end; made and used by one rank of the trainer group. Hosts the store."""

    def __init__(self, spec: ChannelSpec, route: OutgoingRoute | None = None) -> None:
        self.spec = spec
        self.control = Control(spec, master=True)
        self.route = (route or _OUTGOING[spec.transport])(spec, self.control)
        self.transfers = 0
        self._snapshot = Snapshot() if spec.changes_only else None

    def send(self, weights: GatheredWeights, version: int) -> Transfer:
        """Send weights to all receivers; returns when every one of them has them.

        They are gathered to the end even on failure: other ranks wait in that collective.
        """
        prefix, self.transfers = f"{self.transfers}/", self.transfers + 1
        start = time.monotonic()
        try:
            self.control.put(prefix + "begin", version)
            self._gather(prefix)
            weights.reduce = self._snapshot.changes if self._snapshot else None
            count = self.route.send(prefix, version, weights)
            self._confirm(prefix, weights.digest.hex())
            self.route.finish(version)
        except BaseException as error:
            self.control.fail(_reason(error))
            self.route.close()
            weights.exhaust()
            raise
        return _transfer(version, count, start, weights.digest, weights.sent_bytes)

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
                    help="bytes were read before they had arrived, or changed on the way: if it returns, "
                    "take another weight path (rlhfsim sync plan.json lists them)",
                )
        self.control.forget([f"{prefix}begin", *(f"{prefix}done/{index}" for index in receivers)])


class Receiver:
    """One engine worker's end. Connects at the first transfer, so that either side may be made first."""

    def __init__(self, spec: ChannelSpec, index: int, route: IncomingRoute | None = None) -> None:
        assert 0 <= index < spec.receivers, f"receiver {index} of {spec.receivers}"
        self.spec = spec
        self.index = index
        self.transfers = 0
        self._make_route = route or _INCOMING[spec.transport]
        self._ends: tuple[Control, Incoming] | None = None
        self._patched = Patched() if spec.changes_only else None

    def receive(self, version: int, load: Load) -> Transfer:
        """Give full weights by Hugging Face name to `load`, and confirm them to the sender."""
        start, digest = time.monotonic(), Digest()
        control, route = self._connected()
        prefix, self.transfers = f"{self.transfers}/", self.transfers + 1
        adapters: list[Named] = []
        take = adapters.extend if self.spec.adapters_only else load
        arrived = 0

        def counted(tensors: Sequence[Named]) -> None:
            nonlocal arrived
            arrived += num_bytes(tensors)
            tensors = self._patched.applied(tensors) if self._patched else tensors
            for name, tensor in tensors:
                digest.add(name, tensor)
            take(tensors)

        try:
            self._join(control, prefix, version)
            count = route.receive(prefix, counted)
            if adapters:
                full = merged(adapters, self.spec.base_model, self.spec.lora_scale)
                while some := list(islice(full, MERGED_AT_ONCE)):
                    load(some)
            control.put(f"{prefix}done/{self.index}", digest.hex())
        except BaseException as error:
            control.fail(f"receiver {self.index}: {_reason(error)}")
            route.close()  # a broken connection ends the sender's broadcast at once
            raise
        return _transfer(version, count, start, digest, arrived)

    def close(self) -> None:
        """Let go of groups, mappings and the store."""
        if self._ends is not None:
            control, route = self._ends
            route.close()
            control.close()

    def _connected(self) -> tuple[Control, Incoming]:
        if self._ends is None:
            control = Control(self.spec, master=False)
            self._ends = control, self._make_route(self.spec, control, self.index)
        return self._ends

    def _join(self, control: Control, prefix: str, version: int) -> None:
        sent = control.take(prefix + "begin", f"the sender to begin version {version}")
        if sent != version:
            raise RlhfsimError(
                "weight-sync-version",
                f"channel {self.spec.name!r}: receiver {self.index} expects version {version}, "
                f"the sender sends {sent}",
            )
        control.put(f"{prefix}ready/{self.index}", True)


def _transfer(version: int, buckets: int, start: float, digest: Digest, sent_bytes: int) -> Transfer:
    seconds = time.monotonic() - start
    return Transfer(
        version=version, bytes=sent_bytes, buckets=buckets, seconds=seconds, checksum=digest.hex()
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, RlhfsimError):
        return error.message
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Snapshot:
    """What the sender sent last, in host memory."""

    def __init__(self) -> None:
        self._bits: dict[str, Tensor] = {}

    def changes(self, tensors: Sequence[Named]) -> list[Named]:
        """What to send of these tensors: all of one that is new, or that changed by more than it saves."""
        return [part for name, tensor in tensors for part in self._changes(name, tensor)]

    def _changes(self, name: str, tensor: Tensor) -> Iterator[Named]:
        now, before = _bits(tensor), self._bits.get(name)
        if before is not None and now.numel() <= torch.iinfo(torch.int32).max:
            at = (now != before).nonzero().view(-1)
            if at.numel() * (now.element_size() + 4) < now.nbytes:
                before[at] = now[at]
                yield name + POSITIONS, at.to(torch.int32)
                yield name + VALUES, now[at].view(tensor.dtype)
                return
        self._bits[name] = now.clone()
        yield name, tensor


class Patched:
    """The weights of a receiver, in host memory, brought up to date by what changed."""

    def __init__(self) -> None:
        self._whole: dict[str, Tensor] = {}
        self._positions: dict[str, Tensor] = {}
        """Positions in tensors whose new values have not arrived yet."""

    def applied(self, tensors: Sequence[Named]) -> list[Named]:
        """The whole tensors that these parts make; they may be split between two calls."""
        return [whole for name, tensor in tensors for whole in self._applied(name, tensor)]

    def _applied(self, name: str, tensor: Tensor) -> Iterator[Named]:
        if name.endswith(POSITIONS):
            self._positions[name.removesuffix(POSITIONS)] = tensor.long()
        elif name.endswith(VALUES):
            name = name.removesuffix(VALUES)
            whole = self._whole[name]
            whole.view(-1).view(_BITS[whole.element_size()])[self._positions.pop(name)] = _bits(tensor)
            yield name, whole
        else:
            self._whole[name] = tensor.clone()
            yield name, self._whole[name]


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers, (elements,) in host memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(_BITS[tensor.element_size()])
