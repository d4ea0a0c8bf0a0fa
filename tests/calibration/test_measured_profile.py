"""What micro-benchmarks found becomes a profile: planted measurements come back, nothing passes its roof."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from rlhfsim.calibration.micro_benchmarks.fit import (
    decode_kernels,
    nonnegative,
    prefill_kernels,
    train_kernels,
)
from rlhfsim.calibration.micro_benchmarks.profile import base_of, measured_profile
from rlhfsim.calibration.profile_writer import write_text
from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.curves import KernelCurves
from rlhfsim.specs.hardware.measured import FEW_WIDENING, WIDENING, Machine, Measured, Session, summarise
from rlhfsim.specs.hardware.profiles import load_profile, profile_from_text
from rlhfsim.units import GB, GIB

CORE = Machine(
    kind="cpu",
    title="Test CPU",
    date="2026-11-21",
    cores=2,
    memory=24 * GIB,
    free=22 * GIB,
    peak=100e9,
    peak_source="planted",
    versions=(("torch", "2.13.0"),),
)
GRID = ((1.0, 16.0, 256.0), (64.0, 512.0, 2048.0))


def gpu(title: str, memory: float) -> Machine:
    return Machine(
        kind="cuda",
        title=title,
        date="2026-11-21",
        cores=16,
        memory=128 * GIB,
        free=120 * GIB,
        peak=0.0,
        peak_source="",
        gpus=1,
        gpu_memory=memory,
    )


def seen(
    name: str, value: float, unit: str = "s", at: tuple[float, ...] = (), spread: float = 0.05
) -> Measured:
    samples = [value * (1 - spread), value, value * (1 + spread)]
    return summarise(name, samples, unit, "planted", at)  # type: ignore[arg-type]


def products(rate: float) -> list[Measured]:
    """Products of 2 us and a constant rate."""
    rows, widths = GRID
    return [
        seen("gemm", 2e-6 + 2 * m * n * k / rate, at=(m, n, k)) for m, n, k in product(rows, widths, widths)
    ]


def session(*measured: Measured, machine: Machine = CORE) -> Session:
    return Session(machine=machine, measured=measured, missing=())


def test_the_interval_is_p10_to_p90_widened_and_wider_for_few_repeats() -> None:
    many = summarise("x", [float(i) for i in range(1, 102)], "s", "")
    assert (many.value, many.n) == (51.0, 101)
    assert many.low == pytest.approx(11 / WIDENING)
    assert many.high == pytest.approx(91 * WIDENING)
    once = summarise("x", [2.0], "s", "")
    assert (once.low, once.high) == (2 / FEW_WIDENING, 2 * FEW_WIDENING)


def test_measured_products_are_what_the_cost_model_then_says() -> None:
    points = products(60e9)
    made = measured_profile(session(*points, seen("memory_copy", 8 * GB, "byte/s")))
    curves = KernelCurves(profile_from_text(made.text), load_profile)
    said = [float(curves.gemm(p.at[0], p.at[1], p.at[2])) for p in points]
    assert said == pytest.approx([p.value for p in points], rel=0.02)


def test_no_efficiency_passes_one_and_the_peak_is_at_least_what_was_seen() -> None:
    made = measured_profile(session(*products(400e9), seen("memory_copy", 8 * GB, "byte/s")))
    profile = profile_from_text(made.text)
    fastest = max(2 * np.prod(p.at) / p.value for p in products(400e9))
    assert profile.peak["fp32"].value == pytest.approx(fastest, rel=1e-3)  # not the planted 100 GFLOP/s
    for change in made.changes:
        if change.key.endswith("_efficiency") and change.moved:
            assert change.value <= 1, change.key
            assert change.high is not None
            assert change.high <= 1, change.key


def test_a_slow_memory_leaves_every_share_at_most_one() -> None:
    slow = seen("memory_copy_all", 2 * GB, "byte/s"), seen("memory_copy", 1 * GB, "byte/s")
    profile = profile_from_text(measured_profile(session(*slow)).text)
    for name in ("cpu_adam_efficiency", "optimizer_hbm_efficiency", "host_copy_efficiency", "hbm_efficiency"):
        assert profile.coefficient(name).high <= 1, name
    assert profile.node.host_bandwidth.value < 2.2 * GB


def test_every_changed_number_says_what_measured_it() -> None:
    made = measured_profile(session(*products(60e9), seen("memory_copy", 8 * GB, "byte/s")))
    profile = profile_from_text(made.text)
    source = profile.coefficient("hbm_efficiency").source
    assert source.startswith(
        "measured 2026-11-21 by rlhfsim profile measure: n=3, Test CPU, 2 cores, torch 2.13.0"
    )
    rate = profile.hbm.value * profile["hbm_efficiency"]
    assert rate == pytest.approx(8 * GB, rel=1e-3)
    assert profile.node.gpus == 2
    untouched = load_profile("cpu_core").coefficient("sync_start_latency")
    assert profile.coefficient("sync_start_latency") == untouched


def test_overheads_per_step_layer_and_sequence_are_told_apart() -> None:
    step, layer, sequence = 2e-3, 400e-6, 90e-6
    places = [
        (float(n_layers), n, c) for n_layers in (2, 6) for n, c in ((1.0, 27.0), (16.0, 27.0), (32.0, 139.0))
    ]
    blank = [seen("decode_step", 1.0, at=at) for at in places]
    empty = profile_from_text(measured_profile(session(seen("group_start", 0.01))).text)
    kernels = decode_kernels(empty, blank)
    steps = [
        seen("decode_step", k + step + layer * at[0] + sequence * at[1], at=at)
        for k, at in zip(kernels, places, strict=True)
    ]
    prefills = [seen("prefill_step", 3e-3 + 700e-6 * depth, at=(depth, 1.0, 16.0)) for depth in (2.0, 6.0)]
    made = measured_profile(session(seen("group_start", 0.01), *steps, *prefills))
    profile = profile_from_text(made.text)
    for name, planted in {
        "decode_step_overhead_vllm": step,
        "decode_layer_overhead": layer,
        "decode_sequence_overhead_vllm": sequence,
        "prefill_overhead_vllm": 3e-3,
        "eager_layer_overhead": 700e-6,
    }.items():
        c = profile.coefficient(name)
        assert c.value == pytest.approx(planted, rel=0.01), name
        assert c.low < c.value < c.high
    assert any("explain the 6 points within 0 %" in note for note in made.notes)


def test_launch_of_layers_and_speed_of_prefill_come_back() -> None:
    empty = profile_from_text(measured_profile(session(seen("group_start", 0.01))).text)
    places = [(depth, 32.0, 128.0) for depth in (2.0, 6.0)]
    blank = [seen("prefill_step", 1.0, at=at) for at in places]
    long = [
        seen("prefill_step", 3e-3 + k / 0.8, at=at)
        for k, at in zip(prefill_kernels(empty, blank), places, strict=True)
    ]
    short = [seen("prefill_step", 3e-3 + 700e-6 * depth, at=(depth, 1.0, 16.0)) for depth in (2.0, 6.0)]
    kernels = train_kernels(empty, seen("train_pass", 1.0, at=(2.0, 32.0, 16.0)))
    assert kernels > 0
    passes = [
        seen("train_pass", 5e-3 + depth * (kernels + 2 * 900e-6), at=(depth, 32.0, 16.0))
        for depth in (2.0, 6.0)
    ]
    profile = profile_from_text(
        measured_profile(session(seen("group_start", 0.01), *short, *long, *passes)).text
    )
    assert profile["prefill_efficiency"] == pytest.approx(0.8, rel=0.01)
    assert profile["host_layer_time"] == pytest.approx(900e-6, rel=0.01)


def test_a_line_through_timings_keeps_both_parts_at_zero_or_above() -> None:
    points = [seen("t", 1e-9 * size, at=(size,)) for size in (1e5, 1e7)]
    fixed, each = nonnegative([(1.0, p.at[0]) for p in points], points)
    assert fixed.value == pytest.approx(0, abs=1e-9)
    assert each.value == pytest.approx(1e-9)
    assert isinstance(each, Measured)
    assert each.low < each.value < each.high


def test_gloo_and_disk_and_optimizer_come_back_as_the_cost_model_multiplies_them() -> None:
    rate, latency = 0.8 * GB, 150e-6
    reduces = [seen("all_reduce", size / rate + 2 * latency, at=(2.0, size)) for size in (1e3, 1e5, 1e7)]
    adam = [seen("optimizer_step", 1e-3 + 9e-9 * size, at=(size,)) for size in (2.0**18, 2.0**23)]
    disk = [seen("storage_write", 0.4 * GB, "byte/s"), seen("storage_read", 1.2 * GB, "byte/s")]
    profile = profile_from_text(measured_profile(session(*reduces, *adam, *disk)).text)
    assert profile.nic.value * profile["nic_efficiency"] == pytest.approx(rate, rel=0.02)
    assert profile["nic_latency"] == pytest.approx(latency, rel=0.02)
    assert 34 / (profile.hbm.value * profile["optimizer_hbm_efficiency"]) == pytest.approx(9e-9, rel=0.01)
    assert profile.coefficient("optimizer_overhead") == load_profile("cpu_core").coefficient(
        "optimizer_overhead"
    )
    assert profile.node.local_storage.value * profile["local_storage_write"] == pytest.approx(
        0.4 * GB, rel=0.01
    )


@pytest.mark.parametrize(
    ("title", "gib", "name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "h100_sxm", True),
        ("NVIDIA H100 PCIe", 79.2, "h100_pcie", True),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100_sxm", True),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx_4090", True),
        ("NVIDIA H100 NVL", 93.6, "l40s", False),
        ("NVIDIA T4", 14.6, "l40s", False),
    ],
)
def test_a_gpu_is_found_by_name_and_memory(title: str, gib: float, name: str, known: bool) -> None:
    assert base_of(session(machine=gpu(title, gib * GIB))) == (name, known)


def test_a_known_gpu_keeps_datasheet_and_curves_and_refuses_what_passes_them() -> None:
    h100 = gpu("NVIDIA H100 80GB HBM3", 79.2 * GIB)
    found = [
        seen("memory_copy", 2900 * GB, "byte/s"),
        seen("host_to_device", 90 * GB, "byte/s"),
        seen("device_to_host", 95 * GB, "byte/s"),
    ]
    made = measured_profile(session(*found, machine=h100))
    profile, shipped = profile_from_text(made.text), load_profile("h100_sxm")
    assert profile.hbm == shipped.hbm
    assert profile.curves == shipped.curves
    assert profile["hbm_efficiency"] == pytest.approx(2900 / 3350, rel=1e-3)
    assert [m.probe for m in made.missing] == ["pcie_efficiency"]
    assert profile.coefficient("pcie_efficiency") == shipped.coefficient("pcie_efficiency")


def test_an_unknown_gpu_gets_roofs_of_its_own() -> None:
    t4 = gpu("NVIDIA T4", 14.6 * GIB)
    copy = seen("memory_copy", 250 * GB, "byte/s")
    made = measured_profile(session(*products(40e12), copy, machine=t4))
    profile = profile_from_text(made.text)
    assert profile.memory.value == pytest.approx(14.6 * GIB, rel=1e-3)
    assert profile.price is None
    assert profile.peak["bf16"].value == pytest.approx(
        max(2 * np.prod(p.at) / p.value for p in products(40e12)), rel=1e-3
    )


def test_a_profile_is_never_overwritten(tmp_path: Path) -> None:
    made = measured_profile(session(seen("group_start", 0.01)), "mine")
    out = tmp_path / "mine.yaml"
    assert write_text(out, made.text).coefficient("nccl_start_latency").value == pytest.approx(0.01)
    before = out.read_bytes()
    with pytest.raises(RlhfsimError, match="never overwritten"):
        write_text(out, made.text)
    assert out.read_bytes() == before
