"""Mutated files and options end in an answer or in one error: no traceback, hang, crash or half-written file."""

from __future__ import annotations

import pytest

from lab.fuzz.__main__ import fuzz, grouped

SEED = 20261124


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize("first", [0, 500, 1000, 1500])
def test_two_thousand_spoiled_files_and_options_are_refused_or_read(first: int) -> None:
    defects = fuzz(range(first, first + 500), SEED)
    assert not defects, grouped(defects)
