"""The fit of DeepEP's kernels inside a domain: a planted rate and start are found again."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from lab.fits.dispatch import SHAPE, fit

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
    found = fit(pd.concat([rows, slow]), 8, 450e9)
    assert found.latency == pytest.approx(30e-6, rel=0.03)
    assert found.efficiency == pytest.approx(0.5, rel=0.03)
    assert found.ratio == pytest.approx(1, rel=0.15)
