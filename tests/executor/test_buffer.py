from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from executor.coordination.buffer import Buffer, BufferSettings
from rlhfsim.errors import RlhfsimError


def buffer(**fields: object) -> Buffer:
    return Buffer(BufferSettings(**{"batch": 2, **fields}))


def fill(found: Buffer, *ids: object) -> None:
    for id in ids:
        found.submit(id)
        assert found.finish(id, f"content of {id}", found.version)


def test_on_policy_admits_one_batch_and_is_empty_after_the_update() -> None:
    found = buffer()
    assert found.room() == 2
    fill(found, "a", "b")
    assert found.room() == 0
    batch = found.take()
    assert batch is not None
    assert [e.content for e in batch] == ["content of a", "content of b"]
    found.publish(1)
    assert (found.ready, found.room()) == (0, 2)


def test_a_batch_that_is_not_complete_is_not_handed_out() -> None:
    found = buffer()
    fill(found, "a")
    assert found.take() is None


def test_capacity_is_that_of_the_equation() -> None:
    found = buffer(staleness=1.5)
    assert found.room() == 5  # (1.5 + 0 + 1) * 2
    fill(found, "a", "b", "c")
    found.submit("d")
    assert found.room() == 1  # 5 - (3 + 1)
    found.take()
    found.publish(1)
    assert found.room() == 3  # (1.5 + 1 + 1) * 2 - (3 + 1)


def test_the_bound_limits_what_may_start() -> None:
    found = buffer(staleness=4, bound=4)
    assert found.room() == 4
    fill(found, "a", "b", "c")
    assert found.room() == 1
    found.submit("d")
    assert found.room() == 0


def test_the_trainer_waits_for_what_would_become_too_old() -> None:
    found = buffer(staleness=1)
    for id in "abcd":
        found.submit(id)
    for id in "ab":
        found.finish(id, id, 0)
    assert found.take() is not None
    found.publish(1)
    fill(found, "e", "f")
    assert found.due() == 2
    assert found.take() is None
    found.finish("c", "c", 0)
    found.finish("d", "d", 0)
    batch = found.take()
    assert batch is not None
    assert [e.id for e in batch] == ["c", "d"]


def test_where_late_entries_are_thrown_away_nobody_waits_for_them() -> None:
    found = buffer(staleness=1, waits=False)
    for id in "abcd":
        found.submit(id)
    for id in "ab":
        found.finish(id, id, 0)
    assert found.take() is not None
    found.publish(1)
    fill(found, "e", "f")
    assert found.due() == 2
    assert found.take() is not None
    found.publish(2)
    assert not found.finish("c", "c", 0)


def test_no_young_entry_takes_a_place_that_an_old_one_needs() -> None:
    found = buffer(staleness=2)
    for id in "abcdef":
        found.submit(id)
    for id in "ab":
        found.finish(id, id, 0)
    assert found.take() is not None
    found.publish(1)
    fill(found, "g")
    found.finish("c", "c", 0)
    assert found.take() is None  # c and g: then d, e and f would come too late for one batch of two
    found.finish("d", "d", 0)
    assert [e.id for e in found.take() or ()] == ["c", "d"]
    assert not found.publish(2)
    found.finish("e", "e", 0)
    found.finish("f", "f", 0)
    assert [e.id for e in found.take() or ()] == ["e", "f"]
    assert not found.publish(3)  # nothing is thrown away


def test_the_oldest_token_counts_and_not_the_version_at_the_end() -> None:
    found = buffer(staleness=1)
    found.submit("a")
    for version in (1, 2):
        found.publish(version)
    assert not found.finish("a", "partly sampled by version 2", 0)


def test_entries_too_old_leave_at_the_update_and_others_take_their_place() -> None:
    found = buffer()
    fill(found, "a")
    gone = found.publish(1)
    assert [e.id for e in gone] == ["a"]
    assert found.room() == 4  # (0 + 1 + 1) * 2 - 0: the missed batch is made up for


def test_a_buffer_below_one_batch_is_refused() -> None:
    with pytest.raises(RlhfsimError, match="never holds a batch"):
        BufferSettings(batch=4, bound=3)


def test_a_resumed_run_starts_with_the_room_of_a_fresh_one() -> None:
    assert Buffer(BufferSettings(batch=4, staleness=2), version=100).room() == 12


# --- any schedule -----------------------------------------------------------------------------------

SETTINGS = st.builds(
    lambda batch, staleness, extra: BufferSettings(
        batch=batch, staleness=staleness, bound=None if extra is None else batch + extra
    ),
    st.integers(1, 4),
    st.one_of(st.integers(0, 4), st.floats(0, 4)),
    st.one_of(st.none(), st.integers(0, 5)),
)
EVENTS = st.lists(
    st.tuples(st.sampled_from(["submit", "finish", "train", "update"]), st.integers(0, 99)), max_size=120
)


class World:
    """An engine that lags behind the trainer, and a trainer: whatever the schedule lets happen."""

    def __init__(self, settings: BufferSettings) -> None:
        self.buffer = Buffer(settings)
        self.running: list[tuple[int, int]] = []
        self.next_id = 0
        self.engine = 0
        self.trained = False
        self.batches = 0
        self.dropped = 0

    def submit(self, pick: int) -> None:
        if self.buffer.room():
            self.buffer.submit(self.next_id, self.engine)
            self.running.append((self.next_id, self.engine))
            self.next_id += 1

    def finish(self, pick: int) -> None:
        if self.running:
            id, version = self.running.pop(pick % len(self.running))
            self.dropped += not self.buffer.finish(id, object(), version)

    def train(self, pick: int) -> None:
        self.engine = self.buffer.version if pick % 3 else self.engine
        if self.trained:
            self.update(pick)
        batch = self.buffer.take()
        if batch is not None:
            self.trained, self.batches = True, self.batches + 1
            limit = math.ceil(self.buffer.settings.staleness)
            assert all(self.buffer.version - e.oldest <= limit for e in batch)
            assert len({e.id for e in batch}) == len(batch) == self.buffer.settings.batch

    def update(self, pick: int) -> None:
        """A new version comes after a batch was trained on; weights reach the engine now or later."""
        if self.trained:
            self.trained = False
            self.dropped += len(self.buffer.publish(self.buffer.version + 1))
            self.engine = self.buffer.version if pick % 2 else self.engine

    def check(self) -> None:
        s = self.buffer.settings
        assert s.bound is None or self.buffer.ready + self.buffer.running <= s.bound
        assert self.buffer.running == len(self.running)


@given(SETTINGS, EVENTS)
@hypothesis_settings(max_examples=400)
def test_no_schedule_hands_out_an_entry_beyond_the_bound_or_gets_stuck(
    settings: BufferSettings, events: list[tuple[str, int]]
) -> None:
    world = World(settings)
    for name, pick in events:
        getattr(world, name)(pick)
        world.check()
    for _ in range(3):  # from any state the next batch comes, if only engines do their work
        before = world.batches
        for _ in range(200):
            world.engine = world.buffer.version
            world.submit(0)
            world.finish(0)
            world.train(1)
            world.check()
            if world.batches > before:
                break
        assert world.batches > before, "stuck"


@given(SETTINGS, st.lists(st.integers(0, 99), max_size=150))
@hypothesis_settings(max_examples=200)
def test_with_an_engine_that_keeps_up_nothing_is_thrown_away(
    settings: BufferSettings, picks: list[int]
) -> None:
    world = World(settings)
    for pick in picks:
        world.engine = world.buffer.version
        (world.submit, world.finish, world.train)[pick % 3](pick)
        world.engine = world.buffer.version
    assert world.dropped == 0
