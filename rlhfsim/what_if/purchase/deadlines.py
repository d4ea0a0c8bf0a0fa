"""Whether every run of a purchase is done by its deadline: runs that arrive, wait and run, in draws.

Runs of a quarter arrive evenly, from a drawn moment on. On GPUs that are owned or reserved they start in the
order in which they come, as soon as enough are free. A run that would end too late there is rented on demand
where that may be; GPUs that are not there are asked for again every day. A draw has one error of the model
and one growth for all jobs and quarters.

Not known here: a scheduler that lets short runs pass, and arrivals in bursts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Z90
from rlhfsim.simulation.noise import generator
from rlhfsim.units import DAY, HOUR
from rlhfsim.what_if.purchase.document import CostTerms, Supply
from rlhfsim.what_if.purchase.supply import QUARTER_H, JobMix, Purchase, RunOption
from rlhfsim.what_if.risk.odds import quantiles
from rlhfsim.what_if.risk.step import DRAWS, SEED, normals

DAY_H = DAY / HOUR
DRAWN = 100
"""Draws of three years."""


@frozen
class Punctuality:
    """How surely runs are done by their deadlines."""

    all_in_time: float
    """Probability that no run of any job is late."""
    in_time: Mapping[str, float]
    """Job -> share of its runs."""
    rented_usd: tuple[float, float, float]
    """P10, median and P90 of rent by the hour beyond the plan; below 0 where fewer runs come."""


class _Arrival(NamedTuple):
    at_h: float
    job: str
    deadline_h: float
    option: RunOption
    supply: Supply


class _Pool:
    """GPUs of one kind that are there, first come first served."""

    def __init__(self, gpus: Sequence[int]) -> None:
        self.gpus = gpus
        self._running: list[tuple[float, int]] = []
        self._last = 0.0

    def start(self, at: float, gpus: int) -> float:
        """When a run that comes at `at` can start; inf where never."""
        now = max(at, self._last)
        running = sorted(self._running)
        used = sum(g for end, g in running if end > now)
        ends = iter([(end, g) for end, g in running if end > now])
        while True:
            quarter = int(now / QUARTER_H)
            if quarter >= len(self.gpus):
                return math.inf
            if self.gpus[quarter] - used >= gpus:
                return now
            following = next(ends, (math.inf, 0))
            boundary = (quarter + 1) * QUARTER_H
            if following[0] <= boundary:
                now, used = following[0], used - following[1]
            else:
                now = boundary
                ends = iter([following, *ends])

    def run(self, start: float, hours: float, gpus: int) -> None:
        """Take GPUs from `start` on."""
        self._last = start
        while self._running and self._running[0][0] <= start:
            heapq.heappop(self._running)
        heapq.heappush(self._running, (start + hours, gpus))


def punctuality(mix: JobMix, bought: Purchase) -> Punctuality:
    """The runs of three years, drawn `DRAWN` times."""
    random = generator(SEED, "arrivals")
    draws = random.choice(DRAWS, DRAWN, replace=False)
    z = normals("growth")
    total = {j.name: [0, 0] for j in mix.portfolio.jobs}
    perfect, rented = 0, []
    planned = sum(bought.by_item.get(s, 0.0) for s in ("on-demand", "spot"))
    for i in draws:
        late, usd = _drawn_years(_with_growth(mix, float(z[i]) / Z90), bought, int(i), random, total)
        perfect += not late
        rented.append(usd - planned)
    return Punctuality(
        all_in_time=perfect / DRAWN,
        in_time={name: done / max(1, count) for name, (done, count) in total.items()},
        rented_usd=quantiles(np.array(rented)),
    )


def _with_growth(mix: JobMix, part: float) -> JobMix:
    """The growth of all jobs at so many of its ranges above or below its value."""
    moved = {}
    for name, known in mix.terms.known.items():
        if name.startswith("growth of "):
            reach = known.high - known.value if part > 0 else known.value - known.low
            drawn = max(0.0, known.value + part * reach)
            moved[name] = replace(known, value=drawn, low=drawn, high=drawn)
    return replace(mix, terms=CostTerms(known={**mix.terms.known, **moved}))


def _drawn_years(
    mix: JobMix, bought: Purchase, i: int, random: np.random.Generator, total: dict[str, list[int]]
) -> tuple[int, float]:
    """One draw of all runs: how many are late, and USD of rent by the hour."""
    pools = {
        gpu: _Pool([profile.node.gpus * bought.nodes(gpu, q) for q in range(mix.portfolio.quarters)])
        for gpu, profile in mix.profiles.items()
    }
    late, usd = 0, 0.0
    for run in sorted(_arrivals(mix, bought, random), key=lambda a: a.at_h):
        in_time, extra = _served(mix, pools, run, i, random)
        total[run.job][0] += in_time
        total[run.job][1] += 1
        late += not in_time
        usd += extra
    return late, usd


def _arrivals(mix: JobMix, bought: Purchase, random: np.random.Generator) -> list[_Arrival]:
    known = {(o.job, o.gpu, o.gpus): o for o in mix.options}
    found = []
    for q in range(mix.portfolio.quarters):
        counts = mix.runs_in(q)
        for job in mix.portfolio.jobs:
            planned = {(g, n, s): x for (j, g, n, s, p), x in bought.runs.items() if (j, p) == (job.name, q)}
            ways, shares = list(planned), np.cumsum(list(planned.values()))
            count = int(counts[job.name] + random.random())
            offset = random.random()
            for k in range(count):
                gpu, gpus, supply = ways[int(np.searchsorted(shares, (k + 0.5) / count * shares[-1]))]
                at = (q + (k + offset) / count) * QUARTER_H
                found.append(_Arrival(at, job.name, job.deadline / HOUR, known[job.name, gpu, gpus], supply))
    return found


def _served(
    mix: JobMix, pools: Mapping[str, _Pool], run: _Arrival, i: int, random: np.random.Generator
) -> tuple[bool, float]:
    """Whether a run is done in time, and USD of its rent by the hour."""
    portfolio, terms, hours = mix.portfolio, mix.terms, float(run.option.drawn_h[i])
    spot_h = hours / (portfolio.spot_goodput or 1.0)
    if run.supply == "spot" and spot_h <= run.deadline_h:
        return True, run.option.gpus * spot_h * terms[f"{run.option.gpu} spot"]
    if run.supply in ("bought", "reserved"):
        pool = pools[run.option.gpu]
        start = pool.start(run.at_h, run.option.gpus)
        if start + hours <= run.at_h + run.deadline_h:
            pool.run(start, hours, run.option.gpus)
            return True, 0.0
    rentable = [
        o
        for o in mix.options
        if o.job == run.job and f"{o.gpu} on-demand" in terms and "on-demand" in portfolio.supply
    ]
    quick = min(rentable, key=lambda o: float(o.drawn_h[i]), default=None)
    planned = run.option if run.supply == "on-demand" else None
    way = planned or quick
    slack_h = run.deadline_h - float(way.drawn_h[i]) if way else -1.0
    if way is None or slack_h < 0:
        return False, 0.0
    missing = (1 - portfolio.on_demand_available) ** (1 + slack_h // DAY_H)  # asked again every day
    usd = way.gpus * float(way.drawn_h[i]) * terms[f"{way.gpu} on-demand"]
    return random.random() >= missing, usd
