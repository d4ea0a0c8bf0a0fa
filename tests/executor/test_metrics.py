from __future__ import annotations

import json
import logging
import math
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest

from executor.algorithms.iteration import Learned
from executor.coordination import sample_log
from executor.coordination.metrics import (
    critical_share,
    engine_metrics,
    iteration_metrics,
    memory,
    sample_metrics,
    throughput,
    times,
)
from executor.coordination.tracking import MetricsFile, Trackers, open_trackers, read_metrics
from executor.samples import Sample
from executor.settings import Tracking
from rlhfsim.errors import RlhfsimError
from rlhfsim.trace import Span


def sample(reward: float | None = None, tokens: int = 2, **fields: object) -> Sample:
    return Sample(
        id=0,
        group=0,
        prompt=np.zeros(3, np.int64),
        response=np.zeros(tokens, np.int64),
        reward=reward,
        **fields,
    )  # type: ignore[arg-type]


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def span(name: str, start: float, end: float, group: str, step: int = 0, kind: str = "train") -> Span:
    return Span(
        name=name,
        role="actor",
        kind=kind,
        pool="main",
        group=group,
        step=step,
        start_s=start,
        end_s=end,
        bound_by="measured",
    )


def test_rewards_have_mean_spread_and_ends() -> None:
    row = sample_metrics([sample(1.0), sample(0.0), sample(0.5), sample(None)], 0)
    assert row["reward/mean"] == 0.5
    assert row["reward/std"] == pytest.approx(np.std([1, 0, 0.5]))
    assert (row["reward/min"], row["reward/max"]) == (0, 1)


def test_lengths_count_response_tokens_and_the_share_that_was_cut() -> None:
    row = sample_metrics([sample(tokens=4, finish="length"), sample(tokens=2)], 0)
    assert row["response/length_mean"] == 3
    assert row["response/length_max"] == 4
    assert row["response/truncated"] == 0.5


def test_staleness_counts_from_the_oldest_token() -> None:
    versions = np.array([3, 5], np.int32)
    row = sample_metrics([sample(versions=versions), sample(versions=versions + 2)], 7)
    assert (row["staleness/mean"], row["staleness/max"]) == (3, 4)


def test_kl_is_k3_over_tokens_and_its_max_that_of_one_sample() -> None:
    far = sample(old_logprobs=floats(-1, -1), reference_logprobs=floats(-2, -2))
    near = sample(tokens=6, old_logprobs=floats(*[-1] * 6), reference_logprobs=floats(*[-1] * 6))
    row = sample_metrics([far, near], 0)
    one = np.exp(-1) - 1 + 1
    assert row["kl/mean"] == pytest.approx(one * 2 / 8)
    assert row["kl/max"] == pytest.approx(one)


def test_kl_uses_rollout_logprobs_where_nothing_was_recomputed() -> None:
    row = sample_metrics([sample(rollout_logprobs=floats(-1, -1), reference_logprobs=floats(-1, -1))], 0)
    assert row["kl/mean"] == 0


def test_mismatch_is_between_rollout_and_training_engine() -> None:
    row = sample_metrics([sample(rollout_logprobs=floats(-1.0, -2.0), old_logprobs=floats(-1.1, -1.7))], 0)
    assert row["mismatch/mean_abs_dlogp"] == pytest.approx(0.2, rel=1e-5)
    assert row["mismatch/max_abs_dlogp"] == pytest.approx(0.3, rel=1e-5)
    gaps = np.array([0.1, -0.3])
    assert row["mismatch/kl"] == pytest.approx(float(np.mean(np.exp(-gaps) - 1 + gaps)), rel=1e-4)


def test_tokens_of_older_weights_are_no_mismatch() -> None:
    logprobs = {"rollout_logprobs": floats(-1.0, -2.0), "old_logprobs": floats(-1.1, -3.0)}
    mixed = sample_metrics([sample(**logprobs, versions=np.array([5, 4], np.int32))], 5)
    assert mixed["mismatch/max_abs_dlogp"] == pytest.approx(0.1, rel=1e-5)
    assert mixed["staleness/mean_abs_dlogp"] == pytest.approx(1.0, rel=1e-5)
    old = sample_metrics([sample(**logprobs, versions=np.array([4, 4], np.int32))], 5)
    assert not [name for name in old if name.startswith("mismatch")]
    assert old["staleness/mean_abs_dlogp"] == pytest.approx(0.55, rel=1e-5)


def test_tiny_mismatch_is_not_lost_in_rounding() -> None:
    row = sample_metrics([sample(rollout_logprobs=floats(0.0, 0.0), old_logprobs=floats(1e-5, -1e-5))], 0)
    assert row["mismatch/kl"] == pytest.approx(5e-11, rel=1e-3)


def test_explained_variance_is_one_for_a_perfect_critic_and_absent_where_returns_are_equal() -> None:
    right = sample_metrics([sample(returns=floats(0, 1), values=floats(0, 1))], 0)
    assert right["value/explained_var"] == pytest.approx(1)
    mean = sample_metrics([sample(returns=floats(0, 1), values=floats(0.5, 0.5))], 0)
    assert mean["value/explained_var"] == pytest.approx(0)
    assert "value/explained_var" not in sample_metrics([sample(returns=floats(1, 1), values=floats(0, 1))], 0)


def test_what_was_not_measured_has_no_entry() -> None:
    assert set(sample_metrics([sample()], 0)) == {
        "response/length_mean",
        "response/length_max",
        "response/truncated",
    }
    assert sample_metrics([], 0) == {}
    assert memory([]) == {}


def test_a_response_without_tokens_disturbs_nothing() -> None:
    empty = sample(
        tokens=0,
        old_logprobs=floats(),
        rollout_logprobs=floats(),
        reference_logprobs=floats(),
        versions=np.zeros(0, np.int32),
    )
    row = sample_metrics([empty], 0)
    assert row["response/length_mean"] == 0
    assert not [name for name in row if name.startswith(("kl", "mismatch", "staleness"))]


def test_engine_metrics_are_means_over_optimizer_steps_under_the_name_of_the_role() -> None:
    steps = [{"policy/loss": 1.0, "grad_norm": 2.0}, {"policy/loss": 3.0, "grad_norm": 4.0}]
    assert engine_metrics("actor", steps) == {"policy/loss": 2.0, "policy/grad_norm": 3.0}
    assert engine_metrics("critic", [{"grad_norm": 1.0}]) == {"value/grad_norm": 1.0}


def test_one_step_that_is_not_a_number_makes_the_mean_none() -> None:
    assert np.isnan(engine_metrics("actor", [{"loss": 1.0}, {"loss": float("nan")}])["policy/loss"])


def test_throughput_counts_prompts_and_responses() -> None:
    row = throughput([sample(tokens=2), sample(tokens=4)], 2.0)
    assert row == {"throughput/tokens_per_sec": 6.0, "throughput/samples_per_sec": 1.0}


def test_memory_is_that_of_the_fullest_device_and_node() -> None:
    readings = [
        ("a", {"allocated": 1e9, "peak": 5e9, "device_peak": 8e9, "host": 1e9, "host_peak": 2e9}),
        ("a", {"allocated": 3e9, "peak": 3e9, "device_peak": 8e9, "host": 1e9, "host_peak": 2e9}),
        ("b", {"allocated": 2e9, "peak": 2e9, "device_peak": 9e9, "host": 3e9, "host_peak": 3e9}),
    ]
    expected = {"memory/peak_gb": 9.0, "memory/allocated_gb": 5.0, "memory/host_gb": 4.0}
    assert memory(readings) == expected, "what was taken at most counts, not what a call leaves"


def test_the_time_of_a_phase_is_that_of_its_slowest_group() -> None:
    spans = [
        span("actor.generate", 0, 2, "replica 0"),
        span("actor.generate", 3, 4, "replica 0"),
        span("actor.generate", 0, 2.5, "replica 1"),
        span("actor.generate", 0, 9, "replica 1", step=1),
        span("idle", 0, 9, "all", kind="wait"),
    ]
    assert times(spans, 0) == {"time/actor.generate": 3.0}


def test_rules_are_critical_only_where_nothing_else_works() -> None:
    rules = replace(span("rules.score", 4, 8, "all", kind="score"), role="rules")
    spans = [
        span("actor.generate", 0, 5, "r", kind="generate"),
        rules,
        span("reference.logprob", 5, 6.5, "t"),
    ]
    assert critical_share(spans, 0, 10.0) == pytest.approx({"reward/critical_share": 0.15})
    assert critical_share(spans[:1], 0, 10.0) == {}


def test_a_row_has_all_parts_and_what_the_samples_say_comes_first() -> None:
    samples = [sample(1.0, old_logprobs=floats(-1, -1), reference_logprobs=floats(-1, -1))]
    learned = Learned(step=0, samples=tuple(samples), actor=({"kl/mean": 0.5, "policy/loss": 1.0},))
    row = iteration_metrics(
        learned, 2.0, [span("actor.train", 0, 1, "rank 0")], [("a", {"allocated": 1e9, "host": 1e9})]
    )
    assert row["kl/mean"] == 0
    assert {
        "policy/loss",
        "time/actor.train",
        "time/step",
        "memory/host_gb",
        "throughput/tokens_per_sec",
    } <= set(row)


# --- files ------------------------------------------------------------------------------------------


def test_lines_are_on_disk_before_the_file_is_closed(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.log(0, {"reward/mean": 0.5})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 0, "iteration": 1, "reward/mean": 0.5}]
    file.close()


def test_lines_that_no_parser_reads_are_left_out(tmp_path: Path) -> None:
    whole = '{"step": 1, "a": 2}'
    bad = ["[" * 100_000, '{"step": 1e999}', '{"step": [1]}', "7", '{"step": 2, "nonfinite": {"a": []}}', "{"]
    (tmp_path / "lines.jsonl").write_text("\n".join([*bad[:3], whole, *bad[3:]]))
    assert [row["a"] for row in read_metrics(tmp_path / "lines.jsonl") if "a" in row] == [2]
    assert [line["a"] for line in sample_log.read(tmp_path / "lines.jsonl") if "a" in line] == [2]


def test_lines_that_a_power_failure_took_come_back_from_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0, "iteration": 1, "loss": 2.0}\n{"step": 1, "iter')
    file = MetricsFile(path, first_step=2, rows=[{"loss": 2.0}, {"loss": math.inf}])
    file.log(2, {"loss": 1.0})
    file.close()
    assert [(row["step"], row["iteration"], row["loss"]) for row in read_metrics(path)] == [
        (0, 1, 2.0),
        (1, 2, math.inf),
        (2, 3, 1.0),
    ]


def test_a_resumed_run_writes_no_step_twice(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path)
    for step in range(5):
        file.log(step, {"a": 1.0})
    file.close()
    with path.open("a") as torn:
        torn.write('{"step": 5, "a"')
    again = MetricsFile(path, first_step=3)
    for step in (3, 4):
        again.log(step, {"a": 2.0})
    again.close()
    assert [(row["step"], row["a"]) for row in read_metrics(path)] == [
        (0, 1.0),
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
        (4, 2.0),
    ]


def test_values_that_are_not_finite_survive_in_lines_that_are_json(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path)
    file.log(0, {"policy/loss": float("nan"), "kl/mean": float("-inf"), "a": 1.0})
    file.close()
    plain = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert plain["policy/loss"] is None
    (row,) = read_metrics(path)
    assert np.isnan(row["policy/loss"])
    assert (row["kl/mean"], row["a"]) == (float("-inf"), 1.0)


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path)
    file.close()
    file._file = Path("/dev/full").open("a")  # noqa: SIM115  # closed by the failing flush's owner
    with pytest.raises(RlhfsimError, match="no space left on device"):
        file.log(0, {"a": 1.0})


def test_tensorboard_files_hold_every_metric(tmp_path: Path) -> None:
    trackers = open_trackers(Tracking(), tmp_path / "m.jsonl", tmp_path / "tb", first_step=3)
    trackers.log(3, {"reward/mean": 0.5, "kl/max": 2.0})
    trackers.close()
    from tensorboardX.proto.event_pb2 import Event

    (path,) = (tmp_path / "tb").iterdir()
    data, found = path.read_bytes(), {}
    while data:  # TFRecord: length (8), checksum (4), message, checksum (4)
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        found |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
        data = data[16 + size :]
    assert found == {"reward/mean": (4, 0.5), "kl/max": (4, 2.0)}


@pytest.mark.parametrize(
    ("tracking", "words"),
    [
        (Tracking(tensorboard=False, wandb_project="p"), "needs wandb, not installed"),
        (Tracking(tensorboard=False, mlflow_experiment="e"), "needs mlflow, not installed"),
        (Tracking(), "needs tensorboardX, not installed"),
    ],
)
def test_a_service_without_its_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracking: Tracking, words: str
) -> None:
    for name in ("wandb", "mlflow", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RlhfsimError, match=words) as caught:
        open_trackers(tracking, tmp_path / "m.jsonl", tmp_path / "tb")
    assert "pip install 'rlhfsim[" in str(caught.value.help)


def test_services_get_every_row_and_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    wandb_run = types.SimpleNamespace(
        log=lambda row, step: calls.append(("wandb", step, row)), finish=lambda: calls.append(("wandb end",))
    )
    wandb = types.SimpleNamespace(
        __spec__=ModuleSpec("wandb", None),
        init=lambda **f: calls.append(("init", f["project"], f["id"], f["config"])) or wandb_run,
        Table=lambda columns, data: data,
    )
    mlflow = types.SimpleNamespace(
        __spec__=ModuleSpec("mlflow", None),
        set_experiment=lambda name: calls.append(("experiment", name)),
        start_run=lambda **f: (
            calls.append(("start", f)) or types.SimpleNamespace(info=types.SimpleNamespace(run_id="m1"))
        ),
        log_dict=lambda row, name: calls.append((name, row)),
        log_text=lambda text, name: calls.append((name, text)),
        log_params=lambda row: calls.append(("params", row)),
        log_metrics=lambda row, step: calls.append(("mlflow", step, row)),
        end_run=lambda: calls.append(("mlflow end",)),
        active_run=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    tracking = Tracking(tensorboard=False, wandb_project="p", mlflow_experiment="e")
    config = {"settings": {"optimizer": {"lr": 1}}, "plan": {}}
    line = {"part": "training", "response": "2", "reward": 1.0}
    ids = []
    for folder in ("one", "two", "one"):
        (tmp_path / folder).mkdir(exist_ok=True)
        calls.clear()
        trackers = open_trackers(tracking, tmp_path / folder / "m.jsonl", tmp_path / "tb", config=config)
        trackers.log(4, {"a": 1.0})
        trackers.show(4, [line])
        trackers.close()
        ids.append(calls[0][2])
        started = {"run_id": "m1"} if len(ids) == 3 else {"run_name": folder}
        fresh = [("config.json", config), ("params", {"optimizer.lr": "1"})] if len(ids) < 3 else []
        assert calls == [
            ("init", "p", ids[-1], config),
            ("experiment", "e"),
            ("start", started),
            *fresh,
            ("wandb", 5, {"a": 1.0}),
            ("mlflow", 5, {"a": 1.0}),
            ("wandb", 4, {"samples/training": [["training", "2", 1.0]]}),
            ("samples/training-000004.jsonl", json.dumps(line) + "\n"),
            ("wandb end",),
            ("mlflow end",),
        ]
    assert ids[0] == ids[2] != ids[1], "a run has an id of its own, and goes on under it"


class StrictMlflow:
    """As MLflow 3.9 is: refuses names with other signs, and a run beside one that has not ended."""

    __spec__ = ModuleSpec("mlflow", None)

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.active: str | None = None
        self.down = False

    def set_experiment(self, name: str) -> None:
        if self.down:
            raise ConnectionError("no route to host\nmore")

    def active_run(self) -> str | None:
        return self.active

    def start_run(self, **_: str) -> types.SimpleNamespace:
        if self.active:
            raise Exception(f"Run with UUID {self.active} is already active")
        self.active = "m1"
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="m1"))

    def end_run(self) -> None:
        self.active = None

    def log_dict(self, *_: object) -> None: ...

    def log_params(self, *_: object) -> None: ...

    def log_metrics(self, row: dict[str, float], step: int) -> None:
        if any(re.search(r"[^\w\-. :/]", name) for name in row):
            raise ValueError("Names may only contain alphanumerics")
        self.metrics |= row


def test_mlflow_gets_names_that_it_takes_and_a_restarted_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = StrictMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    tracking = Tracking(tensorboard=False, mlflow_experiment="e")
    for step in range(2):  # the first attempt ends without closing anything
        trackers = open_trackers(tracking, tmp_path / "m.jsonl", tmp_path / "tb", first_step=step)
        trackers.log(step, {"evaluation/pass@4": 0.5 + step, "reward/format#2": 1.0})
    assert mlflow.metrics == {"evaluation/pass_4": 1.5, "reward/format_2": 1.0}
    assert [set(row) - {"step", "iteration"} for row in read_metrics(tmp_path / "m.jsonl")] == [
        {"evaluation/pass@4", "reward/format#2"}
    ] * 2


def test_a_service_that_cannot_be_opened_ends_a_new_run_and_no_resumed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = StrictMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    tracking = Tracking(tensorboard=False, mlflow_experiment="e")
    mlflow.down = True
    with pytest.raises(RlhfsimError, match=r"MLflow cannot be opened: no route to host\nhelp") as caught:
        open_trackers(tracking, tmp_path / "m.jsonl", tmp_path / "tb")
    assert caught.value.code == "tracking-service"
    mlflow.down = False
    open_trackers(tracking, tmp_path / "m.jsonl", tmp_path / "tb").close()
    mlflow.down = True
    open_trackers(tracking, tmp_path / "m.jsonl", tmp_path / "tb", first_step=1).log(1, {"a": 1.0})
    assert mlflow.metrics == {}


def test_a_service_that_fails_is_said_once_and_the_file_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Down:
        name = "Down"

        def log(self, step: int, row: Mapping[str, float]) -> None:
            raise ConnectionError("no route")

        def close(self) -> None:
            raise AssertionError

    trackers = Trackers(MetricsFile(tmp_path / "m.jsonl"), [Down()])
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            trackers.log(step, {"a": 1.0})
    trackers.close()
    assert len(read_metrics(tmp_path / "m.jsonl")) == 3
    assert caplog.text.count("no route") == 1
