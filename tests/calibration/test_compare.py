"""Plans against runs whose every second is known."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlhfsim.api import estimate, simulate_file
from rlhfsim.calibration.comparison.gap import CAUSES, gap
from rlhfsim.calibration.comparison.memory import footprint
from rlhfsim.calibration.comparison.phases import compare, row, rows
from rlhfsim.calibration.observation import Observation, observe
from rlhfsim.cli.compare import compare as command
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan, write_plan
from rlhfsim.present.chrome_trace import chrome_trace, side_by_side
from rlhfsim.simulation.summary import SimulationOptions
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.trace import Counter, Span, Trace, write_trace

STEPS = 4


@pytest.fixture(scope="module")
def plan() -> Plan:
    workload = Workload(
        algorithm="grpo",
        model="qwen2.5-7b",
        prompts=64,
        samples=8,
        prompt_len=Fixed(value=200),
        response_len=Fixed(value=1000),
        reward=Reward(model=None, rules=Rules()),
    )
    role = RolePlacement(pool="all", layout=Layout(dp=8, zero=3))
    placement = Placement(
        pools=(ResourcePool(name="all", gpus=8),),
        actor=role,
        reference=role,
        weight_path="ipc",
        backend="fsdp2",
        rollout=RolloutPlacement(pool="all", layout=RolloutLayout(tp=2, dp=4, memory_utilization=0.5)),
    )
    return estimate(placement, workload, parse_cluster(8, "h100"))


def run_of(
    plan: Plan,
    *,
    factor: dict[str, float] | None = None,
    wait: float = 0.0,
    drop: tuple[str, ...] = (),
    extra: tuple[tuple[str, float], ...] = (),
    jitter: float = 0.0,
) -> Trace:
    """The plan's own chain as a trace, times `factor` by phase, with `wait` seconds at its end."""
    spans: list[Span] = []
    at = 0.0
    for step in range(STEPS):
        chain = [
            (p.name, p.pool, p.seconds) for p in plan.prediction.phases if p.critical and p.name not in drop
        ]
        for name, pool, seconds in [*chain, *((n, "all", s) for n, s in extra)]:
            role, _, kind = name.partition(".")
            long = seconds * (factor or {}).get(name, 1.0) * (1 + jitter * step)
            spans.append(
                Span(
                    name=name,
                    role=role,
                    kind=kind or role,
                    pool=pool,
                    step=step,
                    start_s=at,
                    end_s=at + long,
                    bound_by="measured",
                )
            )
            at += long
        at += wait
    end = Span(
        name="actor.sync",
        role="actor",
        kind="sync",
        pool="all",
        step=STEPS,
        start_s=at,
        end_s=at,
        bound_by="measured",
    )
    return Trace(
        source="measured",
        rlhfsim_version="0",
        plan_hash=plan.input_hash,
        steps=STEPS + 1,
        spans=(*spans, end),
    )


def seen_of(plan: Plan, trace: Trace, *, prompt: float = 200.0, response: float = 1000.0) -> Observation:
    """Counted are the steps between the first and the empty one at the end, which gives them an end."""
    found = observe(plan, trace, name="run")
    assert found.counted[-1] == STEPS
    return replace(
        found,
        counted=found.counted[:-1],
        step_s=found.step_s[:-1],
        prompt_tokens=prompt,
        response_tokens=response,
        phases={name: times[: STEPS - 1] for name, times in found.phases.items()},
    )


def test_a_span_of_a_call_that_streams_is_compared_with_all_its_work(plan: Plan) -> None:
    workload = replace(plan.workload, algorithm="ppo")
    role = RolePlacement(pool="train", layout=Layout(dp=4, zero=3))
    placement = Placement(
        pools=(ResourcePool(name="gen", gpus=4), ResourcePool(name="train", start=4, gpus=4)),
        actor=role,
        critic=role,
        reference=role,
        weight_path="broadcast",
        backend="deepspeed",
        rollout=RolloutPlacement(pool="gen", layout=RolloutLayout(tp=2, dp=2, memory_utilization=0.5)),
    )
    streams = replace(placement, schedule=Schedule(streaming=True))
    cluster = parse_cluster(8, "h100")
    whole, streamed = (estimate(x, workload, cluster) for x in (placement, streams))
    alone = {p.name: p.seconds for p in whole.prediction.phases}
    left = next(p for p in streamed.prediction.phases if p.name == "actor.logprob")
    assert left.seconds < 0.5 * alone["actor.logprob"]
    for r in rows(streamed, {"actor.logprob": (1.0,), "actor.train": (1.0,)}):
        assert r.predicted_s == pytest.approx(alone[r.name]), r.name


def test_a_run_that_keeps_to_the_plan_has_no_gap(plan: Plan) -> None:
    trace = run_of(plan)
    seen = seen_of(plan, trace)
    found = compare(plan, seen, trace)
    assert all(r.ratio == pytest.approx(1.0) for r in found.rows if r.ratio is not None)
    why = gap(plan, seen, trace)
    assert why is not None
    assert why.measured_s == pytest.approx(plan.prediction.step_s)
    assert all(abs(seconds) < 1e-9 for seconds in why.parts.values())


@pytest.mark.parametrize("seed", range(4))
def test_the_parts_add_up_to_the_gap(plan: Plan, seed: int) -> None:
    names = [p.name for p in plan.prediction.phases]
    factor = {name: 0.5 + (seed * 7 + i) % 5 / 2 for i, name in enumerate(names)}
    trace = run_of(
        plan,
        factor=factor,
        wait=seed * 0.7,
        drop=("controller",) if seed % 2 else (),
        extra=(("odd.work", 0.3 * seed),),
        jitter=0.1,
    )
    why = gap(plan, seen_of(plan, trace, response=800.0 + 100 * seed), trace)
    assert why is not None
    assert set(why.parts) == set(CAUSES)
    assert math.fsum(why.parts.values()) == pytest.approx(why.measured_s - why.predicted_s, abs=1e-9)


def test_time_in_no_call_is_waiting(plan: Plan) -> None:
    trace = run_of(plan, wait=3.0)
    why = gap(plan, seen_of(plan, trace), trace)
    assert why is not None
    assert why.parts["waiting"] == pytest.approx(3.0, abs=1e-6)
    assert why.idle_s == pytest.approx(3.0, abs=1e-6)
    assert why.parts["compute"] == pytest.approx(0.0, abs=1e-6)


def test_a_slow_phase_is_split_as_its_prediction(plan: Plan) -> None:
    planned = next(p for p in plan.prediction.phases if p.name == "actor.train")
    trace = run_of(plan, factor={"actor.train": 2.0})
    why = gap(plan, seen_of(plan, trace), trace)
    assert why is not None
    assert why.parts["compute"] == pytest.approx(planned.by_resource_s["compute"], rel=1e-6)
    assert why.parts["hbm"] == pytest.approx(planned.by_resource_s["hbm"], rel=1e-6)


def test_longer_responses_are_told_apart_from_slow_work(plan: Plan) -> None:
    longer = replace(plan.workload, response_len=Fixed(value=2000))
    really = estimate(plan.placement, longer, parse_cluster(8, "h100"))
    trace = replace(run_of(really), plan_hash=plan.input_hash)
    why = gap(plan, seen_of(plan, trace, response=2000.0), trace)
    assert why is not None
    total = why.measured_s - why.predicted_s
    assert total > 0.3 * why.predicted_s
    assert why.parts["lengths"] == pytest.approx(total, rel=0.02)


def test_untimed_and_unplanned_phases_are_named(plan: Plan) -> None:
    trace = run_of(plan, drop=("controller",), extra=(("odd.work", 0.5),))
    seen = seen_of(plan, trace)
    found = compare(plan, seen, trace)
    assert "controller" in found.missing
    assert found.unplanned == ("odd.work",)
    why = gap(plan, seen, trace)
    assert why is not None
    assert why.parts["overhead"] == pytest.approx(0.5, abs=1e-6)
    controller = next(p for p in plan.prediction.phases if p.name == "controller")
    assert why.parts["waiting"] == pytest.approx(-controller.seconds, abs=1e-6)


def test_a_timer_of_two_phases_stands_against_their_sum(plan: Plan) -> None:
    covers = {"actor.logprob": ("reference.logprob", "actor.logprob", "actor.logprob.load")}
    both = [p.seconds for p in plan.prediction.phases if p.name in covers["actor.logprob"]]
    found = {r.name: r for r in rows(plan, {"actor.logprob": (sum(both),)}, covers)}
    assert found["actor.logprob"].ratio == pytest.approx(1.0)
    assert "reference.logprob" not in found
    assert found["actor.train"].measured_s is None


def test_the_interval_of_a_ratio_narrows_with_steps_and_needs_two() -> None:
    def width(times: tuple[float, ...]) -> float:
        r = row("x", times, covers=("x",), predicted=(1.0, 0.9, 1.1))
        assert r.ratio_low is not None
        assert r.ratio is not None
        assert r.ratio_high is not None
        assert r.ratio_low < r.ratio < r.ratio_high
        return r.ratio_high / r.ratio_low

    assert width((1.0, 1.1, 0.9) * 6) < width((1.0, 1.1, 0.9))
    alone = row("x", (2.0,), covers=("x",), predicted=(1.0, 0.9, 1.1))
    assert (alone.ratio, alone.ratio_low) == (2.0, None)


def test_the_interval_of_a_median_holds_it_about_as_often_as_stated() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        r = row("x", tuple(rng.lognormal(0.0, 0.2, 8)), covers=("x",), predicted=(1.0, 1.0, 1.0))
        assert r.ratio_low is not None
        assert r.ratio_high is not None
        inside += r.ratio_low <= 1.0 <= r.ratio_high
    assert 0.74 <= inside / 400 <= 0.92


def test_memory_is_the_most_that_a_counter_holds_during_a_phase(plan: Plan) -> None:
    trace = run_of(plan)
    span = next(s for s in trace.spans if s.name == "actor.train" and s.step == 1)
    middle = (span.start_s + span.end_s) / 2
    counters = tuple(
        Counter(name="memory_bytes", pool="all", group=group, time_s=time, value=value)
        for group, time, value in (
            ("rank 0", 0.0, 10e9),
            ("rank 1", 0.0, 12e9),
            ("rank 0", middle, 50e9),
            ("rank 0", span.end_s, 11e9),
        )
    )
    trace = replace(trace, counters=counters)
    held = {h.phase: h for h in footprint(plan, seen_of(plan, trace), trace)}
    assert held["actor.train"].measured == 50e9
    assert held["actor.generate"].measured == 12e9
    assert held["actor.train"].predicted == pytest.approx(sum(held["actor.train"].roles.values()))


def test_both_sides_stand_in_one_perfetto_file(plan: Plan) -> None:
    both = side_by_side(plan, run_of(plan, wait=1.0))
    events = chrome_trace(both)["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"predicted: all", "measured: all"} <= names
    predicted = [s for s in both.spans if s.pool.startswith("predicted:") and s.name == "actor.train"]
    assert len(predicted) == STEPS + 1
    assert predicted[1].start_s - predicted[0].start_s == pytest.approx(plan.prediction.step_s)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def folder(plan: Plan, tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    trace = run_of(plan, factor={"actor.train": 1.5}, wait=0.5, jitter=0.02)
    write_plan(run / "plan.json", plan)
    write_trace(run / "trace.json", trace)
    return run


def test_the_command_prints_within_100_columns_and_json_says_the_same(folder: Path) -> None:
    shown = CliRunner().invoke(command, [str(folder)], catch_exceptions=False)
    assert shown.exit_code == 0
    assert max(map(len, shown.output.splitlines())) <= 100
    for word in ("actor.train", "ratio", "waiting", "measured", "tokens"):
        assert word in shown.output
    data = json.loads(CliRunner().invoke(command, [str(folder), "--json"], catch_exceptions=False).output)
    assert data["schema"] == "rlhfsim.compare/1"
    assert math.fsum(data["gap"]["parts"].values()) == pytest.approx(
        data["gap"]["measured_s"] - data["gap"]["predicted_s"]
    )
    train = next(r for r in data["phases"] if r["name"] == "actor.train")
    assert train["ratio"] == pytest.approx(1.5, rel=0.1)


def test_the_command_writes_one_trace_of_both(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "both.json"
    result = CliRunner().invoke(
        command, [str(folder / "plan.json"), str(folder), "--trace", str(out)], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert json.loads(out.read_text())["traceEvents"]


def test_a_run_is_compared_where_another_file_bears_the_name_of_its_model(
    folder: Path, tmp_path: Path
) -> None:
    run, out = shutil.copytree(folder, tmp_path / "copy"), tmp_path / "both.json"
    data = json.loads((run / "plan.json").read_text())
    data["workload"]["model"] = "/dev/zero"
    (run / "plan.json").write_text(json.dumps(data))
    result = CliRunner().invoke(command, [str(run), "--trace", str(out)], catch_exceptions=False)
    assert (result.exit_code, out.exists()) == (0, True)


def test_a_run_of_another_plan_is_refused(folder: Path, plan: Plan, tmp_path: Path) -> None:
    other = estimate(plan.placement, replace(plan.workload, prompts=128), parse_cluster(8, "h100"))
    write_plan(tmp_path / "other.json", other)
    result = CliRunner().invoke(command, [str(tmp_path / "other.json"), str(folder)])
    assert isinstance(result.exception, RlhfsimError)
    assert result.exception.code == "another-plan"


def test_the_same_plan_on_another_profile_is_compared_with_a_note(
    folder: Path, plan: Plan, tmp_path: Path
) -> None:
    other = estimate(plan.placement, plan.workload, parse_cluster(8, "h200"))
    write_plan(tmp_path / "other.json", other)
    data = json.loads(
        CliRunner()
        .invoke(command, [str(tmp_path / "other.json"), str(folder), "--json"], catch_exceptions=False)
        .output
    )
    assert any("another profile" in note for note in data["notes"])


@pytest.mark.parametrize("arguments", [[], ["a", "b", "c"]])
def test_one_run_or_a_plan_and_a_run_are_wanted(arguments: list[str]) -> None:
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, RlhfsimError)
    assert result.exception.code == "bad-option"


def test_a_simulated_run_compares_with_its_own_estimate(tmp_path: Path, plan: Plan) -> None:
    write_plan(tmp_path / "plan.json", plan)
    found = simulate_file(tmp_path / "plan.json", SimulationOptions(steps=3, drawn_lengths=False))
    assert found.trace is not None
    trace = replace(found.trace, source="measured", plan_hash=plan.input_hash)
    seen = observe(plan, trace, name="simulated")
    found_rows = compare(plan, seen, trace).rows
    ratios = [r.ratio for r in found_rows if r.ratio is not None]
    assert ratios == pytest.approx([1.0] * len(ratios), rel=0.02)
