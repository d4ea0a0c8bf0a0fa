"""Transports that write the whole model once: a flat file in host shared memory, or safetensors files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from executor.engines.protocols import ChannelSpec
from executor.weight_transfer import shared_memory
from executor.weight_transfer.control import Control
from executor.weight_transfer.packing import (
    Bucket,
    Digest,
    Named,
    TensorPart,
    aligned,
    as_bytes,
    describe,
    parts_of,
    unpack,
)


class SentHostFile:
    """Sender of `host`: tensors end to end in one file, then the table of what lies where."""

    def __init__(self, spec: ChannelSpec, control: Control) -> None:
        self.control = control
        self.path = shared_memory.path_of(spec, "model")

    def send(self, prefix: str, version: int, buckets: Iterator[list[Named]], digest: Digest) -> int:
        """Write and announce the file; one bucket."""
        self.prefix = prefix
        parts, at = list[TensorPart](), 0
        self.close()
        with self.path.open("wb") as file:
            for name, tensor in (named for bucket in buckets for named in bucket):
                host = tensor.cpu()
                digest.add_tensor(name, host)
                file.seek(at)
                file.write(as_bytes(host).numpy().data)
                parts.append(describe(name, tensor, at))
                at = aligned(at + parts[-1].size)
            file.truncate(at)
        self.control.put(prefix + "table", {"path": str(self.path), "bytes": at, "parts": parts})
        return 1

    def finish(self, version: int) -> None:
        """The copy does not outlive the transfer: host memory is short (verl#1335, OpenRLHF#1013)."""
        self.control.forget([self.prefix + "table"])
        self.close()

    def close(self) -> None:
        """Remove the file."""
        shared_memory.remove([self.path])


class ReceivedHostFile:
    """Receiver of `host`: views of the mapped file, no copy."""

    buckets = 1

    def __init__(self, spec: ChannelSpec, control: Control, index: int) -> None:
        self.control = control

    def tensors(self, prefix: str, version: int, digest: Digest) -> Iterator[Named]:
        """Everything in the order sent, valid until the iterator ends."""
        table = self.control.take(prefix + "table", "the sender to write the model to shared memory")
        flat = shared_memory.attach(Path(table["path"]), table["bytes"])
        for part in parts_of(table):
            bucket = Bucket(flat, [part])
            digest.add(bucket)
            yield from unpack([bucket])

    def close(self) -> None:
        """Nothing is kept between transfers."""


class SentFolder:
    """Sender of `disk`."""

    def __init__(self, spec: ChannelSpec, control: Control) -> None:
        self.control = control
        self.folder = Path(spec.folder) / spec.name

    def send(self, prefix: str, version: int, buckets: Iterator[list[Named]], digest: Digest) -> int:
        """Write `weights-<version>`, one safetensors file a bucket, and announce it; the number of files.

        The folder appears under its name only when it is whole.
        """
        from safetensors.torch import save_file

        self.prefix = prefix
        final = self.folder / f"weights-{version}"
        partial = final.with_name(f".{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        order: list[tuple[str, list[str]]] = []
        try:
            for number, bucket in enumerate(bucket for bucket in buckets if bucket):
                tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket}
                save_file(tensors, partial / f"{number:05d}.safetensors")
                for name, tensor in tensors.items():
                    digest.add_tensor(name, tensor)
                order.append((f"{number:05d}.safetensors", list(tensors)))
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self.control.put(prefix + "files", {"folder": str(final), "order": order})
        return len(order)

    def finish(self, version: int) -> None:
        """Only the newest version stays."""
        self.control.forget([self.prefix + "files"])
        for path in self.folder.glob("weights-*"):
            if path.name != f"weights-{version}":
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove what this channel wrote."""
        shutil.rmtree(self.folder, ignore_errors=True)


class ReceivedFolder:
    """Receiver of `disk`."""

    def __init__(self, spec: ChannelSpec, control: Control, index: int) -> None:
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
                    digest.add_tensor(name, tensor)
                    yield name, tensor

    def close(self) -> None:
        """Nothing is kept between transfers."""
