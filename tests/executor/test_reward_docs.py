"""The examples of rewards in docs/engineers.md work as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from executor.rewards.rules import Scorer
from executor.settings import Settings
from rlhfsim.specs.loading import convert, parse_yaml

PAGE = (Path(__file__).parents[2] / "docs" / "engineers.md").read_text()
PAGE = PAGE[PAGE.index("## Your own reward") : PAGE.index("## Defend it")]


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def _settings(text: str) -> Settings:
    return convert(Settings, parse_yaml(text, "docs"), yaml.safe_load(text))


def test_the_function_scores_beside_math(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    (tmp_path / "my_rewards.py").write_text(_blocks("python")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    rewards = _settings(_blocks("yaml")[0]).rewards
    assert rewards
    with Scorer(rewards, workers=1) as scorer:
        [scored] = scorer.score([("p", "12" + " " * 198, "12", {})])
    assert scored.by_rule == {"math": 1.0, "function": 0.5}
    assert scored.total == pytest.approx(1.1)


def test_the_judge_of_the_page_reads_its_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "k")
    monkeypatch.setattr(
        "executor.rewards.judge.RemoteJudge._ask", lambda self, body, timeout_s: "Fine.\nScore: 8"
    )
    rewards = _settings(
        _blocks("yaml")[1].replace("key_variable", "cache: false\n      key_variable")
    ).rewards
    assert rewards
    with Scorer(rewards, workers=1) as scorer:
        assert scorer.score([("p", "r", "a", {})])[0].total == 0.8


def test_all_forms_of_code_problems_are_scored() -> None:
    answers = [
        "def squares(n): return [k * k for k in range(n)]",
        "    return a + b",
        "print(2 * int(input()))",
    ]
    problems = [json.loads(line) for line in _blocks("json")[0].splitlines()]
    rewards = _settings(_blocks("yaml")[2]).rewards
    assert rewards
    assert rewards[0].modules == ("numpy",)
    with Scorer(rewards, workers=1) as scorer:
        right = [(p["prompt"], a, "", p) for p, a in zip(problems, answers, strict=True)]
        wrong = [(p["prompt"], "pass", "", p) for p in problems]
        assert [s.total for s in scorer.score(right + wrong)] == [1, 1, 1, 0, 0, 0]
