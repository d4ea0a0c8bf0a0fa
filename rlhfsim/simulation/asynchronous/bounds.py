"""Proven lower bounds on the steady state of a rollout pool, from its step table alone.

Legend: n running sequences of a replica, c their mean context, tau(n, c) seconds of a decode step, p prompt,
l response lengths of one batch, S = sum l, R replicas, C KV capacity.

Work of a token. If tau(n, c) >= n (alpha + beta c) wherever a replica can be (n slots, C), an interval of
k steps with n sequences takes at least the sum over their tokens of alpha + beta context, tau being
linear in the *mean* context on the right. One batch needs, on one replica,

    W = G-prefills + sum_i [alpha l_i + beta (p l_i + l_i^2 / 2)] = prefills + S (alpha + beta c*)
    c* = p + sum l^2 / (2 sum l)

so R replicas produce at most R / W batches a second. The best (alpha, beta) is the supporting line at c* of
the lower convex hull of min_n tau(n, c) / n. In n the table is linear between its rows, so tau / n is
monotone there and rows and the largest n suffice; in c it is linear between columns, and over an
interval the most that the cache holds at its start is taken for all of it (a minimum of lines is
concave, hence above its chord).

Rate under admission. With N sequences in the pool the token rate is at most R f(N / R), f the least concave
function above n / min_c tau(n, c) (Jensen). N <= eta B while the trainer works (its batch has left
the pool) and N <= (eta + 1) B while it waits, B samples a batch. In a step the trainer works L
seconds, so it waits at least (S - L R f(eta B / R)) / (R f((eta + 1) B / R)).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from rlhfsim.frozen import frozen
from rlhfsim.rollout.engine_step import Floats
from rlhfsim.simulation.asynchronous.engine import ReplicaEngine

CONTEXTS = 64
"""Intervals of context in addition to the columns of the table."""


@frozen
class ReplicaFloor:
    """What no replica can beat."""

    alpha: float
    """Seconds per token at context 0, of the supporting line."""
    beta: float
    """Seconds per token and token of context."""
    prefill: float
    """Seconds of replica time for the prompts of one batch."""
    tokens: float
    """Response tokens of one batch."""
    work: float
    """Seconds of replica time that one batch needs at least (W)."""
    engine: ReplicaEngine
    longest: float
    """Most context of a sequence, tokens."""

    @property
    def rate(self) -> tuple[float, ...]:
        """Tokens per second at n = 0, 1, 2, ...: least concave majorant."""
        return _rates(self.engine, self.longest)

    def needs(self, total: float, square: float) -> float:
        """Work of a batch with these sums of its response lengths and of their squares (W)."""
        return self.prefill + self.alpha * total + self.beta * (self.engine.prompt * total + square / 2)

    def done(self, prefilled: float, tokens: float, attended: float) -> float:
        """Work done, seconds of replica time, from what replicas have counted."""
        return prefilled + self.alpha * tokens + self.beta * attended

    def pool_rate(self, sequences: float, replicas: int) -> float:
        """Most tokens per second with that many sequences in the pool."""
        n = np.arange(len(self.rate))
        return replicas * float(np.interp(sequences / replicas, n, self.rate))


def floor_of(engine: ReplicaEngine, lengths: Floats, groups: int) -> ReplicaFloor:
    """The bounds for batches of these response lengths in that many groups."""
    total, square = float(lengths.sum()), float((lengths**2).sum())
    at = engine.prompt + square / (2 * total)
    longest = engine.prompt + float(lengths.max())
    alpha, beta = _line(engine, at, longest)
    prefill = groups * engine.prefill
    return ReplicaFloor(
        alpha=alpha,
        beta=beta,
        prefill=prefill,
        tokens=total,
        work=prefill + total * (alpha + beta * at),
        engine=engine,
        longest=longest,
    )


def _contexts(engine: ReplicaEngine, longest: float) -> Floats:
    columns = engine.clock.table.context
    inside = columns[(columns > engine.prompt) & (columns < longest)]
    return np.unique(np.concatenate([np.linspace(engine.prompt, longest, CONTEXTS + 1), inside]))


def _most(engine: ReplicaEngine, context: Floats) -> Floats:
    """Sequences that the cache holds at a mean context; one always runs."""
    held = np.floor(engine.capacity / (context - engine.prompt + engine.own) * (1 + 1e-9))
    return np.clip(held, 1, engine.slots)


def _line(engine: ReplicaEngine, at: float, longest: float) -> tuple[float, float]:
    """The supporting line (alpha, beta) at context `at`."""
    table, edges = engine.clock.table, _contexts(engine, longest)
    rates = _most(engine, edges[:-1])
    rows = table.sequences[table.sequences <= engine.slots]
    n = np.minimum(np.append(rows, engine.slots)[None, :], rates[:, None])
    ends = [(table.tau(n, c[:, None] + np.zeros_like(n)) / n).min(axis=1) for c in (edges[:-1], edges[1:])]
    x, y = np.concatenate([edges[:-1], edges[1:]]), np.concatenate(ends)
    hull = lower_hull(x, y)
    i = min(max(int(np.searchsorted(hull[:, 0], at, side="right")) - 1, 0), len(hull) - 2)
    (x0, y0), (x1, y1) = hull[i], hull[i + 1]
    beta = float((y1 - y0) / (x1 - x0))
    return float(y0 - beta * x0), beta


@lru_cache(maxsize=256)
def _rates(engine: ReplicaEngine, longest: float) -> tuple[float, ...]:
    columns = _contexts(engine, longest)
    n = np.arange(1, engine.slots + 1, dtype=np.float64)
    least = engine.clock.table.tau(n[:, None] + 0 * columns, columns + 0 * n[:, None]).min(axis=1)
    x, y = np.arange(engine.slots + 1), np.append(0.0, n / least)
    hull = lower_hull(x.astype(np.float64), -np.maximum.accumulate(y))
    return tuple(float(v) for v in -np.interp(x, hull[:, 0], hull[:, 1]))


def lower_hull(x: Floats, y: Floats) -> Floats:
    """Corners (x, y) of the lower convex hull, x ascending (Andrew 1979)."""
    order = np.lexsort((y, x))
    hull: list[tuple[float, float]] = []
    for point in zip(x[order].tolist(), y[order].tolist(), strict=True):
        if hull and hull[-1][0] == point[0]:
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return np.array(hull)


def _above(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])
