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
from rlhfsim.specs.loading import parse_json, parse_yaml, read_text

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_NAME = re.compile(r"[A-Za-z_][\w.]*$")
_DEPTH = 20
"""Most references on the way to one value."""


class FrameworkSettings:
    """Values by dotted key; remembers which default stood in for what the configuration does not say."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        """`values`: dotted key -> value; `name` stands for the files in errors."""
        self._values = dict(values)
        self.name = name
        self.assumed: dict[str, Any] = {}
        """Key -> default that was taken, the framework's own."""

    def find(self, *keys: str) -> Any:
        """The value of the first key that is set to something; None where none is."""
        for key in keys:
            value = self._resolved(self._values.get(key), key, 0)
            if value is not None and value != "???":
                return value
        return None

    def whole(self, *keys: str, default: int | None = None) -> int:
        """A whole number of at least 0."""
        value = self._or_default(keys, default)
        try:
            number = int(float(value))
        except (TypeError, ValueError):
            raise self._bad(keys, value, "a whole number") from None
        if number < 0 or number != float(value):
            raise self._bad(keys, value, "a whole number from 0 up")
        return number

    def share(self, *keys: str, default: float) -> float:
        """A number."""
        value = self._or_default(keys, default)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise self._bad(keys, value, "a number") from None

    def flag(self, *keys: str, default: bool = False) -> bool:
        """True or false."""
        value = self._or_default(keys, default)
        return value if isinstance(value, bool) else str(value).lower() in ("true", "1", "yes", "on")

    def text(self, *keys: str, default: str | None = None) -> str:
        """A word."""
        return str(self._or_default(keys, default))

    def has(self, prefix: str) -> bool:
        """Whether any key begins so."""
        return any(key == prefix or key.startswith(f"{prefix}.") for key in self._values)

    def _or_default(self, keys: tuple[str, ...], default: Any) -> Any:
        value = self.find(*keys)
        if value is not None:
            return value
        if default is None:
            raise RlhfsimError(
                "setting-missing",
                f"the configuration does not say {keys[0]}",
                place=Place(file=self.name),
                help=f"add --config with the run's configuration, or --set {keys[0]}=VALUE",
            )
        self.assumed[keys[0]] = default
        return default

    def _bad(self, keys: tuple[str, ...], value: object, rule: str) -> RlhfsimError:
        return RlhfsimError(
            "bad-setting",
            f"{keys[0]} is {str(value)[:40]!r}, not {rule}",
            place=Place(file=self.name),
            help=f"correct it with --set {keys[0]}=VALUE",
        )

    def _resolved(self, value: Any, key: str, depth: int) -> Any:
        """The value with references replaced; None where one leads nowhere."""
        if not isinstance(value, str) or "${" not in value:
            return value
        reference = _REFERENCE.fullmatch(value.strip())
        if reference is None or depth > _DEPTH:
            return None
        resolver, colon, rest = reference[1].partition(":")
        if not colon:
            return self._at(reference[1], key, depth)
        name, _, other = (part.strip() for part in rest.partition(","))
        if resolver == "oc.select":
            chosen = self._at(name, key, depth)
            return _scalar(other) if chosen is None else chosen
        if resolver == "mul":
            factors = [self._resolved(_scalar(p), key, depth + 1) for p in (name, other)]
            numbers = [f for f in factors if isinstance(f, int | float)]
            return numbers[0] * numbers[1] if len(numbers) == 2 else None
        return None

    def _at(self, name: str, key: str, depth: int) -> Any:
        """The value at a name: absolute, `.x` beside the key, `..x` one level up."""
        up = len(name) - len(name.lstrip("."))
        parents = key.split(".")[: -up or None] if up else []
        full = ".".join([*parents, name.lstrip(".")])
        return self._resolved(self._values.get(full), full, depth + 1)


def read_settings(paths: Sequence[Path], given: Mapping[str, str]) -> FrameworkSettings:
    """The settings of all files, later ones on top, then `given`.

    Raises:
        RlhfsimError: a file cannot be read or is malformed.
    """
    values: dict[str, Any] = {}
    for path in paths:
        values |= _read(path)
    values |= {key: _scalar(text) for key, text in given.items()}
    return FrameworkSettings(values, " + ".join(str(path) for path in paths) or "command line")


def megatron_degrees(s: FrameworkSettings, prefix: str) -> dict[str, int]:
    """Parallel sizes under the keys of Megatron-Core, as verl and NeMo-RL pass them on."""
    keys = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}
    return {degree: s.whole(f"{prefix}.{key}_parallel_size", default=1) for degree, key in keys.items()}


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
            yield name, _scalar(value)
        elif word.startswith("--"):
            following = words[i + 1] if i + 1 < len(words) else "--"
            yield name, True if following.startswith("--") else _scalar(following)


def _scalar(text: Any) -> Any:
    """A word as number, truth value, None or itself."""
    if not isinstance(text, str):
        return text
    word = text.strip().strip("\"'")
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if word.lower() in ("null", "none", ""):
        return None
    if "$" in word and "${" not in word:
        return None  # a shell variable that the script does not set
    for kind in (int, float):
        try:
            return kind(word.replace("_", "") if word[:1].isdigit() else word)
        except ValueError:
            continue
    return word
