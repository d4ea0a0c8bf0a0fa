"""Which commands the walk over a base install finds in texts, and what it calls a fault."""

from __future__ import annotations

import pytest

from lab.base_install.__main__ import Ended
from lab.base_install.commands import documented, on_page, runnable, shown


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (
            "launch plan.json --dry-run --assume-cluster 8x8xh100",
            "launch plan.json --dry-run --assume-cluster 8x8xh100",
        ),
        ("design --gpus 64 --model 70b", "design --gpus 4 --model 0.5b"),
        ("estimate FILE --out NEW", "estimate plan.json --out new.json"),
        ("frameworks", "frameworks"),
        ("compare runs/a", "compare runs/a"),
        ("memory shows it", None),
        ("launch --out wrote", None),
        ("report [OPTIONS] SOURCE", None),
        ("design --gpus ...", None),
        ("export X --to verl", None),
        ("design --framework", None),
        ("calibrate", None),
    ],
)
def test_a_whole_command_is_run_and_a_sentence_is_not(text: str, command: str | None) -> None:
    assert runnable(text) == command


def test_an_answer_recommends_what_stands_behind_next() -> None:
    answer = "next      rlhfsim launch plan.json --dry-run --assume-cluster 8x8xh100_sxm\nmore      rlhfsim gpus; --detail all"
    assert list(shown(answer)) == ["launch plan.json --dry-run --assume-cluster 8x8xh100_sxm", "gpus"]


def test_a_page_is_read_without_its_scripts() -> None:
    page = "<script>rlhfsim models</script><p>next: <code>rlhfsim diff before.json after.json</code></p>"
    assert list(shown(on_page(page))) == ["diff before.json after.json"]


def test_the_commands_of_the_readme_are_found() -> None:
    assert {command.split()[0] for command in documented("README.md")} >= {
        "design",
        "size",
        "choose",
        "launch",
    }


@pytest.mark.parametrize(
    ("code", "error", "right"),
    [
        (0, "", True),
        (1, "nothing fits", True),
        (2, "help: pip install 'rlhfsim[desk]'", True),
        (2, "help: pip install 'rlhfsim[desks]'", False),
        (2, "error: no such file", False),
        (70, "Traceback (most recent call last):", False),
        (0, "Traceback (most recent call last):", False),
    ],
)
def test_a_command_ends_well_or_with_the_line_of_pip(code: int, error: str, right: bool) -> None:
    assert (Ended("gpus", code, "", error, 0.0).fault is None) == right
