"""What an RL framework adds: fitted on one table, which is never scored."""

from __future__ import annotations

from functools import cache

import pytest

from lab.fits.rlhf import NAMES, fit, fit_rows
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.validation.kinds import rlhf
from rlhfsim.validation.outcome import Outcome
from rlhfsim.validation.rows import shipped


@cache
def predicted() -> tuple[Outcome, ...]:
    return tuple(rlhf.outcomes(shipped("rlhf")))


def test_the_shipped_coefficients_are_what_the_fit_gives() -> None:
    profile = load_profile("h100")
    found = fit(fit_rows())
    assert set(found) == set(NAMES)
    for name, c in found.items():
        shown = profile.coefficient(name)
        assert (shown.value, shown.low, shown.high) == pytest.approx((c.value, c.low, c.high), rel=0.02)
        assert rlhf.FIT_FILE in shown.source


def test_every_outcome_of_the_fitted_table_has_part_fit_and_no_other_has() -> None:
    found = predicted()
    assert {o.part for o in found if o.file == rlhf.FIT_FILE} == {"fit"}
    assert {o.part for o in found if o.file != rlhf.FIT_FILE} == {"report"}


def test_the_fitted_rows_lose_their_bias() -> None:
    steps = [o.error for o in predicted() if o.part == "fit" and o.kind == "rlhf.step"]
    assert len(steps) == 6
    assert abs(sorted(e for e in steps if e is not None)[2]) < 0.1
