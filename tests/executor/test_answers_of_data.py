"""Who reads the answers of a data set: rules, the user's functions, judges, evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs

from executor.launch import evaluation_prompter, prepare
from executor.rewards.rules import Scorer
from executor.settings import Data, Evaluation, Judge, RewardRule, Settings
from executor.tasks import tiny
from executor.tasks.prompts import Problem
from executor.tasks.sources import open_source
from rlhfsim.errors import RlhfsimError

FUNCTION = RewardRule(kind="function", target="math:fsum")
ROWS = [{"prompt": f"{i}+1=", "solution": str(i + 1), "source": "book"} for i in range(4)]


def _file(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _judge(prompt: str) -> RewardRule:
    return RewardRule(kind="judge", judge=Judge(url="http://localhost:9/v1", model="m", prompt=prompt))


def _first(folder: Path, rule: RewardRule, rows: list[dict[str, Any]], **data: Any) -> Problem:
    """The first problem of a run with one rule."""
    settings = Settings(
        model=str(folder / "nowhere"),
        data=Data(path=_file(folder, rows), shuffle=False, held_out=0.0, **data),
        rewards=(rule,),
    )
    plan = runs.plan("hybrid", "grpo", tiny.config(folder / "model", layers=2))
    return prepare(plan, settings, dry_step_s=1.0)[1].source.batch(0, 1)[0]


@pytest.mark.parametrize(
    "rule", [FUNCTION, _judge("Is it {answer}?"), RewardRule(kind="digits"), RewardRule(kind="answer")]
)
def test_a_column_that_is_named_is_read_whatever_the_rules(rule: RewardRule, tmp_path: Path) -> None:
    assert _first(tmp_path, rule, ROWS, answer_column="solution").answer == "1"


@pytest.mark.parametrize("rule", [FUNCTION, RewardRule(kind="digits")])
def test_a_named_column_that_is_absent_is_refused_with_the_nearest(rule: RewardRule, tmp_path: Path) -> None:
    with pytest.raises(RlhfsimError) as caught:
        _first(tmp_path, rule, ROWS, answer_column="solutoin")
    error = caught.value
    assert error.code == "data-column"
    assert "no column 'solutoin'" in error.message
    assert str(error.place) == str(tmp_path / "d.jsonl")
    assert error.help is not None
    assert error.help.startswith("did you mean solution")
    assert "columns: prompt (text), solution (text), source (text)" in error.help


def test_a_function_reads_the_usual_column_and_a_row_without_its_answer_is_bad(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": ""}]
    with pytest.raises(RlhfsimError, match="column 'answer' is empty here"):
        _first(tmp_path, FUNCTION, rows)
    assert _first(tmp_path, FUNCTION, rows, on_bad_row="drop").answer == "2"


def test_a_judge_that_is_shown_the_answer_needs_one(tmp_path: Path) -> None:
    with pytest.raises(RlhfsimError, match="no column 'answer'"):
        _first(tmp_path, _judge("Is it {answer}?"), [{"prompt": "a"}])
    assert _first(tmp_path, _judge("Is {response} kind?"), [{"prompt": "a"}]).answer == ""


def test_a_function_of_data_without_answers_gets_none_and_not_an_empty_one() -> None:
    rule = RewardRule(kind="function", target="math:fsum")
    with Scorer([rule], workers=1) as scorer:
        asked: list[tuple[Any, ...]] = []
        scorer._call = lambda target, limit, *args: asked.append(args) or 0.0  # type: ignore[method-assign,func-returns-value]
        scorer.score([("p", "r", "", {}), ("p", "r", "4", {})])
    assert [args[2] for args in asked] == [None, "4"]


def test_meta_has_every_column(tmp_path: Path) -> None:
    found = _first(tmp_path, FUNCTION, ROWS, answer_column="solution")
    assert found.meta == ROWS[0]


def test_a_conversation_that_ends_with_the_user_has_no_answer(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "1+1="}]
    data = Data(path=_file(tmp_path, [{"prompt": turns}]), chat_template=True)
    with pytest.raises(RlhfsimError, match="does not end with a turn of the assistant"):
        open_source(data, "grpo", 0)


def test_an_evaluation_that_compares_with_answers_needs_them(tmp_path: Path) -> None:
    """In the run's data, or in its own."""
    bare = _file(tmp_path, [{"prompt": f"{i}"} for i in range(20)])
    plan = runs.plan("hybrid", "grpo", tiny.config(tmp_path / "model", layers=2))
    same = Settings(
        model=str(tmp_path / "nowhere"),
        data=Data(path=bare),
        rewards=(RewardRule(kind="digits"),),
        evaluation=Evaluation(problems=2, rewards=(RewardRule(kind="math"),)),
    )
    with pytest.raises(RlhfsimError, match="no column 'answer'"):
        prepare(plan, same, dry_step_s=1.0)
    own = Settings(
        model=str(tmp_path / "nowhere"),
        rewards=(RewardRule(kind="answer"),),
        evaluation=Evaluation(problems=2, data=Data(path=bare)),
    )
    job, prompter = prepare(plan, own, dry_step_s=1.0)
    with pytest.raises(RlhfsimError, match="no column 'answer'"):
        evaluation_prompter(job, prompter, print)
