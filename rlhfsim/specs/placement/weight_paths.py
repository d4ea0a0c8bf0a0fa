"""Weight paths: every way from the trained weights to the rollout, in one table that planner and executor
read.

What a path costs stands in `rlhfsim.weight_sync`, how its bytes travel in `executor.weight_transfer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

WeightPath = Literal["none", "ipc", "reshard", "broadcast", "p2p", "disk", "lora", "host"]
Transport = Literal["broadcast", "ipc", "host", "disk"]
"""How the executor moves bytes: a process group, shared memory in buckets, a file in host memory, a
folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPathRules:
    """What a weight path needs, and what it makes of a plan."""

    title: str
    pools: Literal["one", "two", "any"]
    """Whether actor and rollout share a pool."""
    transport: Transport | None
    """How the executor runs it; None: it does not."""
    needs_backend: bool = False
    """The training backend must bring it: the search offers it only for backends that are not launched
    here."""
    gpu_memory: bool = False
    """Weights are handed over in GPU memory: the plan is a hybrid engine."""
    communicator: bool = False
    """An NCCL group spans training and rollout."""
    adapters_only: bool = False
    copies: bool = True
    """False: the rollout reads the weights where they are trained."""

    @property
    def one_host(self) -> bool:
        """Whether the executor hands weights over in the memory of one host."""
        return self.transport in ("ipc", "host")


WEIGHT_PATHS: Mapping[WeightPath, WeightPathRules] = {
    "none": WeightPathRules(title="not copied", pools="one", transport=None, copies=False),
    "broadcast": WeightPathRules(
        title="NCCL broadcast", pools="two", transport="broadcast", communicator=True
    ),
    "ipc": WeightPathRules(title="CUDA IPC", pools="one", transport="ipc", gpu_memory=True),
    "host": WeightPathRules(title="host memory", pools="any", transport="host"),
    "disk": WeightPathRules(title="disk", pools="any", transport="disk"),
    "reshard": WeightPathRules(
        title="resharding in place", pools="one", transport="ipc", gpu_memory=True, needs_backend=True
    ),
    "p2p": WeightPathRules(title="RDMA", pools="two", transport=None, communicator=True, needs_backend=True),
    "lora": WeightPathRules(
        title="LoRA adapters only", pools="any", transport="broadcast", adapters_only=True
    ),
}
"""In the order in which the search tries them."""


def paths_between(*, one_pool: bool, own_backend: bool) -> tuple[WeightPath, ...]:
    """Paths that copy all weights, for actor and rollout in one pool or in two.

    `own_backend`: the training backend brings paths of its own.
    """
    pools = ("one", "any") if one_pool else ("two", "any")
    return tuple(
        path
        for path, rules in WEIGHT_PATHS.items()
        if rules.pools in pools and rules.copies and not rules.adapters_only
        if own_backend or not rules.needs_backend
    )
