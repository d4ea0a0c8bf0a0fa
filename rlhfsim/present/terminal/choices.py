"""Alternatives beside the answer: why not another choice, and the front of time, memory and risk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rlhfsim.plan import Plan
from rlhfsim.present.terminal.words import component_text, new_table, percent
from rlhfsim.search.explain import CLEAR, Term, kind
from rlhfsim.search.pareto import Point
from rlhfsim.units import format, significant
from rlhfsim.what_if.why_not import MissingBytes, WhyNot

ROWS = 5
"""Terms that a table shows."""
EXCLUDED = {
    "refused": "exactly this plan is not in the space",
    "does_not_fit": "exactly this plan does not fit",
    "dominated": "exactly this plan is dominated",
    "bounded": "exactly this plan is excluded by its bound",
    "slower": "exactly this plan is slower",
    "chosen": "exactly this plan is the answer",
}


# --- why not ----------------------------------------------------------------------------------------


def whynot_text(other: WhyNot, chosen: Plan) -> Iterator[RenderableType]:
    """How much worse the best plan with another choice is, and why; or what does not fit."""
    if other.plan is None:
        yield Text(f"nothing fits: {_missing(other.missing) if other.missing else other.reason}")
        yield from _exclusion(other)
        return
    plan, p = other.plan, other.plan.prediction
    rollout = plan.placement.rollout
    engine = f"; rollout {rollout.layout.label}; weights by {plan.placement.weight_path}" if rollout else ""
    subject = "this plan" if other.given else "its best plan"
    yield Text(f"{subject}: {kind(plan)}; actor {plan.placement.actor.layout.label}{engine}")
    if other.same:
        yield Text("that is the chosen plan")
        return
    proof = "" if other.given else f"; {_proof(other)}"
    yield Text(f"{_verdict(p.step_s, chosen.prediction.step_s)}{proof}")
    yield _terms(other.terms, chosen.prediction.step_s)
    mine = chosen.prediction
    yield Text(
        f"memory: {_peak(plan)}, {percent(p.probability_out_of_memory)} risk; the chosen plan {_peak(chosen)}, {percent(mine.probability_out_of_memory)}"
    )
    yield from _exclusion(other)


def _exclusion(other: WhyNot) -> Iterator[RenderableType]:
    """What excluded exactly the plan that was named."""
    if other.exclusion is not None:
        yield Text(f"{EXCLUDED[other.exclusion.kind]}: {other.exclusion.text}")


def _verdict(seconds: float, chosen: float) -> str:
    gap = seconds - chosen
    if abs(gap) <= CLEAR * chosen:
        return f"it takes as long within {CLEAR:.0%}: {format(seconds, 's')} against {format(chosen, 's')}"
    word = "longer" if gap > 0 else "less"
    share = f"{abs(gap) / chosen:.0%}".replace("%", " %")
    return f"it takes {format(abs(gap), 's')} ({share}) {word}: {format(seconds, 's')} against {format(chosen, 's')}"


def _proof(other: WhyNot) -> str:
    if not other.certificate.proven:
        return "best that was found in time"
    stale = other.plan is not None and other.plan.architecture == "async"
    return "best of this choice, up to dominance by bounds" if stale else "proven best of this choice"


def _peak(plan: Plan) -> str:
    p = plan.prediction
    return f"{format(p.peak_memory_bytes, 'byte')} in {p.peak_phase}"


def _missing(missing: MissingBytes) -> str:
    """`actor.train needs 132 GB of 85 GB per GPU in pool all; 70 GB of it are weights of actor`."""
    return (
        f"the plan that comes nearest lacks {format(missing.bytes - missing.capacity, 'byte')} per GPU in pool {missing.pool}, "
        f"in {missing.phase}: {format(missing.bytes, 'byte')} of {format(missing.capacity, 'byte')}, "
        f"{format(missing.component_bytes, 'byte')} of them {component_text(missing.component)} of {missing.role}"
    )


def _terms(terms: Sequence[Term], step: float) -> Table:
    """The calls that make the difference; what is left stands in the last row."""
    table = new_table(None)
    table.add_column("seconds of the step in")
    for name in ("chosen plan", "this one", "difference"):
        table.add_column(name, justify="right")
    large = [t for t in terms if abs(t.more) > CLEAR * step / 2][:ROWS]
    rest = [t for t in terms if t not in large]
    for t in large:
        table.add_row(t.name, f"{t.chosen_s:,.1f}", f"{t.other_s:,.1f}", f"{t.more:+,.1f}")
    sums = [sum(x) for x in zip(*((t.chosen_s, t.other_s, t.more) for t in rest), strict=True)]
    if sums:
        table.add_row("all else", f"{sums[0]:,.1f}", f"{sums[1]:,.1f}", f"{sums[2]:+,.1f}")
    return table


def whynot_dict(other: WhyNot, chosen: Plan) -> dict[str, Any]:
    """The same for machines."""
    c = other.certificate
    plan, missing = other.plan, other.missing
    gap = None if plan is None else plan.prediction.step_s - chosen.prediction.step_s
    return {
        "choice": other.choice,
        "is_chosen": other.same,
        "slower_s": gap,
        "plan": None if plan is None else plan_dict(plan),
        "terms": [{"name": t.name, "chosen_s": t.chosen_s, "other_s": t.other_s} for t in other.terms],
        "certificate": {
            "space": c.space,
            "infeasible": c.infeasible,
            "dominated": c.dominated,
            "bounded": c.bounded,
            "simulated": c.simulated,
            "unexplored": c.unexplored,
            "gap": c.gap,
        },
        "reason": other.reason,
        "excluded": None
        if other.exclusion is None
        else {"kind": other.exclusion.kind, "text": other.exclusion.text},
        "missing": None
        if missing is None
        else {
            "phase": missing.phase,
            "pool": missing.pool,
            "role": missing.role,
            "component": missing.component,
            "bytes": missing.bytes,
            "component_bytes": missing.component_bytes,
            "capacity_bytes": missing.capacity,
        },
    }


# --- the front --------------------------------------------------------------------------------------


def front_table(points: Sequence[Point]) -> Table:
    """No plan of these is worse than another one in everything."""
    table = new_table(None)
    for name in ("plan", "actor", "rollout"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "memory", "staleness", "risk"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        plan = point.plan
        rollout = plan.placement.rollout
        table.add_row(
            kind(plan).replace(", roles", ","),
            plan.placement.actor.layout.label,
            rollout.layout.label if rollout else "-",
            format(point.seconds, "s"),
            format(point.bytes, "byte"),
            significant(point.staleness),
            percent(point.risk),
        )
    return table


def front_dict(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The same for machines."""
    return [
        {
            "step_s": p.seconds,
            "memory_bytes": p.bytes,
            "staleness": p.staleness,
            "probability_out_of_memory": p.risk,
            "plan": plan_dict(p.plan),
        }
        for p in points
    ]


# --- plans -----------------------------------------------------------------------------------------


def plan_dict(plan: Plan) -> dict[str, Any]:
    """What a list of plans shows of one."""
    p = plan.prediction
    whole = plan.to_dict()
    return {
        "architecture": plan.architecture,
        "role_placement": plan.role_placement,
        "kind": kind(plan),
        "step_s": p.step_s,
        "low_s": p.low_s,
        "high_s": p.high_s,
        "tokens_per_s_per_gpu": p.tokens_per_s_per_gpu,
        "peak_memory_bytes": p.peak_memory_bytes,
        "capacity_bytes": p.capacity_bytes,
        "peak": {"phase": p.peak_phase, "role": p.peak_role, "component": p.peak_component},
        "probability_out_of_memory": p.probability_out_of_memory,
        "host_peak_bytes": p.host_peak_bytes,
        "usd_per_step": p.usd_per_step,
        "kwh_per_step": p.kwh_per_step,
        "kg_co2e_per_step": p.kg_co2e_per_step,
        "phases": whole["prediction"]["phases"],
        "placement": whole["placement"],
        "workload": whole["workload"],
    }
