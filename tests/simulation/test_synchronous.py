"""The synchronous step on the clock, against timetables worked out by hand and the closed form."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfsim.kernels.cost import Cost, Resource, part, total
from rlhfsim.rollout.environment import RESTS_ON, Turns, answered_at_least, halves
from rlhfsim.rollout.generation import FINISH_POINTS
from rlhfsim.simulation.result import Simulated
from rlhfsim.simulation.run import run_programs
from rlhfsim.simulation.shared_links import use_of
from rlhfsim.simulation.simulator import Simulator
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.workload.workload import Environment, Workload
from rlhfsim.step.calls import CallSetting
from rlhfsim.step.iteration import Program, closed_form
from rlhfsim.step.timetable import ROLLOUT, STREAM_CHUNKS, SYNC, Step, streamed_ends

STREAMING = Schedule(streaming=True)
SETTING = CallSetting(
    models=models_of(Workload(model="qwen3-0.6b")),
    workload=Workload(model="qwen3-0.6b"),
    cluster=Cluster(node_groups=(node_group("h100", 32),)),
    placement=Placement(
        pools=tuple(ResourcePool(name=n, start=8 * i, gpus=8) for i, n in enumerate("abc")),
        actor=RolePlacement(pool="a", layout=Layout(dp=8)),
        rollout=RolloutPlacement(pool="b", layout=RolloutLayout(dp=8)),
    ),
)


def seconds(value: float, resource: Resource = "compute", rests_on: str = "test") -> Cost:
    return Cost(parts=(part(resource, value, rests_on),)) if value else Cost()


def step(name: str, pools: str, cost: float | Cost, *needs: str, streams: bool = False) -> Step:
    priced = cost if isinstance(cost, Cost) else seconds(cost)
    return Step(name=name, pools=tuple(pools.split("+")), cost=priced, needs=needs, streams=streams)


def program(*steps: Step, turns: Turns | None = None, finish: Any = None) -> Program:
    cost = next((s.cost for s in steps if s.name == ROLLOUT), Cost())
    even = tuple(cost.seconds * (i + 1) / FINISH_POINTS for i in range(FINISH_POINTS))
    made: Any = SimpleNamespace(cost=cost, finish=finish or even, kv_tokens=1000.0)
    return Program(steps=steps, generation=made, continuous=None, tokens=1.0, gpus=24, turns=turns)


def ran(priced: Program, schedule: Schedule | None = None, count: int = 1) -> Simulated:
    return run_programs(Simulator(SETTING, record=True), [priced] * count, schedule or Schedule())


def table(found: Simulated) -> dict[str, tuple[float, float]]:
    return {p.name: (round(p.start, 6), round(p.end, 6)) for p in found.iteration.phases}


def spans(found: Simulated, pool: str) -> list[tuple[str, float, float]]:
    assert found.trace is not None
    return [(s.name, round(s.start_s, 6), round(s.end_s, 6)) for s in found.trace.spans if s.pool == pool]


def same(priced: Program, schedule: Schedule | None = None) -> Simulated:
    """The simulation, which must be the closed form, phase by phase."""
    plain = schedule or Schedule()
    expected, found = closed_form(priced, plain), ran(priced, plain)
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-9)
    assert found.iteration.critical == expected.critical
    for a, b in zip(expected.phases, found.iteration.phases, strict=True):
        assert (a.name, a.pools, a.after) == (b.name, b.pools, b.after)
        assert b.start == pytest.approx(a.start, rel=1e-9, abs=1e-9)
        assert b.end == pytest.approx(a.end, rel=1e-9, abs=1e-9)
    return found


# --- timetables by hand -----------------------------------------------------------------------------

G = ROLLOUT


def test_one_pool_runs_its_calls_one_after_the_other() -> None:
    found = same(
        program(
            step(f"{G}.load", "a", 1),
            step(G, "a", 60, f"{G}.load"),
            step(f"{G}.unload", "a", 0.5, G),
            step("reference.logprob", "a", 3, G),
            step("actor.logprob", "a", 4, G),
            step("actor.train", "a", 20, "reference.logprob", "actor.logprob"),
            step(SYNC, "a", 5, "actor.train"),
        )
    )
    assert found.seconds == 1 + 60 + 0.5 + 3 + 4 + 20 + 5
    assert spans(found, "a") == [
        ("actor.generate.load", 0, 1),
        ("actor.generate", 1, 61),
        ("actor.generate.unload", 61, 61.5),
        ("reference.logprob", 61.5, 64.5),
        ("actor.logprob", 64.5, 68.5),
        ("actor.train", 68.5, 88.5),
        ("actor.sync", 88.5, 93.5),
    ]


SPLIT = (
    step(G, "a", 60),
    step("reward.score", "b", 6, G),
    step("reference.logprob", "a", 3, G),
    step("critic.value", "b", 2, G),
    step("actor.logprob", "a", 4, G),
    step("critic.train", "b", 12, "reward.score", "reference.logprob", "critic.value", "actor.logprob"),
    step("actor.train", "a", 20, "reward.score", "reference.logprob", "critic.value", "actor.logprob"),
    step(SYNC, "a", 5, "actor.train"),
)


def test_critic_and_reward_run_beside_actor_and_reference() -> None:
    # a: 60 generate, 63 reference, 67 old log-probs; b: 66 reward, 68 values; both train from 68
    found = same(program(*SPLIT))
    assert table(found) == {
        "actor.generate": (0, 60),
        "reward.score": (60, 66),
        "reference.logprob": (60, 63),
        "critic.value": (66, 68),
        "actor.logprob": (63, 67),
        "critic.train": (68, 80),
        "actor.train": (68, 88),
        "actor.sync": (88, 93),
    }
    names = [found.iteration.phases[i].name for i in found.iteration.critical]
    assert names == [G, "reward.score", "critic.value", "actor.train", SYNC]


def test_a_pool_keeps_the_order_of_the_dataflow_even_where_a_later_call_is_ready_first() -> None:
    # x needs 10 s of c; y is ready at once but stands behind x in pool a
    found = same(program(step(G, "c", 10), step("x.score", "a", 2, G), step("y.score", "a", 3)))
    assert table(found)["y.score"] == (12, 15)


def test_a_sync_waits_for_both_its_pools() -> None:
    found = same(
        program(
            step(G, "b", 10),
            step("actor.train", "a", 4, G),
            step("reward.score", "b", 9, G),
            step(SYNC, "a+b", 2, "actor.train"),
        )
    )
    assert table(found)[SYNC] == (19, 21)  # b scores until 19
    assert ("actor.sync", 19, 21) in spans(found, "a")
    assert ("actor.sync", 19, 21) in spans(found, "b")


def test_steps_run_back_to_back_and_a_step_waits_for_every_pool_of_the_one_before() -> None:
    # b still trains the critic until 24 when a is done at 22: the next batch starts at 24
    one = program(
        step(G, "a", 10),
        step("critic.train", "b", 14, G),
        step("actor.train", "a", 10, G),
        step(SYNC, "a", 2, "actor.train"),
    )
    found = ran(one, count=3)
    assert found.step_seconds == (24, 24, 24)
    assert [s[1] for s in spans(found, "a") if s[0] == G] == [0, 24, 48]
    assert found.seconds == 24


def test_streaming_hides_all_but_the_last_piece_when_training_keeps_up() -> None:
    # 8 pieces arrive 7.5 s apart; each takes 3/8 + 4/8 + 20/8 s of pool t, far less than 7.5 s
    found = same(
        program(
            step(G, "b", 60),
            step("reference.logprob", "a", 3, G, streams=True),
            step("actor.logprob", "a", 4, G, streams=True),
            step("actor.train", "a", 20, "reference.logprob", "actor.logprob", streams=True),
            step(SYNC, "a+b", 5, "actor.train"),
        ),
        STREAMING,
    )
    assert found.seconds == pytest.approx(60 + (3 + 4 + 20) / 8 + 5)
    assert spans(found, "a")[:4] == [
        ("reference.logprob", 7.5, 7.875),
        ("actor.logprob", 7.875, 8.375),
        ("actor.train", 8.375, 10.875),
        ("reference.logprob", 15, 15.375),
    ]


RULES = Step(
    name="rules.score", pools=("cpu",), cost=seconds(16), needs=(G,), streams=True, ahead=True, latency_s=4
)
"""On CPU workers, while others are decoded; a response takes 4 s."""


def test_rules_that_score_ahead_leave_their_last_piece_and_at_least_a_response() -> None:
    scores = step("actor.logprob", "b", 1, G), step("actor.train", "b", 5, "actor.logprob", RULES.name)
    found = same(program(step(G, "b", 60), RULES, *scores))
    # 8 pieces arrive 7.5 s apart and take 2 s each; the last response is there at 60 s and takes 4
    assert table(found)[RULES.name] == (60, 64)
    assert found.seconds == pytest.approx(64 + 5)
    assert spans(found, "cpu")[:2] == [(RULES.name, 7.5, 9.5), (RULES.name, 15, 17)]
    # too slow to keep up: 8 pieces of 10 s, from the first on
    slow = same(program(step(G, "b", 60), replace(RULES, cost=seconds(80)), *scores))
    assert slow.seconds == pytest.approx(7.5 + 80 + 5)
    # all responses end together, the tail leaves nothing to hide behind
    together = same(program(step(G, "b", 60), RULES, *scores, finish=(60.0,) * 64))
    assert together.seconds == pytest.approx(60 + 16 + 5)
    # a framework that scores the whole batch
    whole = same(program(step(G, "b", 60), replace(RULES, ahead=False), *scores))
    assert whole.seconds == pytest.approx(60 + 16 + 5)


def test_streamed_work_that_is_too_slow_keeps_its_pool_busy_from_the_first_piece() -> None:
    steps = (
        step(G, "b", 10),
        step("x.score", "a", 8, G, streams=True),
        step("y.score", "a", 8, G, streams=True),
    )
    found = same(program(*steps), STREAMING)
    assert found.seconds == pytest.approx(10 / 8 + 16)
    finish = tuple(10 * (i + 1) / 64 for i in range(64))
    assert found.seconds == pytest.approx(streamed_ends(list(steps), STREAMING, finish)["y.score"])


def test_behind_a_call_that_waits_for_the_whole_batch_none_streams() -> None:
    found = same(
        program(
            step(G, "b", 8),
            step("reward.score.load", "a", 1, G),
            step("reward.score", "a", 2, "reward.score.load"),
            step("reference.logprob", "a", 4, G, streams=True),
        ),
        STREAMING,
    )
    assert spans(found, "a") == [
        ("reward.score.load", 8, 9),
        ("reward.score", 9, 11),
        ("reference.logprob", 11, 15),
    ]


# --- shared links -----------------------------------------------------------------------------------


def stored(compute: float, storage: float) -> Cost:
    return seconds(compute) + seconds(storage, "storage", "shared_storage_efficiency")


def test_two_calls_at_six_tenths_of_one_link_take_a_fifth_longer() -> None:
    # both from 10 s; 0.6 x + 0.6 x = 1: 12 s of work take 14.4 s
    priced = program(
        step(G, "c", 10),
        step("critic.train", "a", stored(4.8, 7.2), G),
        step("actor.train", "b", stored(4.8, 7.2), G),
    )
    found = ran(priced)
    assert table(found)["actor.train"] == (10, 24.4)
    assert closed_form(priced, Schedule()).seconds == pytest.approx(22)
    cost = found.iteration.phases[2].cost
    assert cost.by_resource() == {"compute": pytest.approx(4.8), "storage": pytest.approx(7.2 + 2.4)}
    assert cost.parts[-1].rests_on == "contention"
    assert found.lost == {"storage": pytest.approx(4.8)}
    assert found.trace is not None
    waits = [s.attributes.get("contention_s") for s in found.trace.spans]
    assert waits == [None, pytest.approx(2.4), pytest.approx(2.4)]


def test_a_slowed_call_delays_what_waits_for_it() -> None:
    # both read the file system for 6 s at once: 12 s; then b trains 5 s alone
    found = ran(
        program(
            step("x.load", "a", stored(0, 6)),
            step("y.load", "b", stored(0, 6)),
            step("y.train", "b", 5, "y.load"),
        )
    )
    assert table(found)["y.train"] == (12, 17)
    assert found.seconds == pytest.approx(17)


def test_generation_that_shares_a_link_hands_its_pieces_on_later() -> None:
    # generation 16 s, all of it on the shared link, beside a load of 8 s: both at half rate until
    # 16 s, when 8 s of generation are done; pieces every 4 s until then, every 2 s after
    found = ran(
        program(
            step("critic.train", "c", stored(0, 8)),
            step(G, "b", stored(0, 16)),
            step("x.score", "a", 0.8, G, streams=True),
        ),
        STREAMING,
    )
    starts = [s[1] for s in spans(found, "a")]
    assert starts == [4, 8, 12, 16, 18, 20, 22, 24]
    assert found.seconds == pytest.approx(24.1)


def test_busy_time_of_a_pool_is_its_costs_and_what_links_added() -> None:
    found = ran(
        program(
            step(G, "b", 16),
            step("x.score", "a", 3, G, streams=True),
            step("y.score", "a", stored(1, 3), G),
            step("z.score", "c", stored(1, 5), G),
            step("actor.train", "a", 7, "y.score", "z.score"),
        ),
        STREAMING,
    )
    for pool in "abc":
        mine = [p.cost.seconds for p in found.iteration.phases if p.pools == (pool,)]
        extra = 3 - mine[0] if pool == "a" else 0.0  # a streamed call shows its exposed part
        assert sum(e - s for _, s, e in spans(found, pool)) == pytest.approx(sum(mine) + extra)


# --- environments -----------------------------------------------------------------------------------


def in_turns(turns: Turns, *steps: Step) -> Program:
    """Generation by turns, then the other steps."""
    cost = total(turns.buffers)
    waits = max(turns.ends()) - cost.seconds
    rollout = cost + seconds(waits, "host", RESTS_ON)
    return program(step(G, "b", rollout), *steps, turns=turns)


def turns(count: int, workers: int, each: float, *buffers: tuple[float, int]) -> Turns:
    return Turns(
        buffers=tuple(seconds(cost) for cost, _ in buffers),
        sequences=tuple(n for _, n in buffers),
        environment=Environment(turns=count, seconds_per_turn=each, workers=workers),
    )


def test_one_buffer_waits_for_its_environment_after_every_turn() -> None:
    # 3 turns of 4 s; 100 sequences on 64 workers answer in 2 rounds of 0.5 s
    found = same(in_turns(turns(3, 64, 0.5, (12, 100)), step("x.score", "a", 2, G)))
    assert found.seconds == pytest.approx(12 + 3 * 1 + 2)
    assert spans(found, "cpu") == [
        ("environment.answer", 4, 5),
        ("environment.answer", 9, 10),
        ("environment.answer", 14, 15),
    ]
    assert spans(found, "b") == [(G, 0, 4), (G, 5, 9), (G, 10, 14)]


def test_two_buffers_alternate_and_hide_an_environment_that_is_faster() -> None:
    # each half: 2 turns of 3 s, answered in 2 s. GPUs: A 0-3, B 3-6, A 6-9, B 9-12, never idle;
    # the last answer comes at 14
    found = same(in_turns(turns(2, 50, 1.0, (6, 100), (6, 100))))
    assert found.seconds == pytest.approx(2 * 2 * 3 + 2)
    assert spans(found, "b") == [(G, 0, 3), (G, 3, 6), (G, 6, 9), (G, 9, 12)]
    assert [s[1:] for s in spans(found, "cpu")] == [(3, 5), (6, 8), (9, 11), (12, 14)]


def test_two_buffers_queue_for_workers_that_are_short() -> None:
    # turns of 3 s, answers of 4 s on the same workers: A answered 7, B 11, A 15, B 19
    found = same(in_turns(turns(2, 50, 2.0, (6, 100), (6, 100))))
    assert [s[1:] for s in spans(found, "cpu")] == [(3, 7), (7, 11), (11, 15), (15, 19)]
    assert found.seconds == pytest.approx(2 * 2 * 4 + 3)  # 2 T max(g, a) + min(g, a)


def test_two_buffers_do_not_queue_where_workers_suffice_for_both() -> None:
    # turns of 3 s, answers of 4 s, side by side: A generates 0-3, 7-10; B 3-6, 10-13, answered at 17
    found = same(in_turns(turns(2, 200, 4.0, (6, 100), (6, 100))))
    assert [s[1:] for s in spans(found, "cpu")] == [(3, 7), (6, 10), (10, 14), (13, 17)]
    assert found.seconds == pytest.approx((2 - 1) * max(6, 7) + 6 + 4)


def test_the_first_half_batch_is_handed_on_when_it_has_its_last_answer() -> None:
    # A is done at 11, B at 14: four pieces of 0.5 s start at 11, the other four at 14
    found = ran(
        in_turns(turns(2, 50, 1.0, (6, 100), (6, 100)), step("x.score", "a", 4, G, streams=True)), STREAMING
    )
    assert [s[1] for s in spans(found, "a")] == [11, 11.5, 12, 12.5, 14, 14.5, 15, 15.5]


@given(
    st.integers(1, 5),
    st.integers(1, 300),
    st.floats(0, 5),
    st.lists(st.tuples(st.floats(0.1, 20), st.integers(1, 200)), min_size=1, max_size=2),
    st.sampled_from([(0.0, 0), (7.0, 0), (7.0, 50)]),
)
def test_turns_take_as_long_as_their_closed_form(
    count: int, workers: int, each: float, buffers: list[tuple[float, int]], sandboxes: tuple[float, int]
) -> None:
    made = turns(count, workers, each, *sorted(buffers, reverse=True))
    cold, warm = sandboxes
    made = replace(made, environment=replace(made.environment, cold_start=cold, warm=warm))
    found = ran(in_turns(made))
    assert found.seconds == pytest.approx(max(made.ends()), rel=1e-9)
    # no shorter than the GPUs, the workers or one sequence alone
    generated = sum(cost for cost, _ in buffers)
    assert found.seconds >= generated * (1 - 1e-9)
    alone = max(b.seconds + count * made.answer(i, 1) for i, b in enumerate(made.buffers))
    assert found.seconds >= alone * (1 - 1e-9)


def test_halves_cover_the_batch_and_one_prompt_stays_whole() -> None:
    assert halves(9, True) == (5, 4)
    assert halves(9, False) == (9,)
    assert halves(1, True) == (1,)


def test_an_engine_that_never_drains_is_no_faster_than_its_environment() -> None:
    # 64 sequences x 3 turns x 2 s on 16 workers: 24 s a batch
    workload = Workload(prompts=64, environment=Environment(turns=3, seconds_per_turn=2.0, workers=16))
    assert answered_at_least(seconds(10), workload).by_resource() == {"environment": 24.0}
    assert answered_at_least(seconds(30), workload) == seconds(30)
    assert answered_at_least(seconds(10), Workload()) == seconds(10)


def test_slow_ranks_hand_samples_on_later() -> None:
    # priced at 8 s with pieces every second, run in 16 s: pieces every 2 s
    priced = program(step(G, "b", 8), step("x.score", "a", 0.8, G, streams=True))
    slow = (step(G, "b", 16), priced.steps[1])
    found = ran(replace(priced, steps=slow), STREAMING)
    assert [s[1] for s in spans(found, "a")] == [2, 4, 6, 8, 10, 12, 14, 16]


# --- any program ------------------------------------------------------------------------------------

COSTS = st.builds(
    lambda parts: Cost(parts=tuple(part(r, s, on) for r, s, on in parts)),
    st.lists(
        st.tuples(
            st.sampled_from(["compute", "network", "storage", "host", "pcie", "nvlink"]),
            st.floats(0.01, 20),
            st.sampled_from(["x", "shared_storage_efficiency"]),
        ),
        max_size=3,
    ),
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Generation first (a load before it), then calls with needs among those before them."""
    steps = []
    if draw(st.booleans()):
        steps.append(step(f"{G}.load", "b", draw(COSTS)))
    steps.append(step(G, "b", draw(COSTS) + seconds(draw(st.floats(0.1, 30))), *(s.name for s in steps)))
    for i in range(draw(st.integers(0, 7))):
        needs = draw(st.sets(st.sampled_from([s.name for s in steps]), max_size=3))
        pools = draw(st.sampled_from(["a", "b", "c", "cpu", "a+b", "a+c"]))
        streams = draw(st.booleans()) and "+" not in pools
        made = step(f"x{i}.score", pools, draw(COSTS), *sorted(needs), streams=streams)
        ahead, latency_s = streams and draw(st.booleans()), draw(st.sampled_from([0.0, 3.0]))
        steps.append(replace(made, ahead=ahead, latency_s=latency_s))
    cuts = draw(st.lists(st.floats(0, 1), min_size=STREAM_CHUNKS - 1, max_size=STREAM_CHUNKS - 1))
    generated = next(s.cost.seconds for s in steps if s.name == G)
    return program(*steps, finish=tuple(generated * c for c in [*sorted(cuts), 1.0]))


def unshared(priced: Program) -> Program:
    """The same without anything that two pools share."""
    steps = tuple(
        replace(s, cost=Cost(parts=tuple(part(p.resource, p.seconds, "x") for p in s.cost.parts)))
        for s in priced.steps
    )
    return program(*steps, finish=priced.generation.finish if priced.generation else None)


def test_a_call_without_work_ends_its_latency_after_the_last_sample() -> None:
    scored = replace(step("x.score", "a", Cost(parts=()), G, streams=True), ahead=True, latency_s=3.0)
    priced = program(step(G, "b", 1.0), scored)
    finish = priced.generation.finish if priced.generation else None
    assert finish is not None
    assert ran(priced, Schedule()).seconds == closed_form(priced, Schedule()).seconds == finish[-1] + 3.0


@settings(max_examples=40, deadline=None)
@given(programs(), st.booleans())
def test_without_shared_links_the_simulation_is_the_closed_form(priced: Program, streaming: bool) -> None:
    schedule = Schedule(streaming=streaming)
    alone = unshared(priced)
    found = ran(alone, schedule)
    assert found.seconds == pytest.approx(closed_form(alone, schedule).seconds, rel=1e-9)
    assert found.lost == {}


@settings(max_examples=40, deadline=None)
@given(programs(), st.booleans())
def test_shared_links_never_make_a_step_shorter_than_its_closed_form(
    priced: Program, streaming: bool
) -> None:
    schedule = Schedule(streaming=streaming)
    found, bound = ran(priced, schedule), closed_form(priced, schedule)
    assert found.seconds >= bound.seconds * (1 - 1e-9)
    assert found.seconds == pytest.approx(found.step_seconds[0], rel=1e-9)  # the chain has no gap
    for a, b in zip(bound.phases, found.iteration.phases, strict=True):
        assert b.end >= a.end * (1 - 1e-9) - 1e-9


@settings(max_examples=40, deadline=None)
@given(programs(), st.booleans(), st.data())
def test_without_shared_links_a_faster_call_never_makes_the_step_longer(
    priced: Program, streaming: bool, data: st.DataObject
) -> None:
    slow = unshared(priced)
    i = data.draw(st.integers(0, len(slow.steps) - 1))
    factor = data.draw(st.floats(0.1, 1))
    steps = [replace(s, cost=s.cost.scaled(factor if j == i else 1.0)) for j, s in enumerate(slow.steps)]
    assert slow.generation is not None
    shrunk = factor if slow.steps[i].name == G else 1.0
    fast = program(*steps, finish=tuple(f * shrunk for f in slow.generation.finish))
    schedule = Schedule(streaming=streaming)
    assert ran(fast, schedule).seconds <= ran(slow, schedule).seconds * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(programs(), st.floats(0.1, 1))
def test_everything_faster_by_a_factor_is_faster_by_that_factor(priced: Program, factor: float) -> None:
    steps = [replace(s, cost=s.cost.scaled(factor), latency_s=s.latency_s * factor) for s in priced.steps]
    assert priced.generation is not None
    fast = program(*steps, finish=tuple(f * factor for f in priced.generation.finish))
    assert ran(fast).seconds == pytest.approx(ran(priced).seconds * factor, rel=1e-6)


def test_a_faster_call_can_delay_another_on_a_shared_link() -> None:
    # y reads for 4 s while a computes 4 s, then x reads; with a computing 2 s both read together
    def made(computing: float) -> Program:
        return program(
            step(G, "a", computing),
            step("x.load", "a", stored(0, 4), G),
            step("y.load", "b", stored(0, 4)),
            step("y.train", "b", 20, "y.load"),
        )

    assert (ran(made(4.0)).seconds, ran(made(2.0)).seconds) == (24, pytest.approx(26))


def test_the_link_of_a_call_is_that_of_its_pool() -> None:
    simulator = Simulator(SETTING)
    assert use_of(seconds(1, "network"), simulator.links(("a",))) == {"nic:a": 1.0}
    assert simulator.links(("cpu",)) == {}


def test_the_kv_cache_is_counted_on_each_gpu_while_samples_are_generated() -> None:
    priced = program(step("actor.generate", "b", 10.0), step("actor.train", "a", 5.0, "actor.generate"))
    found = ran(priced)
    assert found.trace is not None
    held = [(c.time_s, c.value, c.pool) for c in found.trace.counters if c.name == "kv_bytes"]
    full = 1000 * SETTING.models.actor.kv_bytes_per_token()
    assert held == [(0.0, pytest.approx(full), "b"), (10.0, 0.0, "b")]
