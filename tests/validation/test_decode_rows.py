"""Measured serving points: reading, correction, split, exclusion, and the error that is reported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.decode import kind as decode
from lab.decode.load import conflicts, impossible, load, misfits, predicted, utilisation
from lab.decode.points import Serving, corrected, installed, servings, skip_reason
from lab.scoreboard.rows import rows_of
from rlhfsim.validation.assumptions import apply
from rlhfsim.validation.kinds import inference
from rlhfsim.validation.rows import Row

needs_rows = pytest.mark.skipif(installed() is None, reason="development package not installed")
POINT = Serving(
    id="a",
    line=2,
    engine="vllm",
    version="0.19.0",
    model="Qwen/Qwen3-32B",
    system="h100_sxm",
    isl=1024,
    osl=1024,
    batch=16,
    tp=2,
    attention_dp=1,
    moe_tp=1,
    ep=1,
    gemm="fp8",
    experts="",
    precision="fp8",
    family="sweep",
    tpot=0.015,
    ttft=0.1,
)


def test_layout_columns_that_multiply_tp_and_ep_are_read_as_one_node():
    assert corrected(64, 1, 8, 8)[:4] == (8, 1, 1, 8)
    assert corrected(1, 64, 8, 8)[:4] == (1, 8, 1, 8)
    assert corrected(4, 4, 1, 16)[:4] == (4, 1, 1, 4)
    assert corrected(8, 1, 1, 8) == (8, 1, 1, 8, ())
    assert corrected(4, 1, 2, 2) == (4, 1, 2, 2, ())


def test_the_split_is_by_model_and_system():
    assert not POINT.fitted  # md5 of Qwen/Qwen3-32B|h100_sxm is odd
    assert replace(POINT, isl=1, batch=1, tp=8).fitted == POINT.fitted
    for model, gemm in (
        ("Qwen/Qwen3.5-397B-A17B", "fp8"),
        ("zhipuai/GLM-5", "fp8"),
        ("Qwen/Qwen3-32B", "nvfp4"),
    ):
        later = [
            replace(POINT, model=model, gemm=gemm, system=s) for s in ("h100_sxm", "h200_sxm", "b200_sxm")
        ]
        assert [p.fitted for p in later] == [False] * 3  # priced since the fit
    systems = ("h100_sxm", "h200_sxm", "b200_sxm", "b300_sxm", "gb200")
    assert {replace(POINT, system=s).fitted for s in systems} == {True, False}


def test_what_has_no_kernels_is_skipped_with_a_reason():
    assert skip_reason(POINT) is None
    assert "int4" in (skip_reason(replace(POINT, gemm="int4_wo")) or "")
    assert "int4_wo experts" in (skip_reason(replace(POINT, experts="int4_wo")) or "")


def test_twins_that_contradict_each_other_are_left_out():
    near, far = replace(POINT, id="b", tpot=0.018), replace(POINT, id="c", tpot=0.025)
    assert conflicts([POINT, near]) == {}
    assert set(conflicts([POINT, far])) == {"a", "c"}
    assert conflicts([POINT, replace(far, batch=32)]) == {}


def test_a_sweep_beyond_the_peak_is_left_out_as_a_whole():
    quick = replace(POINT, id="q", batch=512, osl=100, isl=8000, tpot=0.01, ttft=0.1)
    assert utilisation(quick) > 1
    assert set(impossible([POINT, quick])) == {"a", "q"}
    assert impossible([POINT]) == {}


def test_weights_beyond_the_memory_are_left_out():
    large = replace(POINT, model="Qwen/Qwen3-235B-A22B-FP8", tp=1)
    assert set(misfits([POINT, large])) == {"a"}
    assert misfits([POINT, replace(large, tp=8, ep=8)]) == {}


def test_requests_beyond_the_kv_cache_wait():
    isl, osl, running = load(replace(POINT, batch=512, isl=8192))
    assert (isl, osl) == (8192, 1024)
    assert 1 < running < 100
    assert load(replace(POINT, batch=4))[2] == 4
    assert load(replace(POINT, family="inferencemax"))[0] == pytest.approx(0.9 * 1024)


def test_predicted_time_grows_with_batch_and_falls_with_tp():
    times = [predicted(replace(POINT, batch=b)) for b in (1, 16, 128)]
    assert times == sorted(times)
    assert predicted(replace(POINT, tp=8)) < predicted(POINT)


@needs_rows
def test_every_row_is_predicted_or_skipped_with_a_reason():
    found = decode.outcomes([])
    assert len(found) == len(servings()) == 3619
    assert all((o.predicted is None) == (o.skipped is not None) for o in found)
    assert {o.part for o in found} == {"fit", "report"}


@needs_rows
def test_reported_rows_are_within_the_target():
    known = [o for o in decode.outcomes([]) if o.part == "report" and o.error is not None]
    reported = [o for o in known if o.kind == "decode"]
    errors = np.abs([o.error for o in reported if o.error is not None])
    assert len(errors) > 900
    assert np.median(errors) <= 0.12
    peer = [abs(float(o.detail["peer_error"])) for o in reported if "peer_error" in o.detail]
    assert np.median(errors) < np.median(peer)
    later = [(o.error or 0.0, o.detail.get("peer_error")) for o in known if o.kind == "decode.later"]
    assert len(later) > 1500
    assert np.median(np.abs([ours for ours, _ in later])) < 0.17
    both = np.abs([(ours, float(theirs)) for ours, theirs in later if theirs is not None])
    assert np.median(both[:, 0]) < np.median(both[:, 1])


def test_inference_rows_say_what_is_missing():
    found = inference.outcomes(rows_of("inference"))
    assert sum(o.predicted is not None for o in found) > 100
    assert all(o.skipped for o in found if o.predicted is None)


def test_published_throughput_is_met_within_a_third_in_the_median():
    errors = [o.error for o in inference.outcomes(rows_of("inference")) if o.error is not None]
    assert np.median(np.abs(errors)) < 0.33


def rows_of_trtllm() -> list[Row]:
    return [row for row in rows_of("inference") if (row.text("engine") or "").startswith("TensorRT-LLM v1")]


def test_moe_models_of_tensorrt_llm_run_as_the_command_of_their_page_says():
    [row] = [
        apply("inference", row)[0]
        for row in rows_of_trtllm()
        if (row.text("model"), row.text("gpu_type")) == ("Qwen3-235B-A22B", "H200")
        and (row.text("input_len"), row.text("output_len")) == ("128", "2048")
    ]
    job = inference.job_of(row)
    assert (job.layout.tp, job.layout.attention_dp, job.layout.ep) == (1, 8, 8)
    # 0.95 of what is free after weights of 30 GB on 141 GB: more of the memory than vLLM's 0.9 of all
    assert 0.95 < job.layout.memory_utilization < 1.0
    dense = next(
        row
        for row in rows_of_trtllm()
        if row.text("model") == "Llama 3.1 405B" and row.text("precision") == "fp8"
    )
    assert inference.job_of(apply("inference", dense)[0]).layout.attention_dp == 1


@pytest.mark.parametrize(
    ("moe", "four_bit", "most", "bias"),
    [
        (True, False, 0.15, 0.05),
        (False, False, 0.10, 0.08),
        (True, True, 0.27, 0.27),
        (False, True, 0.11, 0.11),
    ],
)
def test_throughput_of_an_engine_with_tables_of_its_own(
    moe: bool, four_bit: bool, most: float, bias: float
) -> None:
    rows = [row for row in rows_of_trtllm() if (row.text("precision") == "fp4") == four_bit]
    found = [outcome for row in rows if (outcome := inference.outcomes([row])[0]).predicted]
    errors = [
        outcome.predicted / outcome.measured - 1
        for outcome in found
        if any(name in outcome.label for name in ("Scout", "A22B", "A3B")) == moe
    ]
    assert len(errors) >= 35
    assert np.median(np.abs(errors)) < most
    assert abs(np.median(errors)) < bias
