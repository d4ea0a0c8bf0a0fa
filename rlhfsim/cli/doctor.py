"""`rlhfsim doctor`: a user's own configuration of a framework, judged."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from rlhfsim.cli import completion
from rlhfsim.cli.import_run import MODEL_HELP, settings
from rlhfsim.cli.inputs import price_option
from rlhfsim.cli.params import (
    Number,
    OneOf,
    Told,
    Words,
    bad_option,
    command,
    flag,
    json_option,
    on_command_line,
    option,
    typed,
)
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.configuration import configuration_names
from rlhfsim.interchange.configuration.forms import scalars
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.configuration.settings import NAMED_MODEL
from rlhfsim.outputs import write_new
from rlhfsim.present.answers.doctor import page
from rlhfsim.specs.ranges import Tokens
from rlhfsim.what_if.doctor.case import Case
from rlhfsim.what_if.doctor.diagnosis import Diagnosis, diagnose
from rlhfsim.what_if.doctor.fix import ChangedFile, changed_path, fixed

EPILOG = """\b
Examples:
  rlhfsim doctor run.sh --gpu h100 --framework verl --version 0.7
  rlhfsim doctor config.yaml --gpu a100 --framework nemo-rl --response-len mean=900
  rlhfsim doctor 'python3 -m verl.trainer.main_ppo trainer.nnodes=2' --gpu h100 --model 7b
  rlhfsim doctor run.sh --gpu h100 --fix
  rlhfsim doctor run.sh --gpu h100 --framework verl --set actor_rollout_ref.rollout.enforce_eager=False
"""
NAMES = configuration_names()


class MeanTokens(Number):
    """Mean tokens: `800`, `8k` or `mean=800`."""

    name = "mean=X"

    def read(self, text: str, option: str) -> float:
        """The number; its limit is the configuration's."""
        return super().read(text.strip().removeprefix("mean="), option)


@command(EPILOG)
@click.argument("configs", nargs=-1, required=True, metavar="CONFIG...")
@option(
    "--gpu",
    Words("NAME", completion.gpus),
    "What it is to run on: name or alias (rlhfsim gpus), or a YAML file.",
    required=True,
)
@option("--rollout-gpu", Words("NAME"), "Another GPU under the rollout, where it has GPUs of its own.")
@option("--framework", OneOf("framework", NAMES), f"{', '.join(NAMES)}; default: as recognised.")
@option(
    "--version", Words("RELEASE"), "Release of the framework, as 0.7: its defaults hold. Default: the latest."
)
@option("--model", Words("NAME", completion.models), MODEL_HELP)
@option("--prompt-len", typed(Tokens, MeanTokens), "Mean tokens of a prompt; its limit is read.")
@option("--response-len", typed(Tokens, MeanTokens), "Mean tokens of a response; its limit is read.")
@option(
    "--set given", Words("KEY=VALUE"), "A setting of the framework, over those of the files.", multiple=True
)
@flag("--fix", "Write the changed file next to the old one (run.new.sh), and show what differs.")
@flag("--strict", "Refuse keys that the release does not have (exit code 2).")
@price_option
@json_option
def doctor(configs: tuple[str, ...], gpu: str, **given: Any) -> Told:
    """Judge a configuration: does it fit, how long is a step, which keys to change.

    CONFIG is the launch script, YAML or JSON that a run starts from, the command itself in quotes, or - for
    what is pasted; several files lie over each other. What it leaves out is the framework's own default, and
    is listed. Every change is read back in the framework's own words
    and priced again.

    Every key that is not read is named: what may change the answer, and what the release does not have.

    Exit codes: 0 it fits, 1 it does not, 2 not enough said, with every key that is needed.
    """
    with on_command_line():
        if given["fix"]:
            _check_new(configs)
        configuration, said = read_configuration(
            _source(configs), settings(given["given"]), given["framework"]
        )
        variables = {name: os.environ[name] for name in sorted(said.variables() & os.environ.keys())}
        said = said.with_values(scalars(variables))
        if given["model"]:
            said = said.with_values({NAMED_MODEL: given["model"]})
        if given["version"]:
            said = said.with_values({configuration.version_key: given["version"]})
        case = Case(
            configuration=configuration,
            settings=said,
            gpu=gpu,
            rollout_gpu=given["rollout_gpu"],
            prompt_tokens=given["prompt_len"],
            response_tokens=given["response_len"],
            price=given["price"],
            environment=variables,
        )
        answer = diagnose(case)
        if given["strict"]:
            check_keys(answer)
        repaired = _written_fix(answer, configs) if given["fix"] else None
    runs = answer.judged.fits and not any(f.stops for f in answer.findings)
    return Told(page(answer, repaired), runs)


def _check_new(configs: tuple[str, ...]) -> None:
    """Refuse --fix of what is not one file, or next to which its changed file is already.

    Raises:
        RlhfsimError: there is no place for it.
    """
    if len(configs) > 1 or not os.path.isfile(configs[0]):
        raise bad_option("--fix changes one file", "name the script or the YAML file alone")
    _check_absent(not os.path.lexists(changed_path(Path(configs[0]))), configs)


def _check_absent(absent: bool, configs: tuple[str, ...]) -> None:
    if not absent:
        place = changed_path(Path(configs[0]))
        raise RlhfsimError("file-exists", "a changed file is there already", place=place, help="rename it")


def _written_fix(answer: Diagnosis, configs: tuple[str, ...]) -> ChangedFile:
    """The changed file, written.

    Raises:
        RlhfsimError: it cannot be changed, or there is a file of its name.
    """
    repaired = fixed(answer, Path(configs[0]))
    _check_absent(write_new(repaired.path, repaired.text), configs)
    return repaired


def check_keys(answer: Diagnosis) -> None:
    """Refuse keys that the release does not have.

    Raises:
        RlhfsimError: it has none of the name of one or more.
    """
    absent = [unread for unread in answer.unread if unread.kind == "no such key"]
    if absent:
        near = [f"{u.key} -> {u.nearest}" for u in absent if u.nearest]
        names = ", ".join(u.key for u in absent)
        raise RlhfsimError(
            "no-such-key",
            f"{answer.case.configuration.title} {answer.case.recorded} has no key {names}",
            place=answer.case.settings.name,
            help=f"the nearest: {', '.join(near)}"
            if near
            else "remove them, or name the --version that has them",
        )


def _source(configs: tuple[str, ...]) -> list[Path] | str:
    """The files, or the text that is given in their place."""
    if configs == ("-",):
        return sys.stdin.read()
    if len(configs) == 1 and len(configs[0].split()) > 1 and not os.path.exists(configs[0]):
        return configs[0]
    return [Path(config) for config in configs]
