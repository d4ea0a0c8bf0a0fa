"""Values of a framework's configuration by dotted key, and the defaults that stood in for the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mode
from typing import Any

from rlhfsim.errors import Place, RlhfsimError

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
PYTHON = "python:"
"""Begins an expression of a script that nobody ran."""
_OUTSIDE = re.compile(rf"\$\{{(?:\w+|{PYTHON}.*)\}}")
"""A variable of a shell, or such an expression: references to other keys have dots or resolvers."""
_DEPTH = 20
"""Most references on the way to one value."""


FLAGS = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)
UNSET = ("???", "None")
"""What means no value: of OmegaConf, and of Python as YAML and MLflow write it."""
PLACEHOLDER = 8
"""Stands for a key that is asked for, while others are looked for."""
MAX_NUMBER = 1e12
"""A larger setting is a slip."""
NAMED_MODEL, PLANNED_MODEL = "rlhfsim.model", "plan.model"
"""Keys of the policy as `--model` names it, over those of the framework, and as an export wrote it down, for
where those say nothing."""
_SHELL_NAME = re.compile(r"\$\{(\w+)\}")


class SettingMissing(RlhfsimError):
    """A key that decides and has no default."""

    def __init__(self, key: str, name: str) -> None:
        """`key` is missing in the configuration `name`."""
        super().__init__(
            "setting-missing",
            f"the configuration does not say {key}",
            place=Place(file=name),
            help=f"add --config with the run's configuration, or --set {key}=VALUE",
        )
        self.key = key


@dataclass(slots=True)
class Asked:
    """What was asked of a configuration, also with some of its values changed."""

    keys: set[str] = field(default_factory=set)
    """Keys that were looked up, and groups of keys that are void, with a dot at the end."""
    models: set[str] = field(default_factory=set)
    """Keys that name the policy."""
    own: frozenset[str] = frozenset()
    """Keys that the user's files and options set for the framework."""


class FrameworkSettings:
    """Values by dotted key; remembers which default stood in for what the configuration does not say."""

    def __init__(self, values: Mapping[str, Any], name: str, asked: Asked | None = None) -> None:
        """`values`: dotted key -> value; `name` is what errors call the files."""
        self._values = dict(values)
        self.name = name
        self.asked = asked or Asked()
        self.names: dict[str, tuple[str, ...]] = {}
        """Every key that was asked for -> all names under which it may be given."""
        self.assumed: dict[str, Any] = {}
        """Key -> default that was taken, the framework's own."""

    def spelled(self, key: str, names: Mapping[str, tuple[str, ...]]) -> str:
        """A key under the name that these settings use for it, or for keys like it; releases differ.

        `names`: see `names` of settings that were read with the key.
        """
        group = names.get(key, (key,))
        said = [name for name in group if name in self._values]
        used = [
            other.index(name)
            for other in {other for other in names.values() if len(other) > 1}
            for name in other
            if name in self._values
        ]
        usual = mode(used) if used else group.index(key)
        return said[0] if said else group[min(usual, len(group) - 1)]

    def with_values(self, more: Mapping[str, Any]) -> FrameworkSettings:
        """The same with other values over its own."""
        return FrameworkSettings({**self._values, **more}, self.name, self.asked)

    @property
    def values(self) -> Mapping[str, Any]:
        """All that is said, by dotted key."""
        return dict(self._values)

    def not_enough(self, keys: Sequence[str]) -> RlhfsimError:
        """What asks for all the keys that decide and are not said."""
        models = self.asked.models
        asked = " ".join("--model NAME" if key in models else f"--set {key}=VALUE" for key in keys)
        return RlhfsimError(
            "not-enough-said",
            f"the configuration does not say {', '.join(map(self._asked, keys))}",
            place=Place(file=self.name),
            help=f"add {asked}, or a file that says it",
        )

    def _asked(self, key: str) -> str:
        value = self._values.get(key)
        unset = isinstance(value, str) and "$" in value
        return f"{key} ({str(value).replace(PYTHON, '')} is not set)" if unset else key

    def find(self, *keys: str) -> Any:
        """The value of the first key that is set to something; None where none is."""
        self.names |= {key: keys for key in keys if len(keys) >= len(self.names.get(key, ()))}
        self.asked.keys.update(keys)
        for key in keys:
            value = self.resolved(self._values.get(key), key, 0)
            if value is not None and value not in UNSET:
                return value
        return None

    def says(self, *keys: str) -> bool:
        """Whether one of the keys is set, be it to a variable that is not known."""
        self.asked.keys.update(keys)
        return any(self._values.get(key) is not None for key in keys)

    def whole(self, *keys: str, default: int | None = None, least: int = 0) -> int:
        """A whole number of at least `least`; one that is in a variable is asked for."""
        number = self._whole(keys, self._number(keys, default))
        if number < least:
            raise self._bad(keys, number, f"a whole number from {least} up")
        return number

    def count(self, *keys: str) -> int | None:
        """A whole number where one is said, also -1; None where nothing or 0 is."""
        value = self.find(*keys)
        return (self._whole(keys, value) or None) if value is not None else None

    def share(self, *keys: str, default: float) -> float:
        """A number; one that is in a variable is asked for."""
        value = self._number(keys, default)
        number = _finite(value)
        if number is None:
            raise self._bad(keys, value, "a number")
        return number

    def flag(self, *keys: str, default: bool = False) -> bool:
        """True or false; what is in a variable is false."""
        value = self._or_default(keys, default)
        word = str(value).lower()
        if word not in FLAGS and "$" not in word:
            raise self._bad(keys, value, "true or false")
        return FLAGS.get(word, False)

    def text(self, *keys: str, default: str | None = None) -> str:
        """A word."""
        return str(self._or_default(keys, default))

    def model(self, *keys: str, default: str | None = None) -> str:
        """The policy; a variable that nobody sets is asked for, whatever the default.

        `--model` lies over the keys, what an export wrote down below them.
        """
        self.asked.models.update(keys)
        named = self.find(NAMED_MODEL) or self.find(*keys) or self.find(PLANNED_MODEL)
        if named is not None:
            return str(named)
        unset = [key for key in keys if "$" in str(self._values.get(key))]
        if unset:
            raise SettingMissing(unset[0], self.name)
        return self.text(*keys, default=default)

    def variables(self) -> set[str]:
        """Variables of a shell that values rest on and nothing sets."""
        texts = (value for value in self._values.values() if isinstance(value, str))
        return {name for text in texts for name in _SHELL_NAME.findall(text)} - self._values.keys()

    def unknown(self) -> Iterator[str]:
        """Keys that were asked for and depend on what only a run would know, and arguments handed on whole.

        Not those that hold what the policy's key holds: `model` has another name for it, or asks.
        """
        policy = [self._values.get(key) for key in self.asked.models]
        for key, value in self._values.items():
            asked = (key in self.names and value not in policy) or key.startswith("**")
            if asked and isinstance(value, str) and "$" in value and self.find(key) is None:
                shown = value.replace(PYTHON, "")
                yield f"{key} is {shown}" if not key.startswith("**") else f"arguments in {key}"

    def overruled(self, *keys: str) -> None:
        """Keys, or groups with a dot at the end, of which another key makes whatever they say void."""
        self.asked.keys.update(keys)

    def has(self, prefix: str) -> bool:
        """Whether any key begins so."""
        self.asked.keys.add(prefix)
        return any(key == prefix or key.startswith(f"{prefix}.") for key in self._values)

    def _whole(self, keys: tuple[str, ...], value: Any) -> int:
        number = _finite(value)
        if number is None or number != int(number):
            raise self._bad(keys, value, f"a whole number up to {MAX_NUMBER:g}")
        return int(number)

    def _number(self, keys: tuple[str, ...], default: Any) -> Any:
        value = self._or_default(keys, default)
        unset = [key for key in keys if _OUTSIDE.fullmatch(str(self._values.get(key, "")))]
        if unset and all(self.find(key) is None for key in keys):
            raise SettingMissing(unset[0], self.name)
        return value

    def _or_default(self, keys: tuple[str, ...], default: Any) -> Any:
        value = self.find(*keys)
        if value is not None:
            return value
        if default is None:
            raise SettingMissing(keys[0], self.name)
        self.assumed[keys[0]] = default
        return default

    def _bad(self, keys: tuple[str, ...], value: object, rule: str) -> RlhfsimError:
        return RlhfsimError(
            "bad-setting",
            f"{keys[0]} is {str(value)[:40]!r}, not {rule}",
            place=Place(file=self.name),
            help=f"correct it with --set {keys[0]}=VALUE",
        )

    def resolved(self, value: Any, key: str, depth: int = 0) -> Any:
        """The value with references replaced; None where one leads nowhere."""
        if not isinstance(value, str) or "${" not in value:
            return value
        reference = _REFERENCE.fullmatch(value.strip())
        if reference is None and "$" not in value.rpartition("/")[2]:
            return value  # a path whose last name is known
        if reference is None or depth > _DEPTH:
            return None
        resolver, colon, rest = reference[1].partition(":")
        if not colon:
            return self._at(reference[1], key, depth)
        name, _, other = (part.strip() for part in rest.partition(","))
        if resolver == "oc.select":
            chosen = self._at(name, key, depth)
            return scalar(other) if chosen is None else chosen
        if resolver == "mul":
            factors = [self.resolved(scalar(p), key, depth + 1) for p in (name, other)]
            numbers = [f for f in factors if isinstance(f, int | float)]
            return numbers[0] * numbers[1] if len(numbers) == 2 else None
        return None

    def _at(self, name: str, key: str, depth: int) -> Any:
        """The value at a name: absolute, `.x` at the level of the key, `..x` one level up."""
        up = len(name) - len(name.lstrip("."))
        parents = key.split(".")[: -up or None] if up else []
        full = ".".join([*parents, name.lstrip(".")])
        self.asked.keys.add(full)
        return self.resolved(self._values.get(full), full, depth + 1)


def _finite(value: object) -> float | None:
    """A number that a setting may have; None for truth values, words, and what is not finite or absurd."""
    if isinstance(value, bool) or not isinstance(value, int | float | str) or not str(value)[:40].isascii():
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) <= MAX_NUMBER else None


def scalar(text: Any) -> Any:
    """A word as number, truth value, None or itself."""
    if not isinstance(text, str):
        return text
    word = text.strip().strip("\"'")
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if word.lower() in ("null", "none", ""):
        return None
    if "$" in word.rpartition("/")[2] and "${" not in word:
        return None  # a shell variable that the script does not set
    for kind in (int, float):
        try:
            return kind(word.replace("_", "") if word[:1].isdigit() else word)
        except ValueError:
            continue
    return word
