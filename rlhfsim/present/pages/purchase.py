"""The page of a purchase, for a board: what to buy and when, what it costs, how surely it keeps its dates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from rlhfsim.present import words
from rlhfsim.present.figures.whatif import InputSwing, sides
from rlhfsim.present.html import plots, theme
from rlhfsim.present.html.content import Figure, Page, PageSection, Tile, section
from rlhfsim.present.tables import Cell, TableData, added, rounded, table, worth
from rlhfsim.provenance import installed_version
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.units import DAY, HOUR, MILLION, format, likely, significant
from rlhfsim.what_if.purchase.answer import Decision, Swing
from rlhfsim.what_if.purchase.document import QUARTERS
from rlhfsim.what_if.purchase.supply import Purchase, RunOption

SCHEMA = "rlhfsim.buy/1"
SAME = 1e-3
"""Share of the cost by which another purchase must differ to be another one."""
SHOWN = 10
"""Figures of the tornado."""
COLOURS = {"all bought": "orange", "all reserved": "green", "all on demand": "grey"}

SOLD = " The fall in the last quarter is what is sold again."


def purchase_page(answer: Decision, title: str | None = None) -> Page:
    """The page of one portfolio."""
    portfolio = answer.portfolio
    return Page(
        title=title or portfolio.title or f"GPUs for {words.plural(len(portfolio.jobs), 'kind')} of jobs",
        subtitle=f"{words.plural(portfolio.years, 'year')}, {words.listed([j.name for j in portfolio.jobs])}",
        verdict=verdict(answer),
        mark="bad" if answer.chosen is None else "good" if answer.meets else "warn",
        sure=tuple(_sure(answer)),
        tiles=tuple(_tiles(answer)),
        sections=tuple(_sections(answer)),
        version=installed_version("rlhfsim"),
    )


def verdict(answer: Decision) -> str:
    """One sentence: what to buy, what it costs, how surely the deadlines are kept."""
    if answer.unserved:
        return f"No kind and number of GPUs finishes {words.listed(list(answer.unserved))} by the deadline."
    if answer.chosen is None or answer.punctual is None:
        return "These supplies cannot serve all runs: bought GPUs have a lead time; let some be rented."
    kept = likely(answer.punctual.all_in_time)
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
    yield Tile(
        label=f"Cost of {words.plural(answer.portfolio.years, 'year')}",
        value=words.money(usd),
        detail=f"P10-P90 {words.money(low)} to {words.money(high)}",
    )
    yield Tile(
        label="No run is late",
        value=likely(answer.punctual.all_in_time),
        detail=f"asked for: {words.percent(answer.confidence)}",
    )
    paid = list(accumulate(answer.chosen.cash))
    yield Tile(
        label="Most cash out",
        value=words.money(max(paid)),
        detail=f"by the end of {_quarter(paid.index(max(paid)))}",
    )
    for name, other in sorted(_others(answer).items(), key=lambda pair: pair[1].usd)[:1]:
        more = f"{words.money(other.usd)}, {words.signed(other.usd / planned - 1)} against the plan"
        yield Tile(label="Instead", value=name, detail=more)


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


def nodes_table(answer: Decision, chosen: Purchase) -> TableData:
    """Nodes that arrive, that are reserved, and what is rented, quarter by quarter."""
    hours = {(o.job, o.gpu, o.gpus): o.gpu_hours for o in answer.options}

    def rented(supply: str) -> tuple[str, Callable[[int], Cell]]:
        there = [(key[4], n * hours[key[:3]]) for key, n in chosen.runs.items() if key[3] == supply]
        amount = added(there)
        return f"GPU-hours {supply}", lambda q: worth(amount.get(q, 0.0), f"{amount.get(q, 0.0):,.0f}")

    return table(
        "Nodes and rent by quarter",
        range(answer.portfolio.quarters),
        ("quarter", _quarter),
        *((f"{g} bought", lambda q, g=g: _count(chosen.bought[g][q])) for g in chosen.bought),
        *((f"{g} reserved", lambda q, g=g: _count(chosen.reserved[g][q])) for g in chosen.reserved),
        *(rented(s) for s in ("on-demand", "spot") if s in chosen.by_item),
        ("paid, USD", lambda q: worth(chosen.cash[q], f"{chosen.cash[q]:,.0f}")),
    )


def _count(nodes: int) -> Cell:
    return Cell(text=f"{nodes:,}" if nodes else "-", value=nodes)


def items_table(chosen: Purchase) -> TableData:
    """What the money is for."""
    items = sorted(chosen.by_item.items(), key=lambda pair: -pair[1])
    return table(
        "What the money is for",
        [item for item in items if round(item[1])],
        ("item", lambda i: i[0]),
        ("USD", lambda i: worth(i[1], f"{i[1]:,.0f}")),
        ("share of the plan", lambda i: worth(i[1] / chosen.usd, words.percent(i[1] / chosen.usd))),
    )


def jobs_table(answer: Decision) -> TableData:
    """Each job: its runs, where they run, how surely they are in time."""
    assert answer.chosen is not None
    assert answer.punctual is not None
    runs, punctual = answer.chosen.runs, answer.punctual

    def where(job: str) -> str:
        ways = dict.fromkeys(f"{n} x {g}, {s}" for (j, g, n, s, _) in runs if j == job)
        return "; ".join(ways)

    return table(
        "Jobs",
        answer.portfolio.jobs,
        ("job", lambda j: j.name),
        ("runs of the first year", lambda j: worth(j.runs_per_year, significant(j.runs_per_year))),
        ("growth a year", lambda j: words.value_text(j.growth)),
        ("deadline", lambda j: format(j.deadline, "s")),
        ("runs in time", lambda j: worth(punctual.in_time[j.name], likely(punctual.in_time[j.name]))),
        ("where", lambda j: where(j.name)),
    )


def options_table(answer: Decision) -> TableData:
    """Every job on every kind and size."""

    def plan(option: RunOption) -> str:
        return words.plan_text(option.plan) if option.plan else "-"

    return table(
        "Runs as priced",
        answer.options,
        ("job", lambda o: o.job),
        ("GPUs", lambda o: f"{o.gpus} x {o.gpu}"),
        ("a run", lambda o: worth(o.hours, words.seconds(o.hours * HOUR))),
        ("GPU-hours", lambda o: worth(o.gpu_hours, f"{o.gpu_hours:,.0f}")),
        ("alone in time", lambda o: worth(o.in_time, likely(o.in_time))),
        ("plan", plan),
    )


def figures_table(answer: Decision) -> TableData:
    """Every figure that the answer rests on."""
    return table(
        "Value, range, source",
        answer.terms.known.items(),
        ("figure", lambda i: i[0]),
        ("value", lambda i: _figure(i[1], i[1].value)),
        ("range", lambda i: f"{_figure(i[1], i[1].low)} to {_figure(i[1], i[1].high)}"),
        ("source", lambda i: i[1].source),
    )


def _figure(known: Coefficient, value: float) -> str:
    if known.dimension == "s":
        return f"{significant(value / DAY)} d"
    return format(value, known.dimension, digits=4)


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
                "color": theme.colour(COLOURS.get(name, "blue")),
                "width": 3 if each is chosen else 2,
                "dash": "solid" if each is chosen else "dot",
            },
        )
        for name, each in lines.items()
    ]
    costs = "; ".join(f"{name} {words.money(each.usd)}" for name, each in lines.items())
    return Figure(
        key="cash",
        title=f"Paid in the end: {costs}",
        alt="Money paid so far over the years, a line for each way",
        how="What has been paid by then, million USD."
        + (SOLD if any(x.bought for x in lines.values()) else ""),
        plot=plots.spec(data, theme.layout(height=300, x="years", y="million USD paid")),
        table=table(
            "Paid by the end of each quarter",
            range(answer.portfolio.quarters),
            ("quarter", _quarter),
            *((name, _paid(each)) for name, each in lines.items()),
        ),
    )


def _paid(bought: Purchase) -> Callable[[int], Cell]:
    """What was paid by the end of a quarter."""
    paid = list(accumulate(bought.cash))
    return lambda quarter: worth(paid[quarter], f"{paid[quarter]:,.0f}")


def tornado_figure(answer: Decision) -> Figure:
    """What each figure moves, the widest first."""
    assert answer.chosen is not None
    usd, shown = answer.chosen.usd, answer.swings[:SHOWN]
    known = [_swing(answer, s, usd) for s in shown]
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
        key="tornado",
        title=f"{words.capital(first.name)} moves the cost most: {least} to {most}",
        alt="Bars to both sides of the cost, one a figure",
        how="One figure at its P10 or P90, all others as they are; what is bought stays, its use does not.",
        plot=plots.spec(sides(known, names), layout),
        table=table(
            "Sensitivity of the cost",
            answer.swings,
            ("figure", lambda s: s.name),
            ("at its P10, USD", lambda s: worth(s.low_usd, f"{s.low_usd:,.0f}")),
            ("at its P90, USD", lambda s: worth(s.high_usd, f"{s.high_usd:,.0f}")),
        ),
    )


def _swing(answer: Decision, swing: Swing, usd: float) -> InputSwing:
    known = answer.terms.known[swing.name]
    low, value, high = (_figure(known, x) for x in (known.low, known.value, known.high))
    return InputSwing(name=swing.name, labels=(low, value, high), values=(swing.low_usd, usd, swing.high_usd))


# --- JSON ---------------------------------------------------------------------------------------------


def purchase_dict(answer: Decision) -> Mapping[str, Any]:
    """The same content for machines."""
    chosen, punctual = answer.chosen, answer.punctual
    return {
        "schema": SCHEMA,
        "verdict": verdict(answer),
        "meets": answer.meets,
        "unserved": list(answer.unserved),
        "usd": dict(zip(("p10", "value", "p90"), answer.usd, strict=True)) if chosen else None,
        "all_in_time": punctual.all_in_time if punctual else None,
        "in_time": dict(punctual.in_time) if punctual else {},
        "rented_besides_usd": list(punctual.rented_usd) if punctual else None,
        "bought": {g: list(n) for g, n in chosen.bought.items()} if chosen else {},
        "reserved": {g: list(n) for g, n in chosen.reserved.items()} if chosen else {},
        "cash": list(chosen.cash) if chosen else [],
        "by_item": dict(chosen.by_item) if chosen else {},
        "fill": chosen.fill if chosen else None,
        "instead": {name: other.usd for name, other in answer.instead.items()},
        "swings": [{"figure": s.name, "low_usd": s.low_usd, "high_usd": s.high_usd} for s in answer.swings],
        "options": [
            {"job": o.job, "gpu": o.gpu, "gpus": o.gpus, "hours": o.hours, "in_time": o.in_time}
            for o in answer.options
        ],
        "figures": {
            name: {"value": c.value, "low": c.low, "high": c.high, "source": c.source}
            for name, c in answer.terms.known.items()
        },
    }
