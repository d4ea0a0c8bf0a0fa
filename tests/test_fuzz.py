"""Mutated files and options end in an answer or in one error: no traceback, hang, crash or half-written file."""

from __future__ import annotations

import pytest

from lab.fuzz.__main__ import fuzz, grouped

SEED = 20261123


@pytest.mark.long
def test_two_thousand_spoiled_files_and_options_are_refused_or_read() -> None:
    defects = fuzz(range(2000), SEED + 1)
    assert not defects, grouped(defects)
