"""How long each wait may take: from the plan's prediction where the settings do not say.

    call         5 x its predicted P90, at least 2 min and at most 4 h
    sync         as a call; where responses that run must end first, that of the generation more
    start        bytes of all weights at 200 MB/s, and 10 min for engines, at most 4 h
    checkpoint   as the start: bytes of all states at 200 MB/s, and 10 min, at most 4 h
    collective   the longest of these and 1 min: whoever waits for the call speaks first, with its name

A collective of a process group can wait as long as the call in which a slow rank works.
"""

from __future__ import annotations

from dataclasses import dataclass

from executor.settings import Limits
from rlhfsim.plan import Plan
from rlhfsim.specs.workload.roles import TRAINED
from rlhfsim.units import HOUR, MB, MINUTE

FACTOR = 5.0
"""Times the predicted P90."""
SHORTEST_CALL_S, LONGEST_S = 2 * MINUTE, 4 * HOUR
ENGINES_S = 10 * MINUTE
"""VLLM_ENGINE_READY_TIMEOUT_S of vLLM 0.32."""
BYTES_PER_S = 200 * MB
"""Bandwidth of slow shared storage, every role read once."""
WEIGHT_BYTES, STATE_BYTES = 2.0, 16.0
"""Bytes of a parameter: BF16 weights; weights, master weights and two moments, with their gradients."""
GRACE_S = MINUTE


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits of one run."""

    plan: Plan
    settings: Limits

    def call(self, name: str) -> float:
        """Limit of a call or a move by name; one that the plan lacks may take as long as its longest."""
        if self.settings.call_s is not None:
            return self.settings.call_s
        return self._bounded([p.high_s for p in self.plan.prediction.phases if p.name == name])

    @property
    def longest_call(self) -> float:
        """Limit of any call, and of the wait for a batch."""
        return self.settings.call_s or self._bounded([])

    def _bounded(self, seconds: list[float]) -> float:
        longest = max(seconds or [p.high_s for p in self.plan.prediction.phases], default=0.0)
        return min(LONGEST_S, max(SHORTEST_CALL_S, FACTOR * longest))

    @property
    def sync(self) -> float:
        """Limit of one weight sync, in which an engine that is not interrupted ends its responses first."""
        schedule, limit = self.plan.placement.schedule, self.call("actor.sync")
        if schedule.asynchronous and not (schedule.partial_rollout or schedule.overlapped_sync):
            limit += self.call("actor.generate")
        return self.settings.sync_s or min(LONGEST_S, limit)

    @property
    def start(self) -> float:
        """Until a process is there and its engine is built."""
        return self.settings.start_s or self._stored(WEIGHT_BYTES * sum(m.params for m in self.plan.models))

    @property
    def checkpoint(self) -> float:
        """Limit of saving or loading a role's state."""
        return max(self.settings.call_s or 0.0, self._stored(self.state_bytes))

    @property
    def checkpoint_cost(self) -> float:
        """Seconds that saving all roles is thought to take before one was saved."""
        return max(1.0, self.state_bytes / BYTES_PER_S)

    @property
    def state_bytes(self) -> float:
        """Bytes of all trained roles in a checkpoint."""
        return STATE_BYTES * sum(m.params for m in self.plan.models if m.role in TRAINED)

    def _stored(self, size: float) -> float:
        return min(LONGEST_S, ENGINES_S + size / BYTES_PER_S)

    @property
    def collective(self) -> float:
        """Limit of one collective of a training process group."""
        longest = max(self.longest_call, self.start, self.checkpoint, self.sync)
        return self.settings.collective_s or longest + GRACE_S
