"""What a run says of itself: its configuration, models and day; what it leaves open is asked for at once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.forms import Said, of_files, of_text, scalars
from rlhfsim.interchange.configuration.recognise import recognised, settings_of
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.logs.files import LogFiles
from rlhfsim.interchange.logs.framework import Framework, framework_named, framework_names
from rlhfsim.interchange.logs.mlflow import parameters
from rlhfsim.interchange.logs.printed import printed_command, printed_values
from rlhfsim.interchange.logs.records import lines
from rlhfsim.specs.loading import Source
from rlhfsim.specs.model.config import read_config
from rlhfsim.specs.model.presets import preset, preset_names, resolve_model

THE_LOG = "the log"
NOT_ENOUGH = "not-enough-said"
_DATE = re.compile(r"\b(20[12]\d-[01]\d-[0-3]\d)[ T,][0-2]\d:[0-5]\d:[0-5]\d")
_LAYERS = re.compile(r'^ +"num_hidden_layers": \d')
"""A line of a model's configuration, as transformers prints it."""


@dataclass(slots=True)
class Questions:
    """What a run leaves open: collected, then asked for in one error."""

    what: list[str] = field(default_factory=list)
    remedies: list[str] = field(default_factory=list)

    def ask(self, what: str, remedy: str) -> None:
        """One more thing that nothing says."""
        self.what.append(what)
        self.remedies.append(remedy)

    def check(self, path: Path) -> None:
        """Refuse where anything is open.

        Raises:
            RlhfsimError: everything that is open and how to say it.
        """
        if self.what:
            raise RlhfsimError(
                NOT_ENOUGH,
                f"the run does not say {'; nor '.join(self.what)}",
                place=Place(file=str(path)),
                help=f"add {' '.join(self.remedies)}",
            )


def said_of(text: str, run_files: LogFiles, configs: Sequence[Path]) -> Said:
    """The configuration that the log prints, else that of the files; `configs` lie over it.

    Raises:
        RlhfsimError: a file cannot be read or is malformed.
    """
    command = printed_command(text)
    parts = [of_text(command, THE_LOG)] if command else []
    parts += [of_text(json.dumps(values), THE_LOG) for values in printed_values(text)]
    files = configs or (() if parts else run_files.configs)
    parts += [of_files(files)] if files else []
    if run_files.mlflow is not None and not configs:
        parts.append(of_text(json.dumps(scalars(parameters(run_files.mlflow))), str(run_files.mlflow)))
    return Said(
        values={key: value for part in parts for key, value in part.values.items()},
        text="\n".join(part.text for part in parts),
        name=" + ".join(dict.fromkeys(part.name for part in parts)) or "command line",
    )


def framework_of(said: Said, text: str, run_files: LogFiles) -> Framework:
    """The framework whose configuration or console lines these are.

    Raises:
        RlhfsimError: they are of none.
    """
    try:
        return framework_named(recognised(said).name)
    except RlhfsimError:
        known = [framework_named(name) for name in framework_names()]
        printed = tuple(lines(text))
        for framework in known:
            if any(framework.has_step(r.values) for r in framework.records(printed)):
                return framework
        if said.values:
            raise
    titles = ", ".join(framework.configuration.title for framework in known)
    raise RlhfsimError(
        "framework-not-recognised",
        "the log has neither a configuration nor the time of a step in any form that is known",
        help=f"give it from its first line to the end of a step or later: logs of {titles} are read",
    )


def settings_of_run(
    framework: Framework, said: Said, given: Mapping[str, str], metrics: Sequence[str]
) -> FrameworkSettings:
    """The settings; where nothing says the version of the framework, the names of its metrics do."""
    settings = settings_of(framework.configuration, said, given)
    version = framework.version_of(metrics)
    key = framework.configuration.version_key
    return settings.with_values({key: version}) if version and settings.find(key) is None else settings


def check_given(
    framework: Framework, settings: FrameworkSettings, said: Said, given: Mapping[str, str]
) -> None:
    """That every `--set` is read here, or is in the run's own configuration.

    Raises:
        RlhfsimError: one has no effect.
    """
    for key in given:
        if key not in settings.names and key not in said.values:
            near = ", ".join(get_close_matches(key, settings.names, n=3, cutoff=0.6))
            meant = f"did you mean {near}; else " if near else ""
            raise RlhfsimError(
                "unknown-setting",
                f"--set {key[:60]}: no such setting of {framework.configuration.title} is read for this run",
                help=f"{meant}leave it out: it would change nothing",
            )


def described(
    framework: Framework, settings: FrameworkSettings, questions: Questions
) -> RunDescription | None:
    """The run that the configuration describes; None where it leaves something open."""
    try:
        return framework.configuration.run(settings)
    except RlhfsimError as error:
        if error.code != NOT_ENOUGH:
            raise
        what = error.message.removeprefix("the configuration does not say ")
        questions.ask(what, " ".join(re.findall(r"--(?:model|set) [^\s,]+", error.help or "")))
    return None


def models_by_name(run: RunDescription, text: str, questions: Questions) -> RunDescription:
    """The run with models that are known: by name, else by the shape that the log prints."""
    known: dict[str, str] = {}
    for name in dict.fromkeys(n for n in (run.model, run.critic, run.reward_model) if n and n != "same"):
        try:
            resolve_model(name)
        except RlhfsimError:
            shape = next(_shapes(text), None)
            if shape is None:
                questions.ask(
                    f"which model {name} is", "--set KEY=NAME (of rlhfsim models, or a config.json)"
                )
            known[name] = shape or name
    return replace(
        run,
        model=known.get(run.model, run.model),
        critic=known.get(run.critic or "", run.critic),
        reward_model=known.get(run.reward_model or "", run.reward_model),
    )


def _shapes(text: str) -> Iterator[str]:
    """Presets of the shape that a configuration of transformers in the log has."""
    printed = list(lines(text))
    for at in (i for i, line in enumerate(printed) if _LAYERS.match(line)):
        first, last = at, at
        while first > 0 and printed[first - 1].startswith("  "):
            first -= 1
        while last + 1 < len(printed) and printed[last + 1].startswith("  "):
            last += 1
        try:
            data = json.loads("{" + "".join(printed[first : last + 1]) + "}")
            spec = read_config(Source(THE_LOG, "", data), "logged")
        except (ValueError, RecursionError):
            continue
        for name in preset_names():
            if replace(preset(name), name=spec.name, source=spec.source) == spec:
                yield name


def date_of(text: str) -> str | None:
    """The day of the run, `2026-08-20`: the first time that the log prints."""
    match = _DATE.search(text)
    return match[1] if match else None
