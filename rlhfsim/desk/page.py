"""The page: fields on one side, the answer on the other, and the functions that join them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any
from uuid import uuid4

from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update
from dash.exceptions import PreventUpdate

from rlhfsim.desk.answer import FINAL, Answer, DeskQuestion
from rlhfsim.desk.blocks import places, spoken
from rlhfsim.desk.searches import Searches
from rlhfsim.desk.state import (
    BASE,
    DeskState,
    Field,
    Question,
    command,
    kept,
    of_search,
    query,
    to_search,
    wrong,
)
from rlhfsim.desk.view import answer_view, progress
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import plan_text

Component = Any
Fields = Mapping[str, Field]
POLL_MS, REST_MS = 400, 3_600_000
"""From one look at what the search has found to the next: while it runs, and after its end."""
FIRST_WAIT_S = 1.0
"""How long a look waits for a first answer."""
FACTORS = {"half": 0.5, "double": 2.0}


@frozen
class Moved:
    """What a change on the page makes of it."""

    state: DeskState
    """What is answered from now on; as before where the change was wrong."""
    shown: Question
    """What the fields show."""
    messages: Mapping[str, str] = field(default_factory=dict)
    """Field -> what is wrong with it; "" for the whole question."""


def moved(
    cause: str,
    search: str,
    values: Question,
    before: DeskState,
    *,
    fields: Fields,
    read: Callable[[Question], DeskQuestion],
) -> Moved:
    """The page after a change of its address (`search`), of a field (its name), or a press of a button.

    `half` and `double` change the GPUs, `pin` compares with what is answered now, `unpin` stops that.
    """
    if cause == "search":
        try:
            to = of_search(search, fields)
        except RlhfsimError as error:
            return Moved(state=before, shown=before.question, messages={"": _text(error)})
        return _checked(to, before, fields, read)
    if cause == "pin":
        return Moved(state=DeskState(question=before.question, base=before.question), shown=values)
    if cause == "unpin":
        return Moved(state=DeskState(question=before.question), shown=values)
    if cause in FACTORS and re.fullmatch(r"\d{1,9}", values.get("gpus", "")):
        values = {**values, "gpus": str(max(1, round(int(values["gpus"]) * FACTORS[cause])))}
    return _checked(DeskState(question=values, base=before.base), before, fields, read)


def _checked(
    to: DeskState, before: DeskState, fields: Fields, read: Callable[[Question], DeskQuestion]
) -> Moved:
    """The new state where its question can be read; else the message next to the field."""
    found = wrong(read, to.question, before.question, fields)
    if found is None:
        return Moved(state=to, shown=to.question)
    return Moved(state=before, shown=to.question, messages={found[0]: _text(found[1])})


def _text(error: RlhfsimError) -> str:
    return f"{error.message}; {error.help}"[:300] if error.help else error.message


# --- layout -----------------------------------------------------------------------------------------


def layout(
    fields: Fields, start: str, tabs: Component, panels: Sequence[Component]
) -> Callable[[], Component]:
    """The page as it is served; every opened one has a name of its own.

    `panels`: what the other tabs show.
    """

    def served() -> Component:
        stores = [
            dcc.Location(id="address", refresh=False),
            dcc.Store(id="page", data=uuid4().hex),
            dcc.Store(id="state", data={"question": {}, BASE: {}}),
            dcc.Store(id="seen", data=""),
            dcc.Interval(id="poll", interval=REST_MS),
            dcc.Download(id="plan-file"),
            dcc.Store(id="start", data=start),
        ]
        header = html.Header(
            [html.H1("rlhfsim desk"), html.P(id={"message": ""}, className="message", role="alert")]
        )
        state, answer = html.Div(id="progress"), html.Div(id="answer", **spoken(live="off"))
        main = html.Main([_form(fields), tabs, state, answer, *panels], id="main")
        return html.Div([*stores, header, main])

    return served


def _form(fields: Fields) -> Component:
    buttons = [html.Button("Pin for comparison", id="pin"), html.Button("Unpin", id="unpin")]
    links = html.P(
        [html.A("Link to this question", id="link", href="?"), html.Button("Save plan.json", id="save")],
        className="row",
    )
    return html.Div(
        [*(_field(f) for f in fields.values()), html.P(buttons, className="row"), links], id="question"
    )


def _field(f: Field) -> Component:
    parts: list[Component] = [html.Label(f.label, htmlFor=f.name), _control(f)]
    if f.name == "gpus":
        halves = [html.Button("half", id="half"), html.Button("double", id="double")]
        parts[1] = html.Div([parts[1], *halves], className="row")
    if f.offered and f.kind == "text":
        parts.append(html.Datalist([html.Option(value=name) for name in f.offered], id=f"{f.name}-offered"))
    parts.append(html.Span(id={"message": f.name}, className="message", role="alert"))
    return html.Div(parts, className=f"field {f.kind}", id=f"field-{f.name}")


def _control(f: Field) -> Component:
    identity = {"field": f.name}
    if f.kind in ("one", "several"):
        return dcc.Dropdown(
            options=list(f.offered),
            id=identity,
            multi=f.kind == "several",
            placeholder=f.hint or "default",
            searchable=False,
        )
    offered: dict[str, Any] = {"list": f"{f.name}-offered"} if f.offered else {}
    return dcc.Input(
        id=identity,
        type="text",
        debounce=0.6,
        placeholder=f.hint,
        autoComplete="off",
        spellCheck=False,
        **offered,
    )


# --- callbacks --------------------------------------------------------------------------------------


def connect(app: Dash, fields: Fields, read: Callable[[Question], DeskQuestion], searches: Searches) -> None:
    """The callbacks of the page."""
    buttons = [Input(name, "n_clicks") for name in ("half", "double", "pin", "unpin")]

    @app.callback(
        Output("address", "search"),
        Output({"field": ALL}, "value"),
        Output({"message": ALL}, "children"),
        Output("state", "data"),
        Input("address", "search"),
        Input({"field": ALL}, "value"),
        *buttons,
        *places(State, "state.data", "start.data"),
    )
    def on_change(search: str, values: Sequence[Any], *more: Any) -> tuple[Any, ...]:
        data, start = more[-2:]
        before = DeskState(question=data["question"], base=data[BASE])
        cause = ctx.triggered_id or "address"
        name = cause["field"] if isinstance(cause, dict) else "search" if cause == "address" else cause
        given = kept({n: _written(v) for n, v in zip(fields, values, strict=True)}, fields)
        if name == "search" and before.question and search == to_search(before):
            raise PreventUpdate
        after = moved(name, search or f"?{start}", given, before, fields=fields, read=read)
        messages = [after.messages.get(n, "") for n in ("", *fields)]
        told = {"question": after.state.question, BASE: after.state.base}
        shown = [_value(f, after.shown.get(n)) for n, f in fields.items()]
        return to_search(after.state), shown, messages, no_update if told == data else told

    @app.callback(
        *places(Output, "progress.children", "answer.children", "seen.data", "poll.interval", "link.href"),
        *places(Input, "state.data", "poll.n_intervals"),
        Input({"retry": ALL}, "n_clicks"),
        *places(State, "page.data", "seen.data"),
        running=[(Output("poll", "disabled"), True, False)],  # a look that is overtaken is lost
    )
    def on_look(
        data: Mapping[str, Question], _: int | None, retry: Sequence[int | None], page: str, seen: str
    ) -> tuple[Any, ...]:
        if not data["question"]:
            raise PreventUpdate
        asking = DeskState(question=data["question"], base=data[BASE])
        again = isinstance(ctx.triggered_id, dict) and any(retry)
        return look(asking, page, seen, searches=searches, again=again)

    @app.callback(
        Output("plan-file", "data"),
        Input("save", "n_clicks"),
        State("state", "data"),
        prevent_initial_call=True,
    )
    def on_save(_: int | None, data: Mapping[str, Question]) -> Any:
        answer = searches.answer(query(data["question"]))
        return no_update if answer is None else plan_file(answer)


def look(
    asking: DeskState, page: str, seen: str, *, searches: Searches, again: bool = False
) -> tuple[Any, Any, Any, int, str]:
    """State of the search, the answer's components, what they show, milliseconds to the next look, the link.

    `seen` is what the page shows already: the answer is not sent again. `again`: what died is searched again.
    """
    now, pinned = query(asking.question), query(asking.base)
    searches.ask(page, (now, pinned) if pinned else (now,), again=again)
    answer = searches.answer(now, FIRST_WAIT_S)
    base = searches.answer(pinned) if pinned else None
    shows = "|".join([now, _stage(answer), pinned, _stage(base)])
    final = all(_stage(a) in FINAL for a in ((answer, base) if pinned else (answer,)))
    link, pause = to_search(asking), REST_MS if final else POLL_MS
    state = progress(answer, searches.searching_s(now))
    if shows == seen:
        return (no_update if final and not again else state), no_update, no_update, pause, link
    view = answer_view(answer, command(asking.question), base, pinned=bool(pinned))
    return state, view, shows, pause, link


def plan_file(answer: Answer) -> Any:
    """The plan as a file to save; nothing where nothing fits."""
    return no_update if answer.plan is None else {"content": plan_text(answer.plan), "filename": "plan.json"}


def _stage(answer: Answer | None) -> str:
    return answer.stage if answer else ""


def _written(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value or "")


def _value(f: Field, text: str | None) -> Any:
    """What a control holds for a text."""
    if f.kind == "several":
        return text.split(",") if text else []
    return text or (None if f.kind == "one" else "")
