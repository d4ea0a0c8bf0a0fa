"""Published RL runs typed into `rlhfsim estimate` as their tables print them, against what `validate` says."""

from __future__ import annotations

import pytest

from lab.scoreboard.rows import rows_of
from lab.scoreboard.typed import Typed, typed

ROWS = {"rlhf.csv": (9, 20), "rlhf_nemo_rl.csv": (17, 20, 21, 26, 32), "rlhf_published.csv": (13,)}
"""Table -> lines, all of small models: large ones take seconds each (`python -m lab.scoreboard.typed`)."""


@pytest.fixture(scope="module")
def rows() -> list[Typed]:
    chosen = [row for row in rows_of("rlhf") if row.line in ROWS.get(row.file, ())]
    return [found for found in map(typed, chosen) if found is not None]


def test_a_typed_plan_has_the_seconds_of_the_validated_one(rows: list[Typed]) -> None:
    off = [abs(row.apart) for row in rows]
    assert len(rows) == 8
    assert sum(off) / len(off) < 0.05
    assert max(off) < 0.08
    assert sum(row.apart for row in rows) / len(rows) == pytest.approx(0, abs=0.05)


def test_what_a_typed_plan_takes_from_its_framework_is_listed(rows: list[Typed]) -> None:
    assert all(row.assumed for row in rows)
