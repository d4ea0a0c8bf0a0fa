"""A launch as people follow it: placement and memory before, a line an iteration, phases and figures after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.text import Text

from rlhfsim import units
from rlhfsim.calibration.comparison.phases import rows, warm
from rlhfsim.plan import Plan
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal.words import decimals, fixed, labelled, new_table, size

COLUMNS = (
    ("reward", "reward/mean", 3),
    ("loss", "policy/loss", 4),
    ("kl", "kl/mean", 4),
    ("|dlogp|", "mismatch/mean_abs_dlogp", 6),
    ("length", "response/length_mean", 1),
    ("stale", "staleness/max", 0),
    ("tokens/s", "throughput/tokens_per_sec", 0),
    ("s", "time/step", 2),
)
"""Column of the progress lines: title, metric, decimals."""


class Warned(Protocol):
    """A finding of the executor's detectors."""

    @property
    def code(self) -> str:
        """Stable name."""

    @property
    def what(self) -> str:
        """What was measured against what."""

    @property
    def advice(self) -> str:
        """What to change."""


class Screen:
    """Prints what a run tells."""

    def __init__(self, console: Console) -> None:
        """`console` is stderr where stdout carries JSON."""
        self._console = console
        self._head = False

    def phase(self, text: str) -> None:
        """A line of its own."""
        self._console.print(Text(text, style="dim"), highlight=False)
        self._head = False

    def iteration(self, row: Mapping[str, float], total: int) -> None:
        """One line of figures."""
        if not self._head:
            titles = "".join(f"{title:>10}" for title, _, _ in COLUMNS)
            self._console.print(Text(f"{'iteration':>12}{titles}", style="bold"))
            self._head = True
        cells = "".join(_cell(row.get(name), digits) for _, name, digits in COLUMNS)
        self._console.print(f"{int(row['step']) + 1:>5} / {total:<4}{cells}", highlight=False)

    def finding(self, finding: Warned) -> None:
        """A warning with its advice."""
        self._console.print(Text(f"warning[{finding.code}]: {finding.what}", style="yellow"))
        self._console.print(Text(f"help: {finding.advice}"))


def _cell(value: float | None, digits: int) -> str:
    if value is None:
        return f"{'-':>10}"
    text = f"{value:.{digits}f}" if value == 0 or abs(value) >= 10.0**-digits else f"{value:.1e}"
    return f"{text:>10}"


def before(plan: Plan, *, dry_run: bool, notes: tuple[str, ...]) -> Iterator[RenderableType]:
    """What is about to run and where."""
    yield view.header(plan)
    yield ""
    yield view.placement_table(plan)
    if dry_run:
        yield ""
        yield memory_table(plan)
    for note in (*notes, *_memory_note(plan)):
        yield Text(f"note: {note}", style="yellow")


def _memory_note(plan: Plan) -> Iterator[str]:
    """The ledger says that it will not fit: said before anything starts."""
    p = plan.prediction
    if p.peak_memory_bytes > p.capacity_bytes:
        yield f"the plan's ledger peaks at {size(p.peak_memory_bytes)} of {size(p.capacity_bytes)} in {p.peak_phase}; rlhfsim memory shows it"


def memory_table(plan: Plan) -> RenderableType:
    """Bytes of every phase on the fullest GPU of each pool, against what is there."""
    table = new_table(None)
    for name in ("phase", "pool"):
        table.add_column(name, no_wrap=True)
    for name in ("bytes", "of", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    sums: dict[tuple[str, str], float] = {}
    for entry in plan.prediction.ledger:
        sums[(entry.phase, entry.pool)] = sums.get((entry.phase, entry.pool), 0.0) + entry.bytes
    capacity = plan.prediction.capacity_bytes
    for (phase, pool), amount in sums.items():
        table.add_row(phase, pool, size(amount), size(capacity), f"{amount / capacity:.0%}")
    table.add_row("host, per node", "", size(plan.prediction.host_peak_bytes), "", "")
    return table


def result(plan: Plan, outcome: Any, *, dry_run: bool) -> dict[str, Any]:
    """The run in figures, as plain data."""
    ended = outcome.ended
    phases = rows(plan, warm(ended.trace))
    return {
        "dry_run": dry_run,
        "out": str(outcome.files.root),
        "iterations": len(ended.rows),
        "restarts": list(outcome.restarts),
        "last": dict(ended.rows[-1]) if ended.rows else {},
        "evaluations": {str(step): value for step, value in ended.evaluations.items()},
        "predicted_step_s": plan.prediction.step_s,
        "predicted_low_s": plan.prediction.low_s,
        "predicted_high_s": plan.prediction.high_s,
        "measured_step_s": measured_step([row["time/step"] for row in ended.rows if "time/step" in row]),
        "coordination_overhead": outcome.overhead,
        "phases": [
            {
                "name": p.name,
                "predicted_s": p.predicted_s,
                "low_s": p.low_s,
                "high_s": p.high_s,
                "measured_s": p.measured_s,
                "measured": p.steps,
            }
            for p in phases
        ],
    }


def measured_step(seconds: list[float]) -> float | None:
    """Mean without the first iteration, which warms caches up, where there are several."""
    counted = seconds[1:] or seconds
    return sum(counted) / len(counted) if counted else None


def after(plan: Plan, report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Predicted against measured, and where everything lies."""
    yield ""
    if report["dry_run"]:
        yield Text(
            "dry run: processes, placement, order of calls and weight route came up with fake engines; no model ran"
        )
    else:
        yield comparison(report)
        yield ""
    yield labelled(_figures(report))


def comparison(report: Mapping[str, Any]) -> RenderableType:
    """Phases, predicted and measured."""
    table = new_table(None)
    table.add_column("phase", no_wrap=True)
    for name in ("predicted s", "P10-P90", "measured s", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    digits = decimals(report["predicted_step_s"])
    rows = [
        *report["phases"],
        {
            "name": "step",
            "predicted_s": report["predicted_step_s"],
            "low_s": report["predicted_low_s"],
            "high_s": report["predicted_high_s"],
            "measured_s": report["measured_step_s"],
        },
    ]
    for row in rows:
        table.add_row(row["name"], *_numbers(row, digits))
    return table


def _numbers(row: Mapping[str, Any], digits: int) -> tuple[str, ...]:
    predicted, measured = row["predicted_s"], row["measured_s"]
    ratio = f"{measured / predicted:.2f}" if predicted and measured else "-"
    span = f"{fixed(row['low_s'], digits)}-{fixed(row['high_s'], digits)}" if predicted is not None else "-"
    return (
        fixed(predicted, digits) if predicted is not None else "-",
        span,
        fixed(measured, digits) if measured is not None else "-",
        ratio,
    )


def _figures(report: Mapping[str, Any]) -> dict[str, str]:
    last = report["last"]
    rows = {"iterations": f"{report['iterations']}, {len(report['restarts'])} restarts"}
    if report["coordination_overhead"] is not None and not report["dry_run"]:
        rows["coordination"] = (
            f"{report['coordination_overhead']:.1%} of the wall time in which no engine works"
        )
    if "memory/allocated_gb" in last and not report["dry_run"]:
        rows["memory"] = (
            f"{units.format(last['memory/allocated_gb'] * units.GB, 'byte')} on the fullest device, {units.format(last['memory/host_gb'] * units.GB, 'byte')} in all processes"
        )
    if report["evaluations"]:
        rows["accuracy"] = ", ".join(
            f"{value:.3f} after {step}" for step, value in report["evaluations"].items()
        )
    rows["files"] = (
        f"{report['out']}: plan, settings, DeepSpeed and vLLM configuration, trace, metrics, checkpoints"
    )
    return rows
