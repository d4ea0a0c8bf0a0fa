"""Searches that end early: a time limit while roles are priced, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhfsim.cli import design as command
from rlhfsim.cli import main as entry
from rlhfsim.cli.search_progress import text
from rlhfsim.kernels.devices import device_on
from rlhfsim.plan import read_plan
from rlhfsim.search import clock
from rlhfsim.search.branch_and_bound import Search
from rlhfsim.search.cache import SearchCache
from rlhfsim.search.floors import floor_of
from rlhfsim.search.options import PriceKey
from rlhfsim.search.parallel import serial
from rlhfsim.search.pricer import Pricer
from rlhfsim.search.progress import Progress, heard_by
from rlhfsim.search.request import Request
from rlhfsim.search.scope import Scope
from rlhfsim.search.space import Skeleton
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.workload import Lora, Workload
from rlhfsim.what_if import design

TINY = ["--gpus", "2", "--model", "qwen2.5-0.5b", "--algorithm", "grpo", "--prompts", "32", "--samples", "2"]


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """SIGINT is heard, also where a script started the tests with `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def asked_after(calls: int, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Ctrl-C is pressed at a call of a method of the search."""
    plain, count = getattr(Search, name), 0

    def method(self: Search, *given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == calls:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self, *given, **named)

    monkeypatch.setattr(Search, name, method)


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["rlhfsim", *arguments])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    return ended.value.code


@pytest.mark.parametrize("name", ["_branches", "_warm_start", "_prove"])
def test_ctrl_c_ends_a_search_with_the_best_plan_so_far_and_code_3(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked_after(1, monkeypatch, name)
    out = tmp_path / "plan.json"
    assert exit_code(monkeypatch, "design", *TINY, "--out", str(out)) == 3
    choice = read_plan(out).choice
    assert choice is not None
    assert choice.certificate.gap > 0
    assert "ended early" in capfd.readouterr().out


def test_a_second_ctrl_c_ends_without_an_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked_after(1, monkeypatch, "_warm_start")
    asked_after(1, monkeypatch, "_prove")
    assert exit_code(monkeypatch, "design", *TINY, "--out", str(tmp_path / "plan.json")) == 130
    assert not list(tmp_path.iterdir())


def test_roles_for_which_no_time_is_left_have_their_floor_and_all_their_options(questions: Any) -> None:
    case = next(c for seed in range(1400, 1410) if (c := questions.drawn(seed, most=10**6)) is not None)
    with clock.within(1e-9):
        early = Search(case.request, case.models)._branches()
    whole = Search(case.request, case.models)._branches()
    assert not any(branch.priced.any() for branch in early)
    for one, other in zip(early, whole, strict=True):
        rows = np.arange(len(one.sizes)).reshape(-1, 1)
        assert [*map(one.bounds.legal, rows)] == [*map(other.bounds.legal, rows)]
        assert other.priced.all()
        assert (one.bound <= other.bound).all()


def test_plans_counted_before_their_roles_were_priced_add_up(questions: Any) -> None:
    unfit = 0
    for seed in range(1400, 1430):
        case = questions.drawn(seed, most=10**5)
        if case is None:
            continue
        search = Search(case.request, case.models)
        with clock.within(1e-9):
            early = search._branches()
        for branch in early[:4]:
            before = search.counts.total()
            search._open_up_to(np.inf, branch.skeleton(0), branch.fitting_in(0))
            assert search.counts.total() - before == branch.fitting_in(0)
            unfit += search.subproblems.fitting_alone(branch.skeleton(0)) == 0
    assert unfit


def test_no_option_of_a_role_is_faster_than_its_floor(questions: Any) -> None:
    compared = 0
    for seed in range(1500, 1512):
        case = questions.drawn(seed, most=10**6)
        if case is None:
            continue
        pricer = Search(case.request, case.models).pricer
        search = Search(case.request, case.models, pricer)
        search._branches()
        for key, table in pricer._tables.items():
            floor, far = floor_of(pricer, key, close=True), floor_of(pricer, key)
            assert (far.ready, far.training) <= (floor.ready, floor.training)
            assert floor.legal == table.legal
            if len(table):
                compared += floor.ready + floor.training > 0
                assert floor.ready <= table.times.ready.min()
                assert floor.training <= table.times.training.min()
    assert compared > 10


@pytest.mark.parametrize(
    ("model", "backend", "fixed"),
    [
        ("qwen3-30b-a3b", "megatron", {"tp": 2, "vp": 1, "ep": 8}),
        ("8b", "fsdp2", {}),
        ("70b", "deepspeed", {}),
    ],
)
def test_no_option_of_a_large_pool_is_faster_than_its_floor_which_knows_more_than_flop(model, backend, fixed):
    gpus, workload = 128, Workload(model=model, algorithm="ppo", prompts=256, epochs=2, mini_batches=2)
    fix = dict.fromkeys(("actor", "reference"), fixed)
    asked = Request(cluster=parse_cluster(gpus, "h100"), workload=workload, backend=backend, fix=fix)
    pricer = Search(asked, models_of(workload)).pricer
    for role in ("actor", "reference"):
        key = PriceKey(hardware=0, gpus=gpus, role=role)
        floor, times = floor_of(pricer, key, close=True), pricer.table(key).times
        assert 0.3 * times.ready.min() < floor.ready <= times.ready.min()
        assert 0.2 * times.training.min() * (role == "actor") <= floor.training <= times.training.min()


def test_log_probs_of_adapters_are_priced_apart_from_those_of_the_reference_without():
    workload = Workload(model="8b", algorithm="grpo", lora=Lora(rank=16))
    asked = Request(cluster=parse_cluster(8, "h100"), workload=workload, backend="fsdp2")
    keys = [PriceKey(hardware=0, gpus=8, role=role) for role in ("reference", "actor")]
    forwards, backwards = (
        {key.role: pricer.table(key).times.run.min() for key in order}
        for order in (keys, keys[::-1])
        for pricer in (Pricer(asked, models_of(workload), SearchCache()),)
    )
    assert forwards == backwards
    assert forwards["actor"] > forwards["reference"]


def test_where_time_is_up_all_roles_of_a_number_of_gpus_are_priced_or_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = Workload(model="8b", algorithm="grpo")
    asked = Request(cluster=parse_cluster(16, "h100"), workload=workload, backend="fsdp2")
    pricer = Pricer(asked, models_of(workload), SearchCache())
    roles, asks = ("actor", "reference", "rollout"), []
    keys = [PriceKey(hardware=0, gpus=gpus, role=role) for gpus in (2, 4, 8, 16) for role in roles]

    def over() -> bool:
        asks.append(True)
        return len(asks) > 2 * len(roles)

    monkeypatch.setattr("rlhfsim.search.pricer.AT_ONCE", 1)
    monkeypatch.setattr("rlhfsim.search.pricer.clock.over", over)
    with serial():
        assert not pricer.prepare(keys)
    assert {key for key in keys if pricer.has(key)} == {key for key in keys if key.gpus in (16, 8)}


def test_roles_that_were_priced_before_come_in_one_order_in_every_process() -> None:
    """What they refuse is printed in that order; that of a set is another under every hash seed."""
    workload, shared = Workload(model="8b", algorithm="grpo"), SearchCache()
    asked = Request(cluster=parse_cluster(8, "h100"), workload=workload, backend="fsdp2")
    keys = [
        PriceKey(hardware=0, gpus=gpus, role=role) for gpus in (8, 2, 4) for role in ("reference", "actor")
    ]
    for _ in range(2):
        pricer = Pricer(asked, models_of(workload), shared)
        pricer.prepare(keys)
    assert list(pricer._tables) == sorted(keys)


def test_options_of_a_rollout_that_is_not_priced_are_counted_once(monkeypatch):
    workload = Workload(model="8b", algorithm="grpo")
    asked = Request(cluster=parse_cluster(8, "h100"), workload=workload, backend="fsdp2")
    pricer, key = (
        Pricer(asked, models_of(workload), SearchCache()),
        PriceKey(hardware=0, gpus=8, role="rollout"),
    )
    counted = floor_of(pricer, key).legal
    assert counted == len(pricer.every(key)) > 0
    monkeypatch.setattr(pricer, "every", lambda key: pytest.fail("counted again"))
    assert floor_of(pricer, key).legal == counted


def test_a_floor_holds_what_the_framework_adds_to_each_call() -> None:
    asked = Request(
        cluster=parse_cluster(64, "h100"),
        workload=Workload(model="8b", algorithm="ppo", epochs=2),
        backend="megatron",
        framework="nemo-rl",
    )
    pricer = Search(asked, models_of(asked.workload)).pricer
    added = device_on(asked.cluster, 0, asked.backend)["rl_call_time"]
    floor = floor_of(pricer, PriceKey(hardware=0, gpus=64, role="critic"))
    assert added > 1
    assert floor.ready > added
    assert floor.training > 2 * added


def fitting(questions: Any) -> tuple[Search, Skeleton]:
    """A search, and a skeleton whose first pool has combinations that fit."""
    for seed in range(1400, 1420):
        case = questions.drawn(seed, most=10**6)
        search = Search(case.request, case.models) if case else None
        for branch in search._branches() if search else ():
            for row in np.flatnonzero(np.isfinite(branch.bound)).tolist():
                if search and len(search.subproblems.beam(branch.skeleton(row), 0)) > 1:
                    return search, branch.skeleton(row)
    raise AssertionError("nothing fits")


def test_merging_a_pool_ends_with_the_time_unless_it_is_a_quick_look(questions: Any) -> None:
    search, skeleton = fitting(questions)
    search.subproblems._pools.clear()
    with clock.within(1e-9):
        assert len(search.subproblems.beam(skeleton, 0))
        with pytest.raises(clock.OutOfTime):
            search.subproblems.pool(skeleton, 0, np.inf)


def test_options_that_no_other_role_can_save_are_counted_with_all_their_combinations(questions: Any) -> None:
    search, skeleton = fitting(questions)
    close = search.subproblems.pool(skeleton, 0, float(search.subproblems.bound(skeleton)) * 1.01)
    every = search.subproblems.pool(skeleton, 0, np.inf)
    assert close.bounded > 0
    assert close.considered == every.considered
    for table in (close, every):
        assert table.considered == table.bounded + table.infeasible + table.dominated + len(table)
    assert {tuple(row) for row in close.rows.tolist()} <= {tuple(row) for row in every.rows.tolist()}


def test_a_search_tells_how_far_it_has_come_and_the_gap_never_grows(questions: Any) -> None:
    heard: list[Progress] = []
    search, _ = fitting(questions)
    with heard_by(heard.append):
        result = Search(
            search.request, search.models, Pricer(search.request, search.models, SearchCache())
        ).run()
    assert {p.doing for p in heard} == {"pricing layouts", "looking at plans"}
    assert all(0 <= p.done <= p.total for p in heard)
    gaps = [p.gap for p in heard if p.gap is not None]
    assert gaps
    assert result.best is not None
    assert all(a >= b - 1e-9 for a, b in pairwise(gaps))


def test_the_line_of_a_search_names_what_is_searched_the_best_so_far_and_its_gap() -> None:
    told = Progress("looking at plans", 40, 171, "ways to share the GPUs", 143.2, 0.041)
    assert text(told, 12.3) == (
        "12 s: looking at plans, 40 of 171 ways to share the GPUs; best 143 s, gap 4.1%; Ctrl-C takes it"
    )
    assert (
        text(Progress("pricing layouts", 3, 34, "pool sizes"), 4.0)
        == "4 s: pricing layouts, 3 of 34 pool sizes"
    )


def test_time_that_ends_as_the_best_plan_is_met_leaves_nothing_to_look_at(
    questions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Search._simulate

    def simulated(self: Search, *given: Any) -> Any:
        done = plain(self, *given)
        if len(given) > 2:  # a proof, not the warm start
            raise clock.OutOfTime
        return done

    search, _ = fitting(questions)
    monkeypatch.setattr(Search, "_simulate", simulated)
    monkeypatch.setattr(Search, "_warm_start", lambda self, branches: None)
    request = replace(search.request, objective="time")
    close = Search(request, search.models, scope=Scope(rivals=False, tolerance=0.5))
    proof = close.run().certificate
    lines = proof.infeasible + proof.dominated + proof.bounded + proof.simulated + proof.unexplored
    assert lines == proof.space
    assert (proof.unexplored, proof.gap) == (0, 0)


def test_what_would_fit_is_not_looked_for_when_time_is_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(design, "remedies", lambda *_: pytest.fail("looked for"))
    words = ["--gpus", "1", "--model", "70b", "--algorithm", "grpo", "--time-limit", "0.1s"]
    monkeypatch.setattr(clock, "over", lambda: True)
    assert exit_code(monkeypatch, "design", *words, "--out", str(tmp_path / "plan.json")) == 1
    assert "found in time: give the search more" in capfd.readouterr().out


def test_a_time_limit_covers_who_leads_and_not_what_calibration_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limited = dict[str, bool]()

    def told(name: str) -> None:
        plain = getattr(command, name)

        def seen(*given: Any) -> Any:
            limited[name] = clock._END_S.get() < inf
            return plain(*given)

        monkeypatch.setattr(command, name, seen)

    told("question")
    told("recalibrated")
    monkeypatch.setattr(
        sys, "argv", ["rlhfsim", "design", *TINY, "--time-limit", "60s", "--out", str(tmp_path / "p.json")]
    )
    with pytest.raises(SystemExit):
        entry.main()
    assert limited == {"question": True, "recalibrated": False}
