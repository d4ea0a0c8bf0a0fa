"""One-step-off and fully asynchronous as processes, and their trainer; what they do and why: `run`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import simpy

from rlhfsim.simulation.asynchronous.batch_means import interval_of
from rlhfsim.simulation.asynchronous.bounds import floor_of
from rlhfsim.simulation.asynchronous.rollout_pool import RolloutPool
from rlhfsim.simulation.simulator import Running, Simulator
from rlhfsim.specs.placement.placement import Schedule
from rlhfsim.step.iteration import Program
from rlhfsim.step.timetable import ROLLOUT, SYNC, Step, learner_steps

# --- the trainer ------------------------------------------------------------------------------------

Programs = Callable[[int], Program]
"""The priced calls of step k."""


@dataclass(slots=True, kw_only=True)
class LearnerRun:
    """The trainer's side of a run and what is measured."""

    simulator: Simulator
    programs: Programs
    steps: int
    warmup: int
    cutoff: float | None
    ends: list[float] = field(default_factory=list)
    """When each step ended: weights handed over, trainer free."""
    learned: list[float] = field(default_factory=list)
    """Seconds of its trainer calls."""
    ages: list[list[int]] = field(default_factory=list)
    """Staleness of the groups of each step."""
    taken_tokens: float = 0.0
    """Response tokens trained on since the start."""
    shortfall: float = 1.0
    """Batches consumed in the window over batches produced, where above 1."""
    paired: bool = False
    """Steps alternate between two durations: the mean is that of an even number of them."""
    stopped: bool = False

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of each measured step so far."""
        return tuple(float(x) for x in np.diff(self.ends[self.warmup - 1 :]))

    @property
    def counted(self) -> int:
        """Steps of the window, which begins one step early where that makes pairs."""
        count = len(self.ends) - self.warmup
        return count + (count % 2 if self.paired else 0)

    @property
    def steady(self) -> tuple[float, ...]:
        """Seconds of each step of the window as the steady state has them."""
        return tuple(self.shortfall * float(x) for x in np.diff(self.ends[-1 - self.counted :]))

    @property
    def mean(self) -> float:
        """Seconds of a step over the window: the mean of `steady`."""
        return self.shortfall * (self.ends[-1] - self.ends[-1 - self.counted]) / self.counted

    @property
    def over(self) -> bool:
        """Whether no more steps are needed; notes when the cutoff is the reason."""
        if len(self.ends) >= self.warmup + self.steps:
            return True
        seconds = self.seconds if len(self.ends) > self.warmup else ()
        if self.cutoff is None or not seconds:
            return False
        low = (interval_of(seconds) or seconds)[0] if len(seconds) > 2 else 0.0
        self.stopped = low > self.cutoff or sum(seconds) > self.cutoff * self.steps
        return self.stopped

    def batch(self, k: int, ages: list[int]) -> Running:
        """The trainer's calls for batch k, in program order on their pools."""
        begin = self.simulator.env.now
        self.ages.append(ages)
        ended: dict[str, simpy.Event] = {}
        for step in learner_steps(self.programs(k).steps):
            needs = [ended[n] for n in step.needs if n in ended]
            ended[step.name] = self.simulator.env.process(self._call(step, k, needs))
        yield self.simulator.all_of(list(ended.values()))
        self.learned.append(self.simulator.env.now - begin)

    def _call(self, step: Step, k: int, needs: list[simpy.Event]) -> Running:
        turn = self.simulator.queue(step.pools)
        yield self.simulator.all_of([turn.ready, *needs])
        yield from self.simulator.work(step, k, version=k)
        turn.leave()

    def sync(self, k: int) -> Running:
        """The weights of update k + 1 move."""
        for step in self.programs(k).steps:
            if step.name == SYNC:
                yield from self.simulator.work(step, k, version=k + 1)

    def end(self) -> None:
        """The step has ended."""
        self.ends.append(self.simulator.env.now)


# --- one-step-off -----------------------------------------------------------------------------------


class OneStepOff:
    """Each batch generated whole while the one before is trained."""

    def __init__(self, run: LearnerRun, schedule: Schedule) -> None:
        self.run = run
        self.env = run.simulator.env
        self.overlapped = schedule.overlapped_sync
        self.versions: list[int] = []
        """Weights that each batch was generated with."""
        self.version = 0
        self.last_sync: simpy.Event = self.env.timeout(0)

    def train(self) -> Running:
        """All steps."""
        env, run, k = self.env, self.run, 0
        generated = env.process(self._generate(0))
        while not run.over:
            yield generated
            before = self.last_sync
            if self.overlapped:
                generated = env.process(self._generate(k + 1, after=before))
            else:
                generated = env.process(self._generate(k + 1))
            yield from run.batch(k, [k - self.versions[k]])
            if self.overlapped:
                yield before
                self.last_sync = env.process(self._sync(k))
            else:
                yield generated
                yield from self._sync(k)
            run.end()
            k += 1

    def _generate(self, k: int, after: simpy.Event | None = None) -> Running:
        if after is not None:
            yield after
        self.versions.append(self.version)
        program, simulator = self.run.programs(k), self.run.simulator
        simulator.kv_cache(program.generation.kv_tokens if program.generation else 0.0)
        for step in program.steps:
            if step.name.startswith(ROLLOUT):
                yield from simulator.work(step, k, version=self.version)
        simulator.kv_cache(0.0)

    def _sync(self, k: int) -> Running:
        yield from self.run.sync(k)
        self.version = k + 1


# --- fully asynchronous -----------------------------------------------------------------------------


class Async:
    """Replicas that take requests all the time, while the trainer works."""

    def __init__(
        self, run: LearnerRun, pool: RolloutPool, switches: tuple[float, float] | None = None
    ) -> None:
        """`switches`: seconds until the trainer's GPUs generate, and until they train again; None: never."""
        self.run = run
        self.env = run.simulator.env
        self.pool = pool
        schedule = run.simulator.setting.placement.schedule
        self.partial, self.overlapped = schedule.partial_rollout, schedule.overlapped_sync
        self.answered = 0.0
        """When the environment has answered all that was taken."""
        self.batch_there: simpy.Event | None = None
        self.drained: simpy.Event | None = None
        self.last_sync: simpy.Event = self.env.timeout(0)
        self.opened: tuple[float, float] | None = None
        """Work done and tokens generated when the window opened."""
        lengths = np.concatenate([np.asarray(g) for g in pool.lengths(0)])
        self.floor = floor_of(pool.replicas[0].engine, lengths, pool.batch)
        self._since = [(0.0, 0.0, 0.0)] * len(pool.replicas)
        self.switches = switches or (0.0, math.inf)
        self.lends = False
        """Whether the trainer's GPUs generate before the next batch."""
        self.lent_s = 0.0
        """Seconds in which they did."""
        self.there_s = 0.0
        """When the last batch was there."""
        self.first = 0.0, 0
        """Seconds of replicas and finished groups when the first one was."""

    def train(self) -> Running:
        """All steps; the replicas run at the same time."""
        run, pool, k = self.run, self.pool, 0
        self.env.process(self._replicas())
        while not run.over:
            if pool.late != "wait":
                pool.expire(self.env.now)
            yield from self._samples(k)
            yield from self._answered()
            taken = pool.take(self.env.now)
            run.taken_tokens += taken.tokens
            self._count()
            yield from run.batch(k, taken.staleness)
            if self.overlapped:
                yield self.last_sync
                self.last_sync = self.env.process(self._behind(k))
            else:
                yield from self._exposed(k)
            run.end()
            self._measure()
            k += 1

    def _samples(self, k: int) -> Running:
        """Waits until a batch is there; meanwhile the trainer's GPUs are lent where that pays."""
        env, pool, begin = self.env, self.pool, 0.0
        if self.lends:
            yield env.timeout(self.switches[0])
            pool.lend(env.now)
            begin = env.now
            self._lent(begin, awake=True)
        if not pool.ready:
            self.batch_there = env.event()
            yield self.batch_there
        self.there_s = env.now
        if not k:
            self.first = self._made()
        if self.lends:
            pool.reclaim(env.now)
            self.lent_s += env.now - begin
            self._lent(env.now, awake=False)
            self.run.simulator.recorder.span(ROLLOUT, self._trainer, k, begin, env.now, "hbm", group="lent")
            yield env.timeout(self.switches[1])

    def _made(self) -> tuple[float, int]:
        """Seconds of replicas so far, and groups that they finished."""
        pool = self.pool
        own = len(pool.replicas) - pool.lent
        return own * self.env.now + pool.lent * self.lent_s, pool.taken * pool.batch + len(pool.finished)

    def _pays(self) -> bool:
        """Whether what lending would save of the wait for samples takes longer than the way back.

            wait = min(P / (own r) - since the last batch was there, missing / (own r))

        P groups of a batch, r groups a second and replica since the first batch, `own` replicas.
        """
        pool, (seconds, groups) = self.pool, self._made()
        spent, made = seconds - self.first[0], groups - self.first[1]
        if made <= 0:
            return False
        own = len(pool.replicas) - pool.lent
        each = spent / made / own
        wait = min(
            pool.batch * each - (self.env.now - self.there_s), (pool.batch - len(pool.finished)) * each
        )
        return (wait - self.switches[0]) * pool.lent / len(pool.replicas) > self.switches[1]

    def _lent(self, now: float, *, awake: bool) -> None:
        memory = self.run.simulator.memory_timeline
        if memory is not None:
            memory.lend(now, awake=awake)

    @property
    def _trainer(self) -> str:
        return self.run.simulator.setting.placement.actor.pool

    def _answered(self) -> Running:
        """The environment's workers answer one batch after the other: n (T s + c) / w seconds each."""
        workload = self.run.simulator.setting.workload
        environment = workload.environment
        if environment is None:
            return
        work = workload.num_sequences * (environment.seconds_each + environment.cold_start)
        self.answered += work / environment.workers
        yield self.env.timeout(max(0.0, self.answered - self.env.now))

    def _replicas(self) -> Running:
        """Lets the pool run ahead to the next event outside it, and wakes whom it can."""
        env, pool = self.env, self.pool
        while True:
            outside = env.peek()
            time = pool.run(outside, batch=self.batch_there is not None, idle=self.drained is not None)
            if time is not None:
                yield env.timeout(max(0.0, time - env.now))
                self._wake()
                continue
            assert outside < math.inf, "trainer and rollout wait for each other"
            yield env.timeout(outside - env.now)

    def _wake(self) -> None:
        if self.batch_there and self.pool.ready:
            self.batch_there.succeed()
            self.batch_there = None
        if self.drained and self.pool.idle:
            self.drained.succeed()
            self.drained = None

    def _exposed(self, k: int) -> Running:
        env, pool = self.env, self.pool
        if self.partial:
            pool.pause(env.now)
        else:
            pool.close(env.now)
            if not pool.idle:
                self.drained = env.event()
                yield self.drained
        self._spans(k)
        yield from self.run.sync(k)
        if self.partial:
            pool.resume(env.now)
        self.lends = self._pays()
        pool.swap(env.now, k + 1, hold=self.lends)
        self._swapped(k + 1)

    def _behind(self, k: int) -> Running:
        yield from self.run.sync(k)
        self._spans(k)
        if self.partial:
            self.pool.swap(self.env.now, k + 1)
        else:
            self.pool.swap_as_drained(self.env.now, k + 1)
        self._swapped(k + 1)

    # --- measures -----------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Work and tokens of the window, from its opening to now, in mean batches begun since it opened."""
        run, pool = self.run, self.pool
        done = len(run.ends) - run.warmup
        # what is trained on is shorter than what begins, where some is thrown away or begins anew
        if done < 0 or pool.late != "wait" or (pool.lent and pool.anew):
            return
        pool.settle(self.env.now)
        work = math.fsum(self.floor.done(r.prefilled / r.pace, r.tokens, r.attended) for r in pool.replicas)
        tokens = math.fsum(r.tokens for r in pool.replicas)
        if self.opened is None:
            self.opened = work, tokens
            return
        begun = pool.sums[run.warmup :]
        needs = math.fsum(self.floor.needs(*sums) for sums in begun) / len(begun)
        length = math.fsum(total for total, _ in begun) / len(begun)
        batches = ((work - self.opened[0]) / needs, (tokens - self.opened[1]) / length)
        run.shortfall = max(1.0, done / max(min(batches), 1e-9))

    def _count(self) -> None:
        recorder, pool = self.run.simulator.recorder, self.pool
        if recorder.on:
            samples = self.run.simulator.setting.workload.samples
            recorder.counter("queue_samples", self._place, self.env.now, pool.queued * samples)

    def _swapped(self, version: int) -> None:
        recorder = self.run.simulator.recorder
        if not recorder.on:
            return
        recorder.counter("weight_version", self._place, self.env.now, version)
        for r, replica in enumerate(self.pool.replicas):
            recorder.counter("running", self._place, self.env.now, len(replica.running), f"replica {r}")
            self.run.simulator.kv_cache(replica.kv_tokens, f"replica {r}")
            self._since[r] = self.env.now, replica.busy, replica.tokens

    def _spans(self, k: int) -> None:
        """One span a replica since it took its weights, as long as it was busy."""
        recorder = self.run.simulator.recorder
        if not recorder.on:
            return
        self.pool.settle(self.env.now)
        for r, replica in enumerate(self.pool.replicas):
            start, busy, tokens = self._since[r]
            end = min(self.env.now, start + replica.busy - busy)
            if end <= start:
                continue
            recorder.span(
                ROLLOUT,
                self._place,
                k,
                start,
                end,
                "hbm",
                group=f"replica {r}",
                version=replica.version,
                tokens=replica.tokens - tokens,
            )

    @property
    def _place(self) -> str:
        role = self.run.simulator.setting.placement.rollout
        assert role is not None
        return role.pool
