"""The token ledger of a published asynchronous run (marin-community/marin issue 8936, comment of 2026-09-06).

Two pilots of 25 updates on 32 learner and 8 rollout H100s differ in the response cap alone: 32 groups of four
samples an update, groups more than one update old are thrown away and their prompts sent again. Training and
weight sync take the same in both; the model is not named.

Taken from the ledger: the law of the lengths (its two shares of samples at the cap, a log-normal), seconds of
training and sync, and the speed of a replica, from the wait of the run with the small cap. Predicted: the
wait of the other run and what both throw away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from heapq import heappush

import numpy as np
from scipy.stats import norm

from lab.peers.workloads import QWEN_7B, Workload, engine, program, setting
from rlhfsim.simulation.asynchronous.replica import RolloutReplica
from rlhfsim.simulation.asynchronous.rollout_pool import BatchLengths, RolloutPool, SampleGroup
from rlhfsim.simulation.asynchronous.schedules import Async, LearnerRun
from rlhfsim.simulation.simulator import Simulator
from rlhfsim.specs.placement.placement import Schedule

UPDATES, GROUPS, SAMPLES = 25, 32, 4
CORE_S = {2048: 914.4, 4096: 1202.4}
"""Core time by response cap."""
WAITING = {2048: 0.186, 4096: 0.376}
"""Share of the core time in which the learner waits for samples."""
STALE = {2048: 0.014, 4096: 0.329}
"""Share of the generated tokens that was too old."""
CUT = {2048: 0.146, 4096: 0.036}
"""Share of the samples that reached the cap."""
SYNCING = 0.425
"""Share of the core time in which weights move, cap 4096."""
PACE = 0.85
"""Replica seconds over those of Qwen2.5-7B on an H100, so that the run with cap 2048 waits as long as it did."""


class AsCompleted(RolloutPool):
    """The runtime's own rules (marin-community/MarinSkyRL, its fully asynchronous trainer): running groups are never
    stopped, a group is judged when it completes and again when a batch is put together, in the order of completion.
    """

    judged = 0
    """Update under way, which judges what completes."""
    completed = 0
    """Groups that completed."""

    def _expire(self, version: int) -> None:
        self.judged = version
        oldest = version - math.ceil(self.staleness)
        running = {n: group for n, group in self.groups.items() if group.left and group.start < oldest}
        for number in running:
            del self.groups[number]
        super()._expire(version)
        self.groups |= running

    def _group_done(self, number: int, group: SampleGroup, version: int) -> None:
        heappush(self.finished, (self.completed, number))
        self.completed += 1
        if group.start < self.judged - math.ceil(self.staleness):
            self._expire(self.judged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Shares of one run."""

    waiting: float
    stale: float


def predicted(
    cap: int, seed: int = 0, rules: type[RolloutPool] = RolloutPool, *, alike: float = 0.0
) -> Ledger:
    """The ledger of 25 updates with this response cap.

    `alike`: correlation of the logarithms of the lengths of one prompt's samples, which is not published.
    """
    sync = SYNCING * CORE_S[4096] / UPDATES
    learn = (1 - WAITING[4096] - SYNCING) * CORE_S[4096] / UPDATES
    costs = replace(QWEN_7B, fixed=PACE * QWEN_7B.fixed, each=PACE * QWEN_7B.each, read=PACE * QWEN_7B.read)
    work = Workload(
        name="marin",
        law="lognormal",
        batch=GROUPS,
        replicas=8,
        staleness=1,
        learn=learn,
        sync=sync,
        costs=costs,
    )
    schedule = Schedule(staleness=1, partial_rollout=True, late="requeue")
    run = LearnerRun(
        simulator=Simulator(setting(work, schedule)),
        programs=lambda k: program(work, 0.0),
        steps=UPDATES - 1,
        warmup=1,
        cutoff=None,
    )
    pool = rules(
        replicas=[RolloutReplica(engine(work)) for _ in range(work.replicas)],
        lengths=_lengths(cap, seed, alike),
        batch=GROUPS,
        staleness=1,
        partial=True,
        late="requeue",
    )
    run.simulator.env.run(until=run.simulator.env.process(Async(run, pool).train()))
    waiting = 1 - len(run.ends) * (learn + sync) / run.ends[-1]
    return Ledger(waiting=waiting, stale=pool.rejected_tokens / (pool.rejected_tokens + run.taken_tokens))


def _lengths(cap: int, seed: int, alike: float) -> BatchLengths:
    """Log-normal, cut at the cap."""
    (low, many), (high, few) = sorted(CUT.items())
    z_low, z_high = (float(norm.isf(share)) for share in (many, few))
    sigma = math.log(high / low) / (z_high - z_low)
    mu = math.log(low) - z_low * sigma
    shape, rng = (200, GROUPS, SAMPLES), np.random.default_rng(seed)
    normal = math.sqrt(1 - alike) * rng.normal(size=shape) + math.sqrt(alike) * rng.normal(
        size=(*shape[:2], 1)
    )
    drawn = np.exp(mu + sigma * normal)
    batches: list[list[list[float]]] = np.minimum(drawn, cap).tolist()
    return lambda k: batches[k]
