"""A run's files in the shared memory of a host.

Names carry the run's folder, so that a launcher can sweep what a killed run left. torch is imported where it
is needed: the launcher has none.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from executor.engines.protocols import ChannelSpec
from executor.machine.facts import SHARED
from rlhfsim.errors import RlhfsimError

if TYPE_CHECKING:
    from torch import Tensor


def sweep(folder: str) -> list[Path]:
    """Remove the shared-memory files of every channel with this scratch folder; what was removed."""
    left = sorted(SHARED.glob(f"{prefix(folder)}*"))
    for path in left:
        path.unlink(missing_ok=True)
    return left


def prefix(folder: str) -> str:
    """How the files of a scratch folder begin."""
    run = hashlib.blake2b(os.fsencode(os.path.realpath(folder)), digest_size=6).hexdigest()
    return f"rlhfsim-{run}-"


def path_of(spec: ChannelSpec, part: str) -> Path:
    """File in shared memory of this channel."""
    return SHARED / f"{prefix(spec.folder)}{spec.name}-{part}"


def remove(paths: Iterable[Path]) -> None:
    """Unlink; mappings stay valid until they are dropped."""
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def create(path: Path, size: int) -> Tensor:
    """A new shared file as tensor, (size,) uint8."""
    path.unlink(missing_ok=True)
    return _mapped(path, size)


def attach(path: Path, size: int) -> Tensor:
    """Somebody else's shared file as tensor, (size,) uint8."""
    if not path.exists():  # from_file would create it
        raise RlhfsimError(
            "weight-sync-not-shared",
            f"{path} is not there: sender and receiver do not run on one machine",
            help="use weight path broadcast or disk between machines",
        )
    return _mapped(path, size)


def _mapped(path: Path, size: int) -> Tensor:
    import torch

    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
