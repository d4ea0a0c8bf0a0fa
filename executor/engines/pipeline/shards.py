"""Tensor parallelism inside a pipeline stage: linear layers cut by columns or rows, as in Megatron-LM.

    attention: Q, K, V by output rows (heads), O by input columns; MLP: gate, up by rows, down by columns

Activations are whole before and after each pair; one all-reduce forward (after O and down) and one backward
(before Q, K, V and before gate, up). Embedding, norms and head are whole on every rank: their gradients are
equal there because their inputs are; norms of single heads (Qwen3) see a part of the heads, so their
gradients are summed over the ranks. Source: Shoeybi et al. 2019, arXiv 1909.08053.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from rlhfsim.errors import RlhfsimError

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Cut along the output: each rank makes its own heads or features."""
ROW = ("o_proj", "down_proj")
"""Cut along the input: partial sums are added."""
HEAD_NORMS = ("q_norm", "k_norm")
"""Norms of single heads: whole, but each rank sees only its heads."""


class MatrixPart(NamedTuple):
    """Which part of a matrix a rank holds."""

    dim: Literal[0, 1]
    parts: int
    rank: int


def cuts(tp: int, rank: int) -> dict[str, MatrixPart]:
    """Cut of each sharded parameter by its last two names, `q_proj.weight`; the others are whole."""
    if tp == 1:
        return {}
    by_rows = {f"{name}.{kind}": MatrixPart(0, tp, rank) for name in COLUMN for kind in ("weight", "bias")}
    return by_rows | {f"{name}.weight": MatrixPart(1, tp, rank) for name in ROW}


def shard(layer: nn.Module, tp: int) -> None:
    """Replace the linear layers of a decoder layer (on the meta device) by their shards.

    Raises:
        RlhfsimError: heads or features that `tp` does not divide.
    """
    if tp == 1:
        return
    attention = cast(Any, layer).self_attn
    heads, features = attention.config.num_key_value_heads, attention.config.intermediate_size
    if heads % tp or features % tp:
        raise RlhfsimError(
            "tp-does-not-divide",
            f"tensor parallelism {tp} does not divide {heads} key-value heads and {features} features",
            help="use a tp that divides both",
        )
    for parent in (attention, cast(Any, layer).mlp):
        for name, child in list(parent.named_children()):
            if name in COLUMN:
                setattr(parent, name, _column(child, tp))
            elif name in ROW:
                setattr(parent, name, RowLinear(child, tp))


def _column(whole: nn.Linear, tp: int) -> nn.Linear:
    """The layer with its share of the output features."""
    like: dict[str, Any] = {"device": whole.weight.device, "dtype": whole.weight.dtype}
    return nn.Linear(whole.in_features, whole.out_features // tp, whole.bias is not None, **like)


class _ToShards(torch.autograd.Function):
    """Identity forward, sum over the ranks backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _FromShards(torch.autograd.Function):
    """Sum over the ranks forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, group: Any) -> Tensor:
        whole = product.contiguous().clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class RowLinear(nn.Module):
    """A linear layer whose input features are split: the whole output, summed over the ranks."""

    def __init__(self, whole: nn.Linear, tp: int) -> None:
        super().__init__()
        self.group: Any = None
        kind: dict[str, Any] = {"device": whole.weight.device, "dtype": whole.weight.dtype}
        self.weight = nn.Parameter(torch.empty(whole.out_features, whole.in_features // tp, **kind))
        self.bias = None if whole.bias is None else nn.Parameter(torch.empty(whole.out_features, **kind))

    def forward(self, features: Tensor) -> Tensor:
        """(..., in / tp) to (..., out)."""
        product = functional.linear(features, self.weight)
        whole = cast(Tensor, _FromShards.apply(product, self.group))  # type: ignore[no-untyped-call]
        return whole if self.bias is None else whole + self.bias


def attach(layer: nn.Module, group: Any) -> None:
    """Join the shards of a decoder layer by their process group."""
    for name, child in layer.named_modules():
        leaf = name.rsplit(".", 1)[-1]
        if isinstance(child, RowLinear):
            child.group = group
        elif leaf in ("self_attn", "mlp"):
            enter = partial(_enter, group=group)
            child.register_forward_pre_hook(enter, with_kwargs=True)
        elif leaf in HEAD_NORMS:
            weight = cast(nn.Parameter, child.weight)
            weight.register_hook(partial(_summed, group=group))


def _enter(_: nn.Module, args: Any, kwargs: Any, *, group: Any) -> tuple[Any, Any]:
    """The first argument, or `hidden_states`, passes to the shards."""
    hidden = args[0] if args else kwargs["hidden_states"]
    entered = _ToShards.apply(hidden, group)  # type: ignore[no-untyped-call]
    return ((entered, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": entered})


def _summed(grad: Tensor, *, group: Any) -> Tensor:
    grad = grad.contiguous().clone()
    dist.all_reduce(grad, group=group)
    return grad


def gathered(parameter: Tensor, cut: MatrixPart | None, group: Any) -> Tensor:
    """The whole tensor from all ranks of the group; a collective where it is cut."""
    mine = parameter.detach().contiguous()
    if cut is None:
        return mine
    pieces = [torch.empty_like(mine) for _ in range(cut.parts)]
    dist.all_gather(pieces, mine, group=group)
    return torch.cat(pieces, cut.dim)
