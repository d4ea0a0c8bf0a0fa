"""What `rlhfsim compare` answers: a run next to its plan, phase by phase, and what the gap comes from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhfsim.calibration.comparison.limits import phase_times
from rlhfsim.calibration.comparison.side_by_side import SideBySide
from rlhfsim.interchange.rlhfsim.metrics import read_metrics
from rlhfsim.present import assumptions as assumed
from rlhfsim.present import findings, reproduce, words
from rlhfsim.present.answers.doctor import risk_text, said
from rlhfsim.present.answers.tree import (
    Block,
    Code,
    Column,
    Listing,
    Mark,
    Page,
    PageSection,
    Tile,
    TypedTable,
    pairs,
    section,
    table_of,
)
from rlhfsim.present.basis import basis, cores
from rlhfsim.present.figures import iteration as figures_iteration
from rlhfsim.present.figures import run as figures_run
from rlhfsim.present.figures import steps as figures_steps
from rlhfsim.present.figures import trust as figures_trust
from rlhfsim.present.figures.picture import picture
from rlhfsim.present.pages.headline import heading
from rlhfsim.present.pages.learnt import learnt
from rlhfsim.present.plan_words import header_rows
from rlhfsim.present.tables import DIFFERENCE, FIGURE, NUMBER, QUANTITY, RATIO, REST, SECONDS, fields
from rlhfsim.what_if.doctor.diagnosis import Diagnosis

REWARD = "reward/mean"
"""Metric that is drawn next to the seconds of steps."""


def run_page(
    answer: SideBySide,
    diagnosis: Diagnosis | None = None,
    *,
    commands: str = "",
    title: str | None = None,
    trace: Path | None = None,
) -> Page:
    """One run against its plan; with `commands` that repeat it also what supports it."""
    run = answer.run
    day = f", {run.date}" if run.date else ""
    return Page(
        title=title or f"{heading(answer.plan)}: a run against its prediction",
        subtitle=f"Run {run.name} on {run.device}{day}: {words.plural(run.steps, 'step')} "
        f"counted{cores(answer.plan)}",
        verdict=verdict(answer),
        mark=mark(answer),
        sure=tuple(_sure(answer)),
        tiles=tuple(_tiles(answer, trace)),
        sections=(*_sections(answer, diagnosis), *(_behind(answer, commands) if commands else ())),
        version=answer.trace.rlhfsim_version,
        schema="rlhfsim.compare/1",
        data=_data(answer, diagnosis, trace),
    )


def mark(answer: SideBySide) -> Mark:
    """Whether the step came out inside its interval."""
    marks: dict[bool | None, Mark] = {True: "good", False: "warn", None: "plain"}
    return marks[figures_run.inside(answer.found.step)]


def verdict(answer: SideBySide) -> str:
    """One sentence on how right the prediction was."""
    step, gap = answer.found.step, answer.gap
    if step.measured_s is None or step.predicted_s is None:
        return "The run has no step that was timed, so only its phases can be compared."
    against = findings.against(step.ratio or 1.0, figures_run.inside(step))
    cause = f" {findings.gap(gap.parts, gap.predicted_s, gap.measured_s)}." if gap else ""
    return (
        f"A step took {words.seconds(step.measured_s)} where {words.seconds(step.predicted_s)} were "
        f"predicted: {against}.{cause}"
    )


def _sure(answer: SideBySide) -> Iterator[str]:
    step = answer.found.step
    yield (
        f"The median of {step.steps} counted steps; the plan was made before the run and nothing of the run "
        "entered it."
    )
    if step.ratio_low is not None and step.ratio_high is not None:
        yield (
            f"8 in 10 that measured over predicted lies between {RATIO.shown(step.ratio_low)} and "
            f"{RATIO.shown(step.ratio_high)}, from the scatter of the steps."
        )


def _tiles(answer: SideBySide, trace: Path | None) -> Iterator[Tile]:
    step, reward = answer.found.step, rewards(answer)
    if step.measured_s is not None and step.predicted_s is not None:
        late = f"90th percentile {SECONDS.shown(step.p90_s or step.measured_s)}"
        yield Tile("Measured step", step.measured_s, kind=SECONDS, detail=late, mark=mark(answer))
        ends = (step.low_s or 0.0, step.high_s or 0.0)
        yield Tile("Predicted step", step.predicted_s, kind=SECONDS, range=ends)
        yield Tile("Measured / predicted", step.ratio, kind=RATIO, detail="1 is exact")
    if len(reward) > 1:
        first, *_, last = reward.values()
        yield Tile(
            "Mean reward", last, kind=NUMBER, detail=f"in the last step; {NUMBER.shown(first)} in the first"
        )
    if trace is not None:
        yield Tile("Trace", str(trace), "open it at https://ui.perfetto.dev")


def rewards(answer: SideBySide) -> dict[int, float]:
    """Mean reward by step, where the run logged it; lines that are not whole are left out."""
    if answer.run.folder is None:
        return {}
    rows, _ = read_metrics(answer.run.folder)
    return {row["step"]: row[REWARD] for row in rows if math.isfinite(row.get(REWARD, math.nan))}


def _sections(answer: SideBySide, diagnosis: Diagnosis | None) -> Iterator[PageSection]:
    timed = answer.found.step.measured_s is not None
    yield section("ran", "What ran", pairs("The plan", header_rows(answer.plan).items()))
    if diagnosis is not None:
        yield section("where", "Where the time went", _where(answer))
        if changes := tuple(_changes(answer, diagnosis)):
            heading = "What to change, each on top of those above it"
            yield section("keys", heading, Listing(changes))
    if timed:
        yield section(
            "time", "One iteration, predicted and measured", figures_run.timeline(answer), asked=True
        )
    none = Listing((), "No phase was both predicted and timed")
    yield section("by-phase", "Phase by phase", figures_run.phases(answer) or none)
    if answer.gap is not None:
        yield section("why", "Where the difference comes from", figures_steps.gap(answer.gap))
    memory = figures_steps.memory(answer.memory) or Listing(("The run recorded no memory",))
    yield section("bytes", "Memory", memory)
    yield section("amounts", "Tokens and bytes", _amounts(answer))
    if timed:
        steps = figures_steps.steps(answer, rewards(answer))
        yield section("over-time", "Step after step", steps, asked=True)
    if found := tuple(learnt(answer.run.folder)):
        yield section("learnt", "What it learnt", *found, asked=True)
    if answer.notes:
        yield section("notes", "Notes", Listing(answer.notes, mark="warn"))


def _where(answer: SideBySide) -> TypedTable:
    """Where the measured step went: the GPUs' part, the framework's, what neither explains."""
    return table_of(
        "Where the time went",
        phase_times(answer.plan, answer.run, answer.found.rows),
        Column("phase", "name"),
        Column("measured (s)", "measured_s", FIGURE),
        Column("GPU", "gpu_s", FIGURE),
        Column("framework", "framework_s", FIGURE),
        Column("beyond", "beyond_s", DIFFERENCE),
        Column("how", "why", fit=REST),
        name="where",
        notes=(
            "GPU: predicted for arithmetic, memory and links; framework: the rest of the prediction "
            "(launches, host, PCIe, waiting for the longest); beyond: measured and not predicted",
        ),
    )


def _changes(answer: SideBySide, diagnosis: Diagnosis) -> Iterator[str]:
    """What keys would have saved of the measured step, in proportion to the predicted one."""
    measured, first = answer.found.step.measured_s, diagnosis.fixes[:1]
    if measured is None:
        return
    start = before = first[0].judged.step_s if first else diagnosis.judged.step_s
    known = first[0].keys if first else {}
    for change in diagnosis.faster:
        after = change.judged.step_s
        saved, share = SECONDS.shown(measured * (before - after) / start), words.signed(after / before - 1)
        keys = ", ".join(said(key, value) for key, value in change.keys.items() if key not in known)
        risk = risk_text(change.judged)
        yield f"saves about {saved} of the step ({share}), risk of running out {risk}: {keys}"
        before, known = after, change.keys


def _amounts(answer: SideBySide) -> TypedTable:
    return table_of(
        "Tokens and bytes",
        answer.found.amounts,
        Column("tokens and bytes", "name"),
        Column("predicted", lambda a: _quantity(a.predicted, a.unit), QUANTITY),
        Column("measured", lambda a: _quantity(a.measured, a.unit), QUANTITY),
        Column("ratio", lambda a: a.measured / a.predicted if a.measured and a.predicted else None, RATIO),
    )


def _quantity(value: float | None, unit: str) -> tuple[float, str] | None:
    return None if value is None else (value, "byte" if unit == "byte" else "token")


def _behind(answer: SideBySide, commands: str) -> Iterator[PageSection]:
    known = basis(answer.plan)
    plan = picture(answer.plan), *figures_iteration.memory(known)
    yield section("plan", "The plan that ran", *plan, appendix=True)
    elsewhere = "How right such predictions were elsewhere"
    yield section("calibration", elsewhere, figures_trust.scatter(), appendix=True)
    tables: tuple[Block, ...] = assumed.unknowns(known), *assumed.tables(known)
    yield section("assumptions", "Assumptions and sources", *tables, appendix=True)
    yield section(
        "reproduce",
        "Reproduce",
        Code("Commands", commands),
        reproduce.hashes(answer.plan),
        pairs(
            f"Libraries of the run, on {answer.run.device}",
            answer.run.versions.items(),
            ("library", "version"),
        ),
        appendix=True,
    )


def _data(answer: SideBySide, diagnosis: Diagnosis | None, trace: Path | None) -> dict[str, Any]:
    """What JSON says; schema in docs/compare.md."""
    compared, run = answer.found, answer.run
    changes = [
        {"keys": dict(change.keys), "predicted_step_s": change.judged.step_s}
        for change in (diagnosis.faster if diagnosis else ())
    ]
    return {
        "plan_hash": answer.plan.input_hash,
        **fields(run, run="name", device="device", date="date", steps="steps"),
        "step": asdict(compared.step),
        "step_seconds": run.step_s,
        "phases": [asdict(row) for row in compared.rows],
        **fields(compared, not_in_the_run="missing", not_in_the_plan="unplanned"),
        "gap": asdict(answer.gap) if answer.gap else None,
        "memory": [{**asdict(held), "ratio": held.ratio} for held in answer.memory],
        "amounts": [asdict(amount) for amount in compared.amounts],
        **fields(answer, "notes"),
        "chrome_trace": str(trace) if trace else None,
        **({"changes": changes} if diagnosis else {}),
    }
