"""Settings of a run from the command line: a file, `--set KEY=VALUE`, options of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfsim.cli.params import bad_option
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.loading import convert, load, parse_yaml

if TYPE_CHECKING:
    from executor.settings import Settings


def settings_of(
    file: Path | None, pairs: tuple[str, ...], before: Settings | None = None, **given: Any
) -> Settings:
    """Settings from a file, then --set, then options of their own; what none of them gives is as `before`.

    Raises:
        RlhfsimError: an unknown key or a bad value, with its place.
    """
    from executor.settings import Settings

    settings = before or Settings()
    if file is not None:
        settings = load(Settings, file, lambda data: _over(asdict(before), data) if before else data)
    settings = _with(settings, pairs) if pairs else settings
    return replace(settings, **{name: value for name, value in given.items() if value is not None})


def _over(before: Any, given: Any) -> Any:
    """Plain data with what is given instead; lists are replaced whole."""
    if not (isinstance(before, dict) and isinstance(given, dict)):
        return given
    return before | {key: _over(before.get(key), value) for key, value in given.items()}


def _with(settings: Settings, pairs: Sequence[str]) -> Settings:
    from executor.settings import Settings as Kind

    data: Any = asdict(settings)
    for pair in pairs:
        _put(data, pair)
    try:
        return convert(Kind, parse_yaml("{}", "--set"), data)
    except RlhfsimError as error:
        raise bad_option(f"--set: {error.message}", error.help or "see docs/executor.md") from error


def _put(data: Any, pair: str) -> None:
    """One KEY=VALUE into plain settings; a section that is left out begins with it."""
    key, equals, value = pair.partition("=")
    if not equals:
        raise bad_option(f"--set: {pair[:60]!r} is not KEY=VALUE", "as in --set optimizer.learning_rate=1e-5")
    *path, last = key.split(".")
    inner = data
    for part in path:
        if isinstance(inner, dict) and inner.get(part) is None:
            inner[part] = {}
        inner = inner[part] if isinstance(inner, dict) else None
    if not isinstance(inner, dict):
        raise bad_option(f"--set: {'.'.join(path)[:60]!r} has no keys", f"settings: {', '.join(data)}")
    inner[last] = _number(value)


def _number(value: str) -> Any:
    """A YAML scalar; 1e-5 is a number too."""
    parsed = parse_yaml(value, "--set").data
    try:
        return float(parsed) if isinstance(parsed, str) else parsed
    except ValueError:
        return parsed
