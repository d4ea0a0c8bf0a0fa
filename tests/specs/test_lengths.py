"""Length distributions: moments against draws, quantiles, and files of observed lengths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.loading import convert, parse_yaml
from rlhfsim.specs.workload.lengths import (
    AnyLengths,
    Empirical,
    Fixed,
    Lengths,
    LogNormal,
    Truncated,
    draw,
    stats,
)

FAMILY = [
    Fixed(value=700),
    LogNormal(mean=1500, sigma=0.8, max=8192),
    LogNormal(mean=800, sigma=0.3, max=1_000_000),
    Truncated(mean=500, std=200, min=100, max=900),
]


def reference_draws(lengths: AnyLengths, rng: np.random.Generator) -> np.ndarray:
    """numpy's own generator, cut as the docstrings say."""
    match lengths:
        case Fixed():
            return np.full(400_000, lengths.value)
        case LogNormal():
            mu = np.log(lengths.mean) - lengths.sigma**2 / 2
            return np.clip(rng.lognormal(mu, lengths.sigma, 400_000), 1, lengths.max)
        case Truncated():
            return np.clip(rng.normal(lengths.mean, lengths.std, 400_000), lengths.min, lengths.max)
    raise AssertionError


@pytest.mark.parametrize("lengths", FAMILY)
def test_moments_agree_with_numpy_draws(lengths: AnyLengths) -> None:
    drawn = reference_draws(lengths, np.random.default_rng(7))
    assert stats(lengths).mean == pytest.approx(drawn.mean(), rel=0.01)
    assert stats(lengths).mean_square == pytest.approx((drawn**2).mean(), rel=0.02)
    for level in (0.1, 0.5, 0.9):
        value = float(lengths.quantile(np.array([level]))[0])
        assert value == pytest.approx(np.quantile(drawn, level), rel=0.01)


def test_an_uncut_log_normal_keeps_its_mean() -> None:
    assert stats(LogNormal(mean=800, sigma=0.3, max=1e6)).mean == pytest.approx(800, rel=1e-3)


@pytest.mark.parametrize("lengths", FAMILY)
def test_own_draws_have_the_same_mean_and_are_whole(lengths: AnyLengths) -> None:
    drawn = draw(lengths, 50_000, np.random.default_rng(3))
    assert drawn.mean() == pytest.approx(stats(lengths).mean, rel=0.02)
    assert np.array_equal(drawn, np.rint(drawn))
    assert np.array_equal(drawn, draw(lengths, 50_000, np.random.default_rng(3)))


@pytest.mark.parametrize("lengths", FAMILY)
def test_quantiles_rise_and_stay_in_range(lengths: AnyLengths) -> None:
    found = lengths.quantile(np.linspace(0, 1, 501))
    assert np.all(np.diff(found) >= 0)
    assert found.min() >= 1
    assert found.max() <= lengths.maximum


@given(
    mean=st.floats(1, 1e5),
    sigma=st.floats(0, 4),
    top=st.floats(1, 1e6),
    levels=st.lists(st.floats(0, 1), min_size=2, max_size=8),
)
def test_any_log_normal_is_monotone_and_bounded(
    mean: float, sigma: float, top: float, levels: list[float]
) -> None:
    lengths = LogNormal(mean=mean, sigma=sigma, max=top)
    found = lengths.quantile(np.sort(np.array(levels)))
    assert np.all(np.diff(found) >= 0)
    assert np.all((found >= 1) & (found <= top))


def test_the_longest_of_more_draws_is_longer() -> None:
    known = stats(FAMILY[1])
    longest = [known.expected_max(n) for n in (1, 8, 64, 512, 4096)]
    assert longest == sorted(longest)
    assert longest[-1] <= 8192


def test_representative_lengths_are_sorted_and_keep_the_mean() -> None:
    found = stats(FAMILY[3]).representative(1000)
    assert np.all(np.diff(found) >= 0)
    assert found.mean() == pytest.approx(stats(FAMILY[3]).mean, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{kind: truncated, mean: 5, std: 1, min: 10, max: 5}", "from 10 to 5 tokens: the range is empty"),
        ("{kind: fixed, value: 0}", "'fixed.value': input should be greater"),
        ("{kind: lognormal, mean: .inf, max: 10}", "'lognormal.mean': input should be a finite number"),
        ("{kind: lognormal, mean: 10, sigma: -1, max: 10}", "'lognormal.sigma': input should be greater"),
        ("{kind: empirical}", "'empirical.file' is missing"),
        ("{value: 5}", "discriminator 'kind'"),
    ],
)
def test_impossible_distributions_are_refused(text: str, said: str) -> None:
    with pytest.raises(RlhfsimError, match=said):
        convert(Lengths, parse_yaml(text, "lengths.yaml"))  # type: ignore[arg-type]


def test_observed_lengths_come_back_as_quantiles(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("30\n10\n\n20,\n")
    lengths = Empirical(file=str(file))
    assert lengths.quantile(np.array([0, 0.5, 1])).tolist() == [10, 20, 30]
    assert lengths.maximum == 30


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("10\n20\nlong\n", "bad-length", 3),
        ("10\n0\n", "bad-length", 2),
        ("nan\n", "bad-length", 1),
        ("tokens\n10\n", "bad-length", 1),
        ("\n\n", "empty-file", None),
        ("5\n1e99\n", "bad-length", 2),
    ],
)
def test_a_bad_line_of_observed_lengths_is_named(
    tmp_path: Path, text: str, code: str, line: int | None
) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(RlhfsimError) as error:
        _ = Empirical(file=str(file)).maximum
    assert error.value.code == code
    assert error.value.place is not None
    assert error.value.place.line == line
    assert error.value.place.file == str(file)


def test_missing_and_binary_files_are_told(tmp_path: Path) -> None:
    binary = tmp_path / "b"
    binary.write_bytes(b"\xff\xfe\x00")
    for file in (tmp_path / "absent", binary, tmp_path):
        with pytest.raises(RlhfsimError, match="cannot read the file"):
            _ = Empirical(file=str(file)).maximum


@given(content=st.binary(max_size=60))
def test_any_file_of_lengths_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.mktemp("l") / "x.csv"
    file.write_bytes(content)
    try:
        found = Empirical(file=str(file)).maximum
    except RlhfsimError:
        return
    assert 1 <= found <= 1e8
