"""Experts under ZeRO-3 leave memory when their layer is through.

transformers keeps all experts of a layer in one parameter and multiplies by a view of it. Autograd saves the
view, whose storage then outlives the parameter's, which DeepSpeed only gives other memory (`free_param`). So
the place in the parameter is saved instead, which DeepSpeed has gathered again when the layer runs back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class SavedPlace(NamedTuple):
    """A parameter or a view of it, wherever it lies."""

    parameter: nn.Parameter
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """From the parameter's first element."""


def save_places(model: nn.Module) -> None:
    """Modules with experts save places in their parameters.

    Not for layers that are computed again: these hooks would be inside those that keep nothing.
    """
    for module in model.modules():
        own = tuple(module.parameters(recurse=False))
        if any(len(getattr(parameter, "ds_shape", ())) == 3 for parameter in own):
            module.forward = _saving(module.forward, own)


def _saving(forward: Callable[..., Any], own: tuple[nn.Parameter, ...]) -> Callable[..., Any]:
    def saved(tensor: Tensor) -> Tensor | SavedPlace:
        return next((place for one in own if (place := _place(tensor, one))), tensor)

    def run(*inputs: Any, **options: Any) -> Any:
        with saved_tensors_hooks(saved, _view):
            return forward(*inputs, **options)

    return run


def _place(tensor: Tensor, parameter: nn.Parameter) -> SavedPlace | None:
    """Where in the parameter it lies; None: elsewhere."""
    if not tensor.numel() or _address(tensor) != _address(parameter) or tensor.dtype != parameter.dtype:
        return None
    offset = int(tensor.storage_offset()) - int(parameter.storage_offset())
    last = offset + sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    if offset < 0 or last >= parameter.numel():
        return None
    return SavedPlace(parameter, tuple(tensor.size()), tensor.stride(), offset)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _view(saved: Tensor | SavedPlace) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    whole = saved.parameter.data
    assert whole.numel(), "DeepSpeed gathers a layer before it runs back"
    return whole.as_strided(saved.size, saved.stride, int(whole.storage_offset()) + saved.offset)
