"""The checks of a first GPU: processes that fail, hang or lack packages are rows of the report."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lab.first_contact.checks import CHECKS, Check, as_json, one, run
from lab.first_contact.report import page, verdict

PLAIN = Check(name="machine", title="plain", limit_s=30.0)


def _python(code: str, **changes: object) -> Check:
    return replace(PLAIN, command=("-c", code), **changes)  # type: ignore[arg-type]


def test_a_failure_never_stops_the_checks_after_it() -> None:
    heard: list[int] = []
    answers = run(
        [_python("raise SystemExit('broken')"), _python("pass")],
        budget_s=60,
        small=True,
        heard=lambda so_far: heard.append(len(so_far)),
    )
    assert [(answer.outcome, answer.reason) for answer in answers] == [("failed", "broken"), ("ran", "")]
    assert heard == [1, 2]


def test_a_check_that_hangs_is_ended_with_what_it_started() -> None:
    child = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    begun = time.monotonic()
    answer = one(_python(child), 6.0, small=True)
    assert answer.outcome == "out of time"
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    ("check", "limit", "reason"),
    [
        (_python("pass", needs=("json", "no_such_package")), 30.0, "not installed: no_such_package"),
        (_python("pass", gpu=True), 30.0, "needs a GPU"),
        (_python("pass"), 1.0, "no time left"),
    ],
)
def test_what_cannot_run_is_skipped_with_its_reason(check: Check, limit: float, reason: str) -> None:
    answer = one(check, limit, small=True)
    assert (answer.outcome, answer.reason) == ("skipped", reason)


@pytest.mark.parametrize(("seen", "expected"), [(1.05, "agrees"), (1.2, "high"), (0.8, "low")])
def test_a_row_is_judged_by_its_ratio(seen: float, expected: str) -> None:
    assert verdict({"what": "x", "seen": seen, "expected": 1.0}) == expected
    assert verdict({"what": "x", "seen": seen}) == "seen"


def test_the_facts_of_this_machine_come_as_rows_and_as_a_page(tmp_path: Path) -> None:
    answer = one(next(check for check in CHECKS if check.name == "machine"), 60.0, small=True)
    assert answer.outcome == "ran", answer.reason
    assert any(row["what"] == "Python" for row in answer.rows)
    assert "| machine | Python |" in page([answer])
    assert json.loads(as_json([answer]))[0]["name"] == "machine"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "attention",
        "copies",
        "fsdp2",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("ledger", "deepspeed", "dpo", "rollout")),
    ],
)
def test_a_check_runs_on_a_cpu(name: str) -> None:
    answer = one(next(check for check in CHECKS if check.name == name), 150.0, small=True)
    assert answer.outcome == "ran", answer.reason
    assert answer.rows
    assert not {verdict(row) for row in answer.rows} & {"high", "low"}
