"""Transports that write the whole model once: a flat file in host shared memory, or safetensors files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from executor.engines.protocols import ChannelSpec
from executor.weight_transfer import shared
from executor.weight_transfer.control import Control
from executor.weight_transfer.packing import (
    Bucket,
    Digest,
    Named,
    Piece,
    aligned,
    as_bytes,
    describe,
    header_of,
    pieces_of,
    unpack,
)


class SentHostFile:
    """Sender of `host`: tensors end to end in one file, then the table of what lies where."""

    def __init__(self, spec: ChannelSpec, control: Control) -> None:
        self.control = control
        self.path = shared.shared_path(spec, "model")

    def send(self, prefix: str, version: int, buckets: Iterator[list[Named]], digest: Digest) -> int:
        """Write and announce the file; one bucket."""
        self.prefix = prefix
        pieces, at = list[Piece](), 0
        shared.remove([self.path])
        with self.path.open("wb") as file:
            for name, tensor in (named for bucket in buckets for named in bucket):
                data = as_bytes(tensor.cpu())
                piece = describe(name, tensor, at)
                digest.add(Bucket(data, [describe(name, tensor, 0)]))
                file.seek(at)
                file.write(data.numpy().data)
                pieces.append(piece)
                at = aligned(at + piece.size)
            file.truncate(at)
        self.control.put(prefix + "table", {"path": str(self.path), **header_of(pieces, at)})
        return 1

    def finish(self, version: int) -> None:
        """The copy does not outlive the transfer: host memory is short (verl#1335, OpenRLHF#1013)."""
        self.control.forget([self.prefix + "table"])
        self.close()

    def close(self) -> None:
        """Remove the file."""
        shared.remove([self.path])


class ReceivedHostFile:
    """Receiver of `host`: views of the mapped file, no copy."""

    def __init__(self, spec: ChannelSpec, control: Control) -> None:
        self.control = control
        self.buckets = 1

    def tensors(self, prefix: str, version: int, digest: Digest) -> Iterator[Named]:
        """Everything in the order sent, valid until the iterator ends."""
        table = self.control.take(prefix + "table", "the sender to write the model to shared memory")
        flat = shared.attach(Path(table["path"]), table["bytes"])
        for piece in pieces_of(table):
            bucket = Bucket(flat, [piece])
            digest.add(bucket)
            yield from unpack([bucket])

    def close(self) -> None:
        """Nothing is kept between transfers."""


class SentFolder:
    """Sender of `disk`."""

    def __init__(self, spec: ChannelSpec, control: Control) -> None:
        self.spec, self.control = spec, control

    def send(self, prefix: str, version: int, buckets: Iterator[list[Named]], digest: Digest) -> int:
        """Write the version's folder and announce it; the number of files."""
        self.prefix = prefix
        order: list[tuple[str, list[str]]] = []
        for file, bucket in shared.write_version(self.spec, version, buckets):
            for name, tensor in bucket:
                digest.add(Bucket(as_bytes(tensor), [describe(name, tensor, 0)]))
            order.append((file, [name for name, _ in bucket]))
        folder = shared.channel_folder(self.spec) / f"weights-{version}"
        self.control.put(prefix + "files", {"folder": str(folder), "order": order})
        return len(order)

    def finish(self, version: int) -> None:
        """Only the newest version stays."""
        self.control.forget([self.prefix + "files"])
        shared.drop_older(self.spec, version)

    def close(self) -> None:
        """Remove what this channel wrote."""
        shutil.rmtree(shared.channel_folder(self.spec), ignore_errors=True)


class ReceivedFolder:
    """Receiver of `disk`."""

    def __init__(self, spec: ChannelSpec, control: Control) -> None:
        self.control = control
        self.buckets = 0

    def tensors(self, prefix: str, version: int, digest: Digest) -> Iterator[Named]:
        """Everything in the order sent."""
        from safetensors import safe_open

        table = self.control.take(prefix + "files", "the sender to write the files")
        self.buckets = len(table["order"])
        for file, names in table["order"]:
            with safe_open(Path(table["folder"]) / file, framework="pt") as opened:
                for name in names:
                    tensor = opened.get_tensor(name)
                    digest.add(Bucket(as_bytes(tensor), [describe(name, tensor, 0)]))
                    yield name, tensor

    def close(self) -> None:
        """Nothing is kept between transfers."""
