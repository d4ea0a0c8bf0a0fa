"""Sequences that wait for an environment, each by itself: the closed form against one-by-one simulation."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.cost import Cost
from rlhfsim.rollout.continuous_batching import StepTable, one_wave, tabulate
from rlhfsim.rollout.engine_step import EngineStep, Floats
from rlhfsim.rollout.environment import Turns, answered_at_least
from rlhfsim.rollout.schedule import Requests, most_running
from rlhfsim.rollout.turns import Waiting, delayed, waits
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Environment, Workload

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


def one_by_one(
    lengths: Floats, turns: np.ndarray, each: list[Floats], workers: int, made: Floats | None = None
) -> float:
    """Seconds until the last sequence is done; turns of equal length, answers first come first served. `made`:
    seconds in which workers first make sandboxes."""
    now, left = 0.0, lengths / turns
    cold = np.zeros(len(lengths)) if made is None else made
    turn = np.where(cold > 0, -1, 0)
    queue, busy = np.flatnonzero(cold).tolist(), []
    decoding = set(range(len(lengths))) - set(queue)
    while decoding or queue or busy:
        while queue and len(busy) < workers:
            i = queue.pop(0)
            heapq.heappush(busy, (now + (cold[i] if turn[i] < 0 else each[i][turn[i]]), i))
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


@pytest.mark.parametrize(
    ("cold", "warm", "workers", "off"),
    [(5.0, 0, 999, 0.1), (5.0, 40, 999, 0.1), (20.0, 0, 64, 0.1), (5.0, 0, 16, 0.15), (5.0, 64, 16, 0.15)],
)
def test_sandboxes_that_are_made_first_delay_as_in_sequences_one_by_one(
    cold: float, warm: int, workers: int, off: float
) -> None:
    """Few workers are off by 12 % without cold starts too."""
    lengths = np.minimum(np.rint(np.random.default_rng(1).lognormal(5.5, 0.7, 64)), 1500.0)
    ready = Environment(turns=4, seconds_per_turn=2.0, workers=workers)
    environment = replace(ready, cold_start=cold, warm=warm)
    waited, alone = (waits(e, 64, 7) for e in (environment, ready))
    more = waited - alone
    assert sorted(more.tolist()) == pytest.approx([0.0] * warm + [cold] * (64 - warm))
    turns, each = np.full(64, 4), [np.full(4, w / 4) for w in alone]
    made = one_by_one(lengths, turns, each, workers, made=more)
    found = table(64)
    late = delayed(lengths, waited, float(found.tau(np.array([32.0]), np.array([100.0]))[0]))
    line = one_wave(late[None], 100.0)
    waiting = Waiting(per_token=float(waited.sum() / lengths.sum()), workers=workers)
    spent, _, _ = waiting.paced(found, line.running, line.start, line.start + line.steps)
    assert spent.sum() == pytest.approx(made, rel=off)


def test_no_more_responses_run_than_the_fleet_has_memory_for() -> None:
    limited = Environment(sandbox_memory=4e9, fleet_memory=30e9)
    assert (limited.sandboxes, Environment().sandboxes) == (7, None)
    layout = RolloutLayout(dp=2, max_num_seqs=16)
    asked = Requests(
        prompts=8,
        samples=8,
        prompt_lengths=Fixed(value=9),
        response_lengths=Fixed(value=9),
        environment=limited,
    )
    assert most_running(layout, asked) == 3
    assert most_running(layout, replace(asked, environment=Environment())) == 16
    assert most_running(replace(layout, max_num_seqs=2), asked) == 2
    with pytest.raises(RlhfsimError, match="holds 7 sandboxes, and 8 must be there"):
        replace(limited, warm=8)
    work = Workload(algorithm="grpo", model="8b", prompts=8, samples=8, environment=limited)
    assert not work.sandboxes_suffice
    assert replace(work, prompts=1, samples=7).sandboxes_suffice
    with pytest.raises(RlhfsimError, match="in lockstep all sequences"):
        replace(work, environment=replace(limited, lockstep=True))


def test_an_engine_that_never_drains_has_all_its_sandboxes_made_by_the_workers() -> None:
    environment = Environment(turns=2, seconds_per_turn=3.0, workers=16, cold_start=10.0, warm=64)
    work = Workload(algorithm="grpo", model="8b", prompts=8, samples=8, environment=environment)
    assert answered_at_least(Cost(), work).seconds == pytest.approx(64 * (2 * 3 + 10) / 16)


def test_in_lockstep_the_first_turn_waits_for_sandboxes() -> None:
    """20 of 32 are made by 8 workers in three rounds of 5 s; then each turn has four rounds of 2 s."""
    environment = Environment(turns=3, seconds_per_turn=2.0, workers=8, cold_start=5.0, warm=12)
    turns = Turns(buffers=(Cost(),), sequences=(32,), environment=environment)
    assert turns.ends() == (3 * 4 * 2.0 + 3 * 5.0,)
