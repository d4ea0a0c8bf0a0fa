"""`rlhfsim report`: a plan, a what-if or a run as one page that works offline."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click

from rlhfsim.calibration.comparison.side_by_side import read
from rlhfsim.cli.params import (
    FOLDER,
    PATH,
    Given,
    Number,
    Output,
    bad_option,
    check_output,
    command,
    flag,
    json_option,
    option,
)
from rlhfsim.errors import RlhfsimError, shown
from rlhfsim.plan import OLDER, read_plan
from rlhfsim.plan import SCHEMA as PLAN_SCHEMA
from rlhfsim.present.answers.compare import run_page
from rlhfsim.present.answers.tree import Page
from rlhfsim.present.answers.whatif import whatif_page
from rlhfsim.present.answers.written import page_data
from rlhfsim.present.basis import basis, cluster_of, profiles_of
from rlhfsim.present.html.page import write
from rlhfsim.present.pages.plan import plan_page
from rlhfsim.present.pages.points import points_page
from rlhfsim.run_folder import PLAN, TRACE
from rlhfsim.search.parallel import beside
from rlhfsim.specs.loading import parse_json, read_text
from rlhfsim.units import DAY, format
from rlhfsim.what_if.design import with_break_evens
from rlhfsim.what_if.scenarios.result import MAX_BYTES, SUFFIXES, read_whatif
from rlhfsim.what_if.scenarios.result import SCHEMA as WHATIF_SCHEMA
from rlhfsim.what_if.sizing import LIMIT_S, other_counts, other_sizes
from rlhfsim.what_if.verdict import check_plan, rejection

EPILOG = """\b
Examples:
  rlhfsim report plan.json
  rlhfsim report plan.json --no-sizes --title 'Proposal for the 70B run' --out proposal.html
  rlhfsim report whatif.json
  rlhfsim report points.csv
  rlhfsim report runs/a
  rlhfsim report plan.json --compare runs/a
"""
PAGE = Output("page")


@command(EPILOG)
@click.argument("source", type=PATH)
@option(
    "--compare",
    FOLDER,
    "The folder of a run: SOURCE is then the plan that it is held against.",
    metavar="RUN",
)
@option("--out", PAGE, "Where the page is written; default: the name of SOURCE with .html, here.")
@option("--title", None, "Title of the page; default: what it is about.")
@flag("--no-sizes", "Search neither the best plans of other numbers of GPUs nor break-evens.")
@option(
    "--size-limit",
    Number(0.1, DAY, "s"),
    "Longest search of all other numbers of GPUs together, and of break-evens, seconds.",
    default=LIMIT_S,
)
@json_option
@click.pass_context
def report(
    ctx: click.Context, /, source: Path, compare: Path | None, out: Path | None, as_json: bool, **given: Any
) -> None:
    """Write a plan, a what-if or a run as one page that works offline.

    SOURCE is a plan.json, a what-if result (rlhfsim whatif --out), its table of points (--csv, --parquet) or
    the folder of a run.

    Exit codes: 0 written, 1 written though the plan does not fit, 2 bad input.
    """
    where = out or Path(f"{Path(os.path.realpath(source)).stem}.html")
    check_output(where, PAGE, [source])
    reason = _rejection(source)
    page = _page(source, compare, given)
    write(where, page)
    figures = f"{len(page.figures)} figures" if page.figures else "a page"  # one of a table draws its own
    written = f"{figures} in {where} ({format(where.stat().st_size, 'byte')})"
    if as_json:
        verdict = {"fits": reason is None, "rejected_by": reason}
        click.echo(json.dumps(page_data(page, where) | verdict, indent=1))
    else:
        click.echo(shown(f"{page.verdict}\n{written}; open it in a browser, it needs no network"))
    if reason is not None:
        click.echo(f"does not fit: {reason}", err=as_json)
        ctx.exit(1)


def _rejection(source: Path) -> str | None:
    """Why the plan in SOURCE does not fit; None where it does, or where SOURCE is no plan.

    Raises:
        RlhfsimError: its framework does not run it.
    """
    if source.is_dir() or source.suffix in SUFFIXES or _schema(source) != PLAN_SCHEMA:
        return None
    plan = read_plan(source)
    cluster = cluster_of(plan, profiles_of(plan))
    if cluster is None:  # a profile is not here: the plan's own prediction is shown
        return None
    check_plan(plan, cluster)
    return rejection(plan, cluster)


def _page(source: Path, compare: Path | None, given: Given) -> Page:
    """The page that SOURCE asks for.

    Raises:
        RlhfsimError: SOURCE is none of the three, or --compare is given with something other than a plan.
    """
    title = given["title"]
    if source.suffix in SUFFIXES and source.is_file() and compare is None:
        return points_page(source, title=title)
    kind = None if source.is_dir() else _schema(source)
    if compare is not None:
        if kind != PLAN_SCHEMA:
            raise bad_option(
                "--compare goes with a plan",
                "as in rlhfsim report plan.json --compare runs/a; a run alone: rlhfsim report runs/a",
            )
        plan, run = shlex.quote(str(source)), shlex.quote(str(compare))
        commands = f"rlhfsim compare {plan} {run}\nrlhfsim report {plan} --compare {run}"
        return run_page(read(compare, source), commands=commands, title=title)
    if kind is None:
        _check_run(source)
        run = shlex.quote(str(source))
        return run_page(read(source), commands=f"rlhfsim compare {run}\nrlhfsim report {run}", title=title)
    if kind == WHATIF_SCHEMA:
        return whatif_page(read_whatif(source), file=source.name, title=title)
    priced = read_plan(source, as_priced=True)
    if given["no_sizes"]:
        return plan_page(priced, file=source.name, title=title)
    limit_s, cluster = given["size_limit"], basis(priced).cluster
    with _searching(len(other_counts(priced))) as done:
        best, told = beside(
            partial(other_sizes, priced, cluster, limit_s=limit_s, done=done),
            partial(with_break_evens, priced, cluster, limit_s),
        )
    return plan_page(told, file=source.name, title=title, sizes=best)


def _schema(source: Path) -> str:
    data = parse_json(read_text(source, MAX_BYTES), str(source)).data
    schema = data.get("schema") if isinstance(data, dict) else None
    schema = PLAN_SCHEMA if schema == OLDER else schema
    if schema not in (PLAN_SCHEMA, WHATIF_SCHEMA):
        raise RlhfsimError(
            "nothing-to-report",
            f"this is neither a plan nor a what-if: its schema is {str(schema)[:40]!r}",
            place=source,
            help="write one with: rlhfsim design --out plan.json, or rlhfsim whatif SCENARIO --out "
            "whatif.json; a run is a folder",
        )
    return str(schema)


def _check_run(folder: Path) -> None:
    if not (folder / TRACE).is_file() and (folder / PLAN).is_file():
        raise RlhfsimError(
            "not-a-run",
            f"there is a {PLAN} but no {TRACE} in this folder",
            place=folder,
            help=f"report the plan alone: rlhfsim report {folder / PLAN}",
        )


@contextmanager
def _searching(count: int) -> Iterator[Callable[[], None]]:
    """A progress bar on the error stream while other sizes are searched."""
    if not count:
        yield lambda: None
        return
    with click.progressbar(length=count, label="best plans of other sizes", file=sys.stderr) as bar:
        yield lambda: bar.update(1)
