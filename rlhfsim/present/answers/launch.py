"""What `rlhfsim launch` answers: placement and memory before, what a small run replaces, phases after."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhfsim.calibration.comparison.phases import rows, warm
from rlhfsim.interchange.rlhfsim.listening import listening
from rlhfsim.plan import Plan
from rlhfsim.present.answers.plan_blocks import header, notes
from rlhfsim.present.answers.roles import roles
from rlhfsim.present.answers.tree import Block, Column, FactList, Note, Page, TypedTable, answer, table_of
from rlhfsim.present.tables import (
    BAR,
    BYTES,
    DECIMALS,
    FINE_SHARE,
    NAME,
    RATIO,
    RIGHT,
    SECONDS,
    SHARE,
    THREE_DIGITS,
    Spark,
    ValueKind,
    added,
    each,
    fields,
    fixed_to,
)
from rlhfsim.present.words import decimals, lengths, size
from rlhfsim.specs.placement.scaling import Replaced
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.workload.lengths import Empirical, Fixed, LogNormal, Truncated
from rlhfsim.specs.workload.workload import Environment, Lora, Reward
from rlhfsim.units import GB
from rlhfsim.what_if.memory_peaks import MemoryPeaks

SCHEMA = "rlhfsim.launch/1"
CURVES = (
    *("reward/mean", "sft/loss", "reward_model/loss", "reward_model/accuracy"),
    *("dpo/loss", "dpo/accuracy", "kto/loss", "distillation/loss"),
)
"""Metrics by which a run is seen to learn, in addition to its evaluations."""
TIMES = ("predicted_s", "low_s", "high_s", "measured_s")


def before(
    plan: Plan, *, dry_run: bool, told: Sequence[str], changes: Sequence[Replaced] = ()
) -> Iterator[Block]:
    """What is about to run and where; `changes`: what a small run has otherwise than its file."""
    yield from header(plan)
    yield roles(plan, decoded=False, look="ruled")
    if dry_run:
        yield _memory(plan)
        yield FactList(listening(), apart=True)
    yield from notes((*told, *_memory_note(plan)))
    if changes:
        yield Note("this run is small; it has otherwise than the file:", "strong", apart=True)
        yield table_of(
            "What is otherwise than in the file",
            replaced_data(changes),
            Column("field", lambda row: row["field"].removeprefix("placement.").removeprefix("workload.")),
            Column("in the file", "before"),
            Column("here", "now"),
            Column("why"),
            apart=False,
        )
        yield Note("")


def replaced_data(changes: Sequence[Replaced]) -> list[dict[str, str]]:
    """What a small run has otherwise than its file, and why."""
    return [
        {"field": c.field, "before": _value(c.before), "now": _value(c.now), "why": c.why} for c in changes
    ]


def _value(value: Any) -> str:
    """A value of a plan in short."""
    match value:
        case None:
            return "none"
        case Fixed() | LogNormal() | Truncated() | Empirical():
            return lengths(value)
        case Reward():
            return " and ".join(
                [*([value.model] if value.model else []), *(["rules"] if value.rules else [])]
            )
        case Lora():
            return f"rank {value.rank}, base {value.base}"
        case Software() | Environment():
            return value.__class__.__name__.lower()
    return str(value)


def _memory_note(plan: Plan) -> Iterator[str]:
    """The ledger says that it will not fit: said before anything starts."""
    p = plan.prediction
    if p.peak_memory_bytes > p.capacity_bytes:
        yield (
            f"the plan's ledger peaks at {size(p.peak_memory_bytes)} of {size(p.capacity_bytes)} in "
            f"{p.peak_phase}; rlhfsim memory shows it"
        )
    elif p.rejected_by:
        yield f"the plan does not fit: {p.rejected_by}"


def _memory(plan: Plan) -> TypedTable:
    """Bytes of every phase on the fullest GPU of each pool, against what is there."""
    capacity = plan.prediction.capacity_bytes
    sums = added(((e.phase, e.pool), e.bytes) for e in plan.prediction.ledger)
    held: list[tuple[Any, ...]] = [
        (*key, amount, capacity, amount / capacity) for key, amount in sums.items()
    ]
    return table_of(
        "Memory by phase",
        [*held, ("host, per node", "", plan.prediction.host_peak_bytes, None, None)],
        Column("phase", 0, NAME),
        Column("pool", 1, NAME),
        Column("bytes", 2, BYTES),
        Column("of", 3, BYTES.where("")),
        Column("share", 4, SHARE.where("")),
    )


def described_page(cluster: str, checked: Mapping[str, str], peaks: MemoryPeaks) -> Page:
    """A dry run on a described cluster: what was checked, and the fullest GPUs and node."""
    pools = {
        f"pool {peak.pool}": f"{size(peak.bytes)} of {size(peak.capacity)} per GPU at most, in {peak.name}"
        for peak in peaks.gpus
    }
    host = f"{size(peaks.host_bytes)} of {size(peaks.host_capacity)} per node at most"
    return answer(
        SCHEMA,
        FactList({**checked, **pools, "host": host}),
        FactList(listening(), apart=True),
        Note(f"this plan launches on {cluster}", "strong", apart=True),
        Note("not checked: weights, tokenizer, kernels, drivers, network", "aside"),
        data={
            "dry_run": True,
            "cluster": cluster,
            "checked": dict(checked),
            "peaks": each(peaks.gpus, "pool", "name", "bytes", "capacity"),
            **fields(peaks, "host_bytes", "host_capacity"),
            "listens": listening(),
        },
    )


def result(plan: Plan, outcome: Any, *, dry_run: bool) -> dict[str, Any]:
    """The run in figures, as plain data."""
    ended = outcome.ended
    phases = rows(plan, warm(ended.trace))
    return {
        "dry_run": dry_run,
        "out": str(outcome.files.root),
        "iterations": len(ended.rows),
        "restarts": outcome.restarts,
        "last": dict(ended.rows[-1]) if ended.rows else {},
        "curves": curves(ended.rows),
        "evaluations": {str(step): value for step, value in ended.evaluations.items()},
        **fields(
            plan.prediction, predicted_step_s="step_s", predicted_low_s="low_s", predicted_high_s="high_s"
        ),
        "measured_step_s": measured_step([row["time/step"] for row in ended.rows if "time/step" in row]),
        "coordination_overhead": outcome.overhead,
        "phases": each(phases, "name", *TIMES, measured="steps"),
    }


def curves(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Values, iteration by iteration, of the metrics that say what was learnt."""
    names = [name for row in rows[:1] for name in CURVES if name in row]
    return {name: [row[name] for row in rows if math.isfinite(row.get(name, math.nan))] for name in names}


def _curves(report: Mapping[str, Any]) -> TypedTable:
    """Learning curves, a line each."""
    return table_of(
        "Learning curves",
        ((name, values) for name, values in report["curves"].items() if values),
        Column("metric", 0, NAME),
        Column("first", "1.0", THREE_DIGITS),
        Column("last", lambda row: row[1][-1], THREE_DIGITS),
        Column("iteration by iteration", lambda row: Spark(row[1]), BAR),
    )


def measured_step(seconds: list[float]) -> float | None:
    """Mean without the first iteration, which warms caches up, where there are several."""
    counted = seconds[1:] or seconds
    return sum(counted) / len(counted) if counted else None


def after(report: Mapping[str, Any]) -> Iterator[Block]:
    """Predicted against measured, and where everything lies."""
    if report["dry_run"]:
        yield Note(
            "dry run: processes, placement, order of calls and weight route came up with fake engines; no "
            "model ran"
        )
    else:
        yield _comparison(report)
        if len(next(iter(report["curves"].values()), ())) > 1:
            yield _curves(report)
    yield FactList(_figures(report), apart=not report["dry_run"])


def _comparison(report: Mapping[str, Any]) -> TypedTable:
    """Phases, predicted and measured."""
    seconds = fixed_to(decimals(report["predicted_step_s"]))
    step = {
        name: report[name.replace("_s", "_step_s") if "ed_s" in name else f"predicted_{name}"]
        for name in TIMES
    }
    return table_of(
        "Predicted and measured",
        [*report["phases"], {"name": "step", **step}],
        Column("phase", "name", NAME),
        Column("predicted s", "predicted_s", seconds),
        Column("P10-P90", lambda row: _ends(row, seconds), RIGHT.where("-")),
        Column("measured s", "measured_s", seconds),
        Column("ratio", _ratio, RATIO),
    )


def _ends(row: Mapping[str, Any], seconds: ValueKind) -> str | None:
    ends = row["low_s"], row["high_s"]
    return None if row["predicted_s"] is None else "-".join(map(seconds.text, ends))


def _ratio(row: Mapping[str, Any]) -> float | None:
    predicted, measured = row["predicted_s"], row["measured_s"]
    return measured / predicted if predicted and measured else None


def _figures(report: Mapping[str, Any]) -> dict[str, str]:
    last, real = report["last"], not report["dry_run"]
    rows = {"iterations": f"{report['iterations']}, {len(report['restarts'])} restarts"}
    if report["coordination_overhead"] is not None and real:
        rows["coordination"] = (
            f"{FINE_SHARE.shown(report['coordination_overhead'])} of the wall time in which no engine works"
        )
    for row in () if real else report["phases"]:  # else the table of phases has them
        if row["name"].startswith("custom.") and row["measured"]:
            planned = row["predicted_s"]
            said = "nothing declared" if planned is None else f"{SECONDS.shown(planned)} planned"
            rows[row["name"]] = f"{SECONDS.shown(row['measured_s'])} an iteration here, {said}"
    if "memory/peak_gb" in last and real:
        device, host = (size(last[f"memory/{name}_gb"] * GB) for name in ("peak", "host"))
        rows["memory"] = f"at most {device} on the fullest device, {host} in all processes"
    if report["evaluations"]:
        values = report["evaluations"].items()
        rows["evaluation"] = ", ".join(f"{DECIMALS[3].shown(value)} after {step}" for step, value in values)
    files = "plan, settings, DeepSpeed and vLLM configuration, trace, metrics, checkpoints"
    return {**rows, "files": f"{report['out']}: {files}"}
