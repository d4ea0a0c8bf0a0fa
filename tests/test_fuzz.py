"""Mutated files and options end in an answer or in one error: no traceback, hang, crash or half-written file."""

from __future__ import annotations

import subprocess
import sys

import pytest

SEED = 20261124
CASES = 2000
"""Of one process: imports and the designs of its seeds cost as much as 500 cases."""


@pytest.mark.slow
@pytest.mark.parallel
def test_two_thousand_spoiled_files_and_options_are_refused_or_read() -> None:
    words = ("--cases", str(CASES), "--seed", str(SEED))
    found = subprocess.run(
        [sys.executable, "-m", "lab.fuzz", *words], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"{CASES} cases" in found.stdout
