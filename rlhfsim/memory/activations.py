"""Bytes of activations of a call on one GPU: layers and micro-batches in flight, recomputation, the loss.

Everything is per token of the micro-batch on one GPU (after context parallelism) unless a name
says otherwise. Of columns of layouts sizes are arrays. Not known here: offloaded activations.
"""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from rlhfsim.elementwise import each, least, most, where
from rlhfsim.frozen import frozen
from rlhfsim.kernels.layers import heads
from rlhfsim.memory.layer_tensors import (
    BackwardPhase,
    LayerTensors,
    RoutedExperts,
    layer_tensors,
    norm_bytes,
    normalised_bytes,
    one_layer,
)
from rlhfsim.memory.logits import BF16, FP32, Size, head_gradient, head_peak
from rlhfsim.memory.states import Stage, stage_layers
from rlhfsim.specs.model.mixers import LayerKind
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.backends import BACKENDS, Backend
from rlhfsim.specs.placement.heads import Head
from rlhfsim.specs.placement.layout_columns import AnyLayout
from rlhfsim.specs.placement.software import Software


class Activations(NamedTuple):
    """Bytes of activations of one call on one GPU."""

    saved: Size
    """Kept for backward over all layers and micro-batches in flight."""
    working: Size
    """The layer that runs: temporaries, gradients, and its tensors while it is recomputed."""
    logits: Size
    """Final norm, logits and loss on the last stage."""
    layer: Size = 0.0
    """The part of `saved` that leaves with the backward pass of one layer."""
    input: Size = 0.0
    """A layer's input alone, or its gradient."""

    @property
    def peak(self) -> Size:
        """Saved tensors plus the larger of logits (at the loss) and working set (in backward)."""
        return self.saved + np.maximum(self.working, self.logits)

    def beside(self, buffers: Size) -> Size:
        """What `buffers` of the backward pass add to the peak: none of them is there at the loss."""
        return np.maximum(0.0, self.working + buffers - np.maximum(self.working, self.logits))


def in_flight(pp: Size, vp: Size, micro_batches: Size, stage: Stage) -> Size:
    """Micro-batches whose activations a stage holds under 1F1B.

        first stage: min(p, m), interleaved p (1 + (p-1)/(p v))      last stage: 1

    Source: Korthikanti et al., arXiv 2205.05198, section 4.2.3. Interleaving needs m >= p.
    """
    held = where(vp > 1, 1 + (pp - 1) / (pp * vp), 1.0)
    if stage != "first":
        return held
    return least(where(micro_batches < pp, pp, pp * held), micro_batches)


_SHAPE = attrgetter("tp", "pp", "etp", "sequence_parallel", "recompute")
"""Fields of a layout that decide the bytes of a token."""

PLAIN = Software()
"""A stack that says nothing of logits, and compiles no layer."""


@frozen
class MicroBatches:
    """The micro-batches of one optimizer step on a rank, of a layout or of an array of them."""

    tokens: Size
    """Tokens of one over all cp ranks."""
    count: Size
    imbalance: Size = 1.0
    """Tokens of the fullest expert rank over the mean."""
    score_length: float = 0.0
    """Keys that a query sees where attention is not flash."""


def training_activations(
    model: ModelSpec,
    layout: AnyLayout,
    backend: Backend,
    batch: MicroBatches,
    *,
    stage: Stage = "only",
    fp8: bool = False,
    software: Software = PLAIN,
    frozen: bool = False,
) -> Activations:
    """Activations of a training call.

    full recomputation: layer inputs, and the tensors of one layer while it is recomputed
    selective: Megatron drops the scores of attention (with flash attention there are none), FSDP2 keeps
    what `_kept_by_operation` lists
    none: every tensor

    `frozen`: the weights get no gradients (adapters). `software` says where logits are (`head_peak`), and
    whether layers are compiled.
    """
    local = batch.tokens / layout.cp
    kernels = _Kernels(backend, software.stack == "compiled")
    kept = partial(_kept_and_running, model, kernels, stage, batch.score_length, fp8, frozen)
    saved, layers, *phases = each(kept, batch.imbalance, *_SHAPE(layout))
    held = in_flight(layout.pp, layout.vp, batch.count, stage)
    # DeepSpeed's hooks take a gradient when it is whole, FSDP2's a layer's; FSDP1's count with its buffers
    by_layer = backend == "fsdp2" and not software.flat_parameters
    gradients = (backend == "deepspeed" or by_layer) and not frozen
    moments = zip(phases[::2], phases[1::2], strict=True)
    working = most(*(local * token + (fixed if gradients else 0.0) for token, fixed in moments))
    late = by_layer or (model.tied_embeddings and stage == "only")
    if gradients and late and stage != "first" and not model.value_head:
        working = working + head_gradient(model, layout)  # complete only after the embedding's own
    logits: Size = 0.0
    if stage != "first":
        norm = norm_bytes(model, 1.0, fused=False)
        logits = head_peak(
            model, layout, backend, local, software.head, norm=norm, gradients=gradients, frozen=frozen
        )
    token = BF16 * model.hidden * where(layout.sequence_parallel, 1.0 / layout.tp, 1.0)
    return Activations(local * saved * held, working, logits, local * saved / layers, local * token)


class _Kernels(NamedTuple):
    """Whose kernels a layer runs on."""

    backend: Backend
    compiled: bool = False

    @property
    def fused(self) -> bool:
        """Whether norms and activations are one kernel each; the compiler does not fuse experts."""
        return self.backend == "megatron" or self.compiled


@lru_cache(maxsize=65536)
def _kept_and_running(
    model: ModelSpec,
    kernels: _Kernels,
    stage: Stage,
    score_length: float,
    fp8: bool,
    frozen: bool,
    imbalance: float,
    *shape: Any,
) -> tuple[float, ...]:
    """Bytes per token that a stage keeps of one micro-batch, its layers, and the moments of the layer that
    runs, bytes per token and fixed ones of each."""
    tp, pp, etp, sequence_parallel, recompute = shape
    length = 0.0 if recompute == "selective" else score_length
    kinds = stage_layers(model, pp, stage)
    cut = (tp, etp, sequence_parallel)
    running = _tensors(model, kernels, kinds, cut, imbalance, fp8, length)
    without = [normalised_bytes(model, x) if frozen and not kernels.fused else 0.0 for x in running]
    totals = [tensors.total - less for tensors, less in zip(running, without, strict=True)]
    layers, first = sum(kind.layers for kind in kinds), running[0]
    by_operation = recompute == "selective" and kernels.backend == "fsdp2"
    if recompute != "full" and not by_operation:
        moments = chain.from_iterable(_moments(tensors, kernels.backend) for tensors in running)
        saved = sum(k.layers * total for k, total in zip(kinds, totals, strict=True))
        return saved, layers, *chain.from_iterable(moments)
    kept = first.input + (_kept_by_operation(model, tp) if by_operation else 0.0)
    phases = (
        number
        for tensors, total in zip(running, totals, strict=True)
        for phase in _moments(tensors, kernels.backend)
        for number in (phase.token + total + first.input - kept, phase.fixed)
    )
    return kept * layers, layers, *phases


def _moments(tensors: LayerTensors, backend: Backend) -> tuple[BackwardPhase, ...]:
    """Moments of a layer's backward pass; under FSDP gradients stay until all of the layer are there."""
    if backend != "fsdp2":
        return tensors.backward
    fixed = accumulate(phase.fixed for phase in tensors.backward)
    return tuple(phase._replace(fixed=sum_) for phase, sum_ in zip(tensors.backward, fixed, strict=True))


def _kept_by_operation(model: ModelSpec, tp: int) -> float:
    """Outputs that selective recomputation by operation keeps of a layer, in addition to its input.

    Attention's, and every second matrix product's: of q, k, v, output, gate, up and down the first, third,
    fifth and seventh. Experts are computed again. Source: torchtitan 9dec370, `_save_list` and
    `_apply_ac_to_transformer_block` of torchtitan/parallelisms/parallelize_llama.py.
    """
    local = heads(model.attention, tp)
    attention = local.query * (local.qk_dim + local.v_dim) + local.kv * local.v_dim
    mlp = model.ffn / tp + model.hidden if model.num_dense_layers else 0.0
    return BF16 * (attention + mlp) + FP32 * local.query


def forward_activations(
    model: ModelSpec,
    layout: AnyLayout,
    backend: Backend,
    *,
    tokens: Size,
    imbalance: Size = 1.0,
    score_length: float = 0.0,
    head: Head | None = None,
) -> Activations:
    """Activations of a scoring call: one layer at a time, then the logits (as in `training_activations`)."""
    local = tokens / layout.cp
    alive = partial(_alive, model, backend, score_length)
    working = each(alive, layout.tp, layout.etp, layout.sequence_parallel, imbalance)
    logits = head_peak(model, layout, backend, local, head)
    return Activations(saved=0.0, working=local * working, logits=logits)


@lru_cache(maxsize=65536)
def _alive(
    model: ModelSpec,
    backend: Backend,
    score_length: float,
    tp: int,
    etp: int,
    sequence_parallel: bool,
    imbalance: float,
) -> float:
    """Bytes per token alive at once in the widest layer of a forward without gradients."""
    running = _tensors(model, _Kernels(backend), model.kinds, (tp, etp, sequence_parallel), imbalance)
    working = max(t.forward for t in running)
    if score_length:  # scores and softmax of one layer
        working += 4 * heads(model.attention, tp).query * score_length
    return working


# --- the head -------------------------------------------------------------------------------------


def _tensors(
    model: ModelSpec,
    kernels: _Kernels,
    kinds: tuple[LayerKind, ...],
    cut: tuple[int, int, bool],
    imbalance: float,
    fp8: bool = False,
    score_length: float = 0.0,
) -> list[LayerTensors]:
    """A layer of each kind under a layout.

    `cut`: TP, TP of an expert, and whether sequences are split over TP.
    """
    tp, etp, sequence_parallel = cut
    options: dict[str, Any] = {
        "sequence_parallel": sequence_parallel and tp > 1 and BACKENDS[kernels.backend].sequence_parallel,
        "fused": kernels.fused,
        "fp8": fp8,
        "score_length": score_length,
    }
    routed = RoutedExperts(etp, imbalance, kernels.backend == "megatron")
    return [
        layer_tensors(
            model, tp, routed if kind.ffn == "experts" else RoutedExperts(), kind=one_layer(kind), **options
        )
        for kind in kinds
    ]
