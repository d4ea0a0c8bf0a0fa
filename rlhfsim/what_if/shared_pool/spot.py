"""Rollouts on rented instances that are taken away one at a time and come back: the pace of a run.

    pi_k = C(n, k) a^k (1 - a)^(n - k),  a = U / (U + D)       k of n instances are there
    r    = (1 - g / 2U) sum over k of pi_k / t_k                steps a second
    v    = 2 sum over k of pi_k f_k h_k,  Q h = -f              f_k = 1 / t_k - sum pi / t
    run  = N / r,  its variance N v / r^3

Every instance is there for U on average and back after D, both exponential and each by itself; Q is the
generator of the birth and death of k. t_k is the step with the rollout on k instances, none is made without
any. An instance that goes throws away what its sequences have: at most half of the g seconds of a generation.
The variance is that of a long run (central limit theorem): right from some tens of losses on.

Not known here: instances that go together because a whole region is short of them, and prices that move.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import comb
from typing import Annotated

import numpy as np
from pydantic import Field

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.loading import checked
from rlhfsim.specs.placement.placement import Placement, RolloutPlacement
from rlhfsim.what_if.estimate import priced_placement
from rlhfsim.what_if.risk.step import Floats, normals
from rlhfsim.what_if.scenarios.document import Above


@checked
@frozen
class SpotRollouts:
    """Instances next to the pool that a job may rent for its rollout alone."""

    instances: Annotated[int, Field(ge=1, le=64)]
    gpus: Annotated[int, Field(ge=1, le=72)]
    """GPUs of an instance."""
    there: Above
    """Mean time until an instance is taken away (U)."""
    away: Above
    """Mean time until another one generates in its place, with start and weights (D)."""

    @property
    def available(self) -> float:
        """Share of the time in which an instance is there (a)."""
        return self.there / (self.there + self.away)

    @property
    def shares(self) -> Floats:
        """(instances + 1,) share of the time in which so many are there."""
        n, a = self.instances, self.available
        return np.array([comb(n, k) * a**k * (1 - a) ** (n - k) for k in range(n + 1)])

    @property
    def paid_gpus(self) -> float:
        """GPUs that are paid for on average."""
        return self.instances * self.gpus * self.available


@frozen
class SpotPace:
    """What instances that come and go do to a run."""

    spot: SpotRollouts
    per_s: float
    """Mean steps a second (r)."""
    variance: float
    """Variance of the steps that a second adds to a long run, steps^2 / s (v)."""
    full_s: float
    """Seconds of a step with all instances."""

    @property
    def slower(self) -> float:
        """Mean time of a step over that with all instances."""
        return 1 / (self.per_s * self.full_s)

    def slowed(self, run_s: Floats, steps: int, name: str) -> Floats:
        """(draws,) seconds of a run of so many `steps` that takes `run_s` with all instances."""
        spread = np.sqrt(np.log1p(self.variance / (self.per_s * steps)))
        drawn: Floats = run_s * self.slower * np.exp(spread * normals(f"spot {name}") - spread**2 / 2)
        return drawn


def pace(spot: SpotRollouts, steps_s: Mapping[int, float], generate_s: float) -> SpotPace | None:
    """The pace of steps of `steps_s` seconds by the number of instances; None where nothing is ever done."""
    n, kept = spot.instances, 1 - generate_s / (2 * spot.there)
    rates = np.array([0.0, *(1 / steps_s[k] for k in range(1, n + 1))])
    if kept <= 0:
        return None
    mean = float(spot.shares @ rates)
    goes, comes = np.arange(n + 1) / spot.there, np.arange(n, -1, -1) / spot.away
    generator = np.diag(-goes - comes) + np.diag(goes[1:], -1) + np.diag(comes[:-1], 1)
    around = rates - mean
    lasting = np.linalg.lstsq(generator, -around, rcond=None)[0]
    variance = 2 * float((spot.shares * around) @ (lasting - spot.shares @ lasting))
    return SpotPace(spot=spot, per_s=kept * mean, variance=kept**2 * variance, full_s=steps_s[n])


def plan_pace(plan: Plan, cluster: Cluster, spot: SpotRollouts) -> SpotPace | None:
    """The pace of a plan whose rollout fills the instances; None where its replicas do not lie inside one."""
    rollout = plan.placement.rollout
    if rollout is None or spot.gpus % rollout.layout.replica_gpus:
        return None
    generate_s = next(p.seconds for p in plan.prediction.phases if p.name == "actor.generate")
    return pace(spot, dict(_steps(plan, rollout, cluster, spot)), generate_s)


def _steps(
    plan: Plan, rollout: RolloutPlacement, cluster: Cluster, spot: SpotRollouts
) -> Iterator[tuple[int, float]]:
    """Instances -> seconds of a step with the rollout on so many."""
    for k in range(1, spot.instances + 1):
        fewer = _with(plan.placement, rollout, k * spot.gpus)
        yield k, priced_placement(fewer, plan.workload, cluster).iteration.seconds


def _with(placement: Placement, rollout: RolloutPlacement, gpus: int) -> Placement:
    """The placement with its rollout on fewer GPUs."""
    pools = tuple(replace(p, gpus=gpus) if p.name == rollout.pool else p for p in placement.pools)
    layout = replace(rollout.layout, dp=gpus // rollout.layout.replica_gpus)
    return replace(placement.having(rollout=replace(rollout, layout=layout)), pools=pools)


def check(spot: SpotRollouts, node_gpus: int, place: str) -> None:
    """Refuse instances that are no part of a node.

    Raises:
        RlhfsimError: an instance has more GPUs than a node, or a number that does not divide it.
    """
    if node_gpus % spot.gpus:
        raise RlhfsimError(
            "instance-no-part-of-a-node",
            f"spot instances of {place} have {spot.gpus} GPUs, a node {node_gpus}",
            help=f"use a divisor of {node_gpus}",
        )
