"""What `rlhfsim pool` answers: which job runs when on how many GPUs, who may share them, who is in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rlhfsim.present import words
from rlhfsim.present.answers.tree import (
    GPUS,
    Column,
    Figure,
    Listing,
    Page,
    PageSection,
    Tile,
    TypedTable,
    hidden,
    section,
    table_of,
)
from rlhfsim.present.html import plots
from rlhfsim.present.tables import (
    COUNT,
    DURATION,
    FACTOR,
    MONEY,
    NAMES,
    PLAN,
    PROBABILITY,
    SECONDS,
    SHARE,
    START,
    at,
    compact,
    fields,
)
from rlhfsim.units import DAY
from rlhfsim.what_if.shared_pool.answer import SAVED, PoolAnswer
from rlhfsim.what_if.shared_pool.schedule import PoolMode, PoolOption, PoolPlan, ScheduledMode, pairs_well
from rlhfsim.what_if.shared_pool.spot import SpotPace

SHOWN_GAP = 0.005
"""Smaller gaps are rounding."""
PAIRS_SHOWN = 12
"""Rows of the table of pairs."""


def pool_page(answer: PoolAnswer, title: str | None = None) -> Page:
    """The answer to several jobs on one pool."""
    return Page(
        schema="rlhfsim.pool/1",
        title=title
        or f"{words.plural(len(answer.jobs), 'job')} on {COUNT.shown(answer.gpus)} x {answer.profile.title}",
        subtitle=words.listed([j.name for j in answer.jobs]),
        verdict=verdict(answer),
        mark="bad" if answer.plan is None else "good" if answer.meets else "warn",
        sure=tuple(_sure(answer)),
        tiles=tuple(_tiles(answer)),
        sections=tuple(_sections(answer)),
        data=_data(answer),
    )


def _data(answer: PoolAnswer) -> dict[str, Any]:
    plan = answer.plan
    return {
        "verdict": verdict(answer),
        **fields(answer, "meets", "unfit", "gpus"),
        "makespan_s": at(plan, "makespan_s"),
        "goodput": answer.goodput if plan else None,
        **fields(answer, "usd", "plan.gap"),
        "jobs": [],
        "pairs": [],
    }


def verdict(answer: PoolAnswer) -> str:
    """One sentence: whether every deadline is kept, and when the last job ends."""
    if answer.plan is None:
        jobs = words.capital(words.listed(answer.unfit))
        return f"{jobs} fits on no part of {words.plural(answer.gpus, 'GPU')}."
    late = [n for n, p in answer.plan.in_time.items() if p < answer.confidence]
    kept = f"Not surely in time: {words.listed(late)}" if late else "Every job is in time"
    return f"{kept}; the last one ends after {words.seconds(answer.plan.makespan_s)}."


def _sure(answer: PoolAnswer) -> Iterator[str]:
    if answer.plan is not None:
        yield (
            "Probabilities replay the schedule in draws: the model's error is one for all jobs, failures and "
            "restarts come with each, and a job that ends late delays what waits for its GPUs."
        )
        yield from _rented(answer, answer.plan)
        shorter = max(o.gap for o in answer.options)
        if max(answer.plan.gap, shorter) > SHOWN_GAP:
            yield (
                f"Time was up: another schedule could be worth {words.percent(answer.plan.gap)} more, and a "
                f"step of a job {words.percent(shorter)} shorter."
            )


def _rented(answer: PoolAnswer, plan: PoolPlan) -> Iterator[str]:
    for part in _parts(plan):
        if (pace := part.option.spot) is not None:
            job, there = words.capital(part.option.job), words.percent(pace.spot.available)
            longer, rent = words.percent(pace.slower - 1), words.money(answer.spot_usd(part.option))
            yield (
                f"{job} generates on spot instances, each there {there} of the time: a step takes {longer} "
                f"longer than with all of them, and their rent of {rent} is in the price."
            )


def _tiles(answer: PoolAnswer) -> Iterator[Tile]:
    if answer.plan is None:
        return
    chance, least = min((p, name) for name, p in answer.plan.in_time.items())
    asked = f"{least}; asked for: {words.percent(answer.confidence)}"
    last, rent = "the median of the last end", "rent of the whole pool until then"
    used = "of the GPU time until then GPUs work"
    yield Tile("Least sure deadline", chance, kind=PROBABILITY, detail=asked)
    yield Tile("All done after", answer.plan.makespan_s, kind=DURATION, detail=last)
    yield Tile("Goodput", answer.goodput, kind=SHARE, detail=used)
    if answer.usd is not None:
        yield Tile("Price", answer.usd, kind=MONEY, detail=rent)


def _sections(answer: PoolAnswer) -> Iterator[PageSection]:
    plan = answer.plan
    if plan is not None:
        yield section("schedule", "Schedule", schedule_figure(answer, plan), jobs_table(answer, plan))
    if answer.pairs:
        told = (
            "pairs that do well compete in the schedule; the others run next to each other or in sequence"
            if any(m.sharing and pairs_well(m.sharing) for m in answer.pairs)
            else "no two jobs leave each other enough gaps, so they run next to each other or one after the "
            "other"
        )
        note = Listing((told, *_apart(answer)))
        yield section("pairs", "Who may share GPUs", pairs_table(answer), note)
    yield section("options", "What was priced", options_table(answer), appendix=True)


SURER = 0.01
"""Gain in the probability to fit that is a reason to leave a good pair apart."""


class PoolPart(NamedTuple):
    """A job and the mode that it runs in."""

    mode: ScheduledMode
    option: PoolOption

    @property
    def in_turn_with(self) -> list[str]:
        """The other job on its GPUs."""
        return [name for name in self.mode.mode.jobs if name != self.option.job]


def _parts(plan: PoolPlan) -> list[PoolPart]:
    return [PoolPart(m, o) for m in plan.modes for o in m.mode.options]


def jobs_table(answer: PoolAnswer, plan: PoolPlan) -> TypedTable:
    """Each job with its GPUs, its start and its end."""
    asked = {j.name: j for j in answer.jobs}
    return table_of(
        "Jobs",
        _parts(plan),
        Column("job", "option.job"),
        Column("GPUs", "option.gpus", COUNT),
        Column("in turn with", "in_turn_with", NAMES),
        *_spot_columns([p.option for p in _parts(plan)]),
        Column("starts by", "mode.start_s", START),
        Column(None, lambda p: list(plan.ends_s[p.option.job]), key="end_s"),
        Column("ends after", lambda p: plan.ends_s[p.option.job][1], DURATION),
        Column("deadline", lambda p: asked[p.option.job].deadline, SECONDS),
        Column("in time", lambda p: plan.in_time[p.option.job], PROBABILITY, "in_time"),
        Column("alone costs", lambda p: answer.usd_of(p.option), MONEY, "usd_alone"),
        name="jobs",
    )


def pairs_table(answer: PoolAnswer) -> TypedTable:
    """Two jobs in turn on the same GPUs: first those that pair well, then those that must not."""
    return table_of(
        "Two jobs in turn, a step of each",
        sorted((m for m in answer.pairs if m.sharing), key=_rank),
        Column("jobs", kind=NAMES),
        GPUS,
        Column("both steps", "sharing.cycle_s", SECONDS),
        Column("sleep and wake", "sharing.swap_s", SECONDS),
        Column("speed", "sharing.gain", FACTOR),
        *hidden("sharing.refusal"),
        Column("", _judged),
        notes=("speed: against one job after the other",),
        most=PAIRS_SHOWN,
        name="pairs",
    )


def _spot_columns(options: Sequence[PoolOption]) -> tuple[Column, ...]:
    """Rented GPUs and how much longer a step takes because they come and go, where a job has any."""
    if not any(o.spot for o in options):
        return ()

    def rented(row: PoolPart | PoolOption) -> SpotPace | None:
        return row.option.spot if isinstance(row, PoolPart) else row.spot

    def gpus(row: PoolPart | PoolOption) -> int | None:
        pace = rented(row)
        return pace.spot.instances * pace.spot.gpus if pace else None

    def longer(row: PoolPart | PoolOption) -> float | None:
        pace = rented(row)
        return pace.slower if pace else None

    return (
        Column("spot GPUs", gpus, COUNT, "spot_gpus"),
        Column("step longer", longer, FACTOR, "spot_slower"),
    )


def _rank(pair: PoolMode) -> tuple[bool, bool, float]:
    assert pair.sharing is not None
    return not pairs_well(pair.sharing), pair.sharing.refusal is None, -pair.sharing.gain


def _judged(pair: PoolMode) -> str:
    assert pair.sharing is not None
    if pair.sharing.refusal:
        return f"must not: {pair.sharing.refusal}"
    return "pair well" if pairs_well(pair.sharing) else "no gain"


def _apart(answer: PoolAnswer) -> Iterator[str]:
    """Why jobs that pair well are not in turn, where they would fit less surely than they do apart."""
    modes = answer.plan.modes if answer.plan else ()
    taken = {o.job: o for scheduled in modes for o in scheduled.mode.options}
    in_turn = {scheduled.mode.jobs for scheduled in modes}
    for pair in answer.pairs:
        if modes and pair.sharing and pairs_well(pair.sharing) and pair.jobs not in in_turn:
            for option in pair.options:
                chosen = taken[option.job]
                if option.fits < chosen.fits - SURER:
                    fits, surer = words.percent(option.fits), words.percent(chosen.fits)
                    apart = f"{' and '.join(pair.jobs)} stay apart: {option.job} fits with a probability of"
                    yield f"{apart} {fits} on {words.plural(option.gpus, 'GPU')}, of {surer} on {chosen.gpus}"


def options_table(answer: PoolAnswer) -> TypedTable:
    """Every job on every part of the pool."""
    return table_of(
        "Runs as priced",
        answer.options,
        Column("job"),
        GPUS,
        *_spot_columns(answer.options),
        Column("step", "step_s", SECONDS),
        Column("fits", kind=PROBABILITY),
        Column("plan", kind=PLAN),
        notes=(
            "not tried: GPUs on which arithmetic alone misses the deadline, and twice the GPUs of a job that "
            f"is in time where the last doubling saved less than {words.percent(SAVED)}",
        ),
    )


def schedule_figure(answer: PoolAnswer, plan: PoolPlan) -> Figure:
    """Jobs on a time axis."""
    parts = _parts(plan)
    names = [f"{o.job} ({o.gpus} GPUs)" for _, o in parts]
    starts = [plan.begins_s[o.job] / DAY for _, o in parts]
    spans = [plan.ends_s[o.job][1] / DAY - start for (_, o), start in zip(parts, starts, strict=True)]
    bars = plots.bars("runs", names, spans, ("blue", ""), unit="days", base=compact(starts))
    asked = {j.name: j.deadline / DAY for j in answer.jobs}
    tick = {"symbol": "line-ns-open", "size": 18, "color": "red", "line": {"width": 3}}
    due = plots.points("deadline", [asked[o.job] for _, o in parts], [], marker=tick)
    due["y"] = [plots.text(name) for name in names]
    return Figure(
        "schedule",
        f"{words.plural(len(parts), 'job')} in {words.seconds(plan.makespan_s)}",
        alt="A bar a job from the median of its start to that of its end, its deadline as a line",
        how="Medians of start and end, each job as soon as its GPUs are free; a red line is the deadline.",
        plot=plots.spec([bars, due], plots.rows(names, "days from now", each=32, barmode="overlay")),
        table=jobs_table(answer, plan),
    )
