"""The driver's handle on a worker group: the ranks that serve the roles of one set of GPUs and one layout."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from executor.coordination.cluster import GPU, Reservation
from executor.coordination.failures import collect
from executor.coordination.tracing import Reply
from executor.coordination.worker import Worker, WorkerIdentity
from executor.engines.fake import Fakes
from executor.ranks import TENANTS, GroupSpec, Place

CLOCK_S = 30.0
"""Most that one look at another process's clock takes."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
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
