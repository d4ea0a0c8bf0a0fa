"""The driver's handles on processes: on a worker group, which is the ranks that serve the roles of one set of
GPUs and one layout, and on the replicas of a rollout engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from executor.coordination.cluster import GPU, Reservation
from executor.coordination.failures import collect
from executor.coordination.replica import Replica, ReplicaFollower, ReplicaIdentity
from executor.coordination.tracing import Reply
from executor.coordination.worker import Worker, WorkerIdentity
from executor.engines.fake import Fakes
from executor.engines.protocols import EngineNode, RolloutSpec
from executor.ranks import TENANTS, GroupSpec, Place, by_node, replica_places
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan

CLOCK_S = 30.0
"""Most that one look at another process's clock takes."""
Record = Callable[[Sequence[str], Sequence[Reply]], None]
"""Takes parts, and what each replied."""
THREADS = 8
"""Calls that a replica can have at once: polls, submissions, commands."""


@dataclass(slots=True, kw_only=True)
class WorkerGroup:
    """The processes of a group. A call goes to all of them at once, so that collectives meet in one order."""

    spec: GroupSpec
    actors: list[Any]
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a call is handed to the ranks: two threads never interleave."""

    @property
    def parts(self) -> list[str]:
        """Names of the ranks, for people."""
        return [f"{self.spec.name} rank {i}" for i in range(len(self.actors))]

    def call(
        self, method: str, *args: Any, limit_s: float, each: Sequence[Any] | None = None, what: str = ""
    ) -> list[Reply]:
        """Replies of all ranks; `each` gives every rank an own first argument; `what` is the call for people.

        Raises:
            PartFailed: a rank died, raised or was too slow.
        """
        with self.lock:
            refs = [
                getattr(actor, method).remote(*((each[i],) if each is not None else ()), *args)
                for i, actor in enumerate(self.actors)
            ]
        return collect(refs, self.parts, what or f"{self.spec.name} {method}", limit_s)


@frozen
class Site:
    """Where and how the processes of a run are started."""

    reservation: Reservation
    environment: Mapping[str, str]
    scratch: Path
    fakes: Fakes | None = None

    def actor(self, kind: type, places: Sequence[Place], **options: Any) -> Any:
        """The actor class of a process that uses these GPUs of a node."""
        variables = {**self.environment, **self.reservation.devices(places)}
        where = self.reservation.options(places[0], 1 / TENANTS)
        return ray.remote(kind).options(
            max_restarts=0, runtime_env={"env_vars": variables}, **where, **options
        )

    def identity(self, pool: str, places: Sequence[Place]) -> dict[str, Any]:
        """Fields of a `ProcessIdentity` that tells of these places."""
        on_gpu = self.reservation.resource == GPU
        counted = self.fakes is not None or on_gpu
        return {
            "pool": pool,
            "gpus": tuple(f"gpu {node}.{gpu}" for node, gpu in places) if counted else (),
            "gpu": on_gpu,
            "slots": self.reservation.slots(places[0], self.environment),
            "fakes": self.fakes,
            "scratch": str(self.scratch / "gpus"),
        }


def spawn(spec: GroupSpec, site: Site) -> WorkerGroup:
    """Start the processes of a group; `join` makes them a group."""
    actors = [
        site.actor(Worker, (place,)).remote(
            WorkerIdentity(
                rank=rank,
                ranks=len(spec.places),
                neighbours=sum(other[0] == place[0] for other in spec.places),
                **site.identity(spec.pool, (place,)),
            )
        )
        for rank, place in enumerate(spec.places)
    ]
    return WorkerGroup(spec=spec, actors=actors)


def join(group: WorkerGroup, limit_s: float, collective_s: float) -> None:
    """Rendezvous of all ranks at rank 0 within `limit_s`; each collective later within `collective_s`."""
    [(host, port)] = collect(
        [group.actors[0].rendezvous.remote()], group.parts[:1], "start of the process", limit_s
    )
    group.call("start", host, port, collective_s, limit_s=limit_s)


def clock_of(actor: Any) -> float:
    """Seconds of the clock of an actor's process."""
    return float(ray.get(actor.now.remote(), timeout=CLOCK_S))


@dataclass(slots=True, kw_only=True)
class ReplicaPool:
    """The processes of all replicas."""

    pool: str
    actors: list[Any]
    followers: list[list[Any]]
    """Followers of each replica, a process on every further node."""
    receivers_each: int
    """Engine worker processes of one replica."""
    record: Record
    """Where spans and memory of a part's replies go."""
    name: str = "rollout replica"
    """What each is called, before its number."""
    readings: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """What each part held after its last call, and at most during it."""
    ending: bool = False
    """Its processes end on purpose."""

    @property
    def parts(self) -> list[str]:
        """Names of the replicas, for people."""
        return [f"{self.name} {i}" for i in range(len(self.actors))]

    @property
    def processes(self) -> dict[str, Any]:
        """Every process by its name."""
        everyone = dict(zip(self.parts, self.actors, strict=True))
        for part, followers in zip(self.parts, self.followers, strict=True):
            everyone |= {f"{part} node {i}": follower for i, follower in enumerate(followers, 1)}
        return everyone

    def prepare(self) -> None:
        """Begin to import the engine; nobody waits for it."""
        for actor in self.actors:
            actor.prepare.remote()

    def build(self, spec: RolloutSpec, limit_s: float) -> None:
        """Create the engine of every replica, on all of its nodes at once.

        Raises:
            PartFailed: one did not come up.
        """
        everyone = list(zip(self.parts, self.actors, self.followers, strict=True))
        leaders = {part: actor for part, actor, followers in everyone if followers}
        asked = [actor.address.remote() for actor in leaders.values()]
        addresses = collect(asked, list(leaders), "rollout address", limit_s)
        meeting = dict(zip(leaders, addresses, strict=True))
        building: dict[str, Any] = {}
        for part, actor, followers in everyone:
            host, port = meeting.get(part, ("", 0))
            for node, process in enumerate((actor, *followers)):
                place = EngineNode(nodes=1 + len(followers), node=node, host=host, port=port)
                name = f"{part} node {node}" if node else part
                building[name] = process.build.remote(replace(spec, place=place))
        names = list(self.processes)
        replies = collect([building[name] for name in names], names, "rollout build", limit_s)
        self.record(self.parts, replies[: len(self.actors)])

    def call(self, method: str, *args: Any, limit_s: float, each: Sequence[Any] | None = None) -> list[Any]:
        """Values of all replicas.

        Raises:
            PartFailed: a replica died, raised or was too slow.
        """
        refs = [
            getattr(actor, method).remote(*args, *((each[i],) if each is not None else ()))
            for i, actor in enumerate(self.actors)
        ]
        replies: list[Reply] = collect(refs, self.parts, f"rollout {method}", limit_s)
        self.record(self.parts, replies)
        self.readings |= {part: r.memory or {} for part, r in zip(self.parts, replies, strict=True)}
        return [reply.value for reply in replies]

    def close(self, limit_s: float = 30.0) -> None:
        """Shut the engines down in order, then end their processes."""
        self.ending = True
        refs = [actor.close.remote() for actor in self.actors]
        ray.wait(refs, num_returns=len(refs), timeout=limit_s)
        refs = [follower.close.remote() for of_replica in self.followers for follower in of_replica]
        ray.wait(refs, num_returns=len(refs), timeout=limit_s)
        self.kill()

    def kill(self) -> None:
        """End the processes at once; the engines' own processes see it and follow."""
        self.ending = True
        for actor in self.processes.values():
            ray.kill(actor)


def spawn_replicas(plan: Plan, site: Site, record: Record, name: str = "rollout replica") -> ReplicaPool:
    """Start the processes of every replica of the plan; `build` gives them engines."""
    role = plan.placement.rollout
    assert role is not None, "the plan has no rollout role"
    replicas = [
        [
            site.actor(ReplicaFollower if node else Replica, here, max_concurrency=THREADS).remote(
                ReplicaIdentity(
                    name=f"{name.removeprefix('rollout ')} {index}",
                    # the leader tells the memory of all
                    **site.identity(role.pool, here if node else places),
                )
            )
            for node, here in enumerate(by_node(places))
        ]
        for index, places in enumerate(replica_places(plan))
    ]
    return ReplicaPool(
        pool=role.pool,
        actors=[processes[0] for processes in replicas],
        followers=[processes[1:] for processes in replicas],
        receivers_each=role.layout.replica_gpus,
        record=record,
        name=name,
    )
