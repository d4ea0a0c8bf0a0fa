"""Time of one transformer layer, of the embedding and of the LM head, for one micro-batch on one GPU.

Every kernel is priced by its own roof or measured curve and the times are added: kernels of one
stream do not overlap. Legend as in `layers`; T tokens on the GPU after context parallelism, T' = T/t
with sequence parallelism. Times are raw: how much of a collective hides behind compute is decided
in `rlhfsim.phases`.

Not known here: clocks under a power cap, dropout, biases that are not fused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import add
from typing import Literal, NamedTuple

from rlhfsim.kernels import collectives, layers
from rlhfsim.kernels.device import Device, group
from rlhfsim.kernels.flop import FLASH_BACKWARD, attended_pairs
from rlhfsim.kernels.layers import Heads, Matrix
from rlhfsim.specs.hashing import Hashed, hashed_once
from rlhfsim.specs.model.mixers import LayerKind
from rlhfsim.specs.model.model import ModelSpec

BF16 = 2.0
MAX_M, MAX_N, MAX_K = 32768.0, 65536.0, 65536.0
"""Largest GEMM in the tables; beyond it time grows in proportion."""
LONGEST = 16384.0
"""Longest prefill that is asked of the attention curve; beyond it time grows with the pairs."""
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
WIDE = 128
"""Head width from which the attention kernels run at their full rate."""
TILE = 128.0
"""Rows that a grouped GEMM pads each expert to (tile height of the CUTLASS and cuBLAS kernels)."""


@hashed_once
@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Hashed):
    """One micro-batch on one GPU, and how the layer is cut."""

    tokens: float
    """T, after context parallelism."""
    length: float
    """Length that attention sees, before context parallelism."""
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = True
    precision: str = "bf16"
    """Of the linear layers; attention cores, router and head stay in BF16."""
    low_precision_gain: float = 1.0
    """Speed of its FP8 and FP4 products over the timed serving kernels."""
    fused: bool = True
    """Element-wise chains run as one kernel (Megatron with Transformer Engine, torch.compile)."""
    attention_slowdown: float = 1.0
    """Time of the attention kernel over that of the measured one (an older FlashAttention)."""
    flash: bool = True
    """False: scores are written to memory (kernels before FlashAttention)."""
    fp8_attention: bool = False
    """The attention core runs in FP8."""
    fused_experts: bool = False
    """Activation and quantisation of the experts happen inside their grouped GEMMs."""
    token_once: bool = True
    """Dispatch sends a token once to each GPU, not once per chosen expert."""
    skew: float = 1.0
    """Busiest over mean expert-parallel rank."""

    @property
    def held(self) -> float:
        """T': tokens outside the tensor-parallel regions."""
        return self.tokens / self.tp if self.sequence_parallel else self.tokens


class Pass(NamedTuple):
    """Raw seconds of one direction through one layer."""

    gemm: float
    attention: float
    memory: float
    tp: float
    ep: float
    cp: float
    scan: float = 0.0
    """Scan of a recurrent layer."""
    indexer: float = 0.0
    """Indexer of sparse attention."""

    def plus(self, other: Pass) -> Pass:
        """Sum by part."""
        return Pass(*map(add, self, other))

    def times(self, factor: float) -> Pass:
        """Every part scaled."""
        return Pass(*[a * factor for a in self])


NOTHING = Pass(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Layer(NamedTuple):
    """Forward and backward of one layer, and what variants of training leave out or repeat."""

    forward: Pass
    backward: Pass
    weight_gradient: float
    """Part of `backward.gemm` that frozen weights save."""
    core: float
    """Forward of the attention core: what selective recomputation repeats."""
    modules: Mapping[str, float]
    """Forward GEMM seconds by module of `MODULES`: what recomputing it repeats."""


@lru_cache(maxsize=65536)
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
    memory = passes * _traffic(model, matrices, work, kind) / _hbm(device)
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


@lru_cache(maxsize=65536)
def head(device: Device, model: ModelSpec, work: Work, *, logprob: bool = True) -> Layer:
    """LM head with cross-entropy (or value head), split over tp in the vocabulary.

    The loss passes over the logits: FP32 copy, maximum, exponential and sum, gather forward (12 B
    each); softmax minus one-hot backward (8 B). Fused kernels need about half. Source: counting.
    """
    matrix = layers.head_matrix(model, work.tp)
    forward, data, weight, _ = _gemms(device, (matrix,), work)
    logits = work.tokens * matrix.n / _hbm(device) if logprob and not model.value_head else 0.0
    scale = 0.5 if work.fused else 1.0
    norm = 2 * BF16 * work.held * model.hidden / _hbm(device)
    return Layer(
        Pass(forward, 0.0, 12 * scale * logits + norm, 0.0, 0.0, 0.0),
        Pass(data + weight, 0.0, 8 * scale * logits + 2 * norm, 0.0, 0.0, 0.0),
        weight,
        0.0,
        {},
    )


@lru_cache(maxsize=65536)
def embedding(device: Device, model: ModelSpec, work: Work) -> Layer:
    """Embedding look-up: read and write h per token; the gradient is scattered in FP32."""
    row = work.tokens * model.hidden / _hbm(device)
    forward = Pass(0.0, 0.0, 2 * BF16 * row, 0.0, 0.0, 0.0)
    return Layer(forward, Pass(0.0, 0.0, 10 * row, 0.0, 0.0, 0.0), 0.0, 0.0, {})


@lru_cache(maxsize=65536)
def attention(device: Device, model: ModelSpec, work: Work) -> float:
    """Forward seconds of the attention core of one layer, averaged over windowed and full layers.

        t = curve(batch = T c / s, s) / c x (1 + s0 c / s) / (1 + s0 / s) x pairs(window)/pairs

    Context parallelism splits the pairs evenly (zigzag order, Ring Attention, arXiv 2310.01889), in c kernels
    that see s/c keys each and have the rate of so short a sequence (s0 = `attention_half_length`).
    """
    at = model.attention
    local = layers.heads(at, work.tp)
    length = max(1.0, work.length)
    sequences = work.tokens * work.cp / length
    kernel = _flash if work.flash else _unfused
    seconds = kernel(device, local, sequences, length) / work.cp * work.attention_slowdown
    half = device["attention_half_length"]
    seconds *= (length + half * work.cp) / (length + half)
    seconds *= (local.qk_dim + local.v_dim) / (2 * local.qk_dim)
    seconds *= device["fp8_attention_time"] if work.fp8_attention else 1.0
    if at.index_topk is not None and at.index_topk < length:
        seconds *= attended_pairs(length, at.index_topk) / attended_pairs(length)
    share = at.num_windowed_layers / model.num_attention_layers
    if not share:
        return seconds
    seen = attended_pairs(length, at.sliding_window) / attended_pairs(length)
    io = BF16 * work.tokens * 2 * (local.query + local.kv) * local.qk_dim / _hbm(device)
    return (1 - share) * seconds + share * max(seconds * seen, io)


@lru_cache(maxsize=65536)
def scan(device: Device, model: ModelSpec, work: Work) -> float:
    """Forward seconds of the scan of one recurrent layer: its model FLOP at `scan_efficiency` of the peak.

    Chunked kernels compute in BF16 whatever the precision of the products; heads are split over tp, and with
    context parallelism over cp (an all-to-all, see `_context_parallel`).
    """
    if model.recurrent is None:
        return 0.0
    rate = _peak(device, "bf16") * device["scan_efficiency"]
    return model.recurrent.scan_flop * work.tokens / work.tp / rate


def index(device: Device, model: ModelSpec, work: Work) -> float:
    """Seconds in which the indexer of sparse attention scores all pairs of one layer, on every GPU of tp.

    In FP8 where the GPU has it, at `indexer_efficiency` of its peak. The backward pass trains the indexer by
    a loss of its own over the same scores.
    """
    at = model.attention
    if not at.index_num_heads:
        return 0.0
    pairs = work.tokens * work.cp / max(1.0, work.length) * attended_pairs(work.length) / work.cp
    return at.index_flop(pairs) / (_peak(device, "fp8") * device["indexer_efficiency"])


def _peak(device: Device, precision: Literal["bf16", "fp8"]) -> float:
    peak = device.profile.peak
    return next(peak[p] for p in (precision, "bf16", "fp16", "fp32") if p in peak).value


@lru_cache(maxsize=65536)
def _flash(device: Device, local: Heads, sequences: float, length: float) -> float:
    """The measured causal kernel, or a contiguous one where that is faster.

        t = min(curve(s), curve(s_long) (s / s_long)^2 (1 + s0/s) / (1 + s0/s_long))

    The timed serving kernels gather paged keys and lose more on short sequences than training
    kernels, whose rate follows s/(s + s0) (`attention_half_length`). Narrow heads keep
    (d/128)^-0.2 of the rate of wide ones: FlashAttention-2 on A100 reaches 0.85 to 0.9 of its rate
    at 128 with 64 (arXiv 2307.08691, figure 5).
    """
    asked, whole = min(length, LONGEST), max(1.0, sequences)
    half = device["attention_half_length"]

    def curve(batch: float, seq: float, width: float) -> float:
        prefill = device.curves.prefill_attention
        return float(prefill(batch, seq, local.query, local.kv, width, 0))

    def seconds(width: float) -> float:
        timed = curve(whole, asked, width) / whole
        long = curve(1.0, LONGEST, width) * (asked / LONGEST) ** 2
        return min(timed, long * (1 + half / asked) / (1 + half / LONGEST))

    one = seconds(local.qk_dim)
    if local.qk_dim < WIDE:
        one = min(one, seconds(WIDE) * (local.qk_dim / WIDE) ** 0.8)
    return one * sequences * (length / asked) ** 2


def _unfused(device: Device, local: Heads, sequences: float, length: float) -> float:
    """Two batched products over the full square, and softmax and dropout through memory.

        4 d e / (F eta) + 12 e / (B_m eta),  e = a s^2 scores

    12 B: scores written and read, softmax written and read, mask, dropout written and read, in 16
    bits. Source: the tensors of Korthikanti et al., arXiv 2205.05198, section 4.1 (5 a s / h).
    """
    scores = sequences * local.query * length * length
    peak = device.profile.peak
    rate = max(p.value for name, p in peak.items() if name in ("bf16", "fp16", "fp32"))
    products = 4 * local.qk_dim * scores / (rate * device["gemm_efficiency"])
    return products + 12 * scores / _hbm(device)


@lru_cache(maxsize=65536)
def adapter_time(device: Device, model: ModelSpec, work: Work, *, kind: LayerKind) -> float:
    """Forward seconds that adapters (LoRA) beside every matrix of a layer take: memory passes, not FLOP.

        rows (k + 3 n) x 2 B: the input read again, the output of the adapter written, read and added

    Eager modules (dropout, casts, scaling) pass more often. Source: counting.
    """
    passes = 1.0 if work.fused else device["eager_traffic"]
    matrices = layers.layer_matrices(model, work.tp, work.ep, work.etp, kind=kind)
    elements = sum(_rows(x, work) * (x.k + 3.0 * x.n) for x in matrices if x.linear)
    return passes * BF16 * elements / _hbm(device)


def repeated_traffic(modules: tuple[str, ...]) -> float:
    """Share of a layer's forward HBM traffic that recomputed modules repeat: norms, activation."""
    if OPERATORS in modules:
        return 1.0
    return 0.3 * ("layernorm" in modules) + 0.3 * bool({"moe_act", "moe", "mlp"} & set(modules))


def _hbm(device: Device) -> float:
    return device.profile.hbm.value * device["hbm_efficiency"]


def _gemms(
    device: Device, matrices: tuple[Matrix, ...], work: Work
) -> tuple[float, float, float, dict[str, float]]:
    """Seconds of all forward, data-gradient and weight-gradient GEMMs; forward ones by name too."""
    forward, data, weight, by_name = 0.0, 0.0, 0.0, dict[str, float]()
    for x in matrices:
        m, n, k = _rows(x, work), float(x.n), float(x.k)
        precision = work.precision if x.linear else "bf16"
        grouped = x.experts > 1
        least = BF16 * x.params / _hbm(device) if grouped else 0.0
        gain = work.low_precision_gain if precision in ("fp8", "fp4") else 1.0
        by_name[x.name] = one = _gemm(device, m, n, k, precision, grouped, least, gain)
        forward += one
        data += _gemm(device, m, k, n, precision, grouped, least, gain)
        weight += _gemm(device, k, n, m, precision, grouped, least, gain)
    return forward, data, weight, by_name


@lru_cache(maxsize=65536)
def _gemm(
    device: Device, m: float, n: float, k: float, precision: str, grouped: bool, least: float, gain: float
) -> float:
    """Seconds of one GEMM of a training step; a grouped one reads its weights, `least` seconds."""
    a, b, c = min(m, MAX_M), min(n, MAX_N), min(k, MAX_K)
    seconds = float(device.curves.gemm(a, b, c, precision)) * (m / a) * (n / b) * (k / c)
    if grouped:
        seconds = max(seconds / device["grouped_gemm_efficiency"], least)
    return seconds / gain


def _rows(matrix: Matrix, work: Work) -> float:
    """Rows of a GEMM; routed experts take those of the busiest rank, each padded to whole tiles."""
    if matrix.experts == 1 and matrix.rows == 1:
        return work.held if matrix.name == "router" else work.tokens
    rows = work.held * matrix.rows * work.skew
    each = max(rows / matrix.experts, 1.0)
    return matrix.experts * (each + min(TILE / 2, each / 2))


def _traffic(model: ModelSpec, matrices: tuple[Matrix, ...], work: Work, kind: LayerKind) -> float:
    """Bytes through HBM of everything that is not a GEMM or the attention core, forward.

        norms and residuals 5 h T' a block, rotary 4 (a + g) d_k T, gated activation 3 f T (2 f if not)
        MoE: permute and unpermute 4 k h T' and the activation on k rows
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
        inside = work.fused_experts and matrix.experts > 1
        if matrix.name in ("mlp_up", "expert_up") and not inside:
            elements += (1.5 if model.gated else 2.0) * matrix.n * rows
    if kind.ffn == "experts" and model.moe:
        elements += 4 * model.moe.top_k * work.etp * model.expert_width * work.held
    return BF16 * elements


def _tensor_parallel(device: Device, model: ModelSpec, work: Work, kind: LayerKind) -> float:
    """Collectives of one direction: 2 x (AG + RS) of T h with sequence parallelism, else 2 x AR.

    A MoE layer whose experts are not cut over tp (etp 1) has them only around the attention and
    the shared expert (T4; Korthikanti et al., arXiv 2205.05198, section 4.2).
    """
    if work.tp == 1:
        return 0.0
    ranks = group(work.tp, 1, device.domain)
    size = BF16 * work.tokens * model.hidden
    shared = bool(model.moe and model.moe.num_shared_experts)
    cut = kind.ffn == "dense" or (kind.ffn == "experts" and (shared or work.etp > 1))
    blocks = (kind.mixer != "none") + cut
    if not work.sequence_parallel:
        return blocks * collectives.all_reduce(device, size, ranks)
    gather = collectives.all_gather(device, size, ranks)
    return blocks * (gather + collectives.reduce_scatter(device, size, ranks))


def _expert_parallel(device: Device, model: ModelSpec, work: Work) -> float:
    """Dispatch and combine of one direction (T7)."""
    if work.ep * work.etp == 1 or model.moe is None:
        return 0.0
    ranks = group(work.ep, work.etp, device.domain)
    token = BF16 * model.expert_width
    once = collectives.dispatch(
        device, work.held, token, model.moe.top_k, ranks, skew=work.skew, once=work.token_once
    )
    return 2 * once


def _context_parallel(device: Device, model: ModelSpec, work: Work, kind: LayerKind) -> float:
    """Ring of keys and values, forward: g/t (d_k + d_v) s (c-1)/c elements per sequence (T8).

    A recurrent layer changes tokens for heads and back (all-to-all, as Megatron's Mamba context parallelism).
    """
    if work.cp == 1 or kind.mixer == "none":
        return 0.0
    if kind.mixer == "recurrent" and model.recurrent:
        width = (model.recurrent.in_width + model.recurrent.inner) / work.tp
        moved = BF16 * width * work.tokens * (work.cp - 1) / work.cp
        return collectives.p2p(device, moved, collectives.crosses(device, work.cp, work.tp))
    local = layers.heads(model.attention, work.tp)
    width = local.kv * (local.qk_dim + local.v_dim)
    size = BF16 * width * work.tokens * (work.cp - 1)
    far = collectives.crosses(device, work.cp, work.tp)
    return collectives.p2p(device, size, far) + (work.cp - 2) * collectives.p2p(device, 1.0, far)
