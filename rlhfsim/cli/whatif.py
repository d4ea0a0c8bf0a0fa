"""`rlhfsim whatif`: a scenario's questions, every point designed anew and compared with the base."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any

import click

from rlhfsim import api
from rlhfsim.cli import completion
from rlhfsim.cli.constraints import require_option
from rlhfsim.cli.params import (
    COMMAND_LINE,
    FOLDER,
    Given,
    Output,
    Several,
    Whole,
    Words,
    bad_option,
    command,
    emit,
    flag,
    json_option,
    option,
)
from rlhfsim.errors import shown
from rlhfsim.extras import need
from rlhfsim.outputs import cache_folder
from rlhfsim.present.answers.whatif import whatif_page
from rlhfsim.present.terminal.console import console
from rlhfsim.present.terminal.page import parts
from rlhfsim.search.parallel import cores
from rlhfsim.specs.loading import parse_yaml
from rlhfsim.units import format
from rlhfsim.what_if.scenarios.document import scenario_names
from rlhfsim.what_if.scenarios.result import SUFFIXES, WhatIf

MAX_JOBS = 1024
INTERRUPTED = 130
MOST_S = 15 * 60.0
"""Longer searches are asked about."""
LOCAL = "local"
"""Value of a bare `--ray`."""
DETAILS = ("layouts", "tornado", "changes", "notes", "all")
"""What `--detail` adds."""
EPILOG = """\b
Examples:
  rlhfsim whatif half-the-gpus
  rlhfsim whatif responses-4x-longer --set workload.model=8b --set cluster.node_groups.0.gpus=16
  rlhfsim whatif spot-prices --only 'spot*' --out whatif.json
  rlhfsim whatif half-the-gpus --require 'step_time<150s'
  rlhfsim whatif my-scenario.yaml --csv points.csv --jobs 8

\b
""" + fill(f"Shipped scenarios: {', '.join(scenario_names())}", 90, break_on_hyphens=False)


@command(EPILOG)
@click.argument("scenario", required=False, shell_complete=completion.scenarios)
@option(
    "--set settings",
    Words("PATH=VALUE"),
    "Change the base before anything else: cluster.node_groups.0.gpus=32; repeatable.",
    multiple=True,
)
@option(
    "--only", Words("NAME"), "Only points of this name (* matches), and the base; repeatable.", multiple=True
)
@require_option
@option("--jobs", Whole(1, MAX_JOBS), "Searches at the same time; default: one for each core.")
@option(
    "--ray",
    Words("[ADDRESS]"),
    "Search on a Ray cluster; without an address one is started here and ended.",
    is_flag=False,
    flag_value=LOCAL,
)
@option("--cache", FOLDER, "Where designs are kept; default: ~/.cache/rlhfsim/designs.", metavar="FOLDER")
@flag("--no-cache", "Keep nothing and search everything.")
@flag("--yes", "Search on where all points take more than 15 minutes; else that is refused with its cost.")
@option("--csv", Output("points.csv"), "Write the table of points as CSV.", metavar="FILE")
@option("--parquet", Output("points.parquet"), "Write the table of points as Parquet.", metavar="FILE")
@option("--out", Output("what-if"), "Write the result as JSON, with every plan.", metavar="FILE")
@option(
    "--detail",
    Several("part", DETAILS),
    f"Tables below points and break-evens: {', '.join(DETAILS)}.",
    default="",
)
@json_option
@click.pass_context
def whatif(ctx: click.Context, /, **given: Any) -> None:
    """Design again under every change of a scenario: what would it cost, and which plan then wins?

    SCENARIO is a YAML file or the name of a shipped one.
    """
    if given["scenario"] is None:
        raise bad_option("no scenario is given", f"give a file, or one of: {', '.join(scenario_names())}")
    if given["cache"] is not None and given["no_cache"]:
        raise bad_option("--cache and --no-cache", "drop one of the two")
    files = _files(given)
    _need_libraries(given)
    folder = None if given["no_cache"] else given["cache"] or cache_folder("designs")
    state = _Done()
    try:
        answer = _answer(given, folder, state)
    except KeyboardInterrupt:
        click.echo(shown(_interrupted(state, folder)), err=True)
        ctx.exit(INTERRUPTED)
    for path in files:
        if not (answer.written and path.suffix in SUFFIXES):
            answer.write(path)
    emit(given["as_json"], answer.to_dict, lambda: _shown(answer, folder, given))
    met = any(all(target.met for target in point.targets) for point in answer.everything if point.plan)
    ctx.exit(0 if answer.base.plan is not None and met else 1)


def _shown(answer: WhatIf, folder: Path | None, given: Given) -> Iterator[Any]:
    yield from parts(whatif_page(answer), console().width, given["detail"])
    p = answer.provenance
    took = f"designs: {p.searched:,} searched, {p.from_cache:,} from an earlier run; {format(p.seconds, 's')}"
    yield f"{took}; kept in {folder}" if folder is not None and p.searched else took
    if given["out"] is None:
        yield "keep this result with --out whatif.json"


@dataclass(slots=True)
class _Done:
    """How far the searches are, and whether Ctrl-C was pressed."""

    done: int = 0
    wanted: int = 0
    interrupted: bool = False

    def stop(self, signum: int, frame: object) -> None:
        """On Ctrl-C. Python drops what is raised while a process forks, so it is remembered too."""
        self.interrupted = True
        raise KeyboardInterrupt


def _answer(given: Given, folder: Path | None, state: _Done) -> WhatIf:
    address = given["ray"]
    with _progress(state) as tell:
        answer = api.whatif(
            given["scenario"],
            settings=_settings(given["settings"]),
            only=given["only"],
            require=given["require"],
            jobs=given["jobs"],
            ray=None if address is None else "" if address == LOCAL else address,
            cache=folder,
            progress=tell,
            most_s=None if given["yes"] or address is not None else MOST_S * (given["jobs"] or cores()),
            tables=[given[kind] for kind in ("csv", "parquet") if given[kind] is not None],
        )
    command = shlex.join(["rlhfsim", *sys.argv[1:]])
    return replace(answer, provenance=replace(answer.provenance, command=command))


def _interrupted(state: _Done, folder: Path | None) -> str:
    if folder is None:
        return "interrupted; nothing is kept (--no-cache)"
    return (
        f"interrupted: {state.done} of {state.wanted} designs are kept in {folder}; the same command "
        "goes on from there"
    )


def _settings(texts: Sequence[str]) -> dict[str, Any]:
    """`PATH=VALUE` as patches; the value is read as YAML.

    Raises:
        RlhfsimError: another form, or a path that is given twice.
    """
    patches: dict[str, Any] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not (path.strip() and equals):
            raise bad_option(
                f"--set {text[:60]!r} is not PATH=VALUE", "as in --set cluster.node_groups.0.gpus=32"
            )
        if path.strip() in patches:
            raise bad_option(f"--set {path.strip()[:60]} is given twice", "give it once")
        patches[path.strip()] = parse_yaml(value, COMMAND_LINE.file).data
    return patches


def _files(given: Given) -> list[Path]:
    """What is to be written; the option says the form, and the name must agree.

    Raises:
        RlhfsimError: it does not.
    """
    for kind in ("csv", "parquet"):
        path = given[kind]
        if path is not None and path.suffix != f".{kind}":
            raise bad_option(
                f"--{kind} {path}: the name does not end in .{kind}", f"as in --{kind} points.{kind}"
            )
    out = given["out"]
    if out is not None and out.suffix in SUFFIXES:
        raise bad_option(f"--out {out} would be JSON", f"give --{out.suffix[1:]} {out}")
    return [given[kind] for kind in ("out", "csv", "parquet") if given[kind] is not None]


def _need_libraries(given: Given) -> None:
    """Check before the searches, not after minutes of them."""
    if given["parquet"] is not None:
        need("pyarrow", purpose="--parquet", otherwise="or give --csv")
    if given["ray"] is not None:
        need("ray", purpose="--ray", otherwise="or leave it out to use the cores of this machine")


@contextmanager
def _progress(state: _Done) -> Iterator[Any]:
    """A bar on standard error while designs are searched; silent where that is no terminal."""
    from rlhfsim.present.terminal.progress import counting

    before = signal.signal(signal.SIGINT, state.stop)
    with counting("designs") as bar:
        task, began = bar.add_task("designs", total=None, each=""), time.monotonic()

        def tell(done: int, wanted: int) -> None:
            state.done, state.wanted = done, wanted
            if state.interrupted:
                raise KeyboardInterrupt
            bar.update(task, completed=done, total=wanted, each=f"{done / (time.monotonic() - began):.2g}/s")
            bar.refresh()

        try:
            yield tell
        finally:
            signal.signal(signal.SIGINT, before)
