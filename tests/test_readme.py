"""The README's commands leave nothing out, and its figures are those of the committed reports."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from lab import changelog

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MEASURED = {
    "seconds of a training step": "training",
    "peak memory of training": "memory.training_peak",
    "tokens/s of an inference engine": "inference",
    "seconds of a whole RL step": "rlhf.step",
    "seconds of a weight sync": "weight_sync",
}
"""First cell of a row of the README's table -> kind of the scoreboard."""


def test_the_project_is_installed_with_its_dependencies() -> None:
    """The lock pins the real stack; what only the planner needs, such as SimPy, comes with the project."""
    for name in ("README.md", "docs/executor.md"):
        commands = re.findall(r"pip install ([^&\n`]*)", (ROOT / name).read_text())
        of_the_project = [c for c in commands if re.search(r"(^| )(-e )?'?\.(\[|'| |$)", c)]
        assert of_the_project, name
        assert not [c for c in of_the_project if "--no-deps" in c], name


def test_a_stranger_reads_it_to_the_end() -> None:
    assert len(README.splitlines()) <= 70


@pytest.mark.parametrize("title", MEASURED)
def test_the_table_has_the_errors_of_the_scoreboard(title: str) -> None:
    found = re.search(rf"^\| {re.escape(title)} \|(.*)\|$", README, re.MULTILINE)
    assert found is not None
    left_out = json.loads((ROOT / "reports" / "accuracy.json").read_text())["kinds"][MEASURED[title]][
        "left_out"
    ]
    shown = [cell.strip() for cell in found[1].split("|")]
    assert shown == [
        str(left_out["rows"]),
        f"{left_out['median_abs_error']:.1%}".replace("%", " %"),
        f"{left_out['p90_abs_error']:.1%}".replace("%", " %"),
        f"{left_out['bias']:+.1%}".replace("%", " %"),
        f"{left_out['coverage']:.0%}".replace("%", " %"),
    ]


def test_the_answer_is_that_of_the_picture() -> None:
    """tests/test_picture.py holds the picture to the program."""
    found = re.search(r"<!-- first lines of the answer -->\n```text\n(.*?)```", README, re.DOTALL)
    assert found is not None
    lines = [line.split() for line in found[1].splitlines()]
    assert len(lines) >= 12
    picture = (ROOT / "docs" / "img" / "design.svg").read_text()
    words = " ".join(html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", picture))
    shown = " ".join(words.replace("\xa0", " ").split())
    assert [line for line in lines if " ".join(line) not in shown] == []


def test_an_entry_of_the_changelog_is_one_short_line_with_kind_and_subject() -> None:
    versions = changelog.sections((ROOT / "CHANGELOG.md").read_text())
    assert all(changelog.entries(text, title) for title, text in versions.items())
    assert all(changelog.entries(file.read_text(), file.name) for file in changelog.fragments())


def test_every_source_file_that_a_page_names_is_there() -> None:
    pages = (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    named = {
        name
        for p in pages
        for name in re.findall(r"`((?:tests|lab|rlhfsim|executor)/[\w/]+\.py)`", p.read_text())
    }
    assert named
    assert not {name for name in named if not (ROOT / name).exists()}
