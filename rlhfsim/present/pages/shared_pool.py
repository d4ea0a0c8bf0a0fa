"""The page of a pool: which job runs when on how many GPUs, who may share them, and who is in time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhfsim.present import words
from rlhfsim.present.html import plots, theme
from rlhfsim.present.html.content import Figure, Listing, Page, PageSection, Tile, section
from rlhfsim.present.tables import Cell, TableData, compact, fields, table, worth
from rlhfsim.provenance import installed_version
from rlhfsim.units import DAY, format, likely
from rlhfsim.what_if.shared_pool.answer import SAVED, PoolAnswer
from rlhfsim.what_if.shared_pool.schedule import PoolMode, PoolOption, PoolPlan, ScheduledMode, pairs_well

SCHEMA = "rlhfsim.pool/1"
SHOWN_GAP = 0.005
"""Smaller gaps are rounding."""
PAIRS_SHOWN = 12
"""Rows of the table of pairs."""


def pool_page(answer: PoolAnswer, title: str | None = None) -> Page:
    """The page of one pool."""
    return Page(
        title=title or f"{words.plural(len(answer.jobs), 'job')} on {answer.gpus:,} x {answer.profile.title}",
        subtitle=words.listed([j.name for j in answer.jobs]),
        verdict=verdict(answer),
        mark="bad" if answer.plan is None else "good" if answer.meets else "warn",
        sure=tuple(_sure(answer)),
        tiles=tuple(_tiles(answer)),
        sections=tuple(_sections(answer)),
        version=installed_version("rlhfsim"),
    )


def verdict(answer: PoolAnswer) -> str:
    """One sentence: whether every deadline is kept, and when the last job ends."""
    if answer.plan is None:
        return f"{words.capital(words.listed(answer.unfit))} fits on no part of {answer.gpus:,} GPUs."
    late = [n for n, p in answer.plan.in_time.items() if p < answer.confidence]
    kept = f"Not surely in time: {words.listed(late)}" if late else "Every job is in time"
    return f"{kept}; the last one ends after {words.seconds(answer.plan.makespan_s)}."


def _sure(answer: PoolAnswer) -> Iterator[str]:
    if answer.plan is not None:
        yield (
            "Probabilities replay the schedule in draws: the model's error is one for all jobs, failures and "
            "restarts come with each, and a job that ends late delays what waits for its GPUs."
        )
        shorter = max(o.gap for o in answer.options)
        if max(answer.plan.gap, shorter) > SHOWN_GAP:
            yield (
                f"Time was up: another schedule could be worth {words.percent(answer.plan.gap)} more, and a "
                f"step of a job {words.percent(shorter)} shorter."
            )


def _tiles(answer: PoolAnswer) -> Iterator[Tile]:
    if answer.plan is None:
        return
    chance, least = min((p, name) for name, p in answer.plan.in_time.items())
    asked = f"{least}; asked for: {words.percent(answer.confidence)}"
    done, used = words.seconds(answer.plan.makespan_s), words.percent(answer.goodput)
    yield Tile(label="Least sure deadline", value=likely(chance), detail=asked)
    yield Tile(label="All done after", value=done, detail="the median of the last end")
    yield Tile(label="Goodput", value=used, detail="of the GPU time until then GPUs work")
    if answer.usd is not None:
        yield Tile(label="Price", value=words.money(answer.usd), detail="rent of the whole pool until then")


def _sections(answer: PoolAnswer) -> Iterator[PageSection]:
    plan = answer.plan
    if plan is not None:
        yield section("schedule", "Schedule", schedule_figure(answer, plan), jobs_table(answer, plan))
    if answer.pairs:
        note = Listing(title="", items=(_pairing(answer),))
        yield section("pairs", "Who may share GPUs", pairs_table(answer), note)
    yield section("options", "What was priced", options_table(answer), appendix=True)


def _parts(plan: PoolPlan) -> list[tuple[ScheduledMode, PoolOption]]:
    return [(m, o) for m in plan.modes for o in m.mode.options]


def jobs_table(answer: PoolAnswer, plan: PoolPlan) -> TableData:
    """Each job with its GPUs, its start and its end."""
    asked = {j.name: j for j in answer.jobs}

    def usd(option: PoolOption) -> Cell:
        value = answer.usd_of(option)
        return Cell(text="unknown") if value is None else worth(value, words.money(value))

    return table(
        "Jobs",
        _parts(plan),
        ("job", lambda p: p[1].job),
        ("GPUs", lambda p: worth(p[1].gpus, f"{p[1].gpus:,}")),
        ("in turn with", lambda p: words.listed([n for n in p[0].mode.jobs if n != p[1].job]) or "-"),
        ("starts by", lambda p: worth(p[0].start_s, words.seconds(p[0].start_s) if p[0].start_s else "now")),
        ("ends after", lambda p: worth(plan.ends_s[p[1].job][1], words.seconds(plan.ends_s[p[1].job][1]))),
        ("deadline", lambda p: worth(asked[p[1].job].deadline, format(asked[p[1].job].deadline, "s"))),
        ("in time", lambda p: worth(plan.in_time[p[1].job], likely(plan.in_time[p[1].job]))),
        ("alone costs", lambda p: usd(p[1])),
    )


def _judged(pair: PoolMode) -> str:
    assert pair.sharing is not None
    if pair.sharing.refusal:
        return f"must not: {pair.sharing.refusal}"
    return "pair well" if pairs_well(pair.sharing) else "no gain"


def pairs_table(answer: PoolAnswer) -> TableData:
    """Two jobs in turn on the same GPUs: first those that pair well, then those that must not."""
    shared = [(m, m.sharing) for m in answer.pairs if m.sharing is not None]
    shared.sort(key=lambda pair: (not pairs_well(pair[1]), pair[1].refusal is None, -pair[1].gain))
    hidden = len(shared) - PAIRS_SHOWN
    more = (f"and {words.plural(hidden, 'more pair')}, which --json has",) if hidden > 0 else ()
    return table(
        "Two jobs in turn, a step of each",
        shared[:PAIRS_SHOWN],
        ("jobs", lambda p: words.listed(list(p[0].jobs))),
        ("GPUs", lambda p: worth(p[0].gpus, f"{p[0].gpus:,}")),
        ("both steps", lambda p: worth(p[1].cycle_s, format(p[1].cycle_s, "s"))),
        ("sleep and wake", lambda p: worth(p[1].swap_s, format(p[1].swap_s, "s"))),
        ("speed", lambda p: worth(p[1].gain - 1, words.signed(p[1].gain - 1))),
        ("", lambda p: _judged(p[0])),
        notes=("speed: against one job after the other", *more),
    )


def _pairing(answer: PoolAnswer) -> str:
    if any(m.sharing and pairs_well(m.sharing) for m in answer.pairs):
        return "pairs that do well compete in the schedule; the others run next to each other or in sequence"
    return "no two jobs leave each other enough gaps, so they run next to each other or one after the other"


def options_table(answer: PoolAnswer) -> TableData:
    """Every job on every part of the pool."""
    return table(
        "Runs as priced",
        answer.options,
        ("job", lambda o: o.job),
        ("GPUs", lambda o: worth(o.gpus, f"{o.gpus:,}")),
        ("step", lambda o: worth(o.step_s, format(o.step_s, "s"))),
        ("fits", lambda o: worth(o.fits, likely(o.fits))),
        ("plan", lambda o: words.plan_text(o.plan) if o.plan else "-"),
        notes=(
            "not tried: GPUs on which arithmetic alone misses the deadline, and twice the GPUs of a job that "
            f"is in time where the last doubling saved less than {words.percent(SAVED)}",
        ),
    )


def schedule_figure(answer: PoolAnswer, plan: PoolPlan) -> Figure:
    """Jobs on a time axis."""
    parts = _parts(plan)
    names = [f"{o.job} ({o.gpus} GPUs)" for _, o in parts]
    starts = [m.start_s / DAY for m, _ in parts]
    ends = [plan.ends_s[o.job][1] / DAY for _, o in parts]
    spans = [max(0.0, end - start) for end, start in zip(ends, starts, strict=True)]
    bars = plots.bars("runs", names, spans, ("blue", ""), unit="days", base=compact(starts))
    asked = {j.name: j.deadline / DAY for j in answer.jobs}
    tick = {"symbol": "line-ns-open", "size": 18, "color": theme.colour("red"), "line": {"width": 3}}
    due = plots.points("deadline", [asked[o.job] for _, o in parts], [], marker=tick)
    due["y"] = [plots.text(name) for name in names]
    return Figure(
        key="schedule",
        title=f"{words.plural(len(parts), 'job')} in {words.seconds(plan.makespan_s)}",
        alt="A bar a job from its planned start to the median of its end, its deadline as a line",
        how="From the latest planned start to the median end; a red line is the deadline.",
        plot=plots.spec([bars, due], plots.rows(names, "days from now", each=32, barmode="overlay")),
        table=jobs_table(answer, plan),
    )


def pool_dict(answer: PoolAnswer) -> dict[str, Any]:
    """The same content for machines."""
    plan = answer.plan
    return {
        "schema": SCHEMA,
        "verdict": verdict(answer),
        "meets": answer.meets,
        "unfit": answer.unfit,
        "gpus": answer.gpus,
        "makespan_s": plan.makespan_s if plan else None,
        "goodput": answer.goodput if plan else None,
        "usd": answer.usd,
        "gap": plan.gap if plan else None,
        "jobs": [
            {
                "job": o.job,
                "gpus": o.gpus,
                "start_s": m.start_s,
                "in_turn_with": [n for n in m.mode.jobs if n != o.job],
                "end_s": list(plan.ends_s[o.job]),
                "in_time": plan.in_time[o.job],
                "usd_alone": answer.usd_of(o),
            }
            for m, o in _parts(plan)
        ]
        if plan
        else [],
        "pairs": [
            {
                "jobs": list(m.jobs),
                "gpus": m.gpus,
                **fields(m.sharing, "cycle_s", "swap_s", "gain", "refusal"),
            }
            for m in answer.pairs
            if m.sharing
        ],
    }
