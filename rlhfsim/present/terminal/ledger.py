"""What `rlhfsim memory` shows: peak, memory through the step, and each pool's fullest moment."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rlhfsim.frameworks.runs import OWN
from rlhfsim.memory.checkpoints import beside, copied_bytes
from rlhfsim.plan import LedgerEntry, Plan
from rlhfsim.present.basis import capacity_of, profile_under
from rlhfsim.present.tables import added, each, grid
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal.console import Part, console, filled, labelled, new_table, styled
from rlhfsim.present.terminal.estimate import verdict, verdict_data
from rlhfsim.present.terminal.first_screen import host_capacity
from rlhfsim.present.terminal.memory import memory_chart
from rlhfsim.present.words import component_text, size
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.engine_numbers import CHECKPOINT_COPIES
from rlhfsim.units import GB
from rlhfsim.what_if.planned import Planned

SCHEMA = "rlhfsim.memory/1"


def report(answer: Planned) -> Iterator[Part]:
    """Verdict, header, peak, timeline, and the ledger of each pool's fullest moment."""
    yield from verdict(answer)
    if (plan := answer.plan) is None:
        return
    yield view.header(plan)
    taken = {"assumed": "; ".join(plan.assumed)} if plan.assumed else {}
    told = {"peak": view.peak_text(plan), "host": _host_text(plan), **_checkpoint_text(plan)}
    yield labelled({**told, **taken})
    yield ""
    yield memory_chart(plan, console().width)
    for pool in plan.placement.pools:
        if rows := _peak_rows(plan, pool.name):
            where = f" of pool {pool.name}" if len(plan.placement.pools) > 1 else ""
            title = f"the fullest moment{where}, {rows[0].phase}, in GB per GPU (P10-P90: of the sum)"
            yield ""
            yield styled(title, style="bold")
            yield _ledger_table(rows)


def _host_text(plan: Plan) -> str:
    """`151 GB of 2.2 TB on the fullest node`."""
    limit = host_capacity(plan)
    offered = f" of {size(limit)}" if limit else ""
    return f"{size(plan.prediction.host_peak_bytes)}{offered} host memory on the fullest node"


def _checkpoint_text(plan: Plan) -> dict[str, str]:
    """What copies of a checkpoint take, and whether they are made."""
    copies, limit = copied_beside(plan), host_capacity(plan)
    if not copies or not limit:
        return {}
    if beside(copies, plan.prediction.host_peak_bytes, limit):
        return {"saving": f"{size(copies)} more of the node while a checkpoint is written beside the steps"}
    return {
        "saving": f"in the foreground: copies of {size(copies)} would take more than "
        f"{CHECKPOINT_COPIES:.0%} of the node's free host memory"
    }


def copied_beside(plan: Plan) -> float:
    """Bytes on the fullest node while our executor saves; 0 for others and where nothing is copied."""
    pool = plan.placement.pool(plan.placement.actor.pool)
    profile = profile_under(plan, pool.name)
    if plan.framework != OWN or plan.placement.backend == "fsdp2" or profile is None:
        return 0.0
    each = plan.hardware[pool.hardware].gpus_per_node
    return copied_bytes(models_of(plan.workload), plan.placement, plan.workload, profile, each)


def _peak_rows(plan: Plan, pool: str) -> list[LedgerEntry]:
    """Entries of the phase in which the pool holds most."""
    rows = [e for e in plan.prediction.ledger if e.pool == pool]
    phases = [list(entries) for _, entries in groupby(rows, key=lambda e: e.phase)]
    return max(phases, key=lambda entries: sum(e.bytes for e in entries), default=[])


def _ledger_table(rows: list[LedgerEntry]) -> Part:
    """Components down, roles across, largest first."""
    roles = list(dict.fromkeys(e.role for e in rows))
    totals = added((e.component, e.bytes) for e in rows)
    cells = []
    for component in sorted(totals, key=lambda c: -totals[c]):
        these = [e for e in rows if e.component == component]
        by_role = [_cell(sum(e.bytes for e in these if e.role == role)) for role in roles]
        cells.append((component_text(component), *by_role, _cell(totals[component]), _interval(these)))
    table = filled(
        new_table(None), grid(["component", *(f">{t}" for t in (*roles, "sum", "P10-P90"))], cells)
    )
    table.add_section()
    sums = [_cell(sum(e.bytes for e in rows if e.role == role)) for role in roles]
    table.add_row("sum", *sums, _cell(sum(totals.values())), "", style="bold")
    return table


def _cell(num_bytes: float) -> str:
    return f"{num_bytes / GB:,.2f}" if num_bytes else "-"


def _interval(rows: list[LedgerEntry]) -> str:
    low, high = sum(e.low_bytes for e in rows), sum(e.high_bytes for e in rows)
    return f"{low / GB:,.2f}-{high / GB:,.2f}" if low != high else "exact"


def as_data(answer: Planned) -> dict[str, Any]:
    """The same content in bytes; schema in docs/plan.md."""
    judged = {"schema": SCHEMA, **verdict_data(answer)}
    if (plan := answer.plan) is None:
        return {**judged, "peak": None, "host": None, "pools": []}
    p = plan.prediction
    return {
        **judged,
        "architecture": plan.architecture,
        "role_placement": plan.role_placement,
        "assumed": list(plan.assumed),
        "peak": {
            "phase": p.peak_phase,
            "role": p.peak_role,
            "component": p.peak_component,
            "bytes": p.peak_memory_bytes,
            "capacity_bytes": p.capacity_bytes,
            "probability_out_of_memory": p.probability_out_of_memory,
        },
        "host": {
            "bytes": p.host_peak_bytes,
            "capacity_bytes": host_capacity(plan),
            "checkpoint_bytes": copied_beside(plan),
        },
        "pools": [_pool(plan, pool.name, pool.gpus) for pool in plan.placement.pools],
    }


def _pool(plan: Plan, name: str, gpus: int) -> dict[str, Any]:
    rows = [e for e in plan.prediction.ledger if e.pool == name]
    phases = [(phase, list(entries)) for phase, entries in groupby(rows, key=lambda e: e.phase)]
    return {
        "name": name,
        "gpus": gpus,
        "capacity_bytes": capacity_of(plan, name),
        "phases": [
            {
                "phase": phase,
                "bytes": sum(e.bytes for e in entries),
                "entries": each(entries, "role", "component", "bytes", "low_bytes", "high_bytes"),
            }
            for phase, entries in phases
        ],
    }
