"""From a candidate to the plan that is written: GPU map, models, prediction, how it was chosen."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from rlhfsim.choice import AskedBound, AskedLimit, RunnerUp, Searched
from rlhfsim.plan import Plan, PlannedHardware, PlannedModel, RoleGpus
from rlhfsim.provenance import content_hash, installed_version
from rlhfsim.search.candidates import Candidate
from rlhfsim.search.certificate import Certificate
from rlhfsim.search.explain import kind, shares
from rlhfsim.search.request import Limit, Request
from rlhfsim.specs.hardware.hardware import Cluster, NodeGroup, Price
from rlhfsim.specs.hardware.prices import GIVEN, market_of
from rlhfsim.specs.hardware.prices import given as given_price
from rlhfsim.specs.hardware.profiles import profile_hash
from rlhfsim.specs.model.roles import Models, models_of
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.roles import BY_NAME
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.calls import CallSetting
from rlhfsim.step.prediction import prediction
from rlhfsim.step.region import widened
from rlhfsim.step.speed_of_light import limits


def plan_of(
    candidate: Candidate, workload: Workload, models: Models, cluster: Cluster, price: float | None = None
) -> Plan:
    """The complete plan of a priced candidate; intervals widen away from where its profile was calibrated."""
    hardware = tuple(_hardware(group, price) for group in cluster.node_groups)
    placement = candidate.placement
    setting = CallSetting(models=models, placement=placement, workload=workload, cluster=cluster)
    priced = prediction(
        candidate.iteration,
        candidate.ledger,
        cluster,
        price=price,
        limits=limits(setting, candidate.iteration.generation),
    )
    plan = Plan(
        rlhfsim_version=installed_version("rlhfsim"),
        architecture=placement.architecture,
        role_placement=placement.role_placement,
        hardware=hardware,
        oversubscription=cluster.oversubscription,
        framework=cluster.framework,
        models=_models(workload, models),
        workload=workload,
        placement=placement,
        gpu_map=gpu_map(placement, cluster),
        prediction=priced,
        input_hash=content_hash(
            workload,
            placement,
            [
                (h.profile_hash, h.gpus, h.gpus_per_node, *filter(None, [h.fabric, h.wan and asdict(h.wan)]))
                for h in hardware
            ],
        ),
    )
    return widened(plan, [pool.profile for pool in cluster.node_groups])


def plan_for(request: Request, candidate: Candidate) -> Plan:
    """The complete plan of a candidate of a question."""
    work = request.workload
    return plan_of(candidate, work, models_of(work), request.cluster, request.price)


def _hardware(group: NodeGroup, price: float | None) -> PlannedHardware:
    """Equal nodes as a plan has them; `price`: of a GPU-hour, where it was given."""
    rent = group.profile.price if price is None else Price(**given_price(price))
    return PlannedHardware(
        profile=group.profile.name,
        profile_hash=profile_hash(group.profile),
        gpus=group.gpus,
        gpus_per_node=group.gpus_per_node,
        fabric=group.fabric,
        wan=group.wan,
        price=rent,
        market=market_of(group.profile.name, rent),
    )


def gpu_map(placement: Placement, cluster: Cluster) -> tuple[RoleGpus, ...]:
    """Node and GPU of every rank; ranks fill the pool's nodes in order, TP first.

    Nodes are counted over the whole cluster, pool of hardware after pool of hardware.
    """
    first_node = [sum(p.nodes for p in cluster.node_groups[:i]) for i in range(len(cluster.node_groups))]
    ranks_of = []
    for name, role in placement.roles.items():
        pool = placement.pool(role.pool)
        each = cluster.node_groups[pool.hardware].gpus_per_node
        ranks = range(pool.start, pool.start + role.layout.gpus)
        nodes = tuple(first_node[pool.hardware] + r // each for r in ranks)
        ranks_of.append(RoleGpus(role=name, nodes=nodes, gpus=tuple(r % each for r in ranks)))
    return tuple(ranks_of)


def _models(workload: Workload, models: Models) -> tuple[PlannedModel, ...]:
    paths = {role: BY_NAME[role].model(workload) or "" for role in models.roles}
    return tuple(
        PlannedModel(
            role=role,
            name=", ".join(model.name for model in spec.each),
            path=workload.model if paths[role] == "same" else paths[role],
            params=sum(model.num_params for model in spec.each),
            active_params=sum(model.num_active_params for model in spec.each) // len(spec.each),
            shape_hash=content_hash(spec),
        )
        for role, spec in models.roles.items()
    )


# --- how it was chosen ------------------------------------------------------------------------------


def asked(request: Request) -> AskedBound:
    """What may compete in a request; cluster and workload are in the plan itself."""
    given: dict[str, Any] = {f.name: getattr(request, f.name) for f in fields(AskedBound)}
    given |= {
        "allow": tuple(sorted(request.allow)),
        "forbid": tuple(sorted(request.forbid)),
        "fix": {role: dict(values) for role, values in request.fix.items()},
        "limits": tuple(AskedLimit(**asdict(limit)) for limit in request.limits),
        "price": _price(request),
    }
    return AskedBound(**given)


def _price(request: Request) -> float | None:
    """USD per GPU-hour where the user gave it, with the request or as the profile's own."""
    given = (p.profile.price for p in request.cluster.node_groups)
    stated = [price.value for price in given if price is not None and price.date == GIVEN]
    return request.price if request.price is not None else stated[0] if stated else None


def asked_again(plan: Plan, cluster: Cluster) -> Request:
    """The question that a searched plan answers, for a cluster; the workload is that of the plan.

    Raises:
        RlhfsimError: a choice that this release does not know.
    """
    assert plan.choice is not None, "a plan that was given answers no question"
    question = plan.choice.asked
    given: dict[str, Any] = {f.name: getattr(question, f.name) for f in fields(AskedBound)}
    given |= {
        "allow": frozenset(question.allow),
        "forbid": frozenset(question.forbid),
        "limits": tuple(Limit(**asdict(bound)) for bound in question.limits),
    }
    return Request(cluster=cluster, workload=plan.workload, **given)


def runner_up(plan: Plan, asked: Workload, gap: float | None) -> RunnerUp:
    """Another plan in short; `asked`: the workload without switches, `gap`: how well it is proven."""
    rollout = plan.placement.rollout
    same = ("step_s", "low_s", "high_s", "usd_per_step", "peak_memory_bytes", "capacity_bytes")
    given: dict[str, Any] = {n: getattr(plan.prediction, n) for n in (*same, "probability_out_of_memory")}
    return RunnerUp(
        label=kind(plan, asked),
        gap=gap,
        actor=plan.placement.actor.layout.label,
        rollout=rollout.layout.label if rollout else None,
        by_call_s=shares(plan),
        **given,
    )


def searched(certificate: Certificate) -> Searched:
    """The counts of a certificate."""
    return Searched(**asdict(certificate))
