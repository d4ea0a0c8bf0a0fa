"""One given placement, priced or run step by step: its closed form, its ledger, its plan, its simulation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlhfsim.frozen import frozen
from rlhfsim.memory.ledger import Ledger, ledger
from rlhfsim.plan import Plan
from rlhfsim.search.candidates import Candidate, timed
from rlhfsim.search.planning import plan_of
from rlhfsim.simulation.pool_figures import level
from rlhfsim.simulation.result import Simulated
from rlhfsim.simulation.run import simulate
from rlhfsim.simulation.summary import (
    Simulation,
    SimulationOptions,
    goodput_of,
    noise_of,
    pool_runs,
    randomness,
)
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.scenario import check_placement
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.calls import CallSetting
from rlhfsim.step.iteration import Iteration, iteration
from rlhfsim.step.measured import memory_doubt
from rlhfsim.step.rule_rewards import with_measured


def estimate(
    placement: Placement, workload: Workload, cluster: Cluster, *, price: float | None = None
) -> Plan:
    """The plan of one given placement: time by phase, memory, money and energy.

    A placement that does not fit is priced all the same; its prediction says so
    (`peak_memory_bytes` above `capacity_bytes`, `probability_out_of_memory`).

    Raises:
        RlhfsimError: a placement that cannot exist (missing roles, TP that does not divide heads, ...).
    """
    priced = priced_placement(placement, workload, cluster)
    return planned(priced, step_of(priced), price)


def step_of(priced: PricedPlacement) -> Iteration:
    """The step that `estimate` prints, with its costs."""
    return timed(priced.setting, priced.kv_tokens)


@frozen
class PricedPlacement:
    """One placement with its closed form and its ledger."""

    setting: CallSetting
    iteration: Iteration
    memory: Ledger

    @property
    def kv_tokens(self) -> float | None:
        """KV capacity of a replica; None where there is none to speak of."""
        tokens = self.memory.kv_tokens
        return tokens if tokens and tokens > 0 else None


def memory_of(placement: Placement, workload: Workload, cluster: Cluster) -> Ledger:
    """The ledger of a placement, as sure as it is near to measured peaks."""
    models = models_of(workload)
    doubt = memory_doubt(models, placement.backend, workload, cluster)
    return ledger(models, placement, workload, cluster, doubt=doubt)


def priced_placement(placement: Placement, workload: Workload, cluster: Cluster) -> PricedPlacement:
    """A placement that can exist, with the closed form of its step and its ledger.

    Raises:
        RlhfsimError: it cannot exist.
    """
    workload = with_measured(workload, cluster)
    models = models_of(workload)
    check_placement(placement, workload, models, cluster)
    memory = memory_of(placement, workload, cluster)
    kv_tokens = memory.kv_tokens if memory.kv_tokens and memory.kv_tokens > 0 else None
    priced = iteration(models, placement, workload, cluster, kv_tokens=kv_tokens)
    setting = CallSetting(models=models, placement=placement, workload=workload, cluster=cluster)
    return PricedPlacement(setting=setting, iteration=priced, memory=memory)


def planned(priced: PricedPlacement, timed: Iteration, price: float | None) -> Plan:
    """Its plan, with the step as timed."""
    s = priced.setting
    candidate = Candidate(placement=s.placement, iteration=timed, ledger=priced.memory)
    return plan_of(candidate, s.workload, s.models, s.cluster, price)


@frozen
class Planned:
    """One priced plan and whether it can run."""

    plan: Plan | None
    """None when nothing fits and no example could be priced."""
    rejected_by: str | None = None
    """What does not fit, in words; None when all does."""
    remedy: str | None = None
    """The smallest change that would fit."""
    notes: tuple[str, ...] = ()
    far: tuple[str, ...] = ()
    """Phases far from the runs that their profile was calibrated on."""
    cluster: Cluster | None = None
    """What the plan was priced on."""

    @property
    def fits(self) -> bool:
        """Whether the plan can run."""
        return self.rejected_by is None


# --- run step by step -------------------------------------------------------------------------------

RUN_AHEAD = 2
"""Steps beyond the staleness bound after which an asynchronous run is steady."""


def simulated(
    priced: PricedPlacement,
    options: SimulationOptions,
    *,
    price: float | None = None,
    progress: Callable[[], object] | None = None,
) -> Simulation:
    """A priced placement, simulated in every replication; `progress` after each."""
    staleness = priced.setting.placement.schedule.staleness
    warmup = max(math.ceil(staleness) + RUN_AHEAD if staleness else 0, options.warmup)
    plan = planned(priced, priced.iteration, price)
    simulation = Simulation(
        estimate=plan,
        plan=plan,
        seed=options.seed,
        warmup=warmup,
        randomness=randomness(options, priced.setting.workload),
    )
    if (reason := priced.memory.rejected_by) is not None:
        return replace(simulation, rejected_by=reason)
    simulation = replace(simulation, goodput=goodput_of(priced.setting, options))
    runs = []
    for i in range(options.replications):
        run = simulate(
            priced.setting,
            priced.kv_tokens,
            steps=options.steps,
            warmup=warmup,
            seed=options.seed + i,
            noise=noise_of(options),
            record="trace" if i == 0 else None,
        )
        runs.append(run)
        if progress is not None:
            progress()
    plan = planned(priced, runs[0].iteration, price)
    return _summed(replace(simulation, plan=plan), priced.setting, runs, options.steps + warmup)


def _summed(
    simulation: Simulation, setting: CallSetting, runs: Sequence[Simulated], steps: int
) -> Simulation:
    """All replications, of `steps` steps each, in one; the first has the trace."""
    trace = runs[0].trace
    trace = replace(trace, plan_hash=simulation.plan.input_hash) if trace else None
    lost: Counter[str] = Counter()
    for run in runs:
        for link, seconds in run.lost.items():
            lost[link] += seconds / steps / len(runs)  # type: ignore[assignment]  # a Counter of floats
    stale = [run.staleness for run in runs if run.staleness]
    return replace(
        simulation,
        runs=tuple(run.step_seconds for run in runs),
        means=tuple(run.seconds for run in runs),
        trace=trace,
        pools=pool_runs(setting, trace, simulation.warmup) if trace else (),
        contention={link: seconds for link, seconds in lost.most_common() if seconds > 0},
        staleness=(sum(s.mean for s in stale) / len(stale), max(s.max for s in stale)) if stale else None,
        rejected=sum(s.rejected for s in stale) / len(stale) if stale else 0.0,
        lent=sum(s.lent for s in stale) / len(stale) if stale else 0.0,
        queue=level(trace, "queue_samples", simulation.warmup) if trace and stale else None,
    )
