"""Alternatives to the answer: why not another choice, the front, and the plan of the other side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rlhfsim.memory.ledger import Ledger
from rlhfsim.plan import Plan
from rlhfsim.present.answers.tree import Block, Column, Note, TypedTable, table_of
from rlhfsim.present.tables import (
    BYTES,
    DECIMALS,
    NAME,
    NUMBER,
    PROBABILITY,
    SECONDS,
    SHARE,
    STEP,
    STEP_ENDS,
    TENTHS,
    WORDS,
    each,
    fields,
)
from rlhfsim.present.verdict import assumed, learning
from rlhfsim.present.words import component_text, layout_labels, percent, size
from rlhfsim.search.explain import CLEAR, Term, kind
from rlhfsim.search.pareto import FrontPoint
from rlhfsim.specs.frameworks.runs import OWN
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.measured import compared
from rlhfsim.what_if.why_not import WhyNot

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


def whynot(
    other: WhyNot, chosen: Plan, name: str = "the chosen plan", asked: Workload | None = None
) -> Iterator[Block]:
    """How much worse the best plan with another choice is than the answer, and why; or what does not fit."""
    if other.plan is None:
        yield Note(f"nothing fits: {missing_text(other.missing) if other.missing else other.reason}")
        yield from _exclusion(other)
        return
    plan, p = other.plan, other.plan.prediction
    rollout = plan.placement.rollout
    engine = f"; rollout {rollout.layout.label}; weights by {plan.placement.weight_path}" if rollout else ""
    subject = "this plan" if other.given else "its best plan"
    yield Note(f"{subject}: {kind(plan, asked)}; actor {plan.placement.actor.layout.label}{engine}")
    if other.same:
        yield Note(f"that is {name}")
        return
    proof = "" if other.given else f"; {_proof(other)}"
    yield Note(f"{_verdict(p.step_s, chosen.prediction.step_s)}{proof}")
    yield _terms(other.terms, chosen.prediction.step_s, name)
    yield Note(f"memory: {_peak(plan, ' risk')}; {name} {_peak(chosen)}")
    yield from _exclusion(other)


def _exclusion(other: WhyNot) -> Iterator[Block]:
    """What excluded exactly the plan that was named."""
    if other.exclusion is not None:
        yield Note(f"{EXCLUDED[other.exclusion.kind]}: {other.exclusion.text}")


def _verdict(seconds: float, chosen: float) -> str:
    gap, against = seconds - chosen, " against ".join(map(SECONDS.shown, (seconds, chosen)))
    if abs(gap) <= CLEAR * chosen:
        return f"it takes as long within {percent(CLEAR)}: {against}"
    word = "longer" if gap > 0 else "less"
    return f"it takes {SECONDS.shown(abs(gap))} ({percent(abs(gap) / chosen)}) {word}: {against}"


def _proof(other: WhyNot) -> str:
    if not other.certificate.proven:
        return "best that was found in time"
    stale = other.plan is not None and other.plan.placement.schedule.asynchronous
    return "best of this choice, up to dominance by bounds" if stale else "proven best of this choice"


def _peak(plan: Plan, what: str = "") -> str:
    p = plan.prediction
    return f"{size(p.peak_memory_bytes)} in {p.peak_phase}, {percent(p.probability_out_of_memory)}{what}"


def missing_text(memory: Ledger) -> str:
    """`lacks 47 GB per GPU in actor.train: 132 GB of 85 GB, 70 GB of them weights of actor`."""
    m, entry = memory.peak, memory.peak_entry
    return (
        f"the plan that comes nearest lacks {size(m.bytes - m.capacity)} per GPU in pool {m.pool}, in "
        f"{m.name}: {size(m.bytes)} of {size(m.capacity)}, {size(entry.bytes)} of them "
        f"{component_text(entry.component)} of {entry.role}"
    )


def _terms(terms: Sequence[Term], step: float, name: str) -> TypedTable:
    """The calls that make the difference; what is left is in the last row."""
    large = [t for t in terms if abs(t.more) > CLEAR * step / 2][:ROWS]
    rest = [t for t in terms if t not in large]
    rows = [(t.name, t.chosen_s, t.other_s, t.more) for t in large]
    if rest:
        sums = (sum(t.chosen_s for t in rest), sum(t.other_s for t in rest), sum(t.more for t in rest))
        rows.append(("all else", *sums))
    return table_of(
        "Where the difference is",
        rows,
        Column("seconds of the step in", 0),
        Column(name.removeprefix("the "), 1, DECIMALS[1], fit=WORDS),
        Column("this one", 2, DECIMALS[1], fit=WORDS),
        Column("difference", 3, TENTHS, fit=WORDS),
        apart=False,
    )


def whynot_dict(other: WhyNot, best: Plan, chosen: Plan) -> dict[str, Any]:
    """The same for machines, against the best plan."""
    plan = other.plan
    return {
        "choice": other.choice,
        "is_chosen": plan is not None and plan.input_hash == chosen.input_hash,
        "slower_s": None if plan is None else plan.prediction.step_s - best.prediction.step_s,
        "plan": plan_dict(plan) if plan else None,
        "terms": each(other.terms, "name", "chosen_s", "other_s"),
        "certificate": asdict(other.certificate),
        "reason": other.reason,
        "excluded": None if other.exclusion is None else fields(other.exclusion, "kind", "text"),
        "missing": missing_dict(other.missing) if other.missing else None,
    }


def missing_dict(memory: Ledger) -> dict[str, Any]:
    """The byte that does not fit, for machines."""
    peak, entry = memory.peak, memory.peak_entry
    where = {"phase": peak.name, "pool": peak.pool, **fields(entry, "role", "component"), "bytes": peak.bytes}
    return {**where, "component_bytes": entry.bytes, "capacity_bytes": peak.capacity}


# --- the front --------------------------------------------------------------------------------------


def front_table(points: Sequence[FrontPoint]) -> TypedTable:
    """No plan of these is worse than another one in everything."""
    return table_of(
        "Plans between which you may choose",
        points,
        Column("plan", lambda p: short_kind(p.plan), NAME),
        Column("actor", lambda p: layout_labels(p.plan)[0], NAME),
        Column("rollout", lambda p: layout_labels(p.plan)[1], NAME),
        Column("step", "seconds", SECONDS, "step_s"),
        Column("memory", "bytes", BYTES, "memory_bytes"),
        Column("staleness", kind=NUMBER),
        Column("risk", kind=SHARE, key="probability_out_of_memory"),
        Column(None, lambda p: plan_dict(p.plan), key="plan"),
        name="pareto",
    )


def short_kind(plan: Plan, asked: Workload | None = None) -> str:
    """Architecture, role placement and the switches that `asked` does not have, for a column."""
    return kind(plan, asked).replace(", roles", ",").replace(" with ", ", ")


# --- plans -----------------------------------------------------------------------------------------


def plan_dict(plan: Plan, asked: Workload | None = None) -> dict[str, Any]:
    """What a list of plans shows of one; `asked`: the workload without switches."""
    p, whole = plan.prediction, plan.to_dict()
    return {
        **fields(plan, "architecture", "role_placement"),
        "kind": kind(plan, asked),
        **fields(
            p, "step_s", "low_s", "high_s", "tokens_per_s_per_gpu", "peak_memory_bytes", "capacity_bytes"
        ),
        "learning": learning(plan),
        "assumed": list(assumed(plan)),
        "peak": fields(p, phase="peak_phase", role="peak_role", component="peak_component"),
        **fields(p, "probability_out_of_memory", "host_peak_bytes"),
        **fields(p, "usd_per_step", "kwh_per_step", "kg_co2e_per_step"),
        "phases": whole["prediction"]["phases"],
        "placement": whole["placement"],
        "workload": whole["workload"],
        "nearest": whole.get("nearest"),
    }


# --- next to a production framework whose runs were compared --------------------------------------------


def side_table(chosen: Plan, other: Plan, chances: tuple[float, float]) -> TypedTable:
    """The chosen plan first, then that of the other side; `chances`: that each fits and meets all targets."""
    return table_of(
        "Next to a framework whose runs were compared",
        zip("* ", (chosen, other), chances, strict=True),
        Column("", lambda row: row[0].strip(), NAME),
        Column("run by", "1.framework", NAME),
        Column("training", lambda row: BACKENDS[row[1].placement.backend].title, NAME),
        Column("step", 1, STEP),
        Column("P10-P90", 1, STEP_ENDS),
        Column("USD", "1.prediction.usd_per_step", NUMBER.where("unknown")),
        Column("likely", 2, PROBABILITY),
        Column("its figures", lambda row: evidence(row[1].framework or ""), NAME),
        style=lambda row: "bold green" if row[1] is chosen else "",
        look="bare",
    )


def evidence(framework: str) -> str:
    """`56 runs compared, off by 10 %`: published runs of a framework, and our median error on them."""
    errors = compared(framework)
    if errors:
        return f"{len(errors)} runs compared, off by {percent(median(map(abs, errors)))}"
    return "run on CPUs, never compared" if framework == OWN else "never compared with a run"


def side_records(chosen: Plan, other: Plan, chances: tuple[float, float]) -> Iterator[dict[str, Any]]:
    """The same for machines."""
    for plan, chance in zip((chosen, other), chances, strict=True):
        errors = compared(plan.framework or "")
        yield {
            **fields(plan, "framework"),
            "leads": plan is chosen,
            "fits_and_meets": chance,
            "runs_compared": len(errors),
            "median_error": median(map(abs, errors)) if errors else None,
            **plan_dict(plan),
        }
