"""Who sits where and how each model is cut, as a table."""

from __future__ import annotations

from rlhfsim.plan import Plan
from rlhfsim.present.answers.tree import Column, Look, TypedTable, table_of
from rlhfsim.present.tables import COUNT, NAME, NEVER, REST, RIGHT, WORDS
from rlhfsim.present.verdict import layout_words
from rlhfsim.present.words import percent
from rlhfsim.specs.placement.backends import sums_fp32
from rlhfsim.specs.placement.placement import RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.roles import TRAINED

LONG_LAYOUT, LONG_PLACE = 27, 14
"""Characters above which a layout, or where a role sits, breaks between words, to leave room for what happens
between calls."""


def roles(plan: Plan, *, decoded: bool = True, look: Look = "bare") -> TypedTable:
    """Who sits where and how each model is cut, a row for the roles that are placed alike.

    `decoded`: with what the words of the layouts mean.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, role in plan.placement.roles.items():
        cells = _where(plan, role), _layout(role), *_role_cells(plan, name, role)
        alike.setdefault(cells, []).append(name)
    rows = [(", ".join(names), *cells) for cells, names in alike.items()]
    long_place, long_layout = (
        max(len(row[i]) for row in rows) > most for i, most in ((1, LONG_PLACE), (2, LONG_LAYOUT))
    )
    return table_of(
        "Roles",
        rows,
        Column("role", 0, NAME),
        Column("GPUs", 1, fit=WORDS if long_place else NEVER, narrow_fit=WORDS),
        Column("layout", 2, fit=WORDS if long_layout else NEVER, narrow_fit=WORDS),
        Column("micro-batch", 3, RIGHT, fit=WORDS, narrow="micro\nbatch"),
        Column("recompute", 4, narrow="re-\ncompute"),
        Column("between calls", 5, fit=WORDS if long_place or long_layout else REST, narrow_fit=WORDS),
        Column("precision", 6, NAME, narrow="dtype"),
        notes=(layout_words(plan),) if decoded else (),
        look=look,
        wide=True,
    )


def _where(plan: Plan, role: RolePlacement | RolloutPlacement) -> str:
    pool = plan.placement.pool(role.pool)
    where = f"{pool.start}" if pool.gpus == 1 else f"{pool.start}-{pool.start + pool.gpus - 1}"
    if len(plan.hardware) > 1:
        where += f" {plan.hardware[pool.hardware].profile}"
    return f"{where} {pool.name}" if len(plan.placement.pools) > 1 else where


def _role_cells(plan: Plan, name: str, role: RolePlacement | RolloutPlacement) -> tuple[str, str, str, str]:
    """Micro-batch, recompute, what happens between calls, precision."""
    if isinstance(role, RolloutPlacement):
        sleep = {0: "stays", 1: "sleeps, weights to host", 2: "sleeps, memory freed"}[role.sleep]
        rest = sleep if role.residency == "resident" else role.residency
        precision, kv = role.layout.precision, role.layout.kv_precision
        return "", "", rest, precision if kv == precision else f"{precision}, KV {kv}"
    trained = name in TRAINED
    recompute = role.layout.recompute if trained else ""
    pack = role.layout.pack_tokens
    trains, scores = (role.layout.sequences(scoring=scoring) for scoring in (not trained, True))
    size = (
        f"{COUNT.shown(pack)} tokens"
        if pack
        else f"{trains}, scores {scores}"
        if trains != scores
        else f"{trains}"
    )
    sums = trained and sums_fp32(plan.workload, plan.placement.backend)
    return size, recompute, _rest(role, trained), "bf16, FP32 sums" if sums else "bf16"


def _rest(role: RolePlacement, trained: bool) -> str:
    rest = {"offloaded": "weights to host", "recreated": "recreated", "swapped": "swapped with actor"}
    parts = [rest[role.residency]] if role.residency in rest else []
    parts += ["optimizer to host"] if role.offload_between else []
    if trained and role.layout.offload_optimizer != "none":
        share = "" if role.layout.offload_fraction == 1 else f"{percent(role.layout.offload_fraction)} of "
        parts.append(f"{share}Adam on {role.layout.offload_optimizer.replace('cpu', 'CPU')}")
    if role.layout.offload_params != "none":
        parts.append("weights on host")
    return ", ".join(parts) or "stays"


def _layout(role: RolePlacement | RolloutPlacement) -> str:
    if isinstance(role, RolloutPlacement):
        return f"{role.layout.label}, {percent(role.layout.memory_utilization)} of memory"
    vp = f" VP{role.layout.vp}" if role.layout.vp > 1 else ""
    return f"{role.layout.label}{vp}"
