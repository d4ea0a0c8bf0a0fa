"""Who sits in GPU memory when: the roles of a pool, and the moments that one step takes them through.

A step starts where the previous one ended: weights synced, the engine's KV cache not yet mapped.
Then wake, generate, sleep, each scoring and training call between the moves that bring its role in
and out, and the sync, where training weights, rollout weights and transfer buffers are all held
at once (M9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rlhfsim.frozen import frozen
from rlhfsim.memory.components import (
    ENGINE,
    NO_SYNC,
    ROLE,
    EngineState,
    MemoryEntry,
    RoleState,
    Rows,
    Sizes,
    SyncBytes,
    engine_components,
    entry,
    role_components,
)
from rlhfsim.memory.framework_sync import ON_ONE_GPU, framework_bytes
from rlhfsim.memory.kv_cache import EngineBytes, engine_bytes
from rlhfsim.memory.role_bytes import RoleBytes, most_host, role_memory, software_of
from rlhfsim.memory.states import Stage, lora_params
from rlhfsim.memory.transfer import Arrival, transfer_bytes
from rlhfsim.specs.frameworks.runs import OWN, engine_of
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS, WeightPath
from rlhfsim.specs.quantities import BYTES_PER_ELEMENT
from rlhfsim.specs.workload.dataflow import Call, dataflow
from rlhfsim.specs.workload.roles import ROLES
from rlhfsim.specs.workload.workload import Lora, Workload

# --- what the roles hold --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolBytes:
    """Everything that sits in one pool, one row a pipeline stage."""

    profile: Profile
    stages: int
    """Pipeline stages that can be the fullest."""
    roles: dict[str, Rows]
    """Rows of `components.ROLE`."""
    engine: Rows | None
    """Rows of `components.ENGINE`."""
    sync: SyncBytes
    """On a GPU of this pool."""
    host: float
    """Host bytes for each GPU at most, processes included."""
    swap_host: float = 0.0
    """The actor's weights among these, there while a swapped reference runs."""


def profile_of(placement: Placement, cluster: Cluster, pool: str) -> Profile:
    """The profile of the nodes under a pool."""
    return cluster.node_groups[placement.pool(pool).hardware].profile


def role_in_plan(
    models: Models,
    placement: Placement,
    workload: Workload,
    profile: Profile,
    role: str,
    stage: Stage = "only",
    software: Software | None = None,
    engine: str = "",
) -> RoleBytes:
    """What a role of a plan holds on a GPU of `stage`."""
    placed = placement.trainers[role]
    memory = role_memory(
        models,
        role,
        workload,
        backend=placement.backend,
        profile=profile,
        beside_actor=role == "reference" and placement.together("actor", role),
        software=software,
        engine=engine,
    )
    return memory.of(placed, stage if placed.layout.pp > 1 else "only")


def engine_in_plan(models: Models, placement: Placement, workload: Workload, profile: Profile) -> EngineBytes:
    """The rollout engine of a plan; with `weight_path: none` it uses the training weights."""
    role = placement.rollout
    assert role is not None
    shared = 0.0
    if placement.weight_path == "none" and role.pool == placement.actor.pool:
        stage = _stages(placement, role.pool)[0]
        shared = role_in_plan(models, placement, workload, profile, "actor", stage).kept.weights
    return engine_bytes(models.actor, role, profile=profile, shared_weights=shared)


def _stages(placement: Placement, pool: str) -> tuple[Stage, ...]:
    """Pipeline stages to look at in a pool; one where nobody has a pipeline."""
    piped = any(p.layout.pp > 1 for p in placement.trainers.values() if p.pool == pool)
    return ("first", "last") if piped else ("only",)


def sync_bytes(
    model: ModelSpec,
    path: WeightPath,
    backend: Backend,
    lora: Lora | None,
    profile: Profile,
    *,
    framework: str | None = None,
    shared: bool = False,
) -> SyncBytes:
    """What a weight path adds: buffers, what arrives, and its NCCL group.

    `shared`: actor and rollout are on the same GPUs. Other frameworks than ours have a bucket, or
    the largest tensor where that is larger, on either side, if `memory.framework_sync` does not say more.
    """
    rules = WEIGHT_PATHS[path]
    if not rules.copies:
        return NO_SYNC
    group = profile["nccl_bytes"] if rules.communicator else 0.0
    host = BYTES_PER_ELEMENT["bf16"] * model.num_params if rules.changes_only else 0.0
    adapters = 2.0 * lora_params(model, lora.rank) if rules.adapters_only and lora else None
    transport = rules.transports.get("same GPU" if shared else "same node")
    if framework != OWN or transport is None:
        bucket = profile["sync_bucket_bytes"]
        held = framework_bytes(framework, path, model, backend, bucket, lora)
        if held is None:
            width = 2.0 if backend != "fsdp2" else 4.0
            largest = width * max(model.params_embedding, model.params_expert)
            buffers = max(bucket, largest) if adapters is None else adapters
            trainer, engine = (
                (1, 0) if adapters is not None or not shared else ON_ONE_GPU.get(framework or "", (1, 0))
            )
            cloned = (Arrival(engine * buffers, 0.0),) * (engine > 0)
            return SyncBytes(buffers=trainer * buffers, group=group, host=host, arrivals=cloned)
        return SyncBytes(buffers=held.sent, group=group, gathered=held.group, arrivals=held.arrivals)
    if adapters is not None:  # merged on the host, from which modules are made
        arrivals = transfer_bytes(model, "host", 0.0).arrivals
        return SyncBytes(buffers=adapters, group=group, arrivals=arrivals)
    held = transfer_bytes(model, "host" if rules.changes_only else transport, profile["sync_bucket_bytes"])
    return SyncBytes(buffers=held.sent, group=group, host=host, gathered=held.group, arrivals=held.arrivals)


def pool_bytes(
    models: Models, placement: Placement, workload: Workload, cluster: Cluster, pool: str
) -> PoolBytes:
    """Everything that sits in `pool`."""
    software = software_of(
        placement.software,
        cluster.framework,
        placement.backend,
        packing=workload.packing,
        algorithm=workload.algorithm,
    )
    profile, stages = profile_of(placement, cluster, pool), _stages(placement, pool)
    engine_name = engine_of(cluster.framework)
    placed = placement.roles
    here = [r for r in models.roles if r in placed and placed[r].pool == pool]
    roles = {
        r: [role_in_plan(models, placement, workload, profile, r, s, software, engine_name) for s in stages]
        for r in here
    }
    host = sum(most_host(parts) for parts in roles.values())
    processes = sum(parts[0].framework > 0 for parts in roles.values())
    engine = None
    if "rollout" in placed and placed["rollout"].pool == pool and workload.generates:
        held = engine_in_plan(models, placement, workload, profile)
        engine = np.array([held] * len(stages), dtype=ENGINE)
        host, processes = host + held.host, processes + 1
    sync = sync_bytes(
        models.actor,
        placement.weight_path,
        placement.backend,
        workload.lora,
        profile,
        framework=cluster.framework,
        shared=placement.together("actor", "rollout"),
    )
    host += sync.host if placement.actor.pool == pool else 0.0
    reference = placement.role("reference")
    swapped = "reference" in roles and reference is not None and reference.residency == "swapped"
    swap_host = max(part.states.host for part in roles["reference"]) if swapped else 0.0
    return PoolBytes(
        profile=profile,
        stages=len(stages),
        roles={r: np.array(parts, dtype=ROLE) for r, parts in roles.items()},
        engine=engine,
        sync=sync,
        host=host + processes * profile["host_process_bytes"],
        swap_host=swap_host,
    )


# --- the moments of one step ----------------------------------------------------------------------


@frozen
class Moment:
    """A named state of some pools: which role is loaded for what, and what the engine does."""

    name: str
    pools: tuple[str, ...]
    role: str | None = None
    """Role whose states are in GPU memory for a call."""
    state: RoleState = "idle"
    """What that role is loaded for."""
    engine: EngineState = "idle"
    moving: bool = False
    """Only moves: a subset of what the call holds that it surrounds, so never the fullest moment."""

    def of(self, role: str) -> str:
        """State of a role, as `components.role_sums` and `engine_sums` name it."""
        if role == "rollout":
            return "sync" if self.state == "sync" else self.engine
        return self.state if role == self.role else "idle"


def plan_moments(placement: Placement, workload: Workload) -> Iterator[Moment]:
    """The moments of one step of a plan, in the order of the dataflow."""

    def moves(role: str, *, trains: bool) -> bool:
        placed = placement.trainers[role]
        return placed.residency != "resident" or (placed.offload_between and trains)

    pools = tuple(p.name for p in placement.pools)
    homes = on_weights({role: placed.pool for role, placed in placement.roles.items()}, workload)
    after_sync: EngineState = "idle" if placement.weight_path == "none" else "ready"
    return moments(dataflow(workload), homes, pools, moves=moves, after_sync=after_sync)


def on_weights(homes: Mapping[str, str], workload: Workload) -> dict[str, str]:
    """The homes of roles that have weights of their own: with adapters a reference runs on the actor's."""
    shared = workload.base_is_reference and homes.get("reference") == homes["actor"]
    return {role: home for role, home in homes.items() if role != "reference" or not shared}


def moments(
    calls: Iterable[Call],
    homes: Mapping[str, str],
    pools: tuple[str, ...],
    *,
    moves: Callable[..., bool],
    after_sync: EngineState = "ready",
) -> Iterator[Moment]:
    """The moments of one step of roles in their `homes`.

    `moves(role, trains=)`: whether a call is surrounded by moves of its role. A reference without a
    place runs on the policy's weights (LoRA), and so does generation without a rollout.
    """
    engine = after_sync
    yield Moment(name="start", pools=pools, engine=engine)
    for call in calls:
        if call.kind == "generate" and "rollout" in homes:
            engine = "idle"
            yield Moment(name=call.name, pools=(homes["rollout"],), engine="running")
            yield Moment(name=f"{call.name}.unload", pools=(homes["rollout"],), moving=True)
        elif call.kind == "sync" and "rollout" in homes:
            engine, here = after_sync, tuple(dict.fromkeys((homes["actor"], homes["rollout"])))
            yield Moment(name=call.name, pools=here, role="actor", state="sync", engine=engine)
            yield Moment(name=f"{call.name}.unload", pools=here, engine=engine, moving=True)
        elif call.kind != "sync" and call.role != "rules":
            role, trains = call.role if call.role in homes else "actor", call.kind == "train"
            state: RoleState = "train" if trains else "forward"
            runs = Moment(name=call.name, pools=(homes[role],), role=role, state=state, engine=engine)
            if not moves(role, trains=trains):
                yield runs
                continue
            yield replace(runs, name=f"{call.name}.load", moving=True)
            yield runs
            yield Moment(name=f"{call.name}.unload", pools=runs.pools, engine=engine, moving=True)
    yield Moment(name="end", pools=pools, engine=engine)


def peak_moments(calls: Iterable[Call], group: Iterable[str], workload: Workload) -> list[Moment]:
    """The moments that can be the fullest of a pool with these roles; the others sit elsewhere.

    The end of a step is its start.
    """
    here, elsewhere = "here", "elsewhere"
    homes = on_weights(dict.fromkeys(ROLES, elsewhere) | dict.fromkeys(group, here), workload)
    every = moments(calls, homes, (here,), moves=lambda *_, **__: False)
    return [m for m in every if here in m.pools and not m.moving and m.name != "end"]


def entries(held: PoolBytes, moment: Moment) -> list[tuple[MemoryEntry, ...]]:
    """What is in GPU memory at `moment`, one tuple of entries a pipeline stage."""
    named: dict[str, Sizes] = {
        role: role_components(
            rows,
            moment.state if role == moment.role else "idle",
            moving=moment.moving,
            sync=held.sync if role == "actor" else NO_SYNC,
        )
        for role, rows in held.roles.items()
    }
    if held.engine is not None:
        syncs, alone = moment.state == "sync" and not moment.moving, "actor" not in held.roles
        named["rollout"] = engine_components(
            held.engine, moment.engine, sync=held.sync, syncs=syncs, alone=alone
        )
    sizes = [(role, name, size.tolist()) for role in named for name, size in named[role].items()]
    return [
        tuple(entry(held.profile, role, name, size[i]) for role, name, size in sizes if size[i] > 0)
        for i in range(held.stages)
    ]
