"""By which training backend a framework's plans train where the question names none.

It is that of most of the framework's own examples of the model's kind and size (`Runs.usual_trainer`), unless
it refuses the question, nothing fits with it, or another one is faster by more than the model's error. Large
dense policies and mixtures of experts stay with what is run at their size, however fast another one may be.
"""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.search import clock
from rlhfsim.search.request import Request
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.step.measured import model_error
from rlhfsim.what_if.engine import fastest
from rlhfsim.what_if.verdict import put_to, refusal


def trained(request: Request) -> Request:
    """The question with its training backend, where that was left open.

    Raises:
        RlhfsimError: unknown model.
    """
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


def assumed_trainer(request: Request) -> tuple[str, ...]:
    """By what a plan trains though nobody asked for it, in a sentence; empty where the question names it."""
    if request.backend_by in ("option", "left open") or request.runs is None:
        return ()
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
