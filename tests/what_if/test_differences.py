"""Two plans, two runs, a plan and a run: only what changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from rlhfsim.api import estimate, simulate_file
from rlhfsim.cli.diff import diff as command
from rlhfsim.plan import Plan, write_plan
from rlhfsim.present.changes import folded, joined, summary
from rlhfsim.simulation.summary import SimulationOptions
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.trace import write_trace
from rlhfsim.what_if.differences import ChangedField, Side, changes, diff, leaves, predicted, read_side


def made(zero: int = 3, prompts: int = 64) -> Plan:
    workload = Workload(
        algorithm="grpo",
        model="qwen2.5-7b",
        prompts=prompts,
        samples=8,
        prompt_len=Fixed(value=200),
        response_len=Fixed(value=1000),
        reward=Reward(model=None, rules=Rules()),
    )
    role = RolePlacement(pool="all", layout=Layout(dp=8, zero=zero))  # type: ignore[arg-type]
    placement = Placement(
        backend="fsdp2",
        pools=(ResourcePool(name="all", gpus=8),),
        actor=role,
        reference=role,
        rollout=RolloutPlacement(pool="all", layout=RolloutLayout(tp=2, dp=4, memory_utilization=0.5)),
        weight_path="ipc",
    )
    return estimate(placement, workload, parse_cluster(8, "h100-sxm"))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return made()


def side(plan: Plan) -> Side:
    return Side(title="a", plan=plan, outcome=predicted(plan), measured=False)


def test_a_plan_does_not_differ_from_itself(plan: Plan) -> None:
    assert diff(side(plan), side(plan)).empty


def test_a_field_of_the_choice_is_told_apart_from_one_of_the_question(plan: Plan) -> None:
    found = diff(side(plan), side(made(zero=2, prompts=128)))
    assert {c.path: (c.before, c.after) for c in found.question} == {"workload.prompts": (64, 128)}
    zero = {c.path: (c.before, c.after) for c in found.choice}
    assert zero["actor.layout.zero"] == zero["reference.layout.zero"] == (3, 2)
    assert set(zero) == {"actor.layout.zero", "reference.layout.zero"}


def test_the_outcome_says_by_how_much(plan: Plan) -> None:
    twice = made(prompts=128)
    found = {m.name: m for m in diff(side(plan), side(twice)).outcome}
    step = found["step"].relative
    assert step == pytest.approx(twice.prediction.step_s / plan.prediction.step_s - 1)
    assert step is not None
    assert 0.5 < step < 1.1
    money = found["price of a step"].relative
    assert money == pytest.approx(step, rel=1e-6)  # same GPUs: money follows time


def test_phases_that_only_one_side_has_are_new_or_gone(plan: Plan) -> None:
    fewer = [p for p in plan.prediction.phases if p.name != "actor.sync"]
    without = replace(plan, prediction=replace(plan.prediction, phases=tuple(fewer)))
    [gone] = diff(side(plan), side(without)).outcome
    assert (gone.name, gone.after, gone.relative) == ("actor.sync", None, None)
    [new] = diff(side(without), side(plan)).outcome
    assert (new.name, new.before) == ("actor.sync", None)


JSON = st.recursive(
    st.integers() | st.text(max_size=3) | st.booleans(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab", min_size=1, max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON, JSON)
def test_changes_are_found_in_both_directions(one: Any, other: Any) -> None:
    a, b = dict(leaves(one)), dict(leaves(other))
    there, back = list(changes(a, b)), list(changes(b, a))
    assert {(c.path, c.before, c.after) for c in there} == {(c.path, c.after, c.before) for c in back}
    assert not list(changes(a, a))
    assert {c.path for c in there} == {k for k in {*a, *b} if a.get(k) != b.get(k)}


def run_folder(plan: Plan, folder: Path, factor: float) -> Path:
    """A run of the plan on a clock that runs slower by a factor."""
    folder.mkdir()
    write_plan(folder / "plan.json", plan)
    trace = simulate_file(str(folder / "plan.json"), SimulationOptions(steps=4, drawn_lengths=False)).trace
    assert trace is not None
    spans = tuple(replace(s, start_s=s.start_s * factor, end_s=s.end_s * factor) for s in trace.spans)
    write_trace(
        folder / "trace.json",
        replace(trace, spans=spans, counters=(), source="measured", plan_hash=plan.input_hash),
    )
    return folder


def test_a_plan_and_its_run_differ_in_seconds_alone(plan: Plan, tmp_path: Path) -> None:
    folder = run_folder(plan, tmp_path / "run", 1.5)
    found = diff(read_side(folder / "plan.json"), read_side(folder))
    assert not found.question
    assert not found.choice
    assert {m.before.unit for m in found.outcome if m.before} == {"s"}
    ratios = {m.name: m.relative for m in found.outcome}
    assert ratios["actor.train"] == pytest.approx(0.5, abs=0.01)


def test_a_run_is_its_medians(plan: Plan, tmp_path: Path) -> None:
    run = read_side(run_folder(plan, tmp_path / "run", 2.0))
    assert run.measured
    assert run.outcome["actor.train"].value == pytest.approx(
        2 * predicted(plan)["actor.train"].value, rel=0.01
    )


def test_the_command_shows_it_and_says_the_same_to_machines(plan: Plan, tmp_path: Path) -> None:
    for name, one in (("a.json", plan), ("b.json", made(zero=2))):
        write_plan(tmp_path / name, one)
    paths = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    shown = CliRunner(env={"COLUMNS": "100"}).invoke(command, paths)
    assert shown.exit_code == 0, shown.output
    assert "{actor,reference}.layout.zero" in shown.output
    assert max(map(len, shown.output.splitlines()[1:])) <= 100
    told = json.loads(CliRunner().invoke(command, [*paths, "--json"]).output)
    assert told["schema"] == "rlhfsim.diff/1"
    assert {c["path"] for c in told["choice"]} == {"actor.layout.zero", "reference.layout.zero"}
    assert all(row["name"] in shown.output for row in told["outcome"])


def test_nothing_changed_is_said(plan: Plan, tmp_path: Path) -> None:
    write_plan(tmp_path / "a.json", plan)
    shown = CliRunner().invoke(command, [str(tmp_path / "a.json")] * 2)
    assert "nothing changed" in shown.output


def test_what_changed_alike_is_one_row_and_the_difference_one_sentence(plan: Plan) -> None:
    changed = diff(side(plan), side(made(zero=2, prompts=128)))
    assert [(c.path, c.before, c.after) for c in folded(changed.choice)] == [
        ("{actor,reference}.layout.zero", 3, 2)
    ]
    said = summary(changed)
    assert said.startswith("step ")
    assert "hybrid as before; NOT THE SAME WORK (prompts): per sample" in said
    same_work = summary(diff(side(plan), side(made(zero=2))))
    assert "; most in " in same_work
    assert "WORK" not in same_work


def test_a_role_that_is_gone_is_one_row_and_hashes_follow_what_they_are_of() -> None:
    def change(path: str, before: object, after: object) -> ChangedField:
        return ChangedField(path=path, before=before, after=after)  # type: ignore[arg-type]

    gone = [change(f"critic.layout.{name}", 1, None) for name in ("tp", "pp", "dp")]
    hardware = [change("hardware.profile", "a", "b"), change("hardware.profile_hash", "x", "y")]
    assert [(c.path, c.before, c.after) for c in folded([*hardware, *gone])] == [
        ("hardware.profile", "a", "b"),
        ("critic", "all 3 fields", None),
    ]
    assert joined(["a.x.b", "a.y.b"]) == "a.{x,y}.b"
    assert joined(["a.b", "c.d.e"]) == "a.b, c.d.e"


def test_a_pool_that_is_gone_is_one_row_and_the_source_of_a_price_follows_it() -> None:
    def change(path: str, before: object, after: object) -> ChangedField:
        return ChangedField(path=path, before=before, after=after)  # type: ignore[arg-type]

    gone = [change(f"pools.all.{name}", 1, None) for name in ("name", "start", "gpus")]
    came = [change(f"pools.train.{name}", None, 1) for name in ("name", "start", "gpus")]
    price = [change("hardware.price.value", 3, 4), change("hardware.price.source", "a page", "another")]
    assert [c.path for c in folded([*gone, *came, *price])] == [
        "pools.all",
        "pools.train",
        "hardware.price.value",
    ]
    assert [c.path for c in folded(price[1:])] == ["hardware.price.source"]


def test_a_probability_that_reads_the_same_is_not_a_change(plan: Plan) -> None:
    def risk(probability: float) -> Side:
        p = replace(plan.prediction, probability_out_of_memory=probability)
        return side(replace(plan, prediction=p))

    assert diff(risk(1e-6), risk(1e-3)).empty
    assert not diff(risk(1e-6), risk(0.1)).empty
