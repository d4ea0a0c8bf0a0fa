"""A sample of the kills of `python -m lab.fuzz.kills`; all commands, a hundred kills: pytest -m long."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHEAP = "estimate,export,import-run,whatif"


@pytest.mark.parametrize(
    "words",
    [
        ("--kills", "8", "--seed", "3", "--only", CHEAP),
        pytest.param(("--kills", "100", "--seed", "4"), marks=pytest.mark.long),
    ],
    ids=["sample", "all"],
)
def test_killed_commands_leave_whole_outputs_and_can_run_again(words: tuple[str, ...]) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "lab.fuzz.kills", *words], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, ""), found.stdout
