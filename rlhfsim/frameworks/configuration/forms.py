"""A framework's configuration by dotted keys, whatever form it was kept in.

YAML and JSON, also with OmegaConf's `${a.b}`, `${.b}`, `${oc.select:a.b,default}` and `${mul:a,b}`; and
launch scripts, from which `--a.b value`, `--flag`, `a.b=value` and shell variables are read. Later files and
`--set` lie over earlier ones.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frameworks.configuration.settings import FrameworkSettings, scalar
from rlhfsim.specs.loading import parse_json, parse_yaml, read_text

_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_NAME = re.compile(r"[A-Za-z_][\w.]*$")


def read_settings(paths: Sequence[Path], given: Mapping[str, str]) -> FrameworkSettings:
    """The settings of all files, later ones on top, then `given`.

    Raises:
        RlhfsimError: a file cannot be read or is malformed.
    """
    values: dict[str, Any] = {}
    for path in paths:
        values |= _read(path)
    values |= {key: scalar(text) for key, text in given.items()}
    return FrameworkSettings(values, " + ".join(str(path) for path in paths) or "command line")


def _read(path: Path) -> dict[str, Any]:
    text = read_text(path)
    if path.suffix == ".json":
        return dict(_flat(parse_json(text, str(path)).data))
    if path.suffix in (".yaml", ".yml"):
        data = parse_yaml(text, str(path)).data
        if isinstance(data, list):  # .hydra/overrides.yaml
            return dict(_arguments([str(item) for item in data]))
        return dict(_flat(data))
    return dict(_arguments(_words(text, path)))


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


def _words(text: str, path: Path) -> list[str]:
    """Words of a shell script, variables that it sets itself replaced."""
    joined = re.sub(r"\\\r?\n", " ", text)
    variables: dict[str, str] = {}
    all_words: list[str] = []
    for number, line in enumerate(joined.splitlines(), start=1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise RlhfsimError(
                "malformed-script",
                f"cannot split the line into words: {str(error).lower()}",
                place=Place(file=str(path), line=number),
                help="give the arguments alone, one command without substitutions",
            ) from error
        words = [_expanded(word, variables) for word in words]
        for word in words[1:] if words[:1] == ["export"] else words[:1]:
            name, equals, value = word.partition("=")
            if equals and name.isidentifier():
                variables[name] = value
        all_words += words
    return all_words


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        known = variables.get(match[1] or match[3])
        return known if known is not None else match[2] if match[2] is not None else match[0]

    return _VARIABLE.sub(value, word)


def _arguments(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
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
            yield name, True if following.startswith("--") else scalar(following)
