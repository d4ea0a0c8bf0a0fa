"""Why a plan won: what fills its step, and what its rivals lose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.search.complexity import asks_more
from rlhfsim.search.request import switches_of, switches_on
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.units import format

CLEAR = 0.01
"""A term below this share of the step is not worth a word."""
MOST_TERMS = 3
"""Terms that a sentence names."""
WORDS = {
    "hbm": "GPU memory bandwidth",
    "nvlink": "the fabric inside a node",
    "pcie": "PCIe",
    "wan": "the link to the other region",
    "overhead": "launches and framework",
    "bubble": "pipeline bubbles",
    "tail": "waiting for the longest responses",
    "compute": "arithmetic",
}
"""Resource -> what the time goes into."""


def kind(plan: Plan, asked: Workload | None = None) -> str:
    """Architecture and role placement in words, and the switches that `asked`, a workload, does not have."""
    roles = "" if plan.role_placement == "colocated" else f", roles {plan.role_placement}"
    switches = "" if asked is None else ", ".join(switches_of(asked, plan.workload))
    return f"{plan.architecture}{roles}{switches and f' with {switches}'}"


def own_kind(plan: Plan) -> str:
    """The kind of a chosen plan, with those of the allowed switches that it uses."""
    switches = ", ".join(switches_on(plan.workload, plan.choice.asked.allow)) if plan.choice else ""
    return f"{kind(plan)}{switches and f' with {switches}'}"


def best_name(objective: str) -> str:
    """The best plan of an objective in words."""
    return f"the {'leanest' if objective == 'memory' else 'fastest'} plan"


def reasons(
    chosen: Plan, best: Plan, rivals: Sequence[Plan], asked: Workload, objective: str = "time"
) -> Iterator[str]:
    """What fills the step of the chosen plan, what the best one has more, then the best against each rival of
    another kind; `asked`: the workload without switches."""
    step = chosen.prediction
    by: dict[str, float] = {}
    for phase in step.phases:
        if phase.critical:
            for resource, seconds in phase.by_resource_s.items():
                by[resource] = by.get(resource, 0.0) + seconds
    top = sorted(by, key=lambda r: -by[r])[:3]
    whole = sum(by.values()) or 1.0
    shown = (f"{by[r] / whole:.0%}".replace("%", " %") + f" {WORDS.get(r, r)}" for r in top)
    yield "its time goes into " + ", ".join(shown)
    if chosen is not best:
        yield _saved(chosen, best, objective)
    seen = {kind(best, asked)}
    for rival in rivals:
        if (name := kind(rival, asked)) not in seen:
            seen.add(name)
            yield _against(best, rival, name, "" if chosen is best else best_name(objective))


def _saved(chosen: Plan, best: Plan, objective: str) -> str:
    """What the best plan saves against the simplest, and what it asks and risks for that."""
    mine, its = chosen.prediction, best.prediction
    asks = ", ".join(asks_more(best.placement, chosen.placement)) or "other layouts"
    ours, risk = (100 * p.probability_out_of_memory for p in (mine, its))
    less = 100 * (1 - its.step_s / mine.step_s)
    buys = f"takes {format(its.step_s, 's')}, {less:.1f} % less"
    if objective == "memory":
        fewer = 100 * (1 - its.peak_memory_bytes / mine.peak_memory_bytes)
        held, step = format(its.peak_memory_bytes, "byte"), format(its.step_s, "s")
        buys = f"holds {held} on its fullest GPU, {fewer:.1f} % less, in {step}"
    return (
        f"{best_name(objective)} {buys}, with {asks}; "
        f"risk of running out of memory {risk:.1f} % in place of {ours:.1f} %"
    )


def _against(chosen: Plan, rival: Plan, title: str, name: str) -> str:
    """What a rival, called `title`, takes more; `name` of the plan that it is compared with, if needed."""
    gap = rival.prediction.step_s - chosen.prediction.step_s
    large = [t for t in terms(chosen, rival) if abs(t.more) > CLEAR * chosen.prediction.step_s]
    listed = ", ".join(f"{t.name} {t.more:+.1f} s" for t in large[:MOST_TERMS])
    if gap < CLEAR * chosen.prediction.step_s:
        return f"{title} takes as long{name and f' as {name}'} within {CLEAR:.0%}".replace("%", " %") + (
            f": {listed}" if listed else ""
        )
    share = f"{gap / chosen.prediction.step_s:.0%}".replace("%", " %")
    than = name and f" than {name}"
    return f"{title} takes {format(gap, 's')} ({share}) more{than}: {listed or 'many small terms'}"


@frozen
class Term:
    """What one call adds to the step of two plans; over all terms both add up to the steps."""

    name: str
    """Call, `moves` in and out of GPU memory, or `waiting`."""
    chosen_s: float
    other_s: float

    @property
    def more(self) -> float:
        """Seconds by which the other plan is slower here."""
        return self.other_s - self.chosen_s


def terms(chosen: Plan, other: Plan) -> list[Term]:
    """The difference of two steps by call, the largest first."""
    mine, theirs = shares(chosen), shares(other)
    differences = [
        Term(name=n, chosen_s=mine.get(n, 0.0), other_s=theirs.get(n, 0.0))
        for n in dict.fromkeys([*mine, *theirs])
    ]
    return sorted(differences, key=lambda t: -abs(t.more))


def shares(plan: Plan) -> dict[str, float]:
    """The step by call: each instant belongs to the critical phases that run then, in equal parts.

    Moves around a call count as `moves`, instants without any as `waiting`; the sum is the step.
    """
    step = plan.prediction.step_s
    running = [
        (p.start_s, min(step, p.start_s + p.seconds), _call(p.name))
        for p in plan.prediction.phases
        if p.critical and p.start_s < step
    ]
    cuts = sorted({0.0, step, *(t for start, end, _ in running for t in (start, end))})
    total: dict[str, float] = {}
    for start, end in pairwise(cuts):
        names = [n for a, b, n in running if a <= start and end <= b] or ["waiting"]
        for name in names:
            total[name] = total.get(name, 0.0) + (end - start) / len(names)
    return total


def _call(phase: str) -> str:
    return "moves" if phase.endswith((".load", ".unload")) else phase
