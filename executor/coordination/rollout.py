"""The driver's handle on all replicas of the rollout engine: requests balanced, results gathered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from executor.coordination.cluster import Reservation
from executor.coordination.failures import PartFailed, collect
from executor.coordination.replica import Replica, ReplicaFollower, ReplicaIdentity
from executor.coordination.tracing import Reply
from executor.coordination.worker_group import process_of
from executor.engines.fake import Fakes
from executor.engines.protocols import EngineNode, RolloutSpec
from executor.ranks import Place, by_node, replica_places
from executor.samples import Completion, GenerationRequest
from rlhfsim.plan import Plan

LONG_POLL_S = 2.0
"""Most that one poll waits."""
POLL_GRACE_S = 60.0
"""A replica that answers a poll so much later than it should hangs; a long scheduler step is shorter."""
IDLE_S = 0.05
"""A poll with nothing outstanding waits so long."""
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
    arrived: Callable[[Sequence[Completion]], None]
    """Told of every response at once."""
    outstanding: dict[int, int] = field(default_factory=dict)
    """Id of a request -> replica."""
    readings: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """What each part held after its last call, and at most during it."""
    ending: bool = False
    """Its processes end on purpose."""
    _waited: list[dict[int, Completion | None]] = field(default_factory=list)
    """Completions so far of the requests of each `generate` that runs."""
    _done: list[Completion] = field(default_factory=list)
    """Completions that wait for a `poll`."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def parts(self) -> list[str]:
        """Names of the replicas, for people."""
        return [f"rollout replica {i}" for i in range(len(self.actors))]

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
        leaders = [i for i, followers in enumerate(self.followers) if followers]
        refs = [self.actors[i].address.remote() for i in leaders]
        addresses = collect(refs, [self.parts[i] for i in leaders], "rollout address", limit_s)
        specs = [spec] * len(self.actors)
        following = []
        for i, (host, port) in zip(leaders, addresses, strict=True):
            nodes = [
                replace(
                    spec, place=EngineNode(nodes=1 + len(self.followers[i]), node=node, host=host, port=port)
                )
                for node in range(1 + len(self.followers[i]))
            ]
            specs[i] = nodes[0]
            following += [f.build.remote(n) for f, n in zip(self.followers[i], nodes[1:], strict=True)]
        building = [a.build.remote(own) for a, own in zip(self.actors, specs, strict=True)]
        others = [name for name in self.processes if name not in self.parts]
        replies = collect([*building, *following], [*self.parts, *others], "rollout build", limit_s)
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

    def submit(self, requests: Sequence[GenerationRequest], step: int, limit_s: float) -> None:
        """Give every request to the replica with least outstanding work."""
        shares: list[list[GenerationRequest]] = [[] for _ in self.actors]
        with self._lock:
            loads = self._loads()
            for request in requests:
                lightest = loads.index(min(loads))
                shares[lightest].append(request)
                loads[lightest] += 1
                self.outstanding[request.id] = lightest
        refs = [a.submit.remote(share, step) for a, share in zip(self.actors, shares, strict=True) if share]
        parts = [p for p, share in zip(self.parts, shares, strict=True) if share]
        collect(refs, parts, "rollout submit", limit_s)

    def poll(self, limit_s: float) -> list[Completion]:
        """Completions of submitted requests; waits up to `limit_s` for the first."""
        self._fetch(limit_s, all_of_them=False)
        with self._lock:
            done, self._done = self._done, []
        return done

    def generate(self, requests: Sequence[GenerationRequest], step: int, limit_s: float) -> list[Completion]:
        """All completions, in the order of their requests; others may be submitted and polled beside it.

        Raises:
            PartFailed: a replica failed, or not all were done after `limit_s`.
        """
        mine: dict[int, Completion | None] = {r.id: None for r in requests}
        with self._lock:
            self._waited.append(mine)
        self.submit(requests, step, limit_s)
        deadline = time.monotonic() + limit_s
        while unfinished := [id for id, completion in mine.items() if completion is None]:
            if time.monotonic() > deadline:
                slow = self.parts[self.outstanding.get(unfinished[0], 0)]
                raise PartFailed(
                    slow, "timed out", f"{len(unfinished)} responses unfinished after {limit_s:g} s"
                )
            self._fetch(LONG_POLL_S, all_of_them=True)
        with self._lock:
            self._waited.remove(mine)
        return [completion for completion in mine.values() if completion is not None]

    def _loads(self) -> list[int]:
        """Outstanding requests of every replica."""
        held = list(self.outstanding.values())
        return [held.count(i) for i in range(len(self.actors))]

    def _fetch(self, limit_s: float, *, all_of_them: bool) -> None:
        """Bring what is finished here, to whoever waits for it."""
        with self._lock:
            loads = self._loads()
        busy = [i for i, load in enumerate(loads) if load]
        wait = min(limit_s, LONG_POLL_S)
        if not busy:
            time.sleep(min(wait, IDLE_S))
            return
        refs = [self.actors[i].poll.remote(loads[i] if all_of_them else 1, wait) for i in busy]
        replies = collect(refs, [self.parts[i] for i in busy], "rollout poll", wait + POLL_GRACE_S)
        for i, reply in zip(busy, replies, strict=True):
            self.record(self.parts[i], reply)
        with self._lock:
            completions = [completion for reply in replies for completion in reply.value]
            self.arrived(completions)
            for completion in completions:
                self._deliver(completion)

    def _deliver(self, completion: Completion) -> None:
        del self.outstanding[completion.id]
        for mine in self._waited:
            if completion.id in mine:
                mine[completion.id] = completion
                return
        self._done.append(completion)

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


def spawn(
    plan: Plan,
    reservation: Reservation,
    share: float,
    environment: Mapping[str, str],
    scratch: Path,
    fakes: Fakes | None,
    record: Record,
    arrived: Callable[[Sequence[Completion]], None],
) -> ReplicaPool:
    """Start the processes of every replica of the plan; `build` gives them engines."""
    role = plan.placement.rollout
    assert role is not None, "the plan has no rollout role"
    replicas = [
        [
            _start(Replica if node == 0 else ReplicaFollower, here, reservation, share, environment).remote(
                ReplicaIdentity(
                    index=index,
                    slots=reservation.slots(here[0], environment),
                    # the leader tells the memory of all
                    **process_of(role.pool, places if node == 0 else here, reservation, scratch, fakes),
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
        arrived=arrived,
    )


def _start(
    kind: type, here: Sequence[Place], reservation: Reservation, share: float, environment: Mapping[str, str]
) -> Any:
    """The actor class of a process that uses these GPUs of a node."""
    return ray.remote(kind).options(
        max_restarts=0,
        max_concurrency=THREADS,
        runtime_env={"env_vars": {**environment, **reservation.devices(here)}},
        **reservation.options(here[0], share),
    )
