"""`rlhfsim watch`: a job that runs, followed by its logs and held against its plan."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from rlhfsim.calibration.watching.causes import MEASURES, Condition, condition
from rlhfsim.cli.import_run import RUN, choices, log_options, run_files
from rlhfsim.cli.params import FILE, Number, Whole, Words, emit, flag, on_command_line, option
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import read_plan
from rlhfsim.present.answers import watch as view
from rlhfsim.present.terminal.console import console
from rlhfsim.present.terminal.page import parts
from rlhfsim.what_if.watch import Event, JobWatch

EPILOG = """\b
Examples:
  rlhfsim watch job.log
  rlhfsim watch outputs/2026-08-20/ --gpu h100 --steps 500 --fail-on 'oom-risk>0.5'
  rlhfsim watch runs/a --once --json
  rlhfsim watch job.log --plan plan.json --fail-on 'step-ratio>1.5' --fail-on 'quiet-s>1800'
"""
MAX_STEPS = 100_000_000


@click.command(epilog=EPILOG)
@click.argument("path", type=RUN, metavar="LOG|FOLDER")
@option("--plan", FILE, "plan.json that the job runs. Default: what the doctor says of its configuration.")
@log_options
@option("--steps", Whole(1, MAX_STEPS), "Steps of the whole run: how far is looked ahead, and when it ends.")
@option(
    "--fail-on", Words("CONDITION"), f"End with exit code 1 at NAME>X: {', '.join(MEASURES)}.", multiple=True
)
@option("--every", Number(0.1, 3600, "s"), "Time between two looks.", default="5s")
@flag("--once", "Judge what is there, and end.")
@flag("--json as_json", "Print one JSON object a line.")
@click.pass_context
def watch(ctx: click.Context, /, path: Path | str, plan: Path | None, as_json: bool, **given: Any) -> None:
    """Follow a job that runs: against its plan, when memory runs out, what grows.

    LOG is what import-run reads, the folder of the run, or its address at Weights & Biases. A file need not
    be there yet. After five steps, and whenever their number has doubled, it says how the run compares with
    its plan; what is wrong it says once.

    Exit codes: 0 watched, 1 a condition of --fail-on is met, 2 bad input, 130 Ctrl-C.
    """
    with on_command_line():
        conditions = [condition(text) for text in given["fail_on"]]
        priced = read_plan(plan, as_priced=True) if plan else None
        chosen = choices(given)
    with run_files(path) as (files, update):
        watched = JobWatch(
            files, plan=priced, framework=given["framework"], choices=chosen, steps=given["steps"]
        )
        looks = Looks(every_s=given["every"], once=given["once"], update=update)
        code = _follow(watched, conditions, looks, as_json)
    ctx.exit(code)


@frozen
class Looks:
    """When a log is looked at."""

    every_s: float
    once: bool
    update: Callable[[], None]
    """Brings what is new where the log is elsewhere."""


def _follow(watched: JobWatch, conditions: list[Condition], looks: Looks, as_json: bool) -> int:
    """Look until a condition is met, the run has ended, or somebody ends the watch; the exit code."""
    while True:
        for event in watched.look(now(), last=looks.once):
            _tell(event, as_json)
        if watched.found is not None:
            for one in conditions:
                if (value := one.value_in(watched.found)) is not None:
                    _tell_failed(one, value, as_json)
                    return 1
        if looks.once and watched.found is None:
            raise RlhfsimError(
                "no-step-yet",
                "no step has ended in this log",
                place=watched.path,
                help="watch without --once waits for one",
            )
        if looks.once or watched.ended:
            return 0
        pause(looks.every_s)
        looks.update()


def now() -> float:
    """Seconds of a clock that only goes forward."""
    return time.monotonic()


def pause(seconds: float) -> None:
    """Wait for the log to grow."""
    time.sleep(seconds)


def _tell(event: Event, as_json: bool) -> None:
    page = view.page(event)
    emit(as_json, lambda: page.as_data, lambda: parts(page, console().width), indent=None)


def _tell_failed(one: Condition, value: float, as_json: bool) -> None:
    data = {"event": "failed", "condition": one.text, "name": one.name, "value": value}
    click.echo(json.dumps(data) if as_json else view.failed(one, value))
