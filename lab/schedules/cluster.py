"""Ray in one process: handles whose calls run at once, and processes and nodes that die, hang or fail."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from executor.coordination.saving import ended_by_sigterm
from lab.schedules.world import World

DRIVER_NODE = "node-0"
CALL_S = 0.5
"""Mean seconds of a call."""
FED = 0.5
"""Share of the driver's waits in which an asynchronous rollout has a turn."""


class _Gone(BaseException):
    """The process that runs this has just been killed."""


@dataclass(eq=False, slots=True)
class Ref:
    """The result of a call, and when it is there."""

    value: Any = None
    error: Exception | None = None
    ready_s: float = 0.0


@dataclass(eq=False, slots=True)
class Handle:
    """A process."""

    cluster: Cluster
    node: str
    number: int
    instance: Any = None
    alive: bool = True

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)
        return SimpleNamespace(remote=lambda *args: self.cluster.call(self, method, args))


@dataclass(eq=False, slots=True)
class Cluster:
    """What the coordination layer uses of the module `ray`, and what its launcher reserves."""

    world: World
    classes: Mapping[type, Callable[[Cluster, Any], Any]]
    """Class of an actor -> what runs in its place."""
    staleness: int = 0
    """Most weight versions between a token and the training on it."""
    channels: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Weight channel -> version and state that lie in it."""
    sums: dict[tuple[str, int], dict[int, str]] = field(default_factory=dict)
    """Role and number of a collective -> what each rank gave."""
    watches: list[Any] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    initial: str = ""
    """State of the policy that the model's folder has."""
    states: dict[int, str] = field(default_factory=dict)
    """Weight version -> state of the policy."""
    feeder: Any = None
    """What keeps an asynchronous rollout busy: its turns come while the driver waits."""
    resource: str = "slot"
    _next_call: str = ""
    """How the next call fails: `hang` or `raise`."""
    _running: list[Handle] = field(default_factory=list)
    _watching: bool = False

    def __post_init__(self) -> None:
        """Take part in the faults of the world."""
        self.world.act |= {
            "worker": self._lose_process,
            "node": self._lose_node,
            "hang": lambda: setattr(self, "_next_call", "hang"),
            "raise": lambda: setattr(self, "_next_call", "raise"),
        }

    # --- faults -----------------------------------------------------------------------------------

    def _lose_process(self) -> None:
        if living := [handle for handle in self.handles if handle.alive]:
            self._lose([living[self.world.rng.integers(len(living))]])

    def _lose_node(self) -> None:
        """One that the driver is not on."""
        self._lose([handle for handle in self.handles if handle.node != DRIVER_NODE])

    def _lose(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            handle.alive = False
        if self._running and not self._running[-1].alive:
            raise _Gone

    @property
    def running(self) -> Any:
        """The actor whose call runs."""
        return self._running[-1].instance

    # --- the module `ray` -------------------------------------------------------------------------

    def remote(self, kind: type) -> Any:
        """The class of an actor."""

        def start(*args: Any, node: str = DRIVER_NODE) -> Handle:
            self.world.operation()
            handle = Handle(self, node, len(self.handles))
            self.handles.append(handle)
            handle.instance = self.classes[kind](self, *args)
            return handle

        def options(*, node: str = DRIVER_NODE, **_: Any) -> Any:
            return SimpleNamespace(remote=lambda *args: start(*args, node=node))

        return SimpleNamespace(options=options, remote=start)

    def call(self, handle: Handle, method: str, args: Sequence[Any]) -> Ref:
        """Run a method of an actor."""
        if method == "prepare":  # imports; nobody waits for them
            return Ref()
        self.world.operation()
        if not handle.alive:
            return Ref(error=ActorDiedError())
        how, self._next_call = self._next_call, ""
        if how == "hang":
            return Ref(ready_s=math.inf)
        ready_s = self.world.now_s + float(self.world.rng.exponential(CALL_S))
        if how == "raise":
            return Ref(
                error=_task_error(method, RuntimeError("CUDA error: an illegal access")), ready_s=ready_s
            )
        self._running.append(handle)
        try:
            given = [arg.value if isinstance(arg, Ref) else arg for arg in args]
            return Ref(value=self._value(handle, method, given), ready_s=ready_s)
        except _Gone:
            return Ref(error=ActorDiedError(), ready_s=ready_s)
        except Exception as error:
            return Ref(error=_task_error(method, error), ready_s=ready_s)
        finally:
            self._running.pop()

    def _value(self, handle: Handle, method: str, args: Sequence[Any]) -> Any:
        match method:
            case "whereabouts":
                return 1000 + handle.number, handle.node
            case "address":
                return "127.0.0.1", 20_000 + handle.number
            case "now":
                return self.world.time()
        return getattr(handle.instance, method)(*args)

    def feed(self) -> None:
        """One turn of the feeder, whose thread this is instead; what fails there fails its buffer."""
        feeder, self.feeder = self.feeder, None
        if feeder is None:
            return
        try:
            feeder.turn()
            self.feeder = feeder
        except Exception as error:
            feeder._buffer.fail(error)

    def wait(
        self, refs: Sequence[Ref], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Ref], list[Ref]]:
        """Those that are ready when all are, or after `timeout` seconds."""
        self.world.operation()
        if self.feeder is not None and self.world.rng.random() < FED:
            self.feed()
        latest = max((ref.ready_s for ref in refs), default=0.0)
        self.world.now_s = max(self.world.now_s, min(latest, self.world.now_s + (timeout or 0.0)))
        ready = [ref for ref in refs if ref.ready_s <= self.world.now_s]
        late = [ref for ref in refs if ref.ready_s > self.world.now_s]
        if late:
            self._look()
        return ready, late

    def _look(self) -> None:
        """What the threads of the watches do once a second."""
        if self._watching:
            return
        self._watching = True
        for watch in self.watches:
            if watch._lock.locked():  # it is the one who waits
                continue
            watch._look()
            if watch.failure is not None:
                watch._died()
        self._watching = False

    def get(self, refs: Ref | Sequence[Ref], timeout: float | None = None) -> Any:
        """Values; an error is raised."""
        if not isinstance(refs, Ref):
            return [self.get(ref, timeout) for ref in refs]
        self.world.operation()
        if refs.ready_s > self.world.now_s + (timeout or 0.0):
            self.world.now_s += timeout or 0.0
            raise GetTimeoutError("the result is not there")
        if refs.error is not None:
            raise refs.error
        return refs.value

    def put(self, value: Any) -> Ref:
        """Something for several calls."""
        self.world.operation()
        return Ref(value=value)

    def kill(self, handle: Handle) -> None:
        """End a process."""
        if self.world.dead:  # a generator that is thrown away later ends what it ran
            return
        self.world.operation()
        handle.alive = False

    def is_initialized(self) -> bool:
        """Whether the driver is part of it."""
        return True

    @property
    def util(self) -> Any:
        """The part of Ray's API that gives the driver's address."""
        return SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    # --- a reservation ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def joined(self, *_: Any) -> Iterator[Cluster]:
        """All slots are there."""
        self.handles.clear()
        self.watches.clear()
        self.channels.clear()
        self.sums.clear()
        self.states = {0: self.initial}
        self.feeder = None
        self.world.operation()
        with ended_by_sigterm():
            yield self

    def options(self, place: tuple[int, int], share: float) -> dict[str, Any]:
        """Where an actor is."""
        return {"node": f"node-{place[0]}"}

    def devices(self, places: Sequence[Any]) -> dict[str, str]:
        """No GPUs."""
        return {}

    def slots(self, place: Any, environment: Mapping[str, str]) -> int | None:
        """Threads are nobody's matter."""
        return None


def _task_error(method: str, error: Exception) -> RayTaskError:
    return RayTaskError(method, f"{type(error).__name__}: {error}", error)
