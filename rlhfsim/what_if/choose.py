"""Which GPUs, how many, run by what: every combination designed by the what-if engine, on one table.

Kinds of GPU x sizes (whole powers of two of nodes) x frameworks x their training backends. Each is searched
on its own, among the plans that this framework runs, with the costs of its software: one search with pooled
costs, whose plan is priced again with each framework's, ends 7 to 12 % above the best of them (8B on 8 and 16
H100 or A100). The work is the same everywhere, so that times and money compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.search.pareto import undominated
from rlhfsim.search.request import Request
from rlhfsim.search.requirements import narrowed
from rlhfsim.specs.frameworks.runs import ANY, Lacks, Runs, framework, frameworks
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.step.measured import compared, model_error
from rlhfsim.what_if.risk.odds import Odds, Targets
from rlhfsim.what_if.scenarios.designs import DesignResult, Runner
from rlhfsim.what_if.sizing import doubled, resized


@frozen
class ClusterOption:
    """One kind and number of GPUs with one framework and its training backend."""

    gpu: str
    """Name of the profile."""
    gpus: int
    framework: str
    backend: Backend
    plan: Plan | None = None
    """The best that the framework runs; None: nothing fits."""
    shortage: str | None = None
    odds: Odds | None = None
    meets: bool = False
    """Whether it fits and meets all targets in one with the confidence asked for."""
    on_front: bool = False
    """No other is as fast and as cheap."""

    @property
    def cluster(self) -> tuple[str, int]:
        """Kind and number of GPUs."""
        return self.gpu, self.gpus

    @property
    def compared(self) -> bool:
        """Whether any published run of the framework was compared with a prediction."""
        return bool(compared(self.framework))

    @property
    def values(self) -> tuple[float, float]:
        """Seconds and USD of a step."""
        assert self.plan is not None
        p = self.plan.prediction
        return p.step_s, math.inf if p.usd_per_step is None else p.usd_per_step


def questions(request: Request, profiles: Sequence[Profile], least: int, most: int) -> Iterator[Request]:
    """The request on every kind and size, by every framework and backend that may run it there."""
    for profile in profiles:
        whole = (n for n in doubled(profile.node.gpus, most) if n >= least)
        for sized in (resized(request, profile, gpus) for gpus in whole):
            for runs in _named(request):
                for backend in runs.trainers:
                    if _lacks(sized, runs, backend) is None:
                        yield replace(sized, framework=runs.name, backend=backend, backend_by="option")


def not_run(request: Request, profiles: Sequence[Profile]) -> Iterator[str]:
    """What keeps a framework from every kind of GPU, a sentence each."""
    for runs in _named(request):
        asked = [(resized(request, p, 1), b) for p in profiles for b in runs.trainers]
        lacking = [_lacks(sized, runs, backend) for sized, backend in asked]
        if all(lacking) and lacking[0]:
            yield f"{runs.title} does not run {lacking[0].what}"


def _named(request: Request) -> tuple[Runs, ...]:
    """The frameworks that are asked for."""
    name = request.framework or ANY
    return frameworks() if name == ANY else (framework(name),)


def _lacks(request: Request, runs: Runs, backend: Backend) -> Lacks | None:
    """What of GPUs, work or model a framework does not run, whatever the plan."""
    return (
        runs.lacks_hardware(request.cluster.vendors)
        or runs.lacks_workload(request.workload, backend)
        or runs.lacks_kinds(models_of(request.workload).actor, backend, generates=request.workload.generates)
    )


def choose(
    asked: Sequence[Request],
    targets: Targets,
    runner: Runner,
    *,
    progress: Callable[[], object] | None = None,
) -> tuple[ClusterOption, ...]:
    """Every question answered: those that meet the targets first, then the cheaper; what fits nowhere last.

    A framework none of whose runs was ever compared leads only by more than the model's error.
    `progress` hears of each answer.
    """
    wanted = [narrowed(request, targets.requirements) for request in asked]
    options: list[ClusterOption] = []
    for step in runner(wanted):
        if step is not None:
            options.append(_option(wanted[step[0]], step[1], targets))
            if progress is not None:
                progress()
    ranked = sorted(options, key=_rank)
    fitting = [x for x in ranked if x.plan is not None]
    front = {id(fitting[i]) for i in undominated([x.values for x in fitting])}
    return tuple(replace(x, on_front=id(x) in front) for x in ranked)


def _rank(option: ClusterOption) -> tuple[object, ...]:
    if option.plan is None:
        return 2, option.gpu, option.gpus, option.framework, option.backend
    seconds, usd = option.values
    doubt = 1.0 if option.compared else 1 + model_error()
    return int(not option.meets), usd * doubt, seconds * doubt, option.framework, option.backend


def _option(request: Request, designed: DesignResult, targets: Targets) -> ClusterOption:
    group, plan = request.cluster.node_group, designed.plan
    assert request.framework is not None
    known = None if plan is None else targets.odds(request, plan)
    return ClusterOption(
        gpu=group.profile.name,
        gpus=group.gpus,
        framework=request.framework,
        backend=request.backend,
        plan=plan,
        shortage=designed.shortage,
        odds=known,
        meets=known is not None and known.meets,
    )
