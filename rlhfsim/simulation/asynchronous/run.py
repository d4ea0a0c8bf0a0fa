"""Schedules with stale samples: one-step-off and fully asynchronous, on the clock.

Legend: L seconds of the trainer's calls for one batch, s weight sync, g generation of a whole batch, eta
staleness.

One-step-off (eta = 1, no partial rollouts). Batch k+1 is generated whole while batch k is trained; weights
move when both are done, T = max(g, L) + s. With `overlapped_sync` they move as soon as the trainer is
done, into a second buffer; batch k+2 waits for them (its samples may be one version old, no more), so
T = max(g, L, s, (g + L + s) / 2).

Fully asynchronous (any other eta, or partial rollouts). Replicas never drain of their own accord
(`rollout`, `rollout_pool`). The trainer takes a batch, runs its calls, and hands over the weights:
- exposed: replicas stop (partial rollouts) or first finish what runs (NeMo-RL, verl), then weights move while
  all wait, then interrupted sequences prefill again;
- lent: before they carry on, the trainer's GPUs wake an engine too if the wait for the next batch, judged by
  the rate so far, is long enough; it sleeps once the batch is there, and what runs on it goes on elsewhere;
- overlapped: weights move while all else goes on, one transfer at a time, then each replica takes
  them at once (partial rollouts) or as it has drained.
One batch is in training at a time: calls of the next wait even where other pools score.

Steady state: the first ceil(eta) + 2 steps never count. The mean step is the window over its steps,
or over the batches that the rollout produced in it where those are fewer (else a window that
eats up samples made before it would look faster than any steady state).

Not known here: that sequences which wait for an environment hold their slots (its workers' pace is kept, and
one-step-off has it in g), trainer calls that share the rollout's GPUs, streaming into the trainer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from rlhfsim.kernels.cost import Cost, total
from rlhfsim.simulation.asynchronous import priced_rollout
from rlhfsim.simulation.asynchronous.batch_means import interval_of
from rlhfsim.simulation.asynchronous.replica import RolloutReplica
from rlhfsim.simulation.asynchronous.rollout_pool import RolloutPool
from rlhfsim.simulation.asynchronous.schedules import Async, LearnerRun, OneStepOff, Programs
from rlhfsim.simulation.noise import Draws, Noise
from rlhfsim.simulation.result import Simulated, Staleness
from rlhfsim.simulation.simulator import Record, simulator_of
from rlhfsim.specs.placement.placement import Schedule
from rlhfsim.step.calls import CallSetting, requests_of
from rlhfsim.step.iteration import Iteration, Program, program, switch_seconds
from rlhfsim.step.timetable import ROLLOUT, SYNC, SYNC_POOL, Phase, learner_steps, timetable

WAIT = "actor.generate.wait"
"""What the trainer waits for samples."""


@dataclass(frozen=True, slots=True)
class SteadyRun:
    """A run in steady state, whether or not the trainer lends its GPUs."""

    kv_tokens: float | None = None
    steps: int = 8
    """Measured ones."""
    warmup: int = 0
    """Steps before them that no figure counts; `least_warmup` at least."""
    seed: int | None = None
    noise: Noise | None = None
    record: Record | None = None
    cutoff: float | None = None
    """The run stops once the interval of its mean step lies above so many seconds."""
    priced: Program | None = None
    """The program of a quiet run, where the caller has it."""


def simulate(setting: CallSetting, asked: SteadyRun) -> Simulated:
    """The run; a trainer that may lend its GPUs does not where the run is shorter without."""
    if not setting.placement.schedule.lend:
        return _ran(setting, asked, lends=False)
    lent = _ran(setting, asked, lends=True)
    longest = lent.seconds if asked.cutoff is None else min(asked.cutoff, lent.seconds)
    own = _ran(setting, replace(asked, cutoff=longest), lends=False)
    return min(lent, own, key=lambda ran: ran.seconds)


def _ran(setting: CallSetting, asked: SteadyRun, *, lends: bool) -> Simulated:
    kv_tokens, draws = asked.kv_tokens, Draws(setting, asked.noise, asked.seed)
    usual = asked.priced or program(setting, kv_tokens)
    programs = _programs(draws, usual, kv_tokens)
    simulator = simulator_of(setting, asked.record)
    schedule = setting.placement.schedule
    run = LearnerRun(
        simulator=simulator,
        programs=programs,
        steps=asked.steps,
        warmup=max(asked.warmup, least_warmup(schedule)),
        cutoff=asked.cutoff,
        paired=schedule.one_step_off and schedule.overlapped_sync,
    )
    pool = None if schedule.one_step_off else _pool(draws, kv_tokens)
    switches = switch_seconds(setting, kv_tokens) if lends else None
    ways = OneStepOff(run, schedule) if pool is None else Async(run, pool, switches)
    if simulator.memory_timeline is not None:
        simulator.memory_timeline.begin(ROLLOUT, 0.0)
    simulator.env.run(until=simulator.env.process(ways.train()))
    found = _simulated(run, usual, asked.seed, pool.rejected_tokens if pool else 0.0)
    if pool is not None:
        pool.release()
    if isinstance(ways, OneStepOff) or found.staleness is None:
        return found
    return replace(found, staleness=replace(found.staleness, lent=ways.lent_s / simulator.env.now))


def least_warmup(schedule: Schedule) -> int:
    """Steps until samples of every age have been trained on."""
    return math.ceil(schedule.staleness) + 2


def _programs(draws: Draws, usual: Program, kv_tokens: float | None) -> Programs:
    if draws.noise.quiet:
        return lambda k: usual
    return lambda k: draws.program(kv_tokens, k)


def _pool(draws: Draws, kv_tokens: float | None) -> RolloutPool:
    setting, workload = draws.base, draws.base.workload
    longest = workload.response_len.maximum if draws.noise.lengths else float(draws.lengths(0).max())
    engine = priced_rollout.rollout_engine(setting, kv_tokens, longest)
    schedule, lent = setting.placement.schedule, priced_rollout.lent_replicas(setting.placement)

    def lengths(k: int) -> list[list[float]]:
        groups: list[list[float]] = draws.lengths(k).reshape(-1, workload.samples).tolist()
        return groups

    return RolloutPool(
        replicas=[RolloutReplica(engine, pace) for pace in [*draws.replica_paces(), *[1.0] * lent]],
        lengths=lengths,
        batch=requests_of(setting).prompts,
        staleness=schedule.staleness,
        partial=schedule.partial_rollout,
        queue=schedule.queue,
        late=schedule.late,
        lent=lent,
        anew=workload.environment is not None,
    )


# --- results ----------------------------------------------------------------------------------------


def _simulated(run: LearnerRun, usual: Program, seed: int | None, rejected_tokens: float) -> Simulated:
    simulator, seconds = run.simulator, run.steady
    ages = [age for step in run.ages[run.warmup : len(run.ends)] for age in step]
    recorder, memory_timeline = simulator.recorder, simulator.memory_timeline
    return Simulated(
        iteration=_iteration(run, usual),
        step_seconds=seconds,
        trace=recorder.trace(seed=seed, steps=len(run.ends)) if recorder.on else None,
        staleness=Staleness(
            mean=float(np.mean(ages)),
            max=float(max(map(max, run.ages))),
            rejected=rejected_tokens / (rejected_tokens + run.taken_tokens) if rejected_tokens else 0.0,
        ),
        interval=interval_of(seconds),
        lost=dict(sorted(simulator.shared_links.lost.items())),
        peaks=memory_timeline.peaks() if memory_timeline is not None else (),
        stopped=run.stopped,
    )


def _iteration(run: LearnerRun, usual: Program) -> Iteration:
    """The mean step as a chain: the wait for samples, the trainer's calls, the weights.

    Generation goes on during training, off the chain; on it is the part that the trainer waits for.
    """
    measured = slice(run.warmup, run.warmup + len(run.seconds))
    mean = run.mean
    learned = float(np.mean(run.learned[measured]))
    sync = (
        0.0
        if run.simulator.setting.placement.schedule.overlapped_sync
        else math.fsum(s.cost.seconds for s in usual.steps if s.name == SYNC)
    )
    wait = max(0.0, mean - learned - sync)
    calls, chain = timetable(learner_steps(usual.steps), priced_rollout.PLAIN)
    stretch = learned / max((p.end for p in calls), default=1.0)
    generation = usual.continuous or (usual.generation.cost if usual.generation else Cost())
    rollout = next(s.pools for s in usual.steps if s.name == ROLLOUT)
    phases = [
        Phase(name=WAIT, pools=rollout, start=0.0, cost=_as_long(generation, wait), after=None),
        *(_moved(p, wait, stretch) for p in calls),
    ]
    moves = [s for s in usual.steps if s.name == SYNC]
    hidden = not sync and bool(moves)
    critical = (0, *(i + 1 for i in chain))
    for step in moves:
        start, left = (
            (0.0, step.cost) if hidden else (wait + learned, _as_long(step.cost, mean - wait - learned))
        )
        critical += () if hidden else (len(phases),)
        phases.append(
            Phase(
                name=SYNC,
                pools=(SYNC_POOL,) if hidden else step.pools,
                start=start,
                cost=left,
                after=None if hidden else critical[-2],
            )
        )
    phases.append(
        Phase(name=ROLLOUT, pools=rollout, start=wait, cost=_as_long(generation, mean - wait - sync), after=0)
    )
    return Iteration(
        phases=tuple(phases),
        critical=critical,
        cost=total(phases[i].cost for i in critical),
        generation=usual.generation,
        tokens=usual.tokens,
        gpus=usual.gpus,
    )


def _as_long(cost: Cost, seconds: float) -> Cost:
    return cost.scaled(max(0.0, seconds) / cost.seconds) if cost.seconds > 0 else cost


def _moved(phase: Phase, by: float, stretch: float) -> Phase:
    return replace(
        phase,
        start=by + phase.start * stretch,
        cost=phase.cost.scaled(stretch),
        after=0 if phase.after is None else phase.after + 1,
    )
