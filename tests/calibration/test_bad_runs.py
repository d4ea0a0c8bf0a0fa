"""Runs that cannot be trusted: a clear error, or left out by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planted_plans import plan, run_folder

from rlhfsim.calibration.fit import calibrate
from rlhfsim.calibration.observation import read_run
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import write_plan

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder(tmp_path_factory.mktemp("runs") / "good", plan(gpus=4), {"controller_time": 2.0})


@pytest.fixture
def run(good: Path, tmp_path: Path) -> Path:
    """A copy of a good run, to be spoilt."""
    return Path(shutil.copytree(good, tmp_path / "run"))


def spoil(run: Path, change: Change) -> None:
    data = json.loads((run / "trace.json").read_text())
    change(data)
    (run / "trace.json").write_text(json.dumps(data))


def refused(run: Path) -> RlhfsimError:
    with pytest.raises(RlhfsimError) as caught:
        read_run(run)
    assert caught.value.help
    return caught.value


def test_a_good_run_is_read(good: Path) -> None:
    seen = read_run(good)
    assert seen.name == "good"
    assert seen.steps == 3
    assert seen.versions == {"vllm": "0.11.0"}
    assert seen.device == "2 x H100"
    assert seen.response_tokens == 1000
    assert seen.left_out == ("step 0: the first step, which also warms up",)


@pytest.mark.parametrize("missing", ["plan.json", "trace.json"])
def test_a_folder_without_plan_or_trace_is_no_run(run: Path, missing: str) -> None:
    (run / missing).unlink()
    error = refused(run)
    assert error.code == "not-a-run"
    assert missing in error.message


def test_a_folder_that_does_not_exist_is_no_run(tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere").code == "not-a-run"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_trace_is_refused_with_its_place(run: Path, share: float) -> None:
    text = (run / "trace.json").read_text()
    (run / "trace.json").write_text(text[: int(share * len(text))])
    error = refused(run)
    assert error.place is not None
    assert error.place.file.endswith("trace.json")


def test_a_trace_without_spans_is_refused(run: Path) -> None:
    spoil(run, lambda data: data.update(spans=[]))
    assert refused(run).code == "empty-trace"


def test_a_run_of_another_plan_is_refused(run: Path) -> None:
    write_plan(run / "plan.json", plan(gpus=4, prompts=128))
    assert refused(run).code == "another-plan"


def test_a_simulated_trace_is_refused(run: Path) -> None:
    spoil(run, lambda data: data.update(source="predicted"))
    assert refused(run).code == "trace-not-measured"


def test_two_traces_joined_are_refused(run: Path) -> None:
    def join(data: dict[str, Any]) -> None:
        data["spans"] += [{**span, "step": span["step"] + data["steps"]} for span in data["spans"]]

    spoil(run, join)
    assert refused(run).code == "clock-goes-back"


def test_a_trace_of_other_pools_is_refused(run: Path) -> None:
    spoil(run, lambda data: [span.update(pool="elsewhere") for span in data["spans"][:1]])
    error = refused(run)
    assert error.code == "foreign-trace"
    assert "elsewhere" in error.message


@pytest.mark.parametrize("format", [{"traceEvents": []}, [], {"schema": "rlhfsim.trace/99"}, {}])
def test_a_file_of_another_format_is_refused(run: Path, format: object) -> None:
    (run / "trace.json").write_text(json.dumps(format))
    assert refused(run).place is not None


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1e999", '"soon"', "null"])
def test_a_time_that_is_no_number_is_refused(run: Path, value: str) -> None:
    text = (run / "trace.json").read_text()
    at = text.index('"end_s":') + len('"end_s":')
    end = min(i for i in (text.find(",", at), text.find("}", at)) if i > 0)
    (run / "trace.json").write_text(text[:at] + value + text[end:])
    refused(run)


def test_a_negative_span_is_refused(run: Path) -> None:
    spoil(run, lambda data: data["spans"][3].update(start_s=data["spans"][3]["end_s"] + 5))
    refused(run)


def test_a_span_before_the_start_is_refused(run: Path) -> None:
    spoil(run, lambda data: data["spans"][0].update(start_s=-3.0))
    assert refused(run).code == "bad-value"


def shifted(data: dict[str, Any], step: int, seconds: float) -> None:
    """A clock that was set by so much when `step` began."""
    for span in data["spans"]:
        if span["step"] >= step:
            span["start_s"] += seconds
            span["end_s"] += seconds


def test_a_clock_set_back_leaves_out_the_steps_around_it_by_name(run: Path) -> None:
    spoil(run, lambda data: shifted(data, 2, -5.0))
    seen = read_run(run)
    assert seen.counted == (3,)
    assert sum("clock was set back" in text for text in seen.left_out) == 2


def test_a_clock_set_forward_within_a_step_leaves_it_out_by_name(run: Path) -> None:
    def jump(data: dict[str, Any]) -> None:
        shifted(data, 3, 1e5)
        last = max((s for s in data["spans"] if s["step"] == 2), key=lambda s: s["end_s"])
        last["end_s"] += 1e5

    spoil(run, jump)
    seen = read_run(run)
    assert 2 not in seen.counted
    assert any("the clock was set" in text for text in seen.left_out)


def test_a_step_with_a_failed_call_is_left_out_by_name(run: Path) -> None:
    spoil(run, lambda data: data["spans"][-1].update(attributes={"failed": "out of memory"}))
    seen = read_run(run)
    assert len(seen.counted) == 2
    assert any("failed (out of memory)" in text for text in seen.left_out)


def test_a_run_in_which_no_step_counts_is_refused(run: Path) -> None:
    spoil(run, lambda data: [span.update(attributes={"failed": "x"}) for span in data["spans"]])
    assert refused(run).code == "no-step-counts"


def test_broken_lines_of_metrics_are_counted_and_passed_over(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "time/st\nnot json\n{"step": "x"}\n')
    assert any("3 lines of metrics.jsonl are not whole" in text for text in read_run(run).left_out)


def test_without_metrics_it_is_said_where_lengths_come_from(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    seen = read_run(run)
    assert seen.response_tokens is None
    assert any("metrics.jsonl is missing" in text for text in seen.left_out)


@pytest.mark.parametrize("value", [float("nan"), -5.0, True, "long", 1e400])
def test_a_length_that_is_no_length_is_not_believed(run: Path, value: object) -> None:
    rows = [{"step": i, "response/length_mean": value} for i in range(4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = calibrate([read_run(run)], errors=False)
    assert found.coefficients


def test_a_run_of_two_kinds_of_gpus_needs_a_profile(good: Path) -> None:
    seen = read_run(good)
    both = (
        replace(seen.plan.hardware[0], profile="a100_sxm"),
        replace(seen.plan.hardware[0], profile="h200_sxm"),
    )
    with pytest.raises(RlhfsimError, match="several profiles: a100_sxm, h200_sxm"):
        calibrate([replace(seen, plan=replace(seen.plan, hardware=both))])
