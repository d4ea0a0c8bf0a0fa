"""A plan and its run as people read them: the step, its phases, the gap by cause, memory, tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rlhfsim import units
from rlhfsim.calibration.comparison.gap import Gap
from rlhfsim.calibration.comparison.limits import phase_times
from rlhfsim.calibration.comparison.memory import PhaseMemory
from rlhfsim.calibration.comparison.phases import Amount, PhaseComparison
from rlhfsim.calibration.comparison.side_by_side import SideBySide
from rlhfsim.present.tables import CUT, REST, Fit, grid, table
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal.bars import FULL, Axis, HorizontalBar, Stretch
from rlhfsim.present.terminal.console import Part, drawn, labelled, styled
from rlhfsim.present.terminal.doctor import suggestions
from rlhfsim.present.words import CAUSES, decimals, fixed, plural, short_seconds, size, span
from rlhfsim.what_if.doctor.diagnosis import Diagnosis

SMALL = 0.005
"""Share of the step below which a phase stands in the line of short ones."""
TINY = 5e-4
"""Share of the step below which a cause is not shown."""


def report(
    answer: SideBySide, width: int, out: Path | None, diagnosis: Diagnosis | None = None
) -> Iterator[Part]:
    """Everything, top to bottom; of an imported run also where its time went, and which keys would help."""
    yield view.header(answer.plan)
    yield labelled(summary(answer))
    if diagnosis is not None:
        yield ""
        yield whereabouts(answer, width)
        yield from keys(answer, diagnosis)
    yield ""
    yield phases(answer, width)
    yield from (styled(line) for line in strangers(answer))
    if answer.gap is not None:
        yield ""
        yield causes(answer.gap, width)
    yield ""
    yield memory(answer, width)
    yield ""
    yield amounts(answer.found.amounts)
    if answer.notes:
        yield ""
        yield from (styled(f"note: {note}", style="yellow") for note in answer.notes)
    if out is not None:
        yield ""
        yield labelled({"trace": f"{out}: open it at https://ui.perfetto.dev"})


def summary(answer: SideBySide) -> dict[str, str]:
    """The run, and its step against the plan's."""
    run, step = answer.run, answer.found.step
    day = f", {run.date}" if run.date else ""
    rows = {"run": f"{run.name}: {plural(run.steps, 'step')} counted, {run.device}{day}"}
    if step.measured_s is not None and step.predicted_s is not None:
        rows["step"] = (
            f"{short_seconds(step.measured_s)} measured (median), {short_seconds(step.predicted_s)} "
            f"predicted: {verdict(step)}"
        )
    return rows


def whereabouts(answer: SideBySide, width: int) -> Part:
    """Where the measured step went: the GPUs' part, the framework's, what neither explains."""
    times = phase_times(answer.plan, answer.run, answer.found.rows)
    longest = max((t.measured_s for t in times), default=0.0)
    digits = decimals(longest)
    return drawn(
        table(
            "",
            [t for t in times if t.measured_s >= SMALL * longest],
            ("where the time went", lambda t: t.name),
            (">measured s", lambda t: fixed(t.measured_s, digits)),
            (">GPU", lambda t: fixed(t.gpu_s, digits)),
            (">framework", lambda t: fixed(t.framework_s, digits)),
            (">beyond", lambda t: f"{t.beyond_s:+,.{digits}f}"),
            ("how", lambda t: t.why),
            fit={"how": REST},
            notes=(
                "GPU: predicted for arithmetic, memory and links; framework: the rest of the prediction "
                "(launches, host, PCIe, waiting for the longest); beyond: measured and not predicted",
            ),
        ),
        width,
    )


def keys(answer: SideBySide, diagnosis: Diagnosis) -> Iterator[Part]:
    """The changes of the framework's keys that would have saved most of the measured step."""
    step = answer.found.step.measured_s
    if not diagnosis.faster or step is None:
        return
    yield styled("what to change, each on top of those above it", style="bold")
    yield from suggestions(diagnosis, step)


def verdict(row: PhaseComparison) -> str:
    """`0.83 times the prediction, below its P10`."""
    assert row.ratio is not None
    assert row.measured_s is not None
    assert row.low_s is not None
    assert row.high_s is not None
    where = "inside its P10 to P90"
    if not row.low_s <= row.measured_s <= row.high_s:
        where = "below its P10" if row.measured_s < row.low_s else "above its P90"
    return f"{units.significant(row.ratio, 3)} times the prediction, {where}"


# --- phases ---------------------------------------------------------------------------------------


def phases(answer: SideBySide, width: int) -> Part:
    """Every phase that both sides have, then the step."""
    step = answer.found.step
    longest = max(step.measured_s or 0.0, step.predicted_s or 0.0)
    digits = decimals(longest)
    both = [r for r in answer.found.rows if r.ratio is not None]
    small = [r for r in both if max(r.measured_s or 0.0, r.predicted_s or 0.0) < SMALL * longest]
    notes = ["measured: median and 90th percentile over the steps; ratio: measured over predicted"]
    if small:
        notes.append(f"too short to show (--json has them): {', '.join(r.name for r in small)}")
    joined = [
        f"{r.name} with {', '.join(c for c in r.covers if c != r.name)}" for r in both if len(r.covers) > 1
    ]
    if joined:
        notes.append(f"timed together: {'; '.join(joined)}")
    return drawn(
        table(
            "",
            (*(r for r in both if r not in small), step),
            ("phase", lambda r: r.name),
            (">predicted s", lambda r: fixed(r.predicted_s, digits)),
            (">P10-P90", lambda r: _between(r.low_s, r.high_s, lambda x: f"{x:,.{digits}f}")),
            (">measured s", lambda r: fixed(r.measured_s, digits)),
            (">p90", lambda r: fixed(r.p90_s, digits)),
            (">ratio", lambda r: _times(r.ratio)),
            (">P10-P90", lambda r: _between(r.ratio_low, r.ratio_high, _times)),
            (">steps", lambda r: str(r.steps)),
            (">spans", lambda r: str(r.spans) if r.spans else ""),
            style=lambda r: "bold" if r is step else "",
            fit={"phase": CUT},
            notes=notes,
        ),
        width,
    )


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:,.2f}" if ratio < 100 else f"{ratio:,.0f}"


def _between(low: float | None, high: float | None, text: Callable[[float], str]) -> str:
    return "-" if low is None or high is None else f"{text(low)}-{text(high)}"


def strangers(answer: SideBySide) -> Iterator[str]:
    """What only one side has."""
    rows = {r.name: r for r in answer.found.rows}
    if answer.found.missing:
        shown = ", ".join(f"{n} ({short_seconds(rows[n].predicted_s or 0.0)})" for n in answer.found.missing)
        yield f"in the plan, not timed in the run: {shown}"
    if answer.found.unplanned:
        shown = ", ".join(f"{n} ({short_seconds(rows[n].measured_s or 0.0)})" for n in answer.found.unplanned)
        yield f"in the run, not in the plan: {shown}"


# --- the gap --------------------------------------------------------------------------------------


def causes(gap: Gap, width: int) -> Part:
    """Seconds by cause between the predicted and the measured mean step."""
    digits = decimals(max(gap.predicted_s, gap.measured_s))
    total = gap.measured_s - gap.predicted_s
    shown = [c for c in CAUSES if abs(gap.parts[c]) >= TINY * gap.predicted_s]
    scale = max([abs(gap.parts[c]) for c in shown], default=1.0)
    axis = Axis(label=short_seconds(scale), at=scale, scale=scale)

    def row(cause: str) -> tuple[object, ...]:
        seconds = gap.parts[cause]
        part = Stretch(amount=abs(seconds), glyph=FULL, style="red" if seconds > 0 else "green")
        bar = HorizontalBar(stretches=[part], scale=scale)
        return f"  {CAUSES[cause].word}", f"{seconds:+,.{digits}f}", bar, CAUSES[cause].meaning

    mean = f"mean of the counted steps; the gap is {total:+,.{digits}f} s"
    first = ("predicted", fixed(gap.predicted_s, digits), "", "")
    last = ("measured", fixed(gap.measured_s, digits), "", mean)
    return drawn(
        grid(
            ("cause", ">seconds", axis, "that is"),
            [first, *map(row, shown), last],
            fit={axis: Fit("words", width=18), "that is": CUT},
            styles=["bold", *[""] * len(shown), "bold"],
            notes=_gap_notes(gap),
        ),
        width,
    )


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
        yield (
            f"in no call: {short_seconds(gap.idle_s)} of the step, where the plan has "
            f"{short_seconds(gap.untimed_s)} of work that the run "
            "does not time"
        )
    elif gap.idle_s > TINY * gap.measured_s:
        yield f"in no call: {short_seconds(gap.idle_s)} of the step"


# --- memory, tokens -------------------------------------------------------------------------------


def memory(answer: SideBySide, width: int) -> Part:
    """Phases whose memory was recorded, on the fullest GPU of their pool."""
    known = [h for h in answer.memory if h.measured is not None]
    if not known:
        return styled("memory: the run recorded none", style="dim")
    pools = len({h.pool for h in known}) > 1
    titles = ("memory in", *["pool"] * pools, ">predicted", ">P10-P90", ">measured", ">ratio", ROLES)
    rows = ((held.phase, *[held.pool] * pools, *_held(held)) for held in known)
    note = "bytes on the fullest GPU of the pool while the phase runs; without GPUs: of the process"
    return drawn(grid(titles, rows, fit={ROLES: CUT}, notes=(note,)), width)


ROLES = "predicted by role"


def _held(held: PhaseMemory) -> tuple[str, ...]:
    roles = ", ".join(f"{role} {size(amount)}" for role, amount in held.roles.items() if amount > 0)
    return (
        "-" if held.predicted is None else size(held.predicted),
        "-" if held.low is None or held.high is None else span(size(held.low), size(held.high)),
        "-" if held.measured is None else size(held.measured),
        _times(held.ratio),
        roles,
    )


def amounts(rows: tuple[Amount, ...]) -> Part:
    """Tokens and bytes."""
    return drawn(
        table(
            "",
            rows,
            ("tokens and bytes", lambda a: a.name),
            (">predicted", lambda a: _amount(a.predicted, a.unit)),
            (">measured", lambda a: _amount(a.measured, a.unit)),
            (">ratio", lambda a: _times(a.measured / a.predicted if a.measured and a.predicted else None)),
        ),
        None,
    )


def _amount(value: float | None, unit: str) -> str:
    if value is None or unit == "byte":
        return "-" if value is None else size(value)
    return f"{value:,.{0 if value >= 100 else 1}f} tokens"
