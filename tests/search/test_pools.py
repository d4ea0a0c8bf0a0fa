"""Combinations of a pool: dominance never loses the best, merging is the full product, counts add up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from math import inf, prod
from typing import Any

import numpy as np
import pytest

from rlhfsim.memory.components import ENGINE, NO_SYNC, ROLE, RUNNING, STATES
from rlhfsim.memory.risk import fitting
from rlhfsim.memory.role_bytes import Extra
from rlhfsim.search import merging
from rlhfsim.search.agreement import Agreement
from rlhfsim.search.columns import Numbers, OptionTimes
from rlhfsim.search.dominance import distinct, lean, undominated
from rlhfsim.search.merging import PoolTable, pool_table
from rlhfsim.search.options import OptionTable, PriceKey, agreed
from rlhfsim.search.pools import Subproblem, alone
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile, parse_cluster
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.dataflow import dataflow
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.timetable import STREAM_CHUNKS

PROFILE = load_profile("h100")
USABLE = PROFILE.usable_memory.value
HOST = PROFILE.node.host_memory.value
GROUP = ("actor", "critic", "rollout")


def role_table(rng: np.random.Generator, role: str, options: int) -> OptionTable:
    """Options of a role with random times and bytes."""
    rollout = role == "rollout"
    times = rng.integers(1, 6, size=(options, 6)).astype(float)
    times[:, [0, 2, 3, 5]] *= rng.integers(0, 2, size=(options, 4))
    if rollout:
        times[:, 3:] = 0.0
        held = rng.uniform(0, 0.12, size=(options, 8)) * USABLE
        held[:, 6:] = rng.integers(0, 2, size=(options, 2))
        rows = np.zeros(options, dtype=ENGINE)
        for name, column in zip((*RUNNING, "sleep", "recreated"), held.T, strict=True):
            rows[name] = column
    else:
        held = rng.uniform(0, 0.06, size=(options, 2, 19)) * USABLE
        rows = np.zeros((options, 2), dtype=ROLE)
        columns = [
            *((group, name) for group in ("kept", "states") for name in STATES),
            *((group, name) for group in ("score", "train") for name in Extra._fields),
        ]
        for i, (group, name) in enumerate(columns):
            rows[group][name] = held[..., i]
        rows["framework"], rows["nccl"] = held[..., 16], held[..., 17]
    layout = RolloutLayout(tp=1, dp=8) if rollout else Layout(dp=8)
    made: Any = (
        RolloutPlacement(pool="alone", layout=layout)
        if rollout
        else RolePlacement(pool="alone", layout=layout)
    )  # type: ignore[arg-type]
    ends = np.sort(rng.uniform(0, 1, size=(options, STREAM_CHUNKS)), axis=1)
    return OptionTable(
        key=PriceKey(role=role, hardware=0, gpus=8),
        legal=options,
        refused=Counter(),
        options=(made,) * options,
        times=OptionTimes(times),
        bytes=rows,
        host=rng.uniform(0, 0.06, options) * HOST,
        pieces=ends,
        continuous=rng.uniform(1, 5, options),
        no_start=np.zeros(options),
        sync_class=rng.integers(0, 2, options),
    )


def subproblem(rng: np.random.Generator, **changes: Any) -> Subproblem:
    """A pool of three roles with a random weight path between actor and rollout."""
    tables = tuple(role_table(rng, s, int(rng.integers(2, 7))) for s in GROUP)
    paths = rng.uniform(0, 3, size=(2, 2))

    def between(one: Any, two: Any) -> Any:
        return paths[tables[0].sync_class[one], tables[2].sync_class[two]]

    given: dict[str, Any] = {
        "group": GROUP,
        "tables": tables,
        "originals": tables,
        "calls": dataflow(Workload(reference="none")),
        "workload": Workload(reference="none"),
        "hardware": NodeGroup(profile=PROFILE, gpus=8, gpus_per_node=8),
        "gpus": 8,
        "sync": NO_SYNC,
        "max_oom": 0.1,
        "max_memory": inf,
        "sync_seconds": between,
        "shares_host": False,
        "pace": "batches",
        "rules_streamed": False,
        "wants_memory": False,
        "frees": "any",
        "whole": True,
    }
    return Subproblem(**(given | changes))


def seconds(numbers: Any) -> Any:
    """A step of one pool: monotone in a, F and X."""
    return numbers.until_generated_s + numbers.until_free_s + numbers.training_s


def by_hand(c: Subproblem) -> list[tuple[float, float]]:
    """(seconds, peak bytes) of every combination that fits, added up in plain loops."""
    found = []
    actor, critic, rollout = c.tables
    states = [t.sums(PROFILE, NO_SYNC) for t in c.tables]
    asleep = [s["idle"] for s in states]
    for i, j, k in product(*map(range, map(len, c.tables))):
        a, b, r = asleep[0][i], asleep[1][j], states[2]["ready"][k]
        rest = states[2]["idle"][k]
        moments = [
            a + b + r,
            a + b + states[2]["running"][k],
            a + states[1]["forward"][j] + rest,
            states[0]["forward"][i] + b + rest,
            a + states[1]["train"][j] + rest,
            states[0]["train"][i] + b + rest,
            states[0]["sync"][i] + b + r,
        ]
        fits = all(fitting(m, USABLE, c.max_oom) for m in moments)
        host = 8 * (actor.host[i] + critic.host[j] + rollout.host[k])
        if fits and host <= HOST:
            path = float(c.sync_seconds(np.array([i]), np.array([k]))[0])  # type: ignore[misc]
            total = actor.times.total[i] + critic.times.total[j] + rollout.times.total[k] + path
            found.append((float(total), max(float(m[:, 0].max()) for m in moments)))
    return found


def adds_up(table: PoolTable, considered: int) -> bool:
    """Whether every combination is counted once."""
    dropped = table.bounded + table.infeasible + table.dominated
    return dropped + len(table) == considered == table.considered


def test_some_options_of_a_table_share_its_bytes() -> None:
    table = role_table(np.random.default_rng(0), "actor", 6)
    some = table.only(np.array([4, 1, 5])).only(np.array([2, 0]))
    assert np.array_equal(some.held, table.bytes[[5, 4]])
    assert some.bytes is table.bytes


@pytest.mark.parametrize("seed", range(40))
def test_the_best_of_a_pool_is_the_best_of_the_full_product(seed: int) -> None:
    c = subproblem(np.random.default_rng(seed))
    table, every = pool_table(c, seconds, inf), by_hand(c)
    assert adds_up(table, prod(map(len, c.tables)))
    assert table.infeasible <= prod(map(len, c.tables)) - len(every)
    assert bool(len(table)) == bool(every)
    if every:
        assert float(seconds(table.numbers).min()) == pytest.approx(min(s for s, _ in every))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("changes", [{}, {"sync_seconds": None}, {"frees": "must not"}, {"frees": "must"}])
def test_what_good_combinations_beat_at_once_is_dominated(
    seed: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same ones stay, wherever the other end of the weight sync sits and whatever may leave the GPU."""
    c = subproblem(np.random.default_rng(400 + seed), pace="continuous", **changes)
    *others, rollout = c.tables
    some = tuple(replace(option, sleep=i % 2) for i, option in enumerate(rollout.options))  # type: ignore[type-var]
    c = replace(c, tables=(*others, replace(rollout, options=some)))
    least = float(seconds(pool_table(c, seconds, inf).numbers).min(initial=inf))
    late = pool_table(c, seconds, 1.2 * least)
    monkeypatch.setattr(merging, "LOOKED_AT", 0)
    early = pool_table(c, seconds, 1.2 * least)
    assert adds_up(early, prod(map(len, c.tables)))
    assert early.infeasible <= late.infeasible
    assert {*map(tuple, early.rows.tolist())} == {*map(tuple, late.rows.tolist())}


@pytest.mark.parametrize("seed", range(10))
def test_a_quick_look_finds_the_same_in_parts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of each class, whether they are chosen from all combinations or from a few at a time."""
    c, found = subproblem(np.random.default_rng(500 + seed), pace="continuous"), []
    for few in (10**6, 2):
        monkeypatch.setattr(merging, "CHUNK", few)
        monkeypatch.setattr(merging, "BATCH", few)
        monkeypatch.setattr(merging, "OF_A_CLASS", 2)
        look = merging._Merge(c, alone(c), seconds, inf, None, quick=True)
        look.run()
        found.append(look.rows.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(10))
def test_options_that_share_their_bytes_make_the_same_pool(seed: int) -> None:
    c = subproblem(np.random.default_rng(600 + seed), sync_seconds=None)
    rows = [np.array([0, 1, 0, 1, 1]) for _ in c.tables]
    shared = tuple(t.only(row) for t, row in zip(c.tables, rows, strict=True))
    own = tuple(replace(t, bytes=t.held, places=None, of_rows={}) for t in shared)
    assert all(t.states(PROFILE, NO_SYNC)[1] is not None for t in shared)
    one, other = (pool_table(replace(c, tables=some, originals=some), seconds, inf) for some in (shared, own))
    assert np.array_equal(one.rows, other.rows)
    assert np.array_equal(one.numbers.values, other.numbers.values)
    assert (one.bounded, one.infeasible, one.dominated) == (other.bounded, other.infeasible, other.dominated)
    assert one.shortfall == other.shortfall


@pytest.mark.parametrize("seed", range(20))
def test_the_leanest_of_a_pool_is_kept_when_memory_is_the_objective(seed: int) -> None:
    c = subproblem(np.random.default_rng(100 + seed), wants_memory=True)
    table, every = pool_table(c, seconds, inf), by_hand(c)
    if every:
        assert float(table.numbers.peak.min()) == pytest.approx(min(b for _, b in every))


@pytest.mark.parametrize("seed", range(20))
def test_a_limit_drops_only_combinations_that_cannot_beat_it(seed: int) -> None:
    c = subproblem(np.random.default_rng(200 + seed))
    every = sorted(s for s, _ in by_hand(c))
    if not every:
        return
    limit = every[len(every) // 3]
    table = pool_table(c, seconds, limit)
    assert adds_up(table, prod(map(len, c.tables)))
    assert float(seconds(table.numbers).min()) == pytest.approx(every[0])
    assert (seconds(table.numbers) <= limit).all()
    assert len(pool_table(c, seconds, every[0] / 2)) == 0


def test_a_beam_keeps_few_parts_and_never_finds_better_ones() -> None:
    for seed in range(300, 310):
        c = subproblem(np.random.default_rng(seed))
        exact, quick = pool_table(c, seconds, inf), pool_table(c, seconds, inf, beam=2)
        assert len(quick) <= 2
        if len(quick):
            assert float(seconds(quick.numbers).min()) >= float(seconds(exact.numbers).min())


def test_where_nothing_may_leave_the_gpu_a_beam_is_of_roles_that_stay() -> None:
    c = subproblem(np.random.default_rng(0), frees="must not")
    lean_tables = [replace(t, bytes=np.zeros_like(t.bytes), host=np.zeros(len(t))) for t in c.tables]
    actor, critic, rollout = lean_tables
    awake: Any = [replace(role, sleep=0) for role in rollout.options]  # type: ignore[call-arg]
    others = [critic, replace(rollout, options=tuple(awake))]
    actor = actor.only(np.array([0, 0]))
    leaves: Any = replace(actor.options[1], offload_between=True)  # type: ignore[call-arg]
    actor = replace(actor, options=(leaves, actor.options[1]))
    actor.times.values[1] += 1.0  # the one that stays is slower
    c = replace(c, tables=(actor, *others), originals=(actor, *others))
    for beam in (1, None):
        table = pool_table(c, seconds, inf, beam=beam)
        assert len(table)
        assert set(table.rows[:, 0].tolist()) == {1}
    assert adds_up(table, prod(map(len, c.tables)))


def test_where_the_other_end_sits_elsewhere_every_class_of_the_sync_keeps_its_best() -> None:
    for seed in range(400, 410):
        free = subproblem(np.random.default_rng(seed), sync_seconds=None)
        table = pool_table(free, seconds, inf)
        if not len(table):
            continue
        classes = free.tables[0].sync_class[table.rows[:, 0]]
        whole = subproblem(np.random.default_rng(seed), sync_seconds=lambda one, two: np.zeros(len(one)))
        best = min(s for s, _ in by_hand(whole))
        assert float(seconds(table.numbers).min()) == pytest.approx(best)
        assert len(set(classes.tolist())) >= 1


# --- dominance --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_what_is_left_out_is_dominated_and_what_is_kept_is_not(seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = rng.integers(0, 4, size=(60, 3)).astype(float)
    classes = rng.integers(0, 3, size=60)
    kept = set(undominated(columns, classes).tolist())
    for i in range(60):
        others = [j for j in kept if j != i and classes[j] == classes[i]]
        beaten = any((columns[j] <= columns[i]).all() for j in others)
        assert beaten == (i not in kept)


def test_of_equals_the_leanest_stays() -> None:
    columns = np.ones((3, 2))
    assert undominated(columns, np.zeros(3, np.int64), np.array([3.0, 1.0, 2.0])).tolist() == [1]


def test_columns_that_are_equal_in_all_rows_or_twice_there_decide_nothing() -> None:
    rng, classes = np.random.default_rng(4), np.zeros(60, np.int64)
    for _ in range(20):
        values = rng.integers(0, 6, size=(60, 3)).astype(float)
        columns = np.column_stack([values, np.full(60, 7.0), values[:, 1]])
        assert distinct(columns).shape[1] == 3
        assert set(undominated(distinct(columns), classes)) == set(undominated(columns, classes))
    assert distinct(np.ones((3, 4))).shape == (3, 1)


def test_any_monotone_cost_has_its_least_among_the_undominated() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        columns = rng.uniform(size=(100, 4))
        kept = undominated(columns, np.zeros(100, np.int64))
        weight = rng.uniform(size=4)
        assert (columns[kept] @ weight).min() == pytest.approx((columns @ weight).min())
        assert columns[kept].max(axis=1).min() == columns.max(axis=1).min()


def test_options_of_a_role_are_compared_within_label_class_and_moves() -> None:
    table = replace(
        role_table(np.random.default_rng(0), "critic", 3),
        times=OptionTimes(np.zeros((3, 6))),
        sync_class=np.arange(3),
    )
    same = np.ones((3, 1))
    rules: dict[str, bool] = {"by_class": False, "by_label": False, "by_move": False}
    assert len(lean(table, same, **rules)) == 1
    assert len(lean(table, same, **(rules | {"by_class": True}))) == 3
    moving = replace(table, times=OptionTimes(np.array([[0.0] * 6, [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]])))
    assert moving.moved.tolist() == [0, 1, 2]
    assert len(lean(moving, same, **(rules | {"by_move": True}))) == 3


def test_a_role_that_streams_is_not_beaten_by_a_faster_one_that_waits_for_the_whole_batch() -> None:
    # 5 s of scoring beside generation end sooner than 4 s after it
    rng = np.random.default_rng(0)
    table = replace(
        role_table(rng, "critic", 2),
        times=OptionTimes(np.array([[0.0, 5, 0, 0, 1, 0], [0.5, 3, 0.5, 0, 1, 0]])),
        bytes=np.zeros((2, 2), dtype=ROLE),
        host=np.zeros(2),
    )
    calls = dataflow(Workload(reference="none"))
    given: dict[str, Any] = {
        "group": ("critic",),
        "tables": (table,),
        "originals": (table,),
        "sync_seconds": None,
        "calls": calls,
        "whole": False,
    }
    plain = pool_table(subproblem(rng, **given), seconds, inf)
    streams = pool_table(subproblem(rng, **given, pace="pieces"), seconds, inf)
    assert plain.rows[:, 0].tolist() == [1]
    assert sorted(streams.rows[:, 0].tolist()) == [0, 1]
    assert streams.numbers.values.shape[1] == Numbers.FIXED


@pytest.mark.parametrize("seed", range(10))
def test_roles_of_which_one_key_says_the_same_are_combined_only_where_they_agree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    work, group = Workload(algorithm="grpo"), ("actor", "reference")
    numbers = [rng.integers(0, 4, 5) for _ in group]
    tables = [replace(role_table(rng, r, 5), agreed=n[:, None]) for r, n in zip(group, numbers, strict=True)]
    one_key = (Agreement(column=0, roles=group, outside=False, in_a_pool=False),)
    given = {"group": group, "workload": work, "calls": dataflow(work), "sync_seconds": None}
    c = subproblem(rng, **given, tables=tables, originals=tables, agreement=one_key)
    table = pool_table(c, seconds, inf)
    assert adds_up(table, 25)
    assert all(numbers[0][i] == numbers[1][j] for i, j in table.rows)

    def alone(i: int, j: int) -> PoolTable:
        pair = (tables[0].only(np.array([i])), tables[1].only(np.array([j])))
        return pool_table(replace(c, tables=pair, originals=pair, agreement=()), seconds, inf)

    pairs = [(i, j) for i, j in product(range(5), range(5)) if numbers[0][i] == numbers[1][j]]
    best = min((float(seconds(p.numbers).min()) for i, j in pairs if len(p := alone(i, j))), default=None)
    assert best == (float(seconds(table.numbers).min()) if len(table) else None)


def test_a_swapped_reference_agrees_with_an_actor_that_stays_and_is_cut_alike() -> None:
    question = Request(
        cluster=parse_cluster(8, "h100"), workload=Workload(), backend="megatron", framework="nemo-rl"
    )
    cut = Layout(tp=2, dp=4)
    stays = RolePlacement(pool="p", layout=cut)
    actors = (stays, replace(stays, residency="offloaded"), replace(stays, layout=Layout(tp=4, dp=2)))
    swapped = replace(stays, layout=replace(cut, zero=0, recompute="none"), residency="swapped")
    larger = replace(swapped, layout=replace(cut, zero=0, micro_batch=4))
    actor, reference = agreed(question, "actor", actors), agreed(question, "reference", (swapped, larger))
    assert actor is not None
    assert reference is not None
    assert (actor == reference[0]).all(axis=1).tolist() == [True, False, False]
    assert not (actor == reference[1]).all(axis=1).any()


@pytest.mark.parametrize("distinct", [3, 1000])
def test_a_front_is_what_no_row_before_equals_or_beats(distinct: int) -> None:
    """More rows than are compared in one go, many of them equal or few."""
    rows = np.random.default_rng(1).integers(0, distinct, (150, 4)).astype(np.float64)
    order = sorted(range(len(rows)), key=lambda i: tuple(rows[i]))
    kept = [i for n, i in enumerate(order) if not any((rows[j] <= rows[i]).all() for j in order[:n])]
    assert sorted(undominated(rows, np.zeros(len(rows), np.int64)).tolist()) == sorted(kept)
