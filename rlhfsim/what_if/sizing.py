"""How many GPUs, and of which kind: the fewest or the cheapest that meet the targets.

More GPUs can be slower, and a larger cluster can fail where a smaller one does not (layouts must
divide it), so no size is concluded from another one. Of each kind of GPU the sizes 1, 2, 4, ... up to
a node, then 1, 2, 3, 4, 6, 8, 12, 16, ... nodes are tried in ascending order of the objective; for the
fewest GPUs also up to three sizes before the first that meets the targets. Two things keep that
cheap. A size is skipped when not even its arithmetic is fast enough:

    T  >=  FLOP of the step / (GPUs x peak FLOP/s)

Valid for every plan: each call does at least the matrix FLOP of its tokens, a GPU does no more than
its peak, and in steady state an asynchronous step still does the work of one step. What is left is
searched exactly for plans that are faster than the targets (and cheaper than the best size so far), so
most of a hopeless size is excluded by the bounds of `search.branch_and_bound` without a simulation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.search.certificate import Certificate
from rlhfsim.search.pareto import undominated
from rlhfsim.search.planning import asked_again, plan_for
from rlhfsim.search.request import Request
from rlhfsim.search.requirements import narrowed, verdicts
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.model.roles import Models, models_of
from rlhfsim.specs.workload.dataflow import Call, dataflow
from rlhfsim.specs.workload.lengths import stats
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.prediction import usd_per_step
from rlhfsim.training.packing import sequences_of
from rlhfsim.units import HOUR
from rlhfsim.what_if.engine import Question, answer
from rlhfsim.what_if.points import Change, points, setting
from rlhfsim.what_if.risk.odds import UNTARGETED, Odds, Targets
from rlhfsim.what_if.usual_trainer import trained, with_trainer

Aim = Literal["gpus", "cost"]
Outcome = Literal["meets", "misses", "too slow", "does not fit", "skipped", "no better"]
REFINED = 3
"""Sizes between the last that misses and the first that meets the targets that are tried too."""
LARGER = 2
"""Sizes beyond the fewest GPUs that are looked at for a faster and cheaper one."""
SURE = 3.0
"""Standard deviations that the mean of drawn lengths may lie below its expectation."""
FACTORS = (1 / 4, 1 / 2, 2.0, 4.0)
"""Sizes that are tried in addition to that of a plan, times the GPUs of the plan."""
LIMIT_S = 15.0
"""Longest search of all of them, shared among those that are left."""
LEAST_S = 0.1
"""Longest search of a size for which nothing is left."""


@frozen
class Trial:
    """One size of one kind of GPU."""

    gpu: str
    """Name of the profile."""
    gpus: int
    outcome: Outcome
    """skipped: its arithmetic alone takes too long; too slow: no plan of it is fast enough."""
    floor_s: float
    """Seconds that no step of it goes below."""
    limit_s: float
    """Longest step that would have helped; inf without one."""
    plan: Plan | None = None
    """Its best plan, where one was found; with a confidence the first of those met that keeps it."""
    odds: Odds | None = None
    """Odds of that plan, where a confidence was asked for."""
    certificate: Certificate | None = None

    @property
    def values(self) -> tuple[float, ...]:
        """GPUs, seconds and USD of a step."""
        assert self.plan is not None
        p = self.plan.prediction
        return self.gpus, p.step_s, math.inf if p.usd_per_step is None else p.usd_per_step


@frozen
class BreakEvenPrice:
    """The price at which another kind of GPU costs as little."""

    gpu: str
    gpus: int
    usd_per_hour: float
    """Price of one GPU."""
    now: float
    """What it costs."""


@frozen
class Sizing:
    """The answer and everything that was tried."""

    best: Trial | None
    per_gpu: tuple[Trial, ...]
    """The best size of each kind that meets the targets, the best first."""
    trials: tuple[Trial, ...]
    break_even: tuple[BreakEvenPrice, ...]
    larger: Trial | None = None
    """A larger cluster of the same kind that is faster and costs less a step; looked for where the fewest
    GPUs are asked for."""


@frozen
class Size:
    """One number of GPUs with its best plan."""

    gpus: int
    plan: Plan | None
    """None: nothing fits."""
    gap: float = 0.0
    """Share of the step by which an unexplored plan could be shorter; above 0 where time ran out."""


@frozen
class Sizes:
    """What was tried in addition to the plan's own size, ascending."""

    tried: tuple[Size, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def found(self) -> tuple[Plan, ...]:
        """Plans of the sizes that fit."""
        return tuple(s.plan for s in self.tried if s.plan is not None)


NO_SIZES = Sizes()


# --- sizes ------------------------------------------------------------------------------------------


def sizes(per_node: int, max_gpus: int) -> Iterator[int]:
    """1, 2, 4, ... inside a node, then 1, 2, 3, 4, 6, 8, 12, 16, ... nodes."""
    powers = [2**i for i in range(max_gpus.bit_length() + 1)]
    nodes = sorted({1, *powers, *(3 * power for power in powers)})
    yield from (gpus for gpus in powers if gpus < min(per_node, max_gpus + 1))
    yield from (n * per_node for n in nodes if n * per_node <= max_gpus)


def doubled(per_node: int, max_gpus: int) -> list[int]:
    """1, 2, 4, ... inside a node, then 1, 2, 4, ... nodes."""
    return [n for n in sizes(per_node, max_gpus) if n < per_node or (n // per_node).bit_count() == 1]


def resized(request: Request, profile: Profile, gpus: int) -> Request:
    """The question for another cluster."""
    pool = node_group(profile, gpus, gpus_per_node=min(gpus, profile.node.gpus), price=request.price)
    return replace(request, cluster=replace(request.cluster, node_groups=(pool,)))


def floor_seconds(request: Request, models: Models) -> float:
    """Seconds that no step on the cluster goes below: its matrix FLOP at peak (see above)."""
    precisions = {"bf16", "fp16", request.workload.rollout_precision}
    rate = 0.0
    for pool in request.cluster.node_groups:
        peaks = [p.value for name, p in pool.profile.peak.items() if name in precisions]
        rate += pool.gpus * max(peaks or [p.value for p in pool.profile.peak.values()])
    return sum(_call_flop(call, request.workload, models) for call in dataflow(request.workload)) / rate


def _call_flop(call: Call, workload: Workload, models: Models) -> float:
    """Least matrix FLOP of one call: 2 N_a per token forward, 6 N_a trained (4 with adapters)."""
    if call.kind == "sync" or call.role == "rules":
        return 0.0
    every = models.of(call.role).each
    active = sum(model.num_matmul_params_active for model in every) / len(every)
    response = stats(workload.response_len)
    spread = math.sqrt(max(0.0, response.mean_square - response.mean**2) / workload.num_sequences)
    drawn = max(0.0, response.mean - SURE * spread) * workload.num_sequences
    if workload.oversampling:
        drawn = float(workload.num_sequences)  # the shortest are trained on
    if call.kind == "generate":
        return 2 * active * max(0.0, drawn - workload.num_sequences)
    prompts = sequences_of(replace(workload, packing=True)).tokens - response.mean * workload.num_sequences
    each = (4 if workload.lora is not None else 6) * workload.epochs if call.kind == "train" else 2
    return each * active * (prompts + drawn)


# --- the search -------------------------------------------------------------------------------------


def size(
    request: Request, profiles: Sequence[Profile], targets: Targets, *, aim: Aim = "gpus", max_gpus: int = 512
) -> Sizing:
    """The fewest or cheapest GPUs of each kind, and of all kinds, that meet the targets."""
    wanted = narrowed(request, targets.requirements)
    trials = tuple(t for profile in profiles for t in _trials_of(wanted, profile, targets, aim, max_gpus))
    best: dict[str, Trial] = {}
    for trial in sorted((t for t in trials if t.outcome == "meets"), key=lambda t: _rank(t, aim)):
        best.setdefault(trial.gpu, trial)
    ranked = tuple(best.values())
    return Sizing(
        best=ranked[0] if ranked else None,
        per_gpu=ranked,
        trials=trials,
        break_even=tuple(_break_even_prices(ranked)),
        larger=_larger(wanted, ranked[0], profiles, max_gpus) if ranked and aim == "gpus" else None,
    )


def on_sizes(profile: Profile, counts: Iterable[int]) -> Iterator[Change]:
    """The axis of some numbers of one kind of GPU."""
    for gpus in counts:
        yield setting(str(gpus), {"request": partial(resized, profile=profile, gpus=gpus)})


def _tried(
    request: Request, profile: Profile, counts: Iterable[int], ask: Callable[[Request], Trial | None]
) -> Iterator[Trial]:
    """Some sizes of one kind of GPU, each when its turn comes."""
    axis = on_sizes(profile, counts)
    return (point.answer for point in points(Question(request=request), axis, lambda q: ask(q.request)))


def _larger(request: Request, best: Trial, profiles: Sequence[Profile], max_gpus: int) -> Trial | None:
    """The first of the next sizes with a plan that is faster and costs less."""
    profile = next(p for p in profiles if p.name == best.gpu)
    _, seconds, usd = best.values
    beyond = [n for n in sizes(profile.node.gpus, max_gpus) if n > best.gpus][:LARGER]

    def cheaper(sized: Request) -> Trial | None:
        rate = usd_per_step(sized.cluster, 1.0, request.price)
        return attempt(sized, min(seconds, usd / rate)) if rate else None

    return next((t for t in _tried(request, profile, beyond, cheaper) if t.plan is not None), None)


def _rank(trial: Trial, aim: Aim) -> tuple[float, ...]:
    gpus, seconds, usd = trial.values
    return (gpus, usd, seconds) if aim == "gpus" else (usd, gpus, seconds)


def _trials_of(
    request: Request, profile: Profile, targets: Targets, aim: Aim, max_gpus: int
) -> Iterator[Trial]:
    """The sizes of one kind of GPU, smallest first: the least rent per hour and the same floor of cost."""
    cheapest, before, node = math.inf, 0, profile.node.gpus

    def meeting(sized: Request) -> Trial:
        target, rate = targets.most_s(sized), usd_per_step(sized.cluster, 1.0) or 1.0
        trial = attempt(sized, min(target, cheapest / rate), targets)
        worse = trial.limit_s < target and trial.outcome in ("too slow", "skipped")
        return replace(trial, outcome="no better") if worse else trial

    for trial in _tried(request, profile, sizes(node, max_gpus), meeting):
        yield trial
        if trial.outcome != "meets":
            pass
        elif aim == "cost":
            cheapest = trial.values[2]
        else:
            for smaller in _tried(request, profile, between(before, trial.gpus, node), meeting):
                yield smaller
                if smaller.outcome == "meets":
                    return
            return
        before = trial.gpus


def between(low: int, high: int, per_node: int) -> list[int]:
    """Whole nodes between two sizes, at most `REFINED`, evenly spread."""
    if low < per_node:
        return []
    inner = list(range(low + per_node, high, per_node))
    stride = max(1, -(-len(inner) // REFINED))
    return inner[::stride]


def attempt(request: Request, limit: float = math.inf, targets: Targets = UNTARGETED) -> Trial:
    """One size: skipped by its floor, or searched for plans of at most `limit` seconds."""
    floor, group = floor_seconds(request, models_of(request.workload)), request.cluster.node_group
    trial = Trial(
        gpu=group.profile.name, gpus=request.cluster.gpus, outcome="skipped", floor_s=floor, limit_s=limit
    )
    if floor > limit:
        return trial
    request = trained(request)
    result = answer(Question(request=request).scoped(below=math.nextafter(limit, math.inf)))
    trial = replace(trial, certificate=result.certificate)
    if result.best is None:
        slow = result.certificate.bounded > 0  # what the limit, not memory, excluded
        return replace(trial, outcome="too slow" if slow else "does not fit")
    others = (c for c in result.rivals if targets.confidence and c.seconds <= limit)
    tried: list[Trial] = []
    for candidate in (result.best, *others):
        plan = with_trainer(plan_for(request, candidate), request)
        tried.append(_judged(replace(trial, plan=plan), plan, request, targets))
        if tried[-1].outcome == "meets":
            return tried[-1]
    return tried[0]


def _judged(trial: Trial, plan: Plan, request: Request, targets: Targets) -> Trial:
    """A size with one of its plans, held against the targets."""
    if targets.confidence is None:
        meets = all(v.met for v in verdicts(targets.requirements, plan, targets.steps))
        return replace(trial, outcome="meets" if meets else "misses")
    known = targets.odds(request, plan)
    return replace(trial, outcome="meets" if known.meets else "misses", odds=known)


def _break_even_prices(ranked: Sequence[Trial]) -> Iterator[BreakEvenPrice]:
    """For every kind but the cheapest: the price of a GPU-hour at which a step costs the same.

    p = C / (GPUs x T),  C the cost of a step on the cheapest kind, T the other kind's step
    """
    priced = [t for t in ranked if math.isfinite(t.values[2])]
    cheapest = min(priced, key=lambda t: t.values[2], default=None)
    for trial in priced:
        if cheapest is not None and trial is not cheapest:
            gpus, seconds, usd = trial.values
            hours = gpus * seconds / HOUR
            price, now = cheapest.values[2] / hours, usd / hours
            yield BreakEvenPrice(gpu=trial.gpu, gpus=trial.gpus, usd_per_hour=price, now=now)


# --- the front --------------------------------------------------------------------------------------


def fronts(request: Request, profiles: Sequence[Profile], max_gpus: int) -> tuple[Trial, ...]:
    """The best plan of every size of every kind that no other one beats in GPUs, time and money."""
    trials = (
        trial
        for profile in profiles
        for trial in _tried(request, profile, sizes(profile.node.gpus, max_gpus), attempt)
    )
    fitting = [t for t in trials if t.plan is not None]
    best = undominated([t.values for t in fitting])
    return tuple(sorted((fitting[i] for i in best), key=lambda t: t.values))


# --- other sizes of a plan --------------------------------------------------------------------------


def other_counts(plan: Plan) -> tuple[int, ...]:
    """Other sizes: whole nodes, or powers of two inside one."""
    if len(plan.hardware) != 1 or plan.choice is None:
        return ()
    gpus, node = plan.hardware[0].gpus, plan.hardware[0].gpus_per_node
    sizes = [round(gpus * f) if gpus * f < node else round(gpus * f / node) * node for f in FACTORS]
    return tuple(sorted({n for n in sizes if n >= 1 and n != gpus}))


def other_sizes(
    plan: Plan, cluster: Cluster | None, *, limit_s: float = LIMIT_S, done: Callable[[], None] = lambda: None
) -> Sizes:
    """The best plan of every other size, as the question of `plan` on its `cluster` is asked again.

    On one rented cluster money is proportional to time, so only other sizes make a trade of the two. `done`
    is called after each; a cluster that is None is not known here.
    """
    if plan.choice is None:
        return Sizes(
            notes=("the plan was given, not searched, so there is no question to ask for other sizes",)
        )
    if cluster is None or not other_counts(plan):
        return Sizes(notes=("other sizes are tried for clusters of one known kind of GPU only",))
    base, todo, end = asked_again(plan, cluster), other_counts(plan), time.monotonic() + limit_s
    tried: list[Size] = []
    for n in todo:  # small clusters take little, and leave the rest to the large ones
        left = (end - time.monotonic()) / (len(todo) - len(tried))
        tried.append(_at_size(replace(base, time_limit=max(left, LEAST_S)), n, done))
    return Sizes(tried=tuple(tried), notes=tuple(_notes(tried)))


def _at_size(base: Request, gpus: int, done: Callable[[], None]) -> Size:
    group = base.cluster.node_group
    group = replace(group, gpus=gpus, gpus_per_node=min(gpus, group.gpus_per_node))
    request = replace(base, cluster=replace(base.cluster, node_groups=(group,)))
    try:
        trial = attempt(request)
    except RlhfsimError:  # what was fixed cannot be at this size
        trial = None
    done()
    gap = trial.certificate.gap if trial and trial.certificate else 0.0
    return Size(gpus=gpus, plan=trial.plan if trial else None, gap=gap)


def _notes(tried: Sequence[Size]) -> list[str]:
    nothing = [f"{s.gpus:,} GPUs: nothing fits" for s in tried if s.plan is None]
    return nothing + [
        f"{s.gpus:,} GPUs: its search ended early; a plan could be up to {s.gap:.1%} shorter"
        for s in tried
        if s.gap > 0 and s.plan
    ]
