"""How responses of a log spread: from their mean, the longest, and the share that is cut."""

from __future__ import annotations

import numpy as np
import pytest

from rlhfsim.specs.workload.lengths import LogNormal, cut_log_normal, log_spread, stats


@pytest.mark.parametrize(("mean", "sigma", "limit"), [(400, 0.3, 1024), (2000, 1.2, 8192), (600, 0.8, 1024)])
def test_a_planted_spread_is_recovered_from_mean_and_share_that_is_cut(mean, sigma, limit) -> None:
    planted = LogNormal(mean=mean, sigma=sigma, max=limit)
    lengths = planted.quantile((np.arange(200_000) + 0.5) / 200_000)
    found = log_spread(lengths.mean(), limit, (lengths >= limit).mean())
    assert found == pytest.approx(sigma, rel=0.05)
    again = cut_log_normal(lengths.mean(), limit, found)
    assert stats(again).expected_max(64) == pytest.approx(stats(planted).expected_max(64), rel=0.05)


def test_the_longest_of_many_that_is_below_the_limit_is_the_longest_that_is_expected() -> None:
    spread = log_spread(300.0, 900.0, 1 / 5121)
    lengths = cut_log_normal(300.0, 4096.0, spread)
    assert stats(lengths).expected_max(5120) == pytest.approx(900, rel=0.02)


def test_spreads_end_where_lengths_hardly_differ_and_where_they_differ_most() -> None:
    assert log_spread(99.0, 100.0, 1e-4) == pytest.approx(0.05)
    assert log_spread(1.0, 1e6, 1e-4) == pytest.approx(2.0)
