"""The verbs of the command line as typed functions: `estimate`, `design`, `sync_paths`, `validate`."""

from __future__ import annotations

from pathlib import Path

from rlhfsim.errors import RlhfsimError
from rlhfsim.phases.iteration import iteration
from rlhfsim.phases.ledger import ledger
from rlhfsim.plan import Plan, read_plan
from rlhfsim.search.candidates import Candidate
from rlhfsim.search.design import design
from rlhfsim.search.planning import plan_of
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware import Cluster
from rlhfsim.specs.models import models_of
from rlhfsim.specs.placement import Placement
from rlhfsim.specs.profiles import load_profile, make_pool, profile_hash
from rlhfsim.specs.scenario import check_placement, load_scenario
from rlhfsim.specs.workload import Workload

__all__ = ["design", "estimate", "estimate_file", "estimate_request"]


def estimate(
    placement: Placement, workload: Workload, cluster: Cluster, *, price: float | None = None
) -> Plan:
    """The plan of one given placement: time by phase, memory, money and energy.

    A placement that does not fit is priced all the same; its prediction says so
    (`peak_memory_bytes` above `capacity_bytes`, `probability_out_of_memory`).

    Raises:
        RlhfsimError: a placement that cannot exist (missing seats, TP that does not divide heads, ...).
    """
    models = models_of(workload)
    check_placement(placement, workload, models, cluster)
    memory = ledger(models, placement, workload, cluster)
    kv_tokens = memory.kv_tokens if memory.kv_tokens and memory.kv_tokens > 0 else None
    priced = iteration(models, placement, workload, cluster, kv_tokens=kv_tokens)
    candidate = Candidate(placement=placement, iteration=priced, ledger=memory)
    return plan_of(candidate, workload, models, cluster, price)


def estimate_file(path: str | Path, *, price: float | None = None) -> Plan:
    """The plan of a scenario (YAML file or shipped name) or of a `plan.json`, priced now.

    Raises:
        RlhfsimError: the first thing wrong in the file, with its line.
    """
    if Path(path).suffix == ".json":
        plan = read_plan(Path(path))
        return estimate(plan.placement, plan.workload, cluster_of(plan), price=price)
    scenario = load_scenario(path)
    return estimate(scenario.placement, scenario.workload, scenario.cluster, price=price)


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
