"""The comparison with TRL reads its own questions, and a launch of its settings finds nothing wrong with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from executor.launch import prepare
from executor.tasks import tiny
from lab.benchmarks import trl_speed


@pytest.mark.parametrize("case", [trl_speed.TINY, trl_speed.SMALL])
def test_both_sides_get_the_same_prompts(case: trl_speed.Case, tmp_path: Path) -> None:
    folder = tiny.config(tmp_path / "model", layers=2)
    case = trl_speed.prepare(tmp_path, replace(case, model=str(folder), iterations=2))
    ours = trl_speed.Ours(tmp_path, case)
    settings = replace(ours._settings(), model=str(tmp_path / "nowhere"))
    _, prompter = prepare(ours._plan(), settings, dry_step_s=1.0)
    theirs = json.loads((tmp_path / "prompts.json").read_text())
    assert [p.prompt for p in prompter.source.batch(0, len(theirs))] == theirs
