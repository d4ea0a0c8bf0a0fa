"""The examples of docs/environments.md really train: programs in the sandbox and searches, on vLLM and DeepSpeed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import yaml

from executor.coordination.sample_log import read
from executor.settings import Data, Settings, Tracking
from executor.tasks import tiny
from executor.tasks.prompts import Problem
from lab.warm_up import warm_up
from rlhfsim.specs.loading import convert, parse_yaml
from rlhfsim.trace import read_trace

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
WORKLOAD: dict[str, Any] = {
    "environment": {"turns": 2, "seconds_per_turn": "0.1 s", "workers": 2},
    "response_len": {"kind": "fixed", "value": 120},
    "prompts": 4,
    "samples": 2,
    "mini_batches": 1,
}
PROGRAMS = {
    "6*7=": "```\nprint(6*7)\n```",
    "wait": "```\nwhile 1:1\n```",
    "call": "```\nimport socket\nsocket.socket()\n```",
}
"""Prompt -> what the warm model says first."""
QUERIES = {"who sleeps?": "<search>who sleeps</search>", "hi": "hello"}


@dataclass(frozen=True)
class Demonstrations:
    """Problems whose answers are turns with a call."""

    said: Mapping[str, str]

    def batch(self, position: int, count: int) -> list[Problem]:
        pairs = list(self.said.items())
        return [Problem(prompt=p, answer=a) for p, a in (pairs[i % len(pairs)] for i in range(count))]

    def held_out(self, count: int) -> list[Problem]:
        return []


def warm(folder: Path, said: Mapping[str, str]) -> Path:
    """A model that calls its tool; its tokenizer has ` in place of }."""
    base = tiny.build(folder / "base", layers=2)
    spelled = (base / "tokenizer.json").read_text()
    assert '"}"' in spelled
    (base / "tokenizer.json").write_text(spelled.replace('"}"', '"`"'))
    losses = warm_up(base, folder / "warm", Demonstrations(said), 60, batch=6, lr=3e-3)
    assert losses[-1] < 0.1, "it knows its call by heart"
    return folder / "warm"


def settings(kind: str, model: Path, rows: Path, options: dict[str, Any]) -> Settings:
    """The page's, for a tiny model and these rows."""
    [text] = [t for t in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if f"kind: {kind}" in t]
    said: Settings = convert(Settings, parse_yaml(text, "docs"), yaml.safe_load(text))
    assert said.environment
    small = runs.settings(model)
    return replace(
        said,
        model=str(model),
        iterations=2,
        data=Data(path=str(rows), held_out=0),
        environment=replace(said.environment, options=dict(said.environment.options) | options),
        optimizer=small.optimizer,
        tracking=Tracking(tensorboard=False, samples=8, samples_every=1),
        limits=small.limits,
    )


def trained(folder: Path, kind: str, said: Mapping[str, str], address: str, options: dict[str, Any]) -> Any:
    """Rows of the metrics, sampled lines, the trace."""
    model, rows = warm(folder, said), folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": p, "answer": "42"}) + "\n" for p in said))
    made = runs.plan("hybrid", "grpo", model, workload=WORKLOAD)
    outcome, heard = runs.run(made, settings(kind, model, rows, options), folder / "run", address)
    for row in heard.rows:
        assert row["mismatch/max_abs_dlogp"] < 1e-3, "the trainer reads the tokens that were sampled"
        assert row["environment/tokens_mean"] > 5, "what the tool said is in the response"
        assert row["environment/timeouts"] == row["environment/errors"] == 0
        assert np.isfinite(row["policy/loss"])
    assert [s for s in read_trace(outcome.files.trace).spans if s.name == "environment.answer"]
    return heard.rows, read(folder / "run" / "samples.jsonl")


def observed(lines: list[dict[str, Any]], prompt: str) -> str:
    """What the tool told the first turns that were asked this."""
    return "".join(
        text for line in lines if line["prompt"] == prompt for text in line["environment"]["observed"]
    )


def test_a_model_trains_with_programs_in_the_cage(tmp_path: Path, ray_address: str) -> None:
    rows, lines = trained(tmp_path, "python", PROGRAMS, ray_address, {"wall_s": 1.0})
    assert "42" in observed(lines, "6*7=")
    assert "timeout" in observed(lines, "wait"), "an endless program is told so, and the run goes on"
    assert "not permitted" in observed(lines, "call"), "no network in the cage"
    assert max(row["environment/seconds_max"] for row in rows) > 0.9
    assert all(row["environment/turns_mean"] > 1.5 for row in rows)
    sampled = [line["response"] for line in lines if line["prompt"] == "6*7="]
    assert all(text.startswith("```\nprint(6*7)\n```\n```output\n") for text in sampled), sampled


def test_a_model_trains_with_a_search(tmp_path: Path, ray_address: str) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "animals.md").write_text("the dog ran\n\nthe zebra sleeps here")
    _, lines = trained(tmp_path, "search", QUERIES, ray_address, {"folder": str(texts)})
    assert "1. the zebra sleeps here" in observed(lines, "who sleeps?")
    assert observed(lines, "hi") == "", "a turn without a query is the last"
