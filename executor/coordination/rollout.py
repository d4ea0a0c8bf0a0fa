"""The driver's handle on the processes of the replicas of a rollout engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from executor.coordination.failures import collect
from executor.coordination.replica import Replica, ReplicaFollower, ReplicaIdentity
from executor.coordination.tracing import Reply
from executor.coordination.worker_group import Site
from executor.engines.protocols import EngineNode, RolloutSpec
from executor.ranks import by_node, replica_places
from rlhfsim.plan import Plan

Record = Callable[[str, Reply], None]
THREADS = 8
"""Calls that a replica can have at once: polls, submissions, commands."""


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
        for part, reply in zip(self.parts, replies, strict=False):
            self.record(part, reply)

    def call(self, method: str, *args: Any, limit_s: float, each: Sequence[Any] | None = None) -> list[Any]:
        """Values of all replicas.

        Raises:
            PartFailed: a replica died, raised or was too slow.
        """
        refs = [
            getattr(actor, method).remote(*args, *((each[i],) if each is not None else ()))
            for i, actor in enumerate(self.actors)
        ]
        replies = collect(refs, self.parts, f"rollout {method}", limit_s)
        for part, reply in zip(self.parts, replies, strict=True):
            if isinstance(reply, Reply):
                self.record(part, reply)
                self.readings[part] = reply.memory or {}
        return [r.value if isinstance(r, Reply) else r for r in replies]

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


def spawn(plan: Plan, site: Site, record: Record, name: str = "rollout replica") -> ReplicaPool:
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
