"""The table of candidates on the page: its process, what is shown, what a row asks."""

from __future__ import annotations

import json
import time
from functools import partial
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfsim.cli.desk import elsewhere
from rlhfsim.desk import tasks
from rlhfsim.desk.choose import asked_by, table_view
from rlhfsim.desk.comparisons import DeskComparison, compare
from rlhfsim.desk.state import compared, query
from rlhfsim.desk.tasks import PageTasks, told

WORK = {"model": "0.5b", "algorithm": "grpo", "prompts": "32", "samples": "2", "response-len": "256"}
QUESTION = {**WORK, "gpus": "1", "gpu": "l4"}
CHOICE = compared(QUESTION, {"gpu": "l4", "gpus": "1", "framework": "trl"})


def shown(known: DeskComparison | None, question: dict[str, str] = QUESTION) -> str:
    parts = [part.to_plotly_json() for part in table_view(known, question)]
    return json.dumps(parts, default=lambda c: c.to_plotly_json())


@pytest.fixture(scope="module")
def table() -> DeskComparison:
    """What the process tells of one framework on one GPU, put together."""
    ours, theirs = Pipe()
    compare(partial(elsewhere, files=True), query(CHOICE), theirs)
    known: dict[str, Any] = {}
    while ours.poll():
        known |= ours.recv()
    return DeskComparison(question=CHOICE, **known)


def test_a_table_is_that_of_choose_and_a_row_sets_the_controls(table: DeskComparison) -> None:
    assert not table.running
    assert table.done == table.total == len(table.options) == 2
    page = shown(table)
    assert "rlhfsim choose --model 0.5b" in page
    assert '"data-title": "P10-P90"' in page
    assert "Cheapest: 1 x l4 with trl on " in page
    best = table.options[0]
    row = f"1|l4|trl|{best.backend}"
    assert row in page
    state = asked_by(row, {**QUESTION, "gpu": "h100"}, {"gpus": "8"})
    assert state.question == {**QUESTION, "framework": "trl", "backend": best.backend}
    assert state.base == {"gpus": "8"}
    assert '"front now"' not in page
    assert '"front now"' in shown(table, state.question)
    assert "compare again" not in shown(table, state.question)
    assert "compare again" in shown(table, {**QUESTION, "prompts": "64"})


def test_progress_and_what_went_wrong_are_said() -> None:
    assert "a search of its own" in shown(None)
    begun = DeskComparison(question=CHOICE, began=time.monotonic() - 20, done=1, total=3)
    assert "1 of 3 candidates are designed, about 40 s left." in shown(begun)
    ours, theirs = Pipe()
    told(partial(compare, partial(elsewhere, files=True), query({**CHOICE, "gpus": "8..x"})), theirs)
    page = shown(DeskComparison(question=CHOICE, **ours.recv()))
    assert "not LOW..HIGH, as in --gpus 8..128" in page


@pytest.mark.parametrize(
    ("left_s", "why"), [(0.0, "nobody looked"), (30.0, "signal 9 (SIGKILL)")], ids=["nobody looks", "it died"]
)
def test_a_table_that_comes_to_no_end_is_ended(
    monkeypatch: pytest.MonkeyPatch, left_s: float, why: str
) -> None:
    fate: list[str] = []
    process = SimpleNamespace(
        start=lambda: None,
        terminate=lambda: fate.append("ended"),
        join=lambda: fate.append("gone"),
        exitcode=-9,
    )
    ours, theirs = Pipe()
    kept = SimpleNamespace(close=theirs.close if left_s > 0 else theirs.fileno)
    context = SimpleNamespace(Pipe=lambda: (ours, kept), Process=lambda **_: process)
    monkeypatch.setattr(tasks, "get_context", lambda _: context)
    monkeypatch.setattr(tasks, "LEFT_S", left_s)
    tables = PageTasks[DeskComparison]("comparison")
    tables.start("page", DeskComparison(question=CHOICE), lambda pipe: None)
    running = tables._running["page"]
    running._thread.join(10)
    known = tables.known("page")
    assert known is not None
    assert known.trouble is not None
    assert why in known.trouble.message
    assert fate[-2:] == ["ended", "gone"]
    tables.stop("page")
    assert tables.known("page") is None
