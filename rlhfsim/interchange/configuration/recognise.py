"""Which framework a configuration belongs to, of which version, and its values.

Every framework declares its own marks (`Configuration.entries`, `Configuration.keys`); its entry point
decides, then how many of the keys are its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.interchange.carried import carried_in
from rlhfsim.interchange.configuration.configuration import (
    ENTRY_POINT,
    Configuration,
    configuration_named,
    configuration_names,
)
from rlhfsim.interchange.configuration.forms import NAMED, Said, arguments, of_files, of_text, scalars
from rlhfsim.interchange.configuration.python_script import CALLED
from rlhfsim.interchange.configuration.settings import Asked, FrameworkSettings

READ_BY_FORMS = {*NAMED, "config_name", "config_path"}
"""Keys that name files, which are read."""
NOT_READ = {
    "ms-swift": r"\bswift (rlhf|sft|pt|rollout)\b|\bswift[/.](cli|llm)\b|(^|\s)--rlhf_type\b|^rlhf_type:",
    "LLaMA-Factory": r"\bllamafactory\b|\bLLaMA-Factory\b|(^|\s)--finetuning_type\b|^finetuning_type:",
    "Unsloth": r"\b(from|import) unsloth\b|\bFastLanguageModel\b",
    "EasyR1": r"\bverl\.trainer\.main\b|\bworker\.(actor|rollout|ref)\.[\w.]+=",
    "Axolotl": r"\baxolotl\b|^base_model:",
    "open-instruct": r"\bopen_instruct\b",
    "torchtune": r"\btune run\b",
    "ROLL": r"\bstart_(rlvr|agentic|dpo|distill)_pipeline\b|^actor_infer:",
    "prime-rl": r"\buv run (rl|orchestrator)\b|^\[orchestrator\]",
}
"""Frameworks that name their settings as others do and mean other defaults -> marks of theirs."""
SEPARATORS = ("|", "||", "&", "&&", ";", ">", ">>", "2>&1")
"""Words that end a command."""

_COMMENTS = re.compile(r"(?m)^[ \t]*#.*$")


def read_configuration(
    source: Sequence[Path] | str, given: Mapping[str, str], framework: str | None = None
) -> tuple[Configuration, FrameworkSettings]:
    """The framework and the settings of files, or of a text; `given` lies over them.

    Raises:
        RlhfsimError: a file cannot be read, or no framework's marks are in it.
    """
    said = of_text(source) if isinstance(source, str) else of_files(source)
    check_trainer(said, framework)
    configuration = configuration_named(framework) if framework else recognised(said)
    return configuration, settings_of(configuration, said, given)


def settings_of(configuration: Configuration, said: Said, given: Mapping[str, str]) -> FrameworkSettings:
    """What was said as settings of a framework, over the configurations of its own that it names."""
    below = {**configuration.below(said), **carried_in(said.text, said.name)}
    values = {**below, **said.values, **scalars(given)}
    entries = (re.search(entry, said.text) for entry in configuration.entries)
    values = {ENTRY_POINT: next((found[0] for found in entries if found), None), **values}
    version = configuration.version_key
    if version not in values:
        found = named_version(configuration, said.text) or configuration.version_of(values)
        values |= {version: found} if found else {}
    own = {*own_arguments(configuration, said), *own_entries(configuration, said), *given}
    return FrameworkSettings(values, said.name, Asked(own=frozenset(own - READ_BY_FORMS)))


def own_arguments(configuration: Configuration, said: Said) -> Iterator[str]:
    """Keys that commands hand to the framework; of all where none starts it.

    A statement without an entry point may be the arguments alone, in which no bare name is a key: it may be a
    variable of the shell.
    """
    started = [found for words in said.commands if (found := _handed(configuration, words)) is not None]
    if started:
        yield from (key for words in started for key, _ in arguments(words))
        return
    for words in said.commands:
        plain = [word for word in words if not word.partition("=")[0].isidentifier() or "=" not in word]
        yield from (key for key, _ in arguments(plain))


def _handed(configuration: Configuration, words: Sequence[str]) -> list[str] | None:
    """Words behind the entry point, to the end of the command; None: it does not start the framework."""
    entries = (*configuration.entries, *configuration.started)
    for i in range(1, len(words) + 1):
        if any(re.search(entry, " ".join(words[:i])) for entry in entries):
            return list(takewhile(lambda word: word not in SEPARATORS, words[i:]))
    return None


def own_entries(configuration: Configuration, said: Said) -> Iterator[str]:
    """Keys of files, and keywords of the framework's own configuration classes."""
    for key in said.filed:
        call, _, name = key.partition(".")
        if not call.endswith(CALLED):
            yield key
        elif any(re.search(entry, f"{call}(") for entry in configuration.entries):
            yield name


def recognised(said: Said) -> Configuration:
    """The framework that a configuration is written for.

    Raises:
        RlhfsimError: it has no framework's marks, or those of several alike, or of one that is not read.
    """
    check_read(said)
    known = [configuration_named(name) for name in configuration_names()]
    started = _started(known, _COMMENTS.sub("", said.text))
    counts = {c.name: own_keys(c, said) for c in started or known}
    most = max(counts.values(), default=0)
    if not (started or most):  # a comment may say how to start it
        started = _started(known, said.text)
        counts = {c.name: 0 for c in started}
    best = [name for name, count in counts.items() if count == most]
    if len(best) == 1 and (most or started):
        return configuration_named(best[0])
    looked = "; ".join(f"{c.title}: {', '.join((*c.shown, *c.keys)[:4])}" for c in known if c.keys)
    found = f"marks of {' and '.join(best)} alike" if most else "no framework's marks"
    raise RlhfsimError(
        "framework-not-recognised",
        f"the configuration has {found}",
        place=Place(file=said.name),
        help=f"name it with --framework. Looked for: {looked}",
    )


def _started(known: Sequence[Configuration], text: str) -> list[Configuration]:
    """Those of which an entry point occurs in the text."""
    return [c for c in known if any(re.search(entry, text) for entry in c.entries)]


def check_read(said: Said) -> None:
    """Refuse a configuration of a framework that is not read, by its name.

    Raises:
        RlhfsimError: it is one of `NOT_READ`.
    """
    title = next(
        (title for title, marks in NOT_READ.items() if re.search(marks, said.text, re.MULTILINE)), None
    )
    if title is not None:
        raise RlhfsimError(
            "framework-not-read",
            f"this is a configuration of {title}, whose keys are not read",
            place=Place(file=said.name),
            help=f"read are: {', '.join(configuration_named(n).title for n in configuration_names())}; ask "
            "rlhfsim estimate with its layout, or name the framework whose keys and defaults it shares with "
            "--framework",
        )


def check_trainer(said: Said, framework: str | None) -> None:
    """Refuse a trainer of given data whose keys are not read, as those of another trainer would be.

    Raises:
        RlhfsimError: it is one of `Configuration.unread`.
    """
    for known in map(configuration_named, [framework] if framework else configuration_names()):
        for pattern, algorithm in known.unread.items():
            if (found := re.search(pattern, said.text, re.MULTILINE)) is not None:
                name = found[0].splitlines()[-1].strip()
                raise RlhfsimError(
                    "trainer-not-read",
                    f"{name} of {known.title} trains on given data, and its keys are not read",
                    place=Place(file=said.name),
                    help=f"ask rlhfsim estimate --algorithm {algorithm}, with the layout that it has",
                )


def own_keys(configuration: Configuration, said: Said) -> int:
    """How many keys only this framework has."""
    return sum(key.startswith(configuration.keys) for key in said.values) if configuration.keys else 0


def named_version(configuration: Configuration, text: str) -> str | None:
    """The version next to the framework's name: `verl==0.5.0`, `verl 0.9.1`, `app-verl0.4-...`."""
    name = re.escape(configuration.title)
    match = re.search(rf"(?i)(?<![a-z]){name}[ =@:_-]{{0,3}}v?(\d+\.\d+(?:\.\d+)*)", text)
    return match[1] if match else None
