"""A calibration as people read it: runs, coefficients, what stays unknown, errors on unseen runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from rlhfsim.calibration.biases import Known
from rlhfsim.calibration.fit import Calibrated, Calibration
from rlhfsim.calibration.identify import Unidentified
from rlhfsim.calibration.left_out import PhaseError, off
from rlhfsim.calibration.predict import STEP
from rlhfsim.calibration.profile_writer import error_pair, provenance, workload_after
from rlhfsim.present.tables import CUT, REST, grid, table
from rlhfsim.present.terminal.console import Part, drawn, labelled, stacked, styled
from rlhfsim.present.words import between, decimals, error_text, fixed, plural, value_text
from rlhfsim.specs.hardware.calibrated import WorkloadMeasured
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.units import format

BOUND = 1.001
"""A value this near to the end of its interval lies at a bound."""


def report(fitted: Calibration, width: int, out: Path | None) -> Iterator[Part]:
    """Everything, top to bottom."""
    runs = plural(len(fitted.observations), "run")
    yield styled(f"{fitted.profile.title}, calibrated on {runs}", style="bold")
    yield labelled(summary(fitted))
    yield ""
    if fitted.biases:
        yield biases(fitted.biases, width)
        yield ""
    yield coefficients(fitted.coefficients, width)
    if fitted.unidentified:
        yield ""
        yield unidentified(fitted.unidentified, width)
    yield ""
    yield errors(fitted.errors, width)
    yield from (styled(f"outlier: {text}", style="yellow") for text in fitted.outliers)
    names = [run.name for run in fitted.observations]
    yield from (styled(f"note: {text}", style="yellow") for text in together(fitted.notes, names))
    yield ""
    yield labelled(ending(fitted, out))


def summary(fitted: Calibration) -> dict[str, str]:
    """The runs, what they ran on, and the error before and after."""
    origin = provenance(fitted)
    versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    names = [f"{run.name} ({run.steps})" for run in fitted.observations]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    rows = {
        "runs": f"{', '.join(names[:8])}{more}; in brackets: steps counted",
        "device": f"{origin.device}{'; ' * bool(versions)}{versions}",
        "fitted": f"{_biases_told(fitted)}{len(fitted.coefficients)} coefficients to {fitted.data} times; "
        f"{len(fitted.unidentified)} cannot be told and keep their values",
    }
    if measured := [_measured(of) for of in workload_after(fitted)]:
        rows |= {"workload": "; ".join(measured)}
    return rows | {"error": _error_line(fitted.errors)}


def _measured(of: WorkloadMeasured) -> str:
    """What a field of the workload was said to be, and what it was."""
    c = of.measured
    value, low, high, said = (format(x, c.dimension) for x in (c.value, c.low, c.high, of.stated))
    return f"{of.name} {value} ({low} to {high}) where workloads state {said}"


def _biases_told(fitted: Calibration) -> str:
    """How many biases, in front of the number of coefficients."""
    names = ", ".join(dict.fromkeys(row.framework for row in fitted.biases))
    return f"biases of {names} in {len(fitted.biases)} phases and modes, " if fitted.biases else ""


def _error_line(rows: Sequence[PhaseError]) -> str:
    pairs = [(word, error_pair(rows, step=step)) for word, step in (("step", True), ("phase", False))]
    medians = [f"{word} {error_text(p[0])} -> {error_text(p[1])}" for word, p in pairs if p is not None]
    if not medians:
        return "unknown: there is no second distinct run to test on"
    worse = [word for word, pair in pairs if pair is not None and pair[1] > pair[0]]
    warning = f"; NO BETTER in {' and '.join(worse)}" * bool(worse)
    return f"median {', '.join(medians)} (runs that the fit had not seen){warning}"


# --- coefficients ---------------------------------------------------------------------------------


def coefficients(rows: Sequence[Calibrated], width: int) -> Part:
    """What changed: value and interval before and after, and on how many times of how many runs it rests."""
    notes = ["times: medians of phases, and of what they leave of the step (rest), that depend on it"]
    ends = [row.name for row in rows if _at_end(row.after)]
    if ends:
        notes.append(f"at the end of its range: {', '.join(ends)}")
    return drawn(
        table(
            "",
            rows,
            ("coefficient", lambda row: row.name),
            (">before", lambda row: value_text(row.before)),
            (">P10-P90", lambda row: between(row.before)),
            (">after", lambda row: styled(value_text(row.after), style="bold")),
            (">P10-P90", lambda row: between(row.after)),
            (">times", lambda row: str(row.n)),
            (">runs", lambda row: str(row.runs)),
            fit={"coefficient": CUT},
            notes=notes,
        ),
        width,
    )


def biases(rows: Sequence[Known], width: int) -> Part:
    """What a framework's phases have in common: measured over priced seconds, beside the coefficients."""
    note = "factor: measured over priced seconds, beside the coefficients; P10-P90 of a run not measured"
    return drawn(
        table(
            "",
            [row for row in rows if row.mode or not row.phase],
            ("framework", lambda row: row.framework),
            ("phase", lambda row: row.phase or "any other"),
            ("engine mode", lambda row: row.mode or "any other"),
            (">factor", lambda row: styled(f"{row.factor.value:.2f}", style="bold")),
            (">P10-P90", lambda row: f"{row.factor.low:.2f}-{row.factor.high:.2f}"),
            (">runs", lambda row: str(row.runs)),
            fit={"phase": CUT, "engine mode": CUT},
            notes=[note],
        ),
        width,
    )


def _at_end(c: Coefficient) -> bool:
    """Whether the interval has no room on one side."""
    return c.high <= c.value * BOUND or c.value <= c.low * BOUND


def unidentified(rows: Sequence[Unidentified], width: int) -> Part:
    """Coefficients that keep their prior, by what keeps them from being told."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(row.reason, []).append(row.name)
    titles = ("cannot be told from these runs", "because")
    cells = ((", ".join(names), reason) for reason, names in groups.items())
    return drawn(grid(titles, cells, fit=dict.fromkeys(titles, REST)), width)


# --- errors ---------------------------------------------------------------------------------------


def errors(rows: Sequence[PhaseError], width: int) -> Part:
    """Errors of runs that the fit had not seen: by phase over all runs, and of every run's step."""
    if not rows:
        return styled("errors: no phase of these runs is predicted", style="dim")
    note = (
        "|predicted / measured - 1| of medians; after: predicted by a fit on the other runs (repeats left "
        "out together); by factor: one factor a phase from the same runs, and no fit"
    )
    return stacked(_by_phase(rows, width), styled(), _by_run(rows, width), styled(note, style="dim"))


def _by_phase(rows: Sequence[PhaseError], width: int) -> Part:
    """The median error of every phase, the step last."""

    def cells(phase: str) -> tuple[str, ...]:
        of_phase = [e for e in rows if e.phase == phase]
        before = [off(e.before_s, e.measured_s) or 0.0 for e in of_phase]
        after = [off(e.after_s, e.measured_s) or 0.0 for e in of_phase if e.after_s is not None]
        factor = [off(e.factor_s, e.measured_s) or 0.0 for e in of_phase if e.factor_s is not None]
        shares = (
            median(before),
            median(after) if after else None,
            median(factor) if factor else None,
            max(before),
            max(after, default=None),
        )
        return phase, str(len(of_phase)), *(error_text(x) for x in shares)

    phases = list(dict.fromkeys(e.phase for e in sorted(rows, key=lambda e: e.phase == STEP)))
    titles = (
        "median error of",
        ">runs",
        ">before",
        ">after",
        ">by factor",
        ">largest before",
        ">largest after",
    )
    styles = ["bold" if phase == STEP else "" for phase in phases]
    return drawn(grid(titles, map(cells, phases), fit={"median error of": CUT}, styles=styles), width)


def _by_run(rows: Sequence[PhaseError], width: int) -> Part:
    """The step of every run: measured, and predicted before and after."""
    steps = [e for e in rows if e.phase == STEP]
    digits = decimals(max((e.measured_s for e in steps), default=1.0))
    return drawn(
        table(
            "",
            steps,
            ("step of", lambda e: e.run),
            (">measured s", lambda e: fixed(e.measured_s, digits)),
            (">before s", lambda e: fixed(e.before_s, digits)),
            (">error", lambda e: error_text(off(e.before_s, e.measured_s))),
            (">after s", lambda e: fixed(e.after_s, digits)),
            (">error", lambda e: error_text(off(e.after_s, e.measured_s))),
            (">by factor", lambda e: error_text(off(e.factor_s, e.measured_s))),
            fit={"step of": CUT},
        ),
        width,
    )


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


def ending(fitted: Calibration, out: Path | None) -> dict[str, str]:
    """The file, and what to type next."""
    hardware = fitted.observations[0].plan.hardware[0]
    model = fitted.observations[0].plan.workload.model
    if out is None:
        return {"written": "nothing; add --out FILE.yaml to keep it as a profile"}
    framework = f"--framework {fitted.biases[0].framework} " if fitted.biases else ""
    return {
        "written": f"{out}: a new profile named {out.stem}; {fitted.profile.name} is as it was",
        "next": f"rlhfsim design {framework}--gpus {hardware.gpus} --model {model} --profile {out}",
    }
