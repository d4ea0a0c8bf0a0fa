"""What would change the choice: one change at a time, the break-even computed and designed anew there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rlhfsim.choice import BreakEven
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.search import clock
from rlhfsim.search.branch_and_bound import SearchResult
from rlhfsim.search.cache import process_cache
from rlhfsim.search.candidates import Candidate
from rlhfsim.search.parallel import mapped
from rlhfsim.search.request import Request
from rlhfsim.search.space import pools_of
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.lengths import AnyLengths, Fixed, stats
from rlhfsim.units import Dimension
from rlhfsim.what_if.dotted_paths import keys, put
from rlhfsim.what_if.engine import ASIDE, Question, answer, good
from rlhfsim.what_if.points import Line, edge, with_memory

RIVALS = 2
"""Plans of other kinds that are priced again under each change."""
CLEAR = 0.01
"""A rival must be this much faster to count."""
HALVINGS = 6
"""Bisections of a break-even on a logarithmic scale."""
MOST = 8.0
"""Largest factor up and down of a quantity."""
LEAST_LENGTH = {"value": 1.0, "mean": 1.0, "std": 0.0, "max": 1.0}
"""Fields of a length distribution that are stretched, in tokens, and their least values."""


@frozen
class Quantity:
    """What is scaled up (or down) to `far` times."""

    text: str
    far: float
    path: str
    """Dotted path into the request."""
    times: Callable[[Any, float], Any] = lambda value, factor: value * factor
    """The value there, a factor times as much."""
    now: float | None = None
    unit: Dimension = "1"
    steps: tuple[float, ...] = ()
    """The only factors there are, from near to far; empty: any."""
    follow: Callable[[Placement, float], Placement | None] = lambda placement, factor: placement
    """The placement as it follows; None: it cannot."""

    def changed(self, request: Request, factor: float) -> Request:
        """The request with so many times the quantity."""
        asked: Request = put(request, keys(self.path), lambda value: self.times(value, factor))
        return asked

    def seconds(self, questions: Sequence[Question], factor: float) -> list[float]:
        """Steps of placements with so many times the quantity, the chosen one first; inf where one does not
        fit, or is not clearly faster than the chosen one."""
        placements = [q.placement and self.follow(q.placement, factor) for q in questions]
        if not any(placements):
            return [math.inf] * len(questions)
        # one request for all: what is cached for its profiles holds
        request, below = self.changed(questions[0].request, factor), math.inf
        seconds: list[float] = []
        for question, placement in zip(questions, placements, strict=True):
            asked = replace(question, request=request, placement=placement)
            plan = good(asked.scoped(below=below)) if placement else None
            seconds.append(math.inf if plan is None else plan.seconds)
            below = seconds[0] / (1 + CLEAR)
        return seconds


def break_evens(request: Request, ranked: Sequence[Candidate]) -> list[BreakEven]:
    """Changes, one at a time, under which another kind of plan is faster than any of the chosen kind.

    A crossing is looked for with layouts kept (more GPUs: more replicas and ranks of the same cut; a plan
    that no longer fits drops out). There both are designed anew: what other layouts of the chosen kind
    answer is no break-even.
    """
    rivals = [Question(request=request, placement=c.placement) for c in _other_kinds(ranked)]
    if len(rivals) < 2 or request.objective == "memory":
        return []
    ask = process_cache().passing()(_break_even)
    points = mapped(lambda quantity: ask(quantity, rivals), list(_quantities(request)))
    return [at for at in points if at is not None]


def _designed(
    quantity: Quantity, rivals: Sequence[Question], factor: float, times: Sequence[float]
) -> BreakEven | None:
    """The best plan and the best one of the chosen kind at a crossing; None where they are as fast.

    Whether any other plan is faster is asked only where one that shares the GPUs as the rival does is.
    """
    asked, chosen = rivals[0].request, rivals[0].placement
    assert chosen is not None
    there = Question(request=quantity.changed(asked, factor), scope=ASIDE)
    same = replace(there, request=replace(there.request, architecture=chosen.architecture)).scoped(
        only=lambda partition: partition.role_placement == chosen.role_placement
    )
    kept_s, *others_s = times
    timed = asked.objective == "time"
    own = answer(same.scoped(below=kept_s) if timed else same)
    below, other_s = _least(own, kept_s) / (1 + CLEAR), min(others_s)
    rival = rivals[1 + others_s.index(other_s)].placement
    assert rival is not None
    if timed:
        like = there.scoped(only=pools_of(rival)[0], below=below)
        if other_s >= below and good(like) is None:
            return None
        there = there.scoped(below=min(below, other_s * (1 + CLEAR)))
    best = answer(there).best
    winner, step_s = (best.placement, best.seconds) if best else (rival, other_s)
    if label(winner) == label(chosen) or not step_s < below:
        return None
    chosen_s = own.best.seconds if own.best else kept_s
    return BreakEven(
        change=quantity.text,
        factor=factor,
        now=quantity.now,
        unit=quantity.unit,
        winner=label(winner),
        step_s=step_s,
        chosen_step_s=chosen_s if chosen_s < math.inf else None,
    )


def _least(found: SearchResult, kept_s: float) -> float:
    """Seconds below which a search that had to beat `kept_s` has left no plan; inf where nothing fits."""
    if found.best is None:
        return kept_s if found.certificate.proven else 0.0
    return found.best.seconds * (1 - found.certificate.gap)


def _break_even(quantity: Quantity, rivals: Sequence[Question]) -> BreakEven | None:
    """The smallest change under which some rival wins, found by halving on a logarithmic scale.

    That the order changes once on the way is assumed; where it changes back and forth, one crossing is found.
    """
    line = Line(partial(quantity.seconds, rivals))
    factor = None if clock.over() else _crossing(quantity, line)
    if factor is None or clock.over():
        return None
    return _designed(quantity, rivals, factor, line.at(factor))


def _crossing(quantity: Quantity, line: Line[list[float]]) -> float | None:
    """The smallest factor from which on a rival is clearly faster with the layouts that both have."""

    def overtaken(factor: float) -> bool:
        chosen_s, *others_s = line.at(factor)
        return min(others_s) * (1 + CLEAR) < chosen_s

    if quantity.steps:
        return next(filter(overtaken, quantity.steps), None)
    if not overtaken(quantity.far):
        return None
    far = math.log(quantity.far)
    return math.exp(edge(0.0, far, lambda log: overtaken(math.exp(log)), halvings=HALVINGS))


def label(placement: Placement) -> str:
    """Architecture and role placement in words."""
    roles = "" if placement.role_placement == "colocated" else f", roles {placement.role_placement}"
    return placement.architecture + roles


def _other_kinds(ranked: Sequence[Candidate]) -> list[Candidate]:
    first: dict[str, Candidate] = {}
    for candidate in ranked:
        first.setdefault(label(candidate.placement), candidate)
    return list(first.values())[: RIVALS + 1]


# --- what is scaled ---------------------------------------------------------------------------------


def _quantities(request: Request) -> Iterator[Quantity]:
    work, cluster = request.workload, request.cluster
    profile = cluster.node_group.profile
    both = (1 / MOST, MOST)
    if work.generates:
        lengths = work.response_len
        now = lengths.value if isinstance(lengths, Fixed) else stats(lengths).mean
        path = "workload.response_len"
        for far in both:
            yield Quantity(text="response length", far=far, path=path, times=scaled, now=now, unit="token")
        if work.samples > 1:  # else it is the same as more prompts
            path = "workload.samples"
            yield Quantity(text="samples per prompt", far=MOST, path=path, times=_whole, now=work.samples)
    for far in both:
        yield Quantity(
            text="prompts per step", far=far, path="workload", times=_more_prompts, now=work.prompts
        )
    if cluster.gpus > cluster.node_group.gpus_per_node:
        now, path = profile.nic.value / cluster.oversubscription, "cluster.node_groups.*.profile.nic.value"
        for far in both:
            yield Quantity(text="network bandwidth per GPU", far=far, path=path, now=now, unit="byte/s")
    now = profile.usable_memory.value
    for far in (0.5, 2.0):
        yield Quantity(text="GPU memory", far=far, path="cluster", times=with_memory, now=now, unit="byte")
    if len(cluster.node_groups) == 1:
        more = Quantity(
            text="GPUs",
            far=1.0,
            path="cluster.node_groups.*.gpus",
            times=lambda gpus, factor: max(1, _whole(gpus, factor)),
            now=cluster.gpus,
            follow=spread,
        )
        yield from (replace(more, far=steps[-1], steps=steps) for steps in ((1 / 2, 1 / 4), (2.0, 4.0)))


def _whole(count: int, factor: float) -> int:
    return round(count * factor)


def _more_prompts(workload: Any, factor: float) -> Any:
    """More prompts, in whole mini-batches."""
    each = workload.mini_batches
    prompts = max(1, round(workload.prompts * factor / each)) * each
    sampling = workload.dynamic_sampling
    if sampling is not None and sampling.gen_prompts is not None:  # a batch of the step's size stays one
        drawn = math.ceil(sampling.gen_prompts * prompts / workload.prompts)
        sampling = replace(sampling, gen_prompts=drawn)
    return replace(workload, prompts=prompts, dynamic_sampling=sampling)


def scaled(lengths: AnyLengths, factor: float) -> AnyLengths:
    """A distribution of lengths stretched by a factor; an empirical one stays as observed."""
    stretched = {
        name: max(least, getattr(lengths, name) * factor)
        for name, least in LEAST_LENGTH.items()
        if hasattr(lengths, name)
    }
    return replace(lengths, **stretched)


def spread(placement: Placement, factor: float) -> Placement | None:
    """The same plan with `factor` times the ranks and replicas; None where they do not divide."""
    starts = [pool.start * factor for pool in placement.pools]
    sizes = [pool.gpus * factor for pool in placement.pools]
    ranks = {name: role.layout.dp * factor for name, role in placement.roles.items()}
    if any(count != round(count) for count in (*starts, *sizes, *ranks.values())):
        return None
    pools = tuple(
        replace(pool, start=round(start), gpus=round(gpus))
        for pool, start, gpus in zip(placement.pools, starts, sizes, strict=True)
    )
    try:
        roles = {
            name: put(role, ("layout", "dp"), round(ranks[name])) for name, role in placement.roles.items()
        }
        return replace(placement, pools=pools, **roles)
    except RlhfsimError:  # expert parallelism over more ranks than are left
        return None
