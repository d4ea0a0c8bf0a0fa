"""A scenario file: cluster, workload and placement in one YAML document.

`scenarios/systems/*.yaml` express how known RLHF systems work; `rlhfsim estimate FILE` prices one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rlhfsim import resources
from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.frozen import frozen
from rlhfsim.specs.hardware.clusters import cluster_from
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.loading import Source, convert, parse_yaml, read_text
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.backends import violation
from rlhfsim.specs.placement.placement import Placement, RolePlacement, Schedule, model_cut
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
from rlhfsim.specs.workload.dataflow import dataflow
from rlhfsim.specs.workload.workload import Workload, with_usual_kl

KEYS = ("title", "source", "framework", "cluster", "workload", "placement")


@frozen
class Scenario:
    """A described system on described hardware."""

    title: str
    source: str
    """Where the description comes from."""
    cluster: Cluster
    """With `framework`, whose software costs are priced; blank: pooled ones."""
    workload: Workload
    placement: Placement


def load_scenario(name: str | Path) -> Scenario:
    """A scenario by path, or a shipped one by name (`verl`, `systems/verl`).

    Raises:
        RlhfsimError: the first thing wrong, with file and line.
    """
    source = _read(name)
    data = source.data
    if not isinstance(data, Mapping):
        raise RlhfsimError(
            "not-a-mapping", "a scenario is a mapping", place=source.place(), help=f"keys: {', '.join(KEYS)}"
        )
    for key in data:
        if key not in KEYS:
            raise RlhfsimError(
                "unknown-key",
                f"unknown key {str(key)[:40]!r}",
                place=source.place((key,)),
                help=f"keys: {', '.join(KEYS)}",
            )
    for key in ("cluster", "workload", "placement"):
        if key not in data:
            raise RlhfsimError(
                "missing-key",
                f"{key!r} is missing",
                place=source.place(),
                help="see scenarios/systems for examples",
            )
    cluster = cluster_from(source, data["cluster"], ("cluster",))
    framework = str(data["framework"]) if "framework" in data else None
    return Scenario(
        title=str(data.get("title", source.name)),
        source=str(data.get("source", "")),
        cluster=replace(cluster, framework=framework),
        workload=convert(Workload, source, with_usual_kl(data["workload"]), ("workload",)),
        placement=convert(Placement, source, data["placement"], ("placement",)),
    )


def system_names() -> tuple[str, ...]:
    """Shipped systems."""
    return tuple(sorted(path.stem for path in (resources.shipped("scenarios") / "systems").glob("*.yaml")))


def _read(name: str | Path) -> Source:
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        shipped = resources.shipped("scenarios") / "systems" / f"{path.name}.yaml"
        if not os.path.isfile(shipped):  # nor where the name is too long for one
            raise unknown_name("scenario", str(name), system_names())
        path = shipped
    return parse_yaml(read_text(path), str(path))


def check_placement(placement: Placement, workload: Workload, models: Models, cluster: Cluster) -> None:
    """Refuse a placement that cannot exist: missing roles, GPUs out of range, TP across nodes or heads.

    Raises:
        RlhfsimError: the first rule that is broken.
    """
    for call in dataflow(workload):
        role = "rollout" if call.kind in ("generate", "sync") else call.role
        if role != "rules" and role not in placement.roles:
            raise RlhfsimError(
                "missing-role",
                f"{call.name} needs a role for {role!r}, the placement has none",
                help=f"add {role}: {{pool: ..., layout: ...}}",
            )
    if placement.rollout and placement.rollout.layout.prefill and placement.schedule.continuous:
        raise RlhfsimError(
            "prefill-apart-without-drain",
            "replicas that only prefill are priced where every batch drains",
            help="set rollout prefill: 0, or staleness: 0 or 1 without partial_rollout",
        )
    placement.check_pools([group.gpus for group in cluster.node_groups])
    for name, taken in placement.roles.items():
        pool = placement.pool(taken.pool)
        if name != "rollout" and cluster.node_groups[pool.hardware].wan is not None:
            raise RlhfsimError(
                "trains-in-second-region",
                f"{name} is in pool {pool.name!r}, in another region, where only the rollout may be",
                help=f"give {name} a pool on the first nodes, and so an engine that shares its GPUs",
            )
        model = models.actor if name == "rollout" else models.roles.get(name)
        if model is None:
            raise RlhfsimError(
                "role-without-role",
                f"the placement roles {name!r}, which {workload.algorithm} does not use here",
                help=f"remove {name}",
            )
        _check_role(name, taken.layout.tp, taken.layout.pp, placement, cluster, taken.pool)
        model.check_tp(taken.layout.tp)
        if not isinstance(taken, RolePlacement):
            continue
        if broken := violation(placement.backend, taken.layout, name):
            raise RlhfsimError(
                "backend-cannot-run", f"{name}: {broken}", help="choose another layout or --backend"
            )
    if workload.base_is_reference:
        _check_base(placement)
    _check_schedule(placement, workload)


def _check_base(placement: Placement) -> None:
    """The frozen base of the actor's adapters gives reference log-probs as it lies, where they share GPUs."""
    actor, reference = placement.actor, placement.role("reference")
    if reference is None or reference.pool != actor.pool:
        return
    # what a framework says of the reference's weights on the host is about a copy that is not there
    cuts = [
        model_cut(replace(x.layout, offload_params="none"), placement.backend) for x in (reference, actor)
    ]
    if cuts[0] != cuts[1]:
        raise RlhfsimError(
            "reference-is-the-base",
            "with LoRA the reference is the actor's frozen base, but it is cut otherwise: "
            f"{reference.layout.label} where the actor is {actor.layout.label}",
            help="give the reference the layout of the actor, or a pool of its own",
        )


def _check_role(name: str, tp: int, pp: int, placement: Placement, cluster: Cluster, pool: str) -> None:
    """TP groups are consecutive GPUs of a pool inside one scale-up domain; a rollout's may also be of whole
    nodes, of several domains. Where a rack holds no whole number of groups of whole nodes (16 GPUs of 72) its
    edge cuts none: schedulers give such jobs whole racks, less a few nodes.
    """
    gpus = placement.pool(pool)
    hardware = cluster.node_groups[gpus.hardware]
    domain = max(hardware.profile.scale_up.domain, hardware.gpus_per_node)
    whole_nodes = not tp % hardware.gpus_per_node and not gpus.start % hardware.gpus_per_node
    if whole_nodes and (name == "rollout" or (tp <= domain and domain % tp)):
        return
    if tp > domain:
        raise RlhfsimError(
            "tp-exceeds-node",
            f"{name}: tensor parallelism {tp} does not fit in one node of {domain} GPUs",
            help=f"use tp <= {domain} and add pp or dp",
        )
    first = range(gpus.start, gpus.start + placement.roles[name].layout.gpus, tp)
    if any(start // domain != (start + tp - 1) // domain for start in first):
        raise RlhfsimError(
            "tp-crosses-nodes",
            f"{name}: groups of tensor parallelism {tp} from GPU {gpus.start} on cross nodes of {domain} "
            "GPUs",
            help=f"start pool {pool!r} at a whole node, or use a tp that divides {domain}",
        )


def _lacks_to_lend(placement: Placement) -> tuple[str, str] | None:
    """Why the trainer's GPUs cannot be lent, and the remedy; None where they can."""
    rollout, schedule, trainer = placement.rollout, placement.schedule, placement.pool(placement.actor.pool)
    if rollout is None or rollout.pool == trainer.name:
        return "the rollout has no pool of its own", "give it one, or leave lend out"
    if not schedule.partial_rollout or schedule.overlapped_sync:
        why = "requests must go on elsewhere when they are taken back, and new weights arrive in between"
        return why, "set partial_rollout: true and overlapped_sync: false"
    if WEIGHT_PATHS[placement.weight_path].adapters_only:
        return "the sleeping engine drops its weights, and adapters alone do not bring them", "use broadcast"
    if placement.pool(rollout.pool).hardware != trainer.hardware:
        return "its engine is laid out for another kind of GPU", "use one kind, or leave lend out"
    if rollout.layout.replica_gpus > trainer.gpus:
        return "no replica fits on them", f"use at most {trainer.gpus} GPUs a replica"
    return None


def _check_schedule(placement: Placement, workload: Workload) -> None:
    rollout, schedule, path = placement.rollout, placement.schedule, placement.weight_path
    rules = WEIGHT_PATHS[path]
    if schedule.staleness == 0 and (schedule.overlapped_sync or schedule.partial_rollout):
        switch = "overlapped_sync" if schedule.overlapped_sync else "partial_rollout"
        raise RlhfsimError(
            "overlap-needs-staleness",
            f"{switch} trains on samples of older weights, but staleness is 0",
            help="set schedule.staleness to 1 or more",
        )
    if schedule.double_buffered and not workload.sandboxes_suffice:
        raise RlhfsimError(
            "lockstep-holds-all-sandboxes",
            "in lockstep all sequences of a batch hold sandboxes, for which the fleet lacks memory",
            help="give more fleet_memory, or set double_buffered: false",
        )
    if schedule.late != "wait" and not schedule.continuous:
        raise RlhfsimError(
            "nothing-is-late",
            f"schedule.late is {schedule.late}, but batches that are generated whole are never too old",
            help="set schedule.staleness above 1, or partial_rollout: true",
        )
    if schedule.lend and (lacks := _lacks_to_lend(placement)) is not None:
        raise RlhfsimError(
            "lend-needs",
            f"schedule.lend: the trainer's GPUs generate while they wait for samples; {lacks[0]}",
            help=lacks[1],
        )
    if rules.adapters_only and workload.lora is None:
        raise RlhfsimError(
            "path-needs-lora",
            "weight path 'lora' moves adapters, and the policy has none",
            help="set workload.lora, or use another path",
        )
    if rules.changes_only and workload.lora is not None:
        raise RlhfsimError(
            "path-moves-no-adapters",
            f"weight path {path!r} moves the elements of the whole model that changed, and the policy trains "
            "adapters",
            help="use weight path lora, broadcast or disk",
        )
    if rollout is None:
        if schedule != Schedule():
            raise RlhfsimError(
                "schedule-without-rollout",
                f"{workload.algorithm} generates nothing, so no schedule overlaps generation with training",
                help="leave out schedule, and --architecture async",
            )
        return
    together = rollout.pool == placement.actor.pool
    if schedule.asynchronous and together:
        raise RlhfsimError(
            "async-in-one-pool",
            "staleness above 0 needs a rollout pool of its own",
            help="give rollout and actor different pools",
        )
    if rules.pools == "one" and not together:
        raise RlhfsimError(
            "path-needs-one-pool",
            f"weight path {path!r} works only inside one pool",
            help="use broadcast, p2p, host, disk or lora",
        )
    if rules.pools == "two" and together:
        raise RlhfsimError(
            "path-needs-two-pools",
            f"weight path {path!r}: one GPU cannot be two ranks of one communicator",
            help="use ipc, reshard, host or disk",
        )
