"""Why a plan won, what would flip the choice, what the choices left out would bring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlhfsim.plan import Plan
from rlhfsim.search.candidates import Candidate, Found, priced, search
from rlhfsim.search.parallel import mapped
from rlhfsim.search.request import SWITCHES, Request, switched
from rlhfsim.specs.backends import BACKENDS
from rlhfsim.specs.hardware import Cluster, Pool
from rlhfsim.specs.lengths import AnyLengths, Fixed, LogNormal, Truncated
from rlhfsim.specs.models import Models, models_of
from rlhfsim.specs.placement import Placement, Seat
from rlhfsim.units import format

FLIP_RIVALS = 4
"""Plans of other kinds that are priced again under each change."""
CLEAR = 0.01
"""A term below this share of the step is not worth a word."""
TOUCHED: dict[str, frozenset[str]] = {
    "adam8bit": frozenset({"actor", "critic"}),
    "fp8": frozenset({"rollout"}),
    "lora": frozenset({"actor", "reference"}),
    "rollout-logprobs": frozenset({"actor"}),
}
"""Seats whose price a switch changes; with LoRA the reference shares the weights of the actor."""
NEED_ROLLOUT = ("async", "fp8", "rollout-logprobs")
MORE_GPUS = (2, 3, 4, 6, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """One change that makes another plan the best."""

    change: str
    winner: str
    """Kind of the new best plan."""
    seconds: float
    """Its step under the change."""
    chosen_seconds: float | None
    """The chosen plan's step under the change; None when it does not fit any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What one choice that does not compete would bring."""

    name: str
    """Switch or backend."""
    meaning: str
    seconds: float | None
    """Best step with it; None when nothing fits."""
    saved: float | None
    """Share of the chosen step that it saves; negative when it is slower."""
    launchable: bool


# --- why -----------------------------------------------------------------------------------------


def kind(plan: Plan) -> str:
    """Architecture and role placement in words."""
    return (
        plan.architecture
        if plan.role_placement == "colocated"
        else f"{plan.architecture}, roles {plan.role_placement}"
    )


def reasons(chosen: Plan, rivals: Sequence[Plan]) -> Iterator[str]:
    """One sentence on what fills the step, then one for each rival of another kind."""
    step = chosen.prediction
    by: dict[str, float] = {}
    for phase in step.phases:
        if phase.critical:
            for resource, seconds in phase.by_resource_s.items():
                by[resource] = by.get(resource, 0.0) + seconds
    top = sorted(by, key=lambda r: -by[r])[:3]
    yield "its step is " + ", ".join(f"{by[r] / step.step_s:.0%} {r}" for r in top)
    seen = {kind(chosen)}
    for rival in rivals:
        if kind(rival) not in seen:
            seen.add(kind(rival))
            yield _against(chosen, rival)


def _against(chosen: Plan, rival: Plan) -> str:
    gap = rival.prediction.step_s - chosen.prediction.step_s
    mine, theirs = _critical(chosen), _critical(rival)
    terms = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in mine | theirs}
    large = sorted(
        (n for n in terms if abs(terms[n]) > CLEAR * chosen.prediction.step_s),
        key=lambda n: -terms[n],
    )
    listed = ", ".join(f"{n} {terms[n]:+.1f} s" for n in large[:3]) or "many small terms"
    if gap < CLEAR * chosen.prediction.step_s:
        return f"{kind(rival)} is as fast within {CLEAR:.0%}: {listed}"
    return f"{kind(rival)} is {format(gap, 's')} ({gap / chosen.prediction.step_s:.0%}) slower: {listed}"


def _critical(plan: Plan) -> dict[str, float]:
    """Critical seconds by call; moves around a call count as `moves`."""
    total: dict[str, float] = {}
    for phase in plan.prediction.phases:
        if phase.critical:
            name = "moves" if phase.name.endswith(("load", "unload")) else phase.name
            total[name] = total.get(name, 0.0) + phase.seconds
    return total


# --- what would flip the choice --------------------------------------------------------------------


def flips(request: Request, models: Models, ranked: Sequence[Candidate]) -> list[Flip]:
    """Changes, one at a time, under which a rival of another kind overtakes the chosen plan.

    The plans keep their layouts; a plan that no longer fits drops out.
    """
    rivals = _other_kinds(ranked)
    if len(rivals) < 2 or request.objective == "memory":
        return []
    found = mapped(lambda change: _flip(*change, models, rivals), list(_changes(request)))
    return [flip for flip in found if flip is not None]


def _flip(
    change: str, changed: Request, models: Models, rivals: Sequence[Candidate]
) -> Flip | None:
    """The rival that wins under a change, if it is not the chosen plan (the first)."""
    times: dict[int, float] = {}
    for i, candidate in enumerate(rivals):
        again = priced(changed, models, candidate.placement)
        if again is not None:
            times[i] = again.seconds
    if not times:
        return None
    best = min(times, key=lambda i: times[i])
    own = times.get(0)
    if best == 0 or (own is not None and own <= times[best] * (1 + CLEAR)):
        return None
    return Flip(change=change, winner=_label(rivals[best]), seconds=times[best], chosen_seconds=own)


def _label(candidate: Candidate) -> str:
    placement = candidate.placement
    roles = "" if placement.role_placement == "colocated" else f", roles {placement.role_placement}"
    return placement.architecture + roles


def _other_kinds(ranked: Sequence[Candidate]) -> list[Candidate]:
    first: dict[str, Candidate] = {}
    for candidate in ranked:
        first.setdefault(_label(candidate), candidate)
    return list(first.values())[: FLIP_RIVALS + 1]


def _changes(request: Request) -> Iterator[tuple[str, Request]]:
    work, cluster = request.workload, request.cluster
    if work.generates:
        for factor in (0.25, 4.0):
            yield (
                f"responses {factor:g}x as long",
                _workload(request, response_len=scaled(work.response_len, factor)),
            )
        if work.samples > 1:  # else it is the same as more prompts
            yield "4x as many samples per prompt", _workload(request, samples=work.samples * 4)
    yield "4x as many prompts", _workload(request, prompts=work.prompts * 4)
    if cluster.gpus > cluster.pool.gpus_per_node:
        thinner = replace(cluster, oversubscription=cluster.oversubscription * 4)
        yield "a network 4x slower", replace(request, cluster=thinner)
    yield "GPU memory a fifth smaller", replace(request, cluster=_smaller(cluster, 0.8))


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


# --- what is left out -------------------------------------------------------------------------------


def gains(request: Request, models: Models, base: Found, chosen: Candidate) -> list[Gain]:
    """The best step with each switch or backend that does not compete.

    A switch that changes the workload and a backend are priced on the pools of the chosen plan;
    `async` on every split into two pools.
    """
    online = request.workload.generates
    names = [
        n
        for n in sorted(SWITCHES)
        if n not in request.switches | request.forbid and (online or n not in NEED_ROLLOUT)
    ]
    backends = [b for b in BACKENDS if b != request.backend]
    slowest_first = [*reversed(backends), *names]  # so that the cores finish together
    found = dict(
        zip(
            slowest_first,
            mapped(lambda n: _gain(n, request, models, base, chosen), slowest_first),
            strict=True,
        )
    )
    return [found[name] for name in (*names, *backends)]


def _gain(name: str, request: Request, models: Models, base: Found, chosen: Candidate) -> Gain:
    launchable, like = True, chosen.placement
    if name in BACKENDS:
        rules = BACKENDS[name]
        meaning, launchable = f"training by {rules.title}", rules.launchable
        lean = request.forbid | (frozenset() if _offloads(like) else {"offload"})
        found = search(replace(request, backend=name, fix={}, forbid=lean), models, like=like)
    else:
        meaning = SWITCHES[name]
        changed = replace(request, allow=request.allow | {name})
        if name == "async":
            changed = replace(changed, architecture="async")
            found = search(changed, models, base.pricer.again(changed, models))
        else:
            changed = replace(changed, workload=switched(request.workload, frozenset({name})))
            again = models_of(changed.workload)
            found = search(
                changed, again, base.pricer.again(changed, again, TOUCHED[name]), like=like
            )
    seconds = found.ranked[0].seconds if found.ranked else None
    saved = 1 - seconds / chosen.seconds if seconds is not None else None
    return Gain(name=name, meaning=meaning, seconds=seconds, saved=saved, launchable=launchable)


def _offloads(placement: Placement) -> bool:
    """Whether a plan moves anything trained or scored to the host."""
    seats = [s for s in placement.seats.values() if isinstance(s, Seat)]
    return any(
        s.residency != "resident" or s.offload_between or s.layout.offload_optimizer != "none"
        for s in seats
    )


# --- nothing fits -----------------------------------------------------------------------------------


def nearest_change(request: Request, models: Models) -> str | None:
    """The smallest change with which something fits: a restriction dropped, a switch, more GPUs."""
    for remedy, changed in _relaxations(request):
        if search(changed, models_of(changed.workload)).ranked:
            return remedy
    return None


def _relaxations(request: Request) -> Iterator[tuple[str, Request]]:
    for name in sorted(request.forbid):
        yield f"allow {name} again", replace(request, forbid=request.forbid - {name})
    for seat in request.fix:
        yield (
            f"do not fix the layout of the {seat}",
            replace(request, fix={k: v for k, v in request.fix.items() if k != seat}),
        )
    if request.forbid or request.fix or request.architecture:
        yield "free every choice", replace(request, fix={}, forbid=frozenset(), architecture=None)
    yield from (
        (f"--backend {b}", replace(request, backend=b, fix={}))
        for b in BACKENDS
        if b != request.backend
    )
    for name in ("adam8bit", "lora"):
        if name not in request.switches:
            yield (
                f"--allow {name}",
                replace(request, workload=switched(request.workload, frozenset({name}))),
            )
    for factor in MORE_GPUS:
        pool = request.cluster.pool
        if pool.gpus > pool.gpus_per_node and pool.gpus_per_node < pool.profile.node.gpus:
            continue
        more = replace(
            pool,
            gpus=pool.gpus * factor,
            gpus_per_node=min(pool.gpus * factor, pool.profile.node.gpus),
        )
        yield (
            f"--gpus {more.gpus}",
            replace(
                request, cluster=replace(request.cluster, pools=(more, *request.cluster.pools[1:]))
            ),
        )
