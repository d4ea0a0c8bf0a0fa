"""Mutated files and options end in an answer or in one error: no traceback, hang, crash or half-written file."""

from __future__ import annotations

import subprocess
import sys

import pytest

SEED = 20261124


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize("first", [0, 500, 1000, 1500])
def test_two_thousand_spoiled_files_and_options_are_refused_or_read(first: int) -> None:
    words = ("--first", str(first), "--cases", "500", "--seed", str(SEED))
    found = subprocess.run(
        [sys.executable, "-m", "lab.fuzz", *words], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "500 cases" in found.stdout
