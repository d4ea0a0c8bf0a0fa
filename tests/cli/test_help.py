"""Every command's help ends with examples that the command understands."""

from __future__ import annotations

import shlex

import click
import pytest

from rlhfsim.cli.main import COMMANDS, cli

ROOT = click.Context(cli, info_name="rlhfsim")


def leaf(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that `words` name, and its arguments."""
    found: click.Command = cli
    while isinstance(found, click.Group):
        inner = found.get_command(ROOT, words[0])
        assert inner is not None, words[0]
        found, words = inner, words[1:]
    return found, words


def examples(name: str) -> list[list[str]]:
    command = cli.get_command(ROOT, name)
    assert command is not None
    lines = [line.strip() for line in (command.epilog or "").splitlines()]
    commands = [line.partition("   ")[0] for line in lines if line.startswith("rlhfsim ")]
    return [shlex.split(line)[1:] for line in commands]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_of_the_command(name: str) -> None:
    assert [words for words in examples(name) if words[0] == name]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_are_understood(name: str) -> None:
    for words in examples(name):
        if "..." in words:
            continue
        command, arguments = leaf(words)
        context = click.Context(command)
        command.make_parser(context).parse_args(list(arguments))  # raises on an unknown option


def test_an_unknown_option_would_be_seen() -> None:
    command, arguments = leaf(shlex.split("design --gpus 64 --no-such-option"))
    with pytest.raises(click.NoSuchOption):
        command.make_parser(click.Context(command)).parse_args(arguments)
