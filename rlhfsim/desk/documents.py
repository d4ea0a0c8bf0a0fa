"""The fourth tab: files of a run, of jobs of a pool, of a purchase or of a reward, pasted or dropped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dash import Dash, Input, Output, State, ctx, dcc, html

from rlhfsim.desk.blocks import Component, block, places, status, tiles, verdict_line
from rlhfsim.desk.files import (
    HINT,
    MAX_CHARACTERS,
    DocumentAnswer,
    NamedFile,
    ReadDocuments,
    decoded,
    named_files,
)
from rlhfsim.desk.state import Question, query
from rlhfsim.desk.tasks import PageTask, PageTasks
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.present import words
from rlhfsim.present.answers.tree import Code, PageSection

POLL_MS = 500
EXAMPLE = """steps: 600
lengths:
  - {step: 0, mean: 600}
  - {step: 600, mean: 3k, low: 2k, high: 4k}
stages:
  - {start: 0, max: 4k}
  - {start: 300, max: 8k}"""


@frozen
class DocumentTask(PageTask):
    """The answer to files."""

    parts: tuple[Component, ...] = ()
    """Once it is there."""

    @property
    def complete(self) -> bool:
        """Whether the answer is there."""
        return bool(self.parts)


def answer_documents(
    read: ReadDocuments, question: str, files: tuple[NamedFile, ...], pipe: Connection
) -> None:
    """Send the answer as components."""
    found = read(question, files)
    pipe.send({"parts": tuple(page_view(found))})


def page_view(answer: DocumentAnswer) -> Iterator[Component]:
    """What the page of `--page` has: verdict, its figures, sections, and appendices closed."""
    page = answer.page
    yield verdict_line(page.verdict, page.mark)
    yield html.P(f"{page.title}: {page.subtitle}" if page.subtitle else page.title, className="subtitle")
    yield tiles(page.tiles)
    if page.sure:
        sure = html.Ul([html.Li(words.tied(line)) for line in page.sure])
        yield html.Details([html.Summary("How sure this is"), sure])
    yield from map(_section, page.sections)
    yield block(Code("The same answer in a terminal", answer.command))


def _section(section: PageSection) -> Component:
    lead = [html.P(section.lead, className="lead")] if section.lead else []
    parts = [*lead, *map(block, section.blocks)]
    if section.appendix:
        return html.Details([html.Summary(section.heading), *parts])
    return html.Section([html.H2(section.heading), *parts])


# --- the tab ----------------------------------------------------------------------------------------


def documents_panel() -> Component:
    """Where files are pasted or dropped, and the answer."""
    drop = dcc.Upload(HINT, id="files-drop", className="drop", max_size=MAX_CHARACTERS, multiple=True)
    text = dcc.Textarea(id="files-text", spellCheck=False, placeholder=EXAMPLE)
    how = html.P(
        "GPUs, and for a run or a reward also model, batch and targets, are those of the question. Several "
        "files: each begins with a line --- # NAME.",
        className="reading",
    )
    buttons = [html.Button("Answer", id="files-ask"), html.Button("Stop", id="files-stop", disabled=True)]
    ticks = dcc.Interval(id="files-ticks", interval=POLL_MS, disabled=True)
    shown = html.Div(id="files-answer")
    return html.Div(
        [drop, text, how, html.P(buttons, className="row"), html.Div(id="files-state"), shown, ticks],
        id="files",
        className="paste",
        hidden=True,
    )


def connect_documents(app: Dash, tasks: PageTasks[DocumentTask], work: Callable[..., Any]) -> None:
    """The callbacks of the tab; `work(query, files)` makes what the process does."""

    @app.callback(
        Output("files-text", "value"),
        Input("files-drop", "contents"),
        *places(State, "files-drop.filename", "files-text.value"),
        prevent_initial_call=True,
    )
    def on_drop(contents: list[str], names: list[str], text: str | None) -> str:
        dropped = [f"--- # {name}\n{_text(given)}" for name, given in zip(names, contents, strict=True)]
        return "\n".join([*([text] if text and text.strip() else []), *dropped])

    @app.callback(
        *places(
            Output,
            *("files-state.children", "files-answer.children", "files-ticks.disabled", "files-stop.disabled"),
        ),
        *places(Input, "files-ask.n_clicks", "files-stop.n_clicks", "files-ticks.n_intervals"),
        *places(State, "files-text.value", "state.data", "page.data"),
        prevent_initial_call=True,
    )
    def on_ask(*given: Any) -> tuple[Any, ...]:
        text, data, page = given[-3:]
        if ctx.triggered_id == "files-ask":
            return _asked(tasks, work, text or "", data, page)
        if ctx.triggered_id == "files-stop":
            tasks.stop(page)
        return _looked(tasks.known(page))


def _asked(
    tasks: PageTasks[DocumentTask],
    work: Callable[..., Any],
    text: str,
    data: Mapping[str, Question],
    page: str,
) -> tuple[Any, ...]:
    try:
        files = named_files(text)
    except RlhfsimError as error:
        tasks.stop(page)
        return _looked(DocumentTask(trouble=error))
    tasks.start(page, DocumentTask(), work(query(data["question"]), files))
    return _looked(tasks.known(page))


def _looked(known: DocumentTask | None) -> tuple[Any, ...]:
    """State, answer, and whether looking and stopping are over."""
    if known is None:
        return [], [], True, True
    if known.trouble is not None:
        return status(_said(known.trouble), "bad"), [], True, True
    if known.running:
        elapsed = words.plural(int(time.monotonic() - known.began), "second")
        return status(f"Searching, asked {elapsed} ago.", "busy"), [], False, False
    return [], list(known.parts), True, True


def _said(error: RlhfsimError) -> str:
    """The message with the line of the file, and the remedy."""
    place = error.place
    at = f" ({Path(place.file).name}:{place.line})" if place is not None and place.line else ""
    return "; ".join(filter(None, (error.message + at, error.help)))


def _text(contents: str) -> str:
    try:
        return decoded(contents)
    except RlhfsimError as error:
        return f"# {error.message}"
