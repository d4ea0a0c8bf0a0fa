"""What would change the choice: one change at a time, layouts kept, the break-even computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import BreakEven
from rlhfsim.search.candidates import Candidate, judged
from rlhfsim.search.parallel import mapped
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.hardware import Cluster, NodeGroup
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.placement import Placement, RolePlacement
from rlhfsim.specs.workload.lengths import AnyLengths, Fixed, LogNormal, Truncated, stats
from rlhfsim.units import Dimension

RIVALS = 2
"""Plans of other kinds that are priced again under each change."""
CLEAR = 0.01
"""A rival must be this much faster to count."""
HALVINGS = 6
"""Bisections of a break-even on a logarithmic scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A quantity that is scaled up (or down) to `far` times."""

    text: str
    far: float
    apply: Callable[[Request, float], Request]
    now: float | None = None
    unit: Dimension = "1"
    steps: tuple[float, ...] = ()
    """The only factors there are, from near to far; empty: any."""
    place: Callable[[Placement, float], Placement | None] | None = None
    """How a placement follows; None: it stays."""


def break_evens(request: Request, models: Models, ranked: Sequence[Candidate]) -> list[BreakEven]:
    """Changes, one at a time, under which a rival of another kind overtakes the chosen plan.

    The plans keep their layouts (more GPUs: more replicas and ranks of the same cut); a plan that no
    longer fits drops out.
    """
    rivals = _other_kinds(ranked)
    if len(rivals) < 2 or request.objective == "memory":
        return []
    found = mapped(lambda change: _break_even(change, request, models, rivals), list(_changes(request)))
    return [at for at in found if at is not None]


def _break_even(
    change: Change, request: Request, models: Models, rivals: Sequence[Candidate]
) -> BreakEven | None:
    """The smallest change under which some rival wins, found by halving on a logarithmic scale.

    The winner at the break-even counts, which need not be the winner at the far end. That the order
    changes once on the way is assumed; where it changes back and forth, one crossing is found.
    """
    placements = [c.placement for c in rivals]

    def times(factor: float) -> list[float]:
        there = change.apply(request, factor)
        return [_after(change, there, models, p, factor) for p in placements]

    if change.steps:
        tried = ((f, times(f)) for f in change.steps)
        end = next(((f, t) for f, t in tried if _overtaken(t)), None)
        return _told(change, placements, *end) if end else None
    at = times(change.far)
    if not _overtaken(at):
        return None
    near, far = 0.0, math.log(change.far)
    for _ in range(HALVINGS):
        middle = (near + far) / 2
        found = times(math.exp(middle))
        if _overtaken(found):
            far, at = middle, found
        else:
            near = middle
    return _told(change, placements, math.exp(far), at)


def _told(
    change: Change, placements: Sequence[Placement], factor: float, times: Sequence[float]
) -> BreakEven:
    best = min(range(len(times)), key=lambda i: times[i])
    own = times[0] if math.isfinite(times[0]) else None
    return BreakEven(
        change=change.text,
        factor=factor,
        now=change.now,
        unit=change.unit,
        winner=label(placements[best]),
        step_s=times[best],
        chosen_step_s=own,
    )


def _overtaken(times: Sequence[float]) -> bool:
    """Whether a rival is faster than the chosen plan, which comes first."""
    return _beats(min(times[1:]), times[0])


def _after(change: Change, request: Request, models: Models, placement: Placement, factor: float) -> float:
    moved = change.place(placement, factor) if change.place else placement
    if moved is None or not _has_work(request, moved):
        return math.inf
    return _seconds(request, models, moved)


def _has_work(request: Request, placement: Placement) -> bool:
    """Whether every rank has a micro-batch, as `search.layouts` asks."""
    sequences = request.workload.num_sequences // request.workload.mini_batches
    roles = [s for s in placement.roles.values() if isinstance(s, RolePlacement)]
    return all(s.layout.dp * s.layout.micro_batch <= sequences for s in roles)


def _beats(seconds: float, chosen: float) -> bool:
    return seconds * (1 + CLEAR) < chosen


def _seconds(request: Request, models: Models, placement: Placement) -> float:
    again = judged(request, models, placement)
    return again.seconds if again is not None else math.inf


def label(placement: Placement) -> str:
    """Architecture and role placement in words."""
    roles = "" if placement.role_placement == "colocated" else f", roles {placement.role_placement}"
    return placement.architecture + roles


def _other_kinds(ranked: Sequence[Candidate]) -> list[Candidate]:
    first: dict[str, Candidate] = {}
    for candidate in ranked:
        first.setdefault(label(candidate.placement), candidate)
    return list(first.values())[: RIVALS + 1]


def _changes(request: Request) -> Iterator[Change]:
    work, cluster = request.workload, request.cluster
    if work.generates:
        now = (
            work.response_len.value if isinstance(work.response_len, Fixed) else stats(work.response_len).mean
        )
        for far in (1 / 8, 8.0):
            yield Change(text="response length", far=far, apply=_longer, now=now, unit="token")
        if work.samples > 1:  # else it is the same as more prompts
            yield Change(text="samples per prompt", far=8.0, apply=_more_samples, now=work.samples)
    for far in (1 / 8, 8.0):
        yield Change(text="prompts per step", far=far, apply=_more_prompts, now=work.prompts)
    if cluster.gpus > cluster.node_group.gpus_per_node:
        now = cluster.node_group.profile.nic.value / cluster.oversubscription
        for far in (1 / 8, 8.0):
            yield Change(text="network bandwidth per GPU", far=far, apply=_network, now=now, unit="byte/s")
    now = cluster.node_group.profile.usable_memory.value
    for far in (0.5, 2.0):
        yield Change(text="GPU memory", far=far, apply=_memory, now=now, unit="byte")
    if len(cluster.node_groups) == 1:
        for steps in ((1 / 2, 1 / 4), (2.0, 4.0)):
            yield Change(
                text="GPUs", far=steps[-1], apply=_more_gpus, now=cluster.gpus, steps=steps, place=spread
            )


def _more_gpus(request: Request, factor: float) -> Request:
    pool = request.cluster.node_group
    gpus = max(1, round(pool.gpus * factor))
    return replace(request, cluster=replace(request.cluster, node_groups=(replace(pool, gpus=gpus),)))


def spread(placement: Placement, factor: float) -> Placement | None:
    """The same plan with `factor` times the data-parallel ranks and replicas; None where they do not divide."""

    def times(count: int) -> int | None:
        scaled_ = count * factor
        return round(scaled_) if scaled_ >= 1 and scaled_ == round(scaled_) else None

    def moved(role: Any) -> Any:
        dp = times(role.layout.dp)
        return None if dp is None else replace(role, layout=replace(role.layout, dp=dp))

    starts = [p.start * factor for p in placement.pools]
    sizes = [times(p.gpus) for p in placement.pools]
    if any(s != round(s) for s in starts):
        return None
    pools = tuple(
        replace(p, start=round(s), gpus=n)
        for p, s, n in zip(placement.pools, starts, sizes, strict=True)
        if n is not None
    )
    if len(pools) < len(sizes):
        return None
    try:
        roles = {name: moved(role) for name, role in placement.roles.items()}
        return None if None in roles.values() else replace(placement, pools=pools, **roles)
    except RlhfsimError:  # expert parallelism over more ranks than are left
        return None


def _longer(request: Request, factor: float) -> Request:
    return _workload(request, response_len=scaled(request.workload.response_len, factor))


def _more_samples(request: Request, factor: float) -> Request:
    return _workload(request, samples=round(request.workload.samples * factor))


def _more_prompts(request: Request, factor: float) -> Request:
    each = request.workload.mini_batches
    prompts = max(1, round(request.workload.prompts * factor / each)) * each
    return _workload(request, prompts=prompts)


def _network(request: Request, factor: float) -> Request:
    def scaled_nic(pool: NodeGroup) -> NodeGroup:
        nic = replace(pool.profile.nic, value=pool.profile.nic.value * factor)
        return replace(pool, profile=replace(pool.profile, nic=nic))

    cluster = request.cluster
    return replace(request, cluster=replace(cluster, node_groups=tuple(map(scaled_nic, cluster.node_groups))))


def _memory(request: Request, factor: float) -> Request:
    return replace(request, cluster=with_memory(request.cluster, factor))


def _workload(request: Request, **changes: object) -> Request:
    return replace(request, workload=replace(request.workload, **changes))  # type: ignore[arg-type]


def scaled(lengths: AnyLengths, factor: float) -> AnyLengths:
    """A distribution of lengths stretched by a factor; an empirical one stays as observed."""
    match lengths:
        case Fixed():
            return replace(lengths, value=max(1.0, lengths.value * factor))
        case LogNormal():
            return replace(lengths, mean=max(1.0, lengths.mean * factor), max=max(1.0, lengths.max * factor))
        case Truncated():
            return replace(
                lengths,
                mean=max(1.0, lengths.mean * factor),
                std=lengths.std * factor,
                max=max(1.0, lengths.max * factor),
            )
        case _:
            return lengths


def with_memory(cluster: Cluster, factor: float, *, hosts: bool = False) -> Cluster:
    """The same cluster with another size of GPU memory, and of host memory too where `hosts`."""

    def grown(pool: NodeGroup) -> NodeGroup:
        profile, host = pool.profile, pool.profile.node.host_memory
        usable = replace(profile.usable_memory, value=profile.usable_memory.value * factor)
        memory = replace(profile.memory, value=profile.memory.value * factor)
        node = (
            replace(profile.node, host_memory=replace(host, value=host.value * factor))
            if hosts
            else profile.node
        )
        return replace(pool, profile=replace(profile, memory=memory, usable_memory=usable, node=node))

    return replace(cluster, node_groups=tuple(map(grown, cluster.node_groups)))
