"""Weight sync: every way to bring trained weights into the rollout engine, priced side by side.

Equations S1 to S7 of docs/weight_sync.md. A path is a chain of stages (gather, wire, load); bucketed
paths overlap them, so the slowest decides. Besides bytes every stage pays for names: a mixture of
experts has tens of thousands of tensors, each a Python call and a kernel launch or two.

Not known here: traffic of other jobs on the network, servers of a shared file system, and the pause
of requests in flight (their re-prefill is priced with generation).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from rlhfsim.kernels.cost import Cost
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.weight_sync import paths, reshard, storage
from rlhfsim.weight_sync.endpoints import PoolPair, Route, route
from rlhfsim.weight_sync.stages import Priced


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A form of a weight path."""

    path: WeightPath
    name: str
    title: str
    price: Callable[[Route], Priced]
    limits: str
    """Works only when ..."""
    overlaps_with: str
    """What it can hide behind."""
    refusal: Callable[[Route], str | None] = lambda ends: None
    """Why it cannot be used between two ends; None: it can."""

    def __call__(self, ends: Route) -> SyncCost:
        """Its cost between two ends."""
        priced, why_not = self.price(ends), self.refusal(ends)
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
    ends = route(model, train, rollout, pools, backend, lora)
    if path == "disk":
        shared = not pools.same or train.gpus > pools.source.gpus_per_node
        return VARIANTS["disk-shared" if shared else "disk-local"](ends)
    return VARIANTS[path](ends)


def every_path(ends: Route) -> tuple[SyncCost, ...]:
    """All paths and variants side by side, available or not, in the order of the ladder."""
    return (*(variant(ends) for variant in VARIANTS.values()), quantised(ends))


# --- why a path cannot be used ----------------------------------------------------------------------


def _colocated(ends: Route) -> str | None:
    return None if ends.same_pool else "training and rollout sit in different pools"


def _apart(ends: Route) -> str | None:
    return "one GPU cannot be two ranks of one communicator" if ends.same_pool else None


def _equal_layouts(ends: Route) -> str | None:
    same = (ends.train.tp, ends.train.pp) == (ends.rollout.tp, ends.rollout.pp)
    whole = not ends.sharded and ends.rollout.replica_gpus == ends.train.tp * ends.train.pp
    if same and whole and not ends.quantised:
        return _colocated(ends)
    return _colocated(ends) or f"the layouts differ: {ends.train.label} against {ends.rollout.label}"


def _rdma(ends: Route) -> str | None:
    return (
        _apart(ends)
        or _across_regions(ends)
        or (None if ends.rdma or ends.one_domain else "the network has no RDMA")
    )


def _across_regions(ends: Route) -> str | None:
    return "it needs RDMA or a disk of the node, which end with the region" if ends.wan else None


def _local_disk(ends: Route) -> str | None:
    across = not ends.same_pool and not ends.one_domain
    return _across_regions(ends) or ("another node's NVMe cannot be read" if across else None)


def _host(ends: Route) -> str | None:
    return _across_regions(ends) or (None if ends.same_pool or ends.rdma else "the network has no RDMA")


def _changes_apart(ends: Route) -> str | None:
    return "on shared GPUs the weights are handed over by pointer anyway" if ends.same_pool else None


def _adapters(ends: Route) -> str | None:
    return None if ends.has_adapters else "the policy has no adapters: all its weights are trained"


# --- the paths --------------------------------------------------------------------------------------

IDLE = "nothing: the GPUs themselves change sides"
BEHIND_ROLLOUT = "generation of the next batch, at one more version of staleness"
BEHIND_TRAINING = "the save with the next training step, the load with the end of generation"
IN_PLACE = "same pool; the whole model fits beside the training shard"
SHARED_GPUS = "training and rollout processes share each GPU"
FEW_CHANGES = "few BF16 elements change (small learning rate); a snapshot in pinned host memory"
DISJOINT = "the pools are disjoint and reach each other"


def _variant(
    path: WeightPath,
    name: str,
    title: str,
    price: Callable[[Route], Priced],
    limits: str,
    overlaps_with: str,
    refusal: Callable[[Route], str | None],
) -> Variant:
    return Variant(
        path=path,
        name=name,
        title=title,
        price=price,
        limits=limits,
        overlaps_with=overlaps_with,
        refusal=refusal,
    )


VARIANTS = {
    v.name: v
    for v in (
        # no sync: the rollout reads the training weights where they are
        _variant(
            "none",
            "none",
            "same copy",
            lambda ends: Priced(cost=Cost()),
            "one process holds both layouts and they are equal",
            IDLE,
            _equal_layouts,
        ),
        # S1
        _variant(
            "reshard",
            "reshard",
            "reshard in place, zero-redundancy",
            reshard.reshard,
            "same pool, and both layouts live in one process",
            IDLE,
            _colocated,
        ),
        _variant(
            "reshard",
            "reshard-vanilla",
            "reshard in place, vanilla",
            reshard.reshard_vanilla,
            IN_PLACE,
            IDLE,
            _colocated,
        ),
        _variant(
            "reshard",
            "reshard-deepspeed-chat",
            "reshard in place, DeepSpeed-Chat",
            reshard.reshard_deepspeed_chat,
            IN_PLACE,
            IDLE,
            _colocated,
        ),
        # S2
        _variant("ipc", "ipc", "CUDA IPC, bucketed", paths.ipc, SHARED_GPUS, IDLE, _colocated),
        _variant(
            "ipc",
            "ipc-per-parameter",
            "CUDA IPC, per parameter",
            paths.ipc_per_parameter,
            SHARED_GPUS,
            IDLE,
            _colocated,
        ),
        # S3
        _variant(
            "broadcast",
            "broadcast",
            "NCCL broadcast, bucketed",
            paths.broadcast,
            DISJOINT,
            BEHIND_ROLLOUT,
            _apart,
        ),
        _variant(
            "broadcast-per-parameter",
            "broadcast-per-parameter",
            "NCCL broadcast, per parameter",
            paths.broadcast_per_parameter,
            DISJOINT,
            BEHIND_ROLLOUT,
            _apart,
        ),
        # S5
        _variant(
            "p2p",
            "p2p",
            "point-to-point shards, RDMA",
            paths.p2p,
            "RDMA, and shard maps that can be worked out for both ends",
            BEHIND_ROLLOUT,
            _rdma,
        ),
        # S6; object storage counts as shared
        _variant(
            "disk",
            "disk-local",
            "disk, local NVMe",
            partial(storage.disk, shared=False),
            "any layouts; rollout runs on the nodes that saved",
            BEHIND_TRAINING,
            _local_disk,
        ),
        _variant(
            "disk",
            "disk-shared",
            "disk, shared file system",
            partial(storage.disk, shared=True),
            "any layouts; both pools mount it",
            BEHIND_TRAINING,
            lambda ends: None,
        ),
        # S4
        _variant(
            "host",
            "host",
            "host memory, parameter server",
            storage.host,
            "host memory holds the model once (per pool)",
            "the copy out with training of other roles; the update with nothing",
            _host,
        ),
        # S7
        _variant(
            "lora",
            "lora",
            "LoRA adapters only",
            paths.adapters,
            "an adapter-trained policy; the engine serves base and adapter",
            "generation of requests that use the old adapter",
            _adapters,
        ),
        _variant(
            "delta",
            "delta",
            "changed elements, NCCL broadcast",
            paths.delta,
            FEW_CHANGES,
            BEHIND_ROLLOUT,
            _changes_apart,
        ),
        _variant(
            "delta-disk",
            "delta-disk",
            "changed elements, shared file system",
            paths.delta_disk,
            FEW_CHANGES,
            BEHIND_ROLLOUT,
            _changes_apart,
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
