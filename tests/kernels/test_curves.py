"""Kernel curves: rooflines, monotonicity, borrowing, the form they are stored in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.fits.kernel_knots import BORROWERS
from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.curves import KernelCurves
from rlhfsim.kernels.grid import Grid, decode, encode, monotone
from rlhfsim.specs.hardware.profile_files import find_profile
from rlhfsim.specs.hardware.profiles import load_profile, profile_from_text, profile_yaml

MEASURED = ["a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "b300_sxm", "gb200_nvl72", "gb300_nvl72", "l40s"]
ALL = [*MEASURED, *BORROWERS, "cpu"]
CURVES = {name: KernelCurves(load_profile(name), load_profile) for name in ALL}
POINTS = 400


def _random(low: float, high: float, seed: int) -> np.ndarray:
    """Log-uniform whole numbers."""
    rng = np.random.default_rng(seed)
    return np.floor(np.exp(rng.uniform(np.log(low), np.log(high), POINTS)))


M, N, K = _random(1, 2e5, 1), _random(16, 3e5, 2), _random(16, 1e5, 3)
B, C, G = _random(1, 5000, 4), _random(1, 1e6, 5), 2.0 ** np.floor(np.log2(_random(1, 9, 6)))
A, D = (G * 2.0 ** np.floor(np.log2(_random(1, 65, 7))), 2.0 ** np.floor(np.log2(_random(64, 513, 8))))
S, T, P = _random(1, 1e5, 9), _random(1, 2e5, 10), _random(1, 1e5, 11)
E, TOP = 2.0 ** np.floor(np.log2(_random(8, 513, 12))), _random(1, 8, 13)
EP = np.minimum(2.0 ** np.floor(np.log2(_random(1, 65, 14))), E)
F, H = _random(128, 16384, 15), _random(1024, 8192, 16)
BYTES, RANKS = _random(1, 5e9, 17), _random(2, 73, 18)
MORE = 1 + _random(1, 300, 19) / 100


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8", "fp8_block", "fp4", "fp32"])
def test_no_gemm_beats_the_datasheet(name: str, precision: str) -> None:
    curves = CURVES[name]
    seconds = curves.gemm(M, N, K, precision)
    assert np.isfinite(seconds).all()
    assert (seconds >= 2 * M * N * K / curves.peaks.rate(precision) * (1 - 1e-9)).all()
    size = {"fp8": 1.0, "fp8_block": 1.0, "fp4": 0.5, "fp32": 4.0}.get(precision, 2.0)
    assert (seconds >= size * N * K / curves.peaks.hbm * (1 - 1e-9)).all()


@pytest.mark.parametrize("name", ALL)
def test_no_attention_beats_the_datasheet(name: str) -> None:
    curves = CURVES[name]
    rate, hbm = curves.peaks.rate("bf16"), curves.peaks.hbm
    for kv_bytes in (1.0, 2.0):
        seconds = curves.decode_attention(B, C, A, G, D, kv_bytes)
        assert (seconds >= 2 * B * C * G * D * kv_bytes / hbm * (1 - 1e-9)).all()
        latent = curves.mla_decode(B, C, A, kv_bytes)
        assert (latent >= B * C * 576 * kv_bytes / hbm * (1 - 1e-9)).all()
        assert (latent >= 2 * 1088 * A * B * C / rate * (1 - 1e-9)).all()
    pairs = S * S / 2 + S * P
    assert (curves.prefill_attention(B, S, A, G, D, P) >= 4 * A * D * B * pairs / rate * (1 - 1e-9)).all()
    assert (curves.mla_prefill(B, S, A, P) >= 2 * 320 * A * B * pairs / rate * (1 - 1e-9)).all()


@pytest.mark.parametrize("name", ALL)
def test_no_expert_block_and_no_collective_beats_the_datasheet(name: str) -> None:
    curves = CURVES[name]
    seconds = curves.moe(T, H, F, TOP, E, 1, EP, "bf16")
    assert (seconds >= 6 * T * TOP / EP * H * F / curves.peaks.rate("bf16") * (1 - 1e-9)).all()
    sent = (RANKS - 1) / RANKS * BYTES / curves.peaks.link
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert (curves.collective(op, BYTES, RANKS) >= sent * (1 - 1e-9)).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ALL)
def test_more_work_is_never_faster(name: str) -> None:
    c = CURVES[name]
    slack = 1 + 1e-9
    pairs = [
        (c.gemm(M, N, K, "bf16"), c.gemm(M * MORE, N, K, "bf16")),
        (c.gemm(M, N, K, "fp8"), c.gemm(M, N * MORE, K, "fp8")),
        (c.gemm(M, N, K, "fp8_block"), c.gemm(M, N, K * MORE, "fp8_block")),
        (c.decode_attention(B, C, A, G, D), c.decode_attention(B * MORE, C, A, G, D)),
        (c.decode_attention(B, C, A, G, D, 1), c.decode_attention(B, C * MORE, A, G, D, 1)),
        (c.decode_attention(B, C, A, G, D), c.decode_attention(B, C, A * MORE, G, D)),
        (c.prefill_attention(B, S, A, G, D), c.prefill_attention(B * MORE, S, A, G, D)),
        (c.prefill_attention(B, S, A, G, D, P), c.prefill_attention(B, S * MORE, A, G, D, P)),
        (c.prefill_attention(B, S, A, G, D, P), c.prefill_attention(B, S, A, G, D, P * MORE)),
        (c.mla_decode(B, C, A), c.mla_decode(B, C * MORE, A)),
        (c.mla_decode(B, C, A, 1), c.mla_decode(B * MORE, C, A, 1)),
        (c.mla_prefill(B, S, A), c.mla_prefill(B, S * MORE, A)),
        (c.moe(T, H, F, TOP, E, 1, EP), c.moe(T * MORE, H, F, TOP, E, 1, EP)),
        (c.moe(T, H, F, TOP, E, 1, EP, "fp8"), c.moe(T, H, F * MORE, TOP, E, 1, EP, "fp8")),
        (c.collective("all_reduce", BYTES, RANKS), c.collective("all_reduce", BYTES * MORE, RANKS)),
        (c.collective("all_to_all", BYTES, RANKS), c.collective("all_to_all", BYTES * MORE, RANKS)),
        (c.custom_all_reduce(BYTES, RANKS), c.custom_all_reduce(BYTES * MORE, RANKS)),
    ]
    for index, (less, more) in enumerate(pairs):
        assert (more * slack >= less).all(), (name, index)


def test_a_hand_computed_gemm_is_where_h100_was_measured() -> None:
    # 2 x 8192 x 8192 x 8192 FLOP at 600 to 800 TFLOP/s
    seconds = float(CURVES["h100_sxm"].gemm(8192, 8192, 8192))
    assert 2 * 8192**3 / 800e12 < seconds < 2 * 8192**3 / 600e12


def test_arguments_broadcast_and_scalars_give_scalars() -> None:
    c = CURVES["h100_sxm"]
    assert c.gemm(np.ones((3, 1)), np.full(4, 512.0), 512).shape == (3, 4)
    assert c.decode_attention(8, [10, 20], 32, 8, 128).shape == (2,)
    assert float(c.gemm(1, 512, 512)) == pytest.approx(c.gemm([1], 512, 512)[0])


def test_one_rank_or_no_bytes_take_no_time() -> None:
    c = CURVES["h100_sxm"]
    assert c.collective("all_reduce", [1e6, 0.0], [1, 8]).tolist() == [0.0, 0.0]


def test_a_window_is_a_context_clipped_to_it() -> None:
    c = CURVES["h100_sxm"]
    assert c.decode_attention(64, 4096, 32, 8, 128) > c.decode_attention(64, 1024, 32, 8, 128)


def test_a_gpu_that_borrows_has_its_own_peaks() -> None:
    h20, h200 = CURVES["h20_sxm"], CURVES["h200_sxm"]
    product = (8192, 8192, 8192)
    slower = float(h20.gemm(*product) / h200.gemm(*product))
    assert 989 / 148 * 0.7 < slower < 989 / 148  # compute-bound, better efficiency than H200
    stream = h20.decode_attention(256, 8192, 8, 8, 128) / h200.decode_attention(256, 8192, 8, 8, 128)
    assert 1.0 < float(stream) < 4800 / 4000 * 1.1  # bound by HBM
    assert "h200_sxm" in h20.source("gemm/bf16")
    assert h20.spread("gemm/bf16")[0] < h200.spread("gemm/bf16")[0]


def test_launch_overheads_do_not_scale_with_the_peaks() -> None:
    tiny = CURVES["l4"].gemm(1, 32, 32), CURVES["l40s"].gemm(1, 32, 32)
    assert float(tiny[0]) == pytest.approx(float(tiny[1]), rel=0.05)


def test_borrowing_from_a_profile_without_tables_is_an_error() -> None:
    profile = replace(load_profile("h20_sxm"), curves={"borrow": {"from": "cpu"}})
    with pytest.raises(RlhfsimError) as caught:
        KernelCurves(profile, load_profile)
    assert caught.value.code == "borrow-without-tables"


def test_an_unknown_precision_is_an_error() -> None:
    with pytest.raises(RlhfsimError, match="no kernel curve for precision"):
        CURVES["h100_sxm"].gemm(1, 1, 1, "int3")


@pytest.mark.parametrize("name", MEASURED)
def test_profiles_stay_small_and_say_where_each_curve_is_from(name: str) -> None:
    assert find_profile(name).stat().st_size < 72 * 1024
    for table in CURVES[name].tables:
        low, high = CURVES[name].spread(table)
        assert 0.2 < low <= 1.02, table
        assert 0.98 <= high < 3, table
        assert ".parquet" in CURVES[name].source(table)


def test_curves_survive_the_way_through_yaml() -> None:
    profile = load_profile("h100_sxm")
    again = KernelCurves(profile_from_text(profile_yaml(profile)), load_profile)
    assert (again.gemm(M, N, K, "fp8") == CURVES["h100_sxm"].gemm(M, N, K, "fp8")).all()


def test_losses_survive_their_encoding() -> None:
    values = np.array([0.0, 1.4, 35.0, 36.0, 700.6, 1295.0, 5000.0, -3.0])
    assert decode(encode(values)).tolist() == [0, 1, 35, 36, 701, 1295, 1295, 0]


def test_a_grid_is_multilinear_inside_flat_below_and_a_power_beyond() -> None:
    knots = (np.array([0.0, 1.0]), np.array([0.0, 2.0]))
    grid = Grid(knots, (1.0, 2.0), np.log(np.array([[1.0, 4.0], [2.0, 8.0]])))
    assert float(grid(1, 1)) == pytest.approx(1)
    assert float(grid(1, 2)) == pytest.approx(2)
    assert float(grid(0.25, 0.5)) == pytest.approx(1)
    assert float(grid(4, 8)) == pytest.approx(8 * 2 * 4)


def test_the_running_maximum_never_falls() -> None:
    rough = np.random.default_rng(0).normal(size=(4, 5, 6))
    smooth = monotone(rough)
    assert all((np.diff(smooth, axis=axis) >= 0).all() for axis in range(3))
    assert (smooth >= rough).all()
