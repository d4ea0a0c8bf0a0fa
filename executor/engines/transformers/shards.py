"""Weights of a model folder, read by parts: a rank takes from the files what it will hold, and no more.

Legend: R rows (the first dimension of a stored tensor), W elements of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from executor.weight_transfer.merge import weight_files
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen

BLOCK_BYTES = 32 * 2**20
"""Bytes of rows that are on the host at one time, in addition to their mapped file pages."""


class ModelFiles:
    """Safetensors files of a model folder; each read maps a file, copies a part and lets go of it."""

    def __init__(self, folder: str | Path) -> None:
        """Read the index, or the names in the files; a folder without such files has no tensors."""
        self.folder = Path(folder)
        self._files = weight_files(self.folder)

    def stored(self, *names: str) -> str | None:
        """The first of `names` that a file has."""
        return next((name for name in names if name in self._files), None)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stored tensor, read from a file's header."""
        with self._open(name) as opened:
            return tuple(opened.get_slice(name).get_shape())

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a stored tensor that is not what the configuration says.

        Raises:
            RlhfsimError: another number of elements (a scalar head is stored as (H,) or (1, H)).
        """
        expect(self.folder, name, self.shape(name), shape)

    def read(self, name: str, target: Tensor, *, dim: int = 0, start: int = 0) -> None:
        """Fill `target` with what lies from `start` along `dim`, in its own precision and on its device.

        `target` has the stored shape in every other dimension.
        """
        if dim == 0:
            width = math.prod(target.shape[1:])
            self.read_flat(name, target, start * width)
            return
        inner = (*[slice(None)] * (dim - 1), slice(start, start + target.shape[dim]))
        step = _rows(math.prod(self.shape(name)[1:]), target)
        for first in range(0, target.shape[0], step):
            rows = slice(first, first + step)
            with self._open(name) as opened, torch.no_grad():
                target[rows].copy_(opened.get_slice(name)[(rows, *inner)])

    def read_flat(self, name: str, target: Tensor, start: int = 0) -> None:
        """Fill a contiguous `target` with elements from `start` of the stored tensor laid end to end.

        Where the tensor ends before the target, the rest of the target stays: padding of a partition.
        """
        shape = self.shape(name)
        stop = min(start + target.numel(), math.prod(shape))
        flat, width = target.view(-1), math.prod(shape[1:])
        step = _rows(width, target)
        for first in range(start // width, -(-stop // width), step) if start < stop else ():
            low, high = max(start, first * width), min(stop, (first + step) * width)
            with self._open(name) as opened, torch.no_grad():
                view = opened.get_slice(name)
                rows = view[first : first + step] if shape else opened.get_tensor(name)
                part = rows.reshape(-1)[low - first * width : high - first * width]
                flat[low - start : high - start].copy_(part)

    def _open(self, name: str) -> Any:
        from safetensors import safe_open

        return safe_open(self._files[name], framework="pt")


def expect(folder: str | Path, name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Refuse a tensor that a folder stores in another size than it should have.

    Raises:
        RlhfsimError: another number of elements.
    """
    if math.prod(stored) != math.prod(wanted):
        raise RlhfsimError(
            "checkpoint-shape",
            f"{name} has the shape {stored} in {folder}, its config.json means {wanted}",
            help="give a folder whose config.json and weights belong together",
        )


@frozen
class EmptyParameters:
    """Parameters of a model that have no values yet, and where these lie."""

    files: ModelFiles
    names: Mapping[str, str]
    """Name in the files, by name in the module."""

    def parameters(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Each with its name in the files."""
        for name, parameter in model.named_parameters():
            if name in self.names:
                yield self.names[name], parameter


def give_storage(parameter: nn.Parameter, device: torch.device | str) -> None:
    """Storage on `device`, not yet written, for a parameter on the meta device: the same object still."""
    fresh = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    torch.utils.swap_tensors(parameter, fresh)


def _rows(width: int, target: Tensor) -> int:
    """Rows in a block."""
    return max(1, BLOCK_BYTES // (width * target.element_size()))
