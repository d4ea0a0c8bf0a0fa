"""Kernel curves of tables that are planted: at a knot the time is the roofline times e^loss."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.curves import CLOSED_EFFICIENCY, CLOSED_FLOOR, KernelCurves, element_bytes, peaks_of
from rlhfsim.kernels.grid import encode
from rlhfsim.kernels.work import KINDS, roof
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import load_profile

H100, LENDER = load_profile("h100_sxm"), load_profile("a100_sxm")
PEAKS = peaks_of(H100)
LOSS = {
    "gemm/bf16": 10,
    "gemm/fp8": 20,
    "moe/bf16": 30,
    "moe/fp8": 35,
    "decode/bf16": 40,
    "decode/fp8": 50,
    "decode/fp8_sglang": 60,
    "decode/bf16_sglang": 65,
    "prefill": 70,
    "prefill/sglang": 75,
    "mla_decode/bf16": 80,
    "mla_prefill": 90,
    "collective/all_reduce": 100,
}
"""Hundredths of a natural logarithm above the roofline, everywhere in a table."""
AXES = {"ranks": "2 8", "spread": "0.125 8"}


def table(name: str, **changes: object) -> dict[str, object]:
    names = KINDS[name.split("/")[0]].axes
    axes = {axis: AXES.get(axis, "1 1024") for axis in names}
    loss = encode(np.full((2,) * len(names), LOSS[name]))
    return {"axes": axes, "loss": loss, "interval": [0.8, 1.25], "source": f"measured {name}"} | changes


def planted(names=tuple(LOSS), *, profile: Profile = H100, **changes: object) -> KernelCurves:
    peaks = {**PEAKS.compute, "hbm": PEAKS.hbm, "link": PEAKS.link}
    tables = {name: table(name, **changes) for name in names}
    return KernelCurves(replace(profile, curves={"peaks": peaks, "tables": tables}), load_profile)


def roofline(name: str, precision: str, size: float, *at: float) -> float:
    kind = KINDS[name.split("/")[0]]
    return float(roof(kind.demand(size, *at), PEAKS.rate(precision), PEAKS.hbm, PEAKS.link))


def timed(name: str, precision: str, size: float, *at: float) -> float:
    return roofline(name, precision, size, *at) * math.exp(LOSS[name] / 100)


@pytest.mark.parametrize("at", [(1, 1024, 1024), (1024, 1024, 1024)])
def test_a_gemm_takes_its_own_table_or_the_next_best(at) -> None:
    c = planted()
    assert float(c.gemm(*at)) == pytest.approx(timed("gemm/bf16", "bf16", 2, *at))
    assert float(c.gemm(*at, "fp16")) == float(c.gemm(*at))
    for precision in ("fp8", "fp8_block", "fp8_static"):
        assert float(c.gemm(*at, precision)) == pytest.approx(timed("gemm/fp8", "fp8", 1, *at))
    bf16 = planted(["gemm/bf16"]).gemm(*at, "fp8")  # the table of BF16, never below the roofline of FP8
    assert float(bf16) == pytest.approx(timed("gemm/bf16", "bf16", 2, *at))


def test_fp32_takes_as_long_as_bf16_and_at_least_its_own_roofline() -> None:
    at = (1024, 1024, 1024)
    own = roofline("gemm/bf16", "fp32", element_bytes("fp32"), *at) / 0.75
    assert own > timed("gemm/bf16", "bf16", 2, *at)
    assert float(planted().gemm(*at, "fp32")) == pytest.approx(own)
    small = float(planted(loss=encode(np.full((2, 2, 2), 900)), names=["gemm/bf16"]).gemm(*at, "fp32"))
    assert small == pytest.approx(roofline("gemm/bf16", "bf16", 2, *at) * math.exp(9))


def test_decode_reads_the_table_of_its_cache_and_engine() -> None:
    c = planted()
    at = (64, 1024, 8, 1, 64)  # batch, context, heads, KV heads, head dim: 64 streams of 8 queries
    where = (64, 1024, 8, 64)
    inside = roofline("decode/bf16", "bf16", 2, *where)
    low, high = float(c.decode_attention(*at)), float(c.decode_attention(*at, kv_bytes=1.0))
    assert low >= inside
    assert float(c.at("decode/bf16", *where)) == low
    assert float(c.at("decode/fp8", *where)) == high
    own = float(c.decode_attention(*at, kv_bytes=1.0, engine="sglang"))
    assert own == pytest.approx(high * math.exp(0.1))
    assert float(c.decode_attention(*at, kv_bytes=1.0, engine="vllm")) == high
    assert float(c.decode_attention(*at, engine="sglang")) == low
    shared = c.decode_attention(32, 1024, 16, 2, 64)  # 64 streams again, of 8 queries
    assert float(shared) == low
    assert float(planted(["decode/bf16"]).decode_attention(*at, kv_bytes=1.0)) == pytest.approx(low)


def test_decode_at_a_knot_by_hand() -> None:
    at = (1024, 1024, 1, 1024)
    kv, queries = 2 * 1024 * 1024 * 1024 * 2, 2 * 2 * 1024 * 1024
    assert float(planted().at("decode/bf16", *at)) == pytest.approx(
        (kv + queries) / PEAKS.hbm * math.exp(0.4)
    )


def test_prefill_after_a_prefix_is_a_prompt_of_as_many_pairs() -> None:
    c = planted()
    alone = float(c.prefill_attention(1, 1024, 1024, 1024, 1024))
    assert alone == pytest.approx(timed("prefill", "bf16", 2, 1024, 1024, 1, 1024))
    longer = float(c.prefill_attention(1, 512, 1024, 1024, 1024, 768))  # s^2 + 2 s c = 1024^2
    assert longer == pytest.approx(alone)
    mla = float(c.mla_prefill(8, 512, 128, 768))
    assert mla == pytest.approx(float(c.mla_prefill(8, 1024, 128)))


def test_a_long_prefix_is_read_at_least_once() -> None:
    """One new token after a million: 4 bytes of K and V in each of 8 streams of width 64."""
    cached = 4 * 2 * 8 * 64 * 1_000_001
    c = planted(["prefill"], loss=encode(np.zeros((2, 2, 2, 2))))
    assert float(c.prefill_attention(2, 1, 8, 8, 64, 1_000_000)) == pytest.approx(cached / PEAKS.hbm)


def test_mla_decode_and_prefill_read_their_own_tables() -> None:
    c = planted()
    assert float(c.mla_decode(1024, 1024, 1024)) == pytest.approx(
        timed("mla_decode/bf16", "bf16", 2, 1024, 1024, 1024)
    )
    assert float(c.mla_prefill(1024, 1024, 1024)) == pytest.approx(
        timed("mla_prefill", "bf16", 2, 1024, 1024, 1024)
    )
    one_byte = timed("mla_decode/bf16", "bf16", 2, 1024, 1024, 1024)
    assert float(c.mla_decode(1024, 1024, 1024, kv_bytes=1.0)) == pytest.approx(one_byte)


def test_rows_and_experts_of_one_gpu_by_hand() -> None:
    """4096 tokens choose 2 of 8 experts: 1024 rows each; 8 GPUs hold one each, of half its width."""
    c = planted()
    ours = float(c.moe(4096, 1024, 2048, 2, 8, 2, 8))
    assert ours == float(c.at("moe/bf16", 1024, 1, 1024, 1024, 4))
    more = float(c.moe(4096, 1024, 2048, 2, 8, 2, 16))  # more GPUs than experts: still one each
    assert more == float(c.at("moe/bf16", 1024, 1, 1024, 1024, 8))
    assert float(c.moe(4096, 1024, 2048, 2, 8, 2, 16, "fp8")) == float(
        c.at("moe/fp8", 1024, 1, 1024, 1024, 8)
    )
    assert more == pytest.approx(timed("moe/bf16", "bf16", 2, 1024, 1, 1024, 1024, 8))


def test_a_ring_beyond_the_measured_ranks_stretches() -> None:
    """(r-1)/r of the bytes, and the latency of one more doubling for each doubling of the ranks."""
    c = planted()
    measured = float(c.collective("all_reduce", 1024.0, 8))
    assert measured == pytest.approx(7 / 8 * 1024 / PEAKS.link * math.e)
    small = [float(c.collective("all_reduce", 1.0, ranks)) for ranks in (2, 8)]
    doubling = (small[1] - small[0]) / 2
    assert doubling > 0
    wide = float(c.collective("all_reduce", 1024.0, 32))
    assert wide == pytest.approx(measured * (31 / 32) / (7 / 8) + 2 * doubling)
    assert float(c.at("collective/all_reduce", 32, 1024.0)) == wide
    assert float(c.collective("all_reduce", 0.5, 2)) == small[0]


def test_latency_that_falls_with_the_ranks_counts_as_none() -> None:
    falling = encode(np.array([[200, 200], [10, 10]]))
    c = planted(["collective/all_reduce"], loss=falling)
    measured = float(c.collective("all_reduce", 1024.0, 8))
    assert float(c.collective("all_reduce", 1024.0, 32)) == pytest.approx(measured * (31 / 32) / (7 / 8))


def test_no_table_is_a_floor_and_a_share_of_the_roofline() -> None:
    c = planted(["gemm/bf16"])
    seconds = CLOSED_FLOOR + 3 / 4 * 1e9 / PEAKS.link / CLOSED_EFFICIENCY
    assert float(c.custom_all_reduce(1e9, 4)) == pytest.approx(seconds)
    assert (pytest.approx(5e-6), 0.6) == (CLOSED_FLOOR, CLOSED_EFFICIENCY)
    assert c.spread("moe/bf16") == (0.5, 2.0)
    assert c.source("moe/bf16").startswith("closed form")
    assert c.spread("gemm/bf16") == (0.8, 1.25)
    assert c.source("gemm/bf16") == "measured gemm/bf16"


def test_a_borrowed_table_keeps_its_floor_and_scales_the_rest() -> None:
    """t = floor + (t_source - floor) x roof / roof_source, with peaks of 990 against 312 TFLOP/s."""
    gains = {"compute": 0.5, "hbm": 0.25, "link": 0.125}
    borrow = {"from": "a100_sxm", "reason": "a test", "widen": 2.0, **gains}
    lender = replace(
        LENDER,
        curves={
            "peaks": {"bf16": 312e12, "hbm": 2e12, "link": 3e11},
            "tables": {name: table(name) for name in ("gemm/bf16", "decode/bf16", "collective/all_reduce")},
        },
    )
    c = KernelCurves(replace(H100, curves={"borrow": borrow}), lambda name: lender)
    big, least = (1024, 1024, 1024), (1, 1, 1)
    for method, name, size in (("gemm", "gemm/bf16", 2.0),):
        demand = KINDS[method].demand(size, *map(float, big))
        slower = roof(demand, 0.5 * PEAKS.rate("bf16"), 0.25 * PEAKS.hbm, 1e30) / roof(
            demand, 312e12, 2e12, 1e30
        )
        floor = roof(KINDS[method].demand(size, *map(float, least)), 312e12, 2e12, 1e30) * math.exp(
            LOSS[name] / 100
        )
        t = roof(demand, 312e12, 2e12, 1e30) * math.exp(LOSS[name] / 100)
        assert float(c.at(name, *big)) == pytest.approx(floor + (t - floor) * slower)
    floor = 0.5 * 1 / 3e11 * math.e
    t = 7 / 8 * 1024 / 3e11 * math.e
    assert float(c.collective("all_reduce", 1024.0, 8)) == pytest.approx(
        floor + (t - floor) * 3e11 / (0.125 * PEAKS.link)
    )
    assert c.spread("gemm/bf16") == (0.4, 2.5)
    assert c.source("gemm/bf16") == "borrowed from a100_sxm (a test): measured gemm/bf16"
    assert KernelCurves(lender, load_profile).spread("gemm/bf16") == (0.8, 1.25)


def test_decode_time_that_is_borrowed_follows_the_memory() -> None:
    borrow = {"from": "a100_sxm", "reason": "a test", "hbm": 0.25}
    lender = replace(
        LENDER,
        curves={"peaks": {"bf16": 312e12, "hbm": 2e12}, "tables": {"decode/bf16": table("decode/bf16")}},
    )
    c = KernelCurves(replace(H100, curves={"borrow": borrow}), lambda name: lender)
    at = (1024, 1024, 1, 1024)
    loss = math.exp(0.4)
    t, floor = (4 * 1024**3 + 4 * 1024**2) / 2e12 * loss, (4 + 4) / 2e12 * loss
    assert float(c.at("decode/bf16", *at)) == pytest.approx(floor + (t - floor) * 2e12 / (0.25 * PEAKS.hbm))


def test_a_precision_that_the_gpu_lacks_runs_at_its_16_bit_rate() -> None:
    assert PEAKS.rate("fp8_block") == PEAKS.rate("fp8") == PEAKS.compute["fp8"]
    assert peaks_of(LENDER).rate("fp8") == peaks_of(LENDER).rate("bf16")
    with pytest.raises(RlhfsimError):
        planted().gemm(1, 1, 1, "int7")


def test_arrays_give_what_their_points_give() -> None:
    c = planted()
    many = np.geomspace(1, 1024, 300)
    each = [float(c.gemm(float(m), 512, 512)) for m in many]
    assert c.gemm(many, 512, 512) == pytest.approx(np.array(each))
    assert c.gemm(many[:20], 512, 512) == pytest.approx(np.array(each[:20]))


def test_an_engine_s_own_tables_take_the_places_of_the_common_ones() -> None:
    """SGLang's attention where it was timed; another engine's, and what was not, are the common curves."""
    common, at = planted(), (1.0, 1024.0, 1024.0, 1.0, 1024.0)
    sglang = common.of_engine("sglang")
    for kernel, more in (("decode_attention", 25), ("prefill_attention", 5)):
        ratio = float(getattr(sglang, kernel)(*at)) / float(getattr(common, kernel)(*at))
        assert ratio == pytest.approx(math.exp(more / 100), rel=0.01)
    assert float(sglang.gemm(64, 1024, 1024)) == float(common.gemm(64, 1024, 1024))
    assert common.of_engine("vllm") is common
    assert common.of_engine("sglang") is sglang
    assert float(common.at("decode/bf16_sglang", 16, 1024, 4, 128)) > 0
