"""A plan and its run as people read them: the step, its phases, the gap by cause, memory, tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfsim import units
from rlhfsim.calibration.comparison.gap import CAUSES, Gap
from rlhfsim.calibration.comparison.memory import PhaseMemory
from rlhfsim.calibration.comparison.phases import Amount, PhaseComparison
from rlhfsim.calibration.comparison.side_by_side import SideBySide
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal.bars import FULL, Axis, Bar, Piece
from rlhfsim.present.terminal.words import decimals, fixed, labelled, new_table, size

WORDS = {
    "lengths": ("lengths", "prompts and responses are not as long as planned"),
    "compute": ("compute", "arithmetic of the GPUs takes longer or shorter"),
    "hbm": ("HBM", "reads and writes of GPU memory"),
    "network": ("network", "links inside a node and between nodes"),
    "overhead": ("overhead", "launches, framework, host, PCIe, disks, unplanned calls"),
    "waiting": ("waiting", "no call works, or ranks and stages wait for each other"),
    "order": ("order", "calls run beside each other in one of the two only"),
}
"""Cause -> word and meaning."""
SMALL = 0.005
"""Share of the step below which a phase stands in the line of short ones."""
TINY = 5e-4
"""Share of the step below which a cause is not shown."""


def report(answer: SideBySide, width: int, out: Path | None) -> Iterator[RenderableType]:
    """Everything, top to bottom."""
    yield view.header(answer.plan)
    yield labelled(summary(answer))
    yield ""
    yield phases(answer, width)
    yield from (Text(line) for line in strangers(answer))
    if answer.gap is not None:
        yield ""
        yield causes(answer.gap, width)
    yield ""
    yield memory(answer, width)
    yield ""
    yield amounts(answer.found.amounts)
    if answer.notes:
        yield ""
        yield from (Text(f"note: {note}", style="yellow") for note in answer.notes)
    if out is not None:
        yield ""
        yield labelled({"trace": f"{out}: open it at https://ui.perfetto.dev"})


def summary(answer: SideBySide) -> dict[str, str]:
    """The run, and its step against the plan's."""
    run, step = answer.run, answer.found.step
    day = f", {run.date}" if run.date else ""
    rows = {"run": f"{run.name}: {run.steps} step{'s' * (run.steps != 1)} counted, {run.device}{day}"}
    if step.measured_s is not None and step.predicted_s is not None:
        rows["step"] = (
            f"{_s(step.measured_s)} measured (median), {_s(step.predicted_s)} predicted: {verdict(step)}"
        )
    return rows


def verdict(row: PhaseComparison) -> str:
    """`0.83 times the prediction, below its P10`."""
    assert row.ratio is not None
    assert row.measured_s is not None
    assert row.low_s is not None
    assert row.high_s is not None
    told = f"{units.significant(row.ratio, 3)} times the prediction"
    if row.measured_s < row.low_s:
        return f"{told}, below its P10"
    if row.measured_s > row.high_s:
        return f"{told}, above its P90"
    return f"{told}, inside its P10 to P90"


def _s(seconds: float) -> str:
    return units.format(seconds, "s") if seconds else "0 s"


# --- phases ---------------------------------------------------------------------------------------


def phases(answer: SideBySide, width: int) -> RenderableType:
    """Every phase that both sides have, then the step."""
    step = answer.found.step
    longest = max(step.measured_s or 0.0, step.predicted_s or 0.0)
    digits = decimals(longest)
    table = new_table(width)
    table.add_column("phase", no_wrap=True, ratio=1, overflow="ellipsis")
    for name in ("predicted s", "P10-P90", "measured s", "p90", "ratio", "P10-P90", "steps", "spans"):
        table.add_column(name, justify="right", no_wrap=True)
    both = [r for r in answer.found.rows if r.ratio is not None]
    small = [r for r in both if max(r.measured_s or 0.0, r.predicted_s or 0.0) < SMALL * longest]
    for row in (*(r for r in both if r not in small), step):
        table.add_row(*_cells(row, digits), style="bold" if row is step else "")
    notes = ["measured: median and 90th percentile over the steps; ratio: measured over predicted"]
    if small:
        notes.append(f"too short to show (--json has them): {', '.join(r.name for r in small)}")
    joined = [
        f"{r.name} with {', '.join(c for c in r.covers if c != r.name)}" for r in both if len(r.covers) > 1
    ]
    if joined:
        notes.append(f"timed together: {'; '.join(joined)}")
    return Group(table, *(Text(note, style="dim") for note in notes))


def _cells(row: PhaseComparison, digits: int) -> tuple[str, ...]:
    return (
        row.name,
        _fixed(row.predicted_s, digits),
        _between(row.low_s, row.high_s, lambda x: f"{x:,.{digits}f}"),
        _fixed(row.measured_s, digits),
        _fixed(row.p90_s, digits),
        _times(row.ratio),
        _between(row.ratio_low, row.ratio_high, _times),
        str(row.steps),
        str(row.spans) if row.spans else "",
    )


def _fixed(seconds: float | None, digits: int) -> str:
    return "-" if seconds is None else fixed(seconds, digits)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:,.2f}" if ratio < 100 else f"{ratio:,.0f}"


def _between(low: float | None, high: float | None, text: object) -> str:
    assert callable(text)
    return "-" if low is None or high is None else f"{text(low)}-{text(high)}"


def strangers(answer: SideBySide) -> Iterator[str]:
    """What only one side has."""
    rows = {r.name: r for r in answer.found.rows}
    if answer.found.missing:
        shown = ", ".join(f"{n} ({_s(rows[n].predicted_s or 0.0)})" for n in answer.found.missing)
        yield f"in the plan, not timed in the run: {shown}"
    if answer.found.unplanned:
        shown = ", ".join(f"{n} ({_s(rows[n].measured_s or 0.0)})" for n in answer.found.unplanned)
        yield f"in the run, not in the plan: {shown}"


# --- the gap --------------------------------------------------------------------------------------


def causes(gap: Gap, width: int) -> RenderableType:
    """Seconds by cause between the predicted and the measured mean step."""
    digits = decimals(max(gap.predicted_s, gap.measured_s))
    total = gap.measured_s - gap.predicted_s
    shown = [c for c in CAUSES if abs(gap.parts[c]) >= TINY * gap.predicted_s]
    scale = max([abs(gap.parts[c]) for c in shown], default=1.0)
    table = new_table(width)
    table.add_column("cause", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column(Axis(label=_s(scale), at=scale, scale=scale), width=18)
    table.add_column("that is", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_row("predicted", fixed(gap.predicted_s, digits), "", "", style="bold")
    for cause in shown:
        seconds = gap.parts[cause]
        bar = Bar(
            pieces=[Piece(amount=abs(seconds), glyph=FULL, style="red" if seconds > 0 else "green")],
            scale=scale,
        )
        table.add_row(f"  {WORDS[cause][0]}", f"{seconds:+,.{digits}f}", bar, WORDS[cause][1])
    table.add_row(
        "measured",
        fixed(gap.measured_s, digits),
        "",
        f"mean of the counted steps; the gap is {total:+,.{digits}f} s",
        style="bold",
    )
    return Group(table, *(Text(note, style="dim") for note in _gap_notes(gap)))


def _gap_notes(gap: Gap) -> Iterator[str]:
    yield "a phase's difference is split as the prediction splits its time; no counter of the GPU was read"
    worst = sorted(
        (p for p in gap.phases if p.measured_s is not None),
        key=lambda p: -abs((p.measured_s or 0.0) - p.predicted_s),
    )
    if worst:
        shown = ", ".join(f"{p.name} {(p.measured_s or 0.0) - p.predicted_s:+.3g} s" for p in worst[:3])
        yield f"largest differences: {shown}"
    if gap.untimed_s > 0:
        yield f"in no call: {_s(gap.idle_s)} of the step, where the plan has {_s(gap.untimed_s)} of work that the run does not time"
    elif gap.idle_s > TINY * gap.measured_s:
        yield f"in no call: {_s(gap.idle_s)} of the step"


# --- memory, tokens -------------------------------------------------------------------------------


def memory(answer: SideBySide, width: int) -> RenderableType:
    """Phases whose memory was recorded, on the fullest GPU of their pool."""
    known = [h for h in answer.memory if h.measured is not None]
    if not known:
        return Text("memory: the run recorded none", style="dim")
    pools = len({h.pool for h in known}) > 1
    table = new_table(width)
    table.add_column("memory in", no_wrap=True)
    if pools:
        table.add_column("pool", no_wrap=True)
    for name in ("predicted", "P10-P90", "measured", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("predicted by role", ratio=1, no_wrap=True, overflow="ellipsis")
    for held in known:
        table.add_row(held.phase, *([held.pool] if pools else []), *_held(held))
    return Group(
        table,
        Text(
            "bytes on the fullest GPU of the pool while the phase runs; without GPUs: of the process",
            style="dim",
        ),
    )


def _held(held: PhaseMemory) -> tuple[str, ...]:
    between = "-" if held.low is None or held.high is None else _sizes(held.low, held.high)
    roles = ", ".join(f"{role} {size(amount)}" for role, amount in held.roles.items() if amount > 0)
    return (
        "-" if held.predicted is None else size(held.predicted),
        between,
        "-" if held.measured is None else size(held.measured),
        _times(held.ratio),
        roles,
    )


def _sizes(low: float, high: float) -> str:
    """`8.06-10.9 GB`; both units where they differ."""
    (first, unit), (second, other) = size(low).split(), size(high).split()
    return f"{first}-{second} {other}" if unit == other else f"{first} {unit}-{second} {other}"


def amounts(found: tuple[Amount, ...]) -> Table:
    """Tokens and bytes."""
    table = new_table(None)
    table.add_column("tokens and bytes", no_wrap=True)
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in found:
        ratio = item.measured / item.predicted if item.measured and item.predicted else None
        table.add_row(
            item.name, _amount(item.predicted, item.unit), _amount(item.measured, item.unit), _times(ratio)
        )
    return table


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return (
        size(value) if unit == "byte" else f"{value:,.0f} tokens" if value >= 100 else f"{value:,.1f} tokens"
    )
