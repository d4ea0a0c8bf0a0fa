"""What all processes of a run measured, on the driver's clock."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from executor.coordination.tracing import SAME_CLOCK, ClockOffset, Recorded, Tracer, assemble
from executor.coordination.worker import Reply
from rlhfsim.trace import Span, Trace


class SpanRecorder:
    """Collects the spans of every reply; threads may share it."""

    def __init__(self) -> None:
        self.tracer = Tracer()
        self._parts: list[tuple[Recorded, ClockOffset]] = []
        self._lock = threading.Lock()
        self._seen = 0
        self.memory: dict[str, tuple[str, Mapping[str, float]]] = {}
        """Latest node and bytes of every part by name."""

    def add(self, reply: Reply, offset: ClockOffset = SAME_CLOCK, part: str = "", node: str = "") -> None:
        """Keep what a reply of `part` on `node` brought."""
        with self._lock:
            self._parts.append((reply.recorded, offset))
            if reply.memory is not None and part:
                self.memory[part] = (node, reply.memory)

    def fresh(self) -> list[Span]:
        """Spans since the last call of this, on the clocks that they were measured with."""
        with self._lock:
            self._parts.append((self.tracer.drain(), SAME_CLOCK))
            new = [span for recorded, _ in self._parts[self._seen :] for span in recorded.spans]
            self._seen = len(self._parts)
        return new

    def trace(self, *, start_s: float, plan_hash: str, steps: int, seed: int, first_step: int = 0) -> Trace:
        """All so far."""
        with self._lock:
            self._parts.append((self.tracer.drain(), SAME_CLOCK))
            return assemble(
                self._parts,
                start_s=start_s,
                plan_hash=plan_hash,
                steps=steps,
                seed=seed,
                first_step=first_step,
            )
