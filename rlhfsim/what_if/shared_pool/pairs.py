"""Two jobs in turn on the same GPUs: one step of each, with what a handover costs.

    C = max(t_a, t_b, max over pools (busy_a + busy_b)) + S        seconds in which both do one step
    S = out_a + in_b + out_b + in_a                                 sleep and wake, host copies of both
    gain = (t_a + t_b) / C                                          above 1: sooner than one after the other

t is a step alone, busy the part of it in which a GPU of a pool works: a job that waits for rewards or
environments between two calls leaves its GPUs to the other one. Two plans with the same pools share each of
them (one generates while the other trains); else a GPU counts as busy while any pool of its plan is. What
moves is the least that a GPU holds in any phase: weights and states that stay. Host memory must hold both.

Not known here: gaps inside a call (an environment between two turns), more than one step in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhfsim.frozen import frozen
from rlhfsim.kernels.devices import device_on
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.units import format
from rlhfsim.weight_sync.offload import copy_in, copy_out


@frozen
class JobStep:
    """What sharing needs to know of a job on a number of GPUs."""

    step_s: float
    pools: tuple[tuple[int, int], ...]
    """First GPU and number of GPUs of each pool."""
    busy_s: tuple[float, ...]
    """Seconds of a step in which each pool works."""
    any_s: float
    """Seconds in which any of them does."""
    out_s: float
    """Seconds until its GPUs are free."""
    in_s: float
    """Seconds until it runs again."""
    host_bytes: float
    """Host memory of a node, with what sleeps there."""
    capacity_bytes: float
    """Host memory of a node."""


@frozen
class Sharing:
    """Two jobs in turn."""

    cycle_s: float
    swap_s: float
    gain: float
    """Steps against those of the same time alone, one after the other."""
    refusal: str | None = None
    """Why they must not share GPUs."""


def job_step(plan: Plan, cluster: Cluster) -> JobStep:
    """A plan on its cluster, as sharing sees it."""
    pools = plan.placement.pools
    phases: dict[str, list[tuple[float, float]]] = {p.name: [] for p in pools}
    for phase in plan.prediction.phases:
        if phase.pool in phases:
            phases[phase.pool].append((phase.start_s, phase.start_s + phase.seconds))
    held = _least_bytes(plan)
    group = cluster.node_group
    device = device_on(cluster, 0, plan.placement.backend)
    rollout = plan.placement.rollout is not None
    out = copy_out(device, held).seconds + (device["sleep_latency"] if rollout else 0.0)
    back = copy_in(device, held).seconds + (device["wake_latency"] if rollout else 0.0)
    return JobStep(
        step_s=plan.prediction.step_s,
        pools=tuple((p.start, p.gpus) for p in pools),
        busy_s=tuple(_covered(phases[p.name]) for p in pools),
        any_s=_covered([interval for each in phases.values() for interval in each]),
        out_s=out,
        in_s=back,
        host_bytes=plan.prediction.host_peak_bytes + held * min(group.gpus, group.gpus_per_node),
        capacity_bytes=group.profile.node.host_memory.value,
    )


def _least_bytes(plan: Plan) -> float:
    """Bytes that the fullest GPU holds in every phase: what must move when the job sleeps."""
    sums: dict[tuple[str, str], float] = {}
    for entry in plan.prediction.ledger:
        sums[entry.pool, entry.phase] = sums.get((entry.pool, entry.phase), 0.0) + entry.bytes
    least = {pool: min(size for (p, _), size in sums.items() if p == pool) for pool, _ in sums}
    return max(least.values(), default=0.0)


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Seconds that at least one interval covers."""
    total, end = 0.0, 0.0
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def sharing(one: JobStep, other: JobStep) -> Sharing:
    """Two jobs in turn on the same GPUs."""
    swap = one.out_s + one.in_s + other.out_s + other.in_s
    if one.pools == other.pools:
        busy = max(a + b for a, b in zip(one.busy_s, other.busy_s, strict=True))
    else:
        busy = one.any_s + other.any_s
    cycle = max(one.step_s, other.step_s, busy) + swap
    lacking = one.host_bytes + other.host_bytes - one.capacity_bytes
    return Sharing(
        cycle_s=cycle,
        swap_s=swap,
        gain=(one.step_s + other.step_s) / cycle,
        refusal=f"host memory lacks {format(lacking, 'byte')} a node" if lacking > 0 else None,
    )
