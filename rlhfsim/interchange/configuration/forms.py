"""A framework's configuration by dotted keys, whatever form it was kept in.

YAML and JSON, also with OmegaConf's `${a.b}`, `${.b}`, `${oc.select:a.b,default}` and `${mul:a,b}`; Hydra's
overrides; launch scripts and pasted commands, from which `--a.b value`, `--flag` and `a.b=value` are read;
Ray jobs, whose `entrypoint` is such a command; Python scripts with `...Config(...)`. Files that a
script or a configuration names and that are next to it are read as well. Later files and `--set` lie over
earlier ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.interchange.configuration.python_script import arguments_of, is_python
from rlhfsim.interchange.configuration.settings import scalar
from rlhfsim.interchange.configuration.shell import commands_of
from rlhfsim.specs.loading import parse_json, parse_yaml, read_text

_NAME = re.compile(r"^[A-Za-z_][\w.]*$")
_YAML_LINE = re.compile(r"^\s*(?:- )?[\"']?[\w./-]+[\"']?\s*:(?:\s|$)")
_ENDS = ("--", "$@", "&", "|", ";", ">", "2>")
"""What follows a switch that has no value."""
COMMANDS = ("entrypoint", "run", "command")
"""Keys of jobs (Ray, KubeRay, SkyPilot) under which a command is written."""
VARIABLES = ("env_vars", "envs", "env")
NAMED = ("defaults", "config", "config_file", "accelerate_config", "deepspeed")
"""Keys that name another configuration file, which lies under the one that names it."""
SCRIPTS = (".sh", ".slurm")
FILES = (*SCRIPTS, ".yaml", ".yml", ".json")
_PYTHON = re.compile(r"(?<![\w$/.-])[\w./-]+\.py\b")
"""A script that a command starts."""
_SHELL = re.compile(r"^[^#\n]*\b(?:ba)?sh \"?(?:\$\{?\w+\}?/)?([\w./-]+\.sh)\b", re.MULTILINE)
"""A script that a line hands its arguments to, from the folder of a variable or from one above."""
_DEPTH = 4
"""Most files that name one another."""
_ABOVE = 6
"""Folders above a script in one of which what it starts is looked for: that of its checkout among them."""


@frozen
class Said:
    """What files or a text say."""

    values: Mapping[str, Any]
    """By dotted key."""
    text: str
    """All of it, in which a framework's entry point and version may occur."""
    name: str
    """What errors call them."""
    commands: tuple[tuple[str, ...], ...] = ()
    """Words of each statement of scripts."""
    filed: frozenset[str] = frozenset()
    """Keys that YAML and JSON files set; of Python scripts with the call: `GRPOConfig.beta`."""
    lacking: tuple[str, ...] = ()
    """Files under `defaults` on which what is said rests, and which are neither there nor given."""


@dataclass(slots=True)
class _Heard:
    """Commands and keys, see `Said`, of all files that were read."""

    commands: list[list[str]] = field(default_factory=list)
    filed: set[str] = field(default_factory=set)
    bases: list[str] = field(default_factory=list)
    files: set[str] = field(default_factory=set)
    started: list[str] = field(default_factory=list)
    """Texts of scripts of a shell that others start: an entry point may be there."""

    def said(self, values: Mapping[str, Any], text: str, name: str) -> Said:
        """With the values that follow from them."""
        commands = tuple(tuple(words) for words in self.commands)
        lacking = tuple(base for base in self.bases if Path(base).name not in self.files)
        filed = frozenset(self.filed)
        text = "\n".join((text, *self.started))
        return Said(values=values, text=text, name=name, commands=commands, filed=filed, lacking=lacking)

    def arguments(self, commands: list[list[str]]) -> dict[str, Any]:
        """Values of the arguments of commands, which are remembered."""
        self.commands += commands
        return dict(argument for words in commands for argument in arguments(words))


def scalars(given: Mapping[str, str]) -> dict[str, Any]:
    """What `--set` gives, as values."""
    return {key: scalar(text) for key, text in given.items()}


def of_files(paths: Sequence[Path]) -> Said:
    """What files say; a folder means its scripts, or all its configurations.

    Raises:
        RlhfsimError: a file cannot be read or is malformed.
    """
    texts, values, heard = list[str](), dict[str, Any](), _Heard()
    for path in paths:
        for file in _files(path):
            text = read_text(file)
            texts.append(text)
            values |= _values(text, file, _DEPTH, heard)
    name = " + ".join(str(path) for path in paths) or "command line"
    return heard.said(values, "\n".join(texts), name)


def of_changed(text: str, path: Path) -> Said:
    """What a file would say with this text in it, next to the files that it names.

    Raises:
        RlhfsimError: it is malformed.
    """
    heard = _Heard()
    return heard.said(_values(text, path, _DEPTH, heard), text, str(path))


def of_text(text: str, name: str = "text") -> Said:
    """What a pasted command or configuration says.

    Raises:
        RlhfsimError: it is malformed.
    """
    heard = _Heard()
    return heard.said(_values(text, Path(name), 0, heard), text, name)


def _files(path: Path) -> list[Path]:
    if not os.path.isdir(path):  # nor where the name is too long for one
        return [path]
    known = sorted(p for p in path.iterdir() if p.suffix in FILES)
    scripts = [p for p in known if p.suffix in SCRIPTS]
    if not known:
        raise RlhfsimError(
            "no-configuration",
            "the folder has no script and no configuration",
            place=Place(file=str(path)),
            help=f"files that are read: {', '.join(FILES)}",
        )
    return scripts or known


def _values(text: str, path: Path, depth: int, heard: _Heard) -> dict[str, Any]:
    """Values of one file by dotted key, those of the files that it names below its own."""
    values = _of_form(text, path, heard)
    heard.files.add(path.name)
    if isinstance(base := values.get("defaults"), str):
        heard.bases.append(base)
    below = dict[str, Any]()
    for other in _named(values, path) if depth else ():
        below |= _values(read_text(other), other, depth - 1, heard)
    for script in _started(text, path) if depth else ():
        started = read_text(script)
        heard.started += [started] if script.suffix in SCRIPTS else []
        below |= _values(started, script, depth - 1, heard)
    return {**below, **values}


def _of_form(text: str, path: Path, heard: _Heard) -> dict[str, Any]:
    match path.suffix or _form(text):
        case ".json":
            return _of_mapping(parse_json(text, str(path)).data, path, heard)
        case ".yaml" | ".yml":
            return _of_mapping(parse_yaml(text, str(path), aliases=True).data, path, heard)
        case ".py":
            values = dict(_flat(dict(arguments_of(text, str(path)))))
            heard.filed.update(key for key in values if "." in key)
            return values
    if path.suffix not in SCRIPTS and _form(text) != ".sh":
        return _of_form(text, path.with_name(f"{path.name}{_form(text)}"), heard)
    return heard.arguments(commands_of(text, str(path)))


def _form(text: str) -> str:
    """The suffix that a text without one deserves."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if text.lstrip().startswith("{"):
        return ".json"
    if is_python(text):
        return ".py"
    return ".yaml" if lines and all(_YAML_LINE.match(x) or x[0] in " -]}" for x in lines) else ".sh"


def _of_mapping(data: Any, path: Path, heard: _Heard) -> dict[str, Any]:
    """Leaves by dotted key; a list is Hydra's overrides, and a job's command is read as a script."""
    if isinstance(data, list):
        return heard.arguments([[str(item) for item in data]])
    values = dict(_flat(data))
    jobs = [k for k, v in values.items() if k.rpartition(".")[2] in COMMANDS and isinstance(v, str | list)]
    heard.filed.update(() if jobs else values)
    variables = {
        key.rpartition(".")[2]: str(value)
        for key, value in values.items()
        if any(part in VARIABLES for part in key.split(".")[:-1])
    }
    for key in jobs:
        command = values[key]
        if isinstance(command, list):
            command = " ".join(str(word) for word in command)
        values |= heard.arguments(commands_of(command, str(path), variables))
    return values


def _flat(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings by dotted key; Hydra's and W&B's wrapping `{value: x}` is opened."""
    if not isinstance(data, Mapping):
        if prefix:
            yield prefix[:-1], data
        return
    if set(data) in ({"value"}, {"value", "desc"}):
        yield from _flat(data["value"], prefix)
        return
    for key, value in data.items():
        yield from _flat(value, f"{prefix}{key}.")


def _named(values: Mapping[str, Any], path: Path) -> Iterator[Path]:
    """Files that a configuration names and that lie where it or a folder above it says."""
    names = [str(values[key]) for key in NAMED if isinstance(values.get(key), str)]
    if values.get("config_name"):
        names.append(f"{values.get('config_path') or '.'}/{values['config_name']}.yaml")
    own = Path(os.path.realpath(path))
    for name in names:
        places = [folder / name for folder in own.parents[:_DEPTH]]
        found = next((p for p in places if p.suffix in FILES and os.path.isfile(p)), None)
        if found is not None and found != own:
            yield found


def _started(text: str, path: Path) -> Iterator[Path]:
    """Scripts that a command starts: in Python, those next to it that configure a run, and of a shell."""
    if path.suffix not in SCRIPTS:
        return
    own = Path(os.path.realpath(path))
    for name in dict.fromkeys(_SHELL.findall(text)):
        places = [folder / name for folder in own.parents[:_ABOVE]]
        found = next((place for place in places if os.path.isfile(place)), own)
        if found != own:
            yield found
    for name in dict.fromkeys(_PYTHON.findall(text)):
        script = path.parent / name
        if os.path.isfile(script) and is_python(read_text(script)):
            yield script


def arguments(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """`--a.b value`, `--flag`, `--a=value` and `+a.b=value` as keys and values; dashes become underscores."""
    for i, word in enumerate(words):
        name, equals, value = word.lstrip("+-~").partition("=")
        name = name.replace("-", "_")
        if not _NAME.match(name):
            continue
        if equals:
            yield name, scalar(value)
        elif word.startswith("--"):
            following = words[i + 1] if i + 1 < len(words) else "--"
            yield name, True if following.startswith(_ENDS) else scalar(following)
