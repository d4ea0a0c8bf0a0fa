"""A launch as people follow it: placement and memory before, an iteration a line, phases after."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from rlhfsim.calibration.comparison.phases import rows, warm
from rlhfsim.frameworks.rlhfsim.listening import listening
from rlhfsim.plan import Plan
from rlhfsim.present.tables import WORDS, Fit, added, fields, grid
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal.bars import Sparkline
from rlhfsim.present.terminal.console import Display, Part, drawn, labelled, styled
from rlhfsim.present.words import decimals, fixed, lengths, size
from rlhfsim.specs.placement.scaling import Replaced
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.workload.lengths import Empirical, Fixed, LogNormal, Truncated
from rlhfsim.specs.workload.workload import Environment, Lora, Reward
from rlhfsim.units import GB, format
from rlhfsim.what_if.memory_peaks import MemoryPeaks

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
CURVES = (
    *("reward/mean", "sft/loss", "reward_model/loss", "reward_model/accuracy"),
    *("dpo/loss", "dpo/accuracy", "kto/loss", "distillation/loss"),
)
"""Metrics by which a run is seen to learn, beside its evaluations."""


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

    def __init__(self, console: Display) -> None:
        """`console` is stderr where stdout carries JSON."""
        self._console = console
        self._head = False

    def phase(self, text: str) -> None:
        """A line of its own."""
        self._console.print(styled(text, style="dim"), highlight=False)
        self._head = False

    def iteration(self, row: Mapping[str, float], total: int) -> None:
        """One line of figures."""
        if not self._head:
            titles = "".join(f"{title:>10}" for title, _, _ in COLUMNS)
            self._console.print(styled(f"{'iteration':>12}{titles}", style="bold"))
            self._head = True
        cells = "".join(_cell(row.get(name), digits) for _, name, digits in COLUMNS)
        self._console.print(f"{int(row['step']) + 1:>5} / {total:<4}{cells}", highlight=False)

    def finding(self, finding: Warned) -> None:
        """A warning with its advice."""
        self._console.print(styled(f"warning[{finding.code}]: {finding.what}", style="yellow"))
        self._console.print(styled(f"help: {finding.advice}"))


def _cell(value: float | None, digits: int) -> str:
    if value is None:
        return f"{'-':>10}"
    text = f"{value:.{digits}f}" if value == 0 or abs(value) >= 10.0**-digits else f"{value:.1e}"
    return f"{text:>10}"


def before(plan: Plan, *, dry_run: bool, notes: tuple[str, ...]) -> Iterator[Part]:
    """What is about to run and where."""
    yield view.header(plan)
    yield ""
    yield view.placement_table(plan)
    if dry_run:
        yield ""
        yield memory_table(plan)
        yield ""
        yield labelled(listening())
    for note in (*notes, *_memory_note(plan)):
        yield styled(f"note: {note}", style="yellow")


def replaced_data(changes: Sequence[Replaced]) -> list[dict[str, str]]:
    """What a small run has otherwise than its file, and why."""
    return [
        {"field": c.field, "before": _value(c.before), "now": _value(c.now), "why": c.why} for c in changes
    ]


def replaced_lines(changes: Sequence[Replaced]) -> Iterator[Part]:
    """The same as a table."""
    if not changes:
        return
    rows = [
        (row.pop("field").removeprefix("placement.").removeprefix("workload."), *row.values())
        for row in replaced_data(changes)
    ]
    yield ""
    yield styled("this run is small; it has otherwise than the file:", style="bold")
    titles = ("field", "in the file", "here", "why")
    yield drawn(grid(titles, rows, fit=dict.fromkeys(titles, WORDS)), None)
    yield ""


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
            f"{p.peak_phase}; "
            "rlhfsim memory shows it"
        )
    elif p.rejected_by:
        yield f"the plan does not fit: {p.rejected_by}"


def memory_table(plan: Plan) -> Part:
    """Bytes of every phase on the fullest GPU of each pool, against what is there."""
    capacity = plan.prediction.capacity_bytes
    sums = added(((e.phase, e.pool), e.bytes) for e in plan.prediction.ledger)
    rows = [(*key, size(amount), size(capacity), f"{amount / capacity:.0%}") for key, amount in sums.items()]
    rows.append(("host, per node", "", size(plan.prediction.host_peak_bytes), "", ""))
    return drawn(grid(("phase", "pool", ">bytes", ">of", ">share"), rows), None)


def described(cluster: str, lines: Mapping[str, str], peaks: MemoryPeaks) -> dict[str, Any]:
    """A dry run on a described cluster, as plain data."""
    gpus = [fields(peak, "pool", "name", "bytes", "capacity") for peak in peaks.gpus]
    host = fields(peaks, "host_bytes", "host_capacity")
    return {"dry_run": True, "cluster": cluster, "checked": dict(lines), "peaks": gpus, **host} | {
        "listens": listening()
    }


def described_lines(report: Mapping[str, Any]) -> Iterator[Part]:
    """The same for people."""
    rows = dict(report["checked"])
    for peak in report["peaks"]:
        held, offered = size(peak["bytes"]), size(peak["capacity"])
        rows[f"pool {peak['pool']}"] = f"{held} of {offered} per GPU at most, in {peak['name']}"
    rows["host"] = f"{size(report['host_bytes'])} of {size(report['host_capacity'])} per node at most"
    yield labelled(rows)
    yield ""
    yield labelled(report["listens"])
    yield ""
    yield styled(f"this plan launches on {report['cluster']}", style="bold")
    yield styled("not checked: weights, tokenizer, kernels, drivers, network", style="dim")


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
        "curves": curves(ended.rows),
        "evaluations": {str(step): value for step, value in ended.evaluations.items()},
        "predicted_step_s": plan.prediction.step_s,
        "predicted_low_s": plan.prediction.low_s,
        "predicted_high_s": plan.prediction.high_s,
        "measured_step_s": measured_step([row["time/step"] for row in ended.rows if "time/step" in row]),
        "coordination_overhead": outcome.overhead,
        "phases": [{**fields(p, "name", *SECONDS), "measured": p.steps} for p in phases],
    }


def curves(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Values, iteration by iteration, of the metrics that say what was learnt."""
    names = [name for row in rows[:1] for name in CURVES if name in row]
    return {name: [row[name] for row in rows if math.isfinite(row.get(name, math.nan))] for name in names}


def curves_table(report: Mapping[str, Any]) -> Part:
    """Learning curves, a line each."""
    line = "iteration by iteration"
    rows: list[tuple[object, ...]] = [
        (name, f"{values[0]:.3g}", f"{values[-1]:.3g}", Sparkline(values))
        for name, values in report["curves"].items()
        if values
    ]
    return drawn(grid(("metric", ">first", ">last", line), rows, fit={line: Fit(ratio=1)}), None)


SECONDS = ("predicted_s", "low_s", "high_s", "measured_s")


def measured_step(seconds: list[float]) -> float | None:
    """Mean without the first iteration, which warms caches up, where there are several."""
    counted = seconds[1:] or seconds
    return sum(counted) / len(counted) if counted else None


def after(plan: Plan, report: Mapping[str, Any]) -> Iterator[Part]:
    """Predicted against measured, and where everything lies."""
    yield ""
    if report["dry_run"]:
        yield styled(
            "dry run: processes, placement, order of calls and weight route came up with fake engines; no "
            "model ran"
        )
    else:
        yield comparison(report)
        yield ""
        if len(next(iter(report["curves"].values()), ())) > 1:
            yield curves_table(report)
            yield ""
    yield labelled(_figures(report))


def comparison(report: Mapping[str, Any]) -> Part:
    """Phases, predicted and measured."""
    digits = decimals(report["predicted_step_s"])
    step = {
        name: report[name.replace("_s", "_step_s") if "ed_s" in name else f"predicted_{name}"]
        for name in SECONDS
    }
    rows = [(row["name"], *_numbers(row, digits)) for row in (*report["phases"], {"name": "step", **step})]
    return drawn(grid(("phase", ">predicted s", ">P10-P90", ">measured s", ">ratio"), rows), None)


def _numbers(row: Mapping[str, Any], digits: int) -> tuple[str, ...]:
    predicted, low, high, measured = (row[name] for name in SECONDS)
    span = "-" if predicted is None else f"{fixed(low, digits)}-{fixed(high, digits)}"
    ratio = f"{measured / predicted:.2f}" if predicted and measured else "-"
    return fixed(predicted, digits), span, fixed(measured, digits), ratio


def _figures(report: Mapping[str, Any]) -> dict[str, str]:
    last, real = report["last"], not report["dry_run"]
    rows = {"iterations": f"{report['iterations']}, {len(report['restarts'])} restarts"}
    if report["coordination_overhead"] is not None and real:
        rows["coordination"] = (
            f"{report['coordination_overhead']:.1%} of the wall time in which no engine works"
        )
    for row in () if real else report["phases"]:  # else the table of phases has them
        if row["name"].startswith("custom.") and row["measured"]:
            planned = row["predicted_s"]
            said = "nothing declared" if planned is None else f"{format(planned, 's')} planned"
            rows[row["name"]] = f"{format(row['measured_s'], 's')} an iteration here, {said}"
    if "memory/peak_gb" in last and real:
        device, host = (size(last[f"memory/{name}_gb"] * GB) for name in ("peak", "host"))
        rows["memory"] = f"at most {device} on the fullest device, {host} in all processes"
    if report["evaluations"]:
        values = report["evaluations"].items()
        rows["evaluation"] = ", ".join(f"{value:.3f} after {step}" for step, value in values)
    files = "plan, settings, DeepSpeed and vLLM configuration, trace, metrics, checkpoints"
    return {**rows, "files": f"{report['out']}: {files}"}
