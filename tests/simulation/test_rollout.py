"""One rollout replica, and the pool that feeds it, against timetables worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfsim.kernels.devices import device_of
from rlhfsim.rollout.continuous_batching import StepTable, one_wave, tabulate
from rlhfsim.rollout.engine_step import on
from rlhfsim.rollout.generation import Requests, generate, step_table
from rlhfsim.simulation.asynchronous.engine import ReplicaEngine, StepClock, engine_of
from rlhfsim.simulation.asynchronous.replica import RolloutReplica
from rlhfsim.simulation.asynchronous.rollout_pool import RolloutPool
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.workload.lengths import Fixed

DEVICE = device_of(node_group("h100", 8), 1.0)
MODEL = resolve_model("qwen3-0.6b")


def affine(fixed: float, each: float, read: float) -> StepTable:
    """tau(n, c) = fixed + each n + read n c: exact on any grid."""
    n, c = np.array([1.0, 2.0, 4.0, 1024.0]), np.array([1.0, 100.0, 1e6])
    return tabulate(n, c, on("compute", fixed + each * n[:, None] + read * n[:, None] * c))


def engine(
    slots: int = 4,
    capacity: float = 1e9,
    prefill: float = 0.0,
    again: float = 0.0,
    fixed: float = 1.0,
    each: float = 0.0,
    read: float = 0.0,
) -> ReplicaEngine:
    return ReplicaEngine(
        clock=StepClock(affine(fixed, each, read)),
        slots=slots,
        capacity=capacity,
        prompt=10.0,
        own=10.0,
        prefill=prefill,
        again=lambda n, c: again * n * c,
    )


def finishes(replica: RolloutReplica, until: float = math.inf) -> list[tuple[float, list[int]]]:
    found = []
    while (time := replica.next_time()) <= until and time < math.inf:
        found.append((round(time, 9), replica.fire(time)))
    return found


# --- the clock --------------------------------------------------------------------------------------


@given(n=st.integers(1, 200), start=st.floats(1, 6000), steps=st.floats(0, 6000))
def test_the_clock_is_the_step_table_and_its_own_inverse(n: int, start: float, steps: float) -> None:
    table = step_table(DEVICE, MODEL, RolloutLayout(), 200.0, 5000.0)
    clock = StepClock(table)
    one = np.ones(1)
    found = clock.seconds(n, start, steps)
    assert found == pytest.approx(
        float(table.between(one * n, one * start, one * (start + steps))[0]), rel=1e-9, abs=1e-12
    )
    assert clock.steps(n, start, found) == pytest.approx(steps, rel=1e-6, abs=1e-6)


# --- one replica ------------------------------------------------------------------------------------


def test_samples_finish_at_their_lengths_and_waiting_ones_take_their_slots() -> None:
    replica = RolloutReplica(engine(slots=2))
    replica.add(7, [3.0, 5.0, 4.0])
    # slots: 3 from 0 to 3, 5 from 0 to 5, then 4 from 3 to 7; one second a step whatever runs
    assert finishes(replica) == [(3.0, [7]), (5.0, [7]), (7.0, [7])]
    assert replica.tokens == 12
    assert replica.busy == 7


def test_a_step_is_longer_with_more_sequences_and_more_context() -> None:
    replica = RolloutReplica(engine(slots=2, fixed=1.0, each=0.5, read=0.01))
    replica.add(0, [2.0, 4.0])
    # 2 steps with two at mean contexts 10 to 12: 2 (1 + 2 x 0.5) + 0.01 x 2 x 22 = 4.44
    # 2 steps with one at contexts 12 to 14: 2 x 1.5 + 0.01 x 26 = 3.26
    assert finishes(replica) == [(4.44, [0]), (7.7, [0])]
    # contexts attended: 2 tokens x 2 at 11, 2 tokens at 13
    assert replica.attended == pytest.approx(2 * 2 * 11 + 2 * 13)


def test_a_prompt_is_prefilled_before_the_next_step() -> None:
    replica = RolloutReplica(engine(slots=4, prefill=0.25))
    replica.add(0, [3.0])
    replica.add(1, [3.0])
    assert finishes(replica) == [(3.5, [0, 1])]
    assert replica.prefilled == 0.5


def test_new_weights_make_running_sequences_prefill_again() -> None:
    replica = RolloutReplica(engine(slots=2, again=0.01))
    replica.add(0, [6.0, 6.0])
    replica.next_time()
    replica.advance(4.0)
    assert replica.context == 14.0
    replica.interrupted()  # 2 sequences of 14 tokens: 0.28 s
    assert finishes(replica) == [(6.28, [0, 0])]
    assert replica.reprefilled == pytest.approx(0.28)


def test_progress_is_fluid_and_an_interruption_without_cost_changes_nothing() -> None:
    times = []
    for stops in ((), (0.4, 1.7, 2.25)):
        replica = RolloutReplica(engine(slots=3, each=0.3, read=0.002))
        replica.add(0, [2.0, 7.0, 9.0])
        for stop in stops:
            replica.next_time()
            replica.advance(stop)
            replica.interrupted()
        times.append(finishes(replica))
    assert [t for t, _ in times[0]] == pytest.approx([t for t, _ in times[1]])


def test_a_full_cache_evicts_the_latest_and_brings_it_back() -> None:
    # own 10 tokens each: two sequences hold 20 + 2 s tokens, 30 at step 5
    replica = RolloutReplica(engine(slots=2, capacity=30.0, again=0.01))
    replica.add(0, [8.0])
    replica.add(1, [8.0])
    assert [replica.fire(replica.next_time()), replica.now, replica.preempted] == [[], 5.0, 1]
    assert replica.kv_tokens == 15
    # the first ends at 8; the second prefills 10 + 5 tokens (0.15 s) and has 3 steps left
    assert finishes(replica) == [(8.0, [0]), (11.15, [1])]
    assert replica.tokens == 16


def test_a_slow_replica_takes_longer_in_everything() -> None:
    slow, fast = (RolloutReplica(engine(prefill=0.5, again=0.1), pace) for pace in (2.0, 1.0))
    for replica in (slow, fast):
        replica.add(0, [4.0])
    assert finishes(slow) == [(9.0, [0])]
    assert finishes(fast) == [(4.5, [0])]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    slots=st.integers(1, 12),
    capacity=st.integers(70, 600),
    stops=st.lists(st.floats(0, 500), max_size=5),
)
def test_every_token_is_generated_once_and_the_cache_never_overflows(
    lengths: list[int], slots: int, capacity: int, stops: list[float]
) -> None:
    replica = RolloutReplica(engine(slots=slots, capacity=float(capacity), again=0.001, each=0.1))
    for i, length in enumerate(lengths):
        replica.add(i, [float(length)])
    done: list[int] = []
    for stop in [*sorted(stops), math.inf]:
        while (time := replica.next_time()) <= stop and time < math.inf:
            done += replica.fire(time)
            assert len(replica.running) <= slots
            assert replica.kv_tokens <= capacity * (1 + 1e-9) or len(replica.running) == 1
        if stop < math.inf:
            replica.advance(stop)
    assert sorted(done) == list(range(len(lengths)))
    assert replica.tokens == pytest.approx(sum(lengths))
    assert replica.busy >= replica.now - max(stops, default=0.0) - 1e-9


def test_a_whole_batch_on_one_replica_takes_what_generate_says() -> None:
    requests = Requests(
        prompts=8, samples=4, prompt_lengths=Fixed(value=200), response_lengths=Fixed(value=600)
    )
    lengths = np.linspace(100, 600, 32).round()
    made = generate(DEVICE, MODEL, RolloutLayout(), requests, kv_tokens=1e6, lengths=lengths)
    replica = RolloutReplica(
        engine_of(DEVICE, MODEL, RolloutLayout(), requests, 1e6, 600.0, 32.0, worker=False)
    )
    for i in range(8):
        replica.add(i, lengths[4 * i : 4 * i + 4].tolist())
    assert finishes(replica)[-1][0] == pytest.approx(made.seconds, rel=1e-6)
    assert one_wave(lengths[None, :], 200.0).tokens == pytest.approx(replica.tokens)


# --- the pool ---------------------------------------------------------------------------------------


def pool(
    lengths: float | list[float], replicas: int = 1, batch: int = 2, staleness: float = 1, **more: object
) -> RolloutPool:
    given = [lengths] if isinstance(lengths, float) else lengths
    slots = int(more.pop("slots", 4))  # type: ignore[call-overload]
    return RolloutPool(
        replicas=[RolloutReplica(engine(slots=slots)) for _ in range(replicas)],
        lengths=lambda k: [[given[(k * batch + i) % len(given)]] for i in range(batch)],
        batch=batch,
        staleness=staleness,
        **more,  # type: ignore[arg-type]
    )


def test_only_as_many_groups_start_as_staleness_admits() -> None:
    made = pool(5.0, staleness=1, slots=100)
    assert made.started == 4  # (0 + 1 + 1) x 2
    assert made.run(math.inf) is None
    made.swap(5.0, 1)
    assert made.started == 6
    half = pool(5.0, staleness=0.5, slots=100)
    assert half.started == 3


def test_groups_go_to_the_replica_with_the_fewest_samples() -> None:
    made = pool(5.0, replicas=3, batch=5, staleness=0)
    assert [r.load for r in made.replicas] == [2, 2, 1]


def test_a_replica_works_as_one_server_when_it_has_one_slot() -> None:
    # D/D/1: group i is done at 5 i; with four admitted the pool is done at 20
    made = pool(5.0, slots=1)
    times = [made.run(math.inf, batch=True) for _ in range(1)]
    assert times == [10.0]
    made.take(10.0)
    assert made.run(math.inf, batch=True) == 20.0


def test_the_queue_of_one_slot_grows_as_a_single_server_queue_does() -> None:
    # work of all that was admitted at once: completion times are partial sums of the lengths
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 50, 40).astype(float).tolist()
    made = pool(lengths, batch=20, staleness=1, slots=1)
    ends = []
    while (time := made.next_time()) < math.inf:
        made.run(time)
        ends.append(time)
    assert ends == pytest.approx(np.cumsum(lengths).tolist())


def test_the_trainer_takes_the_oldest_and_waits_for_what_would_be_late() -> None:
    # groups of version 0, eta 1: batches 0 and 1 must hold all four; the first is slow
    made = pool([9.0, 2.0, 2.0, 2.0], staleness=1)
    assert made.run(math.inf, batch=True) == 2.0
    assert made.take(2.0).groups == [1, 2]
    made.swap(3.0, 1)  # groups 4 (9 tokens) and 5 (2 tokens) start
    assert made.run(math.inf, batch=True) == 9.0  # 3 and 5 are done at 5, but group 0 is due
    taken = made.take(9.0)
    assert (taken.groups, taken.staleness) == ([0, 3], [1, 1])


@pytest.mark.parametrize(("late", "next_length"), [("drop", 2.0), ("requeue", 9.0)])
def test_a_group_that_outlives_the_bound_is_thrown_away_for_another(late: str, next_length: float) -> None:
    # groups 0 to 3 start at 0, two more at 3 (9 and 2 tokens); at 6 group 0 of version 0 is too old
    made = pool([9.0, 2.0, 2.0, 2.0], staleness=1, partial=True, late=late, slots=100)
    assert made.run(math.inf, batch=True) == 2.0
    assert made.take(2.0).groups == [1, 2]
    made.swap(3.0, 1)
    assert made.run(math.inf, batch=True) == 5.0
    assert (made.take(5.0).groups, made.rejected_tokens) == ([3, 5], 0)
    made.swap(6.0, 2)
    assert made.rejected_groups == 1
    assert made.rejected_tokens == 6, "of its 9 tokens group 0 had generated 6"
    assert made.started == (2 + 1 + 1) * 2, "another one starts in its place"
    assert made.groups[6].lengths == [next_length]
    assert 0 not in made.groups


def test_what_can_be_late_is_sent_at_once_and_ages_in_the_engine() -> None:
    made = pool(5.0, staleness=1, slots=1, late="drop", partial=True)
    assert (made.started, made.replicas[0].load) == (4, 4)
    assert pool(5.0, staleness=1, slots=1).started == 1


def test_finished_groups_that_are_too_old_leave_with_all_their_tokens() -> None:
    made = pool(2.0, staleness=1, late="drop", slots=100)
    made.run(math.inf)
    made.swap(3.0, 1)
    made.swap(4.0, 2)
    assert (made.rejected_groups, made.rejected_tokens) == (4, 8.0)
    assert made.finished == []


def test_with_partial_rollouts_the_age_counts_from_the_last_token() -> None:
    made = pool([9.0, 2.0, 2.0, 2.0], staleness=1, partial=True)
    made.run(math.inf, batch=True)
    made.take(2.0)
    made.swap(3.0, 1)
    assert made.run(math.inf, batch=True) == 5.0
    assert made.take(5.0).groups == [3, 5]
    made.run(math.inf)
    made.swap(12.0, 2)
    taken = made.take(14.0)
    assert (taken.groups, taken.staleness, taken.oldest) == ([0, 4], [1, 1], 2)


def test_a_full_queue_stops_generation_until_the_trainer_takes() -> None:
    # one slot, 5 s a group, batches of 2: the queue of one batch is full at 10
    free = pool(5.0, slots=1, staleness=3)
    assert free.run(100.0) is None
    assert len(free.finished) == 8
    made = pool(5.0, slots=1, staleness=3, queue=1.0)
    assert made.run(100.0) is None
    assert (made.paused, made.queued, made.replicas[0].tokens) == (True, 2, 10.0)
    made.take(100.0)
    assert made.blocked_seconds == 90
    made.run(107.0)
    assert len(made.finished) == 1  # group 3 took from 100 to 105


def test_a_drained_replica_takes_new_weights_while_another_still_runs() -> None:
    made = pool([4.0, 10.0], replicas=2, batch=2, staleness=0)
    made.run(3.0)
    made.swap_as_drained(3.0, 1)
    made.run(4.0)
    assert [r.version for r in made.replicas] == [1, 0]
    assert made.started == 4  # the first replica, at version 1, starts both groups of batch 1
    made.run(10.0)
    assert [r.version for r in made.replicas] == [1, 1]
