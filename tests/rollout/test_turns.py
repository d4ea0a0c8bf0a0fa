"""Sequences that wait for an environment, each by itself: the closed form against one-by-one simulation."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from rlhfsim.rollout.continuous_batching import StepTable, one_wave, tabulate
from rlhfsim.rollout.engine_step import EngineStep, Floats
from rlhfsim.rollout.turns import Waiting, delayed, waits
from rlhfsim.specs.workload.workload import Environment

FIXED, EACH = 0.010, 0.0001
"""Seconds of a decode step, and of each of its sequences."""


def table(most: int) -> StepTable:
    n, c = np.arange(1.0, most + 2), np.array([1.0, 1e6])
    zero = np.zeros((len(n), 2))
    return tabulate(
        n,
        c,
        EngineStep(
            compute=FIXED + EACH * n[:, None] + zero, hbm=zero, nvlink=zero, network=zero, overhead=zero
        ),
    )


def one_by_one(lengths: Floats, turns: np.ndarray, each: list[Floats], workers: int) -> float:
    """Seconds until the last sequence is done; turns of equal length, answers first come first served."""
    now, left, turn = 0.0, lengths / turns, np.zeros(len(lengths), int)
    decoding, queue, busy = set(range(len(lengths))), [], []
    while decoding or queue or busy:
        while queue and len(busy) < workers:
            i = queue.pop(0)
            heapq.heappush(busy, (now + each[i][turn[i]], i))
        step = FIXED + EACH * len(decoding)
        ends = min((left[i] for i in decoding), default=np.inf) * step
        until = min(now + ends, busy[0][0] if busy else np.inf)
        for i in list(decoding):
            left[i] -= (until - now) / step
            if left[i] < 1e-9:
                decoding.remove(i)
                queue.append(i)
        now = until
        while busy and busy[0][0] <= now + 1e-12:
            _, i = heapq.heappop(busy)
            turn[i] += 1
            if turn[i] < turns[i]:
                left[i] = lengths[i] / turns[i]
                decoding.add(i)
    return now


@pytest.mark.parametrize(
    ("seconds", "sigma", "workers", "mean_turns"),
    [
        (0.05, 0.0, 999, None),
        (2.0, 0.0, 999, None),
        (2.0, 1.0, 999, 3.0),
        (2.0, 0.5, 8, 3.0),
        (20.0, 1.0, 64, 4.0),
    ],
)
def test_sequences_that_wait_by_themselves_are_done_when_the_closed_form_says(
    seconds: float, sigma: float, workers: int, mean_turns: float | None
) -> None:
    drawn = np.random.default_rng(1)
    lengths = np.minimum(np.rint(drawn.lognormal(5.5, 0.7, 64)), 1500.0)
    environment = Environment(
        turns=8, mean_turns=mean_turns, seconds_per_turn=seconds, sigma=sigma, workers=workers
    )
    waited = waits(environment, 64, 7)
    assert waited.mean() == pytest.approx((mean_turns or 8) * seconds)
    turns = np.full(64, 8 if mean_turns is None else 4)
    made = one_by_one(
        lengths, turns, [np.full(k, w / k) for k, w in zip(turns, waited, strict=True)], workers
    )
    found = table(64)
    late = delayed(lengths, waited, float(found.tau(np.array([32.0]), np.array([100.0]))[0]))
    assert late.sum() == pytest.approx(lengths.sum())
    line = one_wave(late[None], 100.0)
    waiting = Waiting(per_token=float(waited.sum() / lengths.sum()), workers=workers)
    spent, decoding, _ = waiting.paced(found, line.running, line.start, line.start + line.steps)
    assert spent.sum() == pytest.approx(made, rel=0.07)
    assert (decoding <= line.running).all()
