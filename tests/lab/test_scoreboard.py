from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.scoreboard import board as scoreboard
from lab.scoreboard.targets import TARGETS, results
from lab.scoreboard.text import markdown
from rlhfsim.errors import RlhfsimError
from rlhfsim.validation import tables as kinds
from rlhfsim.validation.outcome import Outcome
from rlhfsim.validation.rows import parse_csv
from rlhfsim.validation.scoreboard import SCHEMA, dumps


def outcome(kind: str, measured: float, predicted: float, **more: Any) -> Outcome:
    return Outcome(
        kind=kind,
        file="t.csv",
        line=2,
        source="a",
        label="m",
        measured=measured,
        predicted=predicted,
        low=predicted * 0.9,
        high=predicted * 1.1,
        **more,
    )


def rows() -> list[Outcome]:
    return [
        outcome("oom", 1, 0.9, detail={"framework": "verl"}),
        outcome("training", 10, 11),
        outcome("training", 10, 20, assumptions=("tp=1 (x)",)),
        outcome("rlhf.update_actor", 10, 12),
        outcome("rlhf.step", 10, 12),
    ]


def test_kinds_stand_in_the_order_of_the_registry_with_the_step_first() -> None:
    assert list(scoreboard.board(rows())["kinds"]) == ["training", "rlhf.step", "rlhf.update_actor", "oom"]


def test_rows_with_and_without_assumptions_are_scored_apart() -> None:
    training = scoreboard.board(rows())["kinds"]["training"]
    assert training["without_assumptions"]["mean_abs_error"] == pytest.approx(0.1)
    assert training["with_assumptions"]["mean_abs_error"] == pytest.approx(1.0)


def test_verdicts_have_rates_and_no_relative_errors() -> None:
    oom = scoreboard.board(rows())["kinds"]["oom"]
    assert oom["recall"] == 1
    assert "median_abs_error" not in oom
    assert oom["frameworks"]["verl"]["recall_counts"]["of"] == 1


def test_the_board_is_json_without_nan() -> None:
    text = dumps(scoreboard.board(rows()))
    assert json.loads(text)["schema"] == "rlhfsim.validate/1"


def test_a_target_is_passed_at_its_limit_and_missed_beyond() -> None:
    mixtures = {"model kind: mixture of experts": {"median_abs_error": 0.1, "bias": -0.0501}}
    figures = {
        "mean_abs_error": 0.14,
        "bias": -0.0401,
        "right_order": 0.85,
        "coverage": 0.91,
        "groups": mixtures,
    }
    at = results({"rlhf.step": {"left_out": figures}})
    reached = {t["title"]: t["verdict"] for t in at if t["verdict"] != "NO ROWS"}
    assert reached == {
        "mean error over rows": "PASS",
        "bias": "MISSED",
        "mixtures of experts: median error": "PASS",
        "mixtures of experts: bias": "MISSED",
        "pairs of plans in the right order": "PASS",
        "measured between P10 and P90": "MISSED",
    }


def test_the_target_of_a_prediction_is_meant_without_its_publisher_in_any_fit() -> None:
    seen = {"mean_abs_error": 0.01, "left_out": {"mean_abs_error": 0.5}}
    step = next(t for t in results({"rlhf.step": seen}) if t["figure"] == "mean_abs_error")
    assert (step["value"], step["verdict"]) == (0.5, "MISSED")


def test_a_target_without_rows_says_so() -> None:
    assert {t["verdict"] for t in results({"decode": {}})} == {"NO ROWS"}


def test_every_target_names_a_kind_of_the_registry() -> None:
    assert {t.kind.split(".")[0] for t in TARGETS} <= set(kinds.ORDER)


def test_the_same_figures_do_not_differ_and_a_worse_one_is_told() -> None:
    old = scoreboard.board(rows())
    assert scoreboard.differences(old, old) == []
    worse = scoreboard.board([*rows()[:1], outcome("training", 10, 12), *rows()[2:]])
    found = scoreboard.differences(worse, old)
    assert found
    assert found[0].startswith("worse: training: median_abs_error")


def test_a_better_figure_makes_the_committed_one_stale_not_worse() -> None:
    better = [*rows()[:1], outcome("training", 10, 10.5), *rows()[2:]]
    found = scoreboard.differences(scoreboard.board(better), scoreboard.board(rows()))
    assert any(line.startswith("stale: training: mean_abs_error") for line in found)
    assert not any("worse: training: mean" in line for line in found)


def test_differences_below_a_tenth_of_a_point_are_none() -> None:
    nearly = [*rows()[:1], outcome("training", 10, 11.0005), *rows()[2:]]
    assert scoreboard.differences(scoreboard.board(nearly), scoreboard.board(rows())) == []


def test_committed_figures_stand_in_for_a_kind_that_cannot_be_rerun() -> None:
    old = scoreboard.board([outcome("decode", 10, 11)])
    kept = scoreboard.keep(scoreboard.board(rows(), ["decode"]), old)
    assert kept["kinds"]["decode"]["rerun"] is False
    assert "not rerun" in markdown(kept)
    assert any(t["kind"] == "decode" and t["verdict"] == "PASS" for t in kept["targets"])


def test_the_report_shows_every_kind_target_and_worst_row() -> None:
    text = markdown(scoreboard.board(rows()))
    assert "## training" in text
    assert "| rlhf.step | mean error over rows | <= 14.0 % | 20.0 % | MISSED |" in text
    assert "t.csv:2" in text


def test_the_report_counts_pairs_in_the_right_order_and_lists_the_wrong_ones() -> None:
    plans = [(10, 12, "slow", "1"), (5, 6, "fast", "1"), (20, 5, "late", "1"), (20, 5, "old", "2")]
    found = [
        replace(outcome("rlhf.step", m, p), label=label, job="j", release=release)
        for m, p, label, release in plans
    ]
    board = scoreboard.board(found)
    step = board["kinds"]["rlhf.step"]
    assert (step["order_counts"]["hits"], step["order_counts"]["of"]) == (1, 3)
    assert step["order_counts_any_release"]["of"] == 5
    assert [(a["label"], b["label"]) for a, b in step["wrong_order"]] == [("slow", "late"), ("fast", "late")]
    text = markdown(board)
    assert "right in 33.3 % (1 of 3;" in text
    assert "| slow | late | 10 and 20 s | 12 and 5 s |" in text
    assert "| slow | old |" in text


def test_a_kind_without_plans_for_one_job_has_no_order() -> None:
    assert "right_order" not in scoreboard.board(rows())["kinds"]["training"]


def test_a_row_that_cannot_be_read_is_skipped_and_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def predict(found: list[Any]) -> list[Outcome]:
        return [outcome("training", row.number("gpus"), 8) for row in found]

    module = type("module", (), {"outcomes": staticmethod(predict)})
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    header = b"model,gpus,gpu_type,seq_len,framework\n"
    table = parse_csv(header + b"m,8,H100,1,f\nm,8-16,H100,1,f\n", "t.csv")
    found = kinds.run("training", table)
    assert [o.skipped is None for o in found] == [True, False]
    assert "gpus is not a number" in str(found[1].skipped)


def test_an_unknown_kind_is_refused_and_a_sub_kind_selects_its_section() -> None:
    outcomes, _ = scoreboard.collect(["weight_sync.other_scope"])
    assert {o.kind.split(".")[0] for o in outcomes} == {"weight_sync"}
    with pytest.raises(RlhfsimError, match="unknown kind"):
        scoreboard.collect(["memroy"])


def test_only_a_file_of_this_schema_is_read_as_committed_figures(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"schema": "other"}')
    with pytest.raises(RlhfsimError, match="schema"):
        scoreboard.read_board(path)


@pytest.mark.parametrize("figure", ["NaN", "1" + "0" * 400, "true", '"12"', "1e30"])
def test_a_figure_that_cannot_be_is_refused(figure: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(f'{{"schema": "{SCHEMA}", "kinds": {{"memory": {{"rows": {figure}}}}}}}')
    with pytest.raises(RlhfsimError, match=r"rows is no number|JSON"):
        scoreboard.read_board(path)


def test_a_row_that_no_fit_read_has_no_second_prediction_and_the_others_have_one() -> None:
    rows = scoreboard.predicted("weight_sync")
    assert {o.part for o in rows} == {"fit", "report"}
    assert any(o.blind is None for o in rows if o.predicted)
    assert any(o.blind not in (None, o.predicted) for o in rows if o.part == "fit")
