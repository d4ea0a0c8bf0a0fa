"""Which call runs where, in which layout, and when: the part of a plan that the planner chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import cache
from itertools import combinations
from typing import Annotated, Any, Literal, NamedTuple, cast, get_type_hints

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, PlainSerializer

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.loading import checked
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS, WeightPath
from rlhfsim.specs.workload.roles import NAMES, TABLE, ByRole

Architecture = Literal["naive", "smart", "hybrid", "disaggregated", "lend", "async"]
RolePlacementLabel = Literal["colocated", "split", "standalone"]
Residency = Literal["resident", "offloaded", "recreated", "swapped"]
"""Between its calls a role stays in GPU memory, moves to host memory, or is destroyed and created again. A
reference that is swapped has no GPU memory of its own: for its pass the actor's weights are copied out to
the host and its own into their place (NeMo-RL and slime; `memory.role_bytes`)."""

Late = Literal["wait", "drop", "requeue"]


@checked
@frozen
class ResourcePool:
    """A contiguous set of the cluster's GPUs, node by node."""

    name: str
    start: Annotated[int, Field(ge=0)] = 0
    """First GPU, counted over the cluster."""
    gpus: Annotated[int, Field(ge=1)]
    hardware: Annotated[int, Field(ge=0)] = 0
    """Index into `cluster.node_groups`."""

    @property
    def end(self) -> int:
        """First GPU behind it."""
        return self.start + self.gpus

    def gpus_on(self, hardware: int, node: int, size: int) -> int:
        """GPUs of this pool on one node of `size` GPUs."""
        if self.hardware != hardware:
            return 0
        return max(0, min((node + 1) * size, self.end) - max(node * size, self.start))


@checked
@frozen
class RolePlacement:
    """A trained or scoring role: its pool, layout and what happens to it between its calls."""

    pool: str
    layout: Layout
    residency: Residency = "resident"
    offload_between: bool = False
    """Optimizer states (and gradients) of a trained role move to host memory between its calls."""


class Rest(NamedTuple):
    """What happens to a trained or scoring role between its calls, as `RolePlacement` has it."""

    residency: Residency
    offload_between: bool

    @property
    def frees(self) -> bool:
        """Whether something leaves GPU memory."""
        return self.offload_between or self.residency != "resident"


@checked
@frozen
class RolloutPlacement:
    """The inference engine of the actor."""

    pool: str
    layout: RolloutLayout
    sleep: Annotated[int, Field(ge=0, le=2)] = 2
    """vLLM sleep level between rollouts: 0 all stays, 1 weights to host and KV freed, 2 both freed."""
    residency: Residency = "resident"

    @property
    def sleep_level(self) -> int:
        """The level that is meant: an engine that is offloaded sleeps."""
        return max(self.sleep, 1) if self.residency == "offloaded" else self.sleep

    def lent(self, pool: str, gpus: int) -> RolloutPlacement:
        """The same engine in replicas on the GPUs of a trainer, asleep but while it lends them."""
        replicas = max(1, gpus // self.layout.replica_gpus)
        return replace(self, pool=pool, layout=replace(self.layout, dp=replicas), sleep=2)


@checked
@frozen
class Schedule:
    """Order and overlap of the calls."""

    staleness: Annotated[float, Field(ge=0, le=64)] = 0
    """Most policy versions between generation and training; 0 is synchronous."""
    streaming: bool = False
    """Finished samples start scoring and training while others still generate."""
    partial_rollout: bool = False
    """Generation is interrupted at a weight update and continues with the new weights."""
    overlapped_sync: bool = False
    """Weights move while the next batch is generated."""
    queue: Annotated[float, Field(gt=0, le=64)] | None = None
    """Most finished batches that wait for the trainer; a full queue stops generation. None: no limit
    beyond what staleness admits."""
    late: Late = "wait"
    """What happens to a group that the next update makes older than `staleness`: the trainer waits for it,
    or it is thrown away and a new prompt starts (drop) or the same one again (requeue)."""
    lend: bool = False
    """The trainer's GPUs hold a sleeping engine too, and generate while they would wait for samples."""
    double_buffered: bool = False
    """Rollout workers hold two half-batches: one generates while the environment or the rewards of
    the other run (Sample Factory, arXiv 2006.11751)."""

    @property
    def asynchronous(self) -> bool:
        """Whether the next batch is generated while this one is trained on."""
        return self.staleness > 0

    @property
    def one_step_off(self) -> bool:
        """Asynchronous, batch by batch: every sample is one version old."""
        return self.staleness == 1 and not self.partial_rollout

    @property
    def continuous(self) -> bool:
        """Whether the rollout never drains: replicas take new requests as others finish."""
        return self.asynchronous and not self.one_step_off


AnyRolePlacement = RolePlacement | RolloutPlacement
NO_ROLES: Mapping[str, AnyRolePlacement] = {}
SYNCHRONOUS = Schedule()


@dataclass(frozen=True, slots=True, init=False)
class Placement:
    """Resource pools, a placement for every role, the weight path and the schedule.

    In files every role is a key of its own (`in_files`).
    """

    pools: tuple[ResourcePool, ...]
    roles: Mapping[str, AnyRolePlacement]
    """Every occupied role of `specs.workload.roles`; `rollout` is actor.generate."""
    weight_path: WeightPath
    schedule: Schedule
    backend: Backend
    software: Software | None
    """What the training stack does; None: as its backend and framework usually do."""

    def __init__(
        self,
        *,
        pools: tuple[ResourcePool, ...],
        roles: Mapping[str, AnyRolePlacement | None] = NO_ROLES,
        weight_path: WeightPath = "none",
        schedule: Schedule = SYNCHRONOUS,
        backend: Backend = "deepspeed",
        software: Software | None = None,
        **named: AnyRolePlacement | None,
    ) -> None:
        """`named`: single roles, over those of `roles`; None: the plan has no such role."""
        values = pools, ByRole({**roles, **named}), weight_path, schedule, backend, software
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        """Check that pools have names of their own and that every role names one and fits in it."""
        names = [pool.name for pool in self.pools]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise RlhfsimError(
                "duplicate-pool", f"pool {twice!r} is declared twice", help="give it another name"
            )
        for role, placed in self.roles.items():
            if placed.pool not in {pool.name for pool in self.pools}:
                raise RlhfsimError(
                    "unknown-pool",
                    f"{role} sits in pool {placed.pool!r}, which is not declared",
                    help="declare it under pools",
                )
            if placed.layout.gpus > self.pool(placed.pool).gpus:
                raise RlhfsimError(
                    "layout-exceeds-pool",
                    f"the layout of {role} needs {placed.layout.gpus} GPUs, its pool has "
                    f"{self.pool(placed.pool).gpus}",
                    help="lower dp, pp or tp",
                )
        self._check_swapped()

    def check_pools(self, gpus: Sequence[int]) -> None:
        """Check that every pool lies on GPUs of its own; `gpus`: how many there are of each kind of hardware.

        Raises:
            RlhfsimError: a kind that is not there, too many GPUs of one, or GPUs that two pools share.
        """
        for pool in self.pools:
            if pool.hardware >= len(gpus):
                raise RlhfsimError(
                    "unknown-hardware",
                    f"pool {pool.name!r} names hardware {pool.hardware}, the cluster has {len(gpus)} kinds",
                    help="count from 0",
                )
            if pool.end > gpus[pool.hardware]:
                raise RlhfsimError(
                    "pool-exceeds-cluster",
                    f"pool {pool.name!r} ends at GPU {pool.end}, the cluster has {gpus[pool.hardware]}",
                    help="lower start or gpus",
                )
        for one, other in combinations(self.pools, 2):
            if one.hardware == other.hardware and one.start < other.end and other.start < one.end:
                raise RlhfsimError(
                    "pools-overlap",
                    f"pools {one.name!r} and {other.name!r} share GPUs",
                    help="roles that share GPUs sit in one pool",
                )

    def _check_swapped(self) -> None:
        """Check that what is swapped is a reference whose weights fit exactly where the actor's lie."""
        reference, actor = self.role("reference"), self.actor
        others = {role: placed for role, placed in self.roles.items() if role != "reference"}
        if role := next((name for name, placed in others.items() if placed.residency == "swapped"), None):
            raise RlhfsimError(
                "only-references-are-swapped",
                f"residency of the {role}: only a reference takes the place of the actor's weights",
                help="use residency: offloaded",
            )
        if reference is None or reference.residency != "swapped":
            return
        if reference.pool != actor.pool or actor.residency != "resident":
            where = "in another pool" if reference.pool != actor.pool else f"that is {actor.residency}"
            raise RlhfsimError(
                "swapped-without-actor",
                f"the swapped reference takes the place of an actor {where}: its weights must be on the GPUs",
                help="use residency: offloaded for the reference",
            )
        if weights_cut(reference.layout, self.backend) != weights_cut(actor.layout, self.backend):
            raise RlhfsimError(
                "swapped-layout-differs",
                f"the swapped reference has {reference.layout.label}, the actor {actor.layout.label}",
                help="give both the same degrees and shards",
            )

    @staticmethod
    @cache
    def in_files() -> type[Any]:
        """The dataclass of a placement in files."""
        hints, usual = get_type_hints(Placement, include_extras=True), Placement.__init__.__kwdefaults__ or {}
        kinds = {role.name: (RolloutPlacement if role.generates else RolePlacement) | None for role in TABLE}
        keys: list[Any] = [("pools", hints["pools"]), *((name, kind, None) for name, kind in kinds.items())]
        keys[1 + NAMES.index("actor")] = ("actor", RolePlacement)
        keys += [(name, hints[name], usual[name]) for name in Placement.__slots__[2:]]
        return checked(make_dataclass("Placement", keys, frozen=True, slots=True, kw_only=True))

    @property
    def keyed(self) -> Any:
        """The same as files have it."""
        own = {name: getattr(self, name) for name in self.__slots__ if name != "roles"}
        return self.in_files()(**own, **self.roles)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Read from and written to the keys of files."""
        del source
        keys = cls.in_files()

        def read(keyed: Any) -> Placement:
            return cls(**{field.name: getattr(keyed, field.name) for field in fields(keyed)})

        written = PlainSerializer(lambda placement: placement.keyed, return_type=keys)
        return handler.generate_schema(Annotated[keys, AfterValidator(read), written])

    def role(self, name: str) -> RolePlacement | None:
        """A trained or scoring role; None where the plan has none."""
        return self.trainers.get(name)

    @property
    def trainers(self) -> dict[str, RolePlacement]:
        """Every trained or scoring role by name: all but the rollout."""
        return {name: role for name, role in self.roles.items() if isinstance(role, RolePlacement)}

    def together(self, *names: str) -> bool:
        """Whether some roles are all there, in one pool."""
        homes = [self.roles[name].pool for name in names if name in self.roles]
        return len(homes) == len(names) and len(set(homes)) == 1

    @property
    def actor(self) -> RolePlacement:
        """The policy where it is trained."""
        return cast(RolePlacement, self.roles["actor"])

    @property
    def rollout(self) -> RolloutPlacement | None:
        """The engine of the policy."""
        return cast(RolloutPlacement | None, self.roles.get("rollout"))

    def having(self, **roles: AnyRolePlacement | None) -> Placement:
        """The same with some roles in other ways, or without those that are None."""
        return replace(self, roles=ByRole({**self.roles, **roles}))

    def pool(self, name: str) -> ResourcePool:
        """A pool by name."""
        return next(pool for pool in self.pools if pool.name == name)

    @property
    def lent(self) -> Placement:
        """The same roles with the engine on the trainer's GPUs, as it is while they are lent."""
        assert self.rollout is not None, "only a rollout is lent to"
        rollout = self.rollout.lent(self.actor.pool, self.pool(self.actor.pool).gpus)
        return replace(self.having(rollout=rollout), weight_path="ipc", schedule=Schedule())

    @property
    def architecture(self) -> Architecture:
        """The label of actor.generate against actor.train (docs/architecture.md, "One idea")."""
        if self.schedule.asynchronous:
            return "lend" if self.schedule.lend else "async"
        if self.rollout is None or self.rollout.pool == self.actor.pool:
            if self.rollout is not None and WEIGHT_PATHS[self.weight_path].gpu_memory:
                return "hybrid"
            return "smart" if self._frees_memory else "naive"
        return "disaggregated"

    @property
    def _frees_memory(self) -> bool:
        between = any(s.offload_between or s.residency != "resident" for s in self.trainers.values())
        return between or (
            self.rollout is not None and (self.rollout.sleep > 0 or self.rollout.residency != "resident")
        )

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The roles of each pool."""
        roles = self.roles.items()
        return tuple(tuple(name for name, role in roles if role.pool == pool.name) for pool in self.pools)

    @property
    def role_placement(self) -> RolePlacementLabel:
        """How the roles share pools: one pool, groups, or each its own."""
        return role_placement([role.pool for role in self.trainers.values()])


def weights_cut(layout: Layout, backend: Backend) -> tuple[object, ...]:
    """What decides which elements of a model lie on which GPU."""
    return layout.dp, *model_cut(layout, backend)


def model_cut(layout: Layout, backend: Backend) -> tuple[object, ...]:
    """The same on any number of copies."""
    x, sharded = layout, layout.zero >= (2 if backend == "fsdp2" else 3)
    return x.tp, x.pp, x.cp, x.ep, x.etp, x.shards, sharded, x.offload_params


def role_placement(pools: Sequence[str]) -> RolePlacementLabel:
    """The label of roles that sit in these pools, one entry a role."""
    distinct = len(set(pools))
    if distinct == 1:
        return "colocated"
    return "standalone" if distinct == len(pools) else "split"
