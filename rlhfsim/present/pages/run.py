"""The page of a run beside its plan: verdict, time axis, phases, the gap, memory, steps, the plan itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rlhfsim.calibration.comparison.side_by_side import SideBySide
from rlhfsim.calibration.observation import METRICS
from rlhfsim.present import assumptions as assumed
from rlhfsim.present import findings, reproduce
from rlhfsim.present.basis import basis, cores
from rlhfsim.present.figures import memory as figures_memory
from rlhfsim.present.figures import run as figures_run
from rlhfsim.present.figures import steps as figures_steps
from rlhfsim.present.figures import trust as figures_trust
from rlhfsim.present.figures.picture import picture
from rlhfsim.present.html import words
from rlhfsim.present.html.content import Block, Code, Listing, Mark, Page, Section, Table, Tile, number
from rlhfsim.present.html.content import words as cell
from rlhfsim.present.pages.plan import heading
from rlhfsim.specs.loading import read_text

REWARD = "reward/mean"
"""Metric that is drawn beside the seconds of steps."""


def run_page(answer: SideBySide, *, commands: str, title: str | None = None) -> Page:
    """The page of one run against its plan."""
    run = answer.run
    return Page(
        title=title or f"{heading(answer.plan)}: a run against its prediction",
        subtitle=f"Run {run.name} on {run.device}: {run.steps} step{'s' * (run.steps != 1)} counted{cores(answer.plan)}",
        verdict=verdict(answer),
        mark=mark(answer),
        sure=tuple(_sure(answer)),
        tiles=tuple(_tiles(answer)),
        sections=tuple(_sections(answer, commands)),
        version=answer.trace.rlhfsim_version,
    )


def mark(answer: SideBySide) -> Mark:
    """Whether the step came out inside its interval."""
    return {True: "good", False: "warn", None: "plain"}[figures_run.inside(answer.found.step)]  # type: ignore[return-value]


def verdict(answer: SideBySide) -> str:
    """One sentence on how right the prediction was."""
    step = answer.found.step
    if step.measured_s is None or step.predicted_s is None:
        return "The run has no step that was timed, so only its phases can be compared."
    told = f"A step took {words.seconds(step.measured_s)} where {words.seconds(step.predicted_s)} were predicted: {findings.against(step.ratio or 1.0, figures_run.inside(step))}"
    return (
        f"{told}. {findings.gap(answer.gap.parts, answer.gap.predicted_s, answer.gap.measured_s)}."
        if answer.gap
        else f"{told}."
    )


def _sure(answer: SideBySide) -> Iterator[str]:
    step = answer.found.step
    yield f"The median of {step.steps} counted steps; the plan was made before the run and nothing of the run entered it."
    if step.ratio_low is not None and step.ratio_high is not None:
        yield f"8 in 10 that measured over predicted lies between {step.ratio_low:.2f} and {step.ratio_high:.2f}, from the scatter of the steps."
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
    path = (answer.run.folder or Path()) / METRICS
    if answer.run.folder is None or not path.is_file():
        return {}
    found: dict[int, float] = {}
    for line in read_text(path).splitlines():
        try:
            row = json.loads(line)
            found[int(row["step"])] = float(row[REWARD])
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _sections(answer: SideBySide, commands: str) -> Iterator[Section]:
    known = basis(answer.plan)
    timed = answer.found.step.measured_s is not None
    if timed:
        yield Section(
            key="time",
            heading="One iteration, predicted and measured",
            blocks=(figures_run.timeline(answer),),
        )
    yield Section(key="by-phase", heading="Phase by phase", blocks=tuple(_phases(answer)))
    if answer.gap is not None:
        yield Section(
            key="why", heading="Where the difference comes from", blocks=(figures_steps.gap(answer.gap),)
        )
    yield Section(key="bytes", heading="Memory and amounts", blocks=tuple(_memory(answer)))
    if timed:
        yield Section(
            key="over-time", heading="Step after step", blocks=(figures_steps.steps(answer, rewards(answer)),)
        )
    yield Section(
        key="plan", heading="The plan that ran", blocks=(picture(answer.plan), *figures_memory.memory(known))
    )
    yield Section(
        key="calibration",
        heading="How right such predictions were elsewhere",
        blocks=(figures_trust.scatter(),),
    )
    yield Section(
        key="assumptions",
        heading="Assumptions and sources",
        blocks=(assumed.unknowns(known), *assumed.tables(known)),
    )
    yield Section(
        key="reproduce",
        heading="Reproduce",
        blocks=(Code(title="Commands", text=commands), reproduce.hashes(answer.plan), _versions(answer)),
    )


def _phases(answer: SideBySide) -> Iterator[Block]:
    figure = figures_run.phases(answer)
    yield figure or Listing(title="No phase was both predicted and timed", items=())
    strangers = (
        [f"planned, but not timed in the run: {words.listed(list(answer.found.missing))}"]
        if answer.found.missing
        else []
    )
    strangers += (
        [f"in the run, but not planned: {words.listed(list(answer.found.unplanned))}"]
        if answer.found.unplanned
        else []
    )
    if strangers:
        yield Listing(title="Only on one side", items=tuple(words.capital(s) for s in strangers))


def _memory(answer: SideBySide) -> Iterator[Block]:
    yield figures_steps.memory(answer.memory) or Listing(title="The run recorded no memory", items=())
    rows = tuple(
        (
            cell(f"{a.name} ({a.unit})"),
            number(a.predicted, "-" if a.predicted is None else f"{a.predicted:,.6g}"),
            number(a.measured, "-" if a.measured is None else f"{a.measured:,.6g}"),
        )
        for a in answer.found.amounts
    )
    yield Table(caption="Tokens and bytes", head=("amount", "predicted", "measured"), rows=rows)


def _versions(answer: SideBySide) -> Table:
    rows = tuple((cell(name), cell(version)) for name, version in answer.run.versions.items())
    return Table(
        caption=f"Libraries of the run, on {answer.run.device}", head=("library", "version"), rows=rows
    )
