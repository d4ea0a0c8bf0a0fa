"""`rlhfsim simulate`: one plan run step by step, with shared links, drawn lengths, stragglers and failures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.text import Text

from rlhfsim import units
from rlhfsim.api import cluster_of, simulate_file
from rlhfsim.cli.inputs import MAX_PRICE, json_option, on_command_line
from rlhfsim.cli.params import Number, ParamType, Whole, bad_option
from rlhfsim.cli.planned import profile_notes
from rlhfsim.errors import RlhfsimError
from rlhfsim.present.chrome_trace import chrome_path, write_chrome
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal import simulate as simulate_view
from rlhfsim.simulation.summary import FaultOptions, Simulation, SimulationOptions
from rlhfsim.specs.scenario import system_names
from rlhfsim.trace import write_trace
from rlhfsim.what_if.planned import fitting_change

F = TypeVar("F", bound=Callable[..., Any])
SCHEMA = "rlhfsim.simulation/1"
MAX_STEPS, MAX_REPLICATIONS = 100_000, 10_000
MAX_SECONDS = 1000 * 365 * units.DAY
EPILOG = """\b
Examples:
  rlhfsim simulate verl
  rlhfsim simulate plan.json --replications 10 --trace run.json
  rlhfsim simulate plan.json --straggler 0.05:1.5
  rlhfsim simulate plan.json --mtbf 5000h --restart 10min --checkpoint 60s
"""


class Straggler(ParamType):
    """`SHARE:SLOWDOWN`: how many ranks are slow, and how much."""

    name = "SHARE:SLOWDOWN"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, float]:
        """Share and slowdown.

        Raises:
            RlhfsimError: not two numbers, or outside their ranges.
        """
        rule = "write SHARE:SLOWDOWN as in 0.05:1.5 (5 % of the GPUs take 1.5 times as long)"
        share, colon, slowdown = str(value).partition(":")
        try:
            found = units.parse(share, "1"), units.parse(slowdown, "1")
        except RlhfsimError as error:
            raise bad_option(f"--straggler: {str(value)[:40]!r} is not SHARE:SLOWDOWN", rule) from error
        if not (colon and 0 <= found[0] <= 1 and 1 <= found[1] <= 100):
            raise bad_option(
                f"--straggler: {str(value)[:40]} is out of range",
                f"{rule}; 0 <= SHARE <= 1, 1 <= SLOWDOWN <= 100",
            )
        return found


class Interval(ParamType):
    """Seconds between checkpoints, or `auto`."""

    name = "TIME"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | None:
        """Seconds; None for `auto`."""
        if value is None or str(value).strip().lower() == "auto":
            return None
        return _TIME.convert(value, param, ctx)


class Duration(ParamType):
    """A time above zero, with its unit."""

    name = "TIME"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds.

        Raises:
            RlhfsimError: no time, or not above zero.
        """
        option = param.opts[0] if param else "time"
        try:
            seconds = units.parse(str(value), "s")
        except RlhfsimError as error:
            raise bad_option(f"{option}: {error.message}", "write it like 60 s, 10 min, 5000 h") from error
        if not 0 < seconds <= MAX_SECONDS:
            raise bad_option(
                f"{option}: {str(value)[:40]} is out of range",
                "give a time above 0, like 60 s, 10 min, 5000 h",
            )
        return seconds


_TIME = Duration()


_OPTIONS: list[Callable[[Any], Any]] = [
    click.argument("file", required=False),
    click.option(
        "--iterations",
        type=Whole(1, MAX_STEPS),
        default=20,
        show_default=True,
        help="Steps that are measured.",
    ),
    click.option(
        "--warmup",
        type=Whole(0, MAX_STEPS),
        default=0,
        show_default=True,
        help="Steps before them that no figure counts; staleness + 2 at least when async.",
    ),
    click.option(
        "--seed", type=Whole(0, 2**31), default=0, show_default=True, help="Seed of all that is random."
    ),
    click.option(
        "--replications",
        type=Whole(1, MAX_REPLICATIONS),
        default=1,
        show_default=True,
        help="Runs with seeds of their own: N, N + 1, ...",
    ),
    click.option(
        "--expected-lengths",
        is_flag=True,
        help="Every step has the expected response lengths; default: each draws its own.",
    ),
    click.option(
        "--reward-spread",
        type=Number(0, 4),
        default=0.0,
        show_default=True,
        help="Standard deviation of the log of reward times: 0.5.",
    ),
    click.option(
        "--straggler", type=Straggler(), help="Share of the GPUs that are slow, and how much: 0.05:1.5."
    ),
    click.option(
        "--mtbf", type=_TIME, help="Mean time between failures of one node: 5000h. Asks for goodput."
    ),
    click.option(
        "--restart",
        type=_TIME,
        default="10 min",
        show_default=True,
        help="From a failure until the run goes on.",
    ),
    click.option(
        "--checkpoint",
        type=_TIME,
        default="60 s",
        show_default=True,
        help="Time that one checkpoint blocks the run.",
    ),
    click.option(
        "--checkpoint-interval",
        type=Interval(),
        default="auto",
        show_default=True,
        help="Time between checkpoints, or auto: the best one.",
    ),
    click.option(
        "--trace",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="OUT.json",
        help="Write the trace, and OUT.chrome.json for ui.perfetto.dev.",
    ),
    click.option(
        "--price", type=Number(0, MAX_PRICE, "usd/h"), help="USD per GPU-hour, in place of the listed price."
    ),
    json_option,
]


def _options(command: F) -> F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command(epilog=EPILOG)
@_options
@click.pass_context
def simulate(ctx: click.Context, /, **given: Any) -> None:
    """Run one plan step by step: step times, waiting, shared links, memory over time.

    FILE is a plan.json, a scenario (YAML) or a shipped system (verl, openrlhf, trl, ...). Beyond
    `rlhfsim estimate`, calls that use one link at the same time slow each other down, response
    lengths differ from step to step, and asynchronous schedules fill their queues.

    Exit codes: 0 done, 1 the plan does not fit, 2 bad input.
    """
    _check(ctx, given)
    with progress(given["replications"]) as tick, on_command_line():
        answer = simulate_file(given["file"], options_of(given), price=given["price"], progress=tick)
        told = _told(given["file"], answer)
    written = given["trace"] if answer.trace is not None else None
    if written is not None and answer.trace is not None:
        write_trace(written, answer.trace)
        write_chrome(chrome_path(written), answer.trace)
    if given["as_json"]:
        click.echo(json.dumps(as_data(told, written), indent=1))
    else:
        show(told, view.console(), written)
    ctx.exit(0 if answer.rejected_by is None else 1)


@dataclass(frozen=True, slots=True)
class Told:
    """A run and what is said about it."""

    answer: Simulation
    notes: tuple[str, ...]
    remedy: str | None
    """The smallest change with which the plan fits; None where it fits."""


def _told(file: str, answer: Simulation) -> Told:
    plan = answer.plan
    if answer.rejected_by is None:
        return Told(answer, profile_notes(file), None)
    return Told(answer, profile_notes(file), fitting_change(plan, cluster_of(plan)))


def _check(ctx: click.Context, given: dict[str, Any]) -> None:
    """A file, and no option that means nothing without another one."""
    if given["file"] is None:
        raise bad_option(
            "FILE is missing", f"name a plan.json, a scenario or a system: {', '.join(system_names())}"
        )
    for name in ("restart", "checkpoint", "checkpoint_interval"):
        source = ctx.get_parameter_source(name)
        if given["mtbf"] is None and source is click.core.ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise bad_option(f"{option} without --mtbf: nothing fails", "add --mtbf 5000h")


def options_of(given: dict[str, Any]) -> SimulationOptions:
    """What was asked, as data."""
    faults = None
    if given["mtbf"] is not None:
        faults = FaultOptions(
            mtbf_s=given["mtbf"],
            restart_s=given["restart"],
            checkpoint_s=given["checkpoint"],
            interval_s=given["checkpoint_interval"],
        )
    return SimulationOptions(
        steps=given["iterations"],
        warmup=given["warmup"],
        seed=given["seed"],
        replications=given["replications"],
        drawn_lengths=not given["expected_lengths"],
        reward_spread=given["reward_spread"],
        straggler=given["straggler"],
        faults=faults,
    )


@contextmanager
def progress(replications: int) -> Iterator[Callable[[], None] | None]:
    """A bar on a terminal that somebody watches; it only moves to and fro for a single run."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import Progress

    with Progress(console=view.console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=replications if replications > 1 else None)
        yield lambda: bar.advance(task)


# --- for people -------------------------------------------------------------------------------------


def show(told: Told, console: Console, trace: Path | None) -> None:
    """Verdict when it does not fit, or the run; then where the traces lie."""
    answer = told.answer
    for note in told.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    if answer.rejected_by is not None:
        console.print(view.header(answer.plan))
        console.print(Text(f"does not fit: {answer.rejected_by}", style="bold red"))
        console.print(Text(f"smallest change that fits: {told.remedy}", style="bold"))
        return
    for part in simulate_view.report(answer, console.width):
        console.print(part)
    if trace is not None:
        console.print()
        console.print(
            view.labelled(
                {"trace": str(trace), "to see it": f"open {chrome_path(trace)} at https://ui.perfetto.dev"}
            )
        )


# --- for machines -----------------------------------------------------------------------------------


def as_data(told: Told, trace: Path | None) -> dict[str, Any]:
    """The same content; schema in docs/plan.md."""
    answer = told.answer
    verdict = {
        "schema": SCHEMA,
        "fits": answer.rejected_by is None,
        "rejected_by": answer.rejected_by,
        "remedy": told.remedy,
        "notes": list(told.notes),
        "plan": answer.plan.to_dict(),
    }
    if answer.rejected_by is not None:
        return verdict
    return {
        **verdict,
        "run": {
            "steps": len(answer.runs[0]),
            "warmup": answer.warmup,
            "seed": answer.seed,
            "replications": len(answer.runs),
            "randomness": answer.randomness,
        },
        "step": {
            "mean_s": answer.mean,
            "p10_s": answer.percentile(10),
            "p50_s": answer.percentile(50),
            "p90_s": answer.percentile(90),
            "estimate_s": answer.estimate.prediction.step_s,
        },
        "step_seconds": [list(run) for run in answer.runs],
        "pools": [asdict(pool) for pool in answer.pools],
        "contention": [{"link": link, "seconds": seconds} for link, seconds in answer.contention.items()],
        "staleness": {"mean": answer.staleness[0], "max": answer.staleness[1]} if answer.staleness else None,
        "queue": {"mean": answer.queue.mean, "max": answer.queue.maximum} if answer.queue else None,
        "goodput": asdict(answer.goodput) if answer.goodput else None,
        "trace": str(trace) if trace else None,
        "chrome_trace": str(chrome_path(trace)) if trace else None,
    }
