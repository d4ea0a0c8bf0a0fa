"""`rlhfsim check-machine`: what this machine, or every node of a cluster, lacks for a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rlhfsim.cli import completion
from rlhfsim.cli.launch import look, read
from rlhfsim.cli.params import FILE, FOLDER, Told, Words, command, json_option, on_command_line, option
from rlhfsim.cli.run_settings import settings_of
from rlhfsim.present.answers import check_machine as view

EPILOG = """\b
Examples:
  rlhfsim check-machine
  rlhfsim check-machine plan.json --model ./qwen2.5-7b --out runs/a
  rlhfsim check-machine plan.json --address auto --json
"""


@command(EPILOG, "check-machine")
@click.argument("file", required=False, shell_complete=completion.systems)
@option("--model", Words("FOLDER"), "Weights and tokenizer of the policy; default: the path in the plan.")
@option("--settings settings_file", FILE, "Settings of the run.", metavar="RUN.yaml")
@option("--out folder", FOLDER, "Folder of the run, for the disk.", default=Path("runs/latest"))
@option("--address", None, "A running Ray cluster: every node of it; default: this machine.")
@json_option
def check_machine(file: str | None, folder: Path, **given: Any) -> Told:
    """Check what a run needs of the machine, in about ten seconds: driver, GPUs, network, limits, disk.

    FILE is the plan (or scenario, or shipped system) to run: its needs are then compared too. Nothing is
    started on a GPU.

    Exit codes: 0 nothing is missing, 1 something is, 2 bad input.
    """
    with on_command_line():
        plan = read(file) if file is not None else None
        settings = settings_of(given["settings_file"], (), model=given["model"])
    found = look(plan, settings, folder, given["address"])
    return Told(view.page(found), not view.missing(found))
