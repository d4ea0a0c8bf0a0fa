"""`rlhfsim launch`: dry runs, settings from the command line, what it says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import runs

from executor.coordination.run_folder import RunFiles
from executor.launch import LaunchOptions
from executor.settings import Settings
from rlhfsim.api import estimate_file
from rlhfsim.calibration.comparison.phases import rows, warm
from rlhfsim.calibration.observation import phase_seconds
from rlhfsim.cli import launch as launch_module
from rlhfsim.cli.launch import scaled, settings_of
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import write_plan
from rlhfsim.present.answers import launch as launch_view
from rlhfsim.present.answers.tree import TypedTable
from rlhfsim.present.terminal.launch import _cell
from rlhfsim.specs.frameworks.runs import OWN, framework
from rlhfsim.specs.scenario import system_names
from rlhfsim.trace import Span, Trace


def test_a_setting_on_the_command_line_replaces_one_value() -> None:
    found = settings_of(None, ("optimizer.learning_rate=1e-4", "data.task=logic", "iterations=7"))
    assert found.optimizer.learning_rate == 1e-4
    assert found.data.task == "logic"
    assert found.iterations == 7
    assert found.sampling == Settings().sampling


def test_a_section_that_is_left_out_begins_with_a_setting_of_it_in_any_order() -> None:
    pairs = ("environment.options.numbers=5", "environment.on_error=drop", "environment.kind=guess")
    found = settings_of(None, pairs).environment
    assert found is not None
    assert (found.kind, found.on_error, found.options) == ("guess", "drop", {"numbers": 5})
    with pytest.raises(RlhfsimError, match=r"'environment\.kind' is missing"):
        settings_of(None, ("environment.on_error=drop",))


@pytest.mark.parametrize(
    "pair",
    [
        "environment.knd=guess",
        "nosuch.key=1",
        "data.path.x=1",
        "optimizer.rate=1",
        "iterations",
        "optimizer.learning_rate=-1",
        "optimizer.learning_rate=1e30",
        "sampling.temperature=0.001",
        "limits.call_s=1e30",
        "limits.call_s=0",
        "reward_model_weight=1e30",
        "iterations=10000000000",
        "seed=-1",
        "data.task=poems",
    ],
)
def test_a_bad_setting_is_refused(pair: str) -> None:
    with pytest.raises(RlhfsimError):
        settings_of(None, (pair,))


@pytest.mark.parametrize("system", system_names())
def test_every_system_scales_to_two_slots_keeps_its_way_and_says_what_it_replaced(
    system: str, tmp_path: Path
) -> None:
    large, (small, changes) = estimate_file(system), scaled(system, 2, tmp_path / "run")
    told = {change.field: change for change in changes}
    assert len(told) == len(changes)
    for field in ("backend", "weight_path"):
        before, now = (getattr(plan.placement, field) for plan in (large, small))
        assert before == now or (told[f"placement.{field}"].before, told[f"placement.{field}"].now) == (
            before,
            now,
        )
    assert small.placement.backend in framework(OWN).trainers
    assert small.placement.schedule == large.placement.schedule
    assert set(small.placement.roles) == set(large.placement.roles)
    assert sum(pool.gpus for pool in small.placement.pools) <= 3
    assert len(small.placement.pools) == len(large.placement.pools)
    assert {"devices", "workload.model", "workload.response_len", "training precision"} <= set(told)
    assert all(change.before != change.now and change.why for change in changes)
    refusal = framework(OWN).lacks(small.placement, small.workload, small.topology, one_node=True)
    assert not list(refusal)


def test_fsdp2_stays_fsdp2_and_megatron_is_replaced_aloud(tmp_path: Path) -> None:
    verl, changes = scaled("verl", 2, tmp_path / "run")
    assert verl.placement.backend == "fsdp2"
    assert verl.placement.actor.layout.zero == 3
    assert "placement.backend" not in {change.field for change in changes}
    slime, changes = scaled("slime", 2, tmp_path / "run")
    assert slime.placement.backend == "deepspeed"
    [change] = [change for change in changes if change.field == "placement.backend"]
    assert (change.before, change.now) == ("megatron", "deepspeed")
    shown = launch_view.replaced_data(changes)
    assert {
        "field": "placement.backend",
        "before": "megatron",
        "now": "deepspeed",
        "why": change.why,
    } in shown
    about = launch_view.before(slime, dry_run=True, told=(), changes=changes)
    [table] = (b for b in about if isinstance(b, TypedTable) and b.columns[0].title == "field")
    assert len(table.rows) == len(changes)


def test_measured_phases_take_the_busiest_group_of_each_step() -> None:
    def span(group: str, step: int, start: float, end: float) -> Span:
        return Span(
            name="actor.train",
            role="actor",
            kind="train",
            pool="all",
            group=group,
            step=step,
            start_s=start,
            end_s=end,
            bound_by="measured",
        )

    spans = (
        span("rank 0", 0, 0, 1),
        span("rank 1", 0, 0, 3),
        span("rank 0", 1, 4, 5),
        span("rank 0", 1, 5, 7),
    )
    trace = Trace(source="measured", rlhfsim_version="0", plan_hash="", steps=2, spans=spans)
    assert phase_seconds(trace.spans) == {"actor.train": (3.0, 3.0)}
    assert warm(trace) == {"actor.train": (3.0,)}


def test_phases_that_only_one_side_knows_stay(tmp_path: Path) -> None:
    from executor.tasks import tiny

    made = runs.plan("naive", "grpo", tiny.config(tmp_path / "m", layers=2))
    trace = Trace(source="measured", rlhfsim_version="0", plan_hash="", steps=1, spans=())
    found = {p.name: p for p in rows(made, warm(trace))}
    assert found["actor.train"].measured_s is None
    assert found["actor.train"].predicted_s is not None


def test_small_values_are_not_shown_as_zero() -> None:
    assert _cell(3.2e-7, 3).strip() == "3.2e-07"
    assert _cell(0.0, 2).strip() == "0.00"
    assert _cell(None, 2).strip() == "-"


def test_a_shrunk_system_with_a_reward_model_is_scored_by_a_drawn_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(launch_module, "run", lambda plan, settings, options, **how: seen.append(settings))
    monkeypatch.chdir(tmp_path)
    launch_module.launch.main(["openrlhf", "--scale", "2"], standalone_mode=False)
    launch_module.launch.main(["openrlhf", "--scale", "2", "--model", "mine"], standalone_mode=False)
    assert [settings.reward_head for settings in seen] == ["drawn", "trained"]


def test_a_run_is_compared_with_the_plan_of_its_folder_which_has_own_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from executor.tasks import tiny

    given = runs.plan("naive", "grpo", tiny.config(tmp_path / "m", layers=2))
    more = replace(given.prediction.phases[0], name="custom.filter", seconds=7.0, low_s=7.0, high_s=7.0)
    prediction = replace(given.prediction, phases=(*given.prediction.phases, more))
    write_plan(tmp_path / "plan.json", replace(given, prediction=prediction))
    trace = Trace(source="measured", rlhfsim_version="0", plan_hash="", steps=1, spans=())
    ended = SimpleNamespace(trace=trace, rows=(), evaluations={})
    outcome = SimpleNamespace(ended=ended, files=RunFiles(tmp_path), restarts=(), overhead=None)
    monkeypatch.setattr("executor.launch.launch", lambda *of: outcome)
    monkeypatch.setattr(launch_module, "look", lambda *of: [])
    options = LaunchOptions(out=tmp_path, dry_run=True)
    launch_module.run(given, Settings(), options, as_json=True)
    phases = {row["name"]: row for row in json.loads(capsys.readouterr().out)["phases"]}
    assert phases["custom.filter"]["predicted_s"] == 7.0


def test_a_dry_run_sets_what_own_parts_took_against_what_was_planned() -> None:
    row = {"predicted_s": None, "low_s": None, "high_s": None, "measured_s": 0.25, "measured": 2}
    planned = {"predicted_s": 0.1, "low_s": 0.1, "high_s": 0.1}
    report = {
        **{"dry_run": True, "iterations": 2, "restarts": [], "last": {}, "evaluations": {}, "out": "runs/a"},
        "coordination_overhead": None,
        "phases": [
            row | planned | {"name": "custom.filter"},
            row | {"name": "custom.logger"},
            row | {"name": "actor.train"},
        ],
    }
    shown = launch_view._figures(report)
    assert shown["custom.filter"] == "250 ms an iteration here, 100 ms planned"
    assert shown["custom.logger"] == "250 ms an iteration here, nothing declared"
    assert "actor.train" not in shown
    assert "custom.filter" not in launch_view._figures(report | {"dry_run": False})


@pytest.mark.slow
def test_a_dry_run_starts_fake_engines_and_needs_no_model(tmp_path: Path, ray_address: str) -> None:
    from executor.tasks import tiny

    folder = tiny.config(tmp_path / "weightless", layers=2)
    made = runs.plan("async", "ppo", folder, layout={"dp": 2, "zero": 2})
    outcome, heard = runs.run(
        made, runs.settings(tmp_path / "nowhere"), tmp_path / "run", ray_address, dry_run=True
    )
    assert len(heard.rows) == 2
    assert (
        json.loads((tmp_path / "run" / "deepspeed" / "actor.json").read_text())["zero_optimization"]["stage"]
        == 2
    )
    assert not list(outcome.files.checkpoints.iterdir())


@pytest.mark.slow
def test_who_watches_a_run_sees_its_trace_grow(tmp_path: Path, ray_address: str) -> None:
    from executor.run import TraceWatch
    from executor.tasks import tiny

    seen: list[tuple[int, set[int], int]] = []

    def look(trace: Trace, rows: Sequence[Mapping[str, float]]) -> str:
        seen.append((trace.steps, {s.step for s in trace.spans}, len(rows)))
        return f"looked at {trace.steps}"

    made = runs.plan("hybrid", "grpo", tiny.config(tmp_path / "weightless", layers=2))
    _, heard = runs.run(
        made,
        runs.settings(tmp_path / "nowhere"),
        tmp_path / "run",
        ray_address,
        dry_run=True,
        watch=TraceWatch(every=1, look=look),
    )
    assert seen == [(1, {0}, 1), (2, {0, 1}, 2)]
    assert [text for text in heard.phases if text.startswith("looked")] == ["looked at 1", "looked at 2"]
