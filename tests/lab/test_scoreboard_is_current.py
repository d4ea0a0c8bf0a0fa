from __future__ import annotations

import pytest

from lab.scoreboard import board as scoreboard
from lab.scoreboard.discrepancy import unseen
from lab.scoreboard.intervals import estimated, with_intervals
from lab.scoreboard.text import markdown
from rlhfsim.step.groups import laws
from rlhfsim.validation.scoreboard import committed_file


@pytest.mark.slow
@pytest.mark.parallel
def test_committed_figures_are_current_and_no_kind_got_worse() -> None:
    outcomes, not_rerun = scoreboard.collect(discrepancy=False)
    figures = scoreboard.board(with_intervals(outcomes), not_rerun)
    assert scoreboard.differences(figures, scoreboard.read_board(committed_file())) == []
    _, law = estimated("rlhf.step", unseen(outcomes, "rlhf.step"))
    assert law is not None
    for group, shipped in laws()["rlhf.step"].effects.items():  # else: python -m lab.fits.discrepancy
        found = law.effects[group]
        assert (found.centre.value, found.width.value) == pytest.approx(
            (shipped.centre.value, shipped.width.value), abs=1e-3
        )


def test_no_committed_row_was_skipped_by_a_bug_of_ours() -> None:
    kinds = scoreboard.read_board(committed_file())["kinds"]
    reasons = [reason for figures in kinds.values() for reason in figures["skip_reasons"]]
    assert [reason for reason in reasons if reason.startswith("internal error")] == []


def test_the_committed_report_is_made_of_the_committed_figures() -> None:
    path = committed_file()
    assert path.with_suffix(".md").read_text(encoding="utf-8") == markdown(scoreboard.read_board(path))
