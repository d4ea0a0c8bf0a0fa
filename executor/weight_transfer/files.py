"""Transports that write the whole model once: a flat file in host shared memory, or safetensors files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.engines.protocols import ChannelSpec
from executor.weight_transfer import shared_memory
from executor.weight_transfer.control import Control
from executor.weight_transfer.packing import (
    Bucket,
    GatheredWeights,
    Load,
    Named,
    TensorPart,
    aligned,
    as_bytes,
    describe,
    parts_of,
    unpack,
)


class FlatFile:
    """Tensors end to end in a file of host memory, and the table of what lies where."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.path = path
        self._file = path.open("wb")
        self._at = 0
        self._buckets: list[list[TensorPart]] = []

    def add(self, bucket: Sequence[Named]) -> None:
        """Write some tensors."""
        parts = []
        for name, tensor in bucket:
            parts.append(describe(name, tensor, self._at))
            self._file.seek(self._at)
            self._file.write(as_bytes(tensor.cpu()).numpy().data)
            self._at = aligned(self._at + parts[-1].size)
        self._buckets.append(parts)

    def finish(self) -> dict[str, Any]:
        """The table, JSON."""
        self._file.truncate(self._at)
        self._file.close()
        return {"path": str(self.path), "bytes": self._at, "buckets": self._buckets}


def read_flat(table: Mapping[str, Any]) -> Iterator[list[Named]]:
    """Views of the mapped file, a bucket at a time; no copy."""
    flat = shared_memory.attach(Path(table["path"]), table["bytes"])
    return unpack(Bucket(flat, parts_of(parts)) for parts in table["buckets"])


@dataclass
class _Written:
    """A sender that writes the whole model, and then says where."""

    spec: ChannelSpec
    control: Control
    prefix: str = ""


@dataclass
class _Read:
    """Its receiver."""

    spec: ChannelSpec
    control: Control
    index: int

    def close(self) -> None:
        """Nothing is kept between transfers."""


class SentHostFile(_Written):
    """Sender of `host`."""

    @property
    def path(self) -> Path:
        """The file in shared memory."""
        return shared_memory.path_of(self.spec, "model")

    def send(self, prefix: str, version: int, weights: GatheredWeights) -> int:
        """Write and announce the file; one bucket."""
        self.prefix = prefix
        file = FlatFile(self.path)
        for bucket in weights:
            file.add(bucket)
        self.control.put(prefix + "table", file.finish())
        return 1

    def finish(self, version: int) -> None:
        """The copy does not outlive the transfer: host memory is short (verl#1335, OpenRLHF#1013)."""
        self.control.forget([self.prefix + "table"])
        self.close()

    def close(self) -> None:
        """Remove the file."""
        shared_memory.remove([self.path])


class ReceivedHostFile(_Read):
    """Receiver of `host`."""

    def receive(self, prefix: str, load: Load) -> int:
        """Load everything in the order sent."""
        for tensors in read_flat(self.control.take(prefix + "table", "the sender to write the model")):
            load(tensors)
        return 1


class SentFolder(_Written):
    """Sender of `disk`."""

    @property
    def folder(self) -> Path:
        """Where its files lie."""
        return Path(self.spec.folder) / self.spec.name

    def send(self, prefix: str, version: int, weights: GatheredWeights) -> int:
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
            for number, bucket in enumerate(bucket for bucket in weights if bucket):
                tensors = {name: tensor.detach().contiguous() for name, tensor in bucket}
                save_file(tensors, partial / f"{number:05d}.safetensors")
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


class ReceivedFolder(_Read):
    """Receiver of `disk`."""

    def receive(self, prefix: str, load: Load) -> int:
        """Load everything in the order sent; the number of files."""
        from safetensors import safe_open

        table = self.control.take(prefix + "files", "the sender to write the files")
        for file, names in table["order"]:
            with safe_open(Path(table["folder"]) / file, framework="pt") as opened:
                load([(name, opened.get_tensor(name)) for name in names])
        return len(table["order"])
