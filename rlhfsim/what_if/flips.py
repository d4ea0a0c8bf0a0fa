"""What would flip the choice: one change at a time, layouts kept, the break-even computed."""

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
from rlhfsim.specs.hardware.hardware import Cluster, Pool
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.placement import Placement, Seat
from rlhfsim.specs.workload.lengths import AnyLengths, Fixed, LogNormal, Truncated, stats
from rlhfsim.units import Dimension

FLIP_RIVALS = 2
"""Plans of other kinds that are priced again under each change."""
CLEAR = 0.01
"""A rival must be this much faster to count."""
HALVINGS = 6
"""Bisections of a break-even on a logarithmic scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """One change that makes another plan the best."""

    change: str
    """What is changed, in words."""
    factor: float
    """Break-even: from this factor on the winner is faster."""
    now: float | None
    """The quantity as it is, in base units; None where it has no single value."""
    unit: Dimension
    winner: str
    """Kind of plan that is the best from there on."""
    seconds: float
    """Its step at the break-even."""
    chosen_seconds: float | None
    """The chosen plan's step there; None when it does not fit any more."""

    @property
    def planned(self) -> BreakEven:
        """As `plan.json` keeps it."""
        return BreakEven(
            change=self.change, factor=self.factor, now=self.now, unit=self.unit, winner=self.winner,
            step_s=self.seconds, chosen_step_s=self.chosen_seconds,
        )  # fmt: skip

    @property
    def value(self) -> float | None:
        """The quantity at the break-even."""
        return None if self.now is None else self.now * self.factor


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


def flips(request: Request, models: Models, ranked: Sequence[Candidate]) -> list[Flip]:
    """Changes, one at a time, under which a rival of another kind overtakes the chosen plan.

    The plans keep their layouts (more GPUs: more replicas and ranks of the same cut); a plan that no
    longer fits drops out.
    """
    rivals = _other_kinds(ranked)
    if len(rivals) < 2 or request.objective == "memory":
        return []
    found = mapped(lambda change: _flip(change, request, models, rivals), list(_changes(request)))
    return [flip for flip in found if flip is not None]


def _flip(
    change: Change, request: Request, models: Models, rivals: Sequence[Candidate]
) -> Flip | None:
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
) -> Flip:
    best = min(range(len(times)), key=lambda i: times[i])
    own = times[0] if math.isfinite(times[0]) else None
    return Flip(
        change=change.text, factor=factor, now=change.now, unit=change.unit, winner=label(placements[best]), seconds=times[best],
        chosen_seconds=own,
    )  # fmt: skip


def _overtaken(times: Sequence[float]) -> bool:
    """Whether a rival is faster than the chosen plan, which comes first."""
    return _beats(min(times[1:]), times[0])


def _after(
    change: Change, request: Request, models: Models, placement: Placement, factor: float
) -> float:
    moved = change.place(placement, factor) if change.place else placement
    if moved is None or not _has_work(request, moved):
        return math.inf
    return _seconds(request, models, moved)


def _has_work(request: Request, placement: Placement) -> bool:
    """Whether every rank has a micro-batch, as `search.layouts` asks."""
    sequences = request.workload.num_sequences // request.workload.mini_batches
    roles = [s for s in placement.seats.values() if isinstance(s, Seat)]
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
    return list(first.values())[: FLIP_RIVALS + 1]


def _changes(request: Request) -> Iterator[Change]:
    work, cluster = request.workload, request.cluster
    if work.generates:
        now = work.response_len.value if isinstance(work.response_len, Fixed) else stats(work.response_len).mean  # fmt: skip
        for far in (1 / 8, 8.0):
            yield Change(text="response length", far=far, apply=_longer, now=now, unit="token")
        if work.samples > 1:  # else it is the same as more prompts
            yield Change(text="samples per prompt", far=8.0, apply=_more_samples, now=work.samples)
    for far in (1 / 8, 8.0):
        yield Change(text="prompts per step", far=far, apply=_more_prompts, now=work.prompts)
    if cluster.gpus > cluster.pool.gpus_per_node:
        now = cluster.pool.profile.nic.value / cluster.oversubscription
        for far in (1 / 8, 8.0):
            yield Change(text="network bandwidth per GPU", far=far, apply=_network, now=now, unit="byte/s")  # fmt: skip
    now = cluster.pool.profile.usable_memory.value
    for far in (0.5, 2.0):
        yield Change(text="GPU memory", far=far, apply=_memory, now=now, unit="byte")
    if len(cluster.pools) == 1:
        for steps in ((1 / 2, 1 / 4), (2.0, 4.0)):
            yield Change(text="GPUs", far=steps[-1], apply=_more_gpus, now=cluster.gpus, steps=steps, place=spread)  # fmt: skip


def _more_gpus(request: Request, factor: float) -> Request:
    pool = request.cluster.pool
    gpus = max(1, round(pool.gpus * factor))
    return replace(request, cluster=replace(request.cluster, pools=(replace(pool, gpus=gpus),)))


def spread(placement: Placement, factor: float) -> Placement | None:
    """The same plan with `factor` times the data-parallel ranks and replicas; None where they do not divide."""

    def times(count: int) -> int | None:
        scaled_ = count * factor
        return round(scaled_) if scaled_ >= 1 and scaled_ == round(scaled_) else None

    def moved(seat: Any) -> Any:
        dp = times(seat.layout.dp)
        return None if dp is None else replace(seat, layout=replace(seat.layout, dp=dp))

    starts = [p.start * factor for p in placement.pools]
    sizes = [times(p.gpus) for p in placement.pools]
    if None in sizes or any(s != round(s) for s in starts):
        return None
    pools = tuple(replace(p, start=round(s), gpus=n) for p, s, n in zip(placement.pools, starts, sizes, strict=True))  # type: ignore[arg-type]  # fmt: skip
    try:
        seats = {name: moved(seat) for name, seat in placement.seats.items()}
        return None if None in seats.values() else replace(placement, pools=pools, **seats)
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
    def scaled_nic(pool: Pool) -> Pool:
        nic = replace(pool.profile.nic, value=pool.profile.nic.value * factor)
        return replace(pool, profile=replace(pool.profile, nic=nic))

    cluster = request.cluster
    return replace(request, cluster=replace(cluster, pools=tuple(map(scaled_nic, cluster.pools))))


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
            return replace(
                lengths, mean=max(1.0, lengths.mean * factor), max=max(1.0, lengths.max * factor)
            )
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

    def grown(pool: Pool) -> Pool:
        profile, host = pool.profile, pool.profile.node.host_memory
        usable = replace(profile.usable_memory, value=profile.usable_memory.value * factor)
        memory = replace(profile.memory, value=profile.memory.value * factor)
        node = replace(profile.node, host_memory=replace(host, value=host.value * factor)) if hosts else profile.node  # fmt: skip
        return replace(pool, profile=replace(profile, memory=memory, usable_memory=usable, node=node))  # fmt: skip

    return replace(cluster, pools=tuple(map(grown, cluster.pools)))
