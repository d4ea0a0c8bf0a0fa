"""What a shell offers after TAB."""

from __future__ import annotations

import pytest
from click.shell_completion import ShellComplete

from rlhfsim.cli.main import COMMANDS, cli


def offered(*words: str) -> list[tuple[str, str]]:
    shell = ShellComplete(cli, {}, "rlhfsim", "_RLHFSIM_COMPLETE")
    return [(item.type, item.value) for item in shell.get_completions(list(words[:-1]), words[-1])]


def test_commands_are_offered() -> None:
    assert {value for _, value in offered("")} == set(COMMANDS)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (("design", "--gpu", "H2"), "h200-sxm"),
        (("estimate", "--rollout-gpu", "b2"), "b200-sxm"),
        (("design", "--model", "qwen2.5-7"), "qwen2.5-7b"),
        (("design", "--model", "70"), "70b"),
        (("design", "--algorithm", "gr"), "grpo"),
        (("launch", "openr"), "openrlhf"),
        (("estimate", "ver"), "verl"),
    ],
)
def test_names_are_offered(words: tuple[str, ...], value: str) -> None:
    found = offered(*words)
    assert ("plain", value) in found
    assert all(name.startswith(words[-1].lower()) for kind, name in found if kind == "plain")


@pytest.mark.parametrize("begun", ["./my", "profiles/a", "~/x"])
def test_paths_are_left_to_the_shell(begun: str) -> None:
    assert offered("design", "--gpu", begun) == [("file", begun)]


def test_a_plan_may_be_named_like_a_system() -> None:
    assert ("file", "v") in offered("estimate", "v")
