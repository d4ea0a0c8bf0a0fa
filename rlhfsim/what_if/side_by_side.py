"""What `rlhfsim launch` runs next to the best production framework of which runs were compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.runs import LARGE_TRAINER, LENDS, OWN, Runs, framework, frameworks
from rlhfsim.plan import Plan
from rlhfsim.search.planning import plan_of
from rlhfsim.search.request import Request
from rlhfsim.search.space import pools_of
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.step.measured import compared
from rlhfsim.what_if.engine import Question, fastest, good
from rlhfsim.what_if.verdict import put_to, refusal

LARGE_DENSE = 100e9
"""Parameters of a dense policy above which a production framework leads."""
LARGE_MOE = 60e9
"""The same for a mixture of experts: our executor has no expert parallelism, so that each GPU gathers all
experts of a layer."""


def is_large(model: ModelSpec) -> bool:
    """Whether a policy is of a size that only production frameworks train."""
    return model.num_params > (LARGE_DENSE if model.moe is None else LARGE_MOE)


def measured_frameworks() -> tuple[Runs, ...]:
    """Frameworks other than ours whose published runs were compared, the most often compared first."""
    runs = [x for x in frameworks() if x.name != OWN and compared(x.name)]
    return tuple(sorted(runs, key=lambda x: -len(compared(x.name))))


def leader(request: Request) -> Request | None:
    """The question of a large model for the production framework with which a good plan is fastest.

    None where none runs it. It trains by `LARGE_TRAINER` where it can. A framework of which fewer runs were
    compared leads only by more than the model's error. Where time is up, those not asked do not lead.
    """
    best = fastest(_of_size(request))
    return best.asked if best else None


def beside(request: Request, like: Placement) -> Plan | None:
    """A good plan (not proven) of the other side, layouts free; on the pools of `like` where one fits there.

    That is the most often compared production framework that runs it where our executor's plan leads, and
    our executor where another framework's does.
    """
    if request.runs is None:
        return None
    own = framework(OWN)
    request = replace(request, fix={}, limits=request.hardware_limits)
    others = list(_of(request, own) if request.runs is not own else _production(request))
    only, sizes = pools_of(like)
    free = [Question(request=asked, rivals=False) for asked in others]
    for question in (*(replace(q, only=only, sizes=sizes) for q in free), *free):
        if (found := good(question)) is not None:
            asked = question.request
            return plan_of(found, asked.workload, question.models, asked.cluster, asked.price)
    return None


def _of_size(request: Request) -> Iterator[Request]:
    for runs in measured_frameworks():
        every = list(_of(request, runs))
        yield from [asked for asked in every if asked.backend == LARGE_TRAINER] or every


def _production(request: Request) -> Iterator[Request]:
    for runs in measured_frameworks():
        yield from _of(request, runs)


def _of(request: Request, runs: Runs) -> Iterator[Request]:
    """The question put to a framework, once for each backend with which it does not refuse it.

    A trainer that may lend its GPUs need not.
    """
    if LENDS not in runs.features:
        request = replace(request, allow=request.allow - {"lend"})
    for backend in runs.trainers:
        try:
            asked = put_to(request, runs.name, backend)
        except RlhfsimError:  # it does not run these GPUs
            continue
        if refusal(asked, suggest=False) is None:
            yield asked
