"""What `design --run` answers: which plan runs which steps of a run that changes, and when it is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rlhfsim.plan import RunTarget
from rlhfsim.present import words
from rlhfsim.present.answers.odds import asked_data
from rlhfsim.present.answers.tree import (
    STEP_TIME,
    Column,
    Figure,
    Listing,
    Page,
    PageSection,
    Tile,
    TypedTable,
    hidden,
    pairs,
    section,
    table_of,
)
from rlhfsim.present.html import plots, theme
from rlhfsim.present.plan_words import hardware_text, trained
from rlhfsim.present.tables import COUNT, DURATION, ERROR, MONEY, NUMBER, PROBABILITY, SECONDS, SHARE, fields
from rlhfsim.search.requirements import shown
from rlhfsim.verdict import target_text
from rlhfsim.what_if.long_run.replanning import WORTH, PlannedStretch, RunPlan
from rlhfsim.what_if.risk.odds import Odds, asked_run

MEMORY = ("peak_memory_bytes", "capacity_bytes", "probability_out_of_memory")
SAME = 5e-5
"""Share of a run below which two runs take as long."""
SHOWN = 200
"""Steps at which the curve is drawn."""


def long_run_page(answer: RunPlan, chosen: Odds | None, fixed: Odds | None, title: str | None = None) -> Page:
    """The answer to one run; `chosen` and `fixed`: of the answer and of the best single plan."""
    run = answer.run
    return Page(
        schema="rlhfsim.long_run/1",
        title=title or run.title or f"A run of {words.plural(run.steps, 'step')}",
        subtitle=_asked(answer),
        verdict=verdict(answer, chosen),
        mark="bad" if chosen is None else "good" if chosen.meets else "warn",
        sure=tuple(_sure(answer, chosen)),
        tiles=tuple(_tiles(answer, chosen)),
        sections=tuple(_sections(answer, chosen, fixed)),
        data=_data(answer, chosen, fixed),
    )


def _asked(answer: RunPlan) -> str:
    if not answer.stretches:
        return ""
    plan = answer.stretches[0].plan
    return f"{trained(plan)}, {COUNT.shown(answer.run.steps)} steps on {hardware_text(plan)}"


def verdict(answer: RunPlan, chosen: Odds | None) -> str:
    """One sentence: one plan or several, when the run is done, at which price, how surely."""
    if chosen is None or chosen.run_s is None:
        part = answer.unfit
        assert part is not None
        why = f": {answer.shortage}" if answer.shortage else ""
        return (
            f"Nothing fits from step {COUNT.shown(part.start)} on, where responses reach "
            f"{COUNT.shown(part.stage.max)} tokens and their mean is {COUNT.shown(part.mean)}{why}."
        )
    count = len(answer.changes)
    plans = (
        "One plan runs all steps"
        if not count
        else f"{words.plural(count + 1, 'plan')} run one after the other"
    )
    cost = f" and costs {words.money(chosen.usd[1])}" if chosen.usd else ""
    kept = [
        f"{target_text(t)} is kept with a probability of {PROBABILITY.shown(t.probability)}"
        for t in targets_of(answer, chosen)
        if t.probability is not None
    ]
    return f"{plans}: the run takes {words.seconds(chosen.run_s[1])}{cost}{''.join(f'; {k}' for k in kept)}."


def targets_of(answer: RunPlan, chosen: Odds) -> tuple[RunTarget, ...]:
    """The targets of the run as a plan carries them."""
    run = asked_run([v.requirement for v in chosen.verdicts], answer.run.steps, chosen)
    return run.targets if run else ()


def _sure(answer: RunPlan, chosen: Odds | None) -> Iterator[str]:
    if chosen is None or chosen.run_s is None:
        return
    low, _, high = chosen.run_s
    yield (
        f"8 in 10 that the run takes between {words.seconds(low)} and {words.seconds(high)}: model, response "
        "lengths as far as they have a range, failures, restarts and checkpoints are drawn."
    )
    faster = "is faster" if answer.gap < SAME else f"is more than {ERROR.shown(answer.gap)} faster"
    yield f"No plan and no change of plans {faster}: every stretch has a proven best plan."


def _tiles(answer: RunPlan, chosen: Odds | None) -> Iterator[Tile]:
    if chosen is None or chosen.run_s is None:
        return
    low, middle, high = chosen.run_s
    yield Tile("Done in", middle, kind=DURATION, range=(low, high))
    if chosen.usd:
        low, middle, high = chosen.usd
        yield Tile("Cost", middle, kind=MONEY, range=(low, high))
    tightest = "the tightest stretch decides"
    yield Tile("Fits all the way", chosen.fits, kind=PROBABILITY, detail=tightest)
    yield Tile("Best plan of the start", _misfit(answer))


def _misfit(answer: RunPlan) -> str:
    step = answer.out_of_memory
    return "fits to the end" if step is None else f"runs out of memory from step {COUNT.shown(step)} on"


def _sections(answer: RunPlan, chosen: Odds | None, fixed: Odds | None) -> Iterator[PageSection]:
    if chosen is None:
        assert answer.unfit is not None
        remedies = (
            f"a lower max in the stage that starts at step {COUNT.shown(answer.unfit.stage.start)}, fewer "
            "samples there, or more GPUs",
            "rlhfsim design with --response-len of that stage says which plan comes nearest, and what would "
            "fit",
        )
        yield section("unfit", "What would fit", Listing(remedies))
        return
    if chosen.verdicts:
        yield section("targets", "Targets", _targets(chosen))
    yield section("plans", "One plan or several", Listing(tuple(_choice(answer, chosen, fixed))))
    yield section("run", "The run", lengths_figure(answer), steps_figure(answer), stretches_table(answer))
    yield section("assumed", "What is assumed", _assumed(answer), appendix=True)


def _targets(chosen: Odds) -> TypedTable:
    return table_of(
        "Targets of the run",
        chosen.verdicts,
        Column("target", "requirement.text"),
        Column("", lambda v: "met" if v.met else "MISSED"),
        Column("without failures", lambda v: shown(v.requirement, v.actual)),
        Column("probability", kind=PROBABILITY),
    )


def _choice(answer: RunPlan, chosen: Odds, fixed: Odds | None) -> Iterator[str]:
    """How the plans were chosen, what another one costs, and what a single one would."""
    run = answer.run
    parts = (("checkpoint", run.checkpoint), ("restart", run.restart), ("warm-up", run.warm_up))
    cost = ", ".join(f"{name} {SECONDS.shown(c.value)}" for name, c in parts)
    for steps, plan in _pieces(answer):
        yield f"steps {steps}: {plan}"
    if answer.changes:
        yield f"each change of plan costs {words.seconds(run.replan_s)} ({cost})"
    if answer.fixed_s is None:
        yield "no single plan fits every step"
    elif answer.changes:
        saved = answer.fixed_s - answer.work_s
        yield (
            f"the best single plan, {words.plan_text(answer.fixed[0].plan)}, takes {words.seconds(saved)} "
            f"longer ({words.signed(saved / answer.work_s, 1)})"
        )
    else:
        yield (
            f"changes of plan ({words.seconds(run.replan_s)} each: {cost}) save less than "
            f"{words.percent(WORTH)} of the run each"
        )
    yield f"the plan that is best at the start {_misfit(answer)}"


def _pieces(answer: RunPlan) -> Iterator[tuple[str, str]]:
    """Steps of each plan, and the plan; a draft that only ages makes no other one."""
    starts = (answer.stretches[0].stretch.start, *answer.changes)
    plans = {part.stretch.start: part.plan for part in answer.stretches}
    for start, end in zip(starts, (*answer.changes, answer.stretches[-1].stretch.end), strict=True):
        yield f"{COUNT.shown(start)} to {COUNT.shown(end)}", words.plan_text(plans[start])


def stretches_table(answer: RunPlan) -> TypedTable:
    """Every stretch with its lengths, its batch and its step."""
    changed = set(answer.changes)
    return table_of(
        "Stretches of the run",
        answer.stretches,
        Column("from step", "stretch.start", COUNT),
        *hidden("stretch.end"),
        Column("mean tokens", "stretch.mean", COUNT),
        *hidden("stretch.low", "stretch.high"),
        Column("cut at", "stretch.stage.max", COUNT),
        *hidden("plan.workload.prompts", "plan.workload.samples"),
        Column(None, lambda p: words.plan_text(p.plan), key="plan"),
        Column("responses", lambda p: p.plan.workload.num_sequences, COUNT),
        STEP_TIME,
        Column("evaluations", kind=COUNT),
        *hidden("evaluation_s"),
        Column("all of it", "seconds", DURATION),
        Column("fullest GPU", lambda p: words.full(p.plan.prediction), SHARE),
        *hidden(*(f"plan.prediction.{name}" for name in MEMORY)),
        Column("", lambda p: "another plan" if p.stretch.start in changed else ""),
        name="stretches",
    )


# --- figures ------------------------------------------------------------------------------------------


def _changes(answer: RunPlan) -> list[dict[str, Any]]:
    return [theme.upright(step, "red", "dash") for step in answer.changes]


def _where(answer: RunPlan) -> str:
    if not answer.changes:
        return "One plan runs all steps."
    return "A dashed upright: another plan runs from there on."


def lengths_figure(answer: RunPlan) -> Figure:
    """Mean lengths with their range, the limit of each stage, and where the plan changes."""
    run, curve = answer.run, answer.curve
    steps = np.linspace(0, run.steps, SHOWN)
    limits = [
        (s, stage.max)
        for stage, end in zip(run.stages, [*(s.start for s in run.stages[1:]), run.steps], strict=True)
        for s in (stage.start, end)
    ]
    mean, low, high = (curve.at(steps, name) for name in ("mean", "low", "high"))
    line = {"mode": "lines"}
    band = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    data = [
        plots.points("P90", steps, high, **band),
        plots.points(
            "P10 to P90",
            steps,
            low,
            **band | {"fill": "tonexty", "fillcolor": "rgba(86,180,233,0.3)", "showlegend": True},
        ),
        plots.points("mean response", steps, mean, **line, line={"color": "blue", "width": 3}),
        plots.points(
            "longest response",
            [s for s, _ in limits],
            [m for _, m in limits],
            **line,
            line={"color": "orange", "dash": "dot"},
        ),
    ]
    longest, grown = (
        run.stages[-1].max,
        f"Mean responses go from {COUNT.shown(mean[0])} to {COUNT.shown(mean[-1])} tokens",
    )
    return Figure(
        "lengths",
        f"{grown}, cut at {COUNT.shown(longest)} in the end",
        alt="Mean response length over steps, with the limit of each stage",
        how=f"The line is the mean of a step, the band its range, the dots the limit. {_where(answer)}",
        plot=plots.spec(data, theme.layout(height=360, x="step", y="tokens", shapes=_changes(answer))),
        table=stretches_table(answer),
    )


def steps_figure(answer: RunPlan) -> Figure:
    """Seconds of a step over the run: the plans that run, and the best single one."""
    data = [_step_line("the plans that run", answer.stretches, {"color": "blue", "width": 3})]
    if answer.fixed and answer.changes:
        data.append(_step_line("the best single plan", answer.fixed, {"color": "grey", "dash": "dot"}))
    first, last = (p.plan.prediction.step_s for p in (answer.stretches[0], answer.stretches[-1]))
    return Figure(
        "steps",
        f"A step takes {words.seconds(first)} at the start and {words.seconds(last)} at the end",
        alt="Seconds of a step over the steps of the run",
        how=f"Each level is a stretch that is priced at its mean lengths. {_where(answer)}",
        plot=plots.spec(
            data, theme.layout(height=320, x="step", y="seconds per step", shapes=_changes(answer))
        ),
        table=stretches_table(answer),
    )


def _step_line(name: str, parts: Sequence[PlannedStretch], line: dict[str, Any]) -> plots.Trace:
    x = [s for p in parts for s in (p.stretch.start, p.stretch.end)]
    y = [p.plan.prediction.step_s for p in parts for _ in range(2)]
    return plots.points(name, x, y, mode="lines", line=line)


# --- what is assumed, and JSON ------------------------------------------------------------------------


def _assumed(answer: RunPlan) -> TypedTable:
    run = answer.run
    rate = answer.request.cluster.node_group.profile.coefficient("mtbf_per_gpu")
    figures = [
        ("a checkpoint blocks the run for", run.checkpoint),
        ("from a failure until the run goes on", run.restart),
        ("warm-up of a new plan", run.warm_up),
        ("a GPU fails once in", rate),
    ]
    known = [(name, f"{words.value_text(c)} ({words.between(c)}): {c.source}") for name, c in figures]
    return pairs(
        "Figures that the steps do not say",
        [*known, ("sigma of the lengths of a step", NUMBER.shown(run.sigma))],
    )


def _data(answer: RunPlan, chosen: Odds | None, fixed: Odds | None) -> dict[str, Any]:
    return {
        "verdict": verdict(answer, chosen),
        **fields(answer, "run.steps", "changes", "work_s", "fixed_s", "bound_s", "out_of_memory", "shortage"),
        **fields(answer.run, "replan_s"),
        **asked_data(chosen),
        "fixed": asked_data(fixed)["odds"],
        "stretches": stretches_table(answer).records,
    }
