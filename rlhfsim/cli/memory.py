"""`rlhfsim memory`: what fills GPU memory, phase by phase, and where the peak is."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhfsim.cli.estimate import verdict
from rlhfsim.cli.planned import plan_options, planned
from rlhfsim.plan import LedgerEntry, Plan
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal.words import component_text, new_table, profile_of, size
from rlhfsim.units import GB
from rlhfsim.what_if.planned import Planned

SCHEMA = "rlhfsim.memory/1"
EPILOG = """\b
Examples:
  rlhfsim memory plan.json
  rlhfsim memory verl
  rlhfsim memory --gpus 64 --model 70b --architecture hybrid
"""


@click.command(epilog=EPILOG)
@plan_options
@click.pass_context
def memory(ctx: click.Context, /, **given: Any) -> None:
    """Show what fills GPU memory: every role by component, through one step.

    FILE is a plan.json, a scenario (YAML) or a shipped system (verl, openrlhf, trl, ...). Without
    FILE, options describe cluster, workload and layouts; what they leave open is chosen for speed.

    Exit codes: 0 it fits, 1 it does not fit, 2 bad input.
    """
    answer = planned(ctx, given)
    if given["as_json"]:
        click.echo(json.dumps(as_data(answer), indent=1))
    else:
        show(answer, view.console())
    ctx.exit(0 if answer.fits else 1)


# --- for people -------------------------------------------------------------------------------------


def show(answer: Planned, console: Console) -> None:
    """Verdict, header, peak, timeline, and the ledger of each pool's fullest moment."""
    verdict(answer, console)
    plan = answer.plan
    if plan is None:
        return
    console.print(view.header(plan))
    console.print(view.labelled({"peak": view.peak_text(plan), "host": host_text(plan)}))
    console.print()
    console.print(view.memory_chart(plan, console.width))
    for pool in plan.placement.pools:
        rows = peak_rows(plan, pool.name)
        if rows:
            where = f" of pool {pool.name}" if len(plan.placement.pools) > 1 else ""
            console.print()
            console.print(
                Text(
                    f"the fullest moment{where}, {rows[0].phase}, in GB per GPU (P10-P90: of the sum)",
                    style="bold",
                )
            )
            console.print(ledger_table(rows))


def host_text(plan: Plan) -> str:
    """`151 GB of 2.2 TB on the fullest node`."""
    limit = host_capacity(plan)
    offered = f" of {size(limit)}" if limit else ""
    return f"{size(plan.prediction.host_peak_bytes)}{offered} host memory on the fullest node"


def host_capacity(plan: Plan) -> float | None:
    """Host memory of the smallest node under the plan; None where no profile is found."""
    profiles = [profile_of(plan, pool.name) for pool in plan.placement.pools]
    return min((p.node.host_memory.value for p in profiles if p), default=None)


def peak_rows(plan: Plan, pool: str) -> list[LedgerEntry]:
    """Entries of the phase in which the pool holds most."""
    rows = [e for e in plan.prediction.ledger if e.pool == pool]
    phases = [list(entries) for _, entries in groupby(rows, key=lambda e: e.phase)]
    return max(phases, key=lambda entries: sum(e.bytes for e in entries), default=[])


def ledger_table(rows: list[LedgerEntry]) -> Table:
    """Components down, roles across, largest first."""
    roles = list(dict.fromkeys(e.role for e in rows))
    totals: dict[str, float] = {}
    for e in rows:
        totals[e.component] = totals.get(e.component, 0.0) + e.bytes
    table = new_table(None)
    table.add_column("component", no_wrap=True)
    for role in (*roles, "sum"):
        table.add_column(role, justify="right", no_wrap=True)
    table.add_column("P10-P90", justify="right", no_wrap=True)
    for component in sorted(totals, key=lambda c: -totals[c]):
        these = [e for e in rows if e.component == component]
        cells = [_cell(sum(e.bytes for e in these if e.role == role)) for role in roles]
        table.add_row(component_text(component), *cells, _cell(totals[component]), _interval(these))
    by_role = [_cell(sum(e.bytes for e in rows if e.role == role)) for role in roles]
    table.add_section()
    table.add_row("sum", *by_role, _cell(sum(totals.values())), "", style="bold")
    return table


def _cell(num_bytes: float) -> str:
    return f"{num_bytes / GB:,.2f}" if num_bytes else "-"


def _interval(rows: list[LedgerEntry]) -> str:
    low, high = sum(e.low_bytes for e in rows), sum(e.high_bytes for e in rows)
    return f"{low / GB:,.2f}-{high / GB:,.2f}" if low != high else "exact"


# --- for machines -----------------------------------------------------------------------------------


def as_data(answer: Planned) -> dict[str, Any]:
    """The same content in bytes; schema in docs/plan.md."""
    plan = answer.plan
    verdict = {
        "schema": SCHEMA,
        "fits": answer.fits,
        "rejected_by": answer.rejected_by,
        "remedy": answer.remedy,
        "notes": list(answer.notes),
    }
    if plan is None:
        return {**verdict, "peak": None, "host": None, "pools": []}
    p = plan.prediction
    return {
        **verdict,
        "architecture": plan.architecture,
        "role_placement": plan.role_placement,
        "peak": {
            "phase": p.peak_phase,
            "role": p.peak_role,
            "component": p.peak_component,
            "bytes": p.peak_memory_bytes,
            "capacity_bytes": p.capacity_bytes,
            "probability_out_of_memory": p.probability_out_of_memory,
        },
        "host": {"bytes": p.host_peak_bytes, "capacity_bytes": host_capacity(plan)},
        "pools": [_pool(plan, pool.name, pool.gpus) for pool in plan.placement.pools],
    }


def _pool(plan: Plan, name: str, gpus: int) -> dict[str, Any]:
    rows = [e for e in plan.prediction.ledger if e.pool == name]
    phases = [(phase, list(entries)) for phase, entries in groupby(rows, key=lambda e: e.phase)]
    return {
        "name": name,
        "gpus": gpus,
        "capacity_bytes": view.capacity_of(plan, name),
        "phases": [
            {
                "phase": phase,
                "bytes": sum(e.bytes for e in entries),
                "entries": [
                    {
                        "role": e.role,
                        "component": e.component,
                        "bytes": e.bytes,
                        "low_bytes": e.low_bytes,
                        "high_bytes": e.high_bytes,
                    }
                    for e in entries
                ],
            }
            for phase, entries in phases
        ],
    }
