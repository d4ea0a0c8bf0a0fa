"""Bytes that one GPU holds for a model: weights, gradients, optimizer, working buffers, framework.

Symbols: Psi elements on a GPU before data-parallel sharding, d ranks that hold the same elements
(dp x cp; experts have their own group), t tensor, p pipeline, e expert parallelism. BF16 compute,
FP32 Adam with a master copy. Activations are in `activations`, the inference engine in `kv_cache`.

Not known here: other hierarchical sharding than HSDP (hpZ, MiCS), tensors
that a framework keeps by mistake, and parameters that a hybrid state-space layer adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from rlhfsim.frozen import frozen
from rlhfsim.kernels.layers import layer_expert_params, layer_matrices, layer_params
from rlhfsim.specs.model.mixers import LayerKind
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.backends import BACKENDS, Backend
from rlhfsim.specs.placement.engine_numbers import DEEPSPEED
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.workload.workload import Lora

Size: TypeAlias = Any
"""A number, or an array with an entry a layout."""
Stage = Literal["first", "last", "only"]
"""Pipeline stages that can be the fullest; `only` without pipeline parallelism."""
Optimizer = Literal["adam", "adam8bit"]

BF16, FP32 = 2.0, 4.0
MOMENTS: dict[Optimizer, float] = {"adam": 8.0, "adam8bit": 2.0 + 2 * FP32 / 256}
"""Two moments per element; 8-bit ones carry an FP32 scale per block of 256 (arXiv 2110.02861)."""
BASE_BYTES = {"bf16": BF16, "nf4": 0.5 + (1 + FP32 / 256) / 64}
"""Bytes of an element of a frozen matrix; 4-bit ones carry an 8-bit constant per block of 64 and an FP32
constant per 256 of those (double quantisation, QLoRA, arXiv 2305.14314)."""
VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of 128 t (`--make-vocab-size-divisible-by`)."""


@frozen
class Shard:
    """Parameter elements on one GPU of a pipeline stage, before data-parallel sharding.

    Functions over it take arrays in place of numbers too, of layouts alike in ZeRO stage and offload.
    """

    dense: float
    """Elements that follow the dense data-parallel group, embedding and head included."""
    expert: float
    """Elements of routed experts."""
    dense_ranks: int
    """Ranks that share the same dense elements: dp x cp, or those of one copy (HSDP)."""
    expert_ranks: int
    """Ranks with the same experts."""
    layer: float
    """Elements of the largest layer, experts included: the unit that ZeRO-3 and FSDP gather."""
    root: float
    """Embedding, head and final norm on this stage: gathered outside the layers."""
    matrix: float
    """Elements of the largest parameter of a layer: a matrix, or one of all experts."""
    num_layers: int

    def only(self, rows: Any) -> Shard:
        """Some of many layouts."""
        return Shard(**{field.name: getattr(self, field.name)[rows] for field in fields(Shard)})

    @property
    def elements(self) -> float:
        """Psi: all elements before data-parallel sharding."""
        return self.dense + self.expert


class States(NamedTuple):
    """Persistent bytes of one role on one GPU, and what of it lies on the host instead."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    """Moments, and the master copy where it is kept apart from the weights."""
    host: float = 0.0
    """Host bytes that this GPU's process owns (CPU offload); 0 for NVMe."""
    between: float = 0.0
    """The part of gradients and their buckets that remains from step to step; not in `total`."""

    @property
    def total(self) -> float:
        """GPU bytes."""
        return self.weights + self.gradients + self.optimizer


CUT = (
    "tp",
    "pp",
    "dp",
    "cp",
    "ep",
    "etp",
    "zero",
    "shards",
    "offload_optimizer",
    "offload_fraction",
    "offload_params",
)
"""Fields of a layout that decide states and buffers."""
cut = attrgetter(*CUT)
PASSED = tuple(field.name for field in fields(Layout) if not field.name.startswith("offload"))
"""Those that decide passes, their activations and seconds: all but what lies on the host."""
passed = attrgetter(*PASSED)
PARTED = ("tp", "pp", "dp", "cp", "ep", "etp", "shards")
"""Those that decide which elements a GPU has."""
Parted = tuple[int, int, int, int, int, int, int | None]
parted = attrgetter(*PARTED)


def stages(pp: int) -> tuple[Stage, ...]:
    """The stages whose memory decides: the first keeps most micro-batches, the last the logits."""
    return ("only",) if pp == 1 else ("first", "last")


def shard(model: ModelSpec, layout: Layout, backend: Backend, stage: Stage = "only") -> Shard:
    """Elements of `model` on one GPU of `stage`."""
    return shard_of(model, backend, stage, parted(layout))


def cut_alike(adapted: bool, tp: int, pp: int, dp: int, cp: int, ep: int, etp: int, *rest: Any) -> object:
    """What of a `CUT` decides the states of a role, apart from its elements; tp and pp cut adapters too."""
    return rest, dp * cp == 1, adapted and (tp, pp)


@lru_cache(maxsize=65536)
def shard_of(model: ModelSpec, backend: Backend, stage: Stage, part: Parted) -> Shard:
    """Elements on one GPU of `stage` in every layout with these fields."""
    if model.others:
        return _together([shard_of(one, backend, stage, part) for one in model.each])
    tp, pp, dp, cp, ep, etp, shards = part
    ranks = shards or dp * cp
    kinds = stage_layers(model, pp, stage)
    held = [(kind, layer_params(model, tp, kind=kind)) for kind in kinds]
    moe_layers = sum(kind.layers for kind in kinds if kind.ffn == "experts")
    # Megatron splits experts over ep x etp and nothing else; without expert parallelism the other backends
    # split each expert over tp like a dense MLP
    if ep == 1 and etp == 1 and backend != "megatron":
        experts, expert_ranks = layer_expert_params(model, 1, tp), ranks
    else:
        experts, expert_ranks = layer_expert_params(model, ep, etp), max(1, tp * ranks // (ep * etp))
    root = root_params(model, tp, stage)
    return Shard(
        dense=root + sum(kind.layers * each for kind, each in held),
        expert=moe_layers * experts,
        dense_ranks=ranks,
        expert_ranks=expert_ranks,
        layer=max(each + (experts if kind.ffn == "experts" else 0) for kind, each in held),
        root=root,
        matrix=max(_largest_parameter(model, tp, ep, etp, kind) for kind in kinds),
        num_layers=sum(kind.layers for kind in kinds),
    )


def _largest_parameter(model: ModelSpec, tp: int, ep: int, etp: int, kind: LayerKind) -> float:
    """As transformers stores a layer: queries, keys, gate, up apart; gates and ups of all experts in one."""
    matrices = layer_matrices(model, tp, ep, tp if ep == etp == 1 else etp, kind=kind)
    return max((m.params for m in matrices if m.name not in ("qkv", "mlp_up")), default=0)


def _together(parts: Sequence[Shard]) -> Shard:
    """The elements of several models, of which one runs at a time."""
    return replace(
        parts[0],
        dense=sum(part.dense for part in parts),
        expert=sum(part.expert for part in parts),
        layer=max(part.layer for part in parts),
        root=max(part.root for part in parts),
        matrix=max(part.matrix for part in parts),
    )


def stacked(parts: Sequence[Shard]) -> Shard:
    """The same of many layouts: arrays, one entry a layout."""
    names = [field.name for field in fields(Shard)]
    columns: Any = np.array([[getattr(part, name) for name in names] for part in parts]).T
    return Shard(**dict(zip(names, columns, strict=True)))


@lru_cache(maxsize=4096)
def stage_layers(model: ModelSpec, pp: int, stage: Stage) -> tuple[LayerKind, ...]:
    """The kinds of layer of a pipeline stage, those with most elements first where they do not divide.

    Layers are dealt out evenly, ceil(L/p) to a stage; dense layers of a MoE model come first, kinds that
    alternate keep their share.
    """
    local, kinds = -(-model.num_layers // pp), model.kinds
    if len(kinds) == 1 or pp == 1:
        return tuple(kind._replace(layers=min(kind.layers, local)) for kind in kinds)
    if {kind.mixer for kind in kinds} == {"attention"} and model.moe and model.moe.period == 1:
        dense = 0 if stage == "last" else model.num_dense_layers
        sparse = max(0, min(model.num_moe_layers, local - dense))
        counts = {"dense": local - sparse, "experts": sparse}
        return tuple(kind._replace(layers=counts[kind.ffn]) for kind in kinds if counts[kind.ffn])
    left, dealt = local, []
    for kind in reversed(kinds):  # experts last in `kinds`
        count = min(left, -(-local * kind.layers // model.num_layers))
        left -= count
        dealt.append(kind._replace(layers=count))
    return tuple(kind for kind in reversed(dealt) if kind.layers)


@lru_cache(maxsize=65536)
def root_params(model: ModelSpec, tp: int, stage: Stage = "only") -> float:
    """Elements outside the layers on one GPU of `stage`: embedding, head, norms, vision tower.

    A tied head is on the first and on the last pipeline stage.
    """
    multiple = VOCAB_MULTIPLE * tp if tp > 1 else 1
    table = -(-model.vocab // multiple) * multiple / tp * model.embedding_width
    head: float = model.embedding_width if model.value_head else table
    tied = model.tied_embeddings and not model.value_head
    norm = model.extra_norms * model.hidden
    positions = model.learned_positions * model.hidden
    if stage == "first":
        return table + positions + model.params_vision
    if stage == "last":
        return head + norm
    return table + positions + model.params_vision + norm + (0 if tied else head)


def bytes_per_element(
    backend: Backend,
    zero: int,
    ranks: int,
    optimizer: Optimizer = "adam",
    gradient_bytes: float | None = None,
    moment_bytes: float | None = None,
    weight_bytes: float | None = None,
) -> tuple[float, float, float]:
    """Weights, gradients and optimizer bytes per element of Psi that one GPU keeps in training.

        Megatron, distributed optimizer: 2 + 4 + 12/d
        DeepSpeed ZeRO-1: 2 + g + 12/d    ZeRO-2: 2 + g/d + 12/d    ZeRO-3: (14 + g)/d
        g = 2, with sums in FP32 4
        FSDP2, full shard: 4/d + 4/d + 8/d (the FP32 shard is weight and master in one), or w/d + ...

    Source: Rajbhandari et al., arXiv 1910.02054, section 3; Megatron-Core
    docs/source/api-guide/dist_optimizer.md; DeepSpeed PR #5099; PyTorch `fully_shard`. FP32 sums: DeepSpeed
    0.19.8, fp32_groups_gradients_flat of runtime/bf16_optimizer.py (stage 1), stage_1_and_2.py,
    _build_compact_grad_partition_buffer (2), grad_partitions_flat_buffer of stage3.py (3).
    """
    gradient = BACKENDS[backend].gradient_bytes if gradient_bytes is None else gradient_bytes
    moments = MOMENTS[optimizer] if moment_bytes is None else moment_bytes
    over = [1.0 if zero < stage else 1.0 / ranks for stage in (3, 2, 1)]
    if backend == "fsdp2":
        sharded = 1.0 / ranks if zero >= 2 else 1.0
        weight = FP32 if weight_bytes is None else weight_bytes
        return weight * sharded, gradient * sharded, moments * (1.0 / ranks if zero else 1.0)
    return BF16 * over[0], gradient * over[1], (FP32 + moments) * over[2]


def trained_states(
    part: Shard,
    layout: Layout,
    backend: Backend,
    *,
    optimizer: Optimizer = "adam",
    gradient_bytes: float | None = None,
    moment_bytes: float | None = None,
    weight_bytes: float | None = None,
) -> States:
    """Persistent bytes of a fully trained model on one GPU, offload of the layout applied.

    `gradient_bytes`, `moment_bytes` (both moments) and, under FSDP, `weight_bytes` replace the defaults where
    a framework stores them otherwise.
    """
    dense, expert = (
        bytes_per_element(backend, layout.zero, ranks, optimizer, gradient_bytes, moment_bytes, weight_bytes)
        for ranks in (part.dense_ranks, part.expert_ranks)
    )
    weights, gradients, states = (
        part.dense * a + part.expert * b for a, b in zip(dense, expert, strict=True)
    )
    sums_fp32 = backend == "deepspeed" and gradient_bytes == FP32
    held = States(weights=weights, gradients=gradients, optimizer=states)
    held = _offloaded(held, part, layout, backend)
    return held._replace(between=_between(held.gradients, part, layout, backend, fp32_sums=sums_fp32))


def plain_states(part: Shard, layout: Layout, width: float, optimizer: Optimizer = "adam") -> States:
    """Persistent bytes of a model whose weights of `width` bytes torch's own optimizer updates (DDP, ZeRO-0).

        Psi (w + w + 2 w), and on several ranks w more      w = width; 8-bit moments as they are

    DDP copies gradients into buckets of its own, which stay from step to step. Source: torch 2.13,
    `gradient_as_bucket_view` of nn/parallel/distributed.py, off by default and in accelerate 1.15.0
    (tests/executor/test_plain_states.py).
    """
    moments = 2 * width if optimizer == "adam" else MOMENTS[optimizer]
    buckets = width * part.elements * (layout.dp * layout.cp > 1)
    weights = width * part.elements
    return States(
        weights=weights, gradients=weights + buckets, optimizer=moments * part.elements, between=buckets
    )


def cast_bytes(part: Shard, width: float) -> Size:
    """BF16 copies of FP32 weights that autocast keeps from their first product to the end of a forward pass.

    Those of a frozen base go at once. Source: torch, `cached_cast` of aten/src/ATen/autocast_mode.cpp, also
    without gradients (tests/executor/test_plain_states.py).
    """
    return BF16 * part.elements * (width > BF16)


def _between(gradients: Size, part: Shard, layout: Layout, backend: Backend, *, fp32_sums: bool) -> Size:
    """Gradient bytes that stay on the GPU from one optimizer step to the next.

    Megatron keeps its flat buffer. DeepSpeed frees gradients and buckets with the step, but keeps ZeRO-3's
    partitions and bucket, and the FP32 sums of ZeRO-1. FSDP2 keeps nothing.
    Source: DeepSpeed 0.19.8, _release_ipg_buffers and zero_grad of runtime/zero/stage_1_and_2.py,
    grad_partitions_flat_buffer and ipg_buckets of stage3.py, fp32_groups_gradients_flat of
    runtime/bf16_optimizer.py; tests/rehearsal/held.py reads them after a step.
    """
    if backend == "deepspeed" and layout.zero == 3:
        return gradients + BF16 * np.minimum(part.elements, DEEPSPEED.reduce_bucket)
    kept = backend == "megatron" or (fp32_sums and layout.zero == 1)
    return gradients if kept else 0.0 * gradients


def _offloaded(states: States, part: Shard, layout: Layout, backend: Backend) -> States:
    """The same states with those that live on the host (or on NVMe) taken off the GPU.

    DeepSpeed moves optimizer and partitioned gradients (FP32 on the host: 16 B/param in all,
    ZeRO-Offload, arXiv 2101.06840); Megatron keeps GPU gradients and adds a pinned FP32 copy. Of a share
    (`offload_fraction`) the rest keeps its states on the GPU, gradients go as without one.
    """
    weights, gradients, optimizer, host = states.weights, states.gradients, states.optimizer, 0.0
    if layout.offload_optimizer != "none":
        owned = part.dense / part.dense_ranks + part.expert / part.expert_ranks
        moved = layout.offload_fraction * (optimizer + (owned * FP32 if layout.zero else 0.0))
        host += moved if layout.offload_optimizer == "cpu" else 0.0
        optimizer *= 1 - layout.offload_fraction
        gradients = 0.0 if backend != "megatron" and layout.zero >= 2 else gradients
    if layout.offload_params != "none":
        host += weights if layout.offload_params == "cpu" else 0.0
        weights = 0.0
    return States(weights=weights, gradients=gradients, optimizer=optimizer, host=host)


def frozen_states(
    part: Shard, layout: Layout, *, width: float = BF16, root_width: float | None = None
) -> States:
    """A model that only runs forward: weights of `width` bytes, sharded over d under ZeRO-3 and FSDP.

    `root_width`: of embedding and head, where they differ.
    """
    ranks = part.dense_ranks if layout.zero == 3 else 1
    dense, root = part.dense / ranks, part.root / ranks
    expert = part.expert / (part.expert_ranks if layout.zero == 3 else 1)
    weights = width * (dense + expert) + ((root_width or width) - width) * root
    if layout.offload_params == "none":
        return States(weights=weights)
    return States(host=weights if layout.offload_params == "cpu" else 0.0)


@lru_cache(maxsize=1024)
def lora_params(model: ModelSpec, rank: int) -> int:
    """Elements of low-rank adapters on every linear layer: r (n + k) for each n x k matrix.

    Hu et al., arXiv 2106.09685. In a MoE model every routed expert has its own adapters.
    """
    h, at, f = model.hidden, model.attention, model.ffn
    gates = 2 if model.gated else 1
    keys = at.num_kv_heads * at.head_dim
    queries, values = at.num_heads * at.head_dim, at.num_kv_heads * at.value_dim
    gated = at.query_width
    if at.kv_lora_rank is None:
        sides = (h + gated) + (h + keys) + (h + values)
    else:
        down = at.kv_lora_rank + (at.qk_rope_head_dim or 0)
        up = at.num_heads * ((at.qk_nope_head_dim or 0) + at.value_dim)
        q = (h + queries) if at.q_lora_rank is None else (h + 2 * at.q_lora_rank + queries)
        sides = q + (h + down) + (at.kv_lora_rank + up)
    attention = sides + at.num_heads * at.value_dim + h
    mlp = (gates + 1) * (h + f)
    total = model.num_attention_layers * attention + model.num_dense_layers * mlp
    if model.recurrent:
        total += model.num_recurrent_layers * (2 * h + model.recurrent.in_width + model.recurrent.inner)
    if model.moe:
        width = model.moe.num_shared_experts * model.moe.shared_ffn  # one MLP of all their widths
        shared = (gates + 1) * (h + width) if width else 0
        routed = model.moe.num_experts * (gates + 1) * (model.expert_width + model.moe.expert_ffn)
        total += model.num_moe_layers * (shared + routed)
    return rank * total


def adapter_shard(model: ModelSpec, part: Shard, layout: Layout, lora: Lora) -> Shard:
    """The adapters that go with a shard; each is cut by tp on one of its two sides."""
    elements = lora_params(model, lora.rank) * ((1 + 1 / layout.tp) / 2 / layout.pp)
    return replace(part, dense=elements, expert=0.0, layer=elements / part.num_layers, root=0.0)


def lora_states(
    model: ModelSpec,
    part: Shard,
    layout: Layout,
    backend: Backend,
    lora: Lora,
    *,
    optimizer: Optimizer = "adam",
    base_width: float | None = None,
    gradient_bytes: float | None = None,
) -> tuple[States, States]:
    """The frozen base, of `base_width` bytes an element, and the trained adapters.

    Of a 4-bit base embedding and head stay in BF16 (bitsandbytes quantises linear layers).
    """
    adapters = adapter_shard(model, part, layout, lora)
    width = base_width or BASE_BYTES[lora.base]
    base = frozen_states(part, layout, width=width, root_width=max(width, BF16))
    return base, trained_states(adapters, layout, backend, optimizer=optimizer, gradient_bytes=gradient_bytes)


def gathered_bytes(
    part: Shard,
    layout: Layout,
    backend: Backend,
    *,
    flat: bool = False,
    cast: bool = True,
    whole: bool = False,
) -> Size:
    """BF16 weights that ZeRO-3 or FSDP hold gathered while a layer runs.

    DeepSpeed keeps up to `DEEPSPEED.live` elements live and prefetches whole parameters until its bucket is
    full, so by up to a parameter more. FSDP2 holds the running layer
    and, for the whole pass, the root (embedding and head), and with them what the all-gathers wrote, which
    is copied from: their stream keeps a pool of its own, in which a layer is written while what the root's or
    the layer before wrote is kept, and before it the rank's own part in BF16 (`cast`: the shards are FP32).
    FSDP1 (`flat`) gathers into the flat parameter itself, at most two layers
    at one time. As one group (`whole`) all weights are there, with what the all-gather wrote. On one rank
    the running and the next layer are there; without resharding after forward
    (stage 2) all weights, with what all-gathers wrote. Weights on the host pass through the same buffers.
    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py, wait_for_unshard (frees a result
    once the next all-gather has its memory); FSDP1: _flat_param.py, _all_gather_flat_param, and
    _limiter_utils.py; DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py, line 447.
    """
    if backend == "fsdp2":
        in_place = flat or layout.dp * layout.cp == 1 or not layout.zero
        if whole and layout.zero == 3:
            return BF16 * part.elements * (1 if in_place else 2)
        own = cast * part.layer / part.dense_ranks
        written = 0.0 if in_place else part.layer + np.maximum(part.root, part.layer) + own
        running = part.root + part.layer * (1 + in_place) if layout.zero == 3 else part.elements
        return BF16 * (np.minimum(part.elements, running) + np.minimum(part.elements + own, written))
    if layout.zero == 3:
        ahead = np.minimum(part.layer, DEEPSPEED.prefetch + part.matrix)
        return BF16 * (np.minimum(part.elements, DEEPSPEED.live) + ahead)
    if layout.offload_params != "none":
        return BF16 * np.minimum(part.elements, 2 * part.layer)
    return 0.0


def experts_kept(part: Shard, layout: Layout, backend: Backend) -> Size:
    """BF16 weights of experts that stay gathered under ZeRO-3 until a layer's backward pass, in addition.

    transformers keeps all experts of a layer in one parameter and multiplies by a view of it, which autograd
    saves; DeepSpeed gives a parameter other memory when it lets go, and the view keeps what was gathered.
    The last layer's are those that DeepSpeed counts as live. FSDP2 frees the storage under all views, and so
    does who saves the place of a view (`Software.frees_experts`).
    Source: transformers 5.19, integrations/moe.py, _grouped_linear; DeepSpeed 0.19.8, free_param of
    runtime/zero/partition_parameters.py; tests/rehearsal/held.py reads it.
    """
    if backend != "deepspeed" or layout.zero != 3:
        return 0.0
    return BF16 * np.maximum(0.0, part.expert - np.minimum(part.layer, DEEPSPEED.live))


def gradient_buffer_bytes(
    part: Shard,
    layout: Layout,
    backend: Backend,
    *,
    overlap: bool = True,
    fp32_sums: bool = False,
    flat: bool = False,
    reduced: float = FP32,
) -> Size:
    """Gradients between backward and reduction: buckets, and whole layers before reduce-scatter.

    DeepSpeed allocates whole buckets at any number of ranks, of `DEEPSPEED.reduce_bucket` elements or, where
    fewer are trained, of those: one (ZeRO-1), two where the reduction overlaps (ZeRO-2), one and the copy
    that a reduce-scatter interleaves (ZeRO-3); none where ZeRO-1 sums in FP32, one gradient after the other.
    FSDP2 holds one reduce-scatter input, of the layer whose backward pass is through (its gradients
    until then count with its activations), in `reduced` bytes an element; FSDP1 (`flat`) also BF16
    gradients of two layers and of the root, which are its input where it reduces in BF16. Megatron reduces in
    place in its FP32 buffer.
    `overlap`: as the executor asks for; DeepSpeed's own default overlaps under ZeRO-3 alone.
    Source: DeepSpeed 0.19.8, setup_buckets of runtime/zero/stage_1_and_2.py, reduce_scatter_coalesced of
    runtime/comm/coalesced_collectives.py (tests/executor/test_deepspeed_buckets.py runs both).
    """
    if backend == "deepspeed":
        buckets = (0, 0 if fp32_sums else 1, 2 if overlap else 1, 2)[layout.zero]
        return BF16 * buckets * np.minimum(part.elements, DEEPSPEED.reduce_bucket)
    if not reduce_scatters(layout, backend):
        return 0.0
    copied = 0.0 if flat and reduced == BF16 else reduced * part.layer
    return copied + flat * BF16 * (2 * part.layer + part.root)


def reduce_scatters(layout: Layout, backend: Backend) -> bool:
    """Whether FSDP reduces gradients layer by layer into shards."""
    return backend == "fsdp2" and layout.dp * layout.cp > 1 and layout.zero >= 2


def summed_again(part: Shard, layout: Layout, backend: Backend, *, fp32_sums: bool = False) -> Size:
    """Gradients of a further micro-batch on top of the sums of those before it, in the rank's own partition.

    ZeRO-2 fills a second buffer of the partition, which it adds when the micro-batch is through; FP32 sums
    take each gradient at once. FSDP2 writes the rank's part of a layer's, or the root's, sum in FP32, in the
    pool of the stream that reduces. Source: DeepSpeed 0.19.8, grads_in_partition of copy_grads_in_partition
    and all_grad_tensors of runtime/zero/stage_1_and_2.py; torch 2.13, foreach_reduce of
    distributed/fsdp/_fully_shard/_fsdp_collectives.py.
    """
    if reduce_scatters(layout, backend):
        return FP32 * np.maximum(part.layer, part.root) / part.dense_ranks
    if backend != "deepspeed" or layout.zero != 2 or fp32_sums or layout.offload_optimizer != "none":
        return 0.0
    return BF16 * (part.dense / part.dense_ranks + part.expert / part.expert_ranks)


def summed_whole(part: Shard, gradients: Size, width: float) -> Size:
    """Whole gradients of the micro-batches before, where FSDP reduces once a step (`Software.sums_whole`),
    in addition to the `gradients` of the rank's own shards, which come with the last micro-batch alone.

    `width`, bytes of an element: FSDP2 adds them up in the type that it reduces in, FSDP1 leaves them where
    autograd adds, in BF16. Source: torch 2.13, to_accumulated_grad_if_needed of
    distributed/fsdp/_fully_shard/_fsdp_param.py; _post_backward_hook of distributed/fsdp/_runtime_utils.py,
    which returns before it casts (tests/executor/test_whole_gradients.py runs both).
    """
    return np.maximum(0.0, width * part.elements - gradients)


def loss_share(layout: Layout, backend: Backend) -> float:
    """Share of `gradient_buffer_bytes` that is there at the loss of a micro-batch, before layers run back.

    ZeRO-1 keeps its bucket from the first micro-batch of a step to the last, ZeRO-3 one of its two for good;
    ZeRO-2 and FSDP take theirs with the first gradient and free them with the last of a micro-batch.
    """
    return {1: 1.0, 3: 0.5}.get(layout.zero, 0.0) if backend == "deepspeed" else 0.0


def step_bytes(part: Shard, layout: Layout, backend: Backend, *, fp32_sums: bool = False) -> Size:
    """What the optimizer step itself needs: FP32 gradients (DeepSpeed), intermediates (FSDP2).

    FP32 sums serve as they are, but ZeRO-1 reduces them whole, from a copy in BF16. ZeRO-3 makes one tensor
    of a sub-group's in BF16 first (DeepSpeed 0.19.8, _prepare_fp32_grad_for_sub_group of stage3.py).
    It runs when activations are gone, so it counts only where it exceeds them. The fused Adam of
    Megatron works in place.
    """
    if backend == "megatron" or (layout.offload_optimizer != "none" and layout.offload_fraction == 1):
        return 0.0
    owned = part.elements
    if layout.zero:
        owned = part.dense / part.dense_ranks + part.expert / part.expert_ranks
    if fp32_sums and layout.zero < 3:
        return BF16 * part.elements if layout.zero == 1 else 0.0
    width = FP32
    if backend == "deepspeed" and layout.zero == 3:
        owned = np.minimum(owned, DEEPSPEED.sub_group)
        width += 0.0 if fp32_sums else BF16
    return width * owned * (1 if layout.offload_optimizer == "none" else 1 - layout.offload_fraction)


def communicators(
    tp: int, pp: int, dp: int, cp: int, ep: int, etp: int = 1, shards: int | None = None
) -> int:
    """NCCL communicator sets of one process: one for each parallel dimension above 1 (`PARTED`)."""
    return sum(degree > 1 for degree in (tp, pp, dp * cp, ep, shards or 1))
