"""What would flip the choice: one change at a time, layouts kept, the break-even computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rlhfsim.search.candidates import Candidate, judged
from rlhfsim.search.parallel import mapped
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware import Cluster, Pool
from rlhfsim.specs.lengths import AnyLengths, Fixed, LogNormal, Truncated
from rlhfsim.specs.models import Models
from rlhfsim.specs.placement import Placement

FLIP_RIVALS = 4
"""Plans of other kinds that are priced again under each change."""
CLEAR = 0.01
"""A rival must be this much faster to count."""
HALVINGS = 5
"""Bisections of a break-even on a logarithmic scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """One change that makes another plan the best."""

    change: str
    """What is scaled, in words."""
    factor: float
    """Break-even: from this factor on the winner is faster."""
    winner: str
    """Kind of the new best plan."""
    seconds: float
    """Its step at the far end of the change."""
    chosen_seconds: float | None
    """The chosen plan's step there; None when it does not fit any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A quantity that is scaled up to `far` times."""

    text: str
    far: float
    apply: Callable[[Request, float], Request]


def flips(request: Request, models: Models, ranked: Sequence[Candidate]) -> list[Flip]:
    """Changes, one at a time, under which a rival of another kind overtakes the chosen plan.

    The plans keep their layouts; a plan that no longer fits drops out.
    """
    rivals = _other_kinds(ranked)
    if len(rivals) < 2 or request.objective == "memory":
        return []
    found = mapped(lambda change: _flip(change, request, models, rivals), list(_changes(request)))
    return [flip for flip in found if flip is not None]


def _flip(
    change: Change, request: Request, models: Models, rivals: Sequence[Candidate]
) -> Flip | None:
    """The rival that wins at the far end, if it is not the chosen plan, and where it overtakes."""
    placements = [c.placement for c in rivals]
    far = change.apply(request, change.far)
    times = [_seconds(far, models, p) for p in placements]
    best = min(range(len(times)), key=lambda i: times[i])
    if not _beats(times[best], times[0]):
        return None
    near, end = 0.0, math.log(change.far)
    for _ in range(HALVINGS):
        middle = (near + end) / 2
        at = change.apply(request, math.exp(middle))
        if _beats(_seconds(at, models, placements[best]), _seconds(at, models, placements[0])):
            end = middle
        else:
            near = middle
    own = times[0] if math.isfinite(times[0]) else None
    return Flip(change=change.text, factor=math.exp(end), winner=label(placements[best]), seconds=times[best], chosen_seconds=own)  # fmt: skip


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
        for far in (1 / 8, 8.0):
            yield Change(text="response length", far=far, apply=_longer)
        if work.samples > 1:  # else it is the same as more prompts
            yield Change(text="samples per prompt", far=8.0, apply=_more_samples)
    yield Change(text="prompts per step", far=8.0, apply=_more_prompts)
    if cluster.gpus > cluster.pool.gpus_per_node:
        yield Change(text="network bandwidth", far=1 / 8, apply=_slower_network)
    yield Change(text="GPU memory", far=0.75, apply=_less_memory)


def _longer(request: Request, factor: float) -> Request:
    return _workload(request, response_len=scaled(request.workload.response_len, factor))


def _more_samples(request: Request, factor: float) -> Request:
    return _workload(request, samples=round(request.workload.samples * factor))


def _more_prompts(request: Request, factor: float) -> Request:
    each = request.workload.mini_batches
    prompts = max(1, round(request.workload.prompts * factor / each)) * each
    return _workload(request, prompts=prompts)


def _slower_network(request: Request, factor: float) -> Request:
    cluster = request.cluster
    return replace(
        request, cluster=replace(cluster, oversubscription=cluster.oversubscription / factor)
    )


def _less_memory(request: Request, factor: float) -> Request:
    return replace(request, cluster=_smaller(request.cluster, factor))


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


def _smaller(cluster: Cluster, factor: float) -> Cluster:
    def shrink(pool: Pool) -> Pool:
        usable = replace(
            pool.profile.usable_memory, value=pool.profile.usable_memory.value * factor
        )
        return replace(pool, profile=replace(pool.profile, usable_memory=usable))

    return replace(cluster, pools=tuple(map(shrink, cluster.pools)))
