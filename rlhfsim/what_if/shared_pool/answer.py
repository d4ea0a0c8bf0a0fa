"""The jobs of a pool as they are written in their files, priced on every size, and the answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.search.parallel import cores, mapped
from rlhfsim.search.progress import Progress, tell
from rlhfsim.search.request import Limit, Request
from rlhfsim.search.space import roles_of
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.hardware.prices import price_of
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.loading import checked, load
from rlhfsim.specs.model.roles import models_of
from rlhfsim.units import HOUR
from rlhfsim.what_if.risk.odds import quantiles
from rlhfsim.what_if.risk.run import outlook_for
from rlhfsim.what_if.scenarios.designs import Designs
from rlhfsim.what_if.scenarios.document import Above, AskedWork, RunSteps, Switch
from rlhfsim.what_if.shared_pool.pairs import job_step
from rlhfsim.what_if.shared_pool.schedule import (
    LIMIT_S,
    JobTerms,
    PoolMode,
    PoolOption,
    PoolPlan,
    paired,
    scheduled,
)
from rlhfsim.what_if.shared_pool.spot import SpotRollouts, check, plan_pace
from rlhfsim.what_if.sizing import doubled, floor_seconds, resized

LEAST, MOST = 2, 16
"""Jobs of a pool."""
SAVED = 0.1
"""Share of a step that twice the GPUs must save for a job that is in time without them."""
LEAST_LIMIT_S = 0.2
"""Shortest time limit of a design."""


@checked
@frozen
class PoolJobText:
    """One job's file."""

    name: str = ""
    """Default: the name of the file."""
    workload: AskedWork
    steps: RunSteps
    deadline: Above
    """From now until the run is done."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """How much its deadline counts against those of the others."""
    allow: frozenset[Switch] = frozenset()
    """What may compete beyond what keeps the learning as it is: `search.request.SWITCHES`."""
    spot: SpotRollouts | None = None
    """Instances next to the pool that its rollout may have; plans without them compete too."""


@frozen
class PoolAnswer:
    """Jobs on a pool: the schedule, and who may share GPUs with whom."""

    jobs: tuple[PoolJobText, ...]
    profile: Profile
    gpus: int
    plan: PoolPlan | None
    """None where a job fits on no part of the pool."""
    options: tuple[PoolOption, ...]
    pairs: tuple[PoolMode, ...]
    """Every two jobs on the largest size that both have."""
    confidence: float

    @property
    def meets(self) -> bool:
        """Whether every deadline is kept as surely as was asked."""
        return self.plan is not None and min(self.plan.in_time.values()) >= self.confidence

    @property
    def unfit(self) -> list[str]:
        """Jobs that fit on no part of the pool."""
        return [j.name for j in self.jobs if j.name not in {o.job for o in self.options}]

    @property
    def goodput(self) -> float:
        """Share of the pool's GPU time, until the last job ends, in which GPUs work on steps."""
        assert self.plan is not None
        steps = {j.name: j.steps for j in self.jobs}
        options = [o for m in self.plan.modes for o in m.mode.options]
        worked = sum(o.gpus * o.worked_s * steps[o.job] for o in options)
        return worked / (self.gpus * self.plan.makespan_s)

    @property
    def usd(self) -> float | None:
        """Rent of the whole pool until the last job ends, and of spot instances; None without a price."""
        price = self.profile.price
        if price is None or self.plan is None:
            return None
        rented = [o for m in self.plan.modes for o in m.mode.options]
        return self.gpus * price.value * self.plan.makespan_s / HOUR + sum(map(self.spot_usd, rented))

    def spot_usd(self, option: PoolOption) -> float:
        """Rent of the spot instances of a job while it runs, those that are away left out."""
        if option.spot is None or option.spot_price is None:
            return 0.0
        return option.spot.spot.paid_gpus * option.spot_price * quantiles(option.drawn_s)[1] / HOUR

    def usd_of(self, option: PoolOption) -> float | None:
        """Rent of a job's GPUs while it runs alone, spot instances among them."""
        price = self.profile.price
        if price is None:
            return None
        return option.gpus * price.value * quantiles(option.drawn_s)[1] / HOUR + self.spot_usd(option)


def read_jobs(paths: Sequence[Path]) -> tuple[PoolJobText, ...]:
    """The jobs of the files.

    Raises:
        RlhfsimError: the first thing wrong in one, too few or too many, or one name twice.
    """
    if not LEAST <= len(paths) <= MOST:
        raise RlhfsimError(
            "number-of-jobs",
            f"a pool has {LEAST} to {MOST} jobs, {len(paths)} are given",
            help="as in rlhfsim pool jobs/*.yaml --gpus 256",
        )
    found = [load(PoolJobText, path) for path in paths]
    found = [
        job if job.name else replace(job, name=path.stem) for job, path in zip(found, paths, strict=True)
    ]
    names = [job.name for job in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RlhfsimError("name-twice", f"two jobs are named {twice!r}", help="give each its own name")
    return tuple(found)


def priced_options(
    jobs: Sequence[PoolJobText],
    profile: Profile,
    gpus: int,
    designs: Designs,
    confidence: float,
    limit_s: float | None = None,
) -> tuple[PoolOption, ...]:
    """Every job on the parts of the pool that matter to it, jobs side by side on the cores.

    Parts are nodes in powers of two, smaller ones too where a job generates on rented instances. One is left
    out where the arithmetic of the run alone takes longer than its deadline, unless that leaves none; larger
    ones are, once twice the GPUs saved less than `SAVED` and the job is in time without them. Jobs of one
    workload share their designs. `limit_s`: of all designs.
    """
    node = profile.node.gpus
    some_gpus = doubled(node, gpus)
    counts = [n for n in some_gpus if n >= min(node, gpus)]
    alike: dict[tuple[object, ...], list[PoolJobText]] = {}
    for job in jobs:
        alike.setdefault((job.workload, job.allow, job.spot), []).append(job)
        if job.spot is not None:
            check(job.spot, node, job.name)
    spots = sum(some[0].spot is not None for some in alike.values())
    asked_for = len(alike) * len(counts) + spots * len(some_gpus)
    each_s = limit_s and max(LEAST_LIMIT_S, limit_s * cores() / asked_for)

    def priced(some: list[PoolJobText]) -> list[PoolOption]:
        one = some[0]
        asked = Request(
            cluster=Cluster(node_groups=(node_group(profile, 1),)),
            workload=one.workload,
            allow=one.allow,
            time_limit=each_s,
        )
        parts = [resized(asked, profile, n) for n in counts]
        alone = _of_one_workload(some, parts, designs, confidence)
        if one.spot is None or not one.workload.generates:
            return alone
        rented = [_with_spot(resized(asked, profile, n), profile, one.spot) for n in some_gpus]
        return alone + _of_one_workload(some, rented, designs, confidence)

    def told(done: int) -> None:
        tell(Progress("designing jobs", done, len(alike), "workloads"))

    found = mapped(priced, list(alike.values()), told)
    return tuple(option for options in found for option in options)


def _with_spot(request: Request, profile: Profile, spot: SpotRollouts) -> Request:
    """The question with a rollout that fills the instances, all of them there."""
    gpus = spot.instances * spot.gpus
    rented = node_group(profile, gpus, gpus_per_node=spot.gpus)
    cluster = replace(request.cluster, node_groups=(*request.cluster.node_groups, rented))
    fills = Limit(role="rollout", field="gpus", relation="=", value=gpus)
    lie = [
        Limit(role=role, field="hardware", relation="=", value=int(role == "rollout"))
        for role in roles_of(request, models_of(request.workload))
    ]
    return replace(request, cluster=cluster, limits=(*request.limits, fills, *lie))


def _of_one_workload(
    jobs: Sequence[PoolJobText], requests: Sequence[Request], designs: Designs, confidence: float
) -> list[PoolOption]:
    """Jobs that differ in steps and deadline alone, on parts of the pool that ascend."""
    needed = min(job.steps / job.deadline for job in jobs)
    models = models_of(jobs[0].workload)
    late = [r for r in requests if floor_seconds(r, models) * needed > 1]
    timely = [r for r in requests if r not in late]
    return [*_widened(jobs, timely, designs, confidence)] or [*_widened(jobs, late, designs, confidence)]


def _widened(
    jobs: Sequence[PoolJobText], requests: Sequence[Request], designs: Designs, confidence: float
) -> Iterator[PoolOption]:
    """More GPUs as long as they save enough, or a job is late."""
    before = math.inf
    for request in requests:
        designed = designs.of(request)
        if designed.plan is None:
            continue
        made = [_option(job, request, designed.plan, designed.gap) for job in jobs]
        options = [o for o in made if o is not None]
        yield from options
        if len(options) < len(jobs):
            continue
        step_s = designed.plan.prediction.step_s
        kept = all(o.in_time(job.deadline) >= confidence for o, job in zip(options, jobs, strict=True))
        if kept and step_s > before * (1 - SAVED):
            return
        before = step_s


def _option(job: PoolJobText, request: Request, plan: Plan, gap: float) -> PoolOption | None:
    """The job on its part of the pool; None where its rollout cannot live on the instances that it rents."""
    look = outlook_for(request, plan, job.steps)
    shape = job_step(plan, request.cluster)
    alone = PoolOption(
        job=job.name,
        gpus=request.cluster.node_groups[0].gpus,
        step_s=plan.prediction.step_s,
        fits=look.fits,
        drawn_s=look.run_s,
        shape=shape,
        plan=plan,
        gap=gap,
    )
    if len(request.cluster.node_groups) == 1:
        return alone
    assert job.spot is not None
    spot = plan_pace(plan, request.cluster, job.spot)
    if spot is None:
        return None
    own = [b for p, b in zip(plan.placement.pools, shape.busy_s, strict=True) if p.hardware == 0]
    return replace(
        alone,
        step_s=spot.slower * alone.step_s,
        drawn_s=spot.slowed(look.run_s, job.steps, job.name),
        shape=None,
        worked=max(own),
        spot=spot,
        spot_price=_spot_price(request.cluster.node_groups[0].profile),
    )


def _spot_price(profile: Profile) -> float | None:
    """USD per GPU-hour of the spot market, else what the pool pays."""
    price = price_of(profile.name, "spot") or profile.price
    return None if price is None else price.value


def answered(
    jobs: Sequence[PoolJobText],
    profile: Profile,
    gpus: int,
    options: Sequence[PoolOption],
    confidence: float,
    limit_s: float = LIMIT_S,
) -> PoolAnswer:
    """The schedule of jobs whose runs are priced; `limit_s`: of the solver."""
    terms = [JobTerms(name=j.name, deadline_s=j.deadline, weight=j.weight) for j in jobs]
    largest: dict[tuple[str, ...], PoolMode] = {}
    for pair in sorted(paired(options), key=lambda m: m.gpus):
        largest[tuple(sorted(pair.jobs))] = pair
    return PoolAnswer(
        jobs=tuple(jobs),
        profile=profile,
        gpus=gpus,
        plan=scheduled(options, terms, gpus, limit_s=limit_s),
        options=tuple(options),
        pairs=tuple(largest.values()),
        confidence=confidence,
    )
