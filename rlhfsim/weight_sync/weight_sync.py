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
from functools import lru_cache

from rlhfsim.kernels.cost import Cost
from rlhfsim.kernels.device import Device
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import WeightPath
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.weight_sync import paths, storage
from rlhfsim.weight_sync.endpoints import Route, route
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


@lru_cache(maxsize=65536)
def sync(
    path: WeightPath,
    model: ModelSpec,
    train: Layout,
    rollout: RolloutLayout,
    *,
    source: Device,
    target: Device,
    backend: Backend,
    same_pool: bool,
    lora: Lora | None = None,
    rdma: bool = True,
) -> SyncCost:
    """Cost of one weight path between two layouts.

    An unavailable path is priced too; `available` and `why_not` say so.
    """
    ends = route(
        model,
        train,
        rollout,
        source=source,
        target=target,
        backend=backend,
        same_pool=same_pool,
        lora=lora,
        rdma=rdma,
    )
    match path:
        case "none":
            return none(ends)
        case "reshard":
            return reshard(ends)
        case "ipc":
            return ipc(ends)
        case "broadcast":
            return broadcast(ends)
        case "p2p":
            return p2p(ends)
        case "disk":
            return disk(ends, shared=not ends.same_pool or train.gpus > source.gpus_per_node)
        case "host":
            return host(ends)
        case "lora":
            return adapters(ends, has_adapter=lora is not None)


def every_path(
    model: ModelSpec,
    train: Layout,
    rollout: RolloutLayout,
    *,
    source: Device,
    target: Device,
    backend: Backend,
    same_pool: bool,
    lora: Lora | None = None,
    rdma: bool = True,
) -> tuple[SyncCost, ...]:
    """All paths and variants side by side, available or not, in the order of the ladder."""
    ends = route(
        model,
        train,
        rollout,
        source=source,
        target=target,
        backend=backend,
        same_pool=same_pool,
        lora=lora,
        rdma=rdma,
    )
    plain: tuple[Callable[[Route], SyncCost], ...] = (
        none,
        reshard,
        reshard_vanilla,
        reshard_deepspeed_chat,
        ipc,
        ipc_per_parameter,
        broadcast,
        broadcast_per_parameter,
        p2p,
    )
    return (
        *(price(ends) for price in plain),
        disk(ends, shared=False),
        disk(ends, shared=True),
        host(ends),
        adapters(ends, has_adapter=lora is not None),
        quantised(ends),
        delta(ends),
    )


# --- paths ------------------------------------------------------------------------------------------

IDLE = "nothing: the GPUs themselves change sides"
BEHIND_ROLLOUT = "generation of the next batch, at one more version of staleness"


def _priced(
    ends: Route,
    path: WeightPath,
    name: str,
    title: str,
    priced: Priced,
    limits: str,
    overlaps_with: str,
    why_not: str | None,
) -> SyncCost:
    return SyncCost(
        path=path,
        name=name,
        title=title,
        cost=priced.cost,
        bytes_moved=priced.bytes_moved,
        model_bytes=ends.stored,
        extra_train_bytes=priced.train_bytes,
        extra_rollout_bytes=priced.rollout_bytes,
        extra_host_bytes=priced.host_bytes,
        limits=limits,
        overlaps_with=overlaps_with,
        available=why_not is None,
        why_not=why_not,
    )


def _colocated(ends: Route) -> str | None:
    return None if ends.same_pool else "training and rollout sit in different pools"


def none(ends: Route) -> SyncCost:
    """No sync: the rollout reads the training weights where they are."""
    same = (ends.train.tp, ends.train.pp) == (ends.rollout.tp, ends.rollout.pp)
    whole = not ends.sharded and ends.rollout.replica_gpus == ends.train.tp * ends.train.pp
    why = _colocated(ends) or (
        None
        if same and whole and not ends.quantised
        else f"the layouts differ: {ends.train.label} against {ends.rollout.label}"
    )
    return _priced(
        ends,
        "none",
        "none",
        "same copy",
        Priced(cost=Cost()),
        "one process holds both layouts and they are equal",
        IDLE,
        why,
    )


def reshard(ends: Route) -> SyncCost:
    """HybridFlow's zero-redundancy gather in place (S1)."""
    return _priced(
        ends,
        "reshard",
        "reshard",
        "reshard in place, zero-redundancy",
        paths.reshard(ends),
        "same pool, and both layouts live in one process",
        IDLE,
        _colocated(ends),
    )


def reshard_vanilla(ends: Route) -> SyncCost:
    """HybridFlow without its grouping: the model-parallel group gathers everything (S1)."""
    return _priced(
        ends,
        "reshard",
        "reshard-vanilla",
        "reshard in place, vanilla",
        paths.reshard_vanilla(ends),
        "same pool; the whole model fits beside the training shard",
        IDLE,
        _colocated(ends),
    )


def reshard_deepspeed_chat(ends: Route) -> SyncCost:
    """DeepSpeed-Chat's gather over every training GPU (S1)."""
    return _priced(
        ends,
        "reshard",
        "reshard-deepspeed-chat",
        "reshard in place, DeepSpeed-Chat",
        paths.reshard_deepspeed_chat(ends),
        "same pool; the whole model fits beside the training shard",
        IDLE,
        _colocated(ends),
    )


def ipc(ends: Route) -> SyncCost:
    """Gather bucket by bucket and hand each over by CUDA IPC (S2)."""
    return _priced(
        ends,
        "ipc",
        "ipc",
        "CUDA IPC, bucketed",
        paths.ipc(ends),
        "training and rollout processes share each GPU",
        IDLE,
        _colocated(ends),
    )


def ipc_per_parameter(ends: Route) -> SyncCost:
    """CUDA IPC with one remote call per parameter, as OpenRLHF does when co-located."""
    return _priced(
        ends,
        "ipc",
        "ipc-per-parameter",
        "CUDA IPC, per parameter",
        paths.ipc_per_parameter(ends),
        "training and rollout processes share each GPU",
        IDLE,
        _colocated(ends),
    )


def _apart(ends: Route) -> str | None:
    return "one GPU cannot be two ranks of one communicator" if ends.same_pool else None


def broadcast(ends: Route) -> SyncCost:
    """Gather, NCCL broadcast and load, overlapped bucket by bucket (S3)."""
    return _priced(
        ends,
        "broadcast",
        "broadcast",
        "NCCL broadcast, bucketed",
        paths.broadcast(ends),
        "the pools are disjoint and reach each other",
        BEHIND_ROLLOUT,
        _apart(ends),
    )


def broadcast_per_parameter(ends: Route) -> SyncCost:
    """One remote call and one broadcast per parameter, as OpenRLHF does."""
    return _priced(
        ends,
        "broadcast",
        "broadcast-per-parameter",
        "NCCL broadcast, per parameter",
        paths.broadcast_per_parameter(ends),
        "the pools are disjoint and reach each other",
        BEHIND_ROLLOUT,
        _apart(ends),
    )


def p2p(ends: Route) -> SyncCost:
    """Every training GPU writes its slices straight into rollout GPUs (S5)."""
    why = _apart(ends) or (None if ends.rdma or ends.one_domain else "the network has no RDMA")
    return _priced(
        ends,
        "p2p",
        "p2p",
        "point-to-point shards, RDMA",
        paths.p2p(ends),
        "RDMA, and shard maps that can be worked out for both ends",
        BEHIND_ROLLOUT,
        why,
    )


def disk(ends: Route, *, shared: bool) -> SyncCost:
    """Save a checkpoint, load it again (S6); object storage counts as shared."""
    title = "disk, shared file system" if shared else "disk, local NVMe"
    limits = "both pools mount it" if shared else "rollout runs on the nodes that saved"
    across = not ends.same_pool and not ends.one_domain
    why = "another node's NVMe cannot be read" if across and not shared else None
    return _priced(
        ends,
        "disk",
        "disk-shared" if shared else "disk-local",
        title,
        storage.disk(ends, shared=shared),
        f"any layouts; {limits}",
        "the save with the next training step, the load with the end of generation",
        why,
    )


def host(ends: Route) -> SyncCost:
    """Through pinned host memory: copy out, copy in, broadcast, reload (S4)."""
    why = None if ends.same_pool or ends.rdma else "the network has no RDMA"
    return _priced(
        ends,
        "host",
        "host",
        "host memory, parameter server",
        storage.host(ends),
        "host memory holds the model once (per pool)",
        "the copy out with training of other roles; the update with nothing",
        why,
    )


def adapters(ends: Route, *, has_adapter: bool) -> SyncCost:
    """Only the LoRA adapters move (S7)."""
    why = None if has_adapter else "the policy has no adapters: all its weights are trained"
    return _priced(
        ends,
        "lora",
        "lora",
        "LoRA adapters only",
        paths.adapters(ends),
        "an adapter-trained policy; the engine serves base and adapter",
        "generation of requests that use the old adapter",
        why,
    )


def quantised(ends: Route) -> SyncCost:
    """FP8 weights: half the bytes, and the time to quantise them (S7)."""
    small = replace(ends, rollout=replace(ends.rollout, precision="fp8"))
    supported = "fp8" in ends.target.profile.peak
    why = None if supported else f"{ends.target.profile.title} has no FP8"
    base = ipc(small) if ends.same_pool else broadcast(small)
    return replace(
        base,
        name="quantised",
        title="quantised at sync, FP8",
        available=why is None,
        why_not=why,
        limits="the rollout runs in FP8: log-probs differ from training (use a correction)",
    )


def delta(ends: Route) -> SyncCost:
    """Only the elements that changed, with their positions (S7)."""
    path: WeightPath = "ipc" if ends.same_pool else "broadcast"
    return _priced(
        ends,
        path,
        "delta",
        "changed elements only",
        paths.delta(ends),
        "few BF16 elements change (small learning rate); a snapshot in pinned host memory",
        IDLE if ends.same_pool else BEHIND_ROLLOUT,
        None,
    )
