"""Weight paths: every way from the trained weights to the rollout, in one table that planner and executor
read.

What a path costs is in `rlhfsim.weight_sync`, how its bytes travel in `executor.weight_transfer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from rlhfsim.frozen import frozen

WeightPath = Literal[
    "none",
    "ipc",
    "reshard",
    "broadcast",
    "p2p",
    "disk",
    "lora",
    "host",
    "broadcast-per-parameter",
    "delta",
    "delta-disk",
]
Transport = Literal["broadcast", "ipc", "host", "disk"]
"""How the executor moves bytes: a process group, shared memory in buckets, a file in host memory, a
folder."""
End = Literal["train", "rollout"]
Topology = Literal["same GPU", "same node", "across nodes"]
"""Where the workers of the rollout lie, seen from the ranks that train: each on a rank's own GPU, all on its
node, or on other nodes too."""
APART: tuple[Topology, ...] = ("same node", "across nodes")
EVERYWHERE: tuple[Topology, ...] = ("same GPU", *APART)


@frozen
class WeightPathRules:
    """What a weight path needs, and what it makes of a plan."""

    title: str
    pools: Literal["one", "two", "any"]
    """Whether actor and rollout share a pool."""
    transports: Mapping[Topology, Transport]
    """How the executor carries it; where a topology is missing, it does not."""
    needs_backend: bool = False
    """The training backend must bring it: the search offers it only for backends that are not launched
    here."""
    gpu_memory: bool = False
    """Weights are handed over in GPU memory: the plan is a hybrid engine."""
    communicator: bool = False
    """An NCCL group spans training and rollout."""
    adapters_only: bool = False
    changes_only: bool = False
    """Only elements that changed since the last transfer travel. How many these are depends on the learning
    rate, so the search offers such a path only where it is named."""
    copies: bool = True
    """False: the rollout reads the weights where they are trained."""
    counts: frozenset[End] = frozenset()
    """Ends whose number of GPUs decides its seconds, beyond how these cut the weights and whether both ends
    together fit into one scale-up domain."""
    in_place_of: WeightPath | None = None
    """The faster path that plans and launches have in place of one that a system is known for."""


TRAIN: frozenset[End] = frozenset({"train"})
BOTH: frozenset[End] = frozenset({"train", "rollout"})


def _by(transport: Transport, *topologies: Topology) -> dict[Topology, Transport]:
    return dict.fromkeys(topologies, transport)


WEIGHT_PATHS: Mapping[WeightPath, WeightPathRules] = {
    "none": WeightPathRules(title="not copied", pools="one", transports={}, copies=False),
    "broadcast": WeightPathRules(
        # NCCL refuses a group in which two ranks share a GPU
        title="NCCL broadcast",
        pools="two",
        transports=_by("broadcast", *APART),
        communicator=True,
    ),
    "ipc": WeightPathRules(
        title="CUDA IPC", pools="one", transports=_by("ipc", "same GPU"), gpu_memory=True, counts=TRAIN
    ),
    "host": WeightPathRules(
        title="host memory", pools="any", transports=_by("host", "same GPU", "same node"), counts=BOTH
    ),
    "disk": WeightPathRules(title="disk", pools="any", transports=_by("disk", *EVERYWHERE), counts=TRAIN),
    "reshard": WeightPathRules(
        title="resharding in place",
        pools="one",
        transports=_by("ipc", "same GPU"),
        gpu_memory=True,
        needs_backend=True,
        counts=TRAIN,
    ),
    "p2p": WeightPathRules(
        title="RDMA", pools="two", transports={}, communicator=True, needs_backend=True, counts=BOTH
    ),
    "lora": WeightPathRules(
        title="LoRA adapters only",
        pools="any",
        transports=_by("ipc", "same GPU") | _by("broadcast", *APART),
        adapters_only=True,
    ),
    "broadcast-per-parameter": WeightPathRules(
        title="NCCL broadcast, one call per parameter",
        pools="two",
        transports={},
        communicator=True,
        in_place_of="broadcast",
    ),
    "delta": WeightPathRules(
        title="changed elements by broadcast",
        pools="two",
        transports=_by("broadcast", *APART),
        communicator=True,
        changes_only=True,
    ),
    "delta-disk": WeightPathRules(
        title="changed elements through a shared folder",
        pools="two",
        transports=_by("disk", *APART),
        changes_only=True,
    ),
}
"""In the order in which the search tries them."""


SEARCHED: tuple[WeightPath, ...] = tuple(
    path for path, rules in WEIGHT_PATHS.items() if path != "none" and rules.in_place_of is None
)
"""Paths that plans may have."""


def paths_between(
    *, one_pool: bool, own_backend: bool, named: WeightPath | None = None
) -> tuple[WeightPath, ...]:
    """Paths that copy all weights, for actor and rollout in one pool or in two.

    `own_backend`: the training backend brings paths of its own. `named`: the path that is asked for.
    """
    pools = ("one", "any") if one_pool else ("two", "any")
    return tuple(
        path
        for path, rules in WEIGHT_PATHS.items()
        if rules.pools in pools and rules.copies and not rules.adapters_only
        if not rules.changes_only or path == named
        if rules.in_place_of is None and (own_backend or not rules.needs_backend)
    )


def topology(actor: Iterable[tuple[int, int]], rollout: Iterable[tuple[int, int]]) -> Topology:
    """Where a rollout is relative to the policy's training; both as (node, GPU) of every rank."""
    trains, generates = set(actor), set(rollout)
    if generates <= trains:
        return "same GPU"
    nodes = {node for node, _ in trains | generates}
    return "same node" if len(nodes) == 1 else "across nodes"
