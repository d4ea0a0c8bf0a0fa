"""Whether roles fit together, for many combinations at once: the memory ledger as sums of vectors.

Every entry of the ledger belongs to one role in one state, so bytes, mean and variance of a pool at
a moment are sums over its roles. This module writes the states of many options as arrays of
(bytes, mean, variance); `memory.ledger` adds the same entries one plan at a time, and a test holds
the two together.

Moments that can be the fullest: the start, generation, each call and the sync. Loading and unloading
hold a subset of the entries of the call they surround, so they are never fuller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rlhfsim.kernels.devices import DeviceKey
from rlhfsim.memory.residency import entry
from rlhfsim.memory.risk import Item, moments, risky
from rlhfsim.memory.role_bytes import Component, EngineBytes, RoleBytes
from rlhfsim.specs.hardware.hardware import Profile

Floats = NDArray[np.float64]
COMPONENTS: tuple[Component, ...] = (
    "weights",
    "gradients",
    "optimizer",
    "gathered",
    "buffers",
    "activations",
    "logits",
    "fragmentation",
    "framework",
    "nccl",
    "sync_buffers",
)
"""Of a role; those of the engine follow."""
ENGINE: tuple[Component, ...] = (
    "weights",
    "kv_cache",
    "profile_peak",
    "non_torch",
    "cuda_graphs",
    "framework",
    "nccl",
    "sync_buffers",
)
VIEWS = 2
"""First and last pipeline stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncBytes:
    """What a weight path adds on a GPU while a plan that uses it runs."""

    buffers: float
    """During the transfer."""
    group: float
    """NCCL buffers of the group over training and rollout, all the time."""


NO_SYNC = SyncBytes(buffers=0.0, group=0.0)


@lru_cache(maxsize=64)
def _scales(same: DeviceKey, role: str, names: tuple[Component, ...]) -> tuple[Floats, Floats]:
    """Mean and variance of each component at one byte: log-normal items scale with their size."""
    profile = same.profile
    unit = [entry(profile, role, name, 1.0) for name in names]
    pairs = [moments(Item(value=e.bytes, low=e.low, high=e.high)) for e in unit]
    return np.array([m for m, _ in pairs]), np.array([v for _, v in pairs])


def summed(profile: Profile, role: str, names: tuple[Component, ...], sizes: Floats) -> Floats:
    """(..., 3) bytes, mean and variance of sizes (..., component)."""
    mean, variance = _scales(DeviceKey(profile), role, names)
    return np.stack([sizes.sum(-1), sizes @ mean, sizes**2 @ variance], axis=-1)


def role_sizes(part: RoleBytes) -> tuple[float, ...]:
    """One row of what `role_states` reads."""
    kept, full, score, train = part.kept, part.states, part.score, part.train
    return (
        kept.weights,
        kept.gradients,
        kept.optimizer,
        full.weights,
        full.gradients,
        full.optimizer,
        score.gathered,
        score.buffers,
        score.activations,
        score.logits,
        score.fragmentation,
        train.gathered,
        train.buffers,
        train.activations,
        train.logits,
        train.fragmentation,
        part.framework,
        part.nccl,
        float(not part.recreated),
    )


def role_states(profile: Profile, sizes: Floats, sync: SyncBytes) -> Mapping[str, Floats]:
    """State -> (option, view, 3) of a role; `sizes` (option, view, :) are rows of `role_sizes`.

    States: `idle`, `score` (a forward call), `train`, `sync` (the transfer reads its weights).
    """
    kept, full, score, train = (sizes[..., a:b] for a, b in ((0, 3), (3, 6), (6, 11), (11, 16)))
    process = sizes[..., 16:18] + np.array([0.0, sync.group])
    alive = sizes[..., 18:]
    none, buffers = np.zeros_like(score), np.full((*score.shape[:2], 1), sync.buffers)
    mixed = np.concatenate([full[..., :1], kept[..., 1:]], axis=-1)

    def state(states: Floats, extra: Floats, process: Floats, transfer: Floats) -> Floats:
        sizes = np.concatenate([states, extra, process, transfer], axis=-1)
        return summed(profile, "actor", COMPONENTS, sizes)

    nothing = np.zeros_like(buffers)
    return {
        "idle": state(kept, none, process * alive, nothing),
        "score": state(mixed, score, process, nothing),
        "train": state(full, train, process, nothing),
        "sync": state(mixed, none, process, buffers),
    }


def engine_sizes(e: EngineBytes) -> tuple[float, ...]:
    """One row of what `engine_states` reads."""
    return (
        e.weights,
        e.kv_cache,
        e.profile_peak,
        e.non_torch,
        e.cuda_graphs,
        e.framework,
        float(e.sleep > 0),
        float(e.recreated),
    )


def engine_states(
    profile: Profile, sizes: Floats, sync: SyncBytes, *, with_actor: bool
) -> Mapping[str, Floats]:
    """State -> (option, view, 3) of the engine: `idle`, `ready` (after a sync), `running`, `sync`.

    Between a sync and generation the weights of a sleeping engine are mapped, its KV cache is not.
    `with_actor`: the actor of the same pool owns the transfer buffers. `sizes` (option, :) are rows
    of `engine_sizes`.
    """
    asleep, gone = sizes[:, 6:7] > 0, sizes[:, 7:8] > 0
    awake, group = sizes[:, :6], np.full((len(sizes), 1), sync.group)
    rest = np.concatenate([np.zeros((len(sizes), 3)), awake[:, 3:]], axis=1)
    mapped = np.concatenate([awake[:, :1], rest[:, 1:]], axis=1)
    idle = np.where(gone, 0.0, np.where(asleep, rest, awake))
    ready = np.where(asleep & ~gone, mapped, idle)
    found = {}
    buffers = 0.0 if with_actor else sync.buffers
    for name, held in (("idle", idle), ("ready", ready), ("running", awake), ("sync", ready)):
        moved = np.full((len(sizes), 1), buffers if name == "sync" else 0.0)
        one = summed(profile, "rollout", ENGINE, np.concatenate([held, group, moved], axis=1))
        found[name] = np.repeat(one[:, None, :], VIEWS, axis=1)
    return found


def fitting(state: Floats, usable: float, max_oom: float) -> NDArray[np.bool_]:
    """Which rows (..., view, 3) fit on a GPU of both stages, with the risk that the user accepts."""
    bytes_, mean, variance = state[..., 0], state[..., 1], state[..., 2]
    fits = (bytes_ <= usable) & ~risky(mean, variance, usable, max_oom)
    return np.asarray(fits.all(axis=-1))
