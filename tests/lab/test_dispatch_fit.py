"""The fit of DeepEP's kernels inside a domain: a planted rate and start are found again."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from lab.fits.dispatch import SHAPE, fit, points

pytest.importorskip("scipy", reason="scipy is a development dependency")


def test_a_planted_rate_and_start_are_found_again() -> None:
    """30 us and half of 450 GB/s, 8 GPUs; rows with other SMs are not read."""
    rng = np.random.default_rng(1)
    hidden, tokens = rng.choice([2048, 4096, 7168], 200), 2 ** rng.integers(0, 17, 200)
    copies = 8 * (1 - (7 / 8) ** 8)
    seconds = 30e-6 + 2 * hidden * tokens * copies * 7 / 8 / (0.5 * 450e9)
    rows = pd.DataFrame(np.stack([hidden, tokens, [8] * 200, [256] * 200], axis=1), columns=SHAPE)
    rows["combine_sms"], rows["combine_transmit_us"] = 20, seconds * np.exp(rng.normal(0, 0.03, 200)) * 1e6
    slow = rows.assign(combine_sms=4, combine_transmit_us=9 * rows.combine_transmit_us)
    found = fit(points(pd.concat([rows, slow]), 8, 450e9))
    assert found.latency == pytest.approx(30e-6, rel=0.03)
    assert found.efficiency == pytest.approx(0.5, rel=0.03)
    assert found.ratio == pytest.approx(1, rel=0.15)


def test_a_planted_rate_of_the_low_latency_kernels_is_found_from_both_ways() -> None:
    """12 us and 0.6 of 900 GB/s: 8 copies of a token, FP8 with scales there and BF16 back."""
    rng = np.random.default_rng(2)
    hidden, tokens = rng.choice([2048, 4096, 7168], 200), 2 ** rng.integers(0, 11, 200)
    rows = pd.DataFrame(np.stack([hidden, tokens, [8] * 200, [256] * 200], axis=1), columns=SHAPE)
    for name, width in (("dispatch_avg_t_us", 1 + 4 / 128), ("combine_avg_t_us", 2)):
        rows[name] = (12e-6 + width * hidden * tokens * 8 * 7 / 8 / (0.6 * 900e9)) * 1e6
    found = fit(points(rows, 8, 900e9))
    assert found.latency == pytest.approx(12e-6, rel=0.01)
    assert found.efficiency == pytest.approx(0.6, rel=0.01)
