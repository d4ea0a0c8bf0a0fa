"""The trainer's GPUs lent to the rollout: replicas there sleep, but while the trainer waits for samples.

They wake with the trainer's weights and take their share of the requests. Before the trainer's next call
what runs there goes on elsewhere, and the engines sleep again.

Legend: O replicas of the rollout's own pool, L lent ones, w seconds of the latest wait, a wake and b sleep as
they took last. By the rate of the latest wait the next one would take without lending

    alone = a + (w - a) (O + L) / O  where the trainer lent, else w

and to lend pays while  (alone - a) L / (O + L) > b,  which is how the simulation decides
(`rlhfsim.simulation.asynchronous.schedules`), by its own estimate of the wait.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from executor.coordination.engine_memory import EngineMemory
from executor.coordination.replica import Returned
from executor.coordination.router import RequestRouter
from executor.coordination.weights import WeightRoute
from executor.coordination.worker_group import ReplicaPool
from executor.resolve import Job

WAKE = "actor.generate.load"
"""The call in whose spans weights reach the engines that wake."""


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
