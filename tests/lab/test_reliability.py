"""Reliability curve, Brier score and coverage by group, on cases worked by hand."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import numpy as np
import pytest

from lab.fits.error_files import laws_text
from lab.scoreboard import reliability
from lab.scoreboard.discrepancy import Residuals
from lab.scoreboard.group_law import law_of, with_ends
from rlhfsim.step.groups import GroupLaw, groups_of, laws
from rlhfsim.step.measured import Conditions
from rlhfsim.validation.outcome import Outcome

DENSE = Conditions(
    kind="rlhf.step",
    framework="NeMo-RL",
    backend="megatron",
    gpu="h100_sxm",
    model="qwen3-32b",
    params=32e9,
    moe=False,
    length=4000,
    gpus=32,
    algorithm="grpo",
    precision="bf16",
)
MOE = replace(DENSE, moe=True, dispatcher="not named")


def outcome(measured: float, source: str = "a/b", conditions: Conditions = DENSE) -> Outcome:
    return Outcome(
        kind="rlhf.step",
        file="f",
        line=1,
        source=source,
        label="",
        measured=measured,
        predicted=10.0,
        low=8.0,
        median=11.0,
        high=16.0,
        conditions=conditions,
    )


def test_the_brier_score_and_the_curve_by_hand() -> None:
    told = reliability.reliability([0.1, 0.1, 0.9, 0.9], [False, True, True, True])
    assert told["brier"] == pytest.approx((0.01 + 0.81 + 0.01 + 0.01) / 4)
    assert told["brier_of_share"] == pytest.approx(0.75 * 0.25)
    assert [(b["low"], b["cases"], b["happened"]) for b in told["bins"]] == [(0.0, 2, 0.5), (0.8, 2, 1.0)]
    assert [b["stated"] for b in told["bins"]] == pytest.approx([0.1, 0.9])


def test_certain_answers_that_come_true_score_zero_and_the_last_bin_holds_one() -> None:
    told = reliability.reliability([0.0, 1.0], [False, True])
    assert told["brier"] == 0
    assert [b["high"] for b in told["bins"]] == [0.2, 1.0]


@pytest.mark.parametrize(("due", "chance"), [(8.0, 0.1), (11.0, 0.5), (16.0, 0.9)])
def test_the_chance_of_a_deadline_is_that_of_the_quantiles(due: float, chance: float) -> None:
    assert reliability.probability_within(due, 8.0, 11.0, 16.0) == pytest.approx(chance)


def test_a_time_that_is_certain_meets_a_deadline_or_does_not() -> None:
    assert reliability.probability_within(10.0, 10.0, 10.0, 10.0) == 1
    assert reliability.probability_within(9.9, 10.0, 10.0, 10.0) == 0


def test_odds_take_deadlines_of_the_prediction_and_fitting_of_the_memory_verdict() -> None:
    verdict = replace(outcome(1.0), kind="oom", measured=1.0, predicted=0.75, conditions=None)
    told = reliability.odds([outcome(12.0), verdict])
    assert told["rlhf.step"]["cases"] == len(reliability.DEADLINES)
    assert told["rlhf.step"]["happened"] == pytest.approx(2 / 6)  # 13 and 16 of 7, 8.5, 10, 11.5, 13, 16
    assert told["oom"]["brier"] == pytest.approx(0.25**2)


def test_groups_say_how_many_lie_inside_and_above_the_median() -> None:
    rows = [outcome(9.0), outcome(20.0), outcome(12.0, "c/d", MOE)]
    told = reliability.by_group(rows)
    assert told["model kind: dense"]["coverage"] == 0.5
    assert told["model kind: dense"]["above_median"] == 0.5
    assert told["model kind: mixture of experts"]["median_bias"] == pytest.approx(11 / 12 - 1)
    assert told["framework: run by others too"]["publishers"] == 2
    assert reliability.groups_covered(told) is None
    many = {"x": {"rows": 8, "coverage": 0.8}, "y": {"rows": 8, "coverage": 1.0}}
    assert reliability.groups_covered(many) == 0.5


def test_order_across_gpus_counts_pairs_of_two_kinds_alone() -> None:
    gb200 = replace(DENSE, gpu="gb200_nvl72")
    cases = ((10.0, 10.0, DENSE), (20.0, 15.0, DENSE), (14.0, 12.0, gb200), (30.0, 11.0, gb200))
    jobs = [
        replace(outcome(measured, "a/b", where), predicted=predicted, job="grpo", release="1")
        for measured, predicted, where in cases
    ]
    assert reliability.order_across_gpus(jobs) == 3 / 4  # 30 s, said to take 11, against 20
    assert reliability.order_across_gpus(jobs[:2]) is None


# --- the law --------------------------------------------------------------------------------------


def rows(errors: dict[Conditions, float], publishers: int, each: int = 8) -> Residuals:
    """Rows of as many publishers: the error of their conditions, and noise around it."""
    noise = 0.1 * np.linspace(-1.5, 1.5, each)
    cases = [(f"p{p}", c, e + n) for p in range(publishers) for c, e in errors.items() for n in noise]
    return Residuals(
        error=np.array([e for _, _, e in cases]),
        down=np.zeros(len(cases)),
        up=np.zeros(len(cases)),
        distance=np.zeros(len(cases)),
        publisher=tuple(name for name, _, _ in cases),
        groups=tuple(groups_of(c) for _, c, _ in cases),
    )


def test_a_bias_of_many_publishers_is_believed_and_one_of_few_rows_shrinks_to_zero() -> None:
    many, few = (law_of(rows({DENSE: 0.3}, n, 2))[1] for n in (40, 2))
    assert many.centre(DENSE) == pytest.approx(0.3, abs=0.03)
    assert few.centre(DENSE) == pytest.approx(0.3 * 2.83 / 6.83, rel=0.01)  # n = 2 sqrt(2), n / (n + 4)
    assert few.doubt > 2 * many.doubt > 0


def test_a_group_of_all_rows_says_nothing_that_the_rows_did_not() -> None:
    _, law = law_of(rows({DENSE: 0.3}, 2))
    assert law.centre(DENSE) == law.effects["kind", "rlhf.step"].centre.value
    assert law.effects["gpu", "h100_sxm"].width.value == 1


def test_the_bias_of_one_group_is_not_that_of_the_other_and_an_unknown_one_has_the_wider() -> None:
    _, law = law_of(rows({DENSE: 0.0, MOE: 0.4}, 40))
    assert law.centre(MOE) - law.centre(DENSE) > 0.3
    other = replace(DENSE, gpu="never measured")
    assert law.centre(other) == pytest.approx(law.centre(DENSE) - law.effects["gpu", "h100_sxm"].centre.value)


def test_a_group_that_scatters_more_has_wider_intervals_around_a_median_that_grows_with_the_bias() -> None:
    base, law = law_of(rows({DENSE: 0.1}, 20))
    low, middle, high = law.quantiles(10.0, 9.0, 11.0, DENSE)
    assert middle == pytest.approx(10 * exp(law.centre(DENSE)))
    assert low < middle < high
    wide = law_of(_twice(rows({DENSE: 0.1, MOE: 0.1}, 20)))[1]
    assert wide.effects["model_kind", "mixture of experts"].width.value > 1
    assert base == pytest.approx(0.1, rel=0.2)
    assert log(high / middle) > log(11 / 10)


def _twice(told: Residuals) -> Residuals:
    """The rows with twice the scatter of those of experts."""
    moe = told.has(("model_kind", "mixture of experts"))
    return replace(told, error=np.where(moe, 0.1 + 3 * (told.error - 0.1), told.error))


def test_ends_hold_the_value_and_the_laws_without_a_publisher() -> None:
    law, other = (law_of(rows({DENSE: e}, 10))[1] for e in (0.1, 0.3))
    told = with_ends(law, [other, other]).effects["kind", "rlhf.step"].centre
    assert told.low == pytest.approx(told.value)
    assert told.high == pytest.approx(other.effects["kind", "rlhf.step"].centre.value)


def test_the_shipped_laws_are_read_as_they_are_written_and_none_is_of_memory() -> None:
    shipped = laws()
    assert set(shipped) == {"training", "rlhf.step"}
    assert all(isinstance(law, GroupLaw) and law.doubt > 0 for law in shipped.values())
    assert laws_text(shipped).count("\n") == 1 + sum(len(law.effects) for law in shipped.values())
    for law in shipped.values():
        assert all(e.width.low <= e.width.value <= e.width.high for e in law.effects.values())
