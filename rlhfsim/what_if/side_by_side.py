"""What `rlhfsim launch` runs next to the best production framework of which runs were compared."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from rlhfsim.plan import Plan
from rlhfsim.search.planning import plan_for
from rlhfsim.search.request import Request
from rlhfsim.search.scope import ALONE
from rlhfsim.search.space import pools_of
from rlhfsim.specs.frameworks.runs import OWN, framework
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.what_if.engine import Question, good
from rlhfsim.what_if.points import points, setting
from rlhfsim.what_if.verdict import production, put_to_each_backend


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
