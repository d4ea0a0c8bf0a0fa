"""No row of a publisher takes part in its own prediction, and intervals know nothing of it either."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.fits import leave_one_out
from lab.scoreboard import left_out
from lab.scoreboard.blind import blind
from lab.scoreboard.discrepancy import MOST, Residuals, base_of, unseen
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.step.measured import Conditions, MeasuredRun, distance, measured_runs, nearest, spread, widened
from rlhfsim.validation.outcome import Outcome, publisher

HERE = Conditions(
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


def outcome(source: str, part: str = "report", blind_s: float | None = None) -> Outcome:
    return Outcome(
        kind="training",
        file="f",
        line=1,
        source=source,
        label="",
        measured=10,
        predicted=11,
        part=part,  # type: ignore[arg-type]
        blind=blind_s,
    )


@pytest.mark.parametrize("fit", leave_one_out.FITS, ids=lambda fit: fit.name)
def test_the_refits_are_those_of_the_rows_and_coefficients_that_ship(fit: leave_one_out.Fit) -> None:
    known = left_out.facts()[fit.name]
    assert known["hash"] == leave_one_out.stamp(fit), "run: python -m lab.fits.leave_one_out"
    assert set(known["left_out"]) == {publisher(row.source) for row in fit.rows()}


def test_a_profile_without_a_publisher_differs_only_in_what_was_fitted_on_it() -> None:
    name = "NVIDIA-NeMo/Megatron-Bridge"
    ours, others = (left_out.without(n)(load_profile("h100"), None) for n in ("nobody/at-all", name))
    changed = {n for n, c in ours.coefficients.items() if others.coefficients[n].value != c.value}
    assert changed
    assert changed <= {c.name for c in left_out.refits(name)}


def test_what_a_framework_has_of_its_own_replaces_what_is_pooled() -> None:
    name = "MoonshotAI/checkpoint-engine"
    pooled, own = left_out.refits(name), left_out.refits(name, "verl")
    assert {r.framework for r in pooled} == {""}
    assert {r.framework for r in own} == {"", "verl"}
    values = {r.name: r.value for r in own if r.framework == "verl"}
    changed = left_out.changed(load_profile("h800"), own)
    assert values
    assert all(changed[coefficient] == value for coefficient, value in values.items())


def test_pages_of_one_repository_are_one_publisher() -> None:
    assert publisher("a/b@docs/x.md") == publisher("a/b@README.md") == "a/b"


def test_a_row_that_was_fitted_counts_only_by_its_prediction_without_the_publisher() -> None:
    found = blind([outcome("a/b", "fit", 12.0), outcome("c/d", "fit"), outcome("c/d"), outcome("e/f")])
    assert [(o.source, o.predicted) for o in found] == [("a/b", 12.0), ("e/f", 11)]


def test_the_base_leaves_eight_in_ten_inside_and_one_publisher_tells_none() -> None:
    rng = np.random.default_rng(0)

    def drawn(publishers: int) -> Residuals:
        n = 600
        names = tuple(f"p{i % publishers}" for i in range(n))
        away = np.zeros(n)
        return Residuals(error=rng.normal(0, 0.2, n), down=away, up=away, distance=away, publisher=names)

    assert base_of(drawn(200)) == pytest.approx(0.2, rel=0.15)
    assert base_of(drawn(1)) == MOST


def test_a_base_between_rows_is_interpolated_and_every_side_of_an_interval_counts_for_itself() -> None:
    away = np.zeros(2)
    names = ("a", "b")
    two = Residuals(error=np.array([0.0, 1.2816]), down=away, up=away, distance=away, publisher=names)
    assert base_of(two) == pytest.approx(1.0, rel=1e-3)  # of 25 and 75 % of the weight: the last
    five = Residuals(
        error=1.2816 * np.array([0.0, 0.1, 0.2, 0.3, 0.4]),
        down=np.zeros(5),
        up=np.zeros(5),
        distance=np.zeros(5),
        publisher=tuple("abcde"),
    )
    assert base_of(five) == pytest.approx(0.35, rel=1e-3)  # half way from 70 to 90 %
    above = replace(outcome("a/b"), predicted=10.0, measured=12.0, low=9.0, high=20.0, conditions=HERE)
    below = replace(above, measured=9.5)
    variances = unseen([replace(o, kind="training") for o in (above, below)], "training").variance
    assert np.sqrt(variances) * 1.2816 == pytest.approx([np.log(2), np.log(10 / 9)], rel=1e-3)


def test_what_coefficients_explain_is_not_explained_twice() -> None:
    rng = np.random.default_rng(1)
    n = 400
    names = tuple(f"p{i % 100}" for i in range(n))
    errors = rng.normal(0, 0.2, n)
    side = np.full(n, 0.3)
    wide = Residuals(error=errors, down=side, up=side, distance=np.zeros(n), publisher=names)
    assert base_of(wide) == 0


def test_the_same_run_has_no_distance_and_every_difference_adds_some() -> None:
    assert distance(HERE, HERE) == 0
    for change in (
        {"gpu": "b200_sxm"},
        {"framework": "verl"},
        {"params": 70e9},
        {"moe": True},
        {"length": 16000},
        {"gpus": 256},
        {"algorithm": "ppo"},
        {"backend": "fsdp2"},
    ):
        assert distance(HERE, replace(HERE, **change)) > 0  # type: ignore[arg-type]


def test_a_gpu_of_the_same_generation_is_nearer() -> None:
    assert distance(HERE, replace(HERE, gpu="h200_sxm")) < distance(HERE, replace(HERE, gpu="a100_sxm"))


def test_the_nearest_run_is_of_the_same_kind_and_says_what_differs() -> None:
    runs = [
        MeasuredRun(conditions=replace(HERE, kind="training"), release="", error=0.0, source="a"),
        MeasuredRun(conditions=replace(HERE, gpus=256, moe=True), release="0.5", error=0.04, source="b"),
    ]
    found = nearest(HERE, runs)
    assert found is not None
    assert found.run.source == "b"
    assert "mixture of experts there" in found.differs
    assert nearest(HERE, runs[:1]) is None


def test_intervals_widen_with_distance_and_never_narrow() -> None:
    near, far = (widened(10, 9, 11, 1.28 * spread(0.1, away)) for away in (0.0, 2.0))
    assert far[0] < near[0] < 9 < 11 < near[1] < far[1]
    assert widened(10, 9, 11, 0.0) == (9, 11)


def test_measured_runs_ship_with_their_errors() -> None:
    kinds = {run.conditions.kind for run in measured_runs()}
    assert {"training", "rlhf.step", "memory.training_peak"} <= kinds
    assert all(run.error > -1 for run in measured_runs())
