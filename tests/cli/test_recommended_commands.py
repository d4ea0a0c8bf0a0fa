"""Every command that a message, help text, scenario or docs page recommends exists, with its options."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
import pytest

from rlhfsim.cli.main import COMMANDS, cli

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"(?<![\w./-])rlhfsim[ \t]+([a-z][a-z-]*)((?:\\\n|[^\n])*)")
END = re.compile(r"[;|)`\"#]|: |, |\. | or | and | rlhfsim |\s&&")
"""Where the words of a command end and prose goes on."""
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
PROSE = ("describes", "installed", "knows")
"""Verbs of sentences about the program, outside code."""
PLACEHOLDER = "X"


@dataclass(frozen=True)
class Recommended:
    """A command as some text writes it."""

    where: str
    verb: str
    rest: str
    """What follows the verb, up to the end of the command."""


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every string constant; the values in an f-string are placeholders."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = (str(v.value) if isinstance(v, ast.Constant) else PLACEHOLDER for v in node.values)
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def code(page: str) -> Iterator[tuple[int, str]]:
    """Line and text of fenced blocks and code spans."""
    for match in re.finditer(r"^```\w*\n(.*?)^```|(`+)([^`]+?)\2", page, flags=re.DOTALL | re.MULTILINE):
        yield page.count("\n", 0, match.start()) + 1, match[1] or match[3]


def recommended() -> Iterator[Recommended]:
    """Commands in the product's strings, the shipped scenarios and the docs."""
    texts: list[tuple[Path, int, str]] = []
    for folder in ("rlhfsim", "executor"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            texts += [(path, *found) for found in strings(path)]
    for path in sorted((ROOT / "scenarios").rglob("*.yaml")):
        texts.append((path, 1, path.read_text()))
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        texts += [(path, *found) for found in code(path.read_text())]
    for path, line, text in texts:
        for match in COMMAND.finditer(text):
            rest = match[2].replace("\\\n", " ")
            end = END.search(rest)
            where = f"{path.relative_to(ROOT)}:{line}"
            yield Recommended(where, match[1], rest[: end.start()] if end else rest)


@cache
def every() -> tuple[Recommended, ...]:
    """Once, and not while tests are collected."""
    return tuple(dict.fromkeys(recommended()))


def command(found: Recommended) -> click.Command | None:
    """The command, or the sub-command of a group that is named after it."""
    context = click.Context(cli)
    whole = cli.get_command(context, found.verb)
    words = found.rest.split()
    if isinstance(whole, click.Group) and words and not words[0].startswith("-"):
        return whole.get_command(context, words[0])
    return whole


def test_many_commands_are_recommended() -> None:
    assert {found.verb for found in every()} >= set(COMMANDS)


def test_every_recommended_command_exists() -> None:
    named = [found for found in every() if found.verb not in PROSE]
    assert [found for found in named if found.verb not in COMMANDS] == []
    assert [found for found in named if command(found) is None] == [], "no such sub-command"


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_option_beside_a_recommended_command_is_one_of_its_own(verb: str) -> None:
    for found in every():
        if found.verb != verb or (known := command(found)) is None:
            continue
        names = {name for param in known.params for name in (*param.opts, *param.secondary_opts)}
        unknown = [name for name in OPTION.findall(found.rest) if name not in {*names, "--help", "--version"}]
        assert not unknown, f"{found.where}: rlhfsim {verb} has no {', '.join(unknown)}"


def test_a_command_ends_where_prose_goes_on() -> None:
    match = COMMAND.search("write one with: rlhfsim design --out plan.json, or rlhfsim whatif S --csv a")
    assert match is not None
    assert match[1] == "design"
    end = END.search(match[2])
    assert end is not None
    assert match[2][: end.start()] == " --out plan.json"
