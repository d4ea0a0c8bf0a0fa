"""Which GPUs NeMo-RL gives to training and which to the rollout: nodes, or GPUs of the only node."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.export import Setting, nodes_of
from rlhfsim.interchange.fields import Fields
from rlhfsim.plan import Plan

GEN = "policy.generation"
RESOURCES = f"{GEN}.colocated.resources"


def cluster_of(plan: Plan) -> tuple[int, int]:
    """Nodes, those of the rollout among them, and GPUs of each."""
    return nodes_of(plan, plan.placement.pool(plan.placement.actor.pool).gpus + _own(plan))


def _own(plan: Plan) -> int:
    """GPUs of the rollout alone."""
    rollout = plan.placement.rollout
    apart = rollout is not None and rollout.pool != plan.placement.actor.pool
    return plan.placement.pool(rollout.pool).gpus if rollout is not None and apart else 0


def resources(plan: Plan) -> Iterator[Setting]:
    """Nodes of the rollout alone, or GPUs of the only node."""
    own, (nodes, each) = _own(plan), cluster_of(plan)
    if not own:
        return
    alone, per_node = (None, own) if nodes == 1 else nodes_of(plan, own)
    if nodes > 1 and per_node != each:
        raise RlhfsimError(
            "pool-is-not-whole-nodes",
            f"NeMo-RL gives the rollout whole nodes: {own} GPUs are none of {each}",
            help="design with a rollout pool of whole nodes",
        )
    yield Setting(f"{RESOURCES}.num_nodes", alone)
    yield Setting(f"{RESOURCES}.gpus_per_node", per_node)


def rollout_gpus(s: FrameworkSettings, read: Fields) -> int:
    """What `resources` writes; 0: the rollout shares those that train."""
    if read["shared"]:
        return 0
    if read["cluster.nodes"] == 1:
        s.overruled(f"{RESOURCES}.num_nodes")
        return s.whole(f"{RESOURCES}.gpus_per_node")
    each = s.whole(f"{RESOURCES}.gpus_per_node", default=read["cluster.each"])
    return s.whole(f"{RESOURCES}.num_nodes") * each
