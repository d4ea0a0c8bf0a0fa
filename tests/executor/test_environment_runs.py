"""Agents really run: a game in turns, on vLLM and DeepSpeed, and bit for bit the same after a resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import runs

from executor.settings import Checkpoints, Data, EnvironmentSettings, Evaluation, Settings
from rlhfsim.calibration.observation import read_run
from rlhfsim.calibration.predict import pricer_of
from rlhfsim.specs.workload.measurable import ANSWER, TURNS
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
    return runs.settings(
        model,
        rewards=None,
        data=Data(task="guess"),
        environment=game,
        checkpoints=Checkpoints(every=1, keep=2),
        evaluation=Evaluation(problems=4),
        **changes,
    )


def trained(folder: Path) -> bytes:
    """Weights of the policy after two iterations."""
    return (folder / "checkpoints" / "step-000002" / "actor" / "model.safetensors").read_bytes()


def test_a_game_in_turns_is_generated_scored_trained_and_resumed_on_the_same_tokens(
    tiny_model: Path, tmp_path: Path, ray_address: str
) -> None:
    made, folder = runs.plan("hybrid", "grpo", tiny_model, workload=WORKLOAD), tmp_path / "run"
    outcome, heard = runs.run(made, settings(tiny_model), folder, ray_address)
    for row in heard.rows:
        assert row["mismatch/max_abs_dlogp"] < 1e-4, "the trainer reads the tokens that were sampled"
        assert row["environment/turns_mean"] > 2.5
        assert row["environment/tokens_mean"] > 1.5
        assert row["environment/errors"] == row["environment/timeouts"] == 0
        assert row["reward/mean"] < 0
    assert set(outcome.ended.evaluations) == {0, 2}
    spans = [s for s in read_trace(outcome.files.trace).spans if s.name == "environment.answer"]
    assert {s.step for s in spans} >= {0, 1}
    assert {p.name for p in made.prediction.phases} - {"controller"} <= {
        s.name for s in read_trace(outcome.files.trace).spans
    }

    seen = read_run(folder)
    assert "environment.answer" not in seen.phases, "it lies inside generation"
    assert seen.workload[TURNS] == (heard.rows[1]["environment/turns_mean"],)
    priced = pricer_of(seen).setting.workload.environment
    assert priced is not None
    assert (priced.mean_turns, priced.seconds_per_turn) == (*seen.workload[TURNS], *seen.workload[ANSWER])
    uninterrupted = trained(folder)
    shutil.rmtree(folder / "checkpoints" / "step-000002")
    _, again = runs.run(made, settings(tiny_model), folder, ray_address, resume=True)
    assert [row["step"] for row in again.rows] == [1]
    assert again.rows[0]["environment/tokens_mean"] == heard.rows[1]["environment/tokens_mean"]
    assert trained(folder) == uninterrupted
