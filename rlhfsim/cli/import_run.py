"""`rlhfsim import-run`: logs of other frameworks become a run folder of this project."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from rlhfsim.cli import completion
from rlhfsim.cli.params import (
    FILE,
    Given,
    NewFolder,
    OneOf,
    PathName,
    Told,
    Words,
    bad_option,
    command,
    json_option,
    on_command_line,
    option,
    together,
)
from rlhfsim.interchange.configuration.settings import NAMED_MODEL
from rlhfsim.interchange.logs.framework import framework_named, framework_names
from rlhfsim.interchange.logs.imported import Choices, Imported
from rlhfsim.interchange.logs.imported import import_run as read_logs
from rlhfsim.interchange.logs.run_folder import environment, metrics_of, provenance, trace_of
from rlhfsim.interchange.logs.wandb_run import WandbRun
from rlhfsim.outputs import write_folder
from rlhfsim.plan import Plan, plan_text
from rlhfsim.present.answers.import_run import import_page
from rlhfsim.run_folder import ENVIRONMENT, METRICS, PLAN, TRACE
from rlhfsim.specs.ranges import Tokens
from rlhfsim.trace import dumps
from rlhfsim.what_if.estimate import estimate

EPILOG = """\b
Examples:
  rlhfsim import-run job.log --out runs/night
  rlhfsim import-run outputs/2026-08-20/ --framework verl --gpu h100 --out runs/verl
  rlhfsim import-run job.log --framework openrlhf --config launch.sh --gpu a100 --prompt-len 300 --out runs/a
  rlhfsim import-run trl_run/ --framework trl --config launch.sh --gpu h100 --prompt-len 300 --out runs/trl
  rlhfsim compare runs/verl/plan.json runs/verl/
"""
MODEL_HELP = "The policy, over what the files name: preset, Hugging Face name or folder of a config.json."
NAMES = framework_names()


class RunPath(PathName):
    """A log, a folder, or the address of a run of Weights & Biases."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        """The path, or the address as text."""
        text = str(value)
        return text if "://" in text else Path(super().convert(value, param, ctx))


@contextmanager
def run_files(path: Path | str) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Where the files of a run are, and what brings those that are new.

    Raises:
        RlhfsimError: the run has an address and cannot be copied.
    """
    if isinstance(path, Path):
        yield path, lambda: None
        return
    with TemporaryDirectory(prefix="rlhfsim-") as folder:
        run = WandbRun(path, Path(folder))
        yield run.folder, run.update


RUN = RunPath()


log_options = together(
    option(
        "--framework", OneOf("framework", NAMES), f"{', '.join(NAMES)}. Default: the one whose log it is."
    ),
    option(
        "--gpu",
        Words("NAME", completion.gpus),
        "What it ran on: name or alias (rlhfsim gpus), or a YAML file. Default: as the log gives it away.",
    ),
    option("--rollout-gpu", Words("NAME"), "Another GPU under the rollout, where it has GPUs of its own."),
    option(
        "--config configs",
        FILE,
        "Configuration (YAML, JSON) or launch script, over what the log prints. Default: what lies in PATH.",
        multiple=True,
    ),
    option("--set given", Words("KEY=VALUE"), "A setting of the framework, over the files.", multiple=True),
    option("--model", Words("NAME", completion.models), MODEL_HELP),
    option("--prompt-len", Tokens, "Mean tokens of a prompt, where nothing logged them."),
)
"""What logs of other frameworks are read with."""


def choices(given: Given) -> Choices:
    """What they say."""
    return Choices(
        gpu=given["gpu"],
        rollout_gpu=given["rollout_gpu"],
        configs=given["configs"],
        given=settings(given["given"]) | ({NAMED_MODEL: given["model"]} if given["model"] else {}),
        prompt_tokens=given["prompt_len"],
    )


@command(EPILOG, "import-run")
@click.argument("path", type=RUN)
@log_options
@option("--out", NewFolder(), "New folder for plan.json, trace.json, metrics.jsonl.", required=True)
@json_option
def import_run(path: Path | str, framework: str | None, out: Path, **given: Any) -> Told:
    """Read a run of another framework into a folder that compare and calibrate read.

    PATH is the console log of the job, another file of the run (TensorBoard events, JSON lines, a history
    that Weights & Biases exported as CSV or JSON, trainer_state.json), its folder (also that of MLflow,
    mlruns), or the address of a run of Weights & Biases. The configuration is
    the one that the log prints; what it leaves out is the framework's own default, and is listed. What
    nothing says is asked for, all at once. Every metric that is a time and has no counterpart is named.
    """
    with on_command_line(), run_files(path) as (files, _):
        run, plan = import_into(files, framework, choices(given), out)
    return Told(import_page(run, plan, files, out))


def import_into(path: Path, framework: str | None, chosen: Choices, out: Path) -> tuple[Imported, Plan]:
    """The run whose logs lie at `path`, as a run folder at `out`.

    Raises:
        RlhfsimError: what is needed is not there, or contradicts itself.
    """
    run = read_logs(path, framework_named(framework) if framework else None, chosen)
    cluster = replace(run.setup.cluster, framework=run.framework.name)
    plan = estimate(run.setup.placement, run.setup.workload, cluster)
    write(run, plan, out, path)
    return run, plan


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


def write(run: Imported, plan: Plan, out: Path, path: Path) -> None:
    """The run folder, whole or not at all."""
    data = {ENVIRONMENT: environment(run), "import.json": provenance(run, path)}
    files = {name: json.dumps(content, indent=1) + "\n" for name, content in data.items()}
    files[METRICS] = "".join(json.dumps(row, allow_nan=False) + "\n" for row in metrics_of(run))
    files[TRACE] = dumps(trace_of(run, plan.input_hash))
    write_folder(out, files | {PLAN: plan_text(plan)})
