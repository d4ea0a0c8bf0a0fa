"""A calibration as people read it: runs, coefficients, what stays unknown, errors on unseen runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfsim import units
from rlhfsim.calibration.fit import Calibrated, Calibration, PhaseError, off
from rlhfsim.calibration.identify import Unidentified
from rlhfsim.calibration.predict import STEP
from rlhfsim.calibration.profile_writer import error_pair, provenance
from rlhfsim.present.terminal.words import decimals, fixed, labelled, new_table
from rlhfsim.specs.quantities import Coefficient

BOUND = 1.001
"""A value this near to the end of its interval lies at a bound."""


def report(found: Calibration, width: int, out: Path | None) -> Iterator[RenderableType]:
    """Everything, top to bottom."""
    count = len(found.observations)
    yield Text(f"{found.profile.title}, calibrated on {count} run{'s' * (count != 1)}", style="bold")
    yield labelled(summary(found))
    yield ""
    yield coefficients(found.coefficients, width)
    if found.unidentified:
        yield ""
        yield unidentified(found.unidentified, width)
    yield ""
    yield errors(found.errors, width)
    yield from (Text(f"outlier: {text}", style="yellow") for text in found.outliers)
    names = [run.name for run in found.observations]
    yield from (Text(f"note: {text}", style="yellow") for text in together(found.notes, names))
    yield ""
    yield labelled(ending(found, out))


def summary(found: Calibration) -> dict[str, str]:
    """The runs, what they ran on, and the error before and after."""
    told = provenance(found)
    versions = ", ".join(f"{name} {version}" for name, version in told.versions.items())
    names = [f"{run.name} ({run.steps})" for run in found.observations]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    rows = {
        "runs": f"{', '.join(names[:8])}{more}; in brackets: steps counted",
        "device": f"{told.device}{'; ' * bool(versions)}{versions}",
        "fitted": f"{len(found.coefficients)} coefficients to {found.data} times; {len(found.unidentified)} cannot be told and keep their values",
    }
    return rows | {"error": _error_line(found.errors)}


def _error_line(rows: Sequence[PhaseError]) -> str:
    pairs = [(word, error_pair(rows, step=step)) for word, step in (("step", True), ("phase", False))]
    told = [f"{word} {percent(p[0])} -> {percent(p[1])}" for word, p in pairs if p is not None]
    if not told:
        return "unknown: there is no second distinct run to test on"
    worse = [word for word, pair in pairs if pair is not None and pair[1] > pair[0]]
    warning = f"; NO BETTER in {' and '.join(worse)}" * bool(worse)
    return f"median {', '.join(told)} (runs that the fit had not seen){warning}"


def percent(share: float | None) -> str:
    """An error: `3.4 %`, `12 times` from a factor of ten."""
    if share is None:
        return "-"
    return f"{units.significant(100 * share, 2)} %" if share < 10 else f"{share:,.0f} times"


# --- coefficients ---------------------------------------------------------------------------------


def coefficients(rows: Sequence[Calibrated], width: int) -> RenderableType:
    """What changed: value and interval before and after, and on how many times of how many runs it rests."""
    table = new_table(width)
    table.add_column("coefficient", no_wrap=True, ratio=1, overflow="ellipsis")
    for name in ("before", "P10-P90", "after", "P10-P90", "times", "runs"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            _value(row.before),
            between(row.before),
            Text(_value(row.after), style="bold"),
            between(row.after),
            str(row.n),
            str(row.runs),
        )
    notes = ["times: medians of phases, and of what they leave of the step (rest), that depend on it"]
    ends = [row.name for row in rows if _at_end(row.after)]
    if ends:
        notes.append(f"at the end of its range: {', '.join(ends)}")
    return Group(table, *(Text(note, style="dim") for note in notes))


def _value(c: Coefficient) -> str:
    return units.format(c.value, c.dimension)


def between(c: Coefficient) -> str:
    """`0.72-0.81`, `1.2-3.4 ms`: the unit once where both ends have it."""
    low, high = (units.format(x, c.dimension) for x in (c.low, c.high))
    (first, unit), (_, other) = _parted(low), _parted(high)
    return f"{first}-{high}" if unit == other else f"{low}-{high}"


def _parted(text: str) -> tuple[str, str]:
    number, _, unit = text.partition(" ")
    return number, unit


def _at_end(c: Coefficient) -> bool:
    """Whether the interval has no room on one side."""
    return c.high <= c.value * BOUND or c.value <= c.low * BOUND


def unidentified(rows: Sequence[Unidentified], width: int) -> RenderableType:
    """Coefficients that keep their prior, by what keeps them from being told."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(row.reason, []).append(row.name)
    table = new_table(width)
    table.add_column("cannot be told from these runs", ratio=1)
    table.add_column("because", ratio=1)
    for reason, names in groups.items():
        table.add_row(", ".join(names), reason)
    return table


# --- errors ---------------------------------------------------------------------------------------


def errors(rows: Sequence[PhaseError], width: int) -> RenderableType:
    """Errors of runs that the fit had not seen: by phase over all runs, and of every run's step."""
    if not rows:
        return Text("errors: no phase of these runs is predicted", style="dim")
    phases, steps = by_phase(rows, width), by_run(rows, width)
    note = "|predicted / measured - 1| of medians; after: predicted by a fit on the other runs (repeats left out together)"
    return Group(phases, Text(), steps, Text(note, style="dim"))


def by_phase(rows: Sequence[PhaseError], width: int) -> Table:
    """The median error of every phase."""
    table = new_table(width)
    table.add_column("median error of", no_wrap=True, ratio=1, overflow="ellipsis")
    for name in ("runs", "before", "after", "largest before", "largest after"):
        table.add_column(name, justify="right", no_wrap=True)
    for phase in dict.fromkeys(e.phase for e in sorted(rows, key=lambda e: e.phase == STEP)):
        mine = [e for e in rows if e.phase == phase]
        before = [off(e.before_s, e.measured_s) or 0.0 for e in mine]
        after = [off(e.after_s, e.measured_s) or 0.0 for e in mine if e.after_s is not None]
        cells = (median(before), median(after) if after else None, max(before), max(after, default=None))
        table.add_row(
            phase, str(len(mine)), *(percent(x) for x in cells), style="bold" if phase == STEP else ""
        )
    return table


def by_run(rows: Sequence[PhaseError], width: int) -> Table:
    """The step of every run: measured, and predicted before and after."""
    steps = [e for e in rows if e.phase == STEP]
    digits = decimals(max((e.measured_s for e in steps), default=1.0))
    table = new_table(width)
    table.add_column("step of", no_wrap=True, ratio=1, overflow="ellipsis")
    for name in ("measured s", "before s", "error", "after s", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for e in steps:
        after = "-" if e.after_s is None else fixed(e.after_s, digits)
        table.add_row(
            e.run,
            fixed(e.measured_s, digits),
            fixed(e.before_s, digits),
            percent(off(e.before_s, e.measured_s)),
            after,
            percent(off(e.after_s, e.measured_s)),
        )
    return table


# --- notes ---------------------------------------------------------------------------------------


def together(notes: Sequence[str], runs: Sequence[str]) -> Iterator[str]:
    """Notes that several runs share as one: `all 6 runs: ...`."""
    shared: dict[str, list[str]] = {}
    for note in notes:
        run = next((name for name in runs if note.startswith(f"{name}, ")), "")
        shared.setdefault(note.removeprefix(f"{run}, "), []).append(run)
    for text, names in shared.items():
        who = f"all {len(runs)} runs" if len(names) == len(runs) > 1 else ", ".join(names)
        yield f"{who}: {text}" if who else text


# --- the end --------------------------------------------------------------------------------------


def ending(found: Calibration, out: Path | None) -> dict[str, str]:
    """The file, and what to type next."""
    hardware = found.observations[0].plan.hardware[0]
    model = found.observations[0].plan.workload.model
    if out is None:
        return {"written": "nothing; add --out FILE.yaml to keep it as a profile"}
    return {
        "written": f"{out}: a new profile named {out.stem}; {found.profile.name} is as it was",
        "next": f"rlhfsim design --gpus {hardware.gpus} --model {model} --profile {out}",
    }
