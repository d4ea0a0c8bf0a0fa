"""Goodput of a job that fails and restarts from its last checkpoint: simulated, and in closed form.

Legend: M mean time between failures of the whole job, C blocking seconds of a checkpoint, D seconds of
useful work between checkpoints, R seconds to restart.

    goodput = useful time / time = 1 / (1 + C/D + (D/2 + R)/M)                         physics section 8

First order in D/M: a failure loses half an interval on average and at most one failure falls into an
interval.

    D* = sqrt(2 C M)        Young 1974, CACM 17(9);  Daly 2006, FGCS 22(3), eq. 37 adds higher orders

Nodes fail independently, memoryless, also while the job restarts or writes a checkpoint; a restart that is
hit begins anew. Not known here: hot spares, checkpoints written during training (give the blocking part
as C), failures that shrink the job.
"""

from __future__ import annotations

import math
from collections.abc import Generator

import simpy

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.simulation.noise import generator
from rlhfsim.specs.loading import checked


@checked
@frozen
class Faults:
    """How a job fails and how it protects itself."""

    node_mtbf: float
    """Mean seconds between failures of one node."""
    nodes: int = 1
    restart: float = 0.0
    """Seconds from a failure until work goes on: detection, replacement, start, load."""
    checkpoint: float = 0.0
    """Seconds for which a checkpoint blocks the job."""
    interval: float
    """Seconds of useful work between checkpoints."""

    def __post_init__(self) -> None:
        """Times are not negative, those between events above 0."""
        above = {"node_mtbf": self.node_mtbf, "nodes": self.nodes, "interval": self.interval}
        never_below = {"restart": self.restart, "checkpoint": self.checkpoint}
        wrong = [n for n, v in above.items() if not v > 0]
        wrong += [n for n, v in never_below.items() if not v >= 0]
        if wrong:
            raise RlhfsimError(
                "bad-value",
                f"{wrong[0]} {getattr(self, wrong[0])} is too small",
                help="node_mtbf, nodes and interval above 0; restart and checkpoint 0 or more",
            )

    @property
    def mtbf(self) -> float:
        """Mean seconds between failures of the whole job."""
        return self.node_mtbf / self.nodes


@frozen
class Goodput:
    """A simulated job."""

    goodput: float
    """Useful time over all time."""
    seconds: float
    failures: int
    lost: float
    """Seconds of work and checkpoints done in vain."""
    restarting: float
    """Seconds in restarts."""
    checkpointing: float
    """Seconds in checkpoints that were completed."""


def first_order(faults: Faults) -> float:
    """Goodput, first order in interval over MTBF: 1 / (1 + C/D + (D/2 + R)/M)."""
    writing = faults.checkpoint / faults.interval
    failing = (faults.interval / 2 + faults.restart) / faults.mtbf
    return 1.0 / (1.0 + writing + failing)


def young_interval(faults: Faults) -> float:
    """Seconds of work between checkpoints, first order: sqrt(2 C M)."""
    return math.sqrt(2.0 * faults.checkpoint * faults.mtbf)


def daly_interval(faults: Faults) -> float:
    """Seconds of work between checkpoints, higher order.

        sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C       for C < 2 M, else M

    Source: Daly 2006, FGCS 22(3), eq. 37.
    """
    x = faults.checkpoint / (2.0 * faults.mtbf)
    if x >= 1:
        return faults.mtbf
    return young_interval(faults) * (1 + math.sqrt(x) / 3 + x / 9) - faults.checkpoint


def simulate_faults(faults: Faults, work: float, *, seed: int = 0) -> Goodput:
    """A job of `work` useful seconds, with failures drawn from `seed`."""
    job = _Job(faults, work, seed)
    job.env.run(until=job.env.process(job.run()))
    return Goodput(
        goodput=work / job.env.now,
        seconds=job.env.now,
        failures=job.failures,
        lost=job.lost,
        restarting=job.restarting,
        checkpointing=job.checkpointing,
    )


class _Job:
    """Work, checkpoint, work, ... and a failure now and then."""

    def __init__(self, faults: Faults, work: float, seed: int) -> None:
        self.faults, self.work = faults, work
        self.env = simpy.Environment()
        self.random = generator(seed, "failures")
        self.next_failure = self._draw()
        self.failures = 0
        self.lost = self.restarting = self.checkpointing = 0.0

    def _draw(self) -> float:
        return self.env.now + float(self.random.exponential(self.faults.mtbf))

    def run(self) -> Generator[simpy.Event, None, None]:
        """Until all work is saved; the last piece needs no checkpoint."""
        saved = 0.0
        while saved < self.work * (1 - 1e-12):
            piece = min(self.faults.interval, self.work - saved)
            last = saved + piece >= self.work * (1 - 1e-12)
            write = 0.0 if last else self.faults.checkpoint
            begin = self.env.now
            if (yield from self._undisturbed(piece + write)):
                saved += piece
                self.checkpointing += write
            else:
                self.lost += self.env.now - begin
                yield from self._restart()

    def _undisturbed(self, seconds: float) -> Generator[simpy.Event, None, bool]:
        """Runs for `seconds`, or up to the next failure; whether it got through."""
        left = self.next_failure - self.env.now
        yield self.env.timeout(min(seconds, left))
        if seconds <= left:
            return True
        self.failures += 1
        self.next_failure = self._draw()
        return False

    def _restart(self) -> Generator[simpy.Event, None, None]:
        begin = self.env.now
        while not (yield from self._undisturbed(self.faults.restart)):
            pass
        self.restarting += self.env.now - begin
