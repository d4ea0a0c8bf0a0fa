"""The space: who shares GPUs with whom, on how many of them, by which weight path and schedule.

A skeleton is a plan without the layouts of its roles. The space is every partition of the roles into
pools, every split of the GPUs over those pools, every weight path that joins actor and rollout and
every schedule that the request allows, times the layouts of every role (`search.layouts`) and of the
engine (`search.rollout_layouts`).

Pools are whole nodes on clusters of several nodes, and single GPUs inside one node; the last pool may have
GPUs of a part-filled node. On more than
`MAX_UNITS` nodes pools grow in equal steps of several nodes, so that the space stays the same size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, product
from typing import Literal

import numpy as np

from rlhfsim.frozen import frozen
from rlhfsim.search.columns import Bools, Ints
from rlhfsim.search.request import STALE, Request
from rlhfsim.specs.frameworks.runs import OWN
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.placement import Placement, ResourcePool, Schedule, role_placement
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS, Topology, WeightPath, paths_between
from rlhfsim.specs.workload.roles import BY_NAME, ENDS, ROLES

Group = tuple[str, ...]
"""Roles of one pool, in the order of `specs.workload.roles.ROLES`."""
MAX_UNITS = 32
"""Sizes that a pool may have on a large cluster; half as many on a huge one."""
HUGE = 512
"""Nodes."""
FEW = 8
"""Units of pools of which any number may stay idle."""
SYNCHRONOUS = Schedule()
Pace = Literal["batches", "pieces", "continuous"]


@frozen
class Partition:
    """Skeletons that differ in the sizes of their pools alone."""

    groups: tuple[Group, ...]
    hardware: tuple[int, ...]
    """Index into `cluster.node_groups` of each group."""
    path: WeightPath
    schedule: Schedule

    @property
    def adapters_only(self) -> bool:
        """Whether the weight sync moves adapters alone."""
        return WEIGHT_PATHS[self.path].adapters_only

    @property
    def joined(self) -> bool:
        """Whether actor and rollout share a pool."""
        return any("actor" in g and "rollout" in g for g in self.groups)

    @property
    def pace(self) -> Pace:
        """How its rollout goes on: batch by batch, in pieces, or never drained."""
        if self.schedule.streaming:
            return "pieces"
        return "continuous" if self.schedule.continuous else "batches"

    def pool_of(self, role: str) -> int | None:
        """Index of the group with a role."""
        return next((i for i, group in enumerate(self.groups) if role in group), None)

    @property
    def labels(self) -> frozenset[str]:
        """Architectures that its plans can have; naive against smart depends on the roles."""
        if self.schedule.asynchronous:
            return frozenset({"lend" if self.schedule.lend else "async"})
        alone = self.pool_of("rollout") is None
        if not self.joined and not alone:
            return frozenset({"disaggregated"})
        return frozenset({"hybrid"}) if WEIGHT_PATHS[self.path].gpu_memory else frozenset({"naive", "smart"})

    @property
    def role_placement(self) -> str:
        """How the roles share pools."""
        roles = [s for g in self.groups for s in g if s != "rollout"]
        return role_placement([str(self.pool_of(s)) for s in roles])


@frozen
class Skeleton:
    """A partition with pool sizes: a plan without layouts."""

    partition: Partition
    sizes: tuple[int, ...]
    """GPUs of each group."""

    def pools(self) -> tuple[ResourcePool, ...]:
        """The pools on the cluster, one behind the other on each kind of hardware."""
        start: Counter[int] = Counter()
        pools = []
        for group, hardware, gpus in zip(
            self.partition.groups, self.partition.hardware, self.sizes, strict=True
        ):
            name = pool_name(group, len(self.sizes))
            pools.append(ResourcePool(name=name, start=start[hardware], gpus=gpus, hardware=hardware))
            start[hardware] += gpus
        return tuple(pools)


def pools_of(like: Placement) -> tuple[Callable[[Partition], bool], tuple[int, ...]]:
    """Partitions that share the GPUs as a plan does, and the sizes of its pools."""
    homes = {name: like.roles[name].pool for name in ROLES if name in like.roles}
    order = tuple(dict.fromkeys(homes.values()))
    groups = {frozenset(name for name in homes if homes[name] == pool) for pool in order}
    architecture = like.architecture

    def same(partition: Partition) -> bool:
        return {frozenset(g) for g in partition.groups} == groups and architecture in partition.labels

    return same, tuple(like.pool(pool).gpus for pool in order)


def pool_name(group: Group, pools: int) -> str:
    """`all`, `rollout`, `train` (everything but the rollout) or the first role of the group."""
    if pools == 1:
        return "all"
    trains = pools == 2 and "actor" in group and "rollout" not in group and len(group) > 1
    return "train" if trains else group[0]


def roles_of(request: Request, models: Models) -> Group:
    """Roles that the workload needs."""
    return tuple(role for role in ROLES if BY_NAME[role].model(request.workload) is not None)


def groupings(roles: Group) -> Iterator[tuple[Group, ...]]:
    """Every partition of the roles, each group in the order of `roles`, the actor's group first."""
    if not roles:
        yield ()
        return
    first, rest = roles[0], roles[1:]
    for size in range(len(rest) + 1):
        for chosen in combinations(rest, size):
            left = tuple(s for s in rest if s not in chosen)
            for others in groupings(left):
                yield ((first, *chosen), *others)


def unit(request: Request, hardware: int = 0) -> int:
    """GPUs by which pools of one kind of hardware grow."""
    pool = request.cluster.node_groups[hardware]
    if pool.gpus <= pool.gpus_per_node:
        return 1
    nodes = pool.gpus // pool.gpus_per_node
    units = MAX_UNITS if nodes <= HUGE else MAX_UNITS // 2
    return pool.gpus_per_node * -(-nodes // units)


@lru_cache(maxsize=256)
def compositions(total: int, parts: int) -> Ints:
    """(n, parts) ways to write `total` as an ordered sum of `parts` positive integers."""
    if parts == 1:
        return np.array([[total]])
    if parts > total:
        return np.empty((0, parts), dtype=np.int64)
    cuts = np.array(list(combinations(range(1, total), parts - 1)), dtype=np.int64)
    edges = np.concatenate([np.zeros((len(cuts), 1), np.int64), cuts, np.full((len(cuts), 1), total)], axis=1)
    return np.diff(edges, axis=1)


def splits(request: Request, partition: Partition) -> Ints:
    """(n, groups) GPUs of each pool; some of a kind of hardware may stay idle (`_used`)."""
    blocks: list[Ints] = []
    columns: list[int] = []
    for hardware, pool in enumerate(request.cluster.node_groups):
        members = [i for i, h in enumerate(partition.hardware) if h == hardware]
        step = unit(request, hardware)
        whole, rest = divmod(pool.gpus, step)
        parts = []
        for units, extra in _used(whole, rest, nodes=step // pool.gpus_per_node):
            parts.append(compositions(units, len(members)) * step)
            parts[-1][:, -1:] += extra
            if extra and len(members) > 1:
                own = compositions(units, len(members) - 1) * step
                parts.append(np.concatenate([own, np.full((len(own), 1), extra)], axis=1))
        if (
            whole == 1 and rest and step == pool.gpus_per_node and len(members) > 1
        ):  # all inside the full node
            parts.append(compositions(step, len(members)))
        blocks.append(np.concatenate(parts))
        columns += members
    if any(not len(block) for block in blocks):
        return np.empty((0, len(partition.groups)), dtype=np.int64)
    rows = [np.concatenate(row) for row in product(*blocks)] if len(blocks) > 1 else blocks[0]
    sizes = np.empty((len(rows), len(partition.groups)), dtype=np.int64)
    sizes[:, columns] = np.array(rows, dtype=np.int64).reshape(len(rows), -1)
    return sizes[_allowed(request, partition, sizes)]


def _used(whole: int, rest: int, *, nodes: int) -> Iterator[tuple[int, int]]:
    """How many units of pools work, all of them first, and GPUs of a part-filled one for the last pool.

    Of the rest also none and powers of two; of units any number up to `FEW`, else one less or the next 2^k or
    3 2^k: layouts divide those, and n GPUs are never slower than fewer of them.
    """
    powers = {0} | {1 << i for i in range(rest.bit_length()) if nodes <= 1}
    yield from ((whole, extra) for extra in sorted({r for r in powers if r < rest} | {rest}, reverse=True))
    fewer = set(range(1, whole)) if whole <= FEW else {whole - 1, _round(whole - 1)}
    yield from ((units, 0) for units in sorted(fewer, reverse=True))


def _round(count: int) -> int:
    """The largest 2^k or 3 2^k up to a count."""
    power = 1 << (count.bit_length() - 1)
    return max(power, power // 2 * 3 if power // 2 * 3 <= count else 0)


def _allowed(request: Request, partition: Partition, sizes: Ints) -> Bools:
    """Which splits the user's limits on GPUs leave."""
    allowed = np.ones(len(sizes), dtype=np.bool_)
    for i, group in enumerate(partition.groups):
        if request.max_gpus_per_role is not None and len(partition.groups) > 1:
            allowed &= sizes[:, i] <= request.max_gpus_per_role
        for limit in request.limits:
            if limit.field == "gpus" and limit.role in group:
                allowed &= limit.holds(sizes[:, i])
    return allowed


def partitions(request: Request, models: Models) -> Iterator[Partition]:
    """Every partition on every kind of hardware, with every path and schedule that may compete."""
    roles = roles_of(request, models)
    kinds = range(len(request.cluster.node_groups))
    if request.runs is not None and request.runs.lacks_workload(request.workload, request.backend):
        return
    for groups in groupings(roles):
        for hardware in product(kinds, repeat=len(groups)):
            if set(hardware) != set(kinds):
                continue
            shape = Partition(groups=groups, hardware=hardware, path="none", schedule=SYNCHRONOUS)
            if shape.role_placement in request.forbid or not _on_allowed_hardware(request, shape):
                continue
            if not _in_their_region(request, shape):
                continue
            if request.runs is not None and request.runs.lacks_pools(
                groups, request.workload, request.backend
            ):
                continue
            for path, schedule in product(_paths(request, shape, roles), _schedules(request, shape, roles)):
                if not _said(request, shape, schedule):
                    continue
                partition = replace(shape, path=path, schedule=schedule)
                if may_carry(request, partition) and _may_lend(partition):
                    yield partition


def competing(
    request: Request,
    models: Models,
    only: Callable[[Partition], bool] | None = None,
    sizes: tuple[int, ...] | None = None,
) -> tuple[list[Partition], list[Ints]]:
    """The partitions that compete and the splits of each: `only` some, of pools of these `sizes`."""
    wanted = [p for p in partitions(request, models) if only is None or only(p)]
    shapes = {(p.groups, p.hardware): p for p in wanted}  # they share theirs, whatever the schedule
    each = {name: splits(request, p) for name, p in shapes.items()}
    if sizes is not None:
        each = {name: rows[(rows == np.array(sizes)).all(axis=1)] for name, rows in each.items()}
    return wanted, [each[p.groups, p.hardware] for p in wanted]


def _said(request: Request, shape: Partition, schedule: Schedule) -> bool:
    """Whether the framework runs a schedule, and can be told of it and of who shares GPUs."""
    if (runs := request.runs) is None:
        return True
    together = runs.says.together(shape.groups, schedule)
    apart = not shape.joined and shape.pool_of("rollout") is not None
    told = together and runs.says.when(schedule, request.workload, apart=apart)
    return told and not runs.lacks_schedule(schedule)


def _may_lend(partition: Partition) -> bool:
    """Whether the trainer's GPUs can run the rollout's engine, where they are lent (`specs.scenario`)."""
    ends = {partition.hardware[i] for role in ENDS if (i := partition.pool_of(role)) is not None}
    return not partition.schedule.lend or (len(ends) == 1 and not partition.adapters_only)


def _on_allowed_hardware(request: Request, shape: Partition) -> bool:
    """Whether every role is on a kind of hardware that the user's limits leave it."""
    at = {role: kind for g, kind in zip(shape.groups, shape.hardware, strict=True) for role in g}
    bound = [x for x in request.limits if x.field == "hardware" and x.role in at]
    return all(limit.holds(at[limit.role]) for limit in bound)


def _in_their_region(request: Request, shape: Partition) -> bool:
    """Whether nothing but the rollout is behind a link to another region."""
    kinds = request.cluster.node_groups
    return all(
        kinds[kind].wan is None or group == ("rollout",)
        for group, kind in zip(shape.groups, shape.hardware, strict=True)
    )


def _paths(request: Request, shape: Partition, roles: Group) -> tuple[WeightPath, ...]:
    """Paths that the backend and the executor know for these two roles."""
    if "rollout" not in roles:
        return ("none",)
    runs = request.runs
    own = request.backend == "deepspeed" if runs is None else runs.name == OWN
    wanted = request.weight_path
    named = None if request.workload.lora is not None else wanted
    paths = paths_between(one_pool=shape.joined, own_backend=not own, named=named)
    if request.workload.lora is not None:
        paths = (*(p for p, rules in WEIGHT_PATHS.items() if rules.adapters_only), *paths)
    return tuple(
        p for p in paths if wanted in (None, p) and p not in request.left_out and _carried(request, shape, p)
    )


def _carried(request: Request, shape: Partition, path: WeightPath) -> bool:
    """Whether the framework runs a path where actor and rollout lie so."""
    alone = request.runs.says.adapters_alone if request.runs and request.workload.lora else ()
    if request.backend in alone and not WEIGHT_PATHS[path].adapters_only:
        return False
    one_node = len(groups := request.cluster.node_groups) == 1 and groups[0].gpus <= groups[0].gpus_per_node
    apart: Topology = "same node" if one_node else "across nodes"
    return request.runs is None or not request.runs.lacks_path(path, "same GPU" if shape.joined else apart)


def _schedules(request: Request, shape: Partition, roles: Group) -> Iterator[Schedule]:
    apart = ("rollout",) in shape.groups and len(shape.groups) > 1
    work = request.workload
    buffered = (False, True) if work.environment and work.sandboxes_suffice else (False,)
    wanted, oldest = request.architecture, request.max_staleness
    if wanted not in STALE:
        for double in buffered:
            yield Schedule(double_buffered=double)
            if apart and "streaming" not in request.left_out:
                yield Schedule(streaming=True, double_buffered=double)
    if apart and "async" in request.switches and wanted in (None, "async"):
        for overlapped in (False, True):
            yield Schedule(staleness=1, overlapped_sync=overlapped)
            yield Schedule(staleness=oldest, partial_rollout=True, overlapped_sync=overlapped)
            if oldest > 1:
                yield Schedule(staleness=oldest, overlapped_sync=overlapped)
    if apart and "lend" in request.switches and wanted in (None, "lend"):
        yield Schedule(staleness=oldest, partial_rollout=True, lend=True)


def may_carry(request: Request, partition: Partition) -> frozenset[str]:
    """Labels of a partition that the request allows."""
    wanted = partition.labels if request.architecture is None else {request.architecture}
    return (partition.labels & wanted) - request.left_out


def freeing(request: Request, partition: Partition) -> Literal["any", "must", "must not"]:
    """Whether roles must or must not leave GPU memory, so that the plan has an allowed label."""
    allowed = may_carry(request, partition)
    if partition.labels != {"naive", "smart"} or len(allowed) == 2:
        return "any"
    return "must" if "smart" in allowed else "must not"
