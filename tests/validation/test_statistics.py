from __future__ import annotations

import pytest

from lab.scoreboard.blind import reference_errors
from rlhfsim.validation import statistics
from rlhfsim.validation.outcome import Outcome


def outcome(measured: float | None, predicted: float | None, source: str = "a", **more: object) -> Outcome:
    return Outcome(
        kind="training",
        file="t.csv",
        line=2,
        source=source,
        label="m",
        measured=measured,
        predicted=predicted,
        **more,
    )  # type: ignore[arg-type]


def test_errors_bias_and_percentiles_of_four_rows_by_hand() -> None:
    rows = [outcome(10, p) for p in (9, 11, 12, 15)]  # -10, 10, 20, 50 %
    score = statistics.score(rows)
    assert score["median_abs_error"] == pytest.approx(0.15)
    assert score["mean_abs_error"] == pytest.approx(0.225)
    assert score["p90_abs_error"] == pytest.approx(0.2 + 0.7 * 0.3)
    assert score["bias"] == pytest.approx(0.15)


def test_a_large_source_does_not_decide_the_median_of_the_sources_medians() -> None:
    rows = [outcome(10, 10)] * 9 + [outcome(10, 14, "b"), outcome(10, 16, "c")]
    score = statistics.score(rows)
    assert score["median_abs_error"] == 0
    assert score["median_of_source_medians"] == pytest.approx(0.4)
    assert score["num_sources"] == 3


def test_rows_that_fitted_something_are_counted_but_not_scored() -> None:
    score = statistics.score([outcome(10, 20, part="fit"), outcome(10, 11)])
    assert (score["predicted"], score["fit"], score["scored"]) == (2, 1, 1)
    assert score["mean_abs_error"] == pytest.approx(0.1)


def test_skipped_rows_are_counted_by_reason_the_commonest_first() -> None:
    rows = [outcome(10, None, skipped=s) for s in ("b", "a", "b")] + [outcome(10, 10)]
    assert statistics.score(rows)["skipped"] == 3
    assert statistics.skip_reasons(rows) == {"b": 2, "a": 1}


def test_coverage_counts_only_rows_with_an_interval() -> None:
    rows = [outcome(10, 11, low=9, high=12), outcome(10, 13, low=12, high=14), outcome(10, 10)]
    assert statistics.coverage(rows) == 0.5


def test_half_and_double_are_within_a_factor_of_two() -> None:
    rows = [outcome(10, p) for p in (5.0, 20.0, 4.9, 20.1)]
    assert statistics.score(rows)["within_factor_2"] == 0.5


def test_without_rows_every_figure_is_unknown() -> None:
    score = statistics.score([])
    assert score["median_abs_error"] is None
    assert score["coverage"] is None
    assert score["median_of_source_medians"] is None


def test_a_third_is_as_bad_as_a_triple_in_the_list_of_worst_rows() -> None:
    rows = [outcome(10, 11), outcome(10, 3), outcome(10, 29)]
    assert [o.predicted for o in statistics.worst(rows, 2)] == [3, 29]


def test_wilson_interval_of_eight_of_ten_is_the_textbook_one() -> None:
    rate = statistics.rate(8, 10)
    assert (rate.low, rate.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


def test_wilson_interval_stays_inside_zero_and_one() -> None:
    assert 0 <= (statistics.rate(0, 3).low or 0) < 1e-12
    assert 1 - 1e-12 < (statistics.rate(3, 3).high or 0) <= 1
    assert statistics.rate(0, 0).value is None


def test_recall_false_alarms_and_brier_by_hand() -> None:
    rows = [outcome(1, 0.9), outcome(1, 0.4), outcome(0, 0.6), outcome(0, 0.1)]
    found = statistics.verdicts(rows)
    assert (found.recall.value, found.false_alarms.value) == (0.5, 0.5)
    assert found.brier == pytest.approx((0.01 + 0.36 + 0.36 + 0.01) / 4)


def test_another_tools_error_is_taken_on_the_same_scored_rows() -> None:
    rows = [outcome(10, 10, detail={"x": 12.0}), outcome(10, 10, detail={"x": 20.0}, part="fit")]
    found = reference_errors(rows, "x")
    assert found["median_abs_error"] == pytest.approx(0.2)
    assert found["rows"] == 1


# --- order ------------------------------------------------------------------------------------------


def plans(*times: tuple[float, float], **more: object) -> list[Outcome]:
    return [outcome(m, p, **({"job": "j"} | more)) for m, p in times]  # type: ignore[arg-type]


def test_pairs_of_one_job_are_in_the_right_order_or_not() -> None:
    found = statistics.order(plans((10, 1), (20, 3), (40, 2)))
    assert (found.right.hits, found.right.of) == (2, 3)
    ((fast, slow),) = found.wrong
    assert (fast.measured, slow.measured) == (20, 40)


def test_measured_times_within_a_tenth_have_no_order() -> None:
    assert statistics.order(plans((10, 1), (11, 0.5))).right.of == 0
    assert statistics.order(plans((10, 1), (11.01, 0.5))).right.of == 1


def test_equal_predictions_are_not_an_order() -> None:
    assert statistics.order(plans((10, 5), (20, 5))).right.hits == 0


def test_rows_of_other_jobs_releases_and_of_the_fit_make_no_pair() -> None:
    rows = [
        *plans((10, 1), release="1"),
        *plans((20, 2), release="2"),
        *plans((40, 1), job="k"),
        *plans((80, 1), release="1", part="fit"),
        *plans((90, 1), job=""),
        *plans((95, 1), job=""),
    ]
    assert statistics.order(rows).right.of == 0
    assert statistics.order(rows, same_release=False).right.of == 1
