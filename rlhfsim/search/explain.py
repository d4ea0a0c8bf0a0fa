"""Why a plan won: what fills its step, what its rivals lose, and how likely the order is right."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist

from rlhfsim.costs.cost import Cost
from rlhfsim.phases.iteration import Iteration
from rlhfsim.phases.uncertainty import Z90
from rlhfsim.plan import Plan
from rlhfsim.units import format

CLEAR = 0.01
"""A term below this share of the step is not worth a word."""


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


# --- how sure --------------------------------------------------------------------------------------


def probability_better(one: Iteration, other: Iteration) -> float:
    """P(step of `one` < step of `other`) under the uncertainty of the profile.

        D = T_2 - T_1,  sd(D)^2 = sum_k (d_k)^2,  d_k = (h_2k - h_1k) / z_90,   P = Phi(D / sd)

    h_ik is half the P10-P90 width that coefficient k gives step i: both steps rest on the same
    coefficients and move together, so what they share cancels.
    """
    mine, theirs = _widths(one.cost), _widths(other.cost)
    spread = math.hypot(*(theirs.get(k, 0.0) - mine.get(k, 0.0) for k in mine | theirs)) / Z90
    gap = other.seconds - one.seconds
    if spread <= 0:
        return 1.0 if gap > 0 else 0.5
    return NormalDist().cdf(gap / spread)


def _widths(cost: Cost) -> dict[str, float]:
    """Half the P10-P90 width by coefficient, seconds."""
    found: dict[str, float] = {}
    for p in cost.parts:
        found[p.rests_on] = found.get(p.rests_on, 0.0) + (p.high - p.low) / 2
    return found
