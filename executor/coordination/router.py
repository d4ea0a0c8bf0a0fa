"""Requests over all replicas that take some: each goes to the one with least outstanding work.

Replicas may join and leave while requests run. What is unfinished on one that leaves goes on elsewhere, with
the tokens that it has: none is lost, and none is sampled twice.

So the trainer's GPUs lent to the rollout: replicas there sleep, but while the trainer waits for samples.

They wake with the trainer's weights and take their share of the requests. Before the trainer's next call
what runs there goes on elsewhere, and the engines sleep again.

Legend: O replicas of the rollout's own pool, L lent ones, w seconds of the latest wait, a wake and b sleep as
they took last. By the rate of the latest wait the next one would take without lending

    alone = a + (w - a) (O + L) / O  where the trainer lent, else w

and to lend pays while  (alone - a) L / (O + L) > b,  which is how the simulation decides
(`rlhfsim.simulation.asynchronous.schedules`), by its own estimate of the wait.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executor.coordination.engine_memory import EngineMemory
from executor.coordination.failures import PartFailed, collect
from executor.coordination.replica import Returned
from executor.coordination.weights import WeightRoute
from executor.coordination.worker_group import ReplicaPool
from executor.resolve import Job
from executor.samples import Completion, GenerationRequest

LONG_POLL_S = 2.0
"""Most that one poll waits."""
POLL_GRACE_S = 60.0
"""A replica that answers a poll so much later than it should hangs; a long scheduler step is shorter."""
IDLE_S = 0.05
"""A poll with nothing outstanding waits so long."""
WAKE = "actor.generate.load"
"""The call in whose spans weights reach the engines that wake."""


class RequestRouter:
    """Those of one run; several threads may ask at once."""

    def __init__(self, pool: ReplicaPool, arrived: Callable[[Sequence[Completion]], None]) -> None:
        """`pool` takes requests from now on; `arrived` is told of every response at once."""
        self.outstanding: dict[int, str] = {}
        """Id of a request -> part."""
        self._arrived, self._record = arrived, pool.record
        self._actors: dict[str, Any] = dict(zip(pool.parts, pool.actors, strict=True))
        """Every replica that has ever taken requests."""
        self._taking = list(pool.parts)
        self._waited: list[dict[int, Completion | None]] = []
        """Completions so far of the requests of each `generate` that runs."""
        self._done: list[Completion] = []
        """Completions that wait for a `poll`."""
        self._lock = threading.Lock()
        self._handing = threading.RLock()
        """Held until requests are where they go: none reaches a replica that has left."""

    # --- what is asked --------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest], step: int, limit_s: float) -> None:
        """Give every request to the replica with least outstanding work."""
        with self._handing:
            self._hand_out(requests, step, limit_s)

    def poll(self, limit_s: float) -> list[Completion]:
        """Completions of submitted requests; waits up to `limit_s` for the first."""
        self._fetch(limit_s, all_of_them=False)
        with self._lock:
            done, self._done = self._done, []
        return done

    def generate(self, requests: Sequence[GenerationRequest], step: int, limit_s: float) -> list[Completion]:
        """All completions, in the order of their requests; others may be submitted and polled while it runs.

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
                slow = self.outstanding.get(unfinished[0], self._taking[0])
                raise PartFailed(
                    slow, "timed out", f"{len(unfinished)} responses unfinished after {limit_s:g} s"
                )
            self._fetch(LONG_POLL_S, all_of_them=True)
        with self._lock:
            self._waited.remove(mine)
        return [completion for completion in mine.values() if completion is not None]

    # --- who takes them -------------------------------------------------------------------------------

    def join(self, pool: ReplicaPool, step: int, limit_s: float) -> None:
        """The replicas of `pool` take requests too, and their share of those that run elsewhere."""
        with self._handing:
            self._actors |= dict(zip(pool.parts, pool.actors, strict=True))
            others, self._taking = self._taking, [*self._taking, *pool.parts]
            with self._lock:
                loads = Counter(self.outstanding.values())
            share = -(-sum(loads[part] for part in others) // len(self._taking))
            surplus = {part: loads[part] - share for part in others if loads[part] > share}
            self._hand_out(self._given_back(surplus, limit_s).requests, step, limit_s)

    def leave(self, pool: ReplicaPool, step: int, limit_s: float) -> Returned:
        """The replicas of `pool` take no more; what went on elsewhere, and the tokens that they sampled."""
        with self._handing:
            self._taking = [part for part in self._taking if part not in pool.parts]
            back = self._given_back(dict.fromkeys(pool.parts), limit_s)
            self._hand_out(back.requests, step, limit_s)
        return back

    def _given_back(self, most: Mapping[str, int | None], limit_s: float) -> Returned:
        """Unfinished requests of these parts, at most so many of each."""
        refs = [self._actors[part].give_back.remote(count) for part, count in most.items()]
        replies = collect(refs, list(most), "rollout give_back", limit_s)
        self._record(list(most), replies)
        back: list[Returned] = [reply.value for reply in replies]
        return Returned([r for each in back for r in each.requests], sum(each.sampled for each in back))

    # --- to and fro -----------------------------------------------------------------------------------

    def _hand_out(self, requests: Sequence[GenerationRequest], step: int, limit_s: float) -> None:
        shares: dict[str, list[GenerationRequest]] = {part: [] for part in self._taking}
        with self._lock:
            held = Counter(self.outstanding.values())
            loads = [held[part] for part in self._taking]
            for request in requests:
                lightest = loads.index(min(loads))
                shares[self._taking[lightest]].append(request)
                loads[lightest] += 1
                self.outstanding[request.id] = self._taking[lightest]
        parts = [part for part, share in shares.items() if share]
        refs = [self._actors[part].submit.remote(shares[part], step) for part in parts]
        collect(refs, parts, "rollout submit", limit_s)

    def _fetch(self, limit_s: float, *, all_of_them: bool) -> None:
        """Bring what is finished here, to whoever waits for it."""
        with self._lock:
            loads = Counter(self.outstanding.values())
        wait = min(limit_s, LONG_POLL_S)
        if not loads:
            time.sleep(min(wait, IDLE_S))
            return
        refs = [self._actors[part].poll.remote(n if all_of_them else 1, wait) for part, n in loads.items()]
        replies = collect(refs, list(loads), "rollout poll", wait + POLL_GRACE_S)
        self._record(list(loads), replies)
        with self._lock:
            completions = [completion for reply in replies for completion in reply.value]
            self._arrived(completions)
            for completion in completions:
                self._deliver(completion)

    def _deliver(self, completion: Completion) -> None:
        del self.outstanding[completion.id]
        for mine in self._waited:
            if completion.id in mine:
                mine[completion.id] = completion
                return
        self._done.append(completion)


@dataclass(slots=True, kw_only=True)
class Lending:
    """The replicas on the trainer's GPUs."""

    job: Job
    """With their plan (`ranks.lent`)."""
    pool: ReplicaPool
    requests: RequestRouter
    """Those of the run, which they take a part of."""
    memory: EngineMemory
    route: WeightRoute
    own: int
    """Replicas of the rollout's own pool."""
    awake: bool = False
    """Whether they take requests."""
    alone_s: float | None = None
    """Seconds that the next wait would take without them; None: nothing is known yet."""
    wake_s: float = 0.0
    sleep_s: float = 0.0
    _since: float | None = None
    """When the trainer began to wait."""

    @property
    def pays(self) -> bool:
        """Whether what they would save takes longer than the way back."""
        lent = len(self.pool.actors)
        saved = None if self.alone_s is None else (self.alone_s - self.wake_s) * lent / (self.own + lent)
        return saved is None or saved > self.sleep_s

    def open(self) -> None:
        """Join their weight route; they sleep until they are lent."""
        self.route.open(self.pool)
        self.memory.rest(0)

    def lend(self, step: int, limit_s: float) -> None:
        """The trainer waits from now on: they generate, if that pays."""
        began = self._since = time.monotonic()
        self.awake = self.pays
        if self.awake:
            self.memory.for_generation(step)
            self.requests.join(self.pool, step, limit_s)
            self.wake_s = time.monotonic() - began

    def reclaim(self, step: int, limit_s: float) -> dict[str, float]:
        """The trainer's samples are there: they sleep; what they did, as metrics."""
        generated_s, back, ended = 0.0, Returned((), 0), time.monotonic()
        if self._since is not None:
            waited_s, self._since = ended - self._since, None
            generated_s = max(0.0, waited_s - self.wake_s) if self.awake else 0.0
            self.alone_s = waited_s + generated_s * len(self.pool.actors) / self.own
        if self.awake:
            back = self.requests.leave(self.pool, step, limit_s)
            self.memory.rest(step)
            self.sleep_s, self.awake = time.monotonic() - ended, False
        done = {"seconds": generated_s, "tokens": back.sampled, "moved": len(back.requests)}
        return {f"lend/{name}": float(value) for name, value in done.items()}
