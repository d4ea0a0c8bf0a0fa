"""The page of a run beside its plan: verdict, time axis, phases, the gap, memory, steps, the plan itself."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlhfsim.calibration.comparison.side_by_side import SideBySide
from rlhfsim.frameworks.rlhfsim.run_folder import read_metrics
from rlhfsim.present import assumptions as assumed
from rlhfsim.present import findings, reproduce, words
from rlhfsim.present.answers.kinds import FIGURE
from rlhfsim.present.answers.tree import (
    Block,
    Code,
    Column,
    Listing,
    Mark,
    Page,
    PageSection,
    Tile,
    pairs,
    section,
    table_of,
)
from rlhfsim.present.basis import basis, cores
from rlhfsim.present.figures import memory as figures_memory
from rlhfsim.present.figures import run as figures_run
from rlhfsim.present.figures import steps as figures_steps
from rlhfsim.present.figures import trust as figures_trust
from rlhfsim.present.figures.picture import picture
from rlhfsim.present.pages.learnt import learnt
from rlhfsim.present.pages.plan import heading

REWARD = "reward/mean"
"""Metric that is drawn beside the seconds of steps."""


def run_page(answer: SideBySide, *, commands: str, title: str | None = None) -> Page:
    """The page of one run against its plan."""
    run = answer.run
    return Page(
        title=title or f"{heading(answer.plan)}: a run against its prediction",
        subtitle=f"Run {run.name} on {run.device}: {words.plural(run.steps, 'step')} "
        f"counted{cores(answer.plan)}",
        verdict=verdict(answer),
        mark=mark(answer),
        sure=tuple(_sure(answer)),
        tiles=tuple(_tiles(answer)),
        sections=tuple(_sections(answer, commands)),
        version=answer.trace.rlhfsim_version,
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
        "predicted: "
        f"{against}.{cause}"
    )


def _sure(answer: SideBySide) -> Iterator[str]:
    step = answer.found.step
    yield (
        f"The median of {step.steps} counted steps; the plan was made before the run and nothing of the run "
        "entered it."
    )
    if step.ratio_low is not None and step.ratio_high is not None:
        yield (
            f"8 in 10 that measured over predicted lies between {step.ratio_low:.2f} and "
            f"{step.ratio_high:.2f}, "
            "from the scatter of the steps."
        )
    yield from answer.notes


def _tiles(answer: SideBySide) -> Iterator[Tile]:
    step, reward = answer.found.step, rewards(answer)
    if step.measured_s is not None and step.predicted_s is not None:
        yield Tile(
            label="Measured step",
            value=words.seconds(step.measured_s),
            detail=f"90th percentile {words.seconds(step.p90_s or step.measured_s)}",
            mark=mark(answer),
        )
        yield Tile(
            label="Predicted step",
            value=words.seconds(step.predicted_s),
            detail=f"P10 to P90: {words.seconds(step.low_s or 0.0)} to {words.seconds(step.high_s or 0.0)}",
        )
        yield Tile(label="Measured / predicted", value=f"{step.ratio:.2f}", detail="1 is exact")
    if len(reward) > 1:
        first, *_, last = reward.values()
        yield Tile(
            label="Mean reward", value=f"{last:.3g}", detail=f"in the last step; {first:.3g} in the first"
        )


def rewards(answer: SideBySide) -> dict[int, float]:
    """Mean reward by step, where the run logged it; lines that are not whole are left out."""
    if answer.run.folder is None:
        return {}
    rows, _ = read_metrics(answer.run.folder)
    return {row["step"]: row[REWARD] for row in rows if math.isfinite(row.get(REWARD, math.nan))}


def _sections(answer: SideBySide, commands: str) -> Iterator[PageSection]:
    known = basis(answer.plan)
    timed = answer.found.step.measured_s is not None
    if timed:
        yield section("time", "One iteration, predicted and measured", figures_run.timeline(answer))
    yield section("by-phase", "Phase by phase", *_phases(answer))
    if answer.gap is not None:
        yield section("why", "Where the difference comes from", figures_steps.gap(answer.gap))
    yield section("bytes", "Memory and amounts", *_memory(answer))
    if timed:
        yield section("over-time", "Step after step", figures_steps.steps(answer, rewards(answer)))
    if found := tuple(learnt(answer.run.folder)):
        yield section("learnt", "What it learnt", *found)
    plan = picture(answer.plan), *figures_memory.memory(known)
    yield section("plan", "The plan that ran", *plan, appendix=True)
    elsewhere = "How right such predictions were elsewhere"
    yield section("calibration", elsewhere, figures_trust.scatter(), appendix=True)
    tables: tuple[Block, ...] = assumed.unknowns(known), *assumed.tables(known)
    yield section("assumptions", "Assumptions and sources", *tables, appendix=True)
    yield section(
        "reproduce",
        "Reproduce",
        Code(title="Commands", text=commands),
        reproduce.hashes(answer.plan),
        pairs(
            f"Libraries of the run, on {answer.run.device}",
            answer.run.versions.items(),
            ("library", "version"),
        ),
        appendix=True,
    )


def _phases(answer: SideBySide) -> Iterator[Block]:
    figure = figures_run.phases(answer)
    yield figure or Listing(title="No phase was both predicted and timed", items=())
    sides = (
        ("Planned, but not timed in the run", answer.found.missing),
        ("In the run, but not planned", answer.found.unplanned),
    )
    strangers = tuple(f"{side}: {words.listed(list(names))}" for side, names in sides if names)
    if strangers:
        yield Listing(title="Only on one side", items=strangers)


def _memory(answer: SideBySide) -> Iterator[Block]:
    yield figures_steps.memory(answer.memory) or Listing(title="The run recorded no memory", items=())
    yield table_of(
        "Tokens and bytes",
        answer.found.amounts,
        Column("amount", lambda a: f"{a.name} ({a.unit})"),
        Column("predicted", kind=FIGURE),
        Column("measured", kind=FIGURE),
    )
