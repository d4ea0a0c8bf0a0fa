"""Time of one transformer layer, of the embedding and of the LM head, for one micro-batch on one GPU.

Every kernel is priced by its own roof or measured curve and the times are added: kernels of one
stream do not overlap. Legend as in `layers`; T tokens on the GPU after context parallelism, T' = T/t
with sequence parallelism. Times are raw: how much of a collective hides behind compute is decided
in `rlhfsim.phases`.

Not known here: clocks under a power cap, dropout, biases that are not fused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import add
from typing import NamedTuple

from rlhfsim.elementwise import (
    Size,
    by_word,
    either,
    kept,
    least,
    most,
    number,
    some,
    together,
    unsaid,
    where,
)
from rlhfsim.kernels import collectives, layers
from rlhfsim.kernels.device import Device, group
from rlhfsim.kernels.flop import FLASH_BACKWARD
from rlhfsim.kernels.layers import Matrix
from rlhfsim.kernels.routing import routing_of
from rlhfsim.specs.model.mixers import LayerKind
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.heads import Traffic
from rlhfsim.specs.placement.layout import Dispatcher
from rlhfsim.training.mixer_time import BF16, attention, index, scan
from rlhfsim.training.work import LOW, Work

MAX_M, MAX_N, MAX_K = 32768.0, 65536.0, 65536.0
"""Largest GEMM in the tables; beyond it time grows in proportion."""
MODULES: Mapping[str, tuple[str, ...]] = {
    "mla_up_proj": ("q_up", "kv_up"),
    "mlp": ("mlp_up", "mlp_down"),
    "moe": ("expert_up", "expert_down"),
    "layernorm": (),
    "moe_act": (),
}
"""Matrices of the modules that Megatron-Core recomputes one by one (`recompute_modules`)."""
OPERATORS = "operators"
"""Recomputation by operator: every second product and all element-wise kernels again, attention kept (PyTorch
selective activation checkpointing as in torchtitan's `selective`, option `op`)."""
EVERY_SECOND = 0.5
SCAN_BACKWARD = 2.5
"""Backward over forward of a scan: as of attention, its products again and twice as many."""
EP_SPREAD = (0.5, 1.5)
"""P10 and P90 of exposed dispatch and combine over their price, where the dispatcher is known."""
TRAINS_WITH: tuple[Dispatcher, ...] = ("alltoall", "deepep", "hybridep", "allgather")
"""Dispatchers of training; low-latency kernels serve decoding."""
TILE = 128.0
"""Rows that a grouped GEMM pads each expert to (tile height of the CUTLASS and cuBLAS kernels)."""


class Pass(NamedTuple):
    """Raw seconds of one direction through one layer."""

    gemm: Size = 0.0
    attention: Size = 0.0
    memory: Size = 0.0
    tp: Size = 0.0
    ep: Size = 0.0
    cp: Size = 0.0
    scan: Size = 0.0
    """Scan of a recurrent layer."""
    indexer: Size = 0.0
    """Indexer of sparse attention."""

    def plus(self, other: Pass) -> Pass:
        """Sum by part."""
        return Pass(*map(add, self, other))

    def times(self, factor: Size) -> Pass:
        """Every part scaled."""
        return Pass(*[a * factor for a in self])


NOTHING = Pass()


class Layer(NamedTuple):
    """Forward and backward of one layer, and what variants of training leave out or repeat."""

    forward: Pass
    backward: Pass
    weight_gradient: Size = 0.0
    """Part of `backward.gemm` that frozen weights save."""
    core: Size = 0.0
    """Forward of the attention core: what selective recomputation repeats."""
    modules: Mapping[str, Size] = {}
    """Forward GEMM seconds by module of `MODULES`: what recomputing it repeats."""


def layer(device: Device, model: ModelSpec, work: Work, *, kind: LayerKind) -> Layer:
    """Times of one layer of a kind.

        forward  = sum GEMM(m, n, k) + core + bytes/(B eta) ;  m = T x rows
        backward = sum GEMM(m, k, n) + GEMM(k, n, m) + r core + 2 bytes/(B eta)

    The backward of y = x w needs dx = dy w^T and dw = x^T dy, two GEMMs of the same size; the flash
    backward has 2.5 times the FLOP at `attention_backward_rate` of the forward's rate (T1).
    """
    matrices = layers.layer_matrices(model, work.tp, work.ep, work.etp, kind=kind)
    forward, data, weight, by_name = _gemms(device, matrices, work)
    modules = {key: sum(by_name.get(n, 0.0) for n in names) for key, names in MODULES.items()}
    attends = kind.mixer == "attention"
    core = attention(device, model, work) if attends else 0.0
    scanned = scan(device, model, work) if kind.mixer == "recurrent" else 0.0
    indexed = index(device, model, work) if attends else 0.0
    ratio = FLASH_BACKWARD / device["attention_backward_rate"] if work.flash else 2.0
    passes = 1.0 if work.fused else device["eager_traffic"]
    memory = passes * _traffic(model, matrices, work, kind) / device.hbm
    tp = _tensor_parallel(device, model, work, kind)
    ep = _expert_parallel(device, model, work) if kind.ffn == "experts" else 0.0
    cp = _context_parallel(device, model, work, kind)
    return Layer(
        Pass(forward, core, memory, tp, ep, cp, scanned, indexed),
        Pass(data + weight, ratio * core, 2 * memory, tp, ep, 2 * cp, SCAN_BACKWARD * scanned, indexed),
        weight,
        core,
        modules,
    )


def head(
    device: Device,
    model: ModelSpec,
    work: Work,
    *,
    logprob: bool = True,
    traffic: Traffic | None = None,
    again: bool = False,
) -> Layer:
    """LM head with cross-entropy (or value head), split over tp in the vocabulary.

    The loss passes over the logits: FP32 copy, maximum, exponential and sum, gather forward (12 B
    each); softmax minus one-hot backward (8 B). Fused kernels need about half. Source: counting.
    `traffic`: of a framework whose loss passes over them otherwise; `again`: its backward pass computes the
    logits once more.
    """
    matrix = layers.head_matrix(model, work.tp)
    forward, data, weight, _ = _gemms(device, (matrix,), work)
    logits = work.tokens * matrix.n / device.hbm if logprob and not model.value_head else 0.0
    scale = 0.5 if work.fused else 1.0
    ahead, back = traffic or (12 * scale, 8 * scale)
    norm = 2 * BF16 * work.held * model.hidden / device.hbm
    return Layer(
        Pass(forward, memory=ahead * logits + norm),
        Pass(data + weight + (forward if again else 0.0), memory=back * logits + 2 * norm),
        weight,
    )


def embedding(device: Device, model: ModelSpec, work: Work) -> Layer:
    """Embedding look-up: read and write h per token; the gradient is scattered in FP32."""
    row = work.tokens * model.hidden / device.hbm
    return Layer(Pass(memory=2 * BF16 * row), Pass(memory=10 * row))


def adapter_time(device: Device, model: ModelSpec, work: Work, *, kind: LayerKind) -> tuple[Size, Size]:
    """Forward and backward seconds of the adapters (LoRA) next to every matrix of a layer: memory, not FLOP.

        forward   rows (k + 3 n) x 2 B: the input read again, the adapter's output written, read and added
        backward  rows (2 n + 4 k) x 2 B: the gradient of the output read for both adapters, the input read,
                  the gradient of the input written, read and added

    Eager modules (dropout, casts, scaling) pass more often. Source: counting.
    """
    passes = 1.0 if work.fused else device["eager_traffic"]
    matrices = [x for x in layers.layer_matrices(model, work.tp, work.ep, work.etp, kind=kind) if x.linear]
    each = passes * BF16 / device.hbm
    ahead = sum(_rows(x, work) * (x.k + 3.0 * x.n) for x in matrices)
    return each * ahead, each * sum(_rows(x, work) * (2.0 * x.n + 4.0 * x.k) for x in matrices)


def repeated_traffic(modules: tuple[str, ...]) -> float:
    """Share of a layer's forward HBM traffic that recomputed modules repeat: norms, activation."""
    if OPERATORS in modules:
        return 1.0
    return 0.3 * ("layernorm" in modules) + 0.3 * bool({"moe_act", "moe", "mlp"} & set(modules))


def _gemms(
    device: Device, matrices: tuple[Matrix, ...], work: Work
) -> tuple[Size, Size, Size, dict[str, Size]]:
    """Seconds of all forward, data-gradient and weight-gradient GEMMs; forward ones by name too."""
    ways = [
        (*precision, *way, x.experts > 1, BF16 * x.params / device.hbm)
        for x in matrices
        for precision, m in ((_precision(x, work), _rows(x, work)),)
        for way in ((m, x.n, x.k), (m, x.k, x.n), (x.k, x.n, m))
    ]
    times = together(partial(_gemm, device), ways)
    forward, data, weight = (sum(times[way::3]) for way in range(3))
    return forward, data, weight, dict(zip((x.name for x in matrices), times[::3], strict=True))


def _precision(matrix: Matrix, work: Work) -> tuple[str, float]:
    """Number format of the products of a matrix, and their speed over the timed ones."""
    if not matrix.linear or matrix.name in work.bf16_matrices:
        return "bf16", 1.0
    return work.precision, work.low_precision_gain if work.precision in LOW else 1.0


@kept(65536)
def _gemm(
    device: Device, precision: str, gain: float, m: Size, n: Size, k: Size, grouped: Size, read: Size
) -> Size:
    """Seconds of one GEMM of a training step; a grouped one reads its weights, `read` seconds.

    Experts of a step in FP4 run at the speed of FP8: grouped products of Transformer Engine gain at most 15 %
    from it, often nothing, since tokens of every expert are rotated and quantised apart. Source:
    NVIDIA/TransformerEngine issue 2281 (B200, October 2025).
    """
    a, b, c = least(m, MAX_M), least(n, MAX_N), least(k, MAX_K)
    timed = partial(device.curves.gemm, a, b, c)
    slow = grouped if precision == "fp4" else False
    seconds = (
        number(either(slow, lambda: timed("fp8"), lambda: timed(precision))) * (m / a) * (n / b) * (k / c)
    )
    whole = either(grouped, lambda: most(seconds / device["grouped_gemm_efficiency"], read), lambda: seconds)
    return whole / gain


def _rows(matrix: Matrix, work: Work) -> Size:
    """Rows of a GEMM; routed experts take those of the busiest rank, each padded to whole tiles."""
    if not matrix.name.startswith("expert"):
        return work.held if matrix.name == "router" else work.tokens
    rows = work.held * matrix.rows * work.skew
    each = most(rows / matrix.experts, 1.0)
    padded = matrix.experts * (each + least(TILE / 2, each / 2))
    return where((matrix.experts == 1) & (matrix.rows == 1), work.tokens, padded)


def _traffic(model: ModelSpec, matrices: tuple[Matrix, ...], work: Work, kind: LayerKind) -> Size:
    """Bytes through HBM of everything that is not a GEMM or the attention core, forward.

        norms and residuals 5 h T' a block, rotary 4 (a + g) d_k T, gated activation 3 f T (2 f if not)
        MoE: permute and unpermute 4 k h T' and the activation on k rows; plain all-to-all sorts what
        arrives by expert and back, as much again (`MoEAlltoAllTokenDispatcher` of Megatron-Core 0.15)
        recurrent: convolution, gates and norm pass three times over what goes in, 3 (2 a d + 2 g n) T
        context parallelism: the sum of partial outputs 3 a d_v T a step of the ring after the first
    in elements of 2 B; eager kernels pass about twice. Quantisation to FP8 is inside the
    timed FP8 products. Source: counting.
    """
    at = model.attention
    local = layers.heads(at, work.tp)
    elements = 5.0 * kind.blocks * model.hidden * work.held
    if kind.mixer == "attention":
        elements += 4 * (local.query + local.kv) * local.qk_dim * work.tokens
        elements += 3 * (work.cp - 1) * local.query * local.v_dim * work.tokens
    elif kind.mixer == "recurrent" and model.recurrent:
        elements += 3 * model.recurrent.in_width / work.tp * work.tokens
    for matrix in matrices:
        rows = _rows(matrix, work)
        grouped = matrix.experts > 1
        if matrix.name in ("mlp_up", "expert_up"):
            elements += where(
                work.fused_experts & grouped, 0.0, (1.5 if model.gated else 2.0) * matrix.n * rows
            )
        if model.mlp_bias and not work.fused_experts:
            elements += where(grouped, _biased(matrix, work) * matrix.n * rows, 0.0)
    if kind.ffn == "experts" and model.moe:
        sorts = where((work.dispatcher == "alltoall") & (work.ep > 1), 2, 1)
        elements += 4 * sorts * model.moe.top_k * work.etp * model.expert_width * work.held
    return BF16 * elements


def _biased(matrix: Matrix, work: Work) -> Size:
    """Elements, of 2 B, that biases of routed experts pass through memory for each that the product writes.

    A third of what both directions pass, counted kernel by kernel in `TEGroupedMLP` of Megatron-Core (0.15):
    up, limits of the activation and their concatenation 8 B forward, 10 B backward; down, product of bias and
    router weight, sum, concatenation and cast, 28 and 40 B in FP32, which flexible dispatchers make of the
    weights, 12 and 16 B in BF16 behind plain all-to-all.
    """
    if matrix.name != "expert_down":
        return 3.0
    return where(work.dispatcher == "alltoall", 4.7, 11.3)


def _tensor_parallel(device: Device, model: ModelSpec, work: Work, kind: LayerKind) -> Size:
    """Collectives of one direction: 2 x (AG + RS) of T h with sequence parallelism, else 2 x AR.

    A MoE layer whose experts are not cut over tp (etp 1) has them only around the attention and
    the shared expert (T4; Korthikanti et al., arXiv 2205.05198, section 4.2).
    """
    ranks = group(work.tp, 1, device.domain)
    size = BF16 * work.tokens * model.hidden
    shared = bool(model.moe and model.moe.num_shared_experts)
    cut = kind.ffn == "dense" or (kind.ffn == "experts" and (shared | (work.etp > 1)))
    one = either(
        work.sequence_parallel,
        lambda: collectives.all_gather(device, size, ranks) + collectives.reduce_scatter(device, size, ranks),
        lambda: collectives.all_reduce(device, size, ranks),
    )
    return ((kind.mixer != "none") + where(cut, 1, 0)) * one


def _expert_parallel(device: Device, model: ModelSpec, work: Work, by: Dispatcher | None = None) -> Size:
    """Dispatch and combine of one direction (T7), by the dispatcher of the work or another one."""
    if model.moe is None:
        return 0.0
    ranks = group(work.ep, work.etp, device.domain)
    token, routing = BF16 * model.expert_width, routing_of(model.moe)

    def once(name: Dispatcher | None) -> Size:
        return collectives.dispatch(device, work.held, token, routing, ranks, skew=work.skew, by=name)

    return 2 * by_word(by or work.dispatcher, once)


def ep_spread(device: Device, model: ModelSpec, work: Work) -> tuple[Size, Size]:
    """P10 and P90 of the exposed expert-parallel time over its price.

    Half and one and a half of a price that is known, further where the rate of the network is less sure;
    where dispatcher or overlap are not said, the interval reaches the cheapest choice, overlapped, and the
    dearest one.
    """
    low, high = EP_SPREAD
    if not some(work.ep * work.etp > 1):
        return low, high
    far = collectives.crosses(device, work.ep, work.etp)
    rates = (device.inverse_spread(collectives.exchange_share(device, once=once)) for once in (False, True))
    fast, slow = map(partial(where, work.dispatcher == "alltoall"), *rates)
    low, high = where(far, least(low, fast), low), where(far, most(high, slow), high)
    if (shown := 1 - device["overlap_ep"]) > 0:
        scheduled = (1 - device["overlap_ep_scheduled"]) / shown
        low = where(unsaid(work.ep_overlap), least(low, scheduled), low)
    free = unsaid(work.dispatcher)
    if some(free) and some((one := _expert_parallel(device, model, work)) > 0):
        free &= one > 0
        choices = [_expert_parallel(device, model, work, by) / where(free, one, 1.0) for by in TRAINS_WITH]
        low = where(free, low * least(1.0, *choices), low)
        high = where(free, most(high, *choices), high)
    return low, high


def _context_parallel(device: Device, model: ModelSpec, work: Work, kind: LayerKind) -> Size:
    """Ring of keys and values, forward: g/t (d_k + d_v) s (c-1)/c elements per sequence (T8).

    A recurrent layer changes tokens for heads and back (all-to-all, as Megatron's Mamba context parallelism).
    """
    if kind.mixer == "none" or not some(work.cp > 1):
        return 0.0
    far = collectives.crosses(device, work.cp, work.tp)
    if kind.mixer == "recurrent" and model.recurrent:
        width = (model.recurrent.in_width + model.recurrent.inner) / work.tp
        moved = BF16 * width * work.tokens * (work.cp - 1) / work.cp
        return collectives.p2p(device, moved, far)
    local = layers.heads(model.attention, work.tp)
    width = local.kv * (local.qk_dim + local.v_dim)
    size = BF16 * width * work.tokens * (work.cp - 1)
    each, first = (collectives.p2p(device, sent, far) for sent in (size, 1.0))
    return where(work.cp > 1, each + (work.cp - 2) * first, 0.0)
