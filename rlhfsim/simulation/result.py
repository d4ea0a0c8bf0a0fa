"""What a simulation returns, synchronous or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from rlhfsim.frozen import frozen
from rlhfsim.simulation.memory_timeline import PoolPeak
from rlhfsim.step.iteration import Iteration
from rlhfsim.trace import Trace


@frozen
class Staleness:
    """Policy versions between the start of a sample and the step that trained on it, measured."""

    mean: float
    max: float
    rejected: float = 0.0
    """Share of the response tokens, of those trained on and thrown away, that was too old."""
    lent: float = 0.0
    """Share of the time in which the trainer's GPUs generate."""


@frozen
class Simulated:
    """A simulated plan."""

    iteration: Iteration
    """Phases with simulated starts and durations (what shared links add is a part on `contention`) and
    the critical chain of one measured step; its cost is scaled to the mean step."""
    step_seconds: tuple[float, ...]
    """Seconds of each measured step; in steady state: a window that eats up samples made before it is
    stretched, and one of two alternating durations holds an even number of steps."""
    trace: Trace | None = None
    """Spans and counters from the first warm-up step on, where they were recorded."""
    staleness: Staleness | None = None
    """None in a synchronous schedule."""
    interval: tuple[float, float] | None = None
    """P10 and P90 of the mean step by batch means; None where every step is the same."""
    lost: Mapping[str, float] = field(default_factory=dict)
    """Seconds that calls waited on each shared link, all steps together."""
    peaks: tuple[PoolPeak, ...] = ()
    """The fullest instant of each pool, where memory was watched."""
    stopped: bool = False
    """The cutoff was reached: `seconds` is what was known then, a lower estimate."""

    @property
    def seconds(self) -> float:
        """Mean seconds of a measured step; the same as `iteration.seconds`."""
        return self.iteration.seconds
