"""What each kind of kernel must do: the coordinates of its measured grid, FLOP and bytes.

Symbols: m, n, k of a matrix product; b sequences, c context, s new tokens, a query heads, g KV heads,
d head dim; T tokens, E experts, h hidden, f expert FFN width; S bytes, r ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LATENT, ROPE = 512, 64
"""Compressed KV of DeepSeek-V2 and V3 per token: latent and rotary part (elements)."""
MLA_QK, MLA_V = 192, 128
"""Head dims of expanded MLA in prefill: query-key and value."""
ACTIVATION = 2.0
"""Bytes of an activation: BF16 in and out of every kernel."""
SKEW = 2.0
"""Skewed routing touches at least the experts that this factor fewer uniform rows would touch."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Lower bounds on the work of a kernel; arrays broadcast with the coordinates."""

    flop: Floats
    hbm: Floats
    """Bytes through device memory."""
    link: Floats
    """Bytes that one GPU must send over the scale-up fabric."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of kernels measured on one grid."""

    axes: tuple[str, ...]
    """Coordinates, in order; time never falls along any of them."""
    growth: tuple[float, ...]
    """Power of time in each coordinate beyond the last knot: constant efficiency."""
    demand: Callable[..., Demand]
    """(element_bytes, *coordinates) -> Demand."""


def _gemm(size: float, m: Floats, n: Floats, k: Floats) -> Demand:
    """2 m n k FLOP; operands of `size` bytes an element in, BF16 out."""
    return Demand(2 * m * n * k, size * k * (m + n) + ACTIVATION * m * n, np.zeros(()))


def _decode(size: float, w: Floats, c: Floats, q: Floats, d: Floats) -> Demand:
    """4 w q d c FLOP and 2 w c d KV elements; w = b g KV streams, q = a/g queries on each."""
    return Demand(
        4 * w * q * d * c, 2 * w * c * d * size + 2 * ACTIVATION * w * q * d, np.zeros(())
    )


def _prefill(size: float, w: Floats, s: Floats, q: Floats, d: Floats) -> Demand:
    """2 w q d s^2 FLOP (causal half), queries, outputs, keys and values once through memory."""
    return Demand(2 * w * q * d * s * s, ACTIVATION * w * s * d * (2 * q + 2), np.zeros(()))


def _mla_decode(size: float, b: Floats, c: Floats, a: Floats) -> Demand:
    """2 a (2 d_c + d_rope) b c FLOP (absorbed), b c (d_c + d_rope) KV elements shared by all heads."""
    width = 2 * LATENT + ROPE
    return Demand(
        2 * a * width * b * c,
        size * b * c * (LATENT + ROPE) + ACTIVATION * b * a * width,
        np.zeros(()),
    )


def _mla_prefill(size: float, b: Floats, s: Floats, a: Floats) -> Demand:
    """a (d_qk + d_v) b s^2 FLOP (causal half), expanded heads once through memory."""
    width = MLA_QK + MLA_V
    return Demand(a * width * b * s * s, 2 * ACTIVATION * b * s * a * width, np.zeros(()))


def _moe(size: float, rows: Floats, e: Floats, f: Floats, h: Floats, spread: Floats) -> Demand:
    """6 rows e f h FLOP; weights of touched experts, T = rows e spread tokens in and out.

    e experts held, `rows` the mean rows of one, spread = ep / top_k. Touched: e (1 - exp(-rows/2)).
    """
    touched = e * -np.expm1(-rows / SKEW)
    tokens = ACTIVATION * 2 * h * rows * e * np.minimum(spread, 1.0)
    return Demand(6 * rows * e * f * h, size * 3 * f * h * touched + tokens, np.zeros(()))


def _ring(size: float, ranks: Floats, nbytes: Floats) -> Demand:
    """(r-1)/r S bytes leave one GPU; an in-switch all-reduce needs no more."""
    return Demand(np.zeros(()), np.zeros(()), (ranks - 1) / ranks * nbytes)


KINDS: Mapping[str, Kind] = {
    "gemm": Kind(("m", "n", "k"), (1, 1, 1), _gemm),
    "decode": Kind(("kv_streams", "context", "queries_per_kv", "head_dim"), (1, 1, 1, 1), _decode),
    "prefill": Kind(("kv_streams", "length", "queries_per_kv", "head_dim"), (1, 2, 1, 1), _prefill),
    "mla_decode": Kind(("batch", "context", "heads"), (1, 1, 1), _mla_decode),
    "mla_prefill": Kind(("batch", "length", "heads"), (1, 2, 1), _mla_prefill),
    "moe": Kind(("rows", "experts", "ffn", "hidden", "spread"), (1, 1, 1, 1, 0), _moe),
    "collective": Kind(("ranks", "bytes"), (0, 1), _ring),
}
"""Kinds by the first part of a table's name (`gemm/fp8`)."""


def roof(demand: Demand, compute: float, hbm: float, link: float) -> Floats:
    """Datasheet roofline, seconds: max(flop/F, bytes/B_m, bytes/B_link).

    Source: Williams et al. 2009, CACM 52(4).
    """
    return np.maximum(np.maximum(demand.flop / compute, demand.hbm / hbm), demand.link / link)
