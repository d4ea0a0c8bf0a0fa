"""What `design --objective time-to-reward` answers: schedules by the time until a reward is reached."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.present import words
from rlhfsim.present.answers.tree import (
    STEP_TIME,
    Column,
    Figure,
    Page,
    PageSection,
    TypedTable,
    pairs,
    section,
    table_of,
)
from rlhfsim.present.html import plots, theme
from rlhfsim.present.tables import COUNT, DURATION, NUMBER, PROBABILITY
from rlhfsim.units import likely
from rlhfsim.what_if.time_to_reward import SEEN_AGE, SURE, Reached, TimeToReward

HOUR = 3600.0


def reward_page(answer: TimeToReward) -> Page:
    """The answer."""
    learning = answer.learning
    sections: tuple[PageSection, ...] = ()
    if answer.reached:
        sections = (
            section("schedules", "Schedules", hours_figure(answer), schedules(answer)),
            section("assumed", "What is assumed", _assumed(answer), appendix=True),
        )
    return Page(
        schema="rlhfsim.time_to_reward/1",
        title=learning.title or f"Time to a reward of {NUMBER.shown(learning.target)}",
        subtitle=f"{COUNT.shown(answer.samples)} samples on the curve, in updates of "
        f"{COUNT.shown(learning.batch)}",
        verdict=verdict(answer),
        mark="bad" if not answer.reached else "warn" if answer.open else "good",
        sure=tuple(_sure(answer)),
        sections=sections,
        data={"verdict": verdict(answer), "open": answer.open, "samples": answer.samples},
    )


def verdict(answer: TimeToReward) -> str:
    """One sentence: which is first, how surely, or that it is open."""
    if not answer.reached:
        return "Nothing fits under any schedule."
    best = answer.reached[0]
    low, middle, high = (words.seconds(best.quantile(q)) for q in (0.1, 0.5, 0.9))
    prompts = f"{COUNT.shown(best.plan.workload.prompts)} prompts a step"
    what = f"{best.schedule}, {prompts}, reaches it in {middle} ({low} to {high})"
    if len(answer.reached) == 1:
        return f"Only one schedule fits: {what}."
    first = f"first with a probability of {likely(best.first)}"
    return f"{'The ranking is open: ' * answer.open}{what}, and is {first}."


def _sure(answer: TimeToReward) -> Iterator[str]:
    if answer.open:
        yield (
            f"No schedule is first in {words.percent(SURE)} of the draws of steps, of what old samples cost "
            "and of the critical batch; a pair of short runs, one of each, would say more than any prior."
        )
    if any(one.age > SEEN_AGE for one in answer.reached):
        age = NUMBER.shown(SEEN_AGE)
        yield f"With samples over {age} updates old no published run is known to reach the reward."
    yield "A run that collapses on old samples reaches no reward; that is not in the hours."


def schedules(answer: TimeToReward) -> TypedTable:
    """Every schedule with its step, its age and its time."""
    return table_of(
        "Until the reward is reached",
        answer.reached,
        Column("schedule"),
        Column("prompts", "plan.workload.prompts", COUNT),
        Column("plan", lambda one: words.plan_text(one.plan)),
        STEP_TIME,
        Column("mean age", "age", NUMBER),
        Column("P10", lambda one: one.quantile(0.1), DURATION, key="low_s"),
        Column("time", lambda one: one.quantile(0.5), DURATION, key="seconds"),
        Column("P90", lambda one: one.quantile(0.9), DURATION, key="high_s"),
        Column("first", kind=PROBABILITY),
        name="schedules",
    )


def hours_figure(answer: TimeToReward) -> Figure:
    """Hours of every schedule, P10 to P90."""
    return Figure(
        "hours",
        "Hours until the reward is reached",
        alt="Hours of every schedule with their range",
        how="A point is the median, its line P10 to P90. Part of what is drawn moves all of them together.",
        plot=plots.spec(
            [_point(i, one) for i, one in enumerate(answer.reached, start=1)],
            theme.layout(height=320, x="row of the table", y="hours"),
        ),
        table=schedules(answer),
    )


def _point(row: int, one: Reached) -> plots.Trace:
    low, middle, high = (one.quantile(q) / HOUR for q in (0.1, 0.5, 0.9))
    bars = plots.whiskers([high - middle], [middle - low], "blue")
    return plots.points(f"{row}: {one.schedule}", [row], [middle], error_y=bars)


def _assumed(answer: TimeToReward) -> TypedTable:
    figures = (
        ("further samples an update of age", answer.learning.staleness),
        ("critical batch, samples", answer.learning.critical_batch),
    )
    known = [(name, f"{NUMBER.shown(c.value)} ({words.between(c)}): {c.source}") for name, c in figures]
    return pairs("Figures that the curve does not say", known)
