"""The trainer's side of a run with stale samples, and what is measured of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import simpy

from rlhfsim.simulation.asynchronous.batch_means import interval_of
from rlhfsim.simulation.simulator import Running, Simulator
from rlhfsim.step.iteration import Program
from rlhfsim.step.timetable import SYNC, Step, learner_steps

Programs = Callable[[int], Program]
"""The priced calls of step k."""


@dataclass(slots=True, kw_only=True)
class LearnerRun:
    """The trainer's side of a run and what is measured."""

    simulator: Simulator
    programs: Programs
    steps: int
    warmup: int
    cutoff: float | None
    ends: list[float] = field(default_factory=list)
    """When each step ended: weights handed over, trainer free."""
    learned: list[float] = field(default_factory=list)
    """Seconds of its trainer calls."""
    ages: list[list[int]] = field(default_factory=list)
    """Staleness of the groups of each step."""
    taken_tokens: float = 0.0
    """Response tokens trained on since the start."""
    shortfall: float = 1.0
    """Batches consumed in the window over batches produced, where above 1."""
    paired: bool = False
    """Steps alternate between two durations: the mean is that of an even number of them."""
    stopped: bool = False

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of each measured step so far."""
        return tuple(float(x) for x in np.diff(self.ends[self.warmup - 1 :]))

    @property
    def counted(self) -> int:
        """Steps of the window, which begins one step early where that makes pairs."""
        count = len(self.ends) - self.warmup
        return count + (count % 2 if self.paired else 0)

    @property
    def steady(self) -> tuple[float, ...]:
        """Seconds of each step of the window as the steady state has them."""
        return tuple(self.shortfall * float(x) for x in np.diff(self.ends[-1 - self.counted :]))

    @property
    def mean(self) -> float:
        """Seconds of a step over the window: the mean of `steady`."""
        return self.shortfall * (self.ends[-1] - self.ends[-1 - self.counted]) / self.counted

    @property
    def over(self) -> bool:
        """Whether no more steps are needed; notes when the cutoff is the reason."""
        if len(self.ends) >= self.warmup + self.steps:
            return True
        seconds = self.seconds if len(self.ends) > self.warmup else ()
        if self.cutoff is None or not seconds:
            return False
        low = (interval_of(seconds) or seconds)[0] if len(seconds) > 2 else 0.0
        self.stopped = low > self.cutoff or sum(seconds) > self.cutoff * self.steps
        return self.stopped

    def batch(self, k: int, ages: list[int]) -> Running:
        """The trainer's calls for batch k, in program order on their pools."""
        begin = self.simulator.env.now
        self.ages.append(ages)
        ended: dict[str, simpy.Event] = {}
        for step in learner_steps(self.programs(k).steps):
            needs = [ended[n] for n in step.needs if n in ended]
            ended[step.name] = self.simulator.env.process(self._call(step, k, needs))
        yield self.simulator.all_of(list(ended.values()))
        self.learned.append(self.simulator.env.now - begin)

    def _call(self, step: Step, k: int, needs: list[simpy.Event]) -> Running:
        turn = self.simulator.queue(step.pools)
        yield self.simulator.all_of([turn.ready, *needs])
        yield from self.simulator.work(step, k, version=k)
        turn.leave()

    def sync(self, k: int) -> Running:
        """The weights of update k + 1 move."""
        for step in self.programs(k).steps:
            if step.name == SYNC:
                yield from self.simulator.work(step, k, version=k + 1)

    def end(self) -> None:
        """The step has ended."""
        self.ends.append(self.simulator.env.now)
