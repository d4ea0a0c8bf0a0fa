"""A simulated run: what was asked, and what it came to in figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING

import numpy as np

from rlhfsim import units
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.simulation.pool_figures import Level, pool_figures
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.calls import CallSetting
from rlhfsim.trace import Trace

if TYPE_CHECKING:
    from rlhfsim.simulation.noise import Noise

ALIKE = 1e-9
"""Relative spread below which step times are alike."""
FAILURES = 300
"""Failures, on average, in a simulated job; goodput then varies by about 6 % of what failures cost."""
MAX_CHECKPOINTS = 50_000
"""Checkpoints of a simulated job, where they are much more frequent than failures."""
HOPELESS = 4.0
"""Restart, interval and checkpoint over MTBF, above which a job hardly makes progress."""


@frozen
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


@frozen
class SimulationOptions:
    """How long a plan is run, and what is random."""

    steps: int = 20
    """Measured steps of one replication."""
    warmup: int = 0
    """Steps before them that no figure counts; staleness + 2 at least when asynchronous."""
    seed: int = 0
    """Seed of the first replication; the next has the next one."""
    replications: int = 1
    drawn_lengths: bool = True
    """Each step draws its own response lengths; otherwise all have the expected ones."""
    reward_spread: float = 0.0
    """Standard deviation of the log of reward times from step to step."""
    straggler: tuple[float, float] | None = None
    """Share of the ranks that are slow, and how many times as long they take."""
    faults: FaultOptions | None = None


@frozen
class GoodputSummary:
    """Share of the time that makes progress, failures and checkpoints counted."""

    simulated: float
    first_order: float
    """1 / (1 + T_checkpoint / interval + (interval / 2 + T_restart) / MTBF of the job)."""
    interval_s: float
    """Useful time between checkpoints."""
    best_interval_s: float
    """Daly 2006, eq. 37."""
    mtbf_s: float
    """Mean time between failures of the whole job, s."""


@frozen
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
        return self.peak_bytes / self.capacity_bytes if self.peak_bytes and self.capacity_bytes else 0.0


@frozen
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
    means: tuple[float, ...] = ()
    """Seconds per step of each replication; in steady state, so that an asynchronous run which lives on
    samples made before its window does not look faster than it is."""
    trace: Trace | None = None
    """Trace of the first replication."""
    pools: tuple[PoolRun, ...] = ()
    contention: Mapping[str, float] = field(default_factory=dict)
    """Seconds per step that calls lost to links they shared, by link."""
    staleness: tuple[float, float] | None = None
    """Weight versions between generation and training, mean and most; None: synchronous."""
    rejected: float = 0.0
    """Share of the response tokens that was thrown away because it was too old."""
    lent: float = 0.0
    """Share of the time in which the trainer's GPUs generate."""
    queue: Level | None = None
    """Finished samples that wait for the trainer; None: synchronous."""
    goodput: GoodputSummary | None = None
    rejected_by: str | None = None
    """What does not fit and when, in words; None: it fits."""

    @property
    def steps(self) -> np.ndarray:
        """Seconds of every measured step of every replication."""
        return np.concatenate([np.asarray(run) for run in self.runs])

    @property
    def mean(self) -> float:
        """Seconds per step over all replications."""
        return float(np.mean(self.means))

    def percentile(self, share: float) -> float:
        """Step time below which `share` percent of all steps lie."""
        return float(np.percentile(self.steps, share))

    @property
    def alike(self) -> bool:
        """Whether all steps take the same time."""
        return float(np.ptp(self.steps)) <= ALIKE * self.mean


def randomness(asked: SimulationOptions, workload: Workload) -> str:
    """What was random, in words."""
    lengths = "drawn" if asked.drawn_lengths else "as expected"
    words = [f"response lengths {'fixed' if isinstance(workload.response_len, Fixed) else lengths}"]
    if asked.drawn_lengths and workload.environment is not None and workload.environment.varies:
        words.append("turns and answers drawn")
    if asked.reward_spread:
        words.append(f"reward times spread by {asked.reward_spread:g}")
    if asked.straggler:
        share, slowdown = asked.straggler
        words.append(f"{units.significant(100 * share)} % of the GPUs take {slowdown:g} times as long")
    return ", ".join(words)


def noise_of(asked: SimulationOptions) -> Noise | None:
    """What varies, for the simulator; None: nothing does."""
    from rlhfsim.simulation.noise import Noise

    share, slowdown = asked.straggler or (0.0, 1.0)
    noise = Noise(
        lengths=asked.drawn_lengths,
        reward_spread=asked.reward_spread,
        straggler_share=share,
        straggler_slowdown=slowdown,
    )
    return None if noise.quiet else noise


def pool_runs(setting: CallSetting, trace: Trace, warmup: int) -> tuple[PoolRun, ...]:
    """Pools of the plan first, then what else works (CPU workers)."""
    gpus = {pool.name: pool for pool in setting.placement.pools}
    runs = []
    for pool in pool_figures(trace, warmup):
        here = gpus.get(pool.name)
        profile = setting.cluster.node_groups[here.hardware].profile if here else None
        runs.append(
            PoolRun(
                name=pool.name,
                gpus=here.gpus if here else 0,
                busy=pool.busy,
                peak_bytes=pool.peak_bytes,
                peak_s=pool.peak_s,
                peak_in=pool.peak_in,
                capacity_bytes=profile.usable_memory.value if profile else 0.0,
            )
        )
    order = list(gpus)
    return tuple(sorted(runs, key=lambda p: order.index(p.name) if p.gpus else len(order)))


def goodput_of(setting: CallSetting, asked: SimulationOptions) -> GoodputSummary | None:
    """A long job of the plan with failures; None where nobody asked."""
    given = asked.faults
    if given is None:
        return None
    from rlhfsim.simulation.faults import Faults, daly_interval, first_order, simulate_faults

    nodes = sum(pool.nodes for pool in setting.cluster.node_groups)
    job = Faults(
        node_mtbf=given.mtbf_s,
        nodes=nodes,
        restart=given.restart_s,
        checkpoint=given.checkpoint_s,
        interval=given.mtbf_s,
    )
    best = daly_interval(job)
    job = replace(job, interval=given.interval_s or best)
    _check_progress(job.mtbf, job.interval + job.checkpoint + job.restart, nodes)
    work = min(FAILURES * job.mtbf, MAX_CHECKPOINTS * job.interval)
    return GoodputSummary(
        simulated=simulate_faults(job, work, seed=asked.seed).goodput,
        first_order=first_order(job),
        interval_s=job.interval,
        best_interval_s=best,
        mtbf_s=job.mtbf,
    )


def _check_progress(mtbf: float, needed: float, nodes: int) -> None:
    """Whether a job gets anywhere: it restarts, works and saves between most failures.

    Raises:
        RlhfsimError: it fails much more often than it can save.
    """
    if needed > HOPELESS * mtbf:
        raise RlhfsimError(
            "job-makes-no-progress",
            f"with {nodes} nodes the job fails every {units.format(mtbf, 's')}, but to restart, work"
            f" and save once takes {units.format(needed, 's')}",
            help="shorten --restart, --checkpoint or --checkpoint-interval, or check --mtbf (it is per node)",
        )
