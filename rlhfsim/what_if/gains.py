"""What the choices left out would bring: each switch and each other backend, on the pools of the answer."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from rlhfsim.frozen import frozen
from rlhfsim.search.candidates import Candidate
from rlhfsim.search.request import STALE, SWITCHES, Request, switched
from rlhfsim.search.scope import Scope
from rlhfsim.search.space import pools_of
from rlhfsim.simulation.asynchronous.run import WAIT
from rlhfsim.specs.frameworks.runs import ANY, Runs, runner_of
from rlhfsim.specs.placement.backends import BACKENDS, Backend
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.what_if.engine import ASIDE_WORK, Prices, Question, search_of
from rlhfsim.what_if.points import Change, first_of_each, points
from rlhfsim.what_if.unasked import lent
from rlhfsim.what_if.verdict import put_to, refusal

WORTH_A_LINE = 0.01
"""Share of the step."""
CHANGES_LEARNING = {"async": 0.15, "lend": 0.15, "fp8": 0.05, "rollout-logprobs": 0.05}
"""Switch that changes what is learnt and trains the same weights -> share of the step that it must save to be
named unasked; older samples change most."""
NEED_ROLLOUT = (*STALE, "fp8", "fp8-kv", "mxfp4", "nvfp4", "rollout-logprobs")


@frozen
class Gain:
    """What one choice that does not compete would bring."""

    name: str
    """Switch or backend."""
    meaning: str
    seconds: float | None
    """Best step with it; None when nothing fits."""
    saved: float | None
    """Share of the chosen step that it saves; negative when it is slower."""
    other_work: bool
    """Whether it trains other weights: then the step saved is not of the same work."""
    option: str
    """With which `rlhfsim design` finds it: `--allow async`, `--framework verl`."""


def gains(prices: Prices, best: Candidate, step_s: float) -> list[Gain]:
    """A good step with each switch or backend that does not compete: met by a warm start, not proven.

    A switch that changes the workload and a backend are searched on the pools of the chosen plan;
    `async` on a rollout pool and a pool for everything else. What is saved is a share of
    `step_s`, the seconds of the chosen plan.
    """
    request = prices.request
    names = [
        name
        for name in sorted(SWITCHES)
        if name not in request.switches | request.forbid
        and (request.workload.generates or name not in NEED_ROLLOUT)
    ]
    return _gains([*names, *_other_backends(request)], prices, best, step_s)


def elsewhere(prices: Prices, best: Candidate, step_s: float, known: Collection[str] = ()) -> Gain | None:
    """The backend that would train fastest of those left out and not `known`, if it saves something; not
    proven."""
    names = [name for name in _other_backends(prices.request) if name not in known]
    timed = prices.request.objective != "memory"  # else bounds are bytes
    below = step_s * (1 - WORTH_A_LINE) if timed else math.inf
    others = _gains(names, prices, best, step_s, below)
    better = [gain for gain in others if (gain.saved or 0.0) > WORTH_A_LINE]
    return max(better, key=lambda gain: gain.saved or 0.0, default=None)


def _other_backends(request: Request) -> list[str]:
    return [name for name in BACKENDS if name != request.backend]


def learning_gain(prices: Prices, best: Candidate, step_s: float) -> Gain | None:
    """The switch of `CHANGES_LEARNING` that would save most of a step, if it saves enough; not proven.

    To lend the trainer's GPUs is looked at on the layouts of the asynchronous plan.
    """
    request = prices.request
    names = [n for n in CHANGES_LEARNING if n not in request.switches | request.forbid | {"lend"}]
    if not request.workload.generates or request.objective == "memory":
        return None
    below = {name: step_s * (1 - least) for name, least in CHANGES_LEARNING.items()}
    plans = _plans(names, prices, best, below)
    if stale := plans.get("async"):
        waiting_s = sum(x.cost.seconds for x in stale.iteration.phases if x.name == WAIT)
        plans["lend"] = lent(stale.placement, waiting_s, stale.seconds, request)
    found = [_gain(name, plan, step_s, request) for name, plan in plans.items()]
    better = [gain for gain in found if gain.seconds is not None and gain.seconds < below[gain.name]]
    return min(better, key=lambda gain: gain.seconds or math.inf, default=None)


def _gains(
    names: Sequence[str], prices: Prices, like: Candidate, step_s: float, below: float = math.inf
) -> list[Gain]:
    """Those of some choices; a step whose bound already is not `below` counts as none."""
    plans = _plans(names, prices, like, dict.fromkeys(names, below))
    return [_gain(name, plan, step_s, prices.request) for name, plan in plans.items()]


def _plans(
    names: Sequence[str], prices: Prices, like: Candidate, below: Mapping[str, float]
) -> dict[str, Candidate | None]:
    """A good plan with each of some choices, see `_gains`."""
    question = Question(request=prices.request, scope=Scope(work=ASIDE_WORK))

    def met(name: str) -> Iterator[tuple[str, Candidate]]:
        def ask(asked: Question) -> Candidate | None:
            if refusal(asked.request) is not None:
                return None
            search = search_of(asked, prices)
            return search.first() if search.may_stay(below[name]) else None

        return ((name, point.answer) for point in points(question, [_change(name, like.placement)], ask))

    slowest_first = reversed(names)  # so that the cores finish together
    plans = dict(first_of_each(map(met, slowest_first)))
    return {name: plans.get(name) for name in names}


def _gain(name: str, best: Candidate | None, step_s: float, request: Request) -> Gain:
    meaning, option = SWITCHES.get(name, ""), f"--allow {','.join(sorted(request.allow | {name}))}"
    if name in BACKENDS:
        runs = _runner(request, name)
        meaning = f"{runs.title if runs else 'priced only'}, training by {BACKENDS[name].title}"
        option = f"--framework {runs.name if runs else ANY} --backend {name}"
    return Gain(
        name=name,
        meaning=meaning,
        other_work=name in SWITCHES and switched(request.workload, {name}).lora != request.workload.lora,
        seconds=None if best is None else best.seconds,
        saved=None if best is None else 1 - best.seconds / step_s,
        option=option,
    )


def _runner(request: Request, backend: Backend) -> Runs | None:
    """Who would train with a backend: the framework of the question where it does."""
    if request.framework == ANY or (request.runs and backend in request.runs.trainers):
        return request.runs
    return runner_of(backend, request.cluster.vendors, request.workload.algorithm)


def _change(name: str, like: Placement) -> Change:
    """One more choice, on the pools of a plan."""

    def apply(question: Question) -> Question:
        request = question.request
        if name in STALE:
            request = replace(request, allow=request.allow | {name}, architecture=name)
            return replace(question, request=request).scoped(
                only=lambda partition: len(partition.groups) == 2
            )
        if name in BACKENDS:
            lean = request.forbid | (frozenset() if _offloads(like) else {"offload"})
            runs = _runner(request, name)
            request = replace(put_to(request, runs.name if runs else ANY, name), forbid=lean)
        else:
            work = switched(request.workload, {name})
            request = replace(request, allow=request.allow | {name}, workload=work)
        only, sizes = pools_of(like)
        return replace(question, request=request).scoped(only=only, sizes=sizes)

    return Change(name=name, apply=apply)


def _offloads(placement: Placement) -> bool:
    """Whether a plan moves anything trained or scored to the host."""
    return any(
        s.residency != "resident" or s.offload_between or s.layout.offload_optimizer != "none"
        for s in placement.trainers.values()
    )
