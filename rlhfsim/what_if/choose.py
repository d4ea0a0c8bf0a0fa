"""Which GPUs, how many, trained by what: every combination designed by the what-if engine, on one table.

Kinds of GPU x sizes (whole powers of two of nodes) x training backends. With one framework its trainers and
what it runs compete; with any, every backend competes, each plan says which frameworks run it, and is priced
with the software of the fastest of them. The work is the same everywhere, so that times and money compare;
the front is that of plans that some framework runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.runs import ANY, framework, frameworks
from rlhfsim.plan import Plan
from rlhfsim.search.pareto import undominated
from rlhfsim.search.request import Request
from rlhfsim.search.requirements import Requirement, narrowed
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.placement.backends import BACKENDS, Backend
from rlhfsim.what_if.estimate import estimate
from rlhfsim.what_if.risk.odds import Odds, odds, sure
from rlhfsim.what_if.risk.run import outlook
from rlhfsim.what_if.scenarios.designs import Runner
from rlhfsim.what_if.scenarios.workers import local
from rlhfsim.what_if.sizing import resized, sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOption:
    """One kind and number of GPUs with one training backend."""

    gpu: str
    """Name of the profile."""
    gpus: int
    backend: Backend
    plan: Plan | None = None
    """None: nothing fits."""
    shortage: str | None = None
    odds: Odds | None = None
    run_by: tuple[str, ...] = ()
    """Frameworks that run the plan; with any framework the first is the fastest, whose software is priced."""
    meets: bool = False
    """Whether every target is met with the confidence asked for."""
    on_front: bool = False
    """No other that some framework runs is as fast and as cheap."""

    @property
    def values(self) -> tuple[float, float]:
        """Seconds and USD of a step."""
        assert self.plan is not None
        p = self.plan.prediction
        return p.step_s, math.inf if p.usd_per_step is None else p.usd_per_step


def questions(request: Request, profiles: Sequence[Profile], least: int, most: int) -> Iterator[Request]:
    """The request on every kind and size, by every backend that may train there."""
    name = request.framework or ANY
    trainers = list(BACKENDS) if name == ANY else list(framework(name).trainers)
    for profile in profiles:
        node = profile.node.gpus
        whole = (n for n in sizes(node, most) if n >= least and (n < node or (n // node).bit_count() == 1))
        for sized in (resized(request, profile, gpus) for gpus in whole):
            for backend in trainers:
                try:
                    yield replace(sized, framework=name, backend=backend)
                except RlhfsimError:  # not run on this kind of GPU
                    continue


def choose(
    asked: Sequence[Request],
    requirements: Sequence[Requirement] = (),
    steps: int | None = None,
    *,
    confidence: float,
    runner: Runner | None = None,
    progress: Callable[[], object] | None = None,
) -> tuple[ClusterOption, ...]:
    """Every question answered: those that meet the targets first, then the cheaper; what fits nowhere last.

    `progress` hears of each answer.
    """
    wanted = [narrowed(request, requirements) for request in asked]
    options: list[ClusterOption] = []
    for step in (runner or local())(wanted):
        if step is None:
            continue
        i, designed = step
        option = _option(wanted[i], designed.plan, requirements, steps, confidence)
        options.append(replace(option, shortage=designed.shortage))
        if progress is not None:
            progress()
    run = [x for x in options if x.plan is not None and x.run_by]
    front = {id(run[i]) for i in undominated([x.values for x in run])}
    marked = (replace(x, on_front=id(x) in front) for x in options)
    return tuple(sorted(marked, key=_rank))


def _rank(option: ClusterOption) -> tuple[object, ...]:
    if option.plan is None:
        return 3, option.gpu, option.gpus, option.backend
    seconds, usd = option.values
    last = 2 if not option.run_by else 1 if not option.meets else 0
    return last, usd, seconds, option.backend


def _option(
    request: Request,
    plan: Plan | None,
    requirements: Sequence[Requirement],
    steps: int | None,
    confidence: float,
) -> ClusterOption:
    group = request.cluster.node_group
    option = ClusterOption(gpu=group.profile.name, gpus=group.gpus, backend=request.backend)
    if plan is None:
        return option
    run_by = tuple(_runners(request, plan))
    if request.framework == ANY and run_by:
        priced = _by_framework(request, plan, run_by)
        run_by, plan = tuple(priced), next(iter(priced.values()))
    known = odds(requirements, outlook(plan, request.cluster, steps, usd_per_hour=request.price))
    meets = all(sure(v, confidence) for v in known.verdicts)
    return replace(option, plan=plan, odds=known, run_by=run_by, meets=meets)


def _by_framework(request: Request, plan: Plan, names: Sequence[str]) -> dict[str, Plan]:
    """The plan with the software of each framework that runs it, the fastest first."""
    with_software = {
        name: estimate(
            plan.placement, plan.workload, replace(request.cluster, framework=name), price=request.price
        )
        for name in names
    }
    fastest = sorted(names, key=lambda name: with_software[name].prediction.step_s)
    return {name: replace(with_software[name], choice=plan.choice) for name in fastest}


def _runners(request: Request, plan: Plan) -> Iterator[str]:
    """Frameworks that run the plan as it is."""
    given = (plan.placement, plan.workload, plan.topology)
    for runs in frameworks():
        if plan.placement.backend in runs.trainers and request.framework in (ANY, runs.name):
            lacks = runs.lacks(*given, one_node=plan.replicas_in_one_node, vendors=request.cluster.vendors)
            if next(iter(lacks), None) is None:
                yield runs.name
