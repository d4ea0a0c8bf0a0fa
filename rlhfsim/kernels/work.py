"""What each kind of kernel must do: the coordinates of its measured grid, FLOP and bytes.

Symbols: m, n, k of a matrix product; b sequences, c context, s new tokens, a query heads, g KV heads,
d head dim; T tokens, E experts, h hidden, f expert FFN width; S bytes, r ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhfsim.elementwise import most
from rlhfsim.specs.hardware.kernel_tables import AXES

Floats = NDArray[np.float64]
Amount = Floats | float
"""An array, or a plain number: the formulas below hold for both."""

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

    flop: Amount
    hbm: Amount
    """Bytes through device memory."""
    link: Amount
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


def _gemm(size: float, m: Amount, n: Amount, k: Amount) -> Demand:
    """2 m n k FLOP; operands of `size` bytes an element in, BF16 out."""
    return Demand(2 * m * n * k, size * k * (m + n) + ACTIVATION * m * n, 0.0)


def _decode(size: float, w: Amount, c: Amount, q: Amount, d: Amount) -> Demand:
    """4 w q d c FLOP and 2 w c d KV elements; w = b g KV streams, q = a/g queries on each."""
    return Demand(4 * w * q * d * c, 2 * w * c * d * size + 2 * ACTIVATION * w * q * d, 0.0)


def _prefill(size: float, w: Amount, s: Amount, q: Amount, d: Amount) -> Demand:
    """2 w q d s^2 FLOP (causal half), queries, outputs, keys and values once through memory."""
    return Demand(2 * w * q * d * s * s, ACTIVATION * w * s * d * (2 * q + 2), 0.0)


def _mla_decode(size: float, b: Amount, c: Amount, a: Amount) -> Demand:
    """2 a (2 d_c + d_rope) b c FLOP (absorbed), b c (d_c + d_rope) KV elements shared by all heads."""
    width = 2 * LATENT + ROPE
    return Demand(2 * a * width * b * c, size * b * c * (LATENT + ROPE) + ACTIVATION * b * a * width, 0.0)


def _mla_prefill(size: float, b: Amount, s: Amount, a: Amount) -> Demand:
    """a (d_qk + d_v) b s^2 FLOP (causal half), expanded heads once through memory."""
    width = MLA_QK + MLA_V
    return Demand(a * width * b * s * s, 2 * ACTIVATION * b * s * a * width, 0.0)


def _moe(size: float, rows: Amount, e: Amount, f: Amount, h: Amount, spread: Amount) -> Demand:
    """6 rows e f h FLOP; weights of touched experts, T = rows e spread tokens in and out.

    e experts held, `rows` the mean rows of one, spread = ep / top_k. Touched: e (1 - exp(-rows/2)).
    """
    touched = e * -np.expm1(-rows / SKEW)
    tokens = ACTIVATION * 2 * h * rows * e * np.minimum(spread, 1.0)
    return Demand(6 * rows * e * f * h, size * 3 * f * h * touched + tokens, 0.0)


def _ring(size: float, ranks: Amount, nbytes: Amount) -> Demand:
    """(r-1)/r S bytes leave one GPU; an in-switch all-reduce needs no more."""
    return Demand(0.0, 0.0, (ranks - 1) / ranks * nbytes)


KINDS: Mapping[str, Kind] = {
    "gemm": Kind(AXES["gemm"], (1, 1, 1), _gemm),
    "decode": Kind(AXES["decode"], (1, 1, 1, 1), _decode),
    "prefill": Kind(AXES["prefill"], (1, 2, 1, 1), _prefill),
    "mla_decode": Kind(AXES["mla_decode"], (1, 1, 1), _mla_decode),
    "mla_prefill": Kind(AXES["mla_prefill"], (1, 2, 1), _mla_prefill),
    "moe": Kind(AXES["moe"], (1, 1, 1, 1, 0), _moe),
    "collective": Kind(AXES["collective"], (0, 1), _ring),
}
"""Kinds by the first part of a table's name (`gemm/fp8`)."""


def roof(demand: Demand, compute: float, hbm: float, link: float) -> Amount:
    """Datasheet roofline, seconds: max(flop/F, bytes/B_m, bytes/B_link).

    Source: Williams et al. 2009, CACM 52(4).
    """
    seconds: Amount = most(demand.flop / compute, demand.hbm / hbm, demand.link / link)
    return seconds
