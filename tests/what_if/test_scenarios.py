"""A whole what-if on planted step times: points, front, tornado, break-evens, reuse."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_scenarios import SMALL, small

import rlhfsim
from rlhfsim.errors import RlhfsimError
from rlhfsim.search.request import Request
from rlhfsim.what_if.design import design
from rlhfsim.what_if.scenarios import designs
from rlhfsim.what_if.scenarios.against_base import asked as changed
from rlhfsim.what_if.scenarios.against_base import chosen, comes_out
from rlhfsim.what_if.scenarios.answer import asked, whatif
from rlhfsim.what_if.scenarios.designs import Designs, Runner, Store
from rlhfsim.what_if.scenarios.document import scenario_names
from rlhfsim.what_if.scenarios.result import WhatIf, read_whatif
from rlhfsim.what_if.scenarios.workers import local

Planted = Callable[[Callable[[Request], float | None]], Runner]


def by_gpus(request: Request) -> float | None:
    """Ten GPU-seconds and one more second; one GPU is not enough."""
    gpus = request.cluster.gpus
    return None if gpus == 1 else 10 / gpus + 1


def test_points_are_designed_and_measured_over_the_run(planted: Planted) -> None:
    found = whatif(small(grid={"cluster.node_groups.0.gpus": [1, 2, 4, 8]}), Designs(planted(by_gpus)))
    assert [p.seconds for p in found.everything] == [600, None, 600, 350, 225]
    assert found.points[0].shortage == "too large"
    assert found.per == "run"


def test_the_front_holds_what_nothing_beats_in_time_and_money(planted: Planted) -> None:
    """Money of 2, 4, 8 GPUs: 12, 14, 18; a dear pair of GPUs is as slow as a cheap one."""
    points = [
        {"name": "four", "set": {"cluster.node_groups.0.gpus": 4}},
        {"name": "eight", "set": {"cluster.node_groups.0.gpus": 8}},
        {"name": "dear", "set": {"cluster.node_groups.0.price": "2x"}},
        {"name": "other work", "set": {"workload.prompts": 2}},
        {"name": "none", "set": {"cluster.node_groups.0.gpus": 1}},
    ]
    found = whatif(small(points=points), Designs(planted(by_gpus)))
    assert [p.name for p in found.everything if p.on_front] == ["base", "four", "eight"]


def test_a_plan_that_learns_otherwise_does_not_compete(planted: Planted) -> None:
    """LoRA is as fast with half the price, and is another work."""
    from rlhfsim.specs.workload.workload import Lora

    def with_lora(requests: Sequence[Request]) -> Any:
        for i, found in planted(by_gpus)(requests):  # type: ignore[misc]
            lora = "lora" in requests[i].allow
            workload = replace(found.plan.workload, lora=Lora() if lora else None)
            yield i, replace(found, plan=replace(found.plan, workload=workload))

    points = [
        {"name": "lora", "set": {"request.allow": ["lora"], "cluster.node_groups.0.price": "0.5x"}},
        {"name": "four", "set": {"cluster.node_groups.0.gpus": 4}},
    ]
    found = whatif(small(points=points), Designs(with_lora))
    assert [p.name for p in found.everything if p.on_front] == ["base", "four"]


def test_runs_to_one_target_compete_whatever_their_work(planted: Planted, tmp_path: Path) -> None:
    curve = tmp_path / "c.csv"
    curve.write_text("0,0\n10,1\n")
    base = {**SMALL["base"], "run": {"curve": str(curve), "target": 1}}
    found = whatif(
        {"title": "t", "base": base, "points": [{"name": "less", "set": {"workload.prompts": 2}}]},
        Designs(planted(lambda r: float(r.workload.prompts))),
    )
    assert [p.on_front for p in found.everything] == [False, True]


def test_the_tornado_is_ordered_by_the_larger_swing_of_time_or_money(planted: Planted) -> None:
    vary = {
        "workload.seed": [1, 2],
        "run.steps": ["0.5x", "3x"],
        "cluster.node_groups.0.price": ["0.5x", "2x"],
        "cluster.node_groups.0.gpus": [1, 4],
    }
    bars = whatif(small(tornado={"vary": vary}), Designs(planted(by_gpus))).tornado
    assert [b.path for b in bars] == [
        "run.steps",
        "cluster.node_groups.0.price",
        "cluster.node_groups.0.gpus",
        "workload.seed",
    ]
    steps, price, gpus, seed = bars
    assert (steps.low_label, steps.high_label, steps.base_label) == ("50", "300", "100")
    assert (steps.low_s, steps.base_s, steps.high_s) == (300, 600, 1800)
    assert price.low_s == price.high_s == 600
    assert (gpus.low_s, gpus.low_usd) == (None, None)
    assert seed.swing == 0


def test_a_break_even_recovers_a_planted_price(planted: Planted) -> None:
    """Four GPUs take 3.5 s where two take 6 s: they cost as much at 3 x 6 x 2 / (3.5 x 4) USD/h."""
    even = {
        "vary": "cluster.node_groups.0.price",
        "between": ["1 USD/h", "8 USD/h"],
        "of": "cost_per_step",
        "point": "four",
        "against": "base",
        "vary_in": "point",
    }
    scenario = small(points=[{"name": "four", "set": {"cluster.node_groups.0.gpus": 4}}], break_even=[even])
    [found] = whatif(scenario, Designs(planted(by_gpus))).break_evens
    assert found.value == pytest.approx(3 * 6 * 2 / (3.5 * 4), rel=0.01)
    assert found.crossings == (found.value,)
    assert found.unit == "usd/h"
    assert found.outcome.startswith("four costs less than base below 2.5")


def test_a_break_even_says_that_there_is_no_crossing_or_more_than_one(planted: Planted) -> None:
    def bowl(request: Request) -> float:
        x = request.workload.response_len.mean  # type: ignore[union-attr]
        return 5.0 if request.cluster.gpus == 2 else 5 + (x - 100) * (x - 300) / 1e5

    even = {"vary": "workload.response_len.mean", "of": "step_time", "point": "four", "against": "base"}
    scenario = small(
        points=[{"name": "four", "set": {"cluster.node_groups.0.gpus": 4}}],
        break_even=[{**even, "between": [50, 1000]}, {**even, "between": [400, 1000]}],
    )
    two, none = whatif(scenario, Designs(planted(bowl))).break_evens
    assert two.crossings == (pytest.approx(100, rel=0.02), pytest.approx(300, rel=0.02))
    assert two.outcome.startswith("2 crossings: four takes longer than base below")
    assert none.value is None
    assert none.outcome.startswith("no crossing: four takes longer than base over the whole range, by")


def test_listed_values_give_the_first_that_meets_a_target(planted: Planted) -> None:
    even = {
        "vary": "cluster.node_groups.0.gpus",
        "among": [1, 2, 4, 8],
        "of": "time_of_run",
        "target": "400 s",
    }
    [found] = whatif(small(break_even=[even]), Designs(planted(by_gpus))).break_evens
    assert found.value == 4
    assert found.outcome == "target 400 s missed at 1, 2; met at 4, 8"


def test_a_target_that_is_missed_everywhere_says_by_how_much_and_what_would_meet_it(planted: Planted) -> None:
    even = {"vary": "cluster.node_groups.0.gpus", "among": [1, 2], "of": "time_of_run", "target": "400 s"}

    def megatron(request: Request) -> float | None:
        seconds = by_gpus(request)
        return seconds / 4 if seconds and request.backend == "megatron" else seconds

    [found] = whatif(small(break_even=[even]), Designs(planted(megatron))).break_evens
    assert found.outcome.startswith("target 400 s missed at 1, 2; nearest at 2: ")
    assert "% over; met there with backend megatron: " in found.outcome
    [never] = whatif(small(break_even=[{**even, "target": "1 s"}]), Designs(planted(megatron))).break_evens
    assert "no single change that was tried meets it, nearest backend megatron" in never.outcome


def test_one_question_is_searched_once_whatever_the_prices(planted: Planted) -> None:
    points = [{"name": f"{p} USD", "set": {"cluster.node_groups.0.price": p}} for p in (1, 2, 3)]
    found = whatif(
        small(points=[*points, {"name": "longer", "set": {"run.steps": 500}}]), Designs(planted(by_gpus))
    )
    assert found.provenance.searched == 1
    assert found.points[1].run_usd == pytest.approx(2 * (found.points[0].run_usd or 0))


@pytest.mark.parametrize("objective", ["time", "cost", "memory"])
def test_a_design_at_another_price_is_exactly_what_a_search_with_it_gives(
    objective: str, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    points = [{"name": "cheap", "set": {"cluster.node_groups.0.price": "0.7 USD/h"}}]
    scenario = small(points=points)
    settings = {"request.objective": objective}
    whatif(
        small(points=[{"name": "x", "set": {"run.steps": 1}}]),
        Designs(local(1), store=store),
        settings=settings,
    )
    again = whatif(scenario, Designs(local(1), store=store), settings=settings)
    assert (again.provenance.searched, again.provenance.from_cache) == (0, 1)
    fresh = design(asked(scenario, settings).points[0].request, explain=False, simplest_s=None)
    assert again.points[0].plan == fresh.chosen


def test_a_kept_design_that_is_no_file_is_searched_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "endless.json").symlink_to("/dev/zero")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert [store.recall(key) for key in ("pipe", "endless", "deep", "absent")] == [None] * 4


def test_a_kept_design_equals_a_fresh_one(tmp_path: Path, planted: Planted) -> None:
    scenario = small(grid={"cluster.node_groups.0.gpus": [1, 2, 4]})
    fresh = whatif(scenario, Designs(planted(lambda r: int(by_gpus(r) or 0) or None), store=Store(tmp_path)))
    kept = whatif(scenario, Designs(planted(lambda _: 99.0), store=Store(tmp_path)))
    assert repr(kept.everything) == repr(fresh.everything)  # 6.0 in both: a resumed table has the same bytes
    assert (kept.provenance.searched, kept.provenance.from_cache) == (0, 3)


def test_a_changed_model_serves_no_stale_answer(
    tmp_path: Path, planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = small(grid={"cluster.node_groups.0.gpus": [2]})
    whatif(scenario, Designs(planted(by_gpus), store=Store(tmp_path)))
    monkeypatch.setattr(designs, "model_hash", lambda: "another")
    assert whatif(scenario, Designs(planted(by_gpus), store=Store(tmp_path))).provenance.searched == 1


def test_a_damaged_file_of_the_store_is_searched_again(tmp_path: Path, planted: Planted) -> None:
    scenario = small(grid={"cluster.node_groups.0.gpus": [2]})
    whatif(scenario, Designs(planted(by_gpus), store=Store(tmp_path)))
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    foreign = whole.replace(json.loads(whole)["check"], "another")  # a file that was renamed or edited
    assert '"step_s": 6.0' in whole
    for text in (whole[:100], whole.replace('"step_s": 6.0', '"step_s": -5.0'), foreign, "[]", "[" * 10**5):
        path.write_text(text)
        found = whatif(scenario, Designs(planted(by_gpus), store=Store(tmp_path)))
        assert (found.provenance.searched, path.read_text()) == (1, whole)
    path.write_text(whole.replace('"step_s": 6.0', '"step_s": 5.0'))
    assert whatif(scenario, Designs(planted(by_gpus), store=Store(tmp_path))).base.seconds == 600


def test_the_key_of_a_search_holds_all_but_prices() -> None:
    request = asked(small(grid={"run.steps": [1]})).cases.base.request
    pool = request.cluster.node_group
    dear = replace(pool, profile=replace(pool.profile, price=None))
    assert designs.search_key(
        replace(request, cluster=replace(request.cluster, node_groups=(dear,)))
    ) == designs.search_key(request)
    others = [
        replace(request, max_oom=0.2),
        replace(request, allow=frozenset({"fp8"})),
        replace(request, backend="megatron"),
        replace(request, time_limit=5.0),
        replace(request, workload=replace(request.workload, seed=1)),
        replace(request, fix={"actor": {"tp": 1}}),
        replace(request, cluster=replace(request.cluster, oversubscription=2.0)),
    ]
    assert len({designs.search_key(r) for r in [request, *others]}) == len(others) + 1


def test_many_searches_are_refused_with_their_cost_and_equal_points_are_searched_once(
    tmp_path: Path, planted: Planted
) -> None:
    grid = {"workload.prompts": list(range(16, 76)), "workload.seed": ["1x", 0]}  # each point twice
    scenario, searched = small(grid=grid), []

    def slow(requests: Sequence[Request]) -> Any:
        searched.extend(requests)
        return ((i, replace(d, seconds=100.0)) for i, d in planted(by_gpus)(requests))  # type: ignore[misc]

    with pytest.raises(
        RlhfsimError, match=r"57 designs are left to search, about 1\.58 h of one core"
    ) as refused:
        whatif(scenario, Designs(slow, store=Store(tmp_path), most_s=5699))
    assert "--yes" in str(refused.value)
    assert [r.workload.prompts for r in searched] == [16, 45, 75]
    assert whatif(scenario, Designs(slow, store=Store(tmp_path), most_s=5700)).provenance.from_cache == 3
    assert [len(searched), whatif(scenario, Designs(slow)).provenance.searched] == [60, 60]


def test_an_interruption_keeps_what_is_done(tmp_path: Path, planted: Planted) -> None:
    scenario = small(grid={"cluster.node_groups.0.gpus": [2, 4, 8, 16]})

    def until_eight(request: Request) -> float | None:
        if request.cluster.gpus == 8:
            raise KeyboardInterrupt
        return by_gpus(request)

    with pytest.raises(KeyboardInterrupt):
        whatif(scenario, Designs(planted(until_eight), store=Store(tmp_path)))
    resumed = whatif(scenario, Designs(planted(by_gpus), store=Store(tmp_path)))
    assert (resumed.provenance.from_cache, resumed.provenance.searched) == (2, 2)


def test_what_changed_is_told_against_the_base(planted: Planted) -> None:
    points = [{"name": "four", "set": {"cluster.node_groups.0.gpus": 4, "workload.samples": 2}}]
    found = whatif(small(points=points), Designs(planted(by_gpus)))
    [change] = changed(found.points[0])
    assert (change.path, change.before, change.after) == ("cluster.node_groups.0.gpus", 2, 4)
    figures = {m.name: m for m in comes_out(found.base, found.points[0])}
    assert figures["step"].relative == pytest.approx(3.5 / 6 - 1)
    assert figures["price of the run"].after is not None
    plan = found.base.plan
    assert plan is not None
    assert chosen(plan, plan) == ()
    other = replace(plan, architecture="async" if plan.architecture != "async" else "smart")
    assert [c.path for c in chosen(plan, other)] == ["architecture"]


def complete(planted: Planted) -> WhatIf:
    scenario = small(
        question="q",
        assumptions=["a"],
        points=[
            {"name": "long", "set": {"workload.response_len": {"kind": "fixed", "value": 900}}},
            {"name": "none", "set": {"cluster.node_groups.0.gpus": 1}},
        ],
        break_even=[
            {"vary": "cluster.node_groups.0.price", "between": [1, 2], "of": "cost_of_run", "target": 1}
        ],
        tornado={"vary": {"run.steps": [1, 2]}},
    )
    found = whatif(scenario, Designs(planted(by_gpus)))
    return replace(found, provenance=replace(found.provenance, command="rlhfsim whatif x"))


def test_a_result_survives_its_file(planted: Planted, tmp_path: Path) -> None:
    found = complete(planted)
    found.write(tmp_path / "w.json")
    assert read_whatif(tmp_path / "w.json") == found
    assert found.to_dict()["schema"] == "rlhfsim.whatif/1"


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text('{"schema": "rlhfsim.plan/2"}')
    with pytest.raises(RlhfsimError, match="not a result of schema"):
        read_whatif(tmp_path / "w.json")


@pytest.mark.parametrize(
    ("key", "value"), [("run_s", 5e-324), ("run_s", -5), ("run_usd", -3), ("goodput", 7)]
)
def test_a_result_of_numbers_that_cannot_be_is_refused(
    key: str, value: float, planted: Planted, tmp_path: Path
) -> None:
    data = complete(planted).to_dict()
    data["base"][key] = value
    (tmp_path / "w.json").write_text(json.dumps(data))
    with pytest.raises(RlhfsimError, match=f"base.{key}"):
        read_whatif(tmp_path / "w.json")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_the_table_survives_its_file(planted: Planted, tmp_path: Path, suffix: str) -> None:
    import pandas as pd

    found, path = complete(planted), tmp_path / f"w.{suffix}"
    found.write(path)
    table = pd.read_csv(path) if suffix == "csv" else pd.read_parquet(path)
    whole = found.to_frame()
    assert list(table.columns) == list(whole.columns)
    assert list(table["name"]) == ["base", "long", "none"]
    assert list(table["run_s"].fillna(-1)) == [600, 600, -1]
    assert [str(v) for v in table["workload.response_len"]][1] == '{"kind": "fixed", "value": 900}'
    assert [path.name for path in tmp_path.iterdir()] == [f"w.{suffix}"]


def test_a_mapping_a_file_and_python_give_the_same(planted: Planted, tmp_path: Path) -> None:
    import json

    path = tmp_path / "s.json"
    scenario = small(grid={"workload.samples": [2]})
    path.write_text(json.dumps(scenario))
    one, other = (rlhfsim.whatif(path, jobs=1), rlhfsim.whatif(scenario, jobs=1, cache=tmp_path / "kept"))
    assert one.points == other.points


@pytest.mark.parametrize("name", scenario_names())
def test_every_shipped_scenario_is_a_question_with_points(name: str) -> None:
    found = asked(name)
    assert found.points
    assert found.cases.document.question.endswith("?")
