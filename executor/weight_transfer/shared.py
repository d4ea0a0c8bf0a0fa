"""Files of a channel: shared memory of one machine and safetensors on disk.

Names carry the run's folder, so that a launcher can sweep what a killed run left (`shared_memory.sweep`).
"""

from __future__ import annotations

import base64
import pickle
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from executor.engines.protocols import ChannelSpec
from executor.weight_transfer.shared_memory import SHARED, prefix
from rlhfsim.errors import RlhfsimError


def shared_path(spec: ChannelSpec, part: str) -> Path:
    """File in shared memory of this channel."""
    return SHARED / f"{prefix(spec.folder)}{spec.name}-{part}"


def create(path: Path, size: int) -> Tensor:
    """A new shared file as tensor, (size,) uint8."""
    path.unlink(missing_ok=True)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def attach(path: Path, size: int) -> Tensor:
    """Somebody else's shared file as tensor, (size,) uint8."""
    if not path.exists():  # from_file would create it
        raise RlhfsimError(
            "weight-sync-not-shared",
            f"{path} is not there: sender and receiver do not run on one machine",
            help="use weight path broadcast or disk between machines",
        )
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def cuda_handle(flat: Tensor) -> str:
    """A CUDA buffer as text that a process on the same GPU can open."""
    from torch.multiprocessing.reductions import reduce_tensor

    return base64.b64encode(pickle.dumps((_gpu(), *reduce_tensor(flat)))).decode()


def attach_handle(spec: ChannelSpec, handle: str) -> Tensor:
    """Map the sender's buffer."""
    if spec.device == "cpu":
        return attach(Path(handle), spec.bucket_bytes)
    gpu, rebuild, args = pickle.loads(base64.b64decode(handle))
    if gpu != _gpu():
        raise RlhfsimError(
            "weight-sync-not-shared",
            f"channel {spec.name!r} (ipc): the sender is on GPU {gpu}, the receiver on {_gpu()}",
            help="open one ipc channel a GPU between co-located processes, or use broadcast",
        )
    # device ordinals differ between processes: the seventh argument of rebuild_cuda_tensor is ours
    args = (*args[:6], torch.cuda.current_device(), *args[7:])
    mapped: Tensor = rebuild(*args)
    return mapped


def _gpu() -> str:
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def remove(paths: Sequence[Path]) -> None:
    """Unlink; mappings stay valid until they are dropped."""
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def channel_folder(spec: ChannelSpec) -> Path:
    """Where the disk transport of this channel writes."""
    return Path(spec.folder) / spec.name


def write_version(
    spec: ChannelSpec, version: int, buckets: Iterator[list[tuple[str, Tensor]]]
) -> Iterator[tuple[str, list[tuple[str, Tensor]]]]:
    """Write `weights-<version>`, one safetensors file a bucket; it appears under its name only when whole.

    Gives file name and CPU tensors of each bucket after it was written.
    """
    from safetensors.torch import save_file

    final = channel_folder(spec) / f"weights-{version}"
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for number, bucket in enumerate(bucket for bucket in buckets if bucket):
            here = [(name, tensor.detach().cpu().contiguous()) for name, tensor in bucket]
            save_file(dict(here), partial / f"{number:05d}.safetensors")
            yield f"{number:05d}.safetensors", here
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def drop_older(spec: ChannelSpec, version: int) -> None:
    """Remove every other version of the channel."""
    for path in channel_folder(spec).glob("weights-*"):
        if path.name != f"weights-{version}":
            shutil.rmtree(path, ignore_errors=True)
