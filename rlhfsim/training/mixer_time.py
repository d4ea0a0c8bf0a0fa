"""Forward time of what mixes tokens in one layer: the attention core, the scan, the indexer.

Legend as in `layer_time`.
"""

from __future__ import annotations

from rlhfsim.elementwise import Size, kept, least, most, number
from rlhfsim.kernels import layers
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.flop import attended_pairs
from rlhfsim.kernels.layers import Heads
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.training.work import Work

BF16 = 2.0
LONGEST = 16384.0
"""Longest prefill that is asked of the attention curve; beyond it time grows with the pairs."""
WIDE = 128
"""Head width from which the attention kernels run at their full rate."""


def attention(device: Device, model: ModelSpec, work: Work) -> Size:
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
    io = BF16 * work.tokens * 2 * (local.query + local.kv) * local.qk_dim / device.hbm
    return (1 - share) * seconds + share * most(seconds * seen, io)


def scan(device: Device, model: ModelSpec, work: Work) -> Size:
    """Forward seconds of the scan of one recurrent layer: its model FLOP at `scan_efficiency` of the peak.

    Chunked kernels compute in BF16 whatever the precision of the products; heads are split over tp, and with
    context parallelism over cp (an all-to-all, see `_context_parallel`).
    """
    if model.recurrent is None:
        return 0.0
    rate = device.peak("bf16") * device["scan_efficiency"]
    return model.recurrent.scan_flop * work.tokens / work.tp / rate


def index(device: Device, model: ModelSpec, work: Work) -> Size:
    """Seconds in which the indexer of sparse attention scores all pairs of one layer, on every GPU of tp.

    In FP8 where the GPU has it, at `indexer_efficiency` of its peak. The backward pass trains the indexer by
    a loss of its own over the same scores.
    """
    at = model.attention
    if not at.index_num_heads:
        return 0.0
    pairs = work.tokens * work.cp / max(1.0, work.length) * attended_pairs(work.length) / work.cp
    return at.index_flop(pairs) / (device.peak("fp8") * device["indexer_efficiency"])


@kept(65536)
def _flash(device: Device, local: Heads, sequences: Size, length: float) -> Size:
    """The measured causal kernel, or a contiguous one where that is faster.

        t = min(curve(s), curve(s_long) (s / s_long)^2 (1 + s0/s) / (1 + s0/s_long))

    The timed serving kernels gather paged keys and lose more on short sequences than training
    kernels, whose rate follows s/(s + s0) (`attention_half_length`). Narrow heads keep
    (d/128)^-0.2 of the rate of wide ones: FlashAttention-2 on A100 reaches 0.85 to 0.9 of its rate
    at 128 with 64 (arXiv 2307.08691, figure 5).
    """
    asked, whole = min(length, LONGEST), most(1.0, sequences)
    half = device["attention_half_length"]

    def curve(batch: Size, seq: float, width: float) -> Size:
        prefill = device.curves.prefill_attention
        return number(prefill(batch, seq, local.query, local.kv, width, 0))

    def seconds(width: float) -> Size:
        timed = curve(whole, asked, width) / whole
        long = curve(1.0, LONGEST, width) * (asked / LONGEST) ** 2
        return least(timed, long * (1 + half / asked) / (1 + half / LONGEST))

    one = seconds(local.qk_dim)
    if local.qk_dim < WIDE:
        one = least(one, seconds(WIDE) * (local.qk_dim / WIDE) ** 0.8)
    return one * sequences * (length / asked) ** 2


def _unfused(device: Device, local: Heads, sequences: Size, length: float) -> Size:
    """Two batched products over the full square, and softmax and dropout through memory.

        4 d e / (F eta) + 12 e / (B_m eta),  e = a s^2 scores

    12 B: scores written and read, softmax written and read, mask, dropout written and read, in 16
    bits. Source: the tensors of Korthikanti et al., arXiv 2205.05198, section 4.1 (5 a s / h).
    """
    scores = sequences * local.query * length * length
    peak = device.profile.peak
    rate = max(p.value for name, p in peak.items() if name in ("bf16", "fp16", "fp32"))
    products = 4 * local.qk_dim * scores / (rate * device["gemm_efficiency"])
    return products + 12 * scores / device.hbm
