"""The fit of the kernel curves: planted times are found again, committed errors are honest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lab.fits import kernel_tables as tables
from rlhfsim.kernels.curves import KernelCurves
from rlhfsim.specs.hardware.profiles import load_profile, profile_from_text

pytest.importorskip("scipy", reason="scipy is a development dependency")

from lab.fits import kernels as fit

TARGETS = {
    "gemm/bf16": 0.04,
    "decode/bf16": 0.07,
    "prefill": 0.07,
    "collective/all_reduce": 0.08,
    "collective/all_gather": 0.08,
    "collective/reduce_scatter": 0.08,
    "collective/all_to_all": 0.08,
}


def _planted() -> tables.Samples:
    """GEMM times that follow 4 us + roofline / 0.7, with 3 % noise."""
    rng = np.random.default_rng(1)
    m, n, k = (2.0 ** rng.integers(low, high, 4000) for low, high in ((0, 15), (7, 15), (7, 14)))
    roof = np.maximum(2 * m * n * k / 989e12, 2 * (m * k + n * k + m * n) / 3.35e12)
    seconds = (4e-6 + roof / 0.7) * np.exp(rng.normal(0, 0.03, m.size))
    keys = [f"{a}x{b}x{c}" for a, b, c in zip(m, n, k, strict=True)]
    return tables.Samples(
        name="gemm/bf16",
        coordinates=(m, n, k),
        seconds=seconds,
        shape=keys,
        family=[f"{b}x{c}" for b, c in zip(n, k, strict=True)],
        work=m * n * k,
        source="planted",
    )


@pytest.fixture(scope="module")
def found() -> fit.Fitted:
    return fit.fit_curve(load_profile("h100_sxm"), _planted())


def test_planted_times_are_found_again_on_shapes_left_out(found: fit.Fitted) -> None:
    assert found.half.median() < 0.04
    assert found.families.median() < 0.05
    low, high = found.table["interval"]
    assert 0.9 < low < 1 < high < 1.12


def test_a_fitted_grid_never_falls(found: fit.Fitted) -> None:
    section = fit.curves_section(load_profile("h100_sxm"), {"gemm/bf16": found.table})
    text = "\n".join([_head(), fit.section_text(section)])
    curves = KernelCurves(profile_from_text(text), load_profile)
    m = np.arange(1.0, 40000.0, 7.0)
    assert (np.diff(curves.gemm(m, 3000, 5000)) >= 0).all()


def _head() -> str:
    from rlhfsim.specs.hardware.profile_files import find_profile

    return find_profile("h100_sxm").read_text().partition("\ncurves:")[0]


def test_only_the_curves_section_of_a_profile_is_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "gpu.yaml"
    path.write_text("name: gpu  # comment\nhbm: 3 TB/s\ncurves: {old: 1}\n")
    section = {"package": "p", "tables": {"prefill": {"loss": "00"}, "moe/bf16": {"loss": "01"}}}
    fit.write_section(path, section)
    once = path.read_text()
    fit.write_section(path, section)
    assert path.read_text() == once
    assert once.startswith("name: gpu  # comment\nhbm: 3 TB/s\ncurves: {")
    assert "old" not in once
    assert not list(tmp_path.glob("*.tmp"))


def test_release_candidates_sort_by_number() -> None:
    names = ["1.3.0rc5", "1.3.0rc20", "1.0.0", "0.24.0", "2.27.3", "1.3.0"]
    assert sorted(names, key=tables._key)[1:5] == ["1.0.0", "1.3.0rc5", "1.3.0rc20", "1.3.0"]


@pytest.mark.parametrize("name", list(TARGETS))
def test_committed_h100_curves_meet_their_targets_on_held_out_shapes(name: str) -> None:
    if not tables.installed():
        pytest.skip(f"{tables.PACKAGE} (the measured kernel tables) is not installed")
    profile = load_profile("h100_sxm")
    assert profile.curves is not None
    samples = tables.read_curve("h100_sxm", name)
    assert samples is not None
    errors = fit.holdout(profile, samples, samples.half(), profile.curves["tables"][name])
    assert errors.ratio.size == (~samples.half()).sum()
    assert errors.median() <= TARGETS[name]
    assert errors.interval() == pytest.approx(profile.curves["tables"][name]["interval"], abs=0.002)
