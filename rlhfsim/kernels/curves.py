"""Kernel times of a GPU from measured curves, borrowed where it was never measured.

A table holds the loss 100 ln(t / roofline) of a kernel kind at the knots of a grid, against the
peaks of the GPU that it was measured on. `KernelCurves` turns it into times of this GPU:

    t = floor + (t_source - floor) x roof / roof_source        floor = smallest time of the table

so a GPU's own table returns its times, and a borrowed one keeps launch overheads and efficiencies.
Between knots log t is multilinear in log coordinates; no time is below the datasheet roofline, and
none falls when a coordinate grows. Tables are fitted by `lab.fits.kernels`.

Not known here: kernels that share the GPU, power capping by neighbours, cold caches beyond what
the benchmarks had, collectives across domains (`kernels.collectives`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlhfsim.elementwise import most
from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.grid import Grid, decode, monotone
from rlhfsim.kernels.work import KINDS, Amount, Kind, roof
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.quantities import BYTES_PER_ELEMENT
from rlhfsim.units import MICROSECOND

Floats = NDArray[np.float64]
Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

PERCENT = 100.0
"""Losses are stored in hundredths of a natural logarithm."""
CLOSED_FLOOR, CLOSED_EFFICIENCY = 5 * MICROSECOND, 0.6
"""A GPU without tables: t = floor + roof / efficiency."""
WIDE_EFFICIENCY = 0.75
"""Share of the FP32 and TF32 roofline that is reached, prior."""
FALLBACKS: Mapping[str, tuple[str, ...]] = {
    "bf16": ("bf16",),
    "fp16": ("bf16",),
    "tf32": ("bf16",),
    "fp32": ("bf16",),
    "fp8": ("fp8", "fp8_block", "bf16"),
    "fp8_block": ("fp8_block", "fp8", "bf16"),
    "fp8_static": ("fp8_static", "fp8", "fp8_block", "bf16"),
    "fp4": ("fp4", "fp8", "fp8_block", "bf16"),
}
"""Tables tried in order for a precision."""
SCALED = ("fp8_block", "fp8_static")
"""FP8 with scales of 128 x 128 blocks, and with those of a calibrated checkpoint."""

MOST_POINTS = 256
"""Coordinates of a call, together, up to which its times are kept."""
MOST_KNOWN = 16384
"""Calls that are kept, on one kind of GPU."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """Datasheet rates that rooflines use."""

    compute: Mapping[str, float]
    """FLOP/s by precision."""
    hbm: float
    """byte/s."""
    link: float
    """Scale-up, per GPU, one direction, byte/s."""

    def rate(self, precision: str) -> float:
        """FLOP/s of a precision; one the GPU lacks runs at its 16-bit rate (weight-only kernels)."""
        name = "fp8" if precision in SCALED else precision
        for known in (name, "bf16", "fp16", "fp32"):
            if known in self.compute:
                return self.compute[known]
        raise AssertionError("a profile has at least one of bf16, fp16, fp32")


def peaks_of(profile: Profile) -> Peaks:
    """The datasheet rates of a profile."""
    compute = {str(name): peak.value for name, peak in profile.peak.items()}
    return Peaks(compute, profile.hbm.value, profile.scale_up.bandwidth.value)


class KernelCurves:
    """Seconds of kernels on one GPU; every method broadcasts its arguments as numpy does."""

    __slots__ = ("_engines", "_grids", "_known", "_section", "_tables", "borrowed", "peaks")

    def __init__(self, profile: Profile, lookup: Callable[[str], Profile]) -> None:
        """Curves of a profile; `lookup` finds the profile that it borrows from."""
        self.peaks = peaks_of(profile)
        self._engines: dict[str, KernelCurves] = {}
        self._forget()
        own = dict(profile.curves or {})
        self.borrowed: Mapping[str, Any] = own.get("borrow") or {}
        self._section = _lender(self.borrowed, lookup) if self.borrowed else own
        gains = {key: float(self.borrowed.get(key, 1.0)) for key in ("compute", "hbm", "link")}
        source = _section_peaks(self._section)
        self._grids = {
            name: _grid(name, table, source, self.peaks, gains)
            for name, table in self._section.get("tables", {}).items()
        }

    def _forget(self) -> None:
        self._known: dict[tuple[object, ...], Floats] = {}
        self._tables: dict[tuple[str, str], str] = {}

    def of_engine(self, engine: str) -> KernelCurves:
        """The curves with an engine's own tables in the places of the common ones; itself without any."""
        if engine not in self._engines:
            grids = self._grids.items()
            own = {place: grid for name, grid in grids if (place := common_name(name, engine))}
            found = copy(self) if own else self
            if own:
                found._forget()
                found._grids = {**self._grids, **own}
            self._engines[engine] = found
        return self._engines[engine]

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables behind the methods; empty for a GPU with closed forms only."""
        return tuple(self._grids)

    def spread(self, table: str) -> tuple[float, float]:
        """P10 and P90 of predicted / measured on held-out shapes; wider where borrowed or absent."""
        if table not in self._grids:
            return 0.5, 2.0
        low, high = self._section["tables"][table]["interval"]
        widen = float(self.borrowed.get("widen", 1.0))
        return float(low) / widen, float(high) * widen

    def source(self, table: str) -> str:
        """Where a table comes from, with the lender where it is borrowed."""
        if table not in self._grids:
            return "closed form: roofline at 60 % and 5 us"
        text = str(self._section["tables"][table]["source"])
        lender = self.borrowed.get("from")
        return f"borrowed from {lender} ({self.borrowed.get('reason')}): {text}" if lender else text

    def gemm(self, m: ArrayLike, n: ArrayLike, k: ArrayLike, precision: str = "bf16") -> Floats:
        """Seconds of (m x k) times (k x n), BF16 out; m tokens.

        `fp8` is per-tensor or per-channel scaled at run time, `fp8_static` per tensor by the checkpoint's
        scales (quantisation fused into the kernels before), `fp8_block` block scaled, `fp4` NVFP4.
        Activation quantisation is inside where the framework's linear layer has it inside. FP32 and
        TF32 have no table: the BF16 time, at least their roofline at a typical efficiency.
        """
        seconds = self._time(self._table("gemm", precision), precision, m, n, k)
        if precision not in ("fp32", "tf32"):
            return seconds
        shape = tuple(np.asarray(x, dtype=np.float64) for x in (m, n, k))
        return np.maximum(seconds, self._least("gemm", precision, shape) / WIDE_EFFICIENCY)

    def decode_attention(
        self,
        batch: ArrayLike,
        context: ArrayLike,
        heads: ArrayLike,
        kv_heads: ArrayLike,
        head_dim: ArrayLike,
        kv_bytes: float = 2.0,
        engine: str = "",
    ) -> Floats:
        """Seconds of attention of one new token per sequence over `context` tokens; one layer.

        Kernels on an FP8 cache differ by engine, which has its own table where one was measured.

        Heads are those of one GPU. A window is a context clipped to it. Coordinates: KV streams
        b g, context, a / g, d.
        """
        streams, queries = np.multiply(batch, kv_heads), np.divide(heads, kv_heads)
        own = f"decode/fp8_{engine}"
        mine = _is_fp8(kv_bytes) and own in self._grids
        name = own if mine else self._by_bytes("decode", kv_bytes)
        return self._time(name, "bf16", streams, context, queries, head_dim, size=kv_bytes)

    def prefill_attention(
        self,
        batch: ArrayLike,
        seq: ArrayLike,
        heads: ArrayLike,
        kv_heads: ArrayLike,
        head_dim: ArrayLike,
        prefix: ArrayLike = 0,
    ) -> Floats:
        """Seconds of causal attention, forward, of `seq` new tokens after `prefix` cached ones.

        A prefix is priced as the prompt with the same number of query-key pairs, s' = sqrt(s^2 +
        2 s c): the tables have no prefix. At least reading the cached KV at the datasheet rate.
        """
        length, pairs = _equal_pairs(seq, prefix)
        streams, queries = np.multiply(batch, kv_heads), np.divide(heads, kv_heads)
        seconds = self._time("prefill", "bf16", streams, pairs, queries, head_dim)
        cached = 4.0 * streams * np.asarray(head_dim) * (length + np.asarray(prefix))
        read = np.where(np.asarray(prefix) > 0, cached / self.peaks.hbm, 0.0)
        slower: Floats = np.maximum(seconds, read)
        return slower

    def mla_decode(
        self, batch: ArrayLike, context: ArrayLike, heads: ArrayLike, kv_bytes: float = 2.0
    ) -> Floats:
        """Seconds of the absorbed MLA decode kernel (latent 512 + rope 64), one layer.

        The attention kernel alone: no projections and no absorption products (price them as GEMMs).
        """
        name = self._by_bytes("mla_decode", kv_bytes)
        return self._time(name, "bf16", batch, context, heads, size=kv_bytes)

    def mla_prefill(
        self, batch: ArrayLike, seq: ArrayLike, heads: ArrayLike, prefix: ArrayLike = 0
    ) -> Floats:
        """Seconds of the causal MLA prefill kernel on expanded heads (192 query-key, 128 value).

        The attention kernel alone; a prefix as in `prefill_attention`.
        """
        _, pairs = _equal_pairs(seq, prefix)
        return self._time("mla_prefill", "bf16", batch, pairs, heads)

    def moe(
        self,
        tokens: ArrayLike,
        hidden: ArrayLike,
        expert_ffn: ArrayLike,
        top_k: ArrayLike,
        num_experts: ArrayLike,
        tp: ArrayLike = 1,
        ep: ArrayLike = 1,
        precision: str = "bf16",
    ) -> Floats:
        """Seconds of the routed experts of one layer on one (the fullest) GPU.

        `tokens` are those of the whole expert-parallel group: each GPU computes tokens k / ep rows
        on average over its E / ep experts, of width expert_ffn / tp. Power-law routing (exponent
        1.01). Permutation, both products, activation and the weighted sum are inside; router and
        communication are not. Coordinates: rows T k / E, experts E / ep, f / tp, h, ep / k.
        """
        rows = np.multiply(tokens, top_k) / np.asarray(num_experts, dtype=np.float64)
        held = np.maximum(np.divide(num_experts, ep), 1.0)
        width, spread = np.divide(expert_ffn, tp), np.divide(ep, top_k)
        name = self._table("moe", precision)
        return self._time(name, precision, rows, held, width, hidden, spread)

    def collective(self, op: Op, size_bytes: ArrayLike, ranks: ArrayLike) -> Floats:
        """Seconds of an NCCL collective inside one scale-up domain.

        `size_bytes` is the whole buffer (all-reduce), the gathered buffer (all-gather,
        reduce-scatter), what one GPU sends with its own part (all-to-all). Beyond the measured
        ranks the bandwidth term grows with (r-1)/r and the latency with log2 r.
        """
        return self._ring(f"collective/{op}", size_bytes, ranks)

    def custom_all_reduce(self, size_bytes: ArrayLike, ranks: ArrayLike) -> Floats:
        """Seconds of vLLM's custom all-reduce in a CUDA graph; serving takes the faster of the two."""
        return self._ring("collective/custom_all_reduce", size_bytes, ranks)

    def at(self, table: str, *coordinates: ArrayLike) -> Floats:
        """Seconds of a table at its own coordinates (`kernels.work.KINDS`); for calibration."""
        if table.startswith("collective"):
            return self._ring(table, coordinates[1], coordinates[0])
        precision = precision_of(table)
        return self._time(table, precision, *coordinates, size=kv_size(table))

    def _ring(self, name: str, size_bytes: ArrayLike, ranks: ArrayLike) -> Floats:
        size, n = np.broadcast_arrays(
            np.asarray(size_bytes, dtype=np.float64), np.asarray(ranks, dtype=np.float64)
        )
        n_safe = np.maximum(n, 2.0)
        seconds = self._time(name, "bf16", n_safe, np.maximum(size, 1.0))
        grid = self._grids.get(name)
        if grid is not None:
            last = float(2.0 ** grid.knots[0][-1])
            over = np.maximum(n_safe / last, 1.0)
            share = (1 - 1 / np.maximum(n_safe, last)) / (1 - 1 / last)
            seconds = seconds * share + np.log2(over) * _per_doubling(grid)
        return np.where((n > 1) & (size > 0), seconds, 0.0)

    def _by_bytes(self, kind: str, kv_bytes: float) -> str:
        name = f"{kind}/{'fp8' if _is_fp8(kv_bytes) else 'bf16'}"
        return name if name in self._grids else f"{kind}/bf16"

    def _table(self, kind: str, precision: str) -> str:
        if precision not in FALLBACKS:
            raise RlhfsimError(
                "unknown-precision",
                f"no kernel curve for precision {precision!r}",
                help=f"use one of {', '.join(FALLBACKS)}",
            )
        if (kind, precision) not in self._tables:
            names = [f"{kind}/{candidate}" for candidate in FALLBACKS[precision]]
            self._tables[kind, precision] = next((name for name in names if name in self._grids), names[-1])
        return self._tables[kind, precision]

    def _time(self, name: str, precision: str, *coordinates: ArrayLike, size: float | None = None) -> Floats:
        """The measured grid, never below the roofline; a closed form where there is no table.

        Kept for few points: devices that differ in coefficients share these curves. Read-only.
        """
        point = _plain(coordinates)
        arrays = () if point else tuple(np.asarray(v, dtype=np.float64) for v in coordinates)
        if sum(x.size for x in arrays) > MOST_POINTS:
            return self._timed(name, precision, point, arrays, size)
        key = (name, precision, size, point, *(part for x in arrays for part in (x.shape, x.tobytes())))
        known = self._known.get(key)
        if known is None:
            known = self._timed(name, precision, point, arrays, size)
            known.flags.writeable = False
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = known
        return known

    def _timed(
        self,
        name: str,
        precision: str,
        point: tuple[float, ...] | None,
        arrays: tuple[Floats, ...],
        size: float | None,
    ) -> Floats:
        least = self._least(name, precision, point or arrays, size)
        grid = self._grids.get(name)
        if grid is None:
            return np.asarray(CLOSED_FLOOR + least / CLOSED_EFFICIENCY)
        return np.asarray(most(grid.at(point) if point else grid(*arrays), least))

    def _least(self, name: str, precision: str, x: Sequence[Amount], size: float | None = None) -> Amount:
        """Datasheet roofline, seconds."""
        demand = _kind(name).demand(size or element_bytes(precision), *x)
        return roof(demand, self.peaks.rate(precision), self.peaks.hbm, self.peaks.link)


def _plain(values: tuple[ArrayLike, ...]) -> tuple[float, ...] | None:
    """The values as plain numbers, much faster than arrays of one; None where any is an array."""
    numbers: list[float] = []
    for value in values:
        if not isinstance(value, int | float):
            return None
        numbers.append(float(value))
    return tuple(numbers)


def _is_fp8(kv_bytes: float) -> bool:
    return kv_bytes < BYTES_PER_ELEMENT["bf16"]


def element_bytes(precision: str) -> float:
    """Bytes of one operand element; block scales left out."""
    return BYTES_PER_ELEMENT["fp8" if precision in SCALED else precision]


def _kind(name: str) -> Kind:
    return KINDS[name.split("/")[0]]


def _equal_pairs(seq: ArrayLike, prefix: ArrayLike) -> tuple[Floats, Floats]:
    """New tokens, and the causal prompt with as many query-key pairs: sqrt(s^2 + 2 s c)."""
    s, c = np.asarray(seq, dtype=np.float64), np.asarray(prefix, dtype=np.float64)
    return s, np.sqrt(s * s + 2 * s * c)


def _per_doubling(grid: Grid) -> float:
    """Latency that one more doubling of the ranks adds at the smallest size, seconds."""
    small = np.exp(grid.log_time[:, 0])
    steps = grid.knots[0][-1] - grid.knots[0][-2]
    return float(max(small[-1] - small[-2], 0.0) / steps)


def _lender(borrow: Mapping[str, Any], lookup: Callable[[str], Profile]) -> dict[str, Any]:
    lender = lookup(str(borrow.get("from")))
    section = dict(lender.curves or {})
    if "tables" not in section:
        raise RlhfsimError(
            "borrow-without-tables",
            f"profile {lender.name!r} has no kernel curves of its own",
            help="borrow from a measured one: a100_sxm, h100_sxm, h200_sxm, b200_sxm, l40s",
        )
    return section


def _section_peaks(section: Mapping[str, Any]) -> Peaks:
    given = section.get("peaks", {})
    compute = {k: float(v) for k, v in given.items() if k not in ("hbm", "link")}
    return Peaks(compute, float(given.get("hbm", 1.0)), float(given.get("link", 1.0)))


def _grid(name: str, table: Mapping[str, Any], source: Peaks, own: Peaks, gains: Mapping[str, float]) -> Grid:
    """A table as times of this GPU, see the module's equation."""
    kind = _kind(name)
    axes = [np.array(text.split(), dtype=np.float64) for text in table["axes"].values()]
    shape = tuple(axis.size for axis in axes)
    loss = decode(table["loss"]).reshape(shape) / PERCENT
    precision = precision_of(name)
    size = kv_size(name) or element_bytes(precision)
    mesh = np.meshgrid(*axes, indexing="ij", sparse=True)
    demand = kind.demand(size, *mesh)
    there = roof(demand, source.rate(precision), source.hbm, source.link)
    here = roof(
        demand, own.rate(precision) * gains["compute"], own.hbm * gains["hbm"], own.link * gains["link"]
    )
    seconds = there * np.exp(loss)
    floor = seconds.min()
    seconds = floor + (seconds - floor) * np.broadcast_to(here / there, shape)
    return Grid(tuple(np.log2(a) for a in axes), kind.growth, monotone(np.log(seconds)))


def common_name(name: str, engine: str) -> str | None:
    """The table whose place one of an engine takes; None where it is not that engine's."""
    found = name.removesuffix(f"/{engine}").removesuffix(f"_{engine}")
    return None if found == name else found


def precision_of(name: str) -> str:
    """Precision of the products in a table's name, whoever's kernel it is."""
    if not name.startswith(("gemm", "moe")):
        return "bf16"
    variant = name.split("/")[1]
    return common_name(variant, "sglang") or variant


def kv_size(name: str) -> float | None:
    """Bytes of a KV element in a decode table's name, None for other tables."""
    if "decode" not in name:
        return None
    return 1.0 if "/fp8" in name else 2.0
