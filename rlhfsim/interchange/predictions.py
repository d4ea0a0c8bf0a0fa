"""What a plan predicts, in the words of its launch: the head of files and reasons behind settings."""

from __future__ import annotations

from rlhfsim.plan import Plan
from rlhfsim.units import format
from rlhfsim.verdict import verdict


def headline(plan: Plan) -> str:
    """What runs where, in short."""
    policy = next(m.name for m in plan.models if m.role == "actor")
    gpus = " + ".join(f"{h.gpus} {h.profile}" for h in plan.hardware)
    return f"{plan.workload.title} of {policy} on {gpus}"


def title_of(plan: Plan, release: str) -> str:
    """The first lines of every file: what runs where under which release, the verdict, the fullest GPU."""
    return f"{headline(plan)}, {release}\n{verdict(plan)}\n{predicted(plan)}\n{memory(plan)}"


def predicted(plan: Plan) -> str:
    """The step in words."""
    p = plan.prediction
    return (
        f"A step is predicted to take {format(p.step_s, 's')} (P10 to P90: {format(p.low_s, 's')} to "
        f"{format(p.high_s, 's')})"
    )


def memory(plan: Plan) -> str:
    """The fullest GPU in words."""
    p = plan.prediction
    return (
        f"The fullest GPU holds {format(p.peak_memory_bytes, 'byte')} of {format(p.capacity_bytes, 'byte')} "
        f"({p.peak_role}, {p.peak_phase}; risk of running out {p.probability_out_of_memory:.1%})"
    )


def call(plan: Plan, name: str) -> str:
    """What is predicted of a call: `actor.train: 12 s, compute`; empty where the plan has none."""
    found = [phase for phase in plan.prediction.phases if phase.name == name]
    if not found:
        return ""
    return f"{name} {format(sum(p.seconds for p in found), 's')}, bound by {found[0].bound_by}"


def held(plan: Plan, phase: str, pool: str) -> str:
    """What the ledger says a GPU of a pool holds during a phase; empty where the plan has no such phase."""
    total = sum(entry.bytes for entry in plan.prediction.ledger if (entry.phase, entry.pool) == (phase, pool))
    if not total:
        return ""
    return f"{phase} holds {format(total, 'byte')} of {format(plan.prediction.capacity_bytes, 'byte')} a GPU"
