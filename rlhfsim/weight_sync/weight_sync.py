"""Weight sync: every way to bring trained weights into the rollout engine, priced side by side.

Equations S1 to S7 of docs/weight_sync.md. A path is a chain of stages (gather, wire, load); bucketed
paths overlap them, so the slowest decides. In addition to bytes every stage pays for names: a mixture of
experts has tens of thousands of tensors, each a Python call and a kernel launch or two.

Not known here: traffic of other jobs on the network, servers of a shared file system, and the pause
of requests in flight (their re-prefill is priced with generation).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhfsim.elementwise import Size, alike, some, where
from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Cost
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.layout_columns import columns_of, format_of, rollout_columns_of
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.weight_sync import paths, reshard, storage
from rlhfsim.weight_sync.endpoints import PoolPair, Route, route
from rlhfsim.weight_sync.stages import Priced

Floats = NDArray[np.float64]


@frozen
class SyncCost:
    """One way to move the weights, with what it needs and what it can hide behind."""

    path: WeightPath
    """The path of a plan that it belongs to."""
    name: str
    """Stable name of the variant: `broadcast`, `broadcast-per-parameter`, ..."""
    title: str
    """For people."""
    cost: Cost
    bytes_moved: float
    """Bytes that cross the deciding link, all of them together."""
    model_bytes: float
    """Bytes of the model as trained (M)."""
    extra_train_bytes: float
    """Device memory on each training GPU beyond its shard, while it lasts."""
    extra_rollout_bytes: float
    """Device memory on each rollout GPU beyond its weights, while it lasts."""
    extra_host_bytes: float
    """Host memory per node."""
    limits: str
    """Works only when ..."""
    overlaps_with: str
    """What it can hide behind."""
    available: bool
    why_not: str | None = None
    """Reason when it cannot be used between these two ends."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the model per second, byte/s; 0 when nothing moves."""
        return self.model_bytes / self.cost.seconds if self.cost.seconds else 0.0


class Refusal(NamedTuple):
    """A reason why a path cannot be used."""

    holds: Callable[[Route], Size]
    why: str
    """With fields of the `Route` in braces."""


class Variant(NamedTuple):
    """A form of a weight path."""

    path: WeightPath
    name: str
    title: str
    price: Callable[[Route], Priced]
    limits: str
    """Works only when ..."""
    overlaps_with: str
    """What it can hide behind."""
    refusals: tuple[Refusal, ...] = ()
    """Why it cannot be used between two ends: the first that holds."""

    def __call__(self, ends: Route) -> SyncCost:
        """Its cost between two ends."""
        priced = self.price(ends)
        why_not = next((why.format(ends) for holds, why in self.refusals if holds(ends)), None)
        return SyncCost(
            path=self.path,
            name=self.name,
            title=self.title,
            cost=priced.cost,
            bytes_moved=priced.bytes_moved,
            model_bytes=ends.stored,
            extra_train_bytes=priced.train_bytes,
            extra_rollout_bytes=priced.rollout_bytes,
            extra_host_bytes=priced.host_bytes,
            limits=self.limits,
            overlaps_with=self.overlaps_with,
            available=why_not is None,
            why_not=why_not,
        )

    def seconds(self, ends: Route) -> Size:
        """Its seconds between two ends, or between each pair of columns; infinite where it cannot be used."""
        seconds = self.price(ends).cost.seconds
        for refusal in self.refusals:
            seconds = where(refusal.holds(ends), inf, seconds)
        return seconds


@lru_cache(maxsize=1024)
def sync(
    path: WeightPath,
    model: ModelSpec,
    train: Layout,
    rollout: RolloutLayout,
    pools: PoolPair,
    backend: Backend,
    lora: Lora | None = None,
) -> SyncCost:
    """Cost of one weight path between two layouts, in its usual form.

    An unavailable path is priced too; `available` and `why_not` say so.
    """
    return cost(path, route(model, train, rollout, pools, backend, lora))


def cost(path: WeightPath, ends: Route) -> SyncCost:
    """Cost of one weight path between two ends, in its usual form."""
    return _usual(path, ends)(ends)


def seconds(path: WeightPath, ends: Route, pairs: Sequence[tuple[Layout, RolloutLayout]]) -> Floats:
    """(n,) Seconds of one weight path between n pairs of layouts, all else as in `ends`; infinite where it
    cannot be used."""
    found, node = np.zeros(len(pairs)), ends.source.gpus_per_node
    kinds = ((train.zero == 3, train.gpus > node, format_of(rollout)) for train, rollout in pairs)
    for _, rows in alike(kinds):
        train, rollout = zip(*(pairs[row] for row in rows.tolist()), strict=True)
        same = replace(ends, train=columns_of(train), rollout=rollout_columns_of(rollout))
        found[rows] = _usual(path, same).seconds(same)
    return found


def _usual(path: WeightPath, ends: Route) -> Variant:
    """The usual form of a path: disks of one node serve a pool that fits into it."""
    if path != "disk":
        return VARIANTS[path]
    shared = not ends.same_pool or some(ends.train.gpus > ends.source.gpus_per_node)
    return VARIANTS["disk-shared" if shared else "disk-local"]


def every_path(ends: Route) -> tuple[SyncCost, ...]:
    """All paths and variants side by side, available or not, in the order of the ladder."""
    return (*(variant(ends) for variant in VARIANTS.values()), quantised(ends))


# --- why a path cannot be used ----------------------------------------------------------------------


def _differ(ends: Route) -> Size:
    train, rollout = ends.train, ends.rollout
    same = (train.tp == rollout.tp) & (train.pp == rollout.pp)
    whole = rollout.replica_gpus == train.tp * train.pp
    return where(same & whole, ends.sharded or ends.quantised, True)


COLOCATED = Refusal(lambda ends: not ends.same_pool, "training and rollout sit in different pools")
APART = Refusal(lambda ends: ends.same_pool, "one GPU cannot be two ranks of one communicator")
EQUAL = Refusal(_differ, "the layouts differ: {0.train.label} against {0.rollout.label}")
NEAR = Refusal(
    lambda ends: ends.wan is not None, "it needs RDMA or a disk of the node, which end with the region"
)
RDMA = Refusal(lambda ends: where(ends.one_domain, False, not ends.rdma), "the network has no RDMA")
RDMA_BETWEEN_POOLS = Refusal(lambda ends: not (ends.same_pool or ends.rdma), RDMA.why)
SAME_NODE = Refusal(
    lambda ends: where(ends.one_domain, False, not ends.same_pool), "another node's NVMe cannot be read"
)
CHANGES_APART = Refusal(
    lambda ends: ends.same_pool, "on shared GPUs the weights are handed over by pointer anyway"
)
ADAPTERS = Refusal(
    lambda ends: not ends.has_adapters, "the policy has no adapters: all its weights are trained"
)
"""What each of them is named for is missing."""


# --- the paths --------------------------------------------------------------------------------------

IDLE = "nothing: the GPUs themselves change sides"
BEHIND_ROLLOUT = "generation of the next batch, at one more version of staleness"
BEHIND_TRAINING = "the save with the next training step, the load with the end of generation"
IN_PLACE = "same pool; the whole model fits next to the training shard"
SHARED_GPUS = "training and rollout processes share each GPU"
FEW_CHANGES = "few BF16 elements change (small learning rate); a snapshot in pinned host memory"
DISJOINT = "the pools are disjoint and reach each other"


VARIANTS = {
    v.name: v
    for v in (
        # no sync: the rollout reads the training weights where they are
        Variant(
            "none",
            "none",
            "same copy",
            lambda ends: Priced(cost=Cost()),
            "one process holds both layouts and they are equal",
            IDLE,
            (COLOCATED, EQUAL),
        ),
        # S1
        Variant(
            "reshard",
            "reshard",
            "reshard in place, zero-redundancy",
            reshard.reshard,
            "same pool, and both layouts live in one process",
            IDLE,
            (COLOCATED,),
        ),
        Variant(
            "reshard",
            "reshard-vanilla",
            "reshard in place, vanilla",
            reshard.reshard_vanilla,
            IN_PLACE,
            IDLE,
            (COLOCATED,),
        ),
        Variant(
            "reshard",
            "reshard-deepspeed-chat",
            "reshard in place, DeepSpeed-Chat",
            reshard.reshard_deepspeed_chat,
            IN_PLACE,
            IDLE,
            (COLOCATED,),
        ),
        # S2
        Variant("ipc", "ipc", "CUDA IPC, bucketed", paths.ipc, SHARED_GPUS, IDLE, (COLOCATED,)),
        Variant(
            "ipc",
            "ipc-per-parameter",
            "CUDA IPC, per parameter",
            paths.ipc_per_parameter,
            SHARED_GPUS,
            IDLE,
            (COLOCATED,),
        ),
        # S3
        Variant(
            "broadcast",
            "broadcast",
            "NCCL broadcast, bucketed",
            paths.broadcast,
            DISJOINT,
            BEHIND_ROLLOUT,
            (APART,),
        ),
        Variant(
            "broadcast-per-parameter",
            "broadcast-per-parameter",
            "NCCL broadcast, per parameter",
            paths.broadcast_per_parameter,
            DISJOINT,
            BEHIND_ROLLOUT,
            (APART,),
        ),
        # S5
        Variant(
            "p2p",
            "p2p",
            "point-to-point shards, RDMA",
            paths.p2p,
            "RDMA, and shard maps that can be worked out for both ends",
            BEHIND_ROLLOUT,
            (APART, NEAR, RDMA),
        ),
        # S6; object storage counts as shared
        Variant(
            "disk",
            "disk-local",
            "disk, local NVMe",
            partial(storage.disk, shared=False),
            "any layouts; rollout runs on the nodes that saved",
            BEHIND_TRAINING,
            (NEAR, SAME_NODE),
        ),
        Variant(
            "disk",
            "disk-shared",
            "disk, shared file system",
            partial(storage.disk, shared=True),
            "any layouts; both pools mount it",
            BEHIND_TRAINING,
        ),
        # S4
        Variant(
            "host",
            "host",
            "host memory, parameter server",
            storage.host,
            "host memory holds the model once (per pool)",
            "the copy out with training of other roles; the update with nothing",
            (NEAR, RDMA_BETWEEN_POOLS),
        ),
        # S7
        Variant(
            "lora",
            "lora",
            "LoRA adapters only",
            paths.adapters,
            "an adapter-trained policy; the engine serves base and adapter",
            "generation of requests that use the old adapter",
            (ADAPTERS,),
        ),
        Variant(
            "delta",
            "delta",
            "changed elements, NCCL broadcast",
            paths.delta,
            FEW_CHANGES,
            BEHIND_ROLLOUT,
            (CHANGES_APART,),
        ),
        Variant(
            "delta-disk",
            "delta-disk",
            "changed elements, shared file system",
            paths.delta_disk,
            FEW_CHANGES,
            BEHIND_ROLLOUT,
            (CHANGES_APART,),
        ),
    )
}
"""By name, in the order of the ladder; the usual form of a path has the path's own name (disk: local or
shared)."""


def quantised(ends: Route) -> SyncCost:
    """FP8 weights: half the bytes, and the time to quantise them (S7)."""
    small = replace(ends, rollout=replace(ends.rollout, precision="fp8"))
    why = None if "fp8" in ends.target.profile.peak else f"{ends.target.profile.title} has no FP8"
    return replace(
        VARIANTS["ipc" if ends.same_pool else "broadcast"](small),
        name="quantised",
        title="quantised at sync, FP8",
        available=why is None,
        why_not=why,
        limits="the rollout runs in FP8: log-probs differ from training (use a correction)",
    )
