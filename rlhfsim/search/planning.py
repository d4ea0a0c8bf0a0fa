"""From a candidate to the plan that is written: GPU map, models, prediction, provenance."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from rlhfsim.phases.prediction import prediction
from rlhfsim.phases.region import widened
from rlhfsim.plan import Plan, PlannedHardware, PlannedModel, RoleGpus, content_hash
from rlhfsim.search.candidates import Candidate
from rlhfsim.specs.hardware import Cluster
from rlhfsim.specs.models import Models
from rlhfsim.specs.placement import Placement
from rlhfsim.specs.profiles import profile_hash
from rlhfsim.specs.workload import Workload


def plan_of(
    candidate: Candidate,
    workload: Workload,
    models: Models,
    cluster: Cluster,
    price: float | None = None,
) -> Plan:
    """The complete plan of a priced candidate; intervals are wider far from where its profile was calibrated."""
    hardware = tuple(
        PlannedHardware(
            profile=p.profile.name,
            profile_hash=profile_hash(p.profile),
            gpus=p.gpus,
            gpus_per_node=p.gpus_per_node,
        )
        for p in cluster.pools
    )
    placement = candidate.placement
    plan = Plan(
        rlhfsim_version=_version(), architecture=placement.architecture, role_placement=placement.role_placement,
        hardware=hardware, oversubscription=cluster.oversubscription, models=_models(workload, models), workload=workload,
        placement=placement, gpu_map=gpu_map(placement, cluster),
        prediction=prediction(candidate.iteration, candidate.ledger, cluster, price=price),
        input_hash=content_hash(workload, placement, [(h.profile_hash, h.gpus, h.gpus_per_node) for h in hardware]),
    )  # fmt: skip
    return widened(plan, [pool.profile for pool in cluster.pools])


def gpu_map(placement: Placement, cluster: Cluster) -> tuple[RoleGpus, ...]:
    """Node and GPU of every rank; ranks fill the pool's nodes in order, TP first.

    Nodes are counted over the whole cluster, pool of hardware after pool of hardware.
    """
    first_node = [sum(p.nodes for p in cluster.pools[:i]) for i in range(len(cluster.pools))]
    found = []
    for name, seat in placement.seats.items():
        pool = placement.pool(seat.pool)
        each = cluster.pools[pool.hardware].gpus_per_node
        ranks = range(pool.start, pool.start + seat.layout.gpus)
        nodes = tuple(first_node[pool.hardware] + r // each for r in ranks)
        found.append(RoleGpus(seat=name, nodes=nodes, gpus=tuple(r % each for r in ranks)))
    return tuple(found)


def _models(workload: Workload, models: Models) -> tuple[PlannedModel, ...]:
    paths = {
        "actor": workload.model,
        "critic": workload.critic,
        "reference": workload.reference,
        "reward": workload.reward.model or "",
    }
    found = []
    for role, path in paths.items():
        spec = getattr(models, role)
        if spec is not None:
            found.append(PlannedModel(
                role=role, name=spec.name, path=workload.model if path == "same" else path,
                params=spec.num_params, active_params=spec.num_active_params, shape_hash=content_hash(spec),
            ))  # fmt: skip
    return tuple(found)


def _version() -> str:
    try:
        return version("rlhfsim")
    except PackageNotFoundError:
        return "unknown"
