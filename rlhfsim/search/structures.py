"""Pools, who sits in which, and what leaves GPU memory between phases: the frame of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from rlhfsim.search.request import Request
from rlhfsim.specs.models import Models
from rlhfsim.specs.placement import GpuSet, RolePlacementLabel, Schedule, WeightPath, role_placement

SYNCHRONOUS = Schedule()
MAX_SPLITS = 8
"""Rollout pool sizes that are tried on a large cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the seats of one pool do between their calls."""

    sleep: Literal[0, 2] = 0
    """vLLM sleep level of a rollout in this pool."""
    frozen_offloaded: bool = False
    """Reference and reward weights wait in host memory."""
    optimizer_offloaded: bool = False
    """Optimizer states of trained roles wait in host memory."""

    def moves(self, seat: str) -> bool:
        """Whether it takes something of this seat out of GPU memory between calls."""
        if seat == "rollout":
            return self.sleep > 0
        return self.optimizer_offloaded if seat in ("actor", "critic") else self.frozen_offloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """A plan without its layouts."""

    name: str
    """Architecture that it leads to."""
    pools: tuple[GpuSet, ...]
    seats: Mapping[str, str]
    """Seat -> pool name."""
    policies: Mapping[str, Policy]
    """Pool name -> policy."""
    paths: tuple[WeightPath, ...]
    """Weight paths that may be used; the fastest available one is."""
    schedule: Schedule = SYNCHRONOUS

    def seats_in(self, pool: str) -> tuple[str, ...]:
        """Seats of one pool, in a fixed order."""
        return tuple(seat for seat, name in self.seats.items() if name == pool)

    @property
    def role_placement(self) -> RolePlacementLabel:
        """How the roles share pools."""
        return role_placement([pool for seat, pool in self.seats.items() if seat != "rollout"])


RESIDENT = Policy()
SLEEPING = tuple(
    Policy(sleep=2, frozen_offloaded=f, optimizer_offloaded=o)
    for f in (False, True)
    for o in (False, True)
)
AWAKE = tuple(
    Policy(frozen_offloaded=f, optimizer_offloaded=o) for f in (False, True) for o in (False, True)
)
COPIES: tuple[WeightPath, ...] = ("host", "disk")
NETWORK: tuple[WeightPath, ...] = ("broadcast", "host", "disk")


def structures(request: Request, models: Models) -> Iterator[Structure]:
    """Every structure that the request lets compete."""
    seats = _seats(request, models)
    wanted = request.architecture
    for structure in _all(request, seats):
        label = structure.name
        roles = structure.role_placement
        if wanted not in (None, label) or label in request.forbid or roles in request.forbid:
            continue
        if "offload" in request.forbid and any(
            p.frozen_offloaded or p.optimizer_offloaded for p in structure.policies.values()
        ):
            continue
        yield structure


def _seats(request: Request, models: Models) -> tuple[str, ...]:
    """Seats that the workload needs; with LoRA the actor's base is the reference."""
    present = ["rollout"] if request.workload.generates else []
    present.append("actor")
    for role in ("critic", "reference", "reward"):
        if getattr(models, role) is not None:
            present.append(role)
    return tuple(present)


def _all(request: Request, seats: tuple[str, ...]) -> Iterator[Structure]:
    mixed = len(request.cluster.pools) > 1
    if not mixed:
        yield from _one_pool(request, seats)
        yield from _role_groups(request, seats)
    if "rollout" in seats:
        yield from _two_pools(request, seats, mixed)


def _paths(request: Request, paths: tuple[WeightPath, ...]) -> tuple[WeightPath, ...]:
    return ("lora", *paths) if "lora" in request.switches else paths


def _one_pool(request: Request, seats: tuple[str, ...]) -> Iterator[Structure]:
    pools = (GpuSet(name="all", gpus=request.cluster.pool.gpus),)
    home = dict.fromkeys(seats, "all")
    if "rollout" not in seats:
        for policy in AWAKE:
            name = "naive" if policy == RESIDENT else "smart"
            yield Structure(
                name=name, pools=pools, seats=home, policies={"all": policy}, paths=("none",)
            )
        return
    yield Structure(
        name="naive",
        pools=pools,
        seats=home,
        policies={"all": RESIDENT},
        paths=_paths(request, COPIES),
    )
    for policy in SLEEPING:
        yield Structure(
            name="smart",
            pools=pools,
            seats=home,
            policies={"all": policy},
            paths=_paths(request, COPIES),
        )
        yield Structure(
            name="hybrid",
            pools=pools,
            seats=home,
            policies={"all": policy},
            paths=_paths(request, ("ipc",)),
        )


def _role_groups(request: Request, seats: tuple[str, ...]) -> Iterator[Structure]:
    """Hybrid engines with {actor, reference} apart from {critic, reward}, or every role apart."""
    others = [s for s in seats if s not in ("rollout", "actor", "reference")]
    if not others or "rollout" not in seats:
        return
    total, unit = request.cluster.pool.gpus, _unit(request)
    for first in _sizes(total, unit, (0.5, 0.625, 0.75)):
        pools = (
            GpuSet(name="policy", gpus=first),
            GpuSet(name="value", start=first, gpus=total - first),
        )
        home = {s: "value" if s in others else "policy" for s in seats}
        for policy in SLEEPING:
            yield Structure(name="hybrid", pools=pools, seats=home, paths=_paths(request, ("ipc",)),
                            policies={"policy": policy, "value": Policy(optimizer_offloaded=policy.optimizer_offloaded)})  # fmt: skip
    yield from _standalone(request, seats, total, unit)


def _standalone(
    request: Request, seats: tuple[str, ...], total: int, unit: int
) -> Iterator[Structure]:
    roles = [s for s in seats if s != "rollout"]
    scoring = [s for s in roles if s in ("reference", "reward")]
    trained = [s for s in roles if s not in scoring]
    small = max(unit, total // 8 // unit * unit)
    rest = total - small * len(scoring)
    if len(roles) < 3 or rest < 2 * unit * len(trained):
        return
    critic = max(unit, rest // 3 // unit * unit) if len(trained) > 1 else 0
    sizes = {"actor": rest - critic, "critic": critic, "reference": small, "reward": small}
    pools, start = [], 0
    for role in roles:
        pools.append(GpuSet(name=role, start=start, gpus=sizes[role]))
        start += sizes[role]
    home = {s: "actor" if s == "rollout" else s for s in seats}
    for sleeping in SLEEPING[:2]:
        policies = {p.name: Policy() for p in pools} | {"actor": sleeping}
        yield Structure(
            name="hybrid",
            pools=tuple(pools),
            seats=home,
            policies=policies,
            paths=_paths(request, ("ipc",)),
        )


def _two_pools(request: Request, seats: tuple[str, ...], mixed: bool) -> Iterator[Structure]:
    """Rollout apart from the rest: synchronous, and asynchronous where that is allowed."""
    schedules = [("disaggregated", Schedule())]
    if "async" in request.switches:
        schedules.append(("async", Schedule(staleness=1, overlapped_sync=False)))
        if request.max_staleness > 1:
            schedules.append(
                ("async", Schedule(staleness=request.max_staleness, partial_rollout=True))
            )
    for pools in _rollout_splits(request, mixed):
        home = {s: "rollout" if s == "rollout" else "train" for s in seats}
        for policy in AWAKE:
            for name, schedule in schedules:
                yield Structure(name=name, pools=pools, seats=home, policies={"rollout": RESIDENT, "train": policy},
                                paths=_paths(request, NETWORK), schedule=schedule)  # fmt: skip


def _rollout_splits(request: Request, mixed: bool) -> Iterator[tuple[GpuSet, ...]]:
    if mixed:
        train, rollout = request.cluster.pools[0], request.cluster.pools[1]
        yield (
            GpuSet(name="train", gpus=train.gpus),
            GpuSet(name="rollout", gpus=rollout.gpus, hardware=1),
        )
        return
    total = request.cluster.pool.gpus
    for rollout_gpus in _sizes(
        total, _unit(request), tuple((i + 1) / (MAX_SPLITS + 1) for i in range(MAX_SPLITS))
    ):
        yield (
            GpuSet(name="train", gpus=total - rollout_gpus),
            GpuSet(name="rollout", start=total - rollout_gpus, gpus=rollout_gpus),
        )


def _unit(request: Request) -> int:
    """Pool sizes are whole nodes on clusters of several nodes."""
    pool = request.cluster.pool
    return pool.gpus_per_node if pool.gpus >= 2 * pool.gpus_per_node else 1


def _sizes(total: int, unit: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Distinct multiples of `unit` near the shares of `total`, never 0 nor all."""
    near = {min(max(unit, round(total * share / unit) * unit), total - unit) for share in shares}
    return tuple(sorted(size for size in near if 0 < size < total))
