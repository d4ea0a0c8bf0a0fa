"""The verbs of the command line as typed functions: `estimate`, `design`, `simulate_file`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlhfsim import units
from rlhfsim.errors import RlhfsimError
from rlhfsim.export.figures import Level, level, pool_figures
from rlhfsim.phases.iteration import Iteration, Setting, iteration
from rlhfsim.phases.ledger import Ledger, ledger
from rlhfsim.plan import Plan, read_plan
from rlhfsim.search.candidates import Candidate
from rlhfsim.search.design import design
from rlhfsim.search.planning import plan_of
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware import Cluster
from rlhfsim.specs.lengths import Fixed
from rlhfsim.specs.models import models_of
from rlhfsim.specs.placement import Placement
from rlhfsim.specs.profiles import load_profile, make_pool, profile_hash
from rlhfsim.specs.scenario import check_placement, load_scenario
from rlhfsim.specs.workload import Workload
from rlhfsim.trace import Trace

if TYPE_CHECKING:
    from rlhfsim.simulation.noise import Noise
    from rlhfsim.simulation.simulated import Simulated

__all__ = ["design", "estimate", "estimate_file", "estimate_request", "simulate_file"]


def estimate(
    placement: Placement, workload: Workload, cluster: Cluster, *, price: float | None = None
) -> Plan:
    """The plan of one given placement: time by phase, memory, money and energy.

    A placement that does not fit is priced all the same; its prediction says so
    (`peak_memory_bytes` above `capacity_bytes`, `probability_out_of_memory`).

    Raises:
        RlhfsimError: a placement that cannot exist (missing seats, TP that does not divide heads, ...).
    """
    priced = _priced(placement, workload, cluster)
    return _plan(priced, priced.iteration, price)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """One placement with its closed form and its ledger."""

    setting: Setting
    iteration: Iteration
    memory: Ledger

    @property
    def kv_tokens(self) -> float | None:
        """KV capacity of a replica; None where there is none to speak of."""
        tokens = self.memory.kv_tokens
        return tokens if tokens and tokens > 0 else None


def _priced(placement: Placement, workload: Workload, cluster: Cluster) -> _Priced:
    models = models_of(workload)
    check_placement(placement, workload, models, cluster)
    memory = ledger(models, placement, workload, cluster)
    kv_tokens = memory.kv_tokens if memory.kv_tokens and memory.kv_tokens > 0 else None
    priced = iteration(models, placement, workload, cluster, kv_tokens=kv_tokens)
    setting = Setting(models=models, placement=placement, workload=workload, cluster=cluster)
    return _Priced(setting=setting, iteration=priced, memory=memory)


def _plan(priced: _Priced, timed: Iteration, price: float | None) -> Plan:
    s = priced.setting
    candidate = Candidate(placement=s.placement, iteration=timed, ledger=priced.memory)
    return plan_of(candidate, s.workload, s.models, s.cluster, price)


def estimate_file(path: str | Path, *, price: float | None = None) -> Plan:
    """The plan of a scenario (YAML file or shipped name) or of a `plan.json`, priced now.

    Raises:
        RlhfsimError: the first thing wrong in the file, with its line.
    """
    return estimate(*_read(path), price=price)


def _read(path: str | Path) -> tuple[Placement, Workload, Cluster]:
    if Path(path).suffix == ".json":
        plan = read_plan(Path(path))
        return plan.placement, plan.workload, cluster_of(plan)
    scenario = load_scenario(path)
    return scenario.placement, scenario.workload, scenario.cluster


def estimate_request(request: Request) -> Plan:
    """The best plan under a request that fixes an architecture or layouts (`rlhfsim estimate`).

    Raises:
        RlhfsimError: nothing fits.
    """
    found = design(request, explain=False)
    if found.chosen is None:
        raise RlhfsimError(
            "nothing-fits",
            "no plan with these choices fits",
            help=found.remedy or "free some of the choices",
        )
    return found.chosen


def cluster_of(plan: Plan) -> Cluster:
    """The cluster of a plan, from the profiles as they are now.

    Raises:
        RlhfsimError: a profile is unknown here.
    """
    pools = tuple(
        make_pool(h.profile, h.gpus, gpus_per_node=h.gpus_per_node) for h in plan.hardware
    )
    return Cluster(pools=pools, oversubscription=plan.oversubscription)


def stale_profiles(plan: Plan) -> tuple[str, ...]:
    """Profiles whose content differs from the one the plan was made with."""
    return tuple(
        h.profile for h in plan.hardware if profile_hash(load_profile(h.profile)) != h.profile_hash
    )


# --- simulation -------------------------------------------------------------------------------------

ALIKE = 1e-9
"""Relative spread below which step times are alike."""
FAILURES = 300
"""Failures, on average, in a simulated job; goodput then varies by about 6 % of what failures cost."""
MAX_CHECKPOINTS = 50_000
"""Checkpoints of a simulated job, where they are much more frequent than failures."""
HOPELESS = 4.0
"""Restart, interval and checkpoint over MTBF, above which a job hardly makes progress."""
RUN_AHEAD = 2
"""Steps beyond the staleness bound after which an asynchronous run is steady."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOptions:
    """Failures of nodes and what a run does about them."""

    mtbf_s: float
    """Mean time between failures of one node."""
    restart_s: float
    """From a failure until the run goes on."""
    checkpoint_s: float
    """Time that one checkpoint blocks the run."""
    interval_s: float | None = None
    """Useful time between checkpoints; None: the best one (Daly)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """How long a plan is run, and what is random."""

    steps: int = 20
    """Measured steps of one replication."""
    warmup: int = 0
    """Steps before them that no figure counts; staleness + 2 at least when asynchronous."""
    seed: int = 0
    """Of the first replication; the next has the next one."""
    replications: int = 1
    drawn_lengths: bool = True
    """Each step draws its own response lengths; otherwise all have the expected ones."""
    reward_spread: float = 0.0
    """Standard deviation of the log of reward times from step to step."""
    straggler: tuple[float, float] | None = None
    """Share of the ranks that are slow, and how many times as long they take."""
    faults: FaultOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Share of the time that makes progress, failures and checkpoints counted."""

    simulated: float
    first_order: float
    """1 / (1 + T_checkpoint / interval + (interval / 2 + T_restart) / MTBF of the job)."""
    interval_s: float
    """Useful time between checkpoints."""
    best_interval_s: float
    """Daly 2006, eq. 37."""
    mtbf_s: float
    """Of the whole job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRun:
    """One pool over a run."""

    name: str
    gpus: int
    """0: no GPUs (rule rewards run on CPUs)."""
    busy: float
    """Share of the measured time in which its GPUs work."""
    peak_bytes: float | None
    """On its fullest GPU; None: not recorded."""
    peak_s: float | None
    """When that is first, seconds from the start of the run."""
    peak_in: str | None
    """What the pool does then."""
    capacity_bytes: float
    """What the driver offers on one GPU; 0 without GPUs."""

    @property
    def peak_share(self) -> float:
        """Peak over capacity."""
        return self.peak_bytes / self.capacity_bytes if self.peak_bytes and self.capacity_bytes else 0.0  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A plan that was run step by step."""

    estimate: Plan
    """The plan with its closed-form prediction."""
    plan: Plan
    """The same plan with the mean simulated step as prediction."""
    seed: int
    warmup: int
    randomness: str
    """What was random, in words."""
    runs: tuple[tuple[float, ...], ...] = ()
    """Seconds of every measured step, one row a replication; empty where the plan does not fit."""
    trace: Trace | None = None
    """Of the first replication."""
    pools: tuple[PoolRun, ...] = ()
    contention: Mapping[str, float] = field(default_factory=dict)
    """Seconds per step that calls lost to links they shared, by link."""
    staleness: tuple[float, float] | None = None
    """Weight versions between generation and training, mean and most; None: synchronous."""
    queue: Level | None = None
    """Finished samples that wait for the trainer; None: synchronous."""
    goodput: Goodput | None = None
    rejected_by: str | None = None
    """What does not fit and when, in words; None: it fits."""

    @property
    def steps(self) -> np.ndarray:
        """Seconds of every measured step of every replication."""
        return np.concatenate([np.asarray(run) for run in self.runs])

    @property
    def mean(self) -> float:
        """Seconds per step."""
        return float(self.steps.mean())

    def percentile(self, share: float) -> float:
        """Step time below which `share` percent of all steps lie."""
        return float(np.percentile(self.steps, share))

    @property
    def alike(self) -> bool:
        """Whether all steps take the same time."""
        return float(np.ptp(self.steps)) <= ALIKE * self.mean


def simulate_file(
    path: str | Path,
    options: SimulationOptions | None = None,
    *,
    price: float | None = None,
    progress: Callable[[], object] | None = None,
) -> Simulation:
    """A scenario, a shipped system or a `plan.json`, run step by step; `progress` after every replication.

    Raises:
        RlhfsimError: the first thing wrong in the file, with its line.
    """
    asked = options or SimulationOptions()
    priced = _priced(*_read(path))
    placement = priced.setting.placement
    ahead = math.ceil(placement.schedule.staleness) + RUN_AHEAD if placement.schedule.staleness else 0  # fmt: skip
    warmup = max(ahead, asked.warmup)
    plan = _plan(priced, priced.iteration, price)
    base = Simulation(estimate=plan, plan=plan, seed=asked.seed, warmup=warmup, randomness=_randomness(asked, priced.setting.workload))  # fmt: skip
    reason = _rejection(priced)
    if reason is not None:
        return replace(base, rejected_by=reason)
    runs = []
    for i in range(asked.replications):
        runs.append(_run(priced, asked, warmup, asked.seed + i, record=i == 0))
        if progress is not None:
            progress()
    return _told(base, priced, runs, asked, price)


def _rejection(priced: _Priced) -> str | None:
    """What does not fit, with the instant where the memory book finds one."""
    from rlhfsim.simulation.run import simulate

    reason = priced.memory.rejected_by
    if reason is None:
        return None
    try:
        simulate(priced.setting, priced.kv_tokens, memory="strict")
    except RlhfsimError as error:
        if error.code != "out-of-memory":
            raise
        return error.message
    return reason


def _run(priced: _Priced, asked: SimulationOptions, warmup: int, seed: int, *, record: bool) -> Simulated:  # fmt: skip
    from rlhfsim.simulation.run import simulate

    return simulate(
        priced.setting, priced.kv_tokens, steps=asked.steps, warmup=warmup, seed=seed, noise=_noise(asked),
        record=record, memory="watch" if record else None,
    )  # fmt: skip


def _noise(asked: SimulationOptions) -> Noise | None:
    from rlhfsim.simulation.noise import Noise

    share, slowdown = asked.straggler or (0.0, 1.0)
    found = Noise(
        lengths=asked.drawn_lengths, reward_spread=asked.reward_spread, straggler_share=share,
        straggler_slowdown=slowdown,
    )  # fmt: skip
    return None if found.quiet else found


def _randomness(asked: SimulationOptions, workload: Workload) -> str:
    lengths = "drawn" if asked.drawn_lengths else "as expected"
    words = [f"response lengths {'fixed' if isinstance(workload.response_len, Fixed) else lengths}"]
    if asked.reward_spread:
        words.append(f"reward times spread by {asked.reward_spread:g}")
    if asked.straggler:
        share, slowdown = asked.straggler
        words.append(
            f"{units.significant(100 * share)} % of the GPUs take {slowdown:g} times as long"
        )
    return ", ".join(words)


def _told(
    base: Simulation, priced: _Priced, runs: Sequence[Simulated], asked: SimulationOptions, price: float | None
) -> Simulation:  # fmt: skip
    first = runs[0]
    trace = replace(first.trace, plan_hash=base.plan.input_hash) if first.trace else None
    lost: dict[str, float] = {}
    for run in runs:
        for link, seconds in run.lost.items():
            lost[link] = lost.get(link, 0.0) + seconds / (asked.steps + base.warmup) / len(runs)
    stale = [run.staleness for run in runs if run.staleness]
    return replace(
        base,
        plan=_plan(priced, first.iteration, price),
        runs=tuple(run.step_seconds for run in runs),
        trace=trace,
        pools=_pool_runs(priced.setting, trace, base.warmup) if trace else (),
        contention={k: v for k, v in sorted(lost.items(), key=lambda kv: -kv[1]) if v > 0},
        staleness=(sum(s.mean for s in stale) / len(stale), max(s.max for s in stale)) if stale else None,
        queue=level(trace, "queue_samples", base.warmup) if trace and stale else None,
        goodput=_goodput(priced, asked),
    )  # fmt: skip


def _pool_runs(setting: Setting, trace: Trace, warmup: int) -> tuple[PoolRun, ...]:
    """Pools of the plan first, then what else works (CPU workers)."""
    gpus = {pool.name: pool for pool in setting.placement.pools}
    found = []
    for pool in pool_figures(trace, warmup):
        here = gpus.get(pool.name)
        profile = setting.cluster.pools[here.hardware].profile if here else None
        found.append(PoolRun(
            name=pool.name, gpus=here.gpus if here else 0, busy=pool.busy, peak_bytes=pool.peak_bytes,
            peak_s=pool.peak_s, peak_in=pool.peak_in,
            capacity_bytes=profile.usable_memory.value if profile else 0.0,
        ))  # fmt: skip
    order = list(gpus)
    return tuple(sorted(found, key=lambda p: order.index(p.name) if p.gpus else len(order)))


def _goodput(priced: _Priced, asked: SimulationOptions) -> Goodput | None:
    """A long job of the plan with failures; None where nobody asked."""
    given = asked.faults
    if given is None:
        return None
    from rlhfsim.simulation.faults import Faults, daly_interval, first_order, simulate_faults

    nodes = sum(pool.nodes for pool in priced.setting.cluster.pools)
    job = Faults(
        node_mtbf=given.mtbf_s, nodes=nodes, restart=given.restart_s, checkpoint=given.checkpoint_s, interval=given.mtbf_s,
    )  # fmt: skip
    best = daly_interval(job)
    job = replace(job, interval=given.interval_s or best)
    _check_progress(job.mtbf, job.interval + job.checkpoint + job.restart, nodes)
    work = min(FAILURES * job.mtbf, MAX_CHECKPOINTS * job.interval)
    return Goodput(
        simulated=simulate_faults(job, work, seed=asked.seed).goodput, first_order=first_order(job),
        interval_s=job.interval, best_interval_s=best, mtbf_s=job.mtbf,
    )  # fmt: skip


def _check_progress(mtbf: float, needed: float, nodes: int) -> None:
    """Whether a job gets anywhere: it restarts, works and saves between most failures.

    Raises:
        RlhfsimError: it fails much more often than it can save.
    """
    if needed > HOPELESS * mtbf:
        raise RlhfsimError(
            "job-makes-no-progress", f"with {nodes} nodes the job fails every {units.format(mtbf, 's')}, but to restart, work"
            f" and save once takes {units.format(needed, 's')}",
            help="shorten --restart, --checkpoint or --checkpoint-interval, or check --mtbf (it is per node)",
        )  # fmt: skip
