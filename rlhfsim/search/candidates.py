"""From structures and options to complete plans, priced in full and ranked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod
from typing import Any

from rlhfsim.phases.iteration import Iteration, Setting, iteration
from rlhfsim.phases.ledger import Ledger, ledger
from rlhfsim.phases.weight_sync import sync
from rlhfsim.search.combine import Combination, combine
from rlhfsim.search.pricer import Pricer
from rlhfsim.search.request import Request
from rlhfsim.search.structures import Structure, structures
from rlhfsim.specs.models import Models
from rlhfsim.specs.placement import GpuSet, Placement, WeightPath

PER_POOL = 2
"""Fastest combinations of a pool that go on, for each headroom."""
HEADROOM = (1.0, 0.92, 0.85, 0.75)
"""Shares of memory that the quick check may fill; the ledger's probability decides."""
KEPT_PER_KIND, TRIED_PER_KIND = 6, 24
"""Plans of one kind that are kept, and that are priced at most to find them."""
SPLITS = 2
"""Splits of the GPUs into pools that are tried for one kind of plan."""
STEADY = 0.6
"""A steady-state rollout may leave out its tail: its bound is loosened by this share."""


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


Choice = tuple[tuple[GpuSet, Combination], ...]
"""For each pool of a structure, the options of its seats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A plan whose weight path and full price are still open."""

    structure: Structure
    choice: Choice
    bound: float
    """No step is shorter, seconds."""
    fullness: float
    """Share of memory that the fullest pool needs."""

    def placement(self, request: Request) -> Placement:
        """The placement, without weight path."""
        seats: dict[str, Any] = {}
        for pool, combination in self.choice:
            for name, option in zip(
                self.structure.seats_in(pool.name), combination.options, strict=True
            ):
                seats[name] = replace(option.seat, pool=pool.name)
        return Placement(
            pools=self.structure.pools,
            schedule=self.structure.schedule,
            backend=request.backend,
            **seats,
        )


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
    rejected: tuple[str, ...]
    """Why plans failed the full memory ledger, one text each."""
    nearest: Nearest | None


def search(
    request: Request, models: Models, pricer: Pricer | None = None, like: Placement | None = None
) -> Found:
    """Ranked complete plans of a request; with `like`, only on its pools and with its architecture.

    Seats of a pool are combined by the sum of their times under the memory of the pool. The best
    few of every structure become placements with a bound: no step is shorter than the work of its
    busiest pool. They are priced in full, with the whole ledger, in the order of that bound; a kind
    of plan (architecture and role placement) is done when its next bound exceeds its best price.
    Of splits into pools of many sizes, those near the balance are tried first, the others only
    when none of them fits.
    """
    pricer = pricer or Pricer(request, models)
    wanted = list(structures(request, models))
    if like is not None:
        return _search(
            request,
            pricer,
            [s for s in wanted if s.pools == like.pools and s.name == like.architecture],
        )
    near = balanced(request, pricer, wanted)
    found = _search(request, pricer, near)
    return found if found.ranked or len(near) == len(wanted) else _search(request, pricer, wanted)


def _search(request: Request, pricer: Pricer, wanted: list[Structure]) -> Found:
    _prefill(pricer, wanted)
    nearest: list[Nearest] = []
    kinds: dict[tuple[str, str], list[Draft]] = {}
    for structure in wanted:
        kind = structure.name, structure.role_placement
        kinds.setdefault(kind, []).extend(_drafts(request, pricer, structure, nearest))
    ranked: list[Candidate] = []
    rejected: list[str] = []
    for drafts in kinds.values():
        fitting, reasons = _price_kind(request, pricer, drafts)
        ranked += fitting
        rejected += reasons
    pricer.tally.priced += len(ranked) + len(rejected)
    return Found(
        ranked=tuple(sorted(ranked, key=lambda c: _key(request, c))), pricer=pricer, rejected=tuple(rejected),
        nearest=min(nearest, key=lambda n: n.shortfall, default=None),
    )  # fmt: skip


def _prefill(pricer: Pricer, wanted: list[Structure]) -> None:
    pricer.prefill(
        (seat, pool, s.policies[pool.name])
        for s in wanted
        for pool in s.pools
        for seat in s.seats_in(pool.name)
    )


def balanced(request: Request, pricer: Pricer, wanted: list[Structure]) -> list[Structure]:
    """Structures in one pool and, of every other kind, those on the `SPLITS` best balanced pools.

    The balance is judged by the times in one pool of all GPUs, each scaled to the size of its pool:
    t(n) = t(N) N/n. Without such times (mixed hardware, or nothing fits) every structure stays.
    """
    if len(request.cluster.pools) > 1:
        return wanted
    _prefill(pricer, [s for s in wanted if len(s.pools) == 1])
    whole = GpuSet(name="all", gpus=request.cluster.pool.gpus)
    times = {seat: pricer.fastest(seat, whole) for s in wanted for seat in s.seats}
    if any(t is None for t in times.values()):
        return wanted
    chosen: dict[tuple[str, str], dict[tuple[GpuSet, ...], float]] = {}
    for s in wanted:
        if len(s.pools) > 1:
            each = [
                sum(times.get(x) or 0.0 for x in s.seats_in(p.name)) * whole.gpus / p.gpus
                for p in s.pools
            ]
            total = sum(each) if s.name == "disaggregated" else max(each)
            chosen.setdefault((s.name, s.role_placement), {})[s.pools] = total
    kept = {kind: sorted(pools, key=lambda p: pools[p])[:SPLITS] for kind, pools in chosen.items()}
    return [s for s in wanted if len(s.pools) == 1 or s.pools in kept[s.name, s.role_placement]]


def _price_kind(
    request: Request, pricer: Pricer, drafts: list[Draft]
) -> tuple[list[Candidate], list[str]]:
    """Plans of one kind, and why others may not run.

    Priced in the order of their bound; where all of those are too large, the leanest ones.
    """
    rejected: list[str] = []
    found = _first_that_fit(request, pricer, sorted(drafts, key=lambda d: d.bound), rejected)
    if not found:
        found = _first_that_fit(request, pricer, sorted(drafts, key=lambda d: d.fullness), rejected)
    return found, rejected


def _first_that_fit(
    request: Request, pricer: Pricer, drafts: list[Draft], rejected: list[str]
) -> list[Candidate]:
    """The first plans that may run; once one is too full, fuller ones are not tried."""
    best, kept, tried, limit = inf, list[Candidate](), 0, inf
    for draft in drafts:
        if (
            len(kept) >= KEPT_PER_KIND
            or tried >= TRIED_PER_KIND
            or (draft.bound >= best and request.objective != "memory")
        ):
            break
        placement = _with_path(request, pricer, draft) if draft.fullness < limit else None
        if placement is None:
            continue
        tried += 1
        memory = ledger(pricer.models, placement, request.workload, request.cluster)
        if reason := risk(request, memory):
            rejected.append(reason)
            if memory.probability_out_of_memory > request.max_oom:
                limit = draft.fullness
            continue
        kept.append(_priced(request, pricer.models, placement, memory))
        best = min(best, kept[-1].seconds)
    return kept


def risk(request: Request, memory: Ledger) -> str | None:
    """Why a plan may not run: it does not fit, or does so only with luck."""
    if memory.rejected_by:
        return memory.rejected_by
    if memory.probability_out_of_memory > request.max_oom:
        return f"probability of running out of memory above {request.max_oom:.0%}"
    return None


def _key(request: Request, candidate: Candidate) -> tuple[float, float]:
    """What is minimised; money is time on a cluster that is rented whole."""
    if request.objective == "memory":
        return candidate.ledger.peak_bytes, candidate.seconds
    return candidate.seconds, candidate.ledger.peak_bytes


def priced(request: Request, models: Models, placement: Placement) -> Candidate | None:
    """A plan with its full price; None where it may not run."""
    memory = ledger(models, placement, request.workload, request.cluster)
    return None if risk(request, memory) else _priced(request, models, placement, memory)


def _priced(request: Request, models: Models, placement: Placement, memory: Ledger) -> Candidate:
    """On the KV capacity that the ledger leaves."""
    price = iteration(
        models, placement, request.workload, request.cluster, kv_tokens=memory.kv_tokens
    )
    return Candidate(placement=placement, iteration=price, ledger=memory)


def _drafts(
    request: Request, pricer: Pricer, structure: Structure, nearest: list[Nearest]
) -> list[Draft]:
    """The most promising placements of a structure, with a bound on their step time."""
    found: list[list[tuple[GpuSet, Combination]]] = []
    plans = 1
    for pool in structure.pools:
        seats = structure.seats_in(pool.name)
        options = [pricer.options(seat, pool, structure.policies[pool.name]) for seat in seats]
        plans *= prod(pricer.layouts(seat, pool) for seat in seats)
        usable = request.cluster.pools[pool.hardware].profile.usable_memory.value
        combined = [combine(options, usable * share, PER_POOL) for share in HEADROOM]
        pricer.tally.unfit += combined[0].unfit
        if not combined[0].best and combined[0].compared:
            nearest.append(
                Nearest(structure=structure.name, pool=pool.name, shortfall=combined[0].shortfall)
            )
        distinct = {c.options: c for each in combined for c in each.best}
        found.append([(pool, c) for c in distinct.values()])
    pricer.tally.plans += plans
    pricer.tally.structures += 1
    return [_draft(request, structure, choice) for choice in product(*found)]


def _draft(request: Request, structure: Structure, choice: Choice) -> Draft:
    usable = [
        request.cluster.pools[pool.hardware].profile.usable_memory.value for pool, _ in choice
    ]
    fullness = max(c.needed / u for (_, c), u in zip(choice, usable, strict=True))
    return Draft(
        structure=structure, choice=choice, bound=_bound(structure, choice), fullness=fullness
    )


def _bound(structure: Structure, choice: Choice) -> float:
    """Seconds that no step of these seats can be shorter than."""
    times = [combination.seconds for _, combination in choice]
    if structure.name == "disaggregated":  # rollout and the rest wait for each other
        return sum(times)
    return max(times) * (1 - STEADY * (structure.name == "async"))


def _with_path(request: Request, pricer: Pricer, draft: Draft) -> Placement | None:
    """The placement with its fastest available weight path; None when there is none."""
    placement = draft.placement(request)
    if placement.rollout is None:
        return placement
    setting = Setting(
        models=pricer.models,
        placement=placement,
        workload=request.workload,
        cluster=request.cluster,
    )
    times: dict[WeightPath, float] = {}
    for path in draft.structure.paths:
        found = sync(
            path, pricer.models.actor, placement.actor.layout, placement.rollout.layout, source=setting.device(placement.actor),
            target=setting.device(placement.rollout), backend=request.backend, same_pool=placement.actor.pool == placement.rollout.pool,
            lora=request.workload.lora,
        )  # fmt: skip
        if found.available:
            times[path] = found.cost.seconds
    return replace(placement, weight_path=min(times, key=lambda p: times[p])) if times else None
