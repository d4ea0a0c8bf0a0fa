"""What `rlhfsim buy` answers: what to buy and when, what it costs, how surely it keeps its dates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from rlhfsim.present import words
from rlhfsim.present.answers.tree import (
    GPUS,
    Column,
    Figure,
    Page,
    PageSection,
    Tile,
    TypedTable,
    hidden,
    section,
    table_of,
)
from rlhfsim.present.figures.whatif import InputSwing, sides
from rlhfsim.present.html import plots, theme
from rlhfsim.present.tables import (
    COUNT,
    DURATION,
    MONEY,
    NODES,
    NUMBER,
    PLAN,
    PROBABILITY,
    SECONDS,
    SHARE,
    added,
    at,
    fields,
    rounded,
)
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.units import HOUR, MILLION
from rlhfsim.what_if.purchase.answer import Decision
from rlhfsim.what_if.purchase.document import QUARTERS
from rlhfsim.what_if.purchase.supply import Purchase

SAME = 1e-3
"""Share of the cost by which another purchase must differ to be another one."""
SHOWN = 10
"""Figures of the tornado."""
COLOURS = {"all bought": "orange", "all reserved": "green", "all on demand": "grey"}

SOLD = " The fall in the last quarter is what is sold again."


def purchase_page(answer: Decision, title: str | None = None) -> Page:
    """The answer to one portfolio, for a board too."""
    portfolio = answer.portfolio
    return Page(
        schema="rlhfsim.buy/1",
        title=title or portfolio.title or f"GPUs for {words.plural(len(portfolio.jobs), 'kind')} of jobs",
        subtitle=f"{words.plural(portfolio.years, 'year')}, {words.listed([j.name for j in portfolio.jobs])}",
        verdict=verdict(answer),
        mark="bad" if answer.chosen is None else "good" if answer.meets else "warn",
        sure=tuple(_sure(answer)),
        tiles=tuple(_tiles(answer)),
        sections=tuple(_sections(answer)),
        data=_data(answer),
    )


def verdict(answer: Decision) -> str:
    """One sentence: what to buy, what it costs, how surely the deadlines are kept."""
    if answer.unserved:
        return f"No kind and number of GPUs finishes {words.listed(list(answer.unserved))} by the deadline."
    if answer.chosen is None or answer.punctual is None:
        return "These supplies cannot serve all runs: bought GPUs have a lead time; let some be rented."
    kept = PROBABILITY.shown(answer.punctual.all_in_time)
    what = words.listed(_what(answer.chosen)) or "rent what is needed"
    years = words.plural(answer.portfolio.years, "year")
    cost = f"{words.money(answer.usd[1])} over {years}"
    return f"{words.capital(what)}: {cost}; no run is late with a probability of {kept}."


def _what(chosen: Purchase) -> list[str]:
    """`buy 4 nodes of h100_sxm`, `rent 12,000 GPU-hours on demand`."""
    bought = [f"buy {words.plural(sum(n), 'node')} of {g}" for g, n in chosen.bought.items()]
    reserved = [f"reserve {words.plural(sum(n), 'node-year')} of {g}" for g, n in chosen.reserved.items()]
    rented = [f"rent {s}" for s in ("on-demand", "spot") if chosen.by_item.get(s, 0.0) > 0]
    return [*bought, *reserved, *rented]


def _sure(answer: Decision) -> Iterator[str]:
    if answer.chosen is None or answer.punctual is None:
        return
    low, _, high = (words.money(x) for x in answer.usd)
    yield f"8 in 10 that it costs between {low} and {high}: every figure over its range, as if independent."
    extra = answer.punctual.rented_usd
    yield (
        "Rent by the hour differs from the plan where more or fewer runs come, or where one would be late: "
        f"{_signed(extra[1])} in the middle, {_signed(extra[2])} in one case of ten. The cost has it, the "
        "cash below is that of the plan."
    )
    yield "Run times have the model's error on published runs, failures and restarts in them."


def _signed(usd: float) -> str:
    return f"{'-' if usd < 0 else '+'}{words.money(abs(usd))}"


def _tiles(answer: Decision) -> Iterator[Tile]:
    if answer.chosen is None or answer.punctual is None:
        return
    (low, usd, high), planned = answer.usd, answer.chosen.usd
    cost = f"Cost of {words.plural(answer.portfolio.years, 'year')}"
    asked = f"asked for: {words.percent(answer.confidence)}"
    drawn = f"as planned {words.money(planned)}"
    yield Tile(cost, usd, kind=MONEY, range=(low, high), detail=drawn)
    yield Tile("No run is late", answer.punctual.all_in_time, kind=PROBABILITY, detail=asked)
    paid = list(accumulate(answer.chosen.cash))
    latest = f"by the end of {_quarter(paid.index(max(paid)))}"
    yield Tile("Most cash out", max(paid), kind=MONEY, detail=latest)
    for name, other in sorted(_others(answer).items(), key=lambda pair: pair[1].usd)[:1]:
        more = f"{words.money(other.usd)}, {words.signed(other.usd / planned - 1)} against the plan"
        yield Tile("Instead", name, more)


def _others(answer: Decision) -> Mapping[str, Purchase]:
    """What else could be done, where that is something else."""
    usd = answer.chosen.usd if answer.chosen else 0.0
    return {name: other for name, other in answer.instead.items() if abs(other.usd - usd) > SAME * usd}


def _quarter(quarter: int) -> str:
    return f"year {quarter // QUARTERS + 1}, quarter {quarter % QUARTERS + 1}"


def _sections(answer: Decision) -> Iterator[PageSection]:
    if answer.chosen is None:
        yield section("options", "What was priced", options_table(answer))
        return
    chosen = answer.chosen
    yield section("buy", "What to buy and when", nodes_table(answer, chosen), items_table(chosen))
    yield section("cash", "Cash", cash_figure(answer, chosen))
    yield section("dates", "Deadlines", jobs_table(answer))
    if answer.swings:
        yield section("tornado", "What moves the cost", tornado_figure(answer))
    yield section("options", "What was priced", options_table(answer), appendix=True)
    yield section("figures", "Every figure with its source", figures_table(answer), appendix=True)


def nodes_table(answer: Decision, chosen: Purchase) -> TypedTable:
    """Nodes that arrive, that are reserved, and what is rented, quarter by quarter."""
    hours = {(o.job, o.gpu, o.gpus): o.gpu_hours for o in answer.options}

    def rented(supply: str) -> Column:
        there = [(key[4], n * hours[key[:3]]) for key, n in chosen.runs.items() if key[3] == supply]
        amount = added(there)
        return Column(f"GPU-hours {supply}", lambda q: amount.get(q, 0.0), COUNT)

    return table_of(
        "Nodes and rent by quarter",
        range(answer.portfolio.quarters),
        Column("quarter", _quarter),
        *(Column(f"{g} bought", nodes.__getitem__, NODES) for g, nodes in chosen.bought.items()),
        *(Column(f"{g} reserved", nodes.__getitem__, NODES) for g, nodes in chosen.reserved.items()),
        *(rented(s) for s in ("on-demand", "spot") if s in chosen.by_item),
        Column("paid, USD", chosen.cash.__getitem__, COUNT),
    )


def items_table(chosen: Purchase) -> TypedTable:
    """What the money is for."""
    items = sorted(chosen.by_item.items(), key=lambda pair: -pair[1])
    return table_of(
        "What the money is for",
        [item for item in items if round(item[1])],
        Column("item", 0),
        Column("USD", 1, COUNT),
        Column("share of the plan", lambda i: i[1] / chosen.usd, SHARE),
    )


def jobs_table(answer: Decision) -> TypedTable:
    """Each job: its runs, where they run, how surely they are in time."""
    assert answer.chosen is not None
    assert answer.punctual is not None
    runs, punctual = answer.chosen.runs, answer.punctual

    def where(job: Any) -> str:
        return "; ".join(dict.fromkeys(f"{n} x {g}, {s}" for (j, g, n, s, _) in runs if j == job.name))

    return table_of(
        "Jobs",
        answer.portfolio.jobs,
        Column("job", "name"),
        Column("runs of the first year", "runs_per_year", NUMBER),
        Column("growth a year", "growth.value", SHARE),
        Column("deadline", kind=SECONDS),
        Column("runs in time", lambda j: punctual.in_time[j.name], PROBABILITY),
        Column("where", where),
    )


def options_table(answer: Decision) -> TypedTable:
    """Every job on every kind and size."""
    return table_of(
        "Runs as priced",
        answer.options,
        Column("job"),
        GPUS,
        Column("GPU", "gpu"),
        Column("a run", lambda o: o.hours * HOUR, DURATION),
        *hidden("hours"),
        Column("GPU-hours", lambda o: o.gpu_hours, COUNT),
        Column("alone in time", "in_time", PROBABILITY),
        Column("plan", lambda o: o.plan, PLAN),
        name="options",
    )


def figures_table(answer: Decision) -> TypedTable:
    """Every figure that the answer rests on."""
    return table_of(
        "Value, range, source",
        answer.terms.known.items(),
        Column("figure", 0),
        Column("value", lambda i: _texts(i[1])[1]),
        Column("range", lambda i: " to ".join(_texts(i[1])[::2])),
        Column("source", "1.source"),
    )


def _texts(known: Coefficient) -> tuple[str, str, str]:
    """P10, value and P90."""
    low, value, high = (words.long_term(x, known.dimension) for x in (known.low, known.value, known.high))
    return low, value, high


# --- figures ------------------------------------------------------------------------------------------


def cash_figure(answer: Decision, chosen: Purchase) -> Figure:
    """Money paid so far, quarter by quarter, with what else could be done."""
    lines = {"this purchase": chosen, **_others(answer)}
    quarters = [q / QUARTERS for q in range(answer.portfolio.quarters + 1)]
    data = [
        plots.points(
            name,
            quarters,
            [usd / MILLION for usd in accumulate(each.cash, initial=0.0)],
            mode="lines",
            line={
                "color": COLOURS.get(name, "blue"),
                "width": 3 if each is chosen else 2,
                "dash": "solid" if each is chosen else "dot",
            },
        )
        for name, each in lines.items()
    ]
    costs = "; ".join(f"{name} {words.money(each.usd)}" for name, each in lines.items())
    return Figure(
        "cash",
        f"Paid in the end: {costs}",
        alt="Money paid so far over the years, a line for each way",
        how="What has been paid by then, million USD."
        + (SOLD if any(x.bought for x in lines.values()) else ""),
        plot=plots.spec(data, theme.layout(height=300, x="years", y="million USD paid")),
        table=table_of(
            "Paid by the end of each quarter",
            range(answer.portfolio.quarters),
            Column("quarter", _quarter),
            *(Column(name, list(accumulate(each.cash)).__getitem__, COUNT) for name, each in lines.items()),
        ),
    )


def tornado_figure(answer: Decision) -> Figure:
    """What each figure moves, the widest first."""
    assert answer.chosen is not None
    usd, shown = answer.chosen.usd, answer.swings[:SHOWN]
    known = [
        InputSwing(s.name, _texts(answer.terms.known[s.name]), (s.low_usd, usd, s.high_usd)) for s in shown
    ]
    names = [s.name for s in known]
    reach = max(abs(s.change(i) or 0.0) for s in known for i in (0, 2))
    layout = plots.rows(
        names,
        "change of the cost, %",
        each=26,
        margin=100,
        barmode="overlay",
        xaxis={"range": [rounded(-1.4 * reach), rounded(1.4 * reach)]},
    )
    first = known[0]
    least, most = (words.signed((first.change(i) or 0.0) / 100) for i in (0, 2))
    return Figure(
        "tornado",
        f"{words.capital(first.name)} moves the cost most: {least} to {most}",
        alt="Bars to both sides of the cost, one a figure",
        how="One figure at its P10 or P90, all others as they are; what is bought stays, its use does not.",
        plot=plots.spec(sides(known, names), layout),
        table=table_of(
            "Sensitivity of the cost",
            answer.swings,
            Column("figure", "name", key="figure"),
            Column("at its P10, USD", "low_usd", COUNT),
            Column("at its P90, USD", "high_usd", COUNT),
            name="swings",
        ),
    )


def _data(answer: Decision) -> dict[str, Any]:
    chosen, punctual = answer.chosen, answer.punctual
    return {
        "verdict": verdict(answer),
        **fields(answer, "meets", "unserved"),
        "usd": dict(zip(("p10", "value", "p90"), answer.usd, strict=True)) if chosen else None,
        "all_in_time": at(punctual, "all_in_time"),
        "in_time": dict(punctual.in_time) if punctual else {},
        "rented_besides_usd": at(punctual, "rented_usd"),
        "bought": dict(chosen.bought) if chosen else {},
        "reserved": dict(chosen.reserved) if chosen else {},
        "cash": chosen.cash if chosen else [],
        "by_item": dict(chosen.by_item) if chosen else {},
        "fill": at(chosen, "fill"),
        "instead": {name: other.usd for name, other in answer.instead.items()},
        "swings": [],
        "figures": {
            name: fields(c, "value", "low", "high", "source") for name, c in answer.terms.known.items()
        },
    }
