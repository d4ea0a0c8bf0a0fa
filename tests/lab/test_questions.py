"""Random questions of every command: no traceback, no number that is none, no two answers that disagree."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest

from lab.questions.ask import Answered, _wrong, ask_here
from lab.questions.draw import small
from rlhfsim.search import clock

QUESTIONS, ALWAYS, PER_TEST, SEED = 300, 50, 50, 1
"""All of them with -m long: each takes over half a second."""
WORK = 2_000
"""Options that a search prices."""


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=() if n < ALWAYS else pytest.mark.long) for n in range(0, QUESTIONS, PER_TEST)],
)
def test_every_command_answers_small_questions_and_none_contradicts_another(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "dumb")
    limited = clock.worth  # by work, not by seconds: a test asks the same on every machine
    monkeypatch.setattr(clock, "worth", lambda options: limited(WORK))
    monkeypatch.setattr(clock, "within", lambda seconds: nullcontext())
    asked = [ask_here(small(n, SEED), tmp_path / str(n)) for n in range(first, first + PER_TEST)]
    gc.enable()  # a command leaves it off, for its process is short
    assert [defect for defects, *_ in asked for defect in defects] == []
    ended = Counter(outcome.split(" ")[0] for *_, outcome in asked)
    assert ended["0"] > PER_TEST / 2
    assert set(ended) <= {"0", "1", "2"}


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (70, "Traceback (most recent call last):\n  x", "traceback"),
        (1, "Traceback (most recent call last):\n  x", "traceback"),
        (2, "something is wrong", "unclear"),
        (0, "step nan s", "no number"),
        (0, '{"step_s": Infinity}', "no number"),
        (2, "error[bad-option]: --gpus 0\n  --> command line", None),
        (2, "error[bad-option]: --gpus 0", "unclear"),
        (0, "infinite patience with nano-vllm", None),
    ],
)
def test_what_no_answer_may_have_is_seen(code: int, text: str, kind: str | None) -> None:
    found = [kind for kind, _ in _wrong(Answered(words=("design",), code=code, text=text))]
    assert found == ([kind] if kind else [])
