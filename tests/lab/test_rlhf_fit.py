"""What an RL framework adds: fitted on rows that are never scored."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import pytest

from lab.fits import rlhf as rlhf_fit
from lab.fits import verl as verl_fit
from lab.scoreboard.board import marked
from lab.scoreboard.rows import FIT_FILE, FIT_LOGS, rows_of
from rlhfsim.specs.frameworks.costs import with_software
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.validation.outcome import Outcome


@cache
def predicted() -> tuple[Outcome, ...]:
    return tuple(marked("rlhf", rows_of("rlhf")))


@pytest.mark.parametrize(
    ("fit", "framework", "backend"), [(rlhf_fit, "nemo-rl", "megatron"), (verl_fit, "verl", "fsdp2")]
)
def test_the_shipped_coefficients_are_what_the_fit_gives(
    fit: ModuleType, framework: str, backend: Backend
) -> None:
    profile = with_software(load_profile("h100"), framework, backend)
    found = fit.fit(fit.fit_rows())
    assert set(found) == set(fit.NAMES)
    for name, c in found.items():
        shown = profile.coefficient(name)
        assert (shown.value, shown.low, shown.high) == pytest.approx((c.value, c.low, c.high), rel=0.02)
        assert "fitted on" in shown.source


def test_rows_that_fitted_have_part_fit_and_no_others() -> None:
    found = predicted()
    fitted = [o for o in found if o.file == FIT_FILE or o.source.startswith(FIT_LOGS)]
    assert {o.part for o in fitted} == {"fit"}
    assert {o.part for o in found if o not in fitted} == {"report"}


def test_calls_and_layers_that_explain_phases_exactly_are_found_in_spite_of_one_outlier() -> None:
    pairs = ((1, 500), (2, 900), (1, 3000), (2, 100))
    calls = [rlhf_fit.Call(0.5 * n + 2e-3 * x, 10.0, n, x) for n, x in pairs]
    assert rlhf_fit.least_error([*calls, rlhf_fit.Call(60.0, 90.0, 1, 700)]) == pytest.approx((0.5, 2e-3))


def test_the_fitted_rows_lose_their_bias() -> None:
    steps = [o.error for o in predicted() if o.file == FIT_FILE and o.kind == "rlhf.step"]
    assert len(steps) == 6
    assert abs(sorted(e for e in steps if e is not None)[2]) < 0.1
