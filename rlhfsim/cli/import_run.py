"""`rlhfsim import-run`: logs of verl, OpenRLHF, NeMo-RL and TRL become a run folder of this project."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.text import Text

from rlhfsim import units
from rlhfsim.api import estimate
from rlhfsim.cli import completion
from rlhfsim.cli.inputs import json_option, on_command_line
from rlhfsim.cli.params import Number, OneOf, bad_option
from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frameworks.logs.framework import framework_named, framework_names
from rlhfsim.frameworks.logs.imported import Choices, Imported
from rlhfsim.frameworks.logs.imported import import_run as read_logs
from rlhfsim.frameworks.logs.run_folder import environment, metrics_of, provenance, step_seconds, trace_of
from rlhfsim.plan import Plan, write_atomically, write_plan
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal.words import decimals, fixed, labelled, new_table
from rlhfsim.trace import Trace, write_trace

SCHEMA = "rlhfsim.import/1"
EPILOG = """\b
Examples:
  rlhfsim import-run outputs/2026-08-20/ --framework verl --gpu h100 --out runs/verl
  rlhfsim import-run job.log --framework openrlhf --config launch.sh --gpu a100 --prompt-len 300 --out runs/a
  rlhfsim import-run trl_run/ --framework trl --set num_processes=8 --gpu h100 --out runs/trl
  rlhfsim compare runs/verl/plan.json runs/verl/
"""
MAX_TOKENS = 10_000_000
NAMES = framework_names()


@click.command(name="import-run", epilog=EPILOG)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--framework", required=True, type=OneOf("framework", NAMES), help=f"{', '.join(NAMES)}.")
@click.option(
    "--gpu",
    required=True,
    metavar="NAME",
    shell_complete=completion.gpus,
    help="What it ran on: name or alias (rlhfsim gpus), or a YAML file; logs do not say.",
)
@click.option(
    "--rollout-gpu", metavar="NAME", help="Another GPU under the rollout, where it has GPUs of its own."
)
@click.option(
    "--config",
    "configs",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Configuration (YAML, JSON) or launch script; several lie over each other. Default: what lies in PATH.",
)
@click.option(
    "--set",
    "given",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of the framework, over those of the files.",
)
@click.option(
    "--prompt-len",
    type=Number(1, MAX_TOKENS, "token"),
    help="Mean tokens of a prompt, where nothing logged them.",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="New folder for plan.json, trace.json, metrics.jsonl.",
)
@json_option
def import_run(
    path: Path,
    framework: str,
    gpu: str,
    rollout_gpu: str | None,
    configs: tuple[Path, ...],
    given: tuple[str, ...],
    prompt_len: float | None,
    out: Path,
    as_json: bool,
) -> None:
    """Read a run of another framework into a folder that compare and calibrate read.

    PATH is the folder of the run or one file of it: TensorBoard events, JSON lines, trainer_state.json or
    the console log. The configuration says what was computed and in which layout; what it leaves out is the
    framework's own default, and is listed. Every metric that is a time and has no counterpart is named.
    """
    _check_out(out)
    choices = Choices(
        gpu=gpu, rollout_gpu=rollout_gpu, configs=configs, given=settings(given), prompt_tokens=prompt_len
    )
    with on_command_line():
        run = read_logs(path, framework_named(framework), choices)
        plan = estimate(run.setup.placement, run.setup.workload, run.setup.cluster)
    answer = Answer(run, plan, trace_of(run, plan.input_hash), out)
    write(answer, path)
    if as_json:
        click.echo(json.dumps(as_data(answer, path), indent=1))
    else:
        for part in report(answer, view.console()):
            view.console().print(part)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was read and where it was put."""

    run: Imported
    plan: Plan
    trace: Trace
    out: Path


def settings(given: Sequence[str]) -> dict[str, str]:
    """`KEY=VALUE` options as a mapping.

    Raises:
        RlhfsimError: one without `=`.
    """
    pairs = [text.partition("=") for text in given]
    for name, equals, _ in pairs:
        if not (name and equals):
            raise bad_option(f"--set: {name[:40]!r} is not KEY=VALUE", "as in --set trainer.nnodes=4")
    return {name: value for name, _, value in pairs}


def _check_out(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RlhfsimError(
            "folder-not-empty",
            "the folder holds something already",
            place=Place(file=str(out)),
            help="name a new folder; nothing is overwritten",
        )


def write(answer: Answer, path: Path) -> None:
    """The run folder; plan.json comes last, so that a folder with one is whole."""
    out = answer.out
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RlhfsimError(
            "unwritable-file",
            f"cannot make the folder: {(error.strerror or 'error').lower()}",
            place=Place(file=str(out)),
            help="check that its parent is writable",
        ) from error
    rows = "".join(json.dumps(row, allow_nan=False) + "\n" for row in metrics_of(answer.run))
    write_atomically(out / "metrics.jsonl", rows)
    for name, data in (
        ("environment.json", environment(answer.run)),
        ("import.json", provenance(answer.run, path)),
    ):
        write_atomically(out / name, json.dumps(data, indent=1) + "\n")
    write_trace(out / "trace.json", answer.trace)
    write_plan(out / "plan.json", answer.plan)


# --- for people -----------------------------------------------------------------------------------


def report(answer: Answer, console: Console) -> list[RenderableType]:
    """What was read as what, what was not, and what was assumed."""
    run = answer.run
    parts: list[RenderableType] = [
        view.header(answer.plan),
        labelled(summary(answer)),
        "",
        timers(answer, console.width),
    ]
    if run.unmapped_times:
        parts += ["", Text("times that have no counterpart here", style="bold"), *_times(run)]
    if run.settings.assumed:
        shown = ", ".join(f"{k} = {v}" for k, v in run.settings.assumed.items())
        parts += ["", Text("not in the configuration, the framework's defaults", style="bold"), Text(shown)]
    parts += [Text(f"note: {note}", style="yellow") for note in run.notes]
    last = f"next: rlhfsim compare {answer.out}/plan.json {answer.out}/"
    return [*parts, "", Text(last)]


def summary(answer: Answer) -> dict[str, str]:
    """Steps, lengths, where it was written."""
    run = answer.run
    seconds = [s for s in (step_seconds(run, step) for step in run.steps) if s]
    middle = f"; median {units.format(median(seconds), 's')}" if seconds else ""
    predicted = units.format(answer.plan.prediction.step_s, "s")
    return {
        "read": f"{len(run.steps):,} step{'s' * (len(run.steps) > 1)} of {run.framework.title}{middle} (predicted without calibration: {predicted})",
        "lengths": f"prompt {run.lengths.prompt:,.0f}, response {run.lengths.response:,.0f} tokens on average",
        "written": f"{answer.out}: plan.json, trace.json, metrics.jsonl, import.json",
    }


def timers(answer: Answer, width: int) -> RenderableType:
    """Metric, our phases, median seconds."""
    medians = _medians(answer.run)
    planned = {phase.name for phase in answer.plan.prediction.phases}
    digits = decimals(max([answer.plan.prediction.step_s, *medians.values()]))
    table = new_table(width)
    table.add_column("metric", no_wrap=True, overflow="ellipsis", max_width=48)
    table.add_column("median s", justify="right", no_wrap=True)
    table.add_column("is read as", ratio=1)
    for metric, covers in answer.run.mapped.items():
        known = [name for name in covers if name in planned] or covers
        table.add_row(metric, fixed(medians[metric], digits), ", ".join(known))
    return table


def _medians(run: Imported) -> dict[str, float]:
    names = (*run.mapped, *run.unmapped_times)
    values = {n: [s.values[n] for s in run.steps if n in s.values] for n in names}
    return {n: median(found) if found else 0.0 for n, found in values.items()}


def _times(run: Imported) -> list[RenderableType]:
    medians = _medians(run)
    return [Text(f"  {name}: {units.format(medians[name], 's')}") for name in run.unmapped_times]


# --- for machines ---------------------------------------------------------------------------------


def as_data(answer: Answer, path: Path) -> Mapping[str, Any]:
    """The same content; schema in docs/compare.md."""
    seconds = [step_seconds(answer.run, step) for step in answer.run.steps]
    return {
        **provenance(answer.run, path),
        "out": str(answer.out),
        "step_s": seconds,
        "predicted_step_s": answer.plan.prediction.step_s,
        "medians_s": _medians(answer.run),
    }
