"""Evaluations and samples on the page of a run."""

from __future__ import annotations

import json
from pathlib import Path

from rlhfsim.present.answers.tree import TypedTable
from rlhfsim.present.answers.written import written
from rlhfsim.present.pages.learnt import SHOWN, learnt


def test_evaluations_and_samples_of_a_run_are_shown_and_broken_lines_left_out(tmp_path: Path) -> None:
    rows = [{"step": 0, "a": 1.0}, {"step": 9, "evaluation/accuracy": 0.5, "evaluation/pass@4": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 1')
    line = {
        "part": "training",
        "prompt": "1+1=",
        "response": "2" * 999,
        "reward": 1.0,
        "rewards": {"answer": 1},
    }
    texts = [json.dumps(line | {"step": step, "response_tokens": 3}) for step in (0, 4, 9) for _ in range(6)]
    texts += [json.dumps(line | {"step": 10, "part": "evaluation", "reward": None}), "cut"]
    (tmp_path / "samples.jsonl").write_text("\n".join(texts))
    found = [block for block in learnt(tmp_path) if isinstance(block, TypedTable)]
    assert [block.caption for block in found] == [
        "Evaluations on problems held out",
        "Iteration 1: samples",
        "Iteration 10: samples",
        "Iteration 10: responses to problems held out",
    ]
    assert [column.title for column in found[0].columns] == ["iteration", "accuracy", "pass@4"]
    assert [cell.text for cell in written(found[0]).rows[0]] == ["10", "0.5", "-"]
    assert len(found[1].rows) == SHOWN
    assert len(str(found[1].rows[0][1])) == 300
    assert written(found[1]).rows[0][3].text == "answer 1"
    assert list(learnt(None)) == list(learnt(tmp_path / "none")) == []


def test_lines_that_no_parser_reads_are_left_out_and_long_files_are_read(tmp_path: Path) -> None:
    row = json.dumps({"step": 3, "evaluation/accuracy": 0.5, "more": "x" * 1000})
    deep = "[" * 100_000
    (tmp_path / "metrics.jsonl").write_text("\n".join([deep, '{"step": 1e999}', *[row] * 5000]))
    [block] = [block for block in learnt(tmp_path) if isinstance(block, TypedTable)]
    assert len(block.rows) == 5000
