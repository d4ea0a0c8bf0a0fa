"""Which process of a plan lies on which GPU, and which of them talk to each other: pure, without Ray.

A worker group has one process a rank, a rollout replica one engine worker a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from executor.engines import mesh
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS

Place = tuple[int, int]
"""Node of the plan, GPU inside it."""
TENANTS = 8
"""Most processes that share one GPU: each takes that share of it."""


@frozen
class GroupSpec:
    """Roles that share processes: same GPUs, same tensor, pipeline and data parallelism."""

    name: str
    """Its roles, as in `actor+reference`."""
    pool: str
    roles: tuple[str, ...]
    places: tuple[Place, ...]
    """Place of each rank."""


def places(plan: Plan) -> tuple[Place, ...]:
    """Every GPU that a role of the plan uses, in order."""
    return tuple(sorted({p for role in plan.gpu_map for p in zip(role.nodes, role.gpus, strict=True)}))


def bundles(plan: Plan) -> dict[int, list[Place]]:
    """The placement group of every node of the plan: one bundle a GPU."""
    by_node: dict[int, list[Place]] = {}
    for place in places(plan):
        by_node.setdefault(place[0], []).append(place)
    return by_node


def check_room(plan: Plan, have: Sequence[int], kind: str = "GPUs") -> None:
    """Compare what a plan needs with the nodes of a cluster, `have` slots each.

    Raises:
        RlhfsimError: with the plan's need and the cluster's offer.
    """
    need = [len(slots) for slots in bundles(plan).values()]
    if has_room(need, have):
        return
    raise RlhfsimError(
        "cluster-too-small",
        f"the plan needs {sum(need)} {kind} ({listed(need)}), the cluster has {sum(have)} ({listed(have)})",
        help="design for this cluster (rlhfsim design --gpus ...), add nodes, "
        "or run a scaled plan: rlhfsim launch --scale",
    )


def has_room(need: Sequence[int], have: Sequence[int]) -> bool:
    """Whether every node that is needed has one of its own that is as large."""
    largest, needed = sorted(have, reverse=True), sorted(need, reverse=True)
    return len(largest) >= len(needed) and all(h >= n for h, n in zip(largest, needed, strict=False))


def listed(slots: Sequence[int]) -> str:
    """`2 nodes of 8, 1 node of 4`."""
    counts = Counter(sorted(slots, reverse=True))
    return (
        ", ".join(f"{count} node{'s' * (count > 1)} of {size}" for size, count in counts.items()) or "no node"
    )


def group_specs(plan: Plan, served_by: Mapping[str, str]) -> tuple[GroupSpec, ...]:
    """The worker groups of a plan; roles in `served_by` run on another role's engine."""
    gpus = {s.role: tuple(zip(s.nodes, s.gpus, strict=True)) for s in plan.gpu_map}
    together: dict[Any, dict[str, RolePlacement]] = {}
    for role, placed in plan.placement.trainers.items():
        if role not in served_by:
            key = (gpus[role], placed.layout.tp, placed.layout.pp, placed.layout.dp)
            together.setdefault(key, {})[role] = placed
    return tuple(
        GroupSpec(
            name="+".join(roles), pool=next(iter(roles.values())).pool, roles=tuple(roles), places=places
        )
        for (places, *_), roles in together.items()
    )


def replica_places(plan: Plan) -> list[tuple[Place, ...]]:
    """GPUs of every replica: consecutive ranks of the rollout role."""
    role = plan.placement.rollout
    assert role is not None
    gpus = next(s for s in plan.gpu_map if s.role == "rollout")
    ranks = list(zip(gpus.nodes, gpus.gpus, strict=True))
    each = role.layout.replica_gpus
    return [tuple(ranks[i * each : (i + 1) * each]) for i in range(role.layout.dp)]


def lent(plan: Plan) -> Plan:
    """The plan with its rollout engine on the trainer's GPUs, as it is while they are lent."""
    placement = plan.placement.lent
    trainer = next(m for m in plan.gpu_map if m.role == "actor")
    others = tuple(m for m in plan.gpu_map if m.role != "rollout")
    return replace(plan, placement=placement, gpu_map=(*others, replace(trainer, role="rollout")))


def rollouts(plan: Plan) -> list[Plan]:
    """The plan for each pool with a rollout engine: its own, and that of a trainer that lends its GPUs."""
    lending = [lent(plan)] if plan.placement.schedule.lend else []
    return [plan, *lending] if plan.workload.generates else []


def by_node(places: Sequence[Place]) -> list[tuple[Place, ...]]:
    """The same GPUs node by node, in their order."""
    return [tuple(p for p in places if p[0] == node) for node in dict.fromkeys(node for node, _ in places)]


def process_groups(layout: Layout) -> dict[str, list[list[int]]]:
    """Ranks of an engine by tensor, data and pipeline group; every rank is in one of each."""
    groups: dict[str, dict[Any, list[int]]] = {"tensor": {}, "data": {}, "pipeline": {}}
    for rank in range(mesh.world_size(layout)):
        at = mesh.coordinates(rank, layout)
        groups["tensor"].setdefault((at.pp, at.dp), []).append(rank)
        groups["data"].setdefault((at.pp, at.tp), []).append(rank)
        groups["pipeline"].setdefault((at.dp, at.tp), []).append(rank)
    return {kind: list(ranks.values()) for kind, ranks in groups.items()}


@frozen
class TransferGroup:
    """Processes that one weight transfer joins."""

    sender: int
    """Rank of the actor's group; all its ranks gather."""
    receivers: tuple[tuple[int, int], ...]
    """Replica and engine worker in it."""


def transfer_groups(plan: Plan, *, gpu: bool = True) -> tuple[TransferGroup, ...]:
    """Who sends new weights to whom: what is handed over in memory goes from a rank to the workers that share
    that memory (its own GPU; its node through host memory, or where there are no GPUs); else rank 0 sends to
    all."""
    transport = WEIGHT_PATHS[plan.placement.weight_path].transports.get(plan.topology)

    def memory(place: Place) -> Place | int | None:
        """What a sender and its receivers share."""
        if transport == "ipc" and gpu:
            return place
        return place[0] if transport in ("ipc", "host") else None

    senders: dict[Place | int | None, int] = {}
    for rank, place in enumerate(plan.gpus_of("actor")):
        senders.setdefault(memory(place), rank)
    receivers: dict[int, list[tuple[int, int]]] = {}
    for replica, gpus in enumerate(replica_places(plan)):
        for worker, place in enumerate(gpus):
            receivers.setdefault(senders[memory(place)], []).append((replica, worker))
    return tuple(TransferGroup(sender=rank, receivers=tuple(receivers[rank])) for rank in sorted(receivers))
