"""The third tab: a launch script or a log, pasted or dropped; the doctor or the watch answers.

What is given is data: it is parsed and never run, names no other file, and is bounded in size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from dash import Dash, Input, Output, State, ctx, dcc, html
from dash.exceptions import PreventUpdate

from rlhfsim.desk.blocks import Component, block, places, status
from rlhfsim.desk.files import MAX_CHARACTERS, check_size, decoded
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.logs.files import LogFiles
from rlhfsim.interchange.logs.imported import Choices
from rlhfsim.interchange.logs.records import record_of_json
from rlhfsim.interchange.logs.said import said_of
from rlhfsim.present.answers import doctor as doctor_view
from rlhfsim.present.answers import watch as watch_view
from rlhfsim.present.answers.tree import Code
from rlhfsim.present.terminal.console import as_text
from rlhfsim.present.terminal.page import parts
from rlhfsim.what_if.doctor.case import Case
from rlhfsim.what_if.doctor.diagnosis import diagnose
from rlhfsim.what_if.watch import JobWatch, Judgement

MAX_REQUEST_BYTES = 8 * 2**20
"""Most bytes that a page sends: a dropped file comes in base64, next to what was pasted."""
FORMS = (".csv", ".json", ".jsonl", ".log")
"""Ends of names that say how a log reads."""
HINT = "Paste a launch script, a configuration or the log of a run, or drop its file here."


class PastedAnswer(NamedTuple):
    """What is said of a script or a log."""

    title: str
    good: bool
    text: str
    """As a terminal shows it."""


def judge(text: str, gpu: str, name: str, *, files: bool) -> PastedAnswer:
    """What the doctor says of a script, or the watch of a log; `files`: it may name models of this machine.

    Raises:
        RlhfsimError: too large, neither of both, or not enough is said.
    """
    check_size(text, "rlhfsim doctor and rlhfsim import-run read files of any size in a terminal")
    if not text.strip():
        raise RlhfsimError("nothing-given", "there is nothing to judge", help=HINT)
    if not files:
        _check_no_model(said_of(text, LogFiles(), ()).values)
    return _of_log(text, gpu, name) or _of_script(text, gpu, files=files)


def _of_log(text: str, gpu: str, name: str) -> PastedAnswer | None:
    """None where no step of a run is in it."""
    lines = text.lstrip().splitlines()
    usual = ".jsonl" if lines and record_of_json(lines[0]) else ".log"
    suffix = Path(name).suffix if Path(name).suffix in FORMS else usual
    with TemporaryDirectory(prefix="rlhfsim-") as folder:
        log = Path(folder) / f"pasted{suffix}"
        log.write_text(text)
        watch = JobWatch(log, choices=Choices(gpu=gpu or None))
        events = [*watch.look(0.0, last=True)]
    judged = next((event for event in events if isinstance(event, Judgement)), None)
    if judged is None:
        return None
    shown = as_text(part for event in events for part in parts(watch_view.page(event)))
    title = f"A log of {judged.framework.title}: step {judged.found.logged:,}"
    return PastedAnswer(title=title, good=not shown.count("warning["), text=shown)


def _of_script(text: str, gpu: str, *, files: bool) -> PastedAnswer:
    configuration, settings = read_configuration(text, {})
    if not files:
        _check_no_model(settings.values)
    if not gpu:
        raise RlhfsimError("no-gpu", "nothing says what it is to run on", help="name the kind of GPU above")
    answer = diagnose(Case(configuration=configuration, settings=settings, gpu=gpu))
    title = f"A configuration of {configuration.title}"
    return PastedAnswer(title=title, good=answer.judged.fits, text=as_text(parts(doctor_view.page(answer))))


def _check_no_model(values: Mapping[str, Any]) -> None:
    """Refuse the folder of a model of this machine.

    Raises:
        RlhfsimError: a value is one.
    """
    for key, value in values.items():
        if (
            isinstance(value, str)
            and "/" in value
            and len(value) < 1000
            and (Path(value) / "config.json").exists()
        ):
            raise RlhfsimError(
                "names-a-file",
                f"{key} names a folder of this machine",
                help="files are read only where --host is this machine",
            )


# --- the tab ----------------------------------------------------------------------------------------


def pasted_panel() -> Component:
    """Where it is pasted or dropped, the GPU, the answer."""
    drop = dcc.Upload(HINT, id="own-file", className="drop", max_size=MAX_CHARACTERS)
    text = dcc.Textarea(id="own-text", spellCheck=False, placeholder="python3 -m verl.trainer.main_ppo ...")
    gpu = dcc.Input(id="own-gpu", type="text", placeholder="h100", autoComplete="off", spellCheck=False)
    controls = html.P(
        [html.Label("Kind of GPU", htmlFor="own-gpu"), gpu, html.Button("Judge", id="own-judge")],
        className="row field",
    )
    answer = dcc.Loading(html.Div(id="own-answer"), delay_show=300)
    return html.Div([drop, text, controls, answer], id="own", className="paste", hidden=True)


def connect_pasted(app: Dash, *, files: bool) -> None:
    """The callback of the tab."""

    @app.callback(
        Output("own-answer", "children"),
        *places(Input, "own-judge.n_clicks", "own-file.contents"),
        *places(State, "own-file.filename", "own-text.value", "own-gpu.value"),
        prevent_initial_call=True,
    )
    def on_judge(
        _: int | None, contents: str | None, name: str | None, text: str | None, gpu: str | None
    ) -> Any:
        dropped = ctx.triggered_id == "own-file"
        if dropped and contents is None:
            raise PreventUpdate
        given = contents if dropped and contents else text or ""
        return list(
            answered(
                lambda: judge(
                    decoded(given) if dropped else given, (gpu or "").strip(), name or "", files=files
                )
            )
        )


def answered(ask: Callable[[], PastedAnswer]) -> Iterator[Component]:
    """The answer, or why there is none."""
    try:
        answer = ask()
    except RlhfsimError as error:
        yield status("; ".join(filter(None, (error.message, error.help))), "bad")
        return
    yield status(f"{answer.title}.", "good" if answer.good else "bad")
    yield block(Code("What it comes to", answer.text))
