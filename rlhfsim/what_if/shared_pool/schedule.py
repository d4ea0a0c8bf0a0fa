"""Which job runs when on how many GPUs: one integer program over slots of time, then a replay in draws.

    y[m, s] = 1    mode m starts in slot s; a mode is a job on n GPUs, or two jobs in turn on the same n
    max  sum y (weights x P(deadline | start) - 0.01 weights x end / horizon - 1e-4 GPUs x time / the pool's)
    each job in one mode;  in every slot the GPUs of running modes are at most those of the pool

Solved by HiGHS (scipy.optimize.milp). A mode takes as many slots as its P80 of the duration, so that what
follows it can start as planned in four of five draws. Then jobs are replayed in the order of their starts,
each as soon as its GPUs are free: the probabilities that are shown are those of the replay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.what_if.risk.odds import quantiles
from rlhfsim.what_if.risk.step import Floats
from rlhfsim.what_if.shared_pool.pairs import JobStep, Sharing, sharing
from rlhfsim.what_if.shared_pool.spot import SpotPace

SLOTS = 48
"""Slots of the horizon."""
SURE = 0.8
"""Quantile of a duration that the plan leaves room for."""
LATE, IDLE = 0.01, 1e-4
"""What an end at the horizon, and all of the pool's time, count against a deadline that is kept."""
PAIRS_WELL = 1.02
"""Gain from which two jobs may share GPUs."""
LIMIT_S = 20.0
"""Longest solution."""
REPLAYED = 512
"""Draws that are replayed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolOption:
    """One job on a number of GPUs."""

    job: str
    gpus: int
    """GPUs of the pool."""
    step_s: float
    fits: float
    """P(fits)."""
    drawn_s: Floats
    """(draws,) seconds of the run alone, failures counted."""
    shape: JobStep | None = None
    """None: it shares its GPUs with no other job."""
    plan: Plan | None = None
    gap: float = 0.0
    """Share of the step by which a plan could still be shorter."""
    worked: float | None = None
    """Seconds of a step in which its GPUs work, where its shape does not say."""
    spot: SpotPace | None = None
    """Rented instances next to the pool on which its rollout runs."""
    spot_price: float | None = None
    """USD per GPU-hour of those."""

    @property
    def worked_s(self) -> float:
        """Seconds of a step in which its GPUs of the pool work."""
        return self.shape.any_s if self.shape else self.step_s if self.worked is None else self.worked

    @property
    def held_gpus(self) -> float:
        """GPUs that it takes, those outside the pool among them."""
        return self.gpus + (self.spot.spot.paid_gpus if self.spot else 0.0)

    def in_time(self, deadline_s: float) -> float:
        """Probability that it fits and, started now, is done by then."""
        return self.fits * float(np.mean(self.drawn_s <= deadline_s))


@frozen
class JobTerms:
    """What is asked of a job."""

    name: str
    deadline_s: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolMode:
    """One job, or two in turn, on GPUs of their own."""

    options: tuple[PoolOption, ...]
    ends_s: tuple[Floats, ...]
    """(draws,) of each job, from the start of the mode."""
    sharing: Sharing | None = None

    @property
    def gpus(self) -> int:
        """That it takes."""
        return self.options[0].gpus

    @property
    def whole_s(self) -> Floats:
        """(draws,) until its GPUs are free."""
        longest: Floats = np.maximum.reduce(self.ends_s)
        return longest

    @property
    def jobs(self) -> tuple[str, ...]:
        """Jobs of the mode."""
        return tuple(o.job for o in self.options)


@frozen
class ScheduledMode:
    """A mode with its planned start."""

    mode: PoolMode
    start_s: float


@frozen
class PoolPlan:
    """Every job with its GPUs and its start, and how surely it is done in time."""

    modes: tuple[ScheduledMode, ...]
    """In the order in which they start."""
    in_time: Mapping[str, float]
    """Job -> probability that it fits and is done by its deadline."""
    begins_s: Mapping[str, float]
    """Job -> median of its start: as soon as its GPUs are free, which its slot does not wait for."""
    ends_s: Mapping[str, tuple[float, float, float]]
    """Job -> P10, median and P90 of its end."""
    makespan_s: float
    """Median of the end of the last job."""
    value: float
    """What the program maximised."""
    gap: float
    """Share by which another schedule could still be worth more; above 0 where its time limit ended the
    solver."""


# --- modes --------------------------------------------------------------------------------------------


def modes(options: Sequence[PoolOption]) -> tuple[PoolMode, ...]:
    """Every job alone, and every two that pair well."""
    alone = [PoolMode(options=(o,), ends_s=(o.drawn_s,)) for o in options]
    return (*alone, *(m for m in paired(options) if m.sharing and pairs_well(m.sharing)))


def pairs_well(shared: Sharing) -> bool:
    """Whether two jobs may share GPUs, and are done sooner for it."""
    return shared.refusal is None and shared.gain >= PAIRS_WELL


def paired(options: Sequence[PoolOption]) -> list[PoolMode]:
    """Every two jobs on the same number of GPUs, whether or not that is wise."""
    return [
        _pair(one, other, sharing(one.shape, other.shape))
        for i, one in enumerate(options)
        for other in options[i + 1 :]
        if one.job != other.job and one.gpus == other.gpus and one.shape and other.shape
    ]


def _pair(one: PoolOption, other: PoolOption, shared: Sharing) -> PoolMode:
    """Two jobs in turn until the first is done; then the other runs alone."""
    speeds = one.step_s / shared.cycle_s, other.step_s / shared.cycle_s
    first = np.minimum(one.drawn_s / speeds[0], other.drawn_s / speeds[1])
    ends = tuple(first + (o.drawn_s - first * speed) for o, speed in zip((one, other), speeds, strict=True))
    return PoolMode(options=(one, other), ends_s=ends, sharing=shared)


# --- the program --------------------------------------------------------------------------------------


def horizon_of(known: Sequence[PoolMode], jobs: Sequence[JobTerms]) -> float:
    """Seconds in which all jobs can be done one after the other, with room for whole slots."""
    shortest = [min(_room(m) for m in known if m.jobs == (j.name,)) for j in jobs]
    return max(max(j.deadline_s for j in jobs), 1.5 * sum(shortest))


def _room(mode: PoolMode) -> float:
    return float(np.quantile(mode.whole_s, SURE))


def worth(mode: PoolMode, start_s: float, jobs: Mapping[str, JobTerms], horizon_s: float, gpus: int) -> float:
    """What a mode that starts then is worth to the program."""
    value = 0.0
    for option, ends in zip(mode.options, mode.ends_s, strict=True):
        job = jobs[option.job]
        kept = option.fits * float(np.mean(start_s + ends <= job.deadline_s))
        value += job.weight * (kept - LATE * (start_s + float(np.quantile(ends, SURE))) / horizon_s)
    return value - IDLE * mode.options[0].held_gpus * _room(mode) / (gpus * horizon_s)


def length_of(mode: PoolMode, slot_s: float) -> int:
    """Slots that a mode takes."""
    return max(1, math.ceil(_room(mode) / slot_s - 1e-9))


def scheduled(
    options: Sequence[PoolOption],
    jobs: Sequence[JobTerms],
    gpus: int,
    *,
    slots: int = SLOTS,
    limit_s: float = LIMIT_S,
) -> PoolPlan | None:
    """The best schedule of all jobs on a pool; None where a job fits on no part of it.

    Where `limit_s` ends the solver, it is the best that was met.

    Raises:
        RlhfsimError: the solver did not end.
    """
    fitting = [o for o in options if o.gpus <= gpus]
    if {o.job for o in fitting} != {j.name for j in jobs}:
        return None
    known, terms = modes(fitting), {j.name: j for j in jobs}
    horizon = horizon_of(known, jobs)
    slot = horizon / slots
    columns = [(m, s) for m in known for s in range(slots - length_of(m, slot) + 1)]
    values = np.array([worth(m, s * slot, terms, horizon, gpus) for m, s in columns])
    picked, gap = _solved(columns, values, [j.name for j in jobs], gpus, slots, slot, limit_s)
    starts = [ScheduledMode(mode=columns[i][0], start_s=columns[i][1] * slot) for i in picked]
    starts.sort(key=lambda one: one.start_s)
    return _replayed(starts, terms, gpus, float(values[picked].sum()), gap)


def _solved(
    columns: Sequence[tuple[PoolMode, int]],
    values: NDArray[np.float64],
    jobs: Sequence[str],
    gpus: int,
    slots: int,
    slot_s: float,
    limit_s: float,
) -> tuple[list[int], float]:
    """Columns of the best schedule, and the gap of its value."""
    table = sparse.lil_array((len(jobs) + slots, len(columns)))
    for i, (mode, start) in enumerate(columns):
        for name in mode.jobs:
            table[jobs.index(name), i] = 1
        for slot in range(start, start + length_of(mode, slot_s)):
            table[len(jobs) + slot, i] = mode.gpus
    low = np.concatenate([np.ones(len(jobs)), np.full(slots, -np.inf)])
    high = np.concatenate([np.ones(len(jobs)), np.full(slots, float(gpus))])
    found = milp(
        -values,
        integrality=np.ones(len(columns)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(table.tocsr(), low, high),
        options={"time_limit": limit_s, "mip_rel_gap": 1e-6},
    )
    if found.x is None:
        help_text = "fewer jobs, or a longer --time-limit"
        raise RlhfsimError("solver-ended", f"the pool was not scheduled: {found.message}", help=help_text)
    picked = np.flatnonzero(np.asarray(found.x) > 0.5)
    return picked.tolist(), float(found.mip_gap or 0.0)


# --- the replay ---------------------------------------------------------------------------------------


def _replayed(
    starts: Sequence[ScheduledMode], jobs: Mapping[str, JobTerms], gpus: int, value: float, gap: float
) -> PoolPlan:
    """Jobs in the order of their starts, each as soon as its GPUs are free, in every draw."""
    draws = len(starts[0].mode.whole_s)
    chosen = np.linspace(0, draws - 1, min(REPLAYED, draws)).astype(int)
    ends = {job: np.empty(len(chosen)) for s in starts for job in s.mode.jobs}
    begins = {job: np.empty(len(chosen)) for job in ends}
    for row, i in enumerate(chosen):
        free = np.zeros(gpus)  # when each GPU is free
        begun = 0.0
        for one in starts:
            free.sort()
            begun = max(begun, float(free[one.mode.gpus - 1]))
            free[: one.mode.gpus] = begun + float(one.mode.whole_s[i])
            for job, end in zip(one.mode.jobs, one.mode.ends_s, strict=True):
                begins[job][row], ends[job][row] = begun, begun + float(end[i])
    fits = {o.job: o.fits for s in starts for o in s.mode.options}
    return PoolPlan(
        modes=tuple(starts),
        in_time={job: fits[job] * float(np.mean(e <= jobs[job].deadline_s)) for job, e in ends.items()},
        begins_s={job: float(np.median(b)) for job, b in begins.items()},
        ends_s={job: quantiles(e) for job, e in ends.items()},
        makespan_s=float(np.median(np.maximum.reduce(list(ends.values())))),
        value=value,
        gap=gap,
    )
