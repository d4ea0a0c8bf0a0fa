"""Who runs a plan where the question names nobody, and by which training backend its plans train.

Our executor runs it, a production framework a large policy (`leader`). The backend is that
of most of the framework's own examples of the model's kind and size (`Runs.usual_trainer`), unless it refuses
the question, nothing fits with it, or another one is faster by more than the model's error. Large dense
policies and mixtures of experts stay with what is run at their size, however fast another one may be.

The plan of the other side is given with it: what `rlhfsim launch` runs next to the best production framework
of which runs were compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from rlhfsim.plan import Plan
from rlhfsim.search import clock
from rlhfsim.search.planning import plan_for
from rlhfsim.search.request import Request
from rlhfsim.search.scope import ALONE
from rlhfsim.search.space import pools_of
from rlhfsim.specs.frameworks.runs import LARGE_TRAINER, OWN, framework
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.step.measured import model_error
from rlhfsim.what_if.engine import Question, fastest, good
from rlhfsim.what_if.points import points, setting
from rlhfsim.what_if.verdict import measured_frameworks, production, put_to, put_to_each_backend, refusal

LARGE_DENSE = 100e9
"""Parameters of a dense policy above which a production framework leads."""
LARGE_MOE = 60e9
"""The same for a mixture of experts: our executor has no expert parallelism, so that each GPU gathers all
experts of a layer."""


def is_large(model: ModelSpec) -> bool:
    """Whether a policy is of a size that only production frameworks train."""
    return model.num_params > (LARGE_DENSE if model.moe is None else LARGE_MOE)


def trained(request: Request) -> Request:
    """The question with its training backend, and with who runs its plans, where those were left open.

    Raises:
        RlhfsimError: unknown model.
    """
    if request.backend_by == "all open":
        return _led(request)
    runs = request.runs
    if request.backend_by != "left open" or runs is None:
        return request
    usual, others = request.backend, [name for name in runs.trainers if name != request.backend]
    every = [put_to(request, request.framework, name) for name in (usual, *others)]
    asked = [one for one in every if refusal(one, suggest=False) is None]
    with clock.within(request.time_limit and request.time_limit / 2):
        large = runs.trains_large(models_of(request.workload).actor)
        best = (fastest(asked[:1]) or fastest(asked[1:])) if large else fastest(asked)
    if best is None or best.asked.backend == usual:
        return replace(every[0], backend_by="examples")
    return replace(best.asked, backend_by="seconds" if usual in best.beaten else "fit")


def _led(request: Request) -> Request:
    """The question for the framework that leads at the size of its policy, else for the one that it has."""
    alone = False
    if is_large(models_of(request.workload).actor):
        with clock.within(request.time_limit and request.time_limit / 2):
            if (led := leader(request)) is not None:
                return led
            alone = not clock.over()
    if request.framework is not None:
        return trained(replace(request, backend_by="left open"))
    return replace(request, backend_by="ours" if alone else "option")


def leader(request: Request) -> Request | None:
    """The question of a large model for the production framework with which a good plan is fastest.

    None where none runs it. It trains by `LARGE_TRAINER` where it can and a plan of that fits. A framework
    of which fewer runs were compared leads only by more than the model's error. Where time is up, those not
    asked do not lead.
    """
    best = fastest(_of_size(request)) or fastest(production(request))
    return best.asked if best else None


def _of_size(request: Request) -> Iterator[Request]:
    for runs in measured_frameworks():
        every = list(put_to_each_backend(request, runs))
        yield from [asked for asked in every if asked.backend == LARGE_TRAINER] or every


def with_trainer(plan: Plan, request: Request) -> Plan:
    """The plan with by what it trains though nobody asked for it."""
    return replace(plan, assumed=(*plan.assumed, *assumed_trainer(request)))


def assumed_trainer(request: Request) -> tuple[str, ...]:
    """By what a plan trains though nobody asked for it, in a sentence; empty where the question names it."""
    if request.backend_by in ("option", "all open", "left open") or request.runs is None:
        return ()
    if request.backend_by == "ours":
        return ("run by our own executor: no production framework whose runs were compared has a plan of it",)
    runs = request.runs
    usual = BACKENDS[runs.usual_trainer(models_of(request.workload).actor)].title
    taken = BACKENDS[request.backend].title
    most = f"most of {runs.title}'s own examples of such a model"
    if request.backend_by == "examples":
        return (f"trained by {taken}, as in {most} (--backend)",)
    why = {
        "seconds": f"over {model_error():.0%} faster here than {usual}, as in {most}".replace("%", " %"),
        "fit": f"no plan of {usual}, as in {most}, fits what is asked",
    }
    return (f"trained by {taken}: {why[request.backend_by]}",)


def beside(request: Request, like: Placement) -> Plan | None:
    """A good plan (not proven) of the other side, layouts free; on the pools of `like` where one fits there.

    That is the most often compared production framework that runs it where our executor's plan leads, and
    our executor where another framework's does.
    """
    if request.runs is None:
        return None
    own = framework(OWN)
    request = replace(request, fix={}, limits=request.hardware_limits)
    others = put_to_each_backend(request, own) if request.runs is not own else production(request)
    axis = [setting("", {"request": other}) for other in others]
    free, (only, sizes) = Question(request=request, scope=ALONE), pools_of(like)
    some = (points(asked, axis, good) for asked in (free.scoped(only=only, sizes=sizes), free))
    found = next(chain.from_iterable(some), None)
    return None if found is None else plan_for(found.question.request, found.answer)
