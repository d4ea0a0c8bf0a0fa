"""Weights as the elements that changed since the last transfer: their positions and their new values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from executor.weight_transfer.packing import Named

POSITIONS, VALUES = "#positions", "#values"
"""What follows a tensor's name where only its changes travel."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Elements are compared and copied as bits: -0.0 is not 0.0, and NaN is itself."""


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
