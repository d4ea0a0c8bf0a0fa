"""Memory of a step on the rehearsal device beside the ledger: within 5 % at every moment."""

from __future__ import annotations

from typing import Any

import pytest

from lab.device_memory import measured, measured_engines, off, wrong

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return measured(tmp_path_factory.mktemp("held"))


def test_a_step_holds_what_its_plan_says_at_every_moment(found: Any) -> None:
    assert len(found) >= 12
    for case, rows in found.items():
        assert {"start", "actor.train"} <= {row["phase"] for row in rows}, case
        for row in rows:
            share = off(row)
            if share is None:  # all is on the host
                assert row["measured"] < 0.01 * max(r["measured"] for r in rows), (case, row)
            else:
                assert not wrong(row), (case, row)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return measured_engines(tmp_path_factory.mktemp("engines"))


def test_engines_and_both_ends_of_a_sync_hold_what_their_plan_says(engines: Any) -> None:
    for case, rows in engines.items():
        seen = {row["phase"]: row for row in rows}
        ends = {f"actor.sync {end}" for end in ("sender", "receiver")}
        assert {"start", "actor.generate", "actor.sync", "activations", *ends} <= seen.keys(), case
        for row in rows:
            assert not wrong(row), (case, row)
            assert row["planned"] or not row["measured"], (case, row)
