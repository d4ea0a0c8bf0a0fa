"""What `rlhfsim memory` answers: peak, memory through the step, and each pool's fullest moment."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import Any

from rlhfsim.memory.checkpoints import beside, copied_bytes
from rlhfsim.plan import LedgerEntry, Plan
from rlhfsim.present import plan_words
from rlhfsim.present.answers import plan_blocks as blocks
from rlhfsim.present.answers.tree import Block, Column, FactList, Note, Page, TypedTable, answer, table_of
from rlhfsim.present.basis import capacity_of, profile_under
from rlhfsim.present.tables import GIGABYTES, NAME, RIGHT, added, each, fields
from rlhfsim.present.words import component_text, percent, size
from rlhfsim.specs.frameworks.runs import OWN
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.engine_numbers import CHECKPOINT_COPIES
from rlhfsim.what_if.estimate import Planned


def page(planned: Planned) -> Page:
    """Verdict, header, peak, memory through the step, and the ledger of each pool's fullest moment."""
    shown = _plan(planned.plan) if planned.plan else ()
    return answer("rlhfsim.memory/1", *blocks.verdict(planned), *shown, data=_data(planned))


def _plan(plan: Plan) -> Iterator[Block]:
    yield from blocks.header(plan)
    host = f"{plan_words.host_text(plan)} host memory on the fullest node"
    taken = {"assumed": "; ".join(plan.assumed)} if plan.assumed else {}
    yield FactList({"peak": plan_words.peak_text(plan), "host": host, **_checkpoint_text(plan), **taken})
    yield from blocks.memory(plan)
    for pool in plan.placement.pools:
        if rows := max(_phases(plan, pool.name), key=lambda rows: sum(e.bytes for e in rows), default=[]):
            where = f" of pool {pool.name}" if len(plan.placement.pools) > 1 else ""
            title = f"the fullest moment{where}, {rows[0].phase}, in GB per GPU (P10-P90: of the sum)"
            yield Note(title, "strong", apart=True)
            yield _ledger(title, rows)


def _checkpoint_text(plan: Plan) -> dict[str, str]:
    """What copies of a checkpoint take, and whether they are made."""
    copies, limit = copied_beside(plan), plan_words.host_capacity(plan)
    if not copies or not limit:
        return {}
    if beside(copies, plan.prediction.host_peak_bytes, limit):
        return {"saving": f"{size(copies)} more of the node while a checkpoint is written in the background"}
    return {
        "saving": f"in the foreground: copies of {size(copies)} would take more than "
        f"{percent(CHECKPOINT_COPIES)} of the node's free host memory"
    }


def copied_beside(plan: Plan) -> float:
    """Bytes on the fullest node while our executor saves; 0 for others and where nothing is copied."""
    pool = plan.placement.pool(plan.placement.actor.pool)
    profile = profile_under(plan, pool.name)
    if plan.framework != OWN or plan.placement.backend == "fsdp2" or profile is None:
        return 0.0
    each = plan.hardware[pool.hardware].gpus_per_node
    return copied_bytes(models_of(plan.workload), plan.placement, plan.workload, profile, each)


def _phases(plan: Plan, pool: str) -> list[list[LedgerEntry]]:
    """Entries of a pool, phase by phase."""
    rows = [e for e in plan.prediction.ledger if e.pool == pool]
    return [list(entries) for _, entries in groupby(rows, key=lambda e: e.phase)]


def _ledger(title: str, rows: list[LedgerEntry]) -> TypedTable:
    """Components down, roles across, largest first; the sum below."""
    roles = list(dict.fromkeys(e.role for e in rows))
    totals = added((e.component, e.bytes) for e in rows)
    lines = [
        (component_text(c), [e for e in rows if e.component == c])
        for c in sorted(totals, key=lambda c: -totals[c])
    ]
    return table_of(
        title,
        [*lines, ("sum", rows)],
        Column("component", 0, NAME),
        *(Column(role, partial(_bytes, role), GIGABYTES) for role in roles),
        Column("sum", partial(_bytes, None), GIGABYTES),
        Column("P10-P90", lambda line: "" if line[1] is rows else _interval(line[1]), RIGHT),
        style=lambda line: "bold" if line[1] is rows else "",
        apart=False,
        summed=True,
    )


def _bytes(role: str | None, line: tuple[str, list[LedgerEntry]]) -> float:
    """Bytes of a role, or of all."""
    return sum(e.bytes for e in line[1] if role in (None, e.role))


def _interval(rows: list[LedgerEntry]) -> str:
    low, high = sum(e.low_bytes for e in rows), sum(e.high_bytes for e in rows)
    return f"{GIGABYTES.text(low)}-{GIGABYTES.text(high)}" if low != high else "exact"


def _data(planned: Planned) -> dict[str, Any]:
    """What JSON says, in bytes; schema in docs/plan.md."""
    judged = blocks.verdict_data(planned)
    if (plan := planned.plan) is None:
        return {**judged, "peak": None, "host": None, "pools": []}
    p = plan.prediction
    return {
        **judged,
        **fields(plan, "architecture", "role_placement", "assumed"),
        "peak": {
            **fields(p, phase="peak_phase", role="peak_role", component="peak_component"),
            **fields(p, bytes="peak_memory_bytes", capacity_bytes="capacity_bytes"),
            **fields(p, "probability_out_of_memory"),
        },
        "host": {
            "bytes": p.host_peak_bytes,
            "capacity_bytes": plan_words.host_capacity(plan),
            "checkpoint_bytes": copied_beside(plan),
        },
        "pools": [_pool(plan, pool.name, pool.gpus) for pool in plan.placement.pools],
    }


def _pool(plan: Plan, name: str, gpus: int) -> dict[str, Any]:
    return {
        "name": name,
        "gpus": gpus,
        "capacity_bytes": capacity_of(plan, name),
        "phases": [
            {
                "phase": entries[0].phase,
                "bytes": sum(e.bytes for e in entries),
                "entries": each(entries, "role", "component", "bytes", "low_bytes", "high_bytes"),
            }
            for entries in _phases(plan, name)
        ],
    }
