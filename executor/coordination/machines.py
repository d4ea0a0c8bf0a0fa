"""Every node of a Ray cluster looked at, all at once and within a few seconds."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from executor import ranks
from executor.check_machine import MachineQuestion, NodeChecks, here
from executor.coordination import cluster
from executor.coordination.failures import answers
from executor.machine.checks import Check, judged
from executor.sockets import listener
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan

LIMIT_S = 9.0
"""Most that all nodes together may take, once Ray has answered."""
CONNECT_S = 2.0
"""For a connection between two nodes."""
Port = tuple[str, int]


class NodeProbe:
    """A process on one node: what it finds there, and whom it reaches."""

    def __init__(self, address: str) -> None:
        self._socket = listener(address, 0)  # the kernel accepts; nobody reads

    def look(self, asked: MachineQuestion) -> NodeChecks:
        """All GPUs count: Ray hides them from a process that asked for none."""
        return here(asked, None)

    def port(self) -> int:
        """Where the others connect."""
        return int(self._socket.getsockname()[1])

    def unreachable(self, others: Sequence[Port]) -> list[Port]:
        """Those that do not let this node connect."""
        return [other for other in others if not _connects(other)]


def _connects(to: Port) -> bool:
    try:
        socket.create_connection(to, timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


def check_nodes(address: str, asked: MachineQuestion, plan: Plan | None) -> list[NodeChecks]:
    """Answers of every node with slots at `address`; one that does not answer in time is missing.

    Raises:
        RlhfsimError: no cluster there.
    """
    resource = cluster.join(address, {})
    try:
        deadline = time.monotonic() + LIMIT_S

        def told(refs: Mapping[str, Any]) -> dict[str, Any]:
            return answers(refs, max(0.0, deadline - time.monotonic()))

        nodes = cluster.nodes(resource)
        actor: Any = ray.remote(NodeProbe)
        probes = {
            node.address: actor.options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
            ).remote(node.address)
            for node in nodes
        }
        ports = told({a: p.port.remote() for a, p in probes.items()})
        listening = [(a, port) for a, port in ports.items() if not isinstance(port, Exception)]
        looks = told({a: p.look.remote(asked) for a, p in probes.items()})
        missed = told({a: p.unreachable.remote(listening) for a, p in probes.items()})
        found = [_node(a, looks[a], missed[a]) for a in probes]
        return [*_room(plan, [node.slots for node in nodes]), *found]
    finally:
        ray.shutdown()


def _node(address: str, look: Any, missed: Any) -> NodeChecks:
    """What a node answered, and whether it reaches the others."""
    if isinstance(look, Exception):
        late = isinstance(look, GetTimeoutError)
        why = f"no answer within {LIMIT_S:g} s" if late else str(look).strip().splitlines()[-1][:200]
        remedy = "look at the node with: ray status; every node needs the same environment"
        return NodeChecks(node=address, checks=(judged("node", False, why, remedy),))
    assert isinstance(look, NodeChecks)
    return replace(look, node=f"{look.node} ({address})", checks=(*look.checks, _network(missed)))


def _network(missed: Any) -> Check:
    remedy = "open all ports between the nodes of the cluster (firewall, security group, NetworkPolicy)"
    if isinstance(missed, Exception):
        found = "the others were not reached in time"
    elif missed:
        found = f"no connection to {', '.join(f'{h}:{p}' for h, p in missed)}"
    else:
        found = "every node connects"
    return judged("network", missed == [], found, remedy)


def _room(plan: Plan | None, slots: Sequence[int]) -> list[NodeChecks]:
    """Whether the nodes together hold the plan; nothing without one."""
    if plan is None:
        return []
    found = judged("nodes", True, ranks.listed(slots), "")
    try:
        ranks.check_room(plan, slots)
    except RlhfsimError as error:
        found = judged("nodes", False, error.message, error.help or "")
    return [NodeChecks(node="cluster", checks=(found,))]
