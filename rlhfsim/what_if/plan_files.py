"""Scenarios and plan files, priced with the profiles of today."""

from __future__ import annotations

from pathlib import Path

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.plan import Plan, read_plan
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.prices import at_price
from rlhfsim.specs.hardware.profiles import load_profile, node_group, profile_hash
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.scenario import load_scenario
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.estimate import estimate
from rlhfsim.what_if.verdict import check_plan


def estimate_file(path: str | Path, *, price: float | None = None) -> Plan:
    """The plan of a scenario (YAML file or shipped name) or of a `plan.json`, priced now.

    Raises:
        RlhfsimError: the first thing wrong in the file, with its line; or its framework does not run it.
    """
    placement, workload, cluster = placed(path)
    return run_by_its_own(estimate(placement, workload, cluster, price=price), cluster, path)


def run_by_its_own(plan: Plan, cluster: Cluster, path: str | Path) -> Plan:
    """The plan of a file, unless its framework does not run it."""
    try:
        check_plan(plan, cluster)
    except RlhfsimError as error:
        raise error.at(Place(file=str(path))) from error
    return plan


def placed(path: str | Path) -> tuple[Placement, Workload, Cluster]:
    """What a scenario, a shipped system or a `plan.json` places, and where."""
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
            at_price(load_profile(h.profile), h.price),
            h.gpus,
            gpus_per_node=h.gpus_per_node,
            fabric=h.fabric,
            wan=h.wan,
        )
        for h in plan.hardware
    )
    return Cluster(node_groups=pools, oversubscription=plan.oversubscription, framework=plan.framework)


def stale_profiles(plan: Plan) -> tuple[str, ...]:
    """Profiles whose content differs from the one the plan was made with."""
    return tuple(h.profile for h in plan.hardware if profile_hash(load_profile(h.profile)) != h.profile_hash)
