"""From structures and options to complete plans, priced in full and ranked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from math import prod
from typing import Any

from rlhfsim.phases.iteration import Iteration, Setting, iteration
from rlhfsim.phases.ledger import Ledger, ledger
from rlhfsim.phases.weight_sync import sync
from rlhfsim.search.combine import Combination, combine
from rlhfsim.search.options import Pricer
from rlhfsim.search.request import Request
from rlhfsim.search.structures import Structure, structures
from rlhfsim.specs.models import Models
from rlhfsim.specs.placement import GpuSet, Placement, WeightPath

PER_POOL = 4
"""Fastest combinations of a pool that go on."""
PER_STRUCTURE = 4
"""Plans of one structure that are priced in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A complete plan with its price and memory."""

    placement: Placement
    iteration: Iteration
    ledger: Ledger

    @property
    def seconds(self) -> float:
        """Step time."""
        return self.iteration.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The structure that misses memory by least, when nothing fits."""

    structure: str
    pool: str
    shortfall: float
    """Bytes per GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All full prices of a request, best first."""

    ranked: tuple[Candidate, ...]
    pricer: Pricer
    structures: int
    rejected: tuple[str, ...]
    """Why plans failed the full memory ledger, one text each."""
    nearest: Nearest | None


def search(request: Request, models: Models) -> Found:
    """Ranked complete plans of a request.

    Seats of a pool are combined by the sum of their times under the memory of the pool; the best
    few of every structure are priced in full, with the whole ledger, and ranked by the objective.
    """
    pricer = Pricer(request, models)
    ranked: list[Candidate] = []
    rejected: list[str] = []
    nearest: list[Nearest] = []
    count = 0
    for structure in structures(request, models):
        count += 1
        for placement in islice(_placements(request, pricer, structure, nearest), PER_STRUCTURE):
            pricer.tally.priced += 1
            candidate = priced(request, models, placement)
            if candidate.ledger.rejected_by:
                rejected.append(candidate.ledger.rejected_by)
            else:
                ranked.append(candidate)
    order = sorted(ranked, key=lambda c: _key(request, c))
    return Found(
        ranked=_distinct(order), pricer=pricer, structures=count, rejected=tuple(rejected),
        nearest=min(nearest, key=lambda n: n.shortfall, default=None),
    )  # fmt: skip


def _key(request: Request, candidate: Candidate) -> tuple[float, float]:
    """What is minimised; money is time on a cluster that is rented whole."""
    if request.objective == "memory":
        return candidate.ledger.peak_bytes, candidate.seconds
    return candidate.seconds, candidate.ledger.peak_bytes


def _distinct(ordered: list[Candidate]) -> tuple[Candidate, ...]:
    seen: dict[Placement, Candidate] = {}
    for candidate in ordered:
        seen.setdefault(candidate.placement, candidate)
    return tuple(seen.values())


def priced(request: Request, models: Models, placement: Placement) -> Candidate:
    """A plan with its full price, on the KV capacity that its ledger leaves."""
    memory = ledger(models, placement, request.workload, request.cluster)
    price = iteration(
        models, placement, request.workload, request.cluster, kv_tokens=memory.kv_tokens
    )
    return Candidate(placement=placement, iteration=price, ledger=memory)


def _placements(
    request: Request, pricer: Pricer, structure: Structure, nearest: list[Nearest]
) -> Iterator[Placement]:
    """The most promising placements of a structure, best first."""
    found: list[tuple[GpuSet, tuple[Combination, ...]]] = []
    plans = 1
    for pool in structure.pools:
        seats = structure.seats_in(pool.name)
        options = [pricer.options(seat, pool, structure.policies[pool.name]) for seat in seats]
        plans *= prod(pricer.layouts(seat, pool) for seat in seats)
        usable = request.cluster.pools[pool.hardware].profile.usable_memory.value
        combined = combine(options, usable, PER_POOL)
        pricer.tally.unfit += combined.unfit
        if not combined.best and combined.compared:
            nearest.append(
                Nearest(structure=structure.name, pool=pool.name, shortfall=combined.shortfall)
            )
        found.append((pool, combined.best))
    pricer.tally.plans += plans
    choices = sorted(product(*(best for _, best in found)), key=lambda c: sum(x.seconds for x in c))
    for choice in choices:
        placement = _placement(request, structure, choice)
        yield from _with_path(request, pricer, structure, placement)


def _placement(
    request: Request, structure: Structure, choice: tuple[Combination, ...]
) -> Placement:
    seats: dict[str, Any] = {}
    for pool, combination in zip(structure.pools, choice, strict=True):
        for name, option in zip(structure.seats_in(pool.name), combination.options, strict=True):
            seats[name] = replace(option.seat, pool=pool.name)
    return Placement(
        pools=structure.pools, schedule=structure.schedule, backend=request.backend, **seats
    )


def _with_path(
    request: Request, pricer: Pricer, structure: Structure, placement: Placement
) -> Iterator[Placement]:
    """The placement with its fastest available weight path; nothing when there is none."""
    if placement.rollout is None:
        yield placement
        return
    setting = Setting(
        models=pricer.models,
        placement=placement,
        workload=request.workload,
        cluster=request.cluster,
    )
    times: dict[WeightPath, float] = {}
    for path in structure.paths:
        found = sync(
            path, pricer.models.actor, placement.actor.layout, placement.rollout.layout, source=setting.device(placement.actor),
            target=setting.device(placement.rollout), backend=request.backend, same_pool=placement.actor.pool == placement.rollout.pool,
            lora=request.workload.lora,
        )  # fmt: skip
        if found.available:
            times[path] = found.cost.seconds
    if times:
        yield replace(placement, weight_path=min(times, key=lambda p: times[p]))
