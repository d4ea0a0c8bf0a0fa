"""The pure parts of lab/benchmarks/closed_loop.py: the split, the figures and the tables; no real runs."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "lab" / "benchmarks"))

from closed_loop_report import (
    Row,
    error,
    errors,
    phase_table,
    rows_of,
    spread,
    step_table,
    table,
    targets,
    unpriced,
)
from closed_loop_runs import (
    MODELS,
    PAIRS,
    REPEATED,
    REPEATS,
    SECOND,
    missing,
    plan_of,
    prompts_file,
    schedule,
)

from executor.tasks import tiny
from rlhfsim.calibration.observation import Observation
from rlhfsim.calibration.predict import STEP

ROW = Row(
    run="a",
    config="a",
    role="predict",
    phase="actor.train",
    measured=2.0,
    p90=2.2,
    n=5,
    cold=3.0,
    calibrated=2.2,
    share=0.5,
)


def test_every_level_of_every_factor_stands_on_both_sides() -> None:
    for factor in ("architecture", "algorithm", "dp", "path", "micro_batch"):
        sides = [{getattr(config, factor) for config in side} for side in zip(*PAIRS, strict=True)]
        assert sides[0] == sides[1], factor
    stages = [{c.zero for c in side} for side in zip(*PAIRS, strict=True)]
    assert stages == [{0, 1, 2, 3}, {0, 1, 2, 3}]


def test_no_run_is_both_fitted_and_predicted() -> None:
    fitted = {run.config.name for run in schedule() if run.role == "calibrate"}
    told = {run.config.name for run in schedule() if run.role != "calibrate"}
    assert not fitted & told
    assert all(run.config.model == "one" for run in schedule() if run.role == "calibrate")
    assert len({run.name for run in schedule()}) == len(schedule())


def test_repeats_make_three_runs_of_one_configuration() -> None:
    for name in REPEATED:
        assert sum(run.config.name == name for run in schedule()) == REPEATS == 3


def test_pairs_differ_in_batch_lengths_and_layout() -> None:
    for a, b in PAIRS:
        assert (a.sequences, a.prompt_len, a.response_len) != (b.sequences, b.prompt_len, b.response_len)


def test_the_second_model_is_larger_in_width_alone() -> None:
    assert MODELS["wide"]["hidden"] == 2 * MODELS["one"]["hidden"]
    assert MODELS["wide"]["layers"] == MODELS["one"]["layers"]
    assert all(config.model == "wide" for config in SECOND)


@pytest.mark.parametrize("config", [c for pair in PAIRS for c in pair], ids=lambda c: c.name)
def test_every_configuration_is_a_plan_of_its_architecture(config, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = tiny.config(tmp_path, **MODELS[config.model])
    plan = plan_of(config, model)
    assert plan.architecture == config.architecture
    assert plan.placement.weight_path == config.path


def test_prompts_have_one_length_and_differ(tmp_path: Path) -> None:
    lines = prompts_file(24, tmp_path).read_text().splitlines()
    assert len(set(lines)) == len(lines) > 32
    assert all(len(line) == len(lines[0]) for line in lines)


def test_runs_that_exist_are_not_missing(tmp_path: Path) -> None:
    first = schedule()[0]
    (tmp_path / first.name).mkdir()
    left = list(missing(tmp_path))
    assert first not in left
    assert len(left) == len(schedule()) - 1


def test_an_error_is_relative_to_what_was_measured() -> None:
    assert error(3.0, 2.0) == 0.5
    assert error(1.0, 2.0) == 0.5
    assert math.isinf(error(None, 2.0))


def test_short_and_unpriced_phases_are_not_counted() -> None:
    rows = [
        ROW,
        replace(ROW, phase="rules.score", share=0.001, calibrated=100.0),
        replace(ROW, phase="actor.sync.unload", cold=None, calibrated=None, share=0.1),
    ]
    assert errors(rows, "predict", step=False) == [pytest.approx(0.1)]
    assert unpriced(rows) == "`actor.sync.unload` (10.0 % of the step, 1 runs)"


def test_the_spread_of_repeats_is_that_of_logarithms() -> None:
    rows = [replace(ROW, phase=STEP, config=REPEATED[0], measured=math.exp(x)) for x in (-0.1, 0.0, 0.1)]
    assert spread(rows) == pytest.approx(0.1)
    assert spread([ROW]) == 0.0


def test_a_target_is_held_against_the_median_and_the_spread_may_raise_it() -> None:
    step = replace(ROW, phase=STEP, share=1.0)
    rows = [
        ROW,
        step,
        replace(step, calibrated=2.6),
        replace(step, calibrated=2.0),
        replace(ROW, role="second model"),
        replace(step, role="second model"),
    ]
    found = {t.what: t for t in targets(rows)}
    same = found["step of the same model"]
    assert (same.reached, same.worst, same.n) == (pytest.approx(0.1), pytest.approx(0.3), 3)
    assert same.limit == 0.08
    assert not same.met
    assert found["phases of the same model"].met
    noisy = [replace(step, role="repeat", config=REPEATED[0], measured=x) for x in (2.0, 2.2, 2.4)]
    assert {t.what: t for t in targets([*rows, *noisy])}["step of the same model"].limit > 0.1


def test_rows_hold_the_step_first_with_medians_and_percentiles() -> None:
    run = schedule()[0]
    seen = Observation.__new__(Observation)  # a plan is not needed here
    object.__setattr__(seen, "step_s", (2.0, 2.2, 2.4))
    object.__setattr__(seen, "phases", {"actor.train": (1.0, 1.1, 1.3)})
    step, train = rows_of(run, seen, {STEP: 2.0, "actor.train": 1.0}, {STEP: 2.2, "actor.train": 1.2})
    assert (step.phase, step.measured, step.n) == (STEP, 2.2, 3)
    assert (train.measured, train.share) == (1.1, pytest.approx(0.5))
    assert train.p90 == pytest.approx(1.26)


def test_tables_are_markdown() -> None:
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert "| actor.train | 1 | 50.0 % | 50.0 % | 10.0 % | 10.0 % | 1.10 |" in phase_table([ROW], "predict")
    step = replace(ROW, phase=STEP)
    assert step_table([ROW, step]).splitlines()[2:] == [
        "| a | predict | 2 | 2.2 | 5 | 3 | 2.2 | 50.0 % | 10.0 % |"
    ]
