"""The verbs of the command line as typed functions: `estimate`, `design`, `simulate_file`, `whatif`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.plan import Plan, read_plan
from rlhfsim.simulation.summary import Simulation, SimulationOptions
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.prices import at_price
from rlhfsim.specs.hardware.profiles import load_profile, node_group, profile_hash
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.scenario import load_scenario
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.design import design
from rlhfsim.what_if.estimate import estimate, planned, priced_placement, simulated
from rlhfsim.what_if.verdict import check_plan

if TYPE_CHECKING:
    from rlhfsim.what_if.scenarios.result import WhatIf

__all__ = ["design", "estimate", "estimate_file", "simulate_file", "whatif"]


def estimate_file(path: str | Path, *, price: float | None = None) -> Plan:
    """The plan of a scenario (YAML file or shipped name) or of a `plan.json`, priced now.

    Raises:
        RlhfsimError: the first thing wrong in the file, with its line; or its framework does not run it.
    """
    placement, workload, cluster = _read(path)
    return _run_by_its_own(estimate(placement, workload, cluster, price=price), cluster, path)


def _run_by_its_own(plan: Plan, cluster: Cluster, path: str | Path) -> Plan:
    """The plan of a file, unless its framework does not run it."""
    try:
        check_plan(plan, cluster)
    except RlhfsimError as error:
        raise error.at(Place(file=str(path))) from error
    return plan


def _read(path: str | Path) -> tuple[Placement, Workload, Cluster]:
    if Path(path).suffix == ".json":
        plan = read_plan(Path(path))
        return plan.placement, plan.workload, cluster_of(plan)
    scenario = load_scenario(path)
    return scenario.placement, scenario.workload, scenario.cluster


def cluster_of(plan: Plan) -> Cluster:
    """The cluster of a plan, from the profiles as they are now, at the prices of the plan.

    Raises:
        RlhfsimError: a profile is unknown here.
    """
    pools = tuple(
        node_group(
            at_price(load_profile(h.profile), h.price), h.gpus, gpus_per_node=h.gpus_per_node, fabric=h.fabric
        )
        for h in plan.hardware
    )
    return Cluster(node_groups=pools, oversubscription=plan.oversubscription, framework=plan.framework)


def stale_profiles(plan: Plan) -> tuple[str, ...]:
    """Profiles whose content differs from the one the plan was made with."""
    return tuple(h.profile for h in plan.hardware if profile_hash(load_profile(h.profile)) != h.profile_hash)


def simulate_file(
    path: str | Path,
    options: SimulationOptions | None = None,
    *,
    price: float | None = None,
    progress: Callable[[], object] | None = None,
) -> Simulation:
    """A scenario, a shipped system or a `plan.json`, run step by step; `progress` after every replication.

    Raises:
        RlhfsimError: as `estimate_file`.
    """
    priced = priced_placement(*_read(path))
    _run_by_its_own(planned(priced, priced.iteration, price), priced.setting.cluster, path)
    answer = simulated(priced, options or SimulationOptions(), price=price, progress=progress)
    run = read_plan(Path(path)).run if Path(path).suffix == ".json" else None
    return replace(answer, plan=replace(answer.plan, run=run.question)) if run else answer


def whatif(
    scenario: str | Path | Mapping[str, Any],
    *,
    settings: Mapping[str, Any] | None = None,
    only: Sequence[str] = (),
    require: Sequence[str] = (),
    jobs: int | None = None,
    ray: str | None = None,
    cache: str | Path | None = None,
    progress: Callable[[int, int], object] | None = None,
    most_s: float | None = None,
    command: str = "",
    tables: Sequence[str | Path] = (),
) -> WhatIf:
    """A scenario (YAML file, shipped name or mapping; docs/whatif.md), every point designed anew.

    `settings` patches the base by dotted paths; `only` keeps points by name; `require` are targets
    ("step_time<90s"), whose probability every point then has; `jobs` searches run at the same time (default:
    one for each core), or on the Ray cluster at `ray` ("" starts one here); designs are kept in the folder
    `cache` (None: nowhere); `progress` hears how many are done, and of how many; `most_s`
    seconds may all searches together take (None: any time). More than 2,000 points are written to `tables`
    (.csv, .parquet) as they come; the answer has the best of them.

    Raises:
        RlhfsimError: the first thing wrong in the scenario, with its line, before anything is searched.
    """
    from rlhfsim.search.requirements import requirement
    from rlhfsim.what_if.scenarios.answer import whatif as answer
    from rlhfsim.what_if.scenarios.designs import Store
    from rlhfsim.what_if.scenarios.workers import local, on_ray

    with nullcontext(local(jobs)) if ray is None else on_ray(ray or None) as runner:
        return answer(
            scenario,
            settings=settings,
            only=only,
            requirements=[requirement(text) for text in require],
            runner=runner,
            store=None if cache is None else Store(Path(cache)),
            progress=progress,
            most_s=most_s,
            command=command,
            tables=tuple(map(Path, tables)),
        )
