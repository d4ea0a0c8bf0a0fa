"""Fragments become entries of a release, one short line each."""

from __future__ import annotations

import pytest

from lab.changelog import entries, folded
from rlhfsim.errors import RlhfsimError

OLD = "# Changelog\n\nAn introduction.\n\n## 0.1.0 (2026-01-02)\n\n- [NEW] size: fewest GPUs\n"


def test_a_new_version_comes_first_and_its_subjects_stay_together() -> None:
    added = ["- [FIX] desk: b", "- [NEW] size, choose: c", "- [NEW] desk: a"]
    assert folded(OLD, added, "0.2.0", "2026-02-03") == OLD.replace(
        "## 0.1.0",
        "## 0.2.0 (2026-02-03)\n\n- [FIX] desk: b\n- [NEW] desk: a\n- [NEW] size, choose: c\n\n## 0.1.0",
    )


def test_a_version_that_is_there_is_added_to() -> None:
    text = folded(OLD, ["- [FIX] size: units"], "0.1.0", "2026-01-02")
    assert text.count("## ") == 1
    assert text.rstrip().endswith("- [NEW] size: fewest GPUs\n- [FIX] size: units")


@pytest.mark.parametrize(
    "line", ["- [SECURITY] a: b", "- a: b", "- [NEW] no subject", "a story", "- [FIX] long: " + "x" * 90]
)
def test_a_line_of_another_form_is_named_with_the_rule(line: str) -> None:
    with pytest.raises(RlhfsimError, match=r"fragment\.md.*\n.*at most 100 characters"):
        entries(f"- [NEW] size: good\n{line}\n", "fragment.md")


def test_an_entry_may_fill_the_line() -> None:
    line = "- [FIX] long: " + "x" * 86
    assert entries(line, "fragment.md") == [line]
