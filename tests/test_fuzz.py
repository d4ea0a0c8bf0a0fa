"""Mutated files and options end in an answer or in one error: no traceback, hang, crash or half-written file."""

from __future__ import annotations

import subprocess
import sys

import pytest

SEED = 20261124
CASES = 1000
"""Of one process: imports and the designs of its seeds cost as much as 500 cases. With -m long twice as many."""


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize("cases", [CASES, pytest.param(2 * CASES, marks=pytest.mark.long)])
def test_spoiled_files_and_options_are_refused_or_read(cases: int) -> None:
    words = ("--cases", str(cases), "--seed", str(SEED))
    found = subprocess.run(
        [sys.executable, "-m", "lab.fuzz", *words], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"{cases} cases" in found.stdout
