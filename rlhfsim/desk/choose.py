"""The other tab: the candidates of `rlhfsim choose` for the work of the question; a row asks for its plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dash import ALL, Dash, Input, Output, State, ctx, dcc, html
from dash.exceptions import PreventUpdate

from rlhfsim.desk.blocks import Component, block, places, spoken, status
from rlhfsim.desk.comparisons import DeskComparison
from rlhfsim.desk.state import BASE, DeskState, Field, Question, compared, comparison, query, to_search, work
from rlhfsim.desk.tasks import PageTasks, Work
from rlhfsim.present import words
from rlhfsim.present.answers.choose import notes, rows, table, warning
from rlhfsim.present.answers.tree import Code
from rlhfsim.present.answers.written import written
from rlhfsim.what_if.choose import ClusterOption

TABS = {
    "plan": "Plan",
    "choose": "Other GPUs and frameworks",
    "own": "Your script or log",
    "files": "A run, a pool, a purchase",
}
PANELS = {"answer": "plan", "progress": "plan", "choose": "choose", "own": "own", "files": "files"}
"""Part of the page -> the tab that shows it."""
CONTROLS = {"gpu": "Kinds of GPUs", "gpus": "Numbers of GPUs", "framework": "Framework"}
"""What is compared; empty: around the question."""
POLL_MS = 500
CHOSEN = ("gpus", "gpu", "framework", "backend")
"""Fields of the question that a row sets."""


def tabs() -> Component:
    """One answer, many next to each other, one's own script or log, or questions in files."""
    buttons = [
        html.Button(text, id={"tab": name}, role="tab", className="on" if name == "plan" else "")
        for name, text in TABS.items()
    ]
    return html.Nav(buttons, id="tabs", role="tablist")


def choose_panel(fields: Mapping[str, Field]) -> Component:
    """The tab: what is compared, how far that is, the table."""
    offered = ["any", *(name for name in fields["framework"].offered if name != "any")]
    controls: dict[str, Component] = {
        name: dcc.Input(id={"elsewhere": name}, type="text", autoComplete="off", spellCheck=False)
        for name in ("gpu", "gpus")
    }
    controls["framework"] = dcc.Dropdown(
        options=offered, id={"elsewhere": "framework"}, placeholder="any", searchable=False
    )
    named = [
        html.Div([html.Label(label), controls[name]], className=f"field {name}")
        for name, label in CONTROLS.items()
    ]
    buttons = [html.Button("Compare", id="compare"), html.Button("Stop", id="stop", disabled=True)]
    return html.Div(
        [
            html.Div([*named, html.P(buttons, className="row")], id="candidates"),
            html.Div(id="table"),
            dcc.Interval(id="ticks", interval=POLL_MS, disabled=True),
        ],
        id="choose",
        hidden=True,
    )


def connect_choose(app: Dash, comparisons: PageTasks[DeskComparison], designs: Callable[[str], Work]) -> None:
    """The callbacks of the tab; `designs`: what the process of a query's table does."""

    @app.callback(
        *(Output(panel, "hidden") for panel in PANELS),
        Output({"tab": ALL}, "className"),
        Input({"tab": ALL}, "n_clicks"),
        Input({"row": ALL}, "n_clicks"),
        prevent_initial_call=True,
    )
    def on_tab(*_: Any) -> tuple[Any, ...]:
        if not _clicked():
            raise PreventUpdate
        name = ctx.triggered_id.get("tab", "plan")
        return *(tab != name for tab in PANELS.values()), ["on" if tab == name else "" for tab in TABS]

    @app.callback(
        *places(Output, "table.children", "ticks.disabled", "stop.disabled"),
        Output({"elsewhere": ALL}, "placeholder"),
        *places(Input, "compare.n_clicks", "stop.n_clicks", "ticks.n_intervals", "state.data"),
        State({"elsewhere": ALL}, "value"),
        State("page", "data"),
    )
    def on_compare(*given: Any) -> tuple[Any, ...]:
        data, values, page = given[-3:]
        question: Question = data["question"]
        if ctx.triggered_id == "compare":
            texts = {name: value or None for name, value in zip(CONTROLS, values, strict=True)}
            asked = compared(question, {n: t for n, t in texts.items() if t})
            comparisons.start(page, DeskComparison(question=asked), designs(query(asked)))
        if ctx.triggered_id == "stop":
            comparisons.stop(page)
        known = comparisons.known(page)
        running = known is not None and known.running
        usual = compared(question, {})
        hints = [usual.get(name, "any") for name in CONTROLS]
        return list(table_view(known, question)), not running, not running, hints

    @app.callback(
        Output("address", "search", allow_duplicate=True),
        Input({"row": ALL}, "n_clicks"),
        State("state", "data"),
        prevent_initial_call=True,
    )
    def on_row(_: Any, data: Mapping[str, Question]) -> str:
        if not _clicked():
            raise PreventUpdate
        return to_search(asked_by(ctx.triggered_id["row"], data["question"], data[BASE]))


def _clicked() -> bool:
    """Whether something was pressed: rows that have just come trigger too."""
    return bool(ctx.triggered[0]["value"])


def asked_by(row: str, question: Question, base: Question) -> DeskState:
    """The question with the controls of a candidate."""
    return DeskState(question=question | dict(zip(CHOSEN, row.split("|"), strict=True)), base=base)


# --- what is shown ----------------------------------------------------------------------------------


def table_view(known: DeskComparison | None, question: Question) -> Iterator[Component]:
    """How far the comparison is, then its table."""
    if known is None:
        yield status(
            "Every candidate is a search of its own; how long the others will take is said meanwhile.", ""
        )
        return
    if known.trouble is not None:
        yield status(", ".join(filter(None, (known.trouble.message, known.trouble.help))), "bad")
    elif known.running:
        yield from _progress(known)
    else:
        yield _verdict(known, work(known.question) != work(question))
        yield from _table(known, question)
    yield block(Code("The same table in a terminal", comparison(known.question)))


def _progress(known: DeskComparison) -> Iterator[Component]:
    if not known.total:
        yield status("Reading the question.", "busy")
        return
    left = (time.monotonic() - known.began) / known.done * (known.total - known.done) if known.done else None
    soon = f", about {words.seconds(max(10, round(left, -1)))} left" if left else ""
    yield status(f"{known.done} of {known.total} candidates are designed{soon}.", "busy")
    yield html.Progress(value=str(known.done), max=str(known.total), **spoken(label="candidates designed"))


def _verdict(known: DeskComparison, stale: bool) -> Component:
    trouble = warning(known.options, known.targets)
    if stale:
        return status(
            "The work was changed since: compare again. These candidates are of the old one.", "warn"
        )
    if trouble:
        return status(words.capital(trouble) + ".", "bad")
    best = known.options[0]
    text = f"Cheapest: {best.gpus} x {best.gpu} with {best.framework} on {best.backend}"
    return status(f"{text}.", "good")


def _table(known: DeskComparison, question: Question) -> Iterator[Component]:
    listed = rows(known.options)
    shown = written(table(known.options, listed, known.targets, known.steps))
    if listed:
        numbers, titles = [column.kind.number for column in shown.columns], shown.titles
        head = [
            html.Th(title, scope="col", className="n" if number else "")
            for title, number in zip(titles, numbers, strict=True)
        ]
        body = [
            _row(
                option, {t: str(cell.text) for t, cell in zip(titles, cells, strict=True)}, numbers, question
            )
            for option, cells in zip(listed, shown.rows, strict=True)
        ]
        yield html.Div(
            html.Table([html.Thead(html.Tr(head)), html.Tbody(body)]), className="scroll", tabIndex="0"
        )
        yield html.P("Press a row for its plan.", className="reading")
    for note in notes(known.options, listed, known.targets, known.steps):
        yield html.P(note, className="reading")


def _row(
    option: ClusterOption, texts: Mapping[str, str], numbers: list[bool], question: Question
) -> Component:
    """A row that asks for its plan; the one that is asked now is marked.

    `texts`: by the title of the column, which a phone shows in each cell.
    """
    name = "|".join(str(getattr(option, field)) for field in CHOSEN)
    asked = all(question.get(field) == str(getattr(option, field)) for field in CHOSEN)
    label = f"show {option.gpus} x {option.gpu} {option.framework}"
    front, gpus, *rest = texts.values()
    shown: list[Component] = [front, html.Button(gpus, **spoken(label=label)), *rest]
    cells = [
        html.Td(cell, className="n" if number else "", **dict[str, Any]({"data-title": title}))
        for title, cell, number in zip(texts, shown, numbers, strict=True)
    ]
    kind = " ".join(filter(None, ("front" if option.on_front else "", "now" if asked else "")))
    return html.Tr(cells, id={"row": name}, className=kind)
