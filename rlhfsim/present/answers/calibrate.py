"""What `rlhfsim calibrate` answers: runs, coefficients, what stays unknown, errors on unseen runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rlhfsim.calibration.biases import Known
from rlhfsim.calibration.fit import Calibrated, Calibration
from rlhfsim.calibration.identify import Unidentified
from rlhfsim.calibration.left_out import PhaseError, off
from rlhfsim.calibration.predict import STEP
from rlhfsim.calibration.profile_writer import error_pair, provenance, workload_after
from rlhfsim.present.answers.tree import Block, Column, Listing, Page, TypedTable, answer, facts, table_of
from rlhfsim.present.tables import (
    COEFFICIENT,
    COEFFICIENT_ENDS,
    COUNT,
    CUT,
    ENDS,
    ERROR,
    FIGURE,
    LIST,
    QUANTITY,
    RATIO,
    REST,
    TEXT,
    fields,
)
from rlhfsim.present.words import error_text, plural
from rlhfsim.specs.hardware.calibrated import WorkloadMeasured
from rlhfsim.specs.hardware.profiles import profile_hash
from rlhfsim.specs.quantities import Coefficient

BOUND = 1.001
"""A value this near to the end of its interval lies at a bound."""


ANY_OTHER = TEXT.where("any other")
ERRORS = {"before_s": "before", "after_s": "after", "factor_s": "by factor"}
"""Predicted seconds of a phase -> title of their error."""


def calibrate_page(fitted: Calibration, out: Path | None) -> Page:
    """Everything, top to bottom."""
    runs = [run.name for run in fitted.observations]
    told = (*(f"outlier: {text}" for text in fitted.outliers), *together(fitted.notes, runs))
    return answer(
        "rlhfsim.calibrate/1",
        biases(fitted.biases) if fitted.biases else None,
        coefficients(fitted.coefficients),
        unidentified(fitted.unidentified) if fitted.unidentified else None,
        *errors(fitted.errors),
        Listing(told, mark="warn"),
        title=f"{fitted.profile.title}, calibrated on {plural(len(runs), 'run')}",
        tiles=facts({**summary(fitted), **ending(fitted, out)}),
        data=_data(fitted, out),
    )


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
    value, low, high, said = (QUANTITY.shown((x, c.dimension)) for x in (c.value, c.low, c.high, of.stated))
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


def coefficients(rows: Sequence[Calibrated]) -> TypedTable:
    """What changed: value and interval before and after, and on how many times of how many runs it rests."""
    ends = [
        row.name
        for row in rows
        if row.after.high <= row.after.value * BOUND or row.after.value <= row.after.low * BOUND
    ]
    return table_of(
        "Coefficients",
        rows,
        Column("coefficient", "name", fit=CUT),
        Column("before", kind=COEFFICIENT),
        Column("P10-P90", "before", COEFFICIENT_ENDS),
        Column("after", kind=COEFFICIENT),
        Column("P10-P90", "after", COEFFICIENT_ENDS),
        Column("times", "n", COUNT),
        Column("runs", kind=COUNT),
        notes=(
            "times: medians of phases, and of what they leave of the step (rest), that depend on it",
            *([f"at the end of its range: {', '.join(ends)}"] if ends else []),
        ),
    )


def biases(rows: Sequence[Known]) -> TypedTable:
    """What a framework's phases have in common: measured over priced seconds, on top of the coefficients."""
    return table_of(
        "Biases",
        [row for row in rows if row.mode or not row.phase],
        Column("framework"),
        Column("phase", kind=ANY_OTHER, fit=CUT),
        Column("engine mode", "mode", ANY_OTHER, fit=CUT),
        Column("factor", "factor.value", RATIO),
        Column("P10-P90", lambda row: (row.factor.low, row.factor.high), ENDS),
        Column("runs", kind=COUNT),
        notes=(
            "factor: measured over priced seconds, beside the coefficients; P10-P90 of a run not measured",
        ),
    )


def unidentified(rows: Sequence[Unidentified]) -> TypedTable:
    """Coefficients that keep their prior, by what keeps them from being told."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(row.reason, []).append(row.name)
    return table_of(
        "Unknown",
        groups.items(),
        Column("cannot be told from these runs", 1, LIST, fit=REST),
        Column("because", 0, fit=REST),
    )


# --- errors ---------------------------------------------------------------------------------------


def errors(rows: Sequence[PhaseError]) -> Iterator[Block]:
    """Errors of runs that the fit had not seen: by phase over all runs, and of every run's step."""
    if not rows:
        yield Listing(("errors: no phase of these runs is predicted",))
        return
    phases = list(dict.fromkeys(e.phase for e in sorted(rows, key=lambda e: e.phase == STEP)))
    yield table_of(
        "Errors by phase",
        [[e for e in rows if e.phase == phase] for phase in phases],
        Column("median error of", "0.phase", fit=CUT),
        Column("runs", len, COUNT),
        *(Column(title, partial(_over, median, name), ERROR) for name, title in ERRORS.items()),
        Column("largest before", partial(_over, max, "before_s"), ERROR),
        Column("largest after", partial(_over, max, "after_s"), ERROR),
        style=lambda of: "bold" * (of[0].phase == STEP),
    )
    (before, after, factor) = (Column(title, partial(_off, name), ERROR) for name, title in ERRORS.items())
    yield table_of(
        "Steps of the runs",
        [e for e in rows if e.phase == STEP],
        Column("step of", "run", fit=CUT),
        Column("measured s", "measured_s", FIGURE),
        Column("before s", "before_s", FIGURE),
        before._replace(title="error"),
        Column("after s", "after_s", FIGURE),
        after._replace(title="error"),
        factor,
        notes=(
            "|predicted / measured - 1| of medians; after: predicted by a fit on the other runs (repeats "
            "left out together); by factor: one factor a phase from the same runs, and no fit",
        ),
    )


def _off(name: str, e: PhaseError) -> float | None:
    return off(getattr(e, name), e.measured_s)


def _over(fold: Callable[[list[float]], float], name: str, of: Sequence[PhaseError]) -> float | None:
    """Median or largest error of a phase over the runs; None where none is known."""
    known = [_off(name, e) or 0.0 for e in of if getattr(e, name) is not None]
    return fold(known) if known else None


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


def _data(fitted: Calibration, out: Path | None) -> dict[str, Any]:
    """What JSON says; schema in docs/calibration.md."""
    origin = provenance(fitted)
    of_run = ("name", "device", "date", "steps", "prompt_tokens", "response_tokens")
    return {
        "profile": fitted.profile.name,
        "profile_hash": profile_hash(fitted.profile),
        "runs": [
            fields(run, "name", plan_hash="plan.input_hash") | fields(run, *of_run)
            for run in fitted.observations
        ],
        **fields(fitted, "data"),
        "coefficients": [
            {
                **fields(c, "name", "before.dimension"),
                "before": _value(c.before),
                "after": _value(c.after),
                **fields(c, "n", "runs"),
            }
            for c in fitted.coefficients
        ],
        "biases": [asdict(b) | {"factor": _value(b.factor)} for b in fitted.biases],
        "workload": [
            fields(of, "name", "stated") | {"measured": _value(of.measured)} for of in workload_after(fitted)
        ],
        "unidentified": [asdict(u) for u in fitted.unidentified],
        "phase_error": error_pair(fitted.errors, step=False),
        "step_error": error_pair(fitted.errors, step=True),
        "errors": [
            {
                **asdict(e),
                "before": off(e.before_s, e.measured_s),
                "after": off(e.after_s, e.measured_s),
                "by_factor": off(e.factor_s, e.measured_s),
            }
            for e in fitted.errors
        ],
        **fields(fitted, "mismatch"),
        **fields(origin, "device", "interconnect", "versions"),
        **fields(fitted, "outliers", "notes"),
        "out": None if out is None else str(out),
    }


def _value(c: Coefficient) -> dict[str, float]:
    return fields(c, "value", "low", "high")
