from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from lab.fits.posterior import Free, posterior, written
from lab.scoreboard.board import marked
from lab.scoreboard.rows import part_of, rows_of
from rlhfsim.api import estimate, estimate_file
from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.flop import training_flop
from rlhfsim.plan import write_plan
from rlhfsim.specs.placement.backends import violation
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.validation import assumptions
from rlhfsim.validation.cases.training import config_of, job, measured, model_of, recomputed
from rlhfsim.validation.kinds.training import outcomes
from rlhfsim.validation.outcome import Outcome, Skip
from rlhfsim.validation.rows import Row
from rlhfsim.what_if.estimate import priced_placement, step_of

ROWS = [r for r in rows_of("training") if r.file == "training.csv"]


@cache
def every() -> list[Outcome]:
    return marked("training", ROWS)


def scored() -> list[Outcome]:
    return [o for o in every() if o.error is not None and o.part == "report"]


def errors(chosen: list[Outcome]) -> np.ndarray:
    return np.array([abs(o.error or 0.0) for o in chosen])


def row(model: str, **cells: str) -> Row:
    found = next(r for r in ROWS if r.text("model") == model)
    return assumptions.apply("training", found.filled(cells))[0]


def test_at_least_450_rows_are_predicted_and_400_of_them_scored() -> None:
    assert sum(o.predicted is not None for o in every()) >= 450
    assert len(scored()) >= 400


def test_the_median_error_of_scored_rows_is_at_most_12_percent() -> None:
    assert np.median(errors(scored())) <= 0.12


def test_nine_in_ten_scored_rows_are_within_35_percent() -> None:
    assert np.percentile(errors(scored()), 90) <= 0.35


def test_the_median_publication_is_within_12_percent() -> None:
    names = {o.source for o in scored()}
    medians = [np.median(errors([o for o in scored() if o.source == name])) for name in names]
    assert np.median(medians) <= 0.12


def test_the_result_of_a_row_does_not_enter_its_prediction() -> None:
    base = row("LLAMA3_70B")
    changed = base.filled({"tokens_per_s_per_gpu": "1", "model_tflops_per_gpu": "1", "mfu_pct": "1"})
    before, after = outcomes([base])[0], outcomes([changed])[0]
    assert after.predicted == before.predicted
    assert after.measured != before.measured


def test_every_row_is_what_estimate_says_of_its_plan_file(tmp_path: Path) -> None:
    compared = refused = 0
    for r in rows_of("training"):
        filled = assumptions.apply("training", r)[0]
        try:
            it = job(filled)
        except Skip:
            continue
        if violation(it.setting.placement.backend, it.layout):  # FSDP with the optimizer alone on the host
            refused += 1
            continue
        workload, known = it.setting.workload, config_of(filled)
        if not isinstance(known, str):  # a user's model is its config.json
            path = tmp_path / "config.json"
            path.write_text(json.dumps(dict(known)), encoding="utf-8")
            workload = replace(workload, model=str(path))
        if not isinstance(known, str) or compared % 8 == 0:
            plan = estimate(it.setting.placement, workload, it.setting.cluster)
            write_plan(tmp_path / "plan.json", plan)
            plan = estimate_file(tmp_path / "plan.json")
            found = {phase.name: phase.seconds for phase in plan.prediction.phases}["actor.train"]
        else:
            asked = it.setting
            priced = priced_placement(asked.placement, asked.workload, asked.cluster)
            found = next(p.cost.seconds for p in step_of(priced).phases if p.name == "actor.train")
        assert found == outcomes([r])[0].predicted
        compared += 1
    assert compared >= 638
    assert refused <= 2


def test_variants_of_one_model_fall_in_one_part() -> None:
    parts: dict[tuple[str, str], set[str]] = {}
    for r in ROWS:
        key = (r.source.split("@")[0], r.text("model_config_key") or r.text("model") or "")
        parts.setdefault(key, set()).add(part_of("training", r))
    assert all(len(found) == 1 for found in parts.values())


def test_every_row_is_predicted_or_says_why_not() -> None:
    assert all((o.predicted is None) == (o.skipped is not None) for o in every())
    assert all(o.measured and o.measured > 0 for o in every() if o.predicted is not None)


def test_no_prediction_beats_the_peak_of_its_precision() -> None:
    for r in ROWS:
        filled, _ = assumptions.apply("training", r)
        try:
            it = job(filled)
        except Skip:
            continue
        peak = it.device.profile.peak[it.setting.workload.train_precision].value * it.layout.gpus
        flop = training_flop(it.model, it.sequences) * (2 / 3 if it.setting.workload.lora else 1)
        assert outcomes([r])[0].predicted > flop / peak  # type: ignore[operator]


def test_published_tokens_and_tflops_agree_with_our_flop_count() -> None:
    # Megatron-Bridge prints both; attention is causal there
    r = row("LLAMA3_70B")
    it = job(r)
    per_token = training_flop(it.model, it.sequences) / it.sequences.tokens
    printed = (r.number("model_tflops_per_gpu") or 0) * 1e12 / (r.number("tokens_per_s_per_gpu") or 1)
    assert printed == pytest.approx(per_token, rel=0.03)


def test_megatron_2021_prints_step_times_that_its_formula_returns() -> None:
    # arXiv 2104.04473 section 5.10: 1T parameters, 3072 GPUs, 163 TFLOP/s: 102 s a batch of 3072
    seconds, how = measured(row("GPT-1T"), job(row("GPT-1T")))
    assert seconds == pytest.approx(102, rel=0.03)
    assert "recomputation counted" in how


def test_a_shallower_proxy_has_fewer_layers() -> None:
    assert job(row("LLAMA3.1_405B", layers="7")).model.num_layers == 7


def test_recomputed_modules_are_read_from_the_cell() -> None:
    assert recomputed("selective: mla_up_proj, mlp") == ("mla_up_proj", "mlp")
    assert recomputed("full") == ()


def test_a_planted_efficiency_is_recovered() -> None:
    free = (Free(name="eta", value=0.8, low=0.5, high=1.3),)
    true = 0.6

    def residuals(values: object) -> tuple[np.ndarray, np.ndarray]:
        noise = np.random.default_rng(1).normal(0, 0.05, 200)
        return np.full(200, np.log(true / values[0])) + noise, np.ones(200)  # type: ignore[index]

    found = posterior(free, residuals, "test")["eta"]
    assert found.low < true < found.high
    assert found.value == pytest.approx(true, rel=0.03)


def test_a_fitted_value_replaces_the_old_one_and_keeps_its_prior() -> None:
    text = 'coefficients:\n  eta: {value: 0.8, low: 0.5, high: 1.0, source: "prior: guess"}\n'
    c = Coefficient(value=0.61, low=0.58, high=0.64, source="fitted, n=3")
    once = written(text, Free(name="eta", value=0.8, low=0.5, high=1.0), c)
    assert 'value: 0.61, low: 0.58, high: 0.64, source: "fitted, n=3 | prior: guess"' in once
    assert written(once, Free(name="eta", value=0.8, low=0.5, high=1.0), c) == once


@pytest.mark.parametrize(
    "cells",
    [
        {"model": "Mystery-MoE 40B"},
        {"model": "Mystery-30B-A3B"},
        {"model": "Mystery", "params_b": "100", "params_active_b": "10"},
        {"model": "Mystery", "ep": "8"},
    ],
)
def test_a_mixture_of_experts_without_a_known_shape_is_not_priced_as_dense(cells: dict[str, str]) -> None:
    values = {"layers": "32", "hidden": "4096", "heads": "32", **cells}
    row = Row(table="training", file="t.csv", line=2, values=values)
    with pytest.raises(RlhfsimError, match="no shape of model Mystery"):
        model_of(row)
    dense = {"layers": "32", "hidden": "4096", "heads": "32", "model": "Mystery 6B"}
    assert model_of(Row(table="training", file="t.csv", line=2, values=dense)).moe is None
