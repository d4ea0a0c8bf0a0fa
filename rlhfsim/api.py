"""The verbs of the command line as typed functions: `estimate`, `design`, `simulate_file`, `whatif`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.export.figures import level
from rlhfsim.export.runs import (
    Simulation,
    SimulationOptions,
    goodput_of,
    noise_of,
    pool_runs,
    randomness,
)
from rlhfsim.phases.iteration import Iteration, Setting, iteration
from rlhfsim.phases.ledger import Ledger, ledger
from rlhfsim.plan import Plan, read_plan
from rlhfsim.search.candidates import Candidate, timed
from rlhfsim.search.design import design
from rlhfsim.search.planning import plan_of
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware import Cluster
from rlhfsim.specs.models import models_of
from rlhfsim.specs.placement import Placement
from rlhfsim.specs.profiles import load_profile, make_pool, profile_hash
from rlhfsim.specs.scenario import check_placement, load_scenario
from rlhfsim.specs.workload import Workload

if TYPE_CHECKING:
    from rlhfsim.scenarios.result import WhatIf
    from rlhfsim.simulation.simulated import Simulated

__all__ = ["design", "estimate", "estimate_file", "estimate_request", "simulate_file", "whatif"]


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
    return _plan(priced, timed(priced.setting, priced.kv_tokens), price)


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
    priced = _priced(*_read(path))
    placement = priced.setting.placement
    ahead = math.ceil(placement.schedule.staleness) + RUN_AHEAD if placement.schedule.staleness else 0  # fmt: skip
    warmup = max(ahead, asked.warmup)
    plan = _plan(priced, priced.iteration, price)
    base = Simulation(estimate=plan, plan=plan, seed=asked.seed, warmup=warmup, randomness=randomness(asked, priced.setting.workload))  # fmt: skip
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
        priced.setting, priced.kv_tokens, steps=asked.steps, warmup=warmup, seed=seed, noise=noise_of(asked),
        record=record, memory="watch" if record else None,
    )  # fmt: skip


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
        means=tuple(run.seconds for run in runs),
        trace=trace,
        pools=pool_runs(priced.setting, trace, base.warmup) if trace else (),
        contention={k: v for k, v in sorted(lost.items(), key=lambda kv: -kv[1]) if v > 0},
        staleness=(sum(s.mean for s in stale) / len(stale), max(s.max for s in stale)) if stale else None,
        queue=level(trace, "queue_samples", base.warmup) if trace and stale else None,
    )  # fmt: skip


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
    from rlhfsim.scenarios.store import Store
    from rlhfsim.scenarios.whatif import whatif as answer
    from rlhfsim.scenarios.workers import local, on_ray

    return answer(
        scenario, settings=settings, only=only, runner=local(jobs) if ray is None else on_ray(ray or None),
        store=None if cache is None else Store(Path(cache)), progress=progress, command=command,
    )  # fmt: skip
