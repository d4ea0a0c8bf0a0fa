"""Agents really run: a game in turns, on vLLM and DeepSpeed, and bit for bit the same after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs

from executor.settings import Data, EnvironmentSettings, Settings
from rlhfsim.trace import read_trace

pytestmark = pytest.mark.slow
WORKLOAD: dict[str, Any] = {
    "environment": {"turns": 3, "seconds_per_turn": "1 ms", "workers": 2},
    "response_len": {"kind": "fixed", "value": 16},
    "reward": {},
}


def settings(model: Path, **changes: Any) -> Settings:
    """The game; a tiny model that has learnt nothing rarely says a number."""
    game = EnvironmentSettings(kind="guess", turn_tokens=3, options={"turn_cost": 0.1})
    return runs.settings(model, rewards=None, data=Data(task="guess"), environment=game, **changes)


def test_a_game_in_turns_is_generated_scored_and_trained_on_the_same_tokens(
    tiny_model: Path, tmp_path: Path, ray_address: str
) -> None:
    made = runs.plan("hybrid", "grpo", tiny_model, workload=WORKLOAD)
    outcome, heard = runs.run(made, settings(tiny_model), tmp_path / "run", ray_address)
    for row in heard.rows:
        assert row["mismatch/max_abs_dlogp"] < 1e-4, "the trainer reads the tokens that were sampled"
        assert row["environment/turns_mean"] > 2.5
        assert row["environment/tokens_mean"] > 1.5
        assert row["environment/errors"] == row["environment/timeouts"] == 0
        assert row["reward/mean"] < 0
    spans = [s for s in read_trace(outcome.files.trace).spans if s.name == "environment.answer"]
    assert {s.step for s in spans} >= {0, 1}
