"""Ordered pairs of published steps."""

from __future__ import annotations

import math

import pytest

from lab.scoreboard.board import board
from lab.scoreboard.one_run import Timed
from lab.scoreboard.targets import results
from lab.scoreboard.text import markdown
from lab.scoreboard.transfer import COLD, KIND, RATIO, Published, pairs
from rlhfsim.kernels.cost import Cost, part
from rlhfsim.validation.outcome import Outcome


def published(
    line: int,
    predicted: float,
    measured: float,
    framework: str = "NeMo-RL v0.6",
    *,
    model: str = "m",
    fit: bool = False,
) -> Published:
    cost = Cost(parts=(part("compute", predicted, "a", spread=(0.5, 2.0)),))
    outcome = Outcome(
        kind="rlhf.step",
        file="rlhf.csv",
        line=line,
        source="s",
        label=f"row {line}",
        measured=measured,
        predicted=predicted,
        part="fit" if fit else "report",
    )
    return Published(
        outcome=outcome,
        framework=framework,
        model=model,
        step=cost,
        times=(Timed(cost=cost, measured_s=measured),),
    )


def test_rows_of_one_framework_and_release_pair_in_both_directions() -> None:
    rows = [
        published(1, 10, 20),
        published(2, 5, 10),
        published(3, 5, 9, "NeMo-RL v0.5"),
        published(4, 5, 9, "TRL"),
        published(5, 5, 9, "TRL"),
    ]
    found = pairs(rows)
    assert {(o.detail["calibrated_on"], o.line) for o in found} == {("rlhf.csv:1", 2), ("rlhf.csv:2", 1)}


def test_a_row_that_fitted_a_constant_takes_no_part() -> None:
    assert pairs([published(1, 10, 20), published(2, 5, 10, fit=True)]) == []


def test_a_common_error_is_carried_over_and_the_cold_one_stands_beside_it() -> None:
    there = next(o for o in pairs([published(1, 10, 20), published(2, 5, 10)]) if o.line == 2)
    assert there.detail[COLD] == 5.0
    assert there.detail[RATIO] == pytest.approx(10.0)
    assert 8.5 < (there.predicted or 0.0) < 10.0


def test_the_measured_time_of_a_row_has_no_part_in_its_own_prediction() -> None:
    def told(measured: float) -> float | None:
        return next(
            o.predicted for o in pairs([published(1, 10, 20), published(2, 5, measured)]) if o.line == 2
        )

    assert told(10.0) == told(99.0)


def test_the_scoreboard_has_pairs_cold_error_and_target() -> None:
    rows = [published(1, 10, 20), published(2, 5, 10), published(3, 4, 8, model="other")]
    figures = board(pairs(rows))
    kind = figures["kinds"][KIND]
    assert kind["scored"] == 6
    assert kind["cold"]["median_abs_error"] == pytest.approx(0.5)
    assert kind["ratio"]["median_abs_error"] == pytest.approx(0.0, abs=1e-9)
    assert kind["same_model"]["scored"] == 2
    assert kind["median_abs_error"] < 0.15
    (target,) = results(figures["kinds"])
    assert target["verdict"] == "PASS"
    text = markdown(figures)
    assert "| without calibration | 50.0 % | 50.0 % |" in text
    assert not any(math.isnan(x) for x in kind.values() if isinstance(x, float))
