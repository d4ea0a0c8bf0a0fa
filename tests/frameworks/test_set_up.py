"""Sixty drawn plans a framework: its own workers set themselves up, from the exported file, as each plan says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.as_planned import DERIVED, wrong
from tests.frameworks.drawn import drawn_plans
from tests.frameworks.test_accepted import SPOILED, answers, installed, set_up

PLANS = 60


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.long
@pytest.mark.parametrize("name", DERIVED)
def test_workers_set_themselves_up_as_planned(name: str, tmp_path: Path) -> None:
    if not installed(name):
        pytest.skip(f"{name} is not installed")
    plans = list(drawn_plans(name, PLANS))
    said = set_up(name, plans, tmp_path, derive=True)
    assert {
        i: found for i, (p, s) in enumerate(zip(plans, said, strict=True)) if (found := wrong(p, name, s))
    } == {}


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.long
@pytest.mark.parametrize("name", ["openrlhf", "trl", "verl"])
def test_exports_on_given_data_are_accepted(name: str, tmp_path: Path) -> None:
    if not installed(name):
        pytest.skip(f"{name} is not installed")
    plans = list(drawn_plans(name, PLANS, kind="given"))
    spoiled = "engine.nonsense=1" if name == "verl" else SPOILED[name][0]
    *said, refused = answers(name, plans, tmp_path, [spoiled])
    assert [why for why in said if why] == []
    assert refused
