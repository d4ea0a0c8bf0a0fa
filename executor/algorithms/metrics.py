"""Metrics as sums that ranks and micro-batches can add, and what happens to them at the end.

A metric is a float64 tensor. Shape (2,) is (sum, count) and is reported as sum / count; shape () is reported
as it is. Both are added over micro-batches and ranks, except names with the prefix `max:`, of which the
largest counts. The names depend only on the loss, its settings and the fields of the batch that are there,
so ranks of one step can lay them end to end in sorted order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

MAX = "max:"
NOT_FINITE = "max:not_finite_rank"
"""First rank whose own sums are nan or infinite; there only if one is."""
Metrics = dict[str, Tensor]
_MOMENTS = ("error", "error_squared", "return", "return_squared")


def mean_of(values: Tensor, mask: Tensor) -> Tensor:
    """(sum, count) of `values` where the mask is 1; any shape, equal for both."""
    chosen = torch.where(mask > 0, values.detach(), 0.0).double()
    return torch.stack([chosen.sum(), (mask > 0).sum().double()])


def largest_of(values: Tensor, mask: Tensor) -> Tensor:
    """The largest of `values` where the mask is 1, at least 0 (also of nothing)."""
    chosen = torch.where(mask > 0, values.detach(), 0.0).double()
    return torch.cat([chosen.flatten(), chosen.new_zeros(1)]).max()


def merge(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Metrics:
    """Metrics of two micro-batches together; a name that one lacks counts from the other alone."""
    merged = dict(first)
    for name, value in second.items():
        combine = torch.maximum if name.startswith(MAX) else torch.add
        merged[name] = combine(merged[name], value) if name in merged else value
    return merged


def finite(metrics: Mapping[str, Tensor]) -> bool:
    """Whether all sums of a rank are numbers."""
    return all(bool(torch.isfinite(value).all()) for value in metrics.values())


def finish(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Plain numbers of a whole step, from metrics that are reduced over all its ranks and micro-batches.

    A mean over nothing is left out. `value/explained_var` = 1 - Var(error) / Var(return) appears where the
    sums of the value loss are there; the sums themselves do not.
    """
    numbers = {
        name.removeprefix(MAX): float(value if value.dim() == 0 else value[0] / value[1])
        for name, value in metrics.items()
        if value.dim() == 0 or value[1] > 0
    }
    moments = [numbers.pop(f"value/{name}", None) for name in _MOMENTS]
    if None not in moments:
        error, error_squared, returns, returns_squared = cast(list[float], moments)
        spread = returns_squared - returns**2
        if spread > 1e-12:  # returns vary
            numbers["value/explained_var"] = 1.0 - (error_squared - error**2) / spread
    return numbers
