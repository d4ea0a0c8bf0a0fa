"""Who gets which completion when several threads ask the rollout at once."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from executor.coordination import rollout
from executor.coordination.rollout import ReplicaPool
from executor.coordination.tracing import Reply
from executor.samples import Completion, GenerationRequest


class _Method:
    def __init__(self, call: Any) -> None:
        self.remote = call


class _Replica:
    """Answers at once; completions come one a poll."""

    def __init__(self) -> None:
        self.queue: list[int] = []
        self.submit = _Method(lambda requests, step: self.queue.extend(r.id for r in requests))
        self.poll = _Method(self._poll)

    def _poll(self, at_least: int, wait: float) -> Reply:
        taken, self.queue = self.queue[:1], self.queue[1:]
        return Reply(value=[_completion(i) for i in taken])


def _completion(number: int) -> Completion:
    none = np.zeros(0, np.float32)
    return Completion(
        id=number, tokens=none.astype(np.int64), logprobs=none, versions=none.astype(np.int32), finish="stop"
    )


def _request(number: int) -> GenerationRequest:
    return GenerationRequest(id=number, prompt=np.ones(1, np.int64), max_tokens=1)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> ReplicaPool:
    monkeypatch.setattr(rollout, "collect", lambda refs, parts, what, limit_s: list(refs))
    return ReplicaPool(
        pool="all",
        actors=[_Replica(), _Replica()],
        followers=[[], []],
        receivers_each=1,
        record=lambda part, reply: None,
        arrived=lambda completion: None,
    )


def test_evaluation_beside_a_running_rollout_takes_only_its_own_responses(pool: ReplicaPool) -> None:
    heard: list[int] = []
    pool.arrived = lambda completions: heard.extend(c.id for c in completions)
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


def test_requests_go_to_the_replica_with_least_outstanding_work(pool: ReplicaPool) -> None:
    pool.submit([_request(i) for i in range(5)], 0, 1.0)
    assert [len(actor.queue) for actor in pool.actors] == [3, 2]


def test_poll_with_nothing_outstanding_returns_nothing(pool: ReplicaPool) -> None:
    assert pool.poll(5.0) == []
