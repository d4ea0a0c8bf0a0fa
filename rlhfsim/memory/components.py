"""Bytes by component of a role and of the engine at a moment: one table for a plan and for a million options.

Every size is a column of an array (dtypes `ROLE` and `ENGINE`), one row an option of the search or a
pipeline stage of a plan, so a single plan is an array of one. The ledger and the simulator's timeline
read entries from it (`memory.residency.entries`); the search adds up vectors of (bytes, mean, variance).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlhfsim.frozen import frozen
from rlhfsim.kernels.devices import DeviceKey
from rlhfsim.memory.kv_cache import EngineBytes
from rlhfsim.memory.risk import Item, moments
from rlhfsim.memory.role_bytes import Extra, RoleBytes, RoleKind, RoleMemory, kept_states
from rlhfsim.memory.states import Stage, States
from rlhfsim.memory.transfer import Arrival
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.placement.layout_columns import Layouts
from rlhfsim.specs.placement.placement import Rest

Floats = NDArray[np.float64]
Rows = NDArray[np.void]
"""Rows of `ROLE` or `ENGINE`."""
Sizes = dict[str, Any]
"""Bytes by component, each an array of the shape of the rows."""
SPREAD: dict[str, str] = {
    "weights": "state_spread",
    "gradients": "state_spread",
    "optimizer": "state_spread",
    "gathered": "buffer_spread",
    "buffers": "buffer_spread",
    "sync_buffers": "buffer_spread",
    "activations": "activation_spread",
    "logits": "logits_spread",
    "cuda_graphs": "cuda_graph_bytes",
    "retained": "sleeping_engine_bytes",
    "framework": "framework_bytes",
    "nccl": "nccl_bytes",
    "fragmentation": "fragmentation",
}
"""Coefficient whose interval a component takes over; one that is absent is exact by construction."""
STATES = ("weights", "gradients", "optimizer")
ROLE_COMPONENTS = (*STATES, *Extra._fields, "framework", "nccl", "sync_buffers")
"""gathered: ZeRO-3/FSDP weights of running layers; buffers: gradients before reduction; framework:
context."""
RUNNING = ("weights", "kv_cache", "profile_peak", "non_torch", "cuda_graphs", "framework")
"""Components of an engine that generates; profile_peak: what it reserves for its own activations."""
ENGINE_COMPONENTS = (*RUNNING, "retained", "nccl", "sync_buffers")
_STATES, _EXTRA = ([(name, float) for name in kind._fields] for kind in (States, Extra))
_PARTS = {"states": _STATES, "kept": _STATES, "score": _EXTRA, "train": _EXTRA, "recreated": bool}
ROLE = np.dtype([(name, _PARTS.get(name, float)) for name in RoleBytes._fields])
"""A row of `RoleBytes`."""
ENGINE = np.dtype([(name, bool if name == "recreated" else float) for name in EngineBytes._fields])
"""A row of `EngineBytes`."""
ENDS: tuple[Stage, ...] = ("first", "last")
STAGES = len(ENDS)
"""First and last pipeline stage, the second axis of the search's options."""

RoleState = Literal["idle", "forward", "train", "sync"]
"""What a role is in GPU memory for: nothing, a forward call, training, the transfer of its weights."""
EngineState = Literal["idle", "ready", "running"]
"""`ready`: after a sync the weights of an engine that sleeps are mapped, its KV cache is not."""


@frozen
class SyncBytes:
    """What a weight path adds on a GPU while a plan that uses it runs."""

    buffers: float
    """During the transfer, at a trainer; without `arrivals` also at an engine on GPUs of its own."""
    group: float
    """NCCL buffers of the group over training and rollout, all the time."""
    host: float = 0.0
    """Host memory per node of the actor: a copy of what was last sent, where only changes travel."""
    gathered: float = 0.0
    """Full tensors at a trainer that holds shards, in addition to its buffers."""
    arrivals: tuple[Arrival, ...] = ()
    """What an engine holds of what arrives."""


NO_SYNC = SyncBytes(buffers=0.0, group=0.0)


def stage_rows(memory: RoleMemory, layouts: Layouts, *, swapped: bool) -> Rows:
    """Rows (layout, stage) of what a role holds in each layout; what it keeps between calls is left open."""
    rows = np.zeros((len(layouts), STAGES), dtype=ROLE)
    if memory.borrowed:
        return rows
    for column, stage in zip(rows.T, ENDS, strict=True):
        held = memory.each(layouts, stage, swapped=swapped)
        for name, part in held._asdict().items():
            if isinstance(part, States | Extra):
                for field, size in part._asdict().items():
                    column[name][field] = size
            else:
                column[name] = part
    return rows


def training_bytes(rows: Rows) -> Floats:
    """GPU bytes at the peak of a training call, see `RoleBytes.training`."""
    parts = [rows["states"][name] for name in STATES] + [rows["train"][name] for name in Extra._fields]
    return np.asarray(sum(parts) + rows["framework"] + rows["nccl"])


def rested(rows: Rows, rests: Sequence[Rest], rest: NDArray[np.integer[Any]], kind: RoleKind) -> Rows:
    """Rows (option, stage) of layouts, whatever rests between calls, with what each role keeps then; `rest`:
    which of `rests` an option has."""
    rows = rows.copy()
    for number, one in enumerate(rests):
        same = rest == number
        full: Any = rows["states"][same]
        kept = kept_states(States(*(full[n] for n in States._fields)), one, kind)
        for name, size in zip(States._fields, kept, strict=True):
            rows["kept"][name][same] = size
        rows["recreated"][same] = one.residency == "recreated"
    return rows


def host_of(rows: Rows) -> Floats:
    """Host bytes for each GPU of the node with the fullest pipeline stages of roles (option, stage).

    A stage is taken to fill its node; where several are on one, theirs is less than this.
    """
    return np.asarray((rows["states"]["host"] + rows["kept"]["host"]).max(axis=-1))


def role_components(
    rows: Rows, state: RoleState, *, moving: bool = False, sync: SyncBytes = NO_SYNC
) -> Sizes:
    """Bytes of roles (dtype `ROLE`) in a state; `moving`: they only come or go for it."""
    full, kept, called = rows["states"], rows["kept"], state != "idle"
    alive = called | ~rows["recreated"]
    sizes: Sizes = {
        "weights": (full if called else kept)["weights"],
        "gradients": kept["gradients"] if state != "train" else full["between" if moving else "gradients"],
        "optimizer": (full if state == "train" else kept)["optimizer"],
    }
    if state in ("forward", "train") and not moving:
        extra = rows["train" if state == "train" else "score"]
        sizes |= {name: extra[name] for name in Extra._fields}
    sizes |= {"framework": rows["framework"] * alive, "nccl": (rows["nccl"] + sync.group) * alive}
    if state == "sync" and not moving:
        sizes["sync_buffers"] = sync.buffers + sync.gathered * (rows["score"]["gathered"] > 0)
    return sizes


def engine_components(
    rows: Rows, state: EngineState, *, sync: SyncBytes = NO_SYNC, syncs: bool = False, alone: bool = False
) -> Sizes:
    """Bytes of engines (dtype `ENGINE`) in a state; `syncs`: weights arrive; `alone`: no trainer is there.

    Asleep an engine keeps context, libraries, graphs and `retained`: pools that lie in its share while it is
    awake. One that is created again keeps nothing.
    """
    gone = rows["recreated"]
    awake = (state == "running") | ~(gone | (rows["sleep"] > 0))
    mapped = awake | ~gone if state == "ready" else awake
    present = awake | ~gone
    held = {"weights": mapped, "kv_cache": awake, "profile_peak": awake}
    sizes: Sizes = {name: rows[name] * held.get(name, present) for name in RUNNING}
    sizes["retained"] = rows["retained"] * (present & ~awake)
    sizes["nccl"] = np.full(rows.shape, sync.group)
    received = [np.full(rows.shape, sync.buffers * alone)] if not sync.arrivals else []
    received += [arrived + module * rows["cut"] for arrived, module in sync.arrivals]
    sizes["sync_buffers"] = np.max(received, axis=0) * syncs
    return sizes


# --- sums over components -------------------------------------------------------------------------


@frozen
class MemoryEntry:
    """Bytes of one component of one role on the fullest GPU of a pool."""

    role: str
    """`rollout` is the inference engine."""
    component: str
    bytes: float
    low: float
    """P10."""
    high: float
    """P90."""


def entry(profile: Profile, role: str, component: str, size: float) -> MemoryEntry:
    """An entry with the interval of its component's coefficient.

    Inside the engine's share nothing is uncertain: what weights leave, the KV cache takes.
    """
    name = SPREAD.get(component)
    inside = role == "rollout" and component in ("weights", "non_torch")
    low = high = 1.0
    if name is not None and not inside:
        c = profile.coefficient(name)
        if component == "fragmentation":  # the coefficient is 1 + share
            low, high = (c.low - 1) / (c.value - 1), (c.high - 1) / (c.value - 1)
        elif c.value:  # 0: hardware without it (CUDA graphs on a CPU)
            low, high = c.low / c.value, c.high / c.value
    return MemoryEntry(role=role, component=component, bytes=size, low=size * low, high=size * high)


@lru_cache(maxsize=64)
def _scales(same: DeviceKey, role: str, names: tuple[str, ...]) -> tuple[Floats, Floats]:
    """Mean and variance of each component at one byte: log-normal items scale with their size."""
    units = [entry(same.profile, role, name, 1.0) for name in names]
    pairs = [moments(Item(e.bytes, e.low, e.high)) for e in units]
    return np.array([m for m, _ in pairs]), np.array([v for _, v in pairs])


def _summed(profile: Profile, role: str, names: tuple[str, ...], sizes: Sizes) -> Floats:
    """(..., 3) bytes, mean and variance of the sum of all components."""
    means, variances = _scales(DeviceKey(profile), role, names)
    total = np.zeros((*np.shape(sizes["weights"]), 3))
    for name, size in sizes.items():
        mean, variance = means[names.index(name)], variances[names.index(name)]
        total[..., 0] += size
        total[..., 1] += mean * size
        if variance:
            total[..., 2] += variance * size**2
    return total


def role_sums(
    profile: Profile,
    rows: Rows,
    sync: SyncBytes,
    states: Iterable[RoleState] = ("idle", "forward", "train", "sync"),
) -> Mapping[str, Floats]:
    """State -> (option, stage, 3) bytes, mean and variance of a role; `rows` (option, stage) of `ROLE`."""
    return {
        s: _summed(profile, "actor", ROLE_COMPONENTS, role_components(rows, s, sync=sync)) for s in states
    }


def engine_sums(profile: Profile, rows: Rows, sync: SyncBytes, *, with_actor: bool) -> Mapping[str, Floats]:
    """State -> (option, stage, 3) of the engine, `sync` included; `rows` (option,) of `ENGINE`.

    `with_actor`: the actor of the same pool owns the buffers that are sent.
    """
    states: tuple[EngineState, ...] = ("idle", "ready", "running")
    held: dict[str, Sizes] = {s: engine_components(rows, s, sync=sync) for s in states}
    held["sync"] = engine_components(rows, "ready", sync=sync, syncs=True, alone=not with_actor)
    sums = {s: _summed(profile, "rollout", ENGINE_COMPONENTS, sizes) for s, sizes in held.items()}
    return {s: np.repeat(one[:, None, :], STAGES, axis=1) for s, one in sums.items()}
