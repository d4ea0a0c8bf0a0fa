"""`rlhfsim simulate`: one plan run step by step: shared links, drawn lengths, stragglers, failures."""

from __future__ import annotations

from typing import Any

import click

from rlhfsim import units
from rlhfsim.api import cluster_of, simulate_file
from rlhfsim.cli.inputs import price_option
from rlhfsim.cli.params import (
    Given,
    Number,
    Output,
    Told,
    Typed,
    Whole,
    bad_option,
    command,
    flag,
    is_typed,
    json_option,
    on_command_line,
    option,
)
from rlhfsim.cli.planned import profile_notes
from rlhfsim.cli.search_progress import counted
from rlhfsim.errors import RlhfsimError
from rlhfsim.outputs import is_replaceable
from rlhfsim.present.answers.simulate import page
from rlhfsim.present.chrome_trace import chrome_path, write_chrome
from rlhfsim.simulation.summary import FaultOptions, SimulationOptions
from rlhfsim.specs.scenario import system_names
from rlhfsim.trace import write_trace
from rlhfsim.what_if.planned import fitting_change

MAX_STEPS, MAX_REPLICATIONS = 100_000, 10_000
MAX_SECONDS = 1000 * 365 * units.DAY
EPILOG = """\b
Examples:
  rlhfsim simulate verl
  rlhfsim simulate plan.json --replications 10 --trace run.json
  rlhfsim simulate plan.json --straggler 0.05:1.5
  rlhfsim simulate plan.json --mtbf 5000h --restart 10min --checkpoint 60s
"""


class Straggler(Typed):
    """`SHARE:SLOWDOWN`: how many ranks are slow, and how much."""

    name = "SHARE:SLOWDOWN"

    def read(self, text: str, option: str) -> tuple[float, float]:
        """Share and slowdown.

        Raises:
            RlhfsimError: not two numbers, or outside their ranges.
        """
        rule = "write SHARE:SLOWDOWN as in 0.05:1.5 (5 % of the GPUs take 1.5 times as long)"
        share, colon, slowdown = text.partition(":")
        try:
            pair = units.parse(share, "1"), units.parse(slowdown, "1")
        except RlhfsimError as error:
            raise bad_option(f"{option}: {text[:40]!r} is not SHARE:SLOWDOWN", rule) from error
        if not (colon and 0 <= pair[0] <= 1 and 1 <= pair[1] <= 100):
            raise bad_option(
                f"{option}: {text[:40]} is out of range", f"{rule}; 0 <= SHARE <= 1, 1 <= SLOWDOWN <= 100"
            )
        return pair


class Duration(Typed):
    """A time above zero, with its unit."""

    name = "TIME"

    def read(self, text: str, option: str) -> float | None:
        """Seconds.

        Raises:
            RlhfsimError: no time, or not above zero.
        """
        try:
            seconds = units.parse(text, "s")
        except RlhfsimError as error:
            raise bad_option(f"{option}: {error.message}", "write it like 60 s, 10 min, 5000 h") from error
        if not 0 < seconds <= MAX_SECONDS:
            raise bad_option(
                f"{option}: {text[:40]} is out of range", "give a time above 0, like 60 s, 10 min, 5000 h"
            )
        return seconds


class Interval(Duration):
    """Seconds between checkpoints, or `auto`."""

    def read(self, text: str, option: str) -> float | None:
        """Seconds; None for `auto`."""
        return None if text.strip().lower() == "auto" else super().read(text, option)


_TIME = Duration()
TRACE = Output("trace", beside=lambda out: {chrome_path(out): "trace for Perfetto"})


@command(EPILOG)
@click.argument("file", required=False)
@option("--iterations", Whole(1, MAX_STEPS), "Steps that are measured.", default=20)
@option(
    "--warmup",
    Whole(0, MAX_STEPS),
    "Steps before them that no figure counts; staleness + 2 at least when async.",
    default=0,
)
@option("--seed", Whole(0, 2**31), "Seed of all that is random.", default=0)
@option(
    "--replications", Whole(1, MAX_REPLICATIONS), "Runs with seeds of their own: N, N + 1, ...", default=1
)
@flag("--expected-lengths", "Every step has the expected response lengths; default: each draws its own.")
@option("--reward-spread", Number(0, 4), "Standard deviation of the log of reward times: 0.5.", default=0.0)
@option("--straggler", Straggler(), "Share of the GPUs that are slow, and how much: 0.05:1.5.")
@option("--mtbf", _TIME, "Mean time between failures of one node: 5000h. Asks for goodput.")
@option("--restart", _TIME, "From a failure until the run goes on.", default="10 min")
@option("--checkpoint", _TIME, "Time that one checkpoint blocks the run.", default="60 s")
@option(
    "--checkpoint-interval", Interval(), "Time between checkpoints, or auto: the best one.", default="auto"
)
@option("--trace", TRACE, "Write the trace, and OUT.chrome.json for ui.perfetto.dev.", metavar="OUT.json")
@price_option
@json_option
def simulate(**given: Any) -> Told:
    """Run one plan step by step: step times, waiting, shared links, memory over time.

    FILE is a plan.json, a scenario (YAML) or a shipped system (verl, openrlhf, trl, ...). Beyond
    `rlhfsim estimate`, calls that use one link at the same time slow each other down, response
    lengths differ from step to step, and asynchronous schedules fill their queues.

    Exit codes: 0 done, 1 the plan does not fit, 2 bad input.
    """
    _check(given)
    notes = profile_notes(given["file"])
    many = given["replications"] if given["replications"] > 1 else None
    with counted("simulating", many) as tick, on_command_line():
        answer = simulate_file(given["file"], options_of(given), price=given["price"], progress=tick)
        help = fitting_change(answer.plan, cluster_of(answer.plan)) if answer.rejected_by else None
    written = given["trace"] if answer.trace is not None else None
    if written is not None and answer.trace is not None:
        write_trace(written, answer.trace)
        if is_replaceable(written):
            write_chrome(chrome_path(written), answer.trace)
    return Told(page(answer, notes, help, written), answer.rejected_by is None)


def _check(given: Given) -> None:
    """A file, and no option that means nothing without another one."""
    if given["file"] is None:
        raise bad_option(
            "FILE is missing", f"name a plan.json, a scenario or a system: {', '.join(system_names())}"
        )
    for name in ("restart", "checkpoint", "checkpoint_interval"):
        if given["mtbf"] is None and is_typed(name):
            option = f"--{name.replace('_', '-')}"
            raise bad_option(f"{option} without --mtbf: nothing fails", "add --mtbf 5000h")


def options_of(given: Given) -> SimulationOptions:
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
