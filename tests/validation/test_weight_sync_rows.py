from __future__ import annotations

from functools import cache

import pytest

from lab.scoreboard.board import marked
from lab.scoreboard.rows import FITTED, rows_of
from rlhfsim.validation.assumptions import apply
from rlhfsim.validation.kinds.weight_sync import KIND, OTHER, case_of, outcomes
from rlhfsim.validation.outcome import Outcome
from rlhfsim.validation.rows import Row


@cache
def found() -> tuple[Outcome, ...]:
    return tuple(marked("weight_sync", rows_of("weight_sync")))


def scored() -> list[Outcome]:
    return [o for o in found() if o.kind == KIND and o.part == "report" and not o.skipped]


def at(line: int) -> Outcome:
    return next(o for o in found() if o.line == line)


def test_every_row_has_one_outcome_and_every_skip_a_reason() -> None:
    rows = rows_of("weight_sync")
    assert [o.line for o in found()] == [row.line for row in rows]
    assert all((o.predicted is None) == bool(o.skipped) for o in found())


def test_attention_dp_leaves_every_rank_all_of_attention() -> None:
    """GLM-5's first layers on eight ranks: attention, dense MLPs and ends whole on each, experts in eighths."""
    assert "miles-glm-5-attention" in str(at(71).assumptions)
    row = next(row for row in rows_of("weight_sync") if row.line == 71)
    ends = case_of(apply(KIND, row)[0]).ends
    assert (ends.rollout.tp, ends.rollout.attention_dp, ends.rollout.gpus) == (1, 8, 8)
    assert ends.rollout_shard == pytest.approx(2 * (ends.weights.dense + ends.weights.experts / 8))


def test_seven_of_ten_predictions_are_within_a_factor_of_two() -> None:
    rows = scored()
    assert len(rows) >= 30
    inside = [o for o in rows if 0.5 <= (o.predicted or 0) / (o.measured or 1) <= 2]
    assert len(inside) / len(rows) >= 0.7


def test_intervals_cover_at_least_seven_of_ten_rows() -> None:
    rows = scored()
    covered = [o for o in rows if (o.low or 0) <= (o.measured or 0) <= (o.high or 0)]
    assert len(covered) / len(rows) >= 0.7


def test_times_beyond_the_link_are_left_out_with_the_reason() -> None:
    for line in (10, 11):
        assert "exceeds the link" in (at(line).skipped or "")


def test_whole_framework_steps_are_listed_apart() -> None:
    steps = [o for o in found() if str(o.detail["scope"]).startswith("per-step")]
    assert steps
    assert all(o.kind == OTHER for o in steps)


def test_rows_that_gave_a_coefficient_are_never_scored() -> None:
    gave = [o for o in found() if o.detail["mechanism"] in FITTED]
    assert {o.detail["mechanism"] for o in gave} == set(FITTED)
    assert all(o.part == "fit" for o in gave)


def test_a_range_is_taken_at_its_middle() -> None:
    assert at(32).measured == pytest.approx((0.54 + 0.67) / 2)
    assert "middle of the published range" in at(32).assumptions


def test_offload_and_wake_are_part_of_what_a_refit_is_predicted_to_take() -> None:
    # NVIDIA-NeMo/RL#638: 55 s, about 20 of them offload; #3294: the transfer and the whole refit of 235B
    refit, transfer, whole = at(48), at(80), at(81)
    assert refit.measured == 55
    assert refit.predicted == pytest.approx(55, rel=0.2)
    assert (whole.predicted or 0) - (transfer.predicted or 0) == pytest.approx(40.2 - 18.4, rel=0.35)


def test_three_of_four_predictions_are_within_a_factor_of_one_and_a_half() -> None:
    inside = [o for o in scored() if 2 / 3 <= (o.predicted or 0) / (o.measured or 1) <= 1.5]
    assert len(inside) / len(scored()) >= 0.75


def test_filled_cells_are_shown_with_the_row() -> None:
    assert any("nemo-async-dsv3" in text for text in at(46).assumptions)


def test_a_row_without_a_gpu_is_skipped() -> None:
    values = {
        "model": "x",
        "model_config_key": "qwen3-8b",
        "mechanism": "NCCL broadcast",
        "seconds": "1",
        "gen_parallel": "TP2",
        "train_parallel": "TP2",
        "source": "test",
    }
    row = Row(table="weight_sync", file="own.csv", line=2, values=values)
    assert outcomes([row])[0].skipped == "GPU type not stated"
