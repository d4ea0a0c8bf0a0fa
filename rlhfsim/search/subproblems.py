"""Pools of skeletons, shared between skeletons: least numbers, combinations, and placements from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf, prod

import numpy as np

from rlhfsim.memory.components import ENGINE, NO_SYNC, SyncBytes, engine_sums
from rlhfsim.memory.kv_cache import engine_bytes
from rlhfsim.memory.residency import peak_moments, sync_bytes
from rlhfsim.memory.risk import fitting
from rlhfsim.search.agreement import Agreement, agree_apart, agreements
from rlhfsim.search.bound import learner_seconds, objective_bound, rules_streamed
from rlhfsim.search.columns import Bools, Combinations, Floats, Ints, Numbers
from rlhfsim.search.dominance import lean
from rlhfsim.search.floors import floor_of
from rlhfsim.search.least import Floor, Least, generating, least
from rlhfsim.search.merging import PoolTable, pool_table
from rlhfsim.search.options import OptionTable, PriceKey
from rlhfsim.search.pools import Subproblem, alone
from rlhfsim.search.pricer import Pricer
from rlhfsim.search.request import Request
from rlhfsim.search.space import Partition, Skeleton, freeing, roles_of
from rlhfsim.search.weight_paths import Paths
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.placement import AnyRolePlacement, Placement, RolloutPlacement
from rlhfsim.specs.workload.roles import ENDS
from rlhfsim.step.timetable import STREAM_CHUNKS

BEAM = 100
"""Combinations of a pool that the warm start carries from role to role."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Open:
    """A skeleton that is opened again and again: what does not depend on how far."""

    skeleton: Skeleton | None = None
    outline: tuple[Floats, Sequence[Numbers]] | None = None
    """Seconds of the fastest transfer, and the least numbers of its pools."""
    roles: dict[int, tuple[Subproblem, Sequence[Combinations]]] = field(default_factory=dict)
    """Subproblem of each pool, and its roles alone."""


class Subproblems:
    """Everything that skeletons have in common."""

    def __init__(self, request: Request, models: Models, pricer: Pricer) -> None:
        """Nothing is known yet."""
        self.request, self.models, self.pricer = request, models, pricer
        self._least: dict[tuple[object, ...], Least] = {}
        self._floors: dict[PriceKey, Floor] = {}
        self._close: set[PriceKey] = set()
        """Roles whose floors are as high as they get."""
        self._pools: dict[tuple[object, ...], PoolTable] = {}
        self._lean: dict[tuple[object, ...], OptionTable] = {}
        self._open = _Open()
        self.paths = Paths(request, models, pricer.paths)

    def of(self, request: Request) -> Subproblems:
        """The same for a request that differs in the architectures that compete, with what is known."""
        other = Subproblems(request, self.models, self.pricer)
        other._least, other._floors, other._pools = self._least, self._floors, self._pools
        other._close = self._close
        other._lean, other.paths = self._lean, self.paths
        return other

    # --- keys -------------------------------------------------------------------------------------

    def keys(self, wanted: Sequence[Partition], sizes: Sequence[Ints]) -> Iterator[PriceKey]:
        """Every role that these skeletons need a price for."""
        pools = {
            _pool(partition, i, gpus): (partition, i, gpus)
            for partition, splits in zip(wanted, sizes, strict=True)
            for i in range(len(partition.groups))
            for gpus in np.unique(splits[:, i]).tolist()
        }
        return chain.from_iterable(self.keys_of(*pool) for pool in pools.values())

    def keys_of(self, partition: Partition, index: int, gpus: int) -> list[PriceKey]:
        """The roles of one pool of a skeleton."""
        group, runs = partition.groups[index], self.request.runs
        return [
            PriceKey(
                role=role,
                hardware=partition.hardware[index],
                gpus=gpus,
                beside_actor=role == "reference" and "actor" in group,
                shares=runs is not None and runs.says.shares(role, group),
                adapters=role == "rollout" and partition.adapters_only,
                double_buffered=role == "rollout" and partition.schedule.double_buffered,
            )
            for role in group
        ]

    # --- least numbers ------------------------------------------------------------------------------

    def least(self, partition: Partition, index: int, gpus: int) -> Least:
        """Bounds of one pool from the fastest options of its roles, where they are priced."""
        continuous = partition.pace == "continuous"
        streamed = rules_streamed(partition, self.request)
        name = _pool(partition, index, gpus), continuous, streamed
        known = self._least.get(name)
        if known is not None and known.priced:
            return known
        keys = self.keys_of(partition, index, gpus)
        unpriced = [self._floor(key) for key in keys if not self.pricer.has(key)]
        if known is None or known.unpriced != unpriced:
            known = self._least[name] = least(
                [self.pricer.table(key) for key in keys if self.pricer.has(key)],
                self.request.workload,
                gpus=gpus,
                unpriced=unpriced,
                continuous=continuous,
                rules_streamed=streamed,
            )
        return known

    def _floor(self, key: PriceKey) -> Floor:
        """The floor of a role that is not priced."""
        if key not in self._floors:
            self._floors[key] = floor_of(self.pricer, key)
        return self._floors[key]

    def tightened(self, keys: Iterable[PriceKey]) -> set[PriceKey]:
        """Those whose floors were not close yet; they are now."""
        loose = set(keys) - self._close
        self._floors |= {
            key: floor_of(self.pricer, key, close=True) for key in loose if key.role != "rollout"
        }
        self._close |= loose
        return loose

    def fitting_alone(self, skeleton: Skeleton) -> int:
        """Plans of a skeleton whose roles fit by themselves; one that is not priced keeps all options."""
        return prod(self.least(skeleton.partition, i, gpus).fitting for i, gpus in enumerate(skeleton.sizes))

    # --- the weight path ----------------------------------------------------------------------------

    def least_sync(self, skeleton: Skeleton) -> float:
        """The fastest transfer between any two options of actor and rollout; 0 without a rollout."""
        partition = skeleton.partition
        places = [partition.pool_of(role) for role in ENDS]
        keys = [self.keys_of(partition, i, skeleton.sizes[i]) for i in places if i is not None]
        if len(keys) < len(ENDS):
            return 0.0
        ends = (next(k for k in of if k.role == role) for of, role in zip(keys, ENDS, strict=True))
        return self.paths.least(partition, *map(self.pricer.table, ends))

    # --- combinations of a pool ---------------------------------------------------------------------

    def bound(self, skeleton: Skeleton, index: int | None = None, numbers: Numbers | None = None) -> Floats:
        """What no plan of a skeleton goes below, with the fastest transfer between actor and rollout.

        `numbers`: of combinations of pool `index`, in place of the least that it contributes.
        """
        sync, pools = self._outline(skeleton)
        if index is not None and numbers is not None:
            pools = [numbers if i == index else least for i, least in enumerate(pools)]
        return objective_bound(skeleton.partition, self.request, pools, sync)

    def _outline(self, skeleton: Skeleton) -> tuple[Floats, Sequence[Numbers]]:
        """The fastest transfer of a skeleton, and the least that each of its pools contributes with it."""
        known = self._opened(skeleton)
        if known.outline is None:
            partition, sync = skeleton.partition, np.array(self.least_sync(skeleton))
            pools = [self.least(partition, i, gpus).numbers for i, gpus in enumerate(skeleton.sizes)]
            actor = partition.pool_of("actor")
            if partition.joined and actor is not None:
                pools[actor] = pools[actor].delayed(sync)
            known.outline = sync, pools
        return known.outline

    def _opened(self, skeleton: Skeleton) -> _Open:
        """What is known about a skeleton while it is looked at further and further."""
        if self._open.skeleton is not skeleton:
            self._open = _Open(skeleton=skeleton)
        return self._open

    def pool(self, skeleton: Skeleton, index: int, limit: float) -> PoolTable:
        """The combinations of one pool that may beat `limit` in this skeleton."""
        roles = self._opened(skeleton).roles
        if index not in roles:
            subproblem = self.subproblem(skeleton, index)
            roles[index] = subproblem, alone(subproblem)
        subproblem, each = roles[index]
        return pool_table(subproblem, lambda numbers: self.bound(skeleton, index, numbers), limit, each)

    def beam(self, skeleton: Skeleton, index: int) -> PoolTable:
        """Some combinations of one pool: a quick look, kept for like skeletons."""
        partition, gpus = skeleton.partition, skeleton.sizes[index]
        group, hardware = partition.groups[index], partition.hardware[index]
        ends = any(role in group for role in ENDS)
        name = (
            group,
            hardware,
            gpus,
            partition.hardware[partition.pool_of("actor") or 0],
            partition.path if ends else None,
            partition.pace,
            partition.schedule.double_buffered,
            str(partition.schedule) if partition.schedule.staleness else None,
            partition.joined and ends,
            self._shares_host(skeleton),
            freeing(self.request, partition),
            len(skeleton.sizes) == 1,
        )
        if name not in self._pools:
            subproblem = self.subproblem(skeleton, index)
            least = self._outside(skeleton, index)

            def bound(numbers: Numbers) -> Floats:
                pools = [numbers if i == index else others for i, others in enumerate(least)]
                return objective_bound(partition, self.request, pools, np.zeros(1))

            self._pools[name] = pool_table(subproblem, bound, inf, beam=BEAM)
        return self._pools[name]

    def _outside(self, skeleton: Skeleton, index: int) -> list[Numbers]:
        """Numbers of the other pools: none, but generation and training take what is their best in any."""
        continuous = skeleton.partition.pace == "continuous"
        rollouts, actors = ([t for t in self.pricer.tables(r) if len(t)] for r in ("rollout", "actor"))
        generate = min((float(generating(t, continuous=continuous).min()) for t in rollouts), default=0.0)
        train = min((t.least.training for t in actors), default=0.0)
        pieces = (
            np.min([t.pieces.min(axis=0) for t in rollouts], axis=0) if rollouts else np.zeros(STREAM_CHUNKS)
        )
        return [
            Numbers.of(
                pieces=pieces * ("rollout" in group and i != index),
                until_generated_s=generate * ("rollout" in group and i != index),
                training_s=train * ("actor" in group and i != index),
                gpus=1,
            )
            for i, group in enumerate(skeleton.partition.groups)
        ]

    def _shares_host(self, skeleton: Skeleton) -> bool:
        """Whether pools of this skeleton sit on one node."""
        pools = self.request.cluster.node_groups
        shared = [h for h in skeleton.partition.hardware if skeleton.partition.hardware.count(h) > 1]
        return any(pools[h].gpus < 2 * pools[h].gpus_per_node for h in shared)

    def subproblem(
        self, skeleton: Skeleton, index: int, table_of: Callable[[PriceKey], OptionTable] | None = None
    ) -> Subproblem:
        """A pool with the options that no other of their role beats, or with those of `table_of`."""
        partition, gpus = skeleton.partition, skeleton.sizes[index]
        group, hardware = partition.groups[index], self.request.cluster.node_groups[partition.hardware[index]]
        sync = self._sync_bytes(partition, group, index)
        keys = self.keys_of(partition, index, gpus)
        tables = tuple(
            table_of(k)
            if table_of
            else self._lean_table(
                k,
                sync,
                with_actor="actor" in group,
                alone=len(group) == 1,
                by_label=freeing(self.request, partition) == "must",
                by_move=partition.pace == "pieces",
            )
            for k in keys
        )
        agreement, lend = self._agreement(group), partition.schedule.lend
        joined = [tables[group.index(role)] for role in ENDS if role in group]
        between = self.paths.between(partition, *joined) if len(joined) == len(ENDS) else None
        return Subproblem(
            group=group,
            tables=tables,
            originals=tuple(map(self.pricer.table, keys)),
            calls=self.pricer.calls,
            workload=self.request.workload,
            hardware=hardware,
            gpus=gpus,
            sync=sync,
            max_oom=self.request.max_oom,
            doubt=self.pricer.doubt,
            max_memory=inf if self.request.max_memory is None else self.request.max_memory,
            sync_seconds=between,
            frees=freeing(self.request, partition),
            whole=len(skeleton.sizes) == 1,
            shares_host=self._shares_host(skeleton),
            pace=partition.pace,
            rules_streamed=rules_streamed(partition, self.request),
            wants_memory=self.request.objective == "memory",
            agreement=agreement,
            lent=self._lent(skeleton, tables[0]) if lend and group == ("rollout",) else None,
            lends=lend and "actor" in group,
            learner=self._learner(partition, index),
        )

    def _learner(self, partition: Partition, index: int) -> Callable[[Numbers], Floats] | None:
        """The learner's chain where this pool has all of it, while a rollout runs that never drains."""
        alone = len(partition.groups) == len(ENDS) and "rollout" not in partition.groups[index]
        if partition.pace != "continuous" or partition.schedule.lend or not alone:
            return None
        return lambda numbers: learner_seconds(partition, self.request, [numbers, numbers])

    def _lent(self, skeleton: Skeleton, table: OptionTable) -> Floats:
        """(n, moments, views, 3) bytes of the engine of each option on the trainer's GPUs."""
        partition = skeleton.partition
        actor = partition.pool_of("actor")
        assert actor is not None
        profile, gpus = self.pricer.hardware(table.key).profile, skeleton.sizes[actor]
        roles = [role for role in table.options if isinstance(role, RolloutPlacement)]
        engines = [engine_bytes(self.models.actor, x.lent(x.pool, gpus), profile=profile) for x in roles]
        sync = self._sync_bytes(partition, partition.groups[actor], actor)
        states = engine_sums(profile, np.array(engines, dtype=ENGINE), sync, with_actor=True)
        there = (*partition.groups[actor], "rollout")
        every = peak_moments(self.pricer.calls, there, self.request.workload)
        held = np.stack([states[m.of("rollout")] for m in every], axis=1)
        held[np.array([x.layout.replica_gpus > gpus for x in roles], dtype=np.bool_), ..., 0] = inf
        return held

    def _agreement(self, group: Sequence[str]) -> tuple[Agreement, ...]:
        """What one key of the framework says for roles of a pool and for others of the plan."""
        return agreements(self.request.alike, roles_of(self.request, self.models), group)

    def _sync_bytes(self, partition: Partition, group: Sequence[str], index: int) -> SyncBytes:
        if not any(role in group for role in ENDS):
            return NO_SYNC
        profile = self.request.cluster.node_groups[partition.hardware[index]].profile
        lora = self.request.workload.lora
        lent = partition.schedule.lend and "actor" in group
        return sync_bytes(
            self.models.actor,
            "ipc" if lent else partition.path,
            self.request.backend,
            lora,
            profile,
            framework=self.request.cluster.framework,
            shared=lent or all(role in group for role in ENDS),
        )

    def _lean_table(
        self, key: PriceKey, sync: SyncBytes, *, with_actor: bool, alone: bool, by_label: bool, by_move: bool
    ) -> OptionTable:
        """Options that no other of their class beats in time and in the bytes of every state."""
        table = self.pricer.table(key)
        if alone or not len(table):  # what fits alone fits; the pool compares times
            return table
        name = (key, sync, with_actor, by_label, by_move)
        if name not in self._lean:
            profile = self.request.cluster.node_groups[key.hardware].profile
            states = table.sums(profile, sync, with_actor=with_actor)
            flat = [s.reshape(len(table), -1) for s in states.values()]
            columns = np.concatenate([table.times.values, table.pieces, table.host[:, None], *flat], axis=1)
            agreed = [each.column for each in self._agreement((key.role,))]
            self._lean[name] = table.only(
                lean(
                    table,
                    columns,
                    by_class=key.role in ENDS,
                    by_label=by_label,
                    by_move=by_move,
                    agreed=agreed,
                )
            )
        return self._lean[name]

    # --- combinations of pools ----------------------------------------------------------------------

    def combined(
        self, skeleton: Skeleton, pools: Sequence[PoolTable], limit: float
    ) -> tuple[Ints, Floats, int]:
        """Choices of one combination a pool with a bound below `limit`, best first; and the infeasible."""
        between = self._between(skeleton, pools)
        placed = [p.numbers.along(i, len(pools)) for i, p in enumerate(pools)]
        bound = objective_bound(skeleton.partition, self.request, placed, between)
        bound = np.broadcast_to(bound, tuple(len(p) for p in pools))
        possible = np.isfinite(bound) & self._host_fits(skeleton, pools) & self._agree(pools)
        if skeleton.partition.schedule.lend:
            possible &= self._lent_fits(skeleton, pools)
        infeasible = int(bound.size - possible.sum())
        flat = np.flatnonzero((possible & (bound < limit)).reshape(-1))
        order = flat[np.argsort(bound.reshape(-1)[flat], kind="stable")]
        return np.stack(np.unravel_index(order, bound.shape), axis=1), bound.reshape(-1)[order], infeasible

    def beside(self, skeleton: Skeleton, pools: Sequence[PoolTable], choices: Ints) -> Floats:
        """(n, 2) seconds of the learner's chain and of the weight sync, for rows of `combined`."""
        numbers = [p.numbers.only(choices[:, i]) for i, p in enumerate(pools)]
        shape = tuple(len(p) for p in pools)
        sync = np.broadcast_to(self._between(skeleton, pools), shape)[tuple(choices.T)]
        return np.stack([learner_seconds(skeleton.partition, self.request, numbers), sync], axis=1)

    def least_beside(self, skeleton: Skeleton) -> tuple[float, float]:
        """What the learner's chain and the weight sync of no plan of a skeleton go below."""
        sync, pools = self._outline(skeleton)
        return float(learner_seconds(skeleton.partition, self.request, pools).min()), float(sync)

    def _between(self, skeleton: Skeleton, pools: Sequence[PoolTable]) -> Floats:
        """Seconds of the sync between two pools, along their axes; 0 within one."""
        partition = skeleton.partition
        actor, rollout = partition.pool_of("actor"), partition.pool_of("rollout")
        if actor is None or rollout is None or actor == rollout:
            return np.zeros((1,) * len(pools))
        tables, rows = [], []
        for index, role in ((actor, "actor"), (rollout, "rollout")):
            place = partition.groups[index].index(role)
            tables.append(pools[index].tables[place])
            rows.append(pools[index].rows[:, place])
        one, two = np.repeat(rows[0], len(rows[1])), np.tile(rows[1], len(rows[0]))
        seconds = self.paths.between(partition, tables[0], tables[1])(one, two)
        table = seconds.reshape(len(rows[0]), len(rows[1]))
        if actor > rollout:
            table = table.T
        shape = [1] * len(pools)
        shape[actor], shape[rollout] = len(rows[0]), len(rows[1])
        return table.reshape(shape)

    def _agree(self, pools: Sequence[PoolTable]) -> Bools:
        """Whether roles of several pools say the same where one key is about all of them."""
        placed = [[(t.key.role, t, rows) for t, rows in zip(p.tables, p.rows.T, strict=True)] for p in pools]
        return agree_apart(self._agreement(roles_of(self.request, self.models)), placed)

    def _host_fits(self, skeleton: Skeleton, pools: Sequence[PoolTable]) -> Bools:
        """Whether pools that share a node fit into its host memory together."""
        fits = np.ones([len(p) for p in pools], dtype=np.bool_)
        for kind, present in self._nodes(skeleton) if self._shares_host(skeleton) else ():
            total = sum(share * pools[i].numbers.along(i, len(pools)).host for i, share in present)
            fits &= total <= kind.profile.node.host_memory.value
        return fits

    def _lent_fits(self, skeleton: Skeleton, pools: Sequence[PoolTable]) -> Bools:
        """Whether the rollout's engine fits on the trainer's GPUs, asleep and awake."""
        partition = skeleton.partition
        actor, rollout = partition.pool_of("actor"), partition.pool_of("rollout")
        assert actor is not None
        assert rollout is not None
        hardware = self.request.cluster.node_groups[partition.hardware[actor]]
        trainers, usable = pools[actor].held, hardware.profile.usable_memory.value
        engines = pools[rollout].held[:, -trainers.shape[1] :]
        fits = [
            fitting(engines + one, usable, self.request.max_oom, self.pricer.doubt).all(axis=1)
            for one in trainers
        ]
        table = np.array(fits, dtype=np.bool_).reshape(len(trainers), len(engines))
        shape = [1] * len(pools)
        shape[actor], shape[rollout] = table.shape
        return (table if actor < rollout else table.T).reshape(shape)

    def _nodes(self, skeleton: Skeleton) -> Iterator[tuple[NodeGroup, list[tuple[int, float]]]]:
        """Nodes that several pools share: index of each, and its part of the pool's fullest node."""
        homes = skeleton.pools()
        for hardware, kind in enumerate(self.request.cluster.node_groups):
            each = kind.gpus_per_node
            for node in range(-(-kind.gpus // each)):
                here = [p.gpus_on(hardware, node, each) for p in homes]
                if np.count_nonzero(here) > 1:
                    yield kind, [(i, n / min(homes[i].gpus, each)) for i, n in enumerate(here) if n]

    def placement(self, skeleton: Skeleton, pools: Sequence[PoolTable], choice: Ints) -> Placement:
        """The complete plan of one choice."""
        sets = skeleton.pools()
        roles: dict[str, AnyRolePlacement] = {}
        for home, pool, group, row in zip(sets, pools, skeleton.partition.groups, choice, strict=True):
            for role, table, option in zip(group, pool.tables, pool.rows[row], strict=True):
                roles[role] = replace(table.options[option], pool=home.name)
        return Placement(
            pools=sets,
            weight_path=skeleton.partition.path,
            schedule=skeleton.partition.schedule,
            backend=self.request.backend,
            roles=roles,
        )


def _pool(partition: Partition, index: int, gpus: int) -> tuple[object, ...]:
    """What the options of a pool depend on."""
    return (
        partition.groups[index],
        partition.hardware[index],
        gpus,
        partition.adapters_only,
        partition.schedule.double_buffered,
    )
