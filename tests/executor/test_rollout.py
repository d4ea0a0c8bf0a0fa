"""Who gets which completion when several threads ask the rollout at once."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from executor.coordination import router
from executor.coordination.replica import Returned
from executor.coordination.router import RequestRouter
from executor.coordination.tracing import Reply
from executor.coordination.worker_group import ReplicaPool
from executor.samples import Completion, GenerationRequest


class _Method:
    def __init__(self, call: Any) -> None:
        self.remote = call


class _Replica:
    """Answers at once; completions come one a poll."""

    def __init__(self) -> None:
        self.queue: list[GenerationRequest] = []
        self.submit = _Method(lambda requests, step: self.queue.extend(requests))
        self.poll = _Method(self._poll)
        self.give_back = _Method(self._give_back)

    def _poll(self, at_least: int, wait: float) -> Reply:
        taken, self.queue = self.queue[:1], self.queue[1:]
        return Reply(value=[_completion(r.id) for r in taken])

    def _give_back(self, most: int | None) -> Reply:
        count = len(self.queue) if most is None else most
        kept, back = self.queue[: len(self.queue) - count], self.queue[len(self.queue) - count :]
        self.queue = kept
        return Reply(value=Returned(back, 10 * len(back)))


def _completion(number: int) -> Completion:
    none = np.zeros(0, np.float32)
    return Completion(
        id=number, tokens=none.astype(np.int64), logprobs=none, versions=none.astype(np.int32), finish="stop"
    )


def _request(number: int) -> GenerationRequest:
    return GenerationRequest(id=number, prompt=np.ones(1, np.int64), max_tokens=1)


def _pool(count: int, name: str) -> ReplicaPool:
    return ReplicaPool(
        pool="all",
        actors=[_Replica() for _ in range(count)],
        followers=[[]] * count,
        receivers_each=1,
        record=lambda parts, replies: None,
        name=name,
    )


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ReplicaPool:
    monkeypatch.setattr(router, "collect", lambda refs, parts, what, limit_s: list(refs))
    return _pool(2, "rollout replica")


def test_evaluation_beside_a_running_rollout_takes_only_its_own_responses(own: ReplicaPool) -> None:
    heard: list[int] = []
    pool = RequestRouter(own, lambda completions: heard.extend(c.id for c in completions))
    pool.submit([_request(i) for i in range(40)], 0, 1.0)
    polled: list[int] = []
    feeder = threading.Thread(target=lambda: polled.extend(c.id for _ in range(60) for c in pool.poll(0.01)))
    feeder.start()
    done = pool.generate([_request(1000 + i) for i in range(10)], 0, 5.0)
    feeder.join()
    assert [c.id for c in done] == list(range(1000, 1010))
    assert sorted(polled + [c.id for c in pool.poll(0.01)]) == list(range(40))
    assert sorted(heard) == [*range(40), *range(1000, 1010)]
    assert pool.outstanding == {}


def test_requests_go_to_the_replica_with_least_outstanding_work(own: ReplicaPool) -> None:
    RequestRouter(own, lambda _: None).submit([_request(i) for i in range(5)], 0, 1.0)
    assert [len(actor.queue) for actor in own.actors] == [3, 2]


def test_poll_with_nothing_outstanding_returns_nothing(own: ReplicaPool) -> None:
    assert RequestRouter(own, lambda _: None).poll(5.0) == []


def test_replicas_that_join_take_their_share_and_leave_what_is_unfinished(own: ReplicaPool) -> None:
    lent, asked = _pool(1, "lent replica"), RequestRouter(own, lambda _: None)
    asked.submit([_request(i) for i in range(10)], 0, 1.0)
    asked.join(lent, 0, 1.0)
    assert [[r.id for r in actor.queue] for actor in (*own.actors, *lent.actors)] == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
        [8, 9],
    ]
    asked.submit([_request(10), _request(11)], 0, 1.0)
    assert [r.id for r in lent.actors[0].queue] == [8, 9, 10, 11], "the least outstanding work"
    first = {c.id for c in asked.poll(0.01)}
    assert first == {0, 1, 8}
    back = asked.leave(lent, 0, 1.0)
    assert ([r.id for r in back.requests], back.sampled) == ([9, 10, 11], 30)
    asked.submit([_request(12)], 0, 1.0)
    assert lent.actors[0].queue == [], "what has left takes nothing more"
    others = [c.id for _ in range(10) for c in asked.poll(0.01)]
    assert sorted(others) == [i for i in range(13) if i not in first]
    assert asked.outstanding == {}


def test_a_replica_that_leaves_hands_over_what_it_had_finished(own: ReplicaPool) -> None:
    lent, asked = _pool(1, "lent replica"), RequestRouter(own, lambda _: None)
    asked.join(lent, 0, 1.0)
    asked.submit([_request(i) for i in range(3)], 0, 1.0)
    lent.actors[0].give_back = _Method(lambda most: Reply(value=Returned([], 5)))  # it is done with it
    asked.leave(lent, 0, 1.0)
    assert {c.id for c in asked.poll(0.01)} == {0, 1, 2}
