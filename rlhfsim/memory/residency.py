"""Who sits in GPU memory when: the roles of a pool, and the states that one step takes them through.

A step starts where the previous one ended: weights synced, the engine's KV cache not yet mapped.
Then wake, generate, sleep, each scoring and training call between the moves that bring its role in
and out, and the sync, where training weights, rollout weights and transfer buffers stand side by
side (M9).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlhfsim.memory.role_bytes import (
    DEFAULT_STACK,
    SPREAD,
    Component,
    EngineBytes,
    Extra,
    RoleBytes,
    Stack,
    batch_of,
    engine_bytes,
    role_bytes,
)
from rlhfsim.memory.states import Stage, lora_params
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.placement import Placement, RolePlacement
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS, WeightPath
from rlhfsim.specs.workload.dataflow import TRAINED, Call, dataflow
from rlhfsim.specs.workload.workload import Lora, Workload

ROLES = ("actor", "critic", "reference", "reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Bytes of one component of one role on the fullest GPU of a pool."""

    role: str
    """`rollout` is the inference engine."""
    component: Component
    bytes: float
    low: float
    """P10."""
    high: float
    """P90."""


# --- what the roles hold --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBytes:
    """Everything that sits in one pool, for one choice of pipeline stage."""

    name: str
    profile: Profile
    roles: dict[str, RoleBytes]
    engine: EngineBytes | None
    sync: float
    """Transfer buffers of a weight sync on a GPU of this pool."""
    sync_group: float
    """NCCL buffers of the group that spans training and rollout; 0 without one."""


def profile_of(placement: Placement, cluster: Cluster, pool: str) -> Profile:
    """The profile of the nodes under a pool."""
    return cluster.node_groups[placement.pool(pool).hardware].profile


def role_of(placement: Placement, role: str) -> RolePlacement | None:
    """The placement of a role; a reference without one runs on the policy's weights (LoRA)."""
    placed = getattr(placement, role)
    assert placed is None or isinstance(placed, RolePlacement)
    return placed


def shares_weights(models: Models, placement: Placement, workload: Workload, role: str) -> bool:
    """Whether a reference is the frozen base of the adapters that are trained in its pool."""
    placed = placement.reference
    return (
        role == "reference"
        and placed is not None
        and workload.lora is not None
        and placed.pool == placement.actor.pool
        and models.reference == models.actor
    )


def role_in_plan(
    models: Models,
    placement: Placement,
    workload: Workload,
    profile: Profile,
    role: str,
    stage: Stage = "only",
    stack: Stack = DEFAULT_STACK,
) -> RoleBytes:
    """What a role of a plan holds on a GPU of `stage`; the search's fast check uses it alone."""
    placed = role_of(placement, role)
    assert placed is not None
    together = role == "reference" and placed.pool == placement.actor.pool
    return role_bytes(
        models.of(role),
        placed,
        backend=placement.backend,
        profile=profile,
        batch=batch_of(workload),
        trained=role in TRAINED,
        stage=stage if placed.layout.pp > 1 else "only",
        optimizer=workload.optimizer,
        lora=workload.lora if role == "actor" else None,
        shares_weights=shares_weights(models, placement, workload, role),
        shares_process=together and placement.backend != "deepspeed",
        stack=stack,
    )


def engine_in_plan(models: Models, placement: Placement, workload: Workload, profile: Profile) -> EngineBytes:
    """The rollout engine of a plan; with `weight_path: none` it uses the training weights."""
    role = placement.rollout
    assert role is not None
    shared = 0.0
    if placement.weight_path == "none" and role.pool == placement.actor.pool:
        actor = role_in_plan(
            models, placement, workload, profile, "actor", stages_of(placement, role.pool)[0]
        )
        shared = actor.kept.weights
    return engine_bytes(models.actor, role, profile=profile, shared_weights=shared)


def stages_of(placement: Placement, pool: str) -> tuple[Stage, ...]:
    """Pipeline stages to look at in a pool; one where nobody has a pipeline."""
    roles = [role_of(placement, r) for r in ROLES]
    piped = any(s is not None and s.pool == pool and s.layout.pp > 1 for s in roles)
    return ("first", "last") if piped else ("only",)


def _present(models: Models, placement: Placement, pool: str) -> list[str]:
    roles = {r: role_of(placement, r) for r in ROLES if getattr(models, r) is not None}
    return [r for r, s in roles.items() if s is not None and s.pool == pool]


def _sync_bytes(
    models: Models, placement: Placement, workload: Workload, pool: str, profile: Profile
) -> float:
    """Buffers of the weight path on one GPU of a pool that takes part."""
    rollout = placement.rollout
    if rollout is None or pool not in (rollout.pool, placement.actor.pool):
        return 0.0
    path, backend = placement.weight_path, placement.backend
    return sync_buffers(models.actor, path, backend, workload.lora, profile)


def sync_buffers(
    model: ModelSpec, path: WeightPath, backend: Backend, lora: Lora | None, profile: Profile
) -> float:
    """Buffers of a weight path on one GPU: a bucket, or the largest tensor where that is larger."""
    rules = WEIGHT_PATHS[path]
    if not rules.copies:
        return 0.0
    if rules.adapters_only and lora:
        return 2.0 * lora_params(model, lora.rank)
    width = 2.0 if backend != "fsdp2" else 4.0
    return max(profile["sync_bucket_bytes"], width * max(model.params_embedding, model.params_expert))


def sync_group(path: WeightPath, profile: Profile) -> float:
    """NCCL buffers of a group that spans training and rollout; 0 without one."""
    return profile["nccl_bytes"] if WEIGHT_PATHS[path].communicator else 0.0


def pool_bytes(
    models: Models,
    placement: Placement,
    workload: Workload,
    cluster: Cluster,
    pool: str,
    stage: Stage,
    stack: Stack = DEFAULT_STACK,
) -> PoolBytes:
    """Everything that sits in `pool` on a GPU of `stage`."""
    profile = profile_of(placement, cluster, pool)
    rollout = placement.rollout
    here = rollout is not None and rollout.pool == pool and workload.generates
    return PoolBytes(
        name=pool,
        profile=profile,
        roles={
            r: role_in_plan(models, placement, workload, profile, r, stage, stack)
            for r in _present(models, placement, pool)
        },
        engine=engine_in_plan(models, placement, workload, profile) if here else None,
        sync=_sync_bytes(models, placement, workload, pool, profile),
        sync_group=sync_group(placement.weight_path, profile),
    )


# --- the states of one step -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Everything that sits in `pool` on a GPU of `stage`."""

    """A named state: which role is loaded for what, and what the engine does."""

    name: str
    pools: tuple[str, ...]
    loaded: str | None = None
    """Role whose states are in GPU memory for a call."""
    kind: str = ""
    """`train`, `forward`, `sync`, or empty while it is only loaded."""
    trains: bool = False
    """The loaded role brings its optimizer."""
    engine: str = "idle"
    """`idle`, `weights` (awake without KV cache) or `running`."""


def moments(placement: Placement, workload: Workload) -> Iterator[Moment]:
    """The states of one step in the order of the dataflow."""
    everywhere = tuple(p.name for p in placement.pools)
    engine = _after_sync(placement)
    yield Moment(name="start", pools=everywhere, engine=engine)
    for call in dataflow(workload):
        if call.role == "rules":
            continue
        if call.kind == "generate" and placement.rollout is None:
            yield from _call_moments(placement, call, engine)  # the policy's own modules generate
        elif call.kind == "generate":
            assert placement.rollout is not None
            pools = (placement.rollout.pool,)
            yield Moment(name=call.name, pools=pools, engine="running")
            engine = "idle"
            yield Moment(name=f"{call.name}.unload", pools=pools, engine=engine)
        elif call.kind == "sync" and placement.rollout is None:
            continue
        elif call.kind == "sync":
            yield from _syncmoments(placement)
            engine = _after_sync(placement)
        else:
            yield from _call_moments(placement, call, engine)
    yield Moment(name="end", pools=everywhere, engine=engine)


def _after_sync(placement: Placement) -> str:
    rollout = placement.rollout
    if rollout is None or rollout.residency == "recreated" or placement.weight_path == "none":
        return "idle"
    return "weights" if rollout.sleep else "running"


def _call_moments(placement: Placement, call: Call, engine: str) -> Iterator[Moment]:
    role = call.role if role_of(placement, call.role) is not None else "actor"
    placed = role_of(placement, role)
    assert placed is not None
    trains = call.kind == "train"
    moves = placed.residency != "resident" or (placed.offload_between and trains)
    pools = (placed.pool,)
    if moves:
        yield Moment(name=f"{call.name}.load", pools=pools, loaded=role, trains=trains, engine=engine)
    kind = "train" if trains else "forward"
    yield Moment(name=call.name, pools=pools, loaded=role, kind=kind, trains=trains, engine=engine)
    if moves:
        yield Moment(name=f"{call.name}.unload", pools=pools, engine=engine)


def _syncmoments(placement: Placement) -> Iterator[Moment]:
    assert placement.rollout is not None
    pools = tuple(dict.fromkeys((placement.actor.pool, placement.rollout.pool)))
    engine = _after_sync(placement)
    yield Moment(name="actor.sync", pools=pools, loaded="actor", kind="sync", engine=engine)
    yield Moment(name="actor.sync.unload", pools=pools, engine=engine)


def entries(held: PoolBytes, moment: Moment) -> Iterator[Entry]:
    """What is in GPU memory at `moment`, role by role."""
    for role, part in held.roles.items():
        mine = moment.loaded == role
        group = held.sync_group if role == "actor" else 0.0
        yield from _role_entries(held.profile, role, part, moment if mine else None, group)
        if mine and moment.kind == "sync":
            yield entry(held.profile, role, "sync_buffers", held.sync)
    if held.engine:
        yield from _engine_entries(held.profile, held.engine, moment)
        if held.sync_group:
            yield entry(held.profile, "rollout", "nccl", held.sync_group)
        if moment.kind == "sync" and "actor" not in held.roles:
            yield entry(held.profile, "rollout", "sync_buffers", held.sync)


def _role_entries(
    profile: Profile, role: str, part: RoleBytes, moment: Moment | None, group: float
) -> Iterator[Entry]:
    kept, states = part.kept, part.states
    weights = states.weights if moment else kept.weights
    optimizer = states.optimizer if moment and moment.trains else kept.optimizer
    gradients = states.gradients if moment and moment.kind == "train" else kept.gradients
    kind = moment.kind if moment else ""
    extra = {"train": part.train, "forward": part.score}.get(kind, Extra())
    alive = moment is not None or not part.recreated
    sizes: dict[Component, float] = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "gathered": extra.gathered,
        "buffers": extra.buffers,
        "activations": extra.activations,
        "logits": extra.logits,
        "fragmentation": extra.fragmentation,
        "framework": part.framework if alive else 0.0,
        "nccl": part.nccl + group if alive else 0.0,
    }
    for component, size in sizes.items():
        if size > 0:
            yield entry(profile, role, component, size)


def _engine_entries(profile: Profile, engine: EngineBytes, moment: Moment) -> Iterator[Entry]:
    running = moment.engine == "running" or not (engine.sleep or engine.recreated)
    weights = running or moment.engine == "weights"
    if engine.recreated and not weights:
        return
    sizes: dict[Component, float] = {
        "weights": engine.weights if weights else 0.0,
        "kv_cache": engine.kv_cache if running else 0.0,
        "profile_peak": engine.profile_peak if running else 0.0,
        "non_torch": engine.non_torch,
        "cuda_graphs": engine.cuda_graphs,
        "framework": engine.framework,
    }
    for component, size in sizes.items():
        if size > 0:
            yield entry(profile, "rollout", component, size)


def entry(profile: Profile, role: str, component: Component, size: float) -> Entry:
    """An entry with the interval of its component's coefficient.

    Inside the engine's share nothing is uncertain: what weights leave, the KV cache takes.
    """
    name = SPREAD.get(component)
    inside = role == "rollout" and component in ("weights", "non_torch")
    if name is None or inside:
        return Entry(role=role, component=component, bytes=size, low=size, high=size)
    c = profile.coefficient(name)
    if c.value == 0:  # hardware without it (CUDA graphs on a CPU)
        return Entry(role=role, component=component, bytes=size, low=size, high=size)
    if component == "fragmentation":  # the coefficient is 1 + share
        low, high = (c.low - 1) / (c.value - 1), (c.high - 1) / (c.value - 1)
    else:
        low, high = c.low / c.value, c.high / c.value
    return Entry(role=role, component=component, bytes=size, low=size * low, high=size * high)
