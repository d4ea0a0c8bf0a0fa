"""The verbs of the command line as typed functions: `estimate`, `design`, `simulate_file`, `whatif`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan, read_plan
from rlhfsim.search.request import Request
from rlhfsim.simulation.pool_figures import level
from rlhfsim.simulation.summary import (
    Simulation,
    SimulationOptions,
    goodput_of,
    noise_of,
    pool_runs,
    randomness,
)
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import load_profile, node_group, profile_hash
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.scenario import load_scenario
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.design import design
from rlhfsim.what_if.estimate import PricedPlacement, estimate, planned, priced_placement

if TYPE_CHECKING:
    from rlhfsim.simulation.result import Simulated
    from rlhfsim.what_if.scenarios.result import WhatIf

__all__ = ["design", "estimate", "estimate_file", "estimate_request", "simulate_file", "whatif"]


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
            "nothing-fits", "no plan with these choices fits", help=found.remedy or "free some of the choices"
        )
    return found.chosen


def cluster_of(plan: Plan) -> Cluster:
    """The cluster of a plan, from the profiles as they are now.

    Raises:
        RlhfsimError: a profile is unknown here.
    """
    pools = tuple(node_group(h.profile, h.gpus, gpus_per_node=h.gpus_per_node) for h in plan.hardware)
    return Cluster(node_groups=pools, oversubscription=plan.oversubscription)


def stale_profiles(plan: Plan) -> tuple[str, ...]:
    """Profiles whose content differs from the one the plan was made with."""
    return tuple(h.profile for h in plan.hardware if profile_hash(load_profile(h.profile)) != h.profile_hash)


# --- simulation -------------------------------------------------------------------------------------

RUN_AHEAD = 2
"""Steps beyond the staleness bound after which an asynchronous run is steady."""


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
    priced = priced_placement(*_read(path))
    placement = priced.setting.placement
    ahead = math.ceil(placement.schedule.staleness) + RUN_AHEAD if placement.schedule.staleness else 0
    warmup = max(ahead, asked.warmup)
    plan = planned(priced, priced.iteration, price)
    base = Simulation(
        estimate=plan,
        plan=plan,
        seed=asked.seed,
        warmup=warmup,
        randomness=randomness(asked, priced.setting.workload),
    )
    reason = _rejection(priced)
    if reason is not None:
        return replace(base, rejected_by=reason)
    base = replace(base, goodput=goodput_of(priced.setting, asked))
    runs = []
    for i in range(asked.replications):
        runs.append(_run(priced, asked, warmup, asked.seed + i, record=i == 0))
        if progress is not None:
            progress()
    return _told(base, priced, runs, asked, price)


def _rejection(priced: PricedPlacement) -> str | None:
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


def _run(
    priced: PricedPlacement, asked: SimulationOptions, warmup: int, seed: int, *, record: bool
) -> Simulated:
    from rlhfsim.simulation.run import simulate

    return simulate(
        priced.setting,
        priced.kv_tokens,
        steps=asked.steps,
        warmup=warmup,
        seed=seed,
        noise=noise_of(asked),
        record=record,
        memory="watch" if record else None,
    )


def _told(
    base: Simulation,
    priced: PricedPlacement,
    runs: Sequence[Simulated],
    asked: SimulationOptions,
    price: float | None,
) -> Simulation:
    first = runs[0]
    trace = replace(first.trace, plan_hash=base.plan.input_hash) if first.trace else None
    lost: dict[str, float] = {}
    for run in runs:
        for link, seconds in run.lost.items():
            lost[link] = lost.get(link, 0.0) + seconds / (asked.steps + base.warmup) / len(runs)
    stale = [run.staleness for run in runs if run.staleness]
    return replace(
        base,
        plan=planned(priced, first.iteration, price),
        runs=tuple(run.step_seconds for run in runs),
        means=tuple(run.seconds for run in runs),
        trace=trace,
        pools=pool_runs(priced.setting, trace, base.warmup) if trace else (),
        contention={k: v for k, v in sorted(lost.items(), key=lambda kv: -kv[1]) if v > 0},
        staleness=(sum(s.mean for s in stale) / len(stale), max(s.max for s in stale)) if stale else None,
        queue=level(trace, "queue_samples", base.warmup) if trace and stale else None,
    )


# --- what if ----------------------------------------------------------------------------------------


def whatif(
    scenario: str | Path | Mapping[str, Any],
    *,
    settings: Mapping[str, Any] | None = None,
    only: Sequence[str] = (),
    jobs: int | None = None,
    ray: str | None = None,
    cache: str | Path | None = None,
    progress: Callable[[int, int], object] | None = None,
    command: str = "",
) -> WhatIf:
    """A scenario (YAML file, shipped name or mapping; docs/whatif.md), every point designed anew.

    `settings` patches the base by dotted paths; `only` keeps points by name; `jobs` searches run at the
    same time (default: one for each core), or on the Ray cluster at `ray` ("" starts one here); designs
    are kept in the folder `cache` (None: nowhere); `progress` hears how many are done, and of how many.

    Raises:
        RlhfsimError: the first thing wrong in the scenario, with its line, before anything is searched.
    """
    from rlhfsim.what_if.scenarios.answer import whatif as answer
    from rlhfsim.what_if.scenarios.designs import Store
    from rlhfsim.what_if.scenarios.workers import local, on_ray

    return answer(
        scenario,
        settings=settings,
        only=only,
        runner=local(jobs) if ray is None else on_ray(ray or None),
        store=None if cache is None else Store(Path(cache)),
        progress=progress,
        command=command,
    )
