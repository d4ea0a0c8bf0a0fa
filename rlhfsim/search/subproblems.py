"""Pools of frames, kept between frames: least numbers, tables of combinations, and placements from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhfsim.memory.residency import sync_buffers, sync_group
from rlhfsim.search.bound import FIXED, Numbers, head_seconds, learner_seconds, objective_bound
from rlhfsim.search.dominance import lean
from rlhfsim.search.fit import NO_SYNC, SyncBytes
from rlhfsim.search.options import Key, SeatTable
from rlhfsim.search.pools import ENDS, HOST, Corner, PoolTable, pool_table
from rlhfsim.search.pricer import Pricer
from rlhfsim.search.request import Request
from rlhfsim.search.space import Family, Frame, freeing
from rlhfsim.search.weight_paths import Paths
from rlhfsim.specs.hardware.hardware import Pool
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.step.timetable import STREAM_CHUNKS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
BEAM = 300
"""Parts of a pool that the dive carries from seat to seat."""
MOST = 2_000_000
"""Combinations of the pools of a frame that are compared at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Least:
    """The least that a pool can contribute, seat by seat."""

    numbers: Floats
    legal: int
    """Combinations of its seats."""
    fitting: int
    """Those whose seats fit by themselves."""


class Corners:
    """Everything that frames have in common."""

    def __init__(self, request: Request, models: Models, pricer: Pricer) -> None:
        """Nothing is known yet."""
        self.request, self.models, self.pricer = request, models, pricer
        self._least: dict[tuple[object, ...], Least] = {}
        self._pools: dict[tuple[object, ...], PoolTable] = {}
        self._lean: dict[tuple[object, ...], SeatTable] = {}
        self.paths = Paths(request, models, pricer.paths)

    # --- keys -------------------------------------------------------------------------------------

    def keys(self, wanted: Sequence[Family], sizes: Sequence[Ints]) -> Iterator[Key]:
        """Every seat that these frames need a price for."""
        seen: set[tuple[object, ...]] = set()
        for family, splits in zip(wanted, sizes, strict=True):
            for i, group in enumerate(family.groups):
                for gpus in np.unique(splits[:, i]).tolist():
                    corner = (
                        group,
                        family.hardware[i],
                        gpus,
                        family.path == "lora",
                        family.schedule.double_buffered,
                    )
                    if corner not in seen:
                        seen.add(corner)
                        yield from self._keys(family, i, gpus)

    def _keys(self, family: Family, index: int, gpus: int) -> list[Key]:
        group = family.groups[index]
        return [
            Key(
                seat=seat, hardware=family.hardware[index], gpus=gpus,
                beside_actor=seat == "reference" and "actor" in group,
                adapters=seat == "rollout" and family.path == "lora",
                double_buffered=seat == "rollout" and family.schedule.double_buffered,
            )
            for seat in group
        ]  # fmt: skip

    # --- least numbers ------------------------------------------------------------------------------

    def least(self, family: Family, index: int, gpus: int) -> Least:
        """Bounds of one pool from the fastest options of its seats."""
        refilled = family.pace == "refilled"
        name = (family.groups[index], family.hardware[index], gpus, family.path == "lora", refilled, family.schedule.double_buffered)  # fmt: skip
        if name not in self._least:
            tables = [self.pricer.table(k) for k in self._keys(family, index, gpus)]
            self._least[name] = self._sum(tables, refilled=refilled)
        return self._least[name]

    def _sum(self, tables: Sequence[SeatTable], *, refilled: bool) -> Least:
        numbers, legal, fitting = np.zeros(FIXED + STREAM_CHUNKS), 1, 1
        scores = False
        for table in tables:
            legal, fitting = legal * table.legal, fitting * len(table)
            if not len(table):
                numbers[:] = inf
                continue
            numbers[5] = max(numbers[5], table.least_bytes)
            if table.key.seat == "rollout":
                numbers[0] += generating(table, refilled=refilled).min()
                numbers[FIXED:] = table.pieces.min(axis=0)
                continue
            scores = scores or bool(table.times[:, 1].any())
            numbers[1] += table.times[:, :2].sum(axis=1).min()
            numbers[3] += table.times[:, 3:].sum(axis=1).min()
        numbers[1] += head_seconds(self.request.workload) if scores else 0.0
        numbers[2] = numbers[1]
        return Least(numbers=numbers, legal=legal, fitting=fitting)

    # --- the weight path ----------------------------------------------------------------------------

    def least_sync(self, frame: Frame) -> float:
        """The fastest transfer between any two options of actor and rollout; 0 without a rollout."""
        ends = self._ends(frame)
        if ends is None:
            return 0.0
        return self.paths.least(frame.family, *ends)

    def _ends(self, frame: Frame) -> tuple[SeatTable, SeatTable] | None:
        found = []
        for seat in ENDS:
            index = frame.family.pool_of(seat)
            if index is None:
                return None
            keys = self._keys(frame.family, index, frame.sizes[index])
            found.append(self.pricer.table(next(k for k in keys if k.seat == seat)))
        return found[0], found[1]

    # --- combinations of a pool ---------------------------------------------------------------------

    def bound(
        self, frame: Frame, index: int | None = None, numbers: Floats | None = None
    ) -> Floats:
        """What no plan of a frame goes below, with the fastest transfer between actor and rollout.

        `numbers`: of combinations of pool `index`, in place of the least that it contributes.
        """
        family, sync = frame.family, np.array(self.least_sync(frame))
        pools = []
        for i, gpus in enumerate(frame.sizes):
            if i == index and numbers is not None:
                pools.append(Numbers.of(numbers))
                continue
            least = Numbers.of(self.least(family, i, gpus).numbers)
            pools.append(least.delayed(sync) if family.joined and i == family.pool_of("actor") else least)  # fmt: skip
        return objective_bound(family, self.request, pools, sync)

    def pool(self, frame: Frame, index: int, limit: float) -> PoolTable:
        """The combinations of one pool that may beat `limit` in this frame."""
        corner = self._corner(frame, index, shares=self._shares_host(frame))
        return pool_table(corner, lambda numbers: self.bound(frame, index, numbers), limit)

    def beam(self, frame: Frame, index: int) -> PoolTable:
        """Some combinations of one pool: a quick look, kept for like frames."""
        family, gpus = frame.family, frame.sizes[index]
        group, hardware = family.groups[index], family.hardware[index]
        ends = any(seat in group for seat in ENDS)
        shares = self._shares_host(frame)
        name = (group, hardware, gpus, family.hardware[family.pool_of("actor") or 0], family.path if ends else None, family.pace, family.schedule.double_buffered, str(family.schedule) if family.schedule.staleness else None, family.joined and ends, shares, freeing(self.request, family), len(frame.sizes) == 1)  # fmt: skip
        if name not in self._pools:
            corner = self._corner(frame, index, shares=shares)
            least = self._outside(frame, index)

            def bound(numbers: Floats) -> Floats:
                pools = [Numbers.of(numbers if i == index else row) for i, row in enumerate(least)]
                return objective_bound(family, self.request, pools, np.zeros(1))

            self._pools[name] = pool_table(corner, bound, inf, beam=BEAM)
        return self._pools[name]

    def _outside(self, frame: Frame, index: int) -> list[Floats]:
        """For the other pools of a frame: nothing, but generation and training take what they take at best."""
        rows = []
        for i, group in enumerate(frame.family.groups):
            row = np.zeros(FIXED + STREAM_CHUNKS)
            if i != index and "rollout" in group:
                row[0] = self._fastest_rollout(refilled=frame.family.pace == "refilled")
                row[FIXED:] = self._earliest()
            if i != index and "actor" in group:
                row[3] = self._fastest_training()
            rows.append(row)
        return rows

    def _fastest_rollout(self, *, refilled: bool) -> float:
        """The least seconds of generation over every size of its pool."""
        tables = [t for t in self.pricer.tables("rollout") if len(t)]
        return min((float(generating(t, refilled=refilled).min()) for t in tables), default=0.0)

    def _fastest_training(self) -> float:
        """The least seconds of the actor's training over every size of its pool."""
        tables = [t for t in self.pricer.tables("actor") if len(t)]
        return min((float(t.times[:, 3:].sum(axis=1).min()) for t in tables), default=0.0)

    def _earliest(self) -> Floats:
        """When pieces of a batch are generated at the earliest, over every size of the rollout's pool."""
        tables = [t for t in self.pricer.tables("rollout") if len(t)]
        return np.min([t.pieces.min(axis=0) for t in tables], axis=0) if tables else np.zeros(STREAM_CHUNKS)  # fmt: skip

    def _shares_host(self, frame: Frame) -> bool:
        """Whether pools of this frame sit on one node."""
        pools = self.request.cluster.pools
        shared = [h for h in frame.family.hardware if frame.family.hardware.count(h) > 1]
        return any(pools[h].gpus < 2 * pools[h].gpus_per_node for h in shared)

    def _corner(self, frame: Frame, index: int, *, shares: bool) -> Corner:
        family, gpus = frame.family, frame.sizes[index]
        group, hardware = family.groups[index], self.request.cluster.pools[family.hardware[index]]
        sync_bytes = self._sync_bytes(family, group, index)
        keys = self._keys(family, index, gpus)
        tables = tuple(self._lean_table(k, sync_bytes, with_actor="actor" in group, alone=len(group) == 1, by_label=freeing(self.request, family) == "must", by_move=family.pace == "pieces") for k in keys)  # fmt: skip
        joined = "actor" in group and "rollout" in group
        between = (
            self.paths.between(family, tables[group.index("actor")], tables[group.index("rollout")])
            if joined
            else None
        )
        return Corner(
            group=group, tables=tables, originals=tuple(map(self.pricer.table, keys)), calls=self.pricer.calls, hardware=hardware, gpus=gpus, sync=sync_bytes,
            max_oom=self.request.max_oom, max_memory=inf if self.request.max_memory is None else self.request.max_memory,
            head=head_seconds(self.request.workload), sync_seconds=between,
            frees=freeing(self.request, family), whole=len(frame.sizes) == 1, shares_host=shares, pace=family.pace, wants_memory=self.request.objective == "memory",
        )  # fmt: skip

    def _sync_bytes(self, family: Family, group: Sequence[str], index: int) -> SyncBytes:
        if not any(seat in group for seat in ENDS):
            return NO_SYNC
        profile = self.request.cluster.pools[family.hardware[index]].profile
        work, path = self.request.workload, family.path
        buffers = sync_buffers(self.models.actor, path, self.request.backend, work.lora, profile)
        return SyncBytes(buffers=buffers, group=sync_group(path, profile))

    def _lean_table(
        self,
        key: Key,
        sync_bytes: SyncBytes,
        *,
        with_actor: bool,
        alone: bool,
        by_label: bool,
        by_move: bool,
    ) -> SeatTable:
        """Options that no other of their class beats in time and in the bytes of every state."""
        table = self.pricer.table(key)
        if alone or not len(table):  # what fits alone fits; the pool compares times
            return table
        name = (key, sync_bytes, with_actor, by_label, by_move)
        if name not in self._lean:
            profile = self.request.cluster.pools[key.hardware].profile
            states = table.states(profile, sync_bytes, with_actor=with_actor)
            flat = [s.reshape(len(table), -1) for s in states.values()]
            columns = np.concatenate([table.times, table.pieces, table.host[:, None], *flat], axis=1)  # fmt: skip
            by_class = key.seat in ENDS
            self._lean[name] = table.only(
                lean(table, columns, by_class=by_class, by_label=by_label, by_move=by_move)
            )
        return self._lean[name]

    # --- combinations of pools ----------------------------------------------------------------------

    def combined(
        self, frame: Frame, pools: Sequence[PoolTable], limit: float
    ) -> tuple[Ints, Floats, int]:
        """Choices of one combination a pool with a bound below `limit`, best first; and the infeasible."""
        between = self._between(frame, pools)
        numbers = [Numbers.of(p.numbers) for p in pools]
        axes = len(pools)
        placed = [n.along(i, axes) for i, n in enumerate(numbers)]
        bound = objective_bound(frame.family, self.request, placed, between)
        bound = np.broadcast_to(bound, tuple(len(p) for p in pools))
        possible = np.isfinite(bound) & self._host_fits(frame, pools)
        infeasible = int(bound.size - possible.sum())
        flat = np.flatnonzero((possible & (bound < limit)).reshape(-1))
        order = flat[np.argsort(bound.reshape(-1)[flat], kind="stable")]
        return np.stack(np.unravel_index(order, bound.shape), axis=1), bound.reshape(-1)[order], infeasible  # fmt: skip

    def beside(self, frame: Frame, pools: Sequence[PoolTable], choices: Ints) -> Floats:
        """(n, 2) seconds of the learner's chain and of the weight sync, for rows of `combined`."""
        numbers = [Numbers.of(p.numbers[choices[:, i]]) for i, p in enumerate(pools)]
        shape = tuple(len(p) for p in pools)
        sync = np.broadcast_to(self._between(frame, pools), shape)[tuple(choices.T)]
        return np.stack([learner_seconds(frame.family, self.request, numbers), sync], axis=1)

    def _between(self, frame: Frame, pools: Sequence[PoolTable]) -> Floats:
        """Seconds of the sync between two pools, along their axes; 0 within one."""
        family = frame.family
        actor, rollout = family.pool_of("actor"), family.pool_of("rollout")
        if actor is None or rollout is None or actor == rollout:
            return np.zeros((1,) * len(pools))
        tables, rows = [], []
        for index, seat in ((actor, "actor"), (rollout, "rollout")):
            place = family.groups[index].index(seat)
            tables.append(pools[index].tables[place])
            rows.append(pools[index].rows[:, place])
        one, two = np.repeat(rows[0], len(rows[1])), np.tile(rows[1], len(rows[0]))
        seconds = self.paths.between(family, tables[0], tables[1])(one, two)
        table = seconds.reshape(len(rows[0]), len(rows[1]))
        if actor > rollout:
            table = table.T
        shape = [1] * len(pools)
        shape[actor], shape[rollout] = len(rows[0]), len(rows[1])
        return table.reshape(shape)

    def _host_fits(self, frame: Frame, pools: Sequence[PoolTable]) -> NDArray[np.bool_]:
        """Whether pools that share a node fit into its host memory together."""
        shape = tuple(len(p) for p in pools)
        if not self._shares_host(frame):
            return np.ones(shape, dtype=np.bool_)
        fits = np.ones(shape, dtype=np.bool_)
        for kind, present in self._nodes(frame):
            total = sum(_along(share * pools[i].numbers[:, HOST], i, len(pools)) for i, share in present)  # fmt: skip
            fits &= total <= kind.profile.node.host_memory.value
        return fits

    def _nodes(self, frame: Frame) -> Iterator[tuple[Pool, list[tuple[int, float]]]]:
        """Nodes that several pools share: index of each, and its part of the pool's fullest node."""
        homes = frame.pools()
        for hardware, kind in enumerate(self.request.cluster.pools):
            each = kind.gpus_per_node
            for first in range(0, kind.gpus, each):
                here = [max(0, min(first + each, p.start + p.gpus) - max(first, p.start)) * (p.hardware == hardware) for p in homes]  # fmt: skip
                if np.count_nonzero(here) > 1:
                    yield kind, [(i, n / min(homes[i].gpus, each)) for i, n in enumerate(here) if n]

    def placement(self, frame: Frame, pools: Sequence[PoolTable], choice: Ints) -> Placement:
        """The complete plan of one choice."""
        sets = frame.pools()
        seats: dict[str, Any] = {}
        for home, pool, group, row in zip(sets, pools, frame.family.groups, choice, strict=True):
            for seat, table, option in zip(group, pool.tables, pool.rows[row], strict=True):
                seats[seat] = replace(table.options[option], pool=home.name)
        return Placement(
            pools=sets, weight_path=frame.family.path, schedule=frame.family.schedule,
            backend=self.request.backend, **seats,
        )  # fmt: skip


def generating(table: SeatTable, *, refilled: bool) -> Floats:
    """Seconds of generation of each option: of a batch, or per batch where the engine never drains."""
    return table.refilled if refilled else np.asarray(table.times[:, :2].sum(axis=1))


def _along(values: Floats, axis: int, axes: int) -> Floats:
    return values.reshape(tuple(-1 if i == axis else 1 for i in range(axes)))
