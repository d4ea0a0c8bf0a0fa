"""Exported plans read back, counted."""

from __future__ import annotations

import pytest

from lab.read_back import Tally, main


def test_plans_that_read_back_as_they_were_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verl", "--plans", "2"]) == 0
    assert "2 plans: 2 the same in all fields, 2 with a step within 1 %" in capsys.readouterr().out


def test_a_field_that_nothing_names_is_in_the_line() -> None:
    found = Tally("verl", plans=1, apart=[-0.2])
    found.unnamed["actor.layout.tp"] += 1
    assert "1 named and off by up to 20%, unnamed: {'actor.layout.tp': 1}" in found.line
