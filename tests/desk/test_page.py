"""What the page does with a change, and what it shows of an answer: its callbacks as functions."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dash import no_update

from rlhfsim.cli.design import design
from rlhfsim.cli.desk import FIELDS, asked
from rlhfsim.desk.answer import Answer, complete, died, failed, first, proven
from rlhfsim.desk.page import POLL_MS, REST_MS, Moved, look, moved, plan_file
from rlhfsim.desk.state import DeskState, arguments, query
from rlhfsim.desk.view import against, answer_view, progress
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import plan_text
from rlhfsim.verdict import verdict

SMALL = {
    "gpus": "4",
    "model": "0.5b",
    "algorithm": "grpo",
    "prompts": "64",
    "samples": "2",
    "response-len": "256",
}
RUN = {**SMALL, "steps": "100", "budget": "1USD"}


@pytest.fixture(scope="module")
def answer() -> Answer:
    """Complete but for other sizes; its budget is missed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhfsim.what_if.sizing.FACTORS", (0.5,))
        return complete(lambda: asked(query(RUN), files=True))


def change(cause: str, values: dict[str, str], before: DeskState, search: str = "") -> Moved:
    return moved(cause, search, values, before, fields=FIELDS, read=lambda q: asked(query(q), files=True))


def test_a_change_is_asked_and_a_bad_one_leaves_the_answer() -> None:
    at = DeskState(question=SMALL)
    assert change("gpus", {**SMALL, "gpus": "8"}, at).state.question["gpus"] == "8"
    assert change("double", SMALL, at).state.question["gpus"] == "8"
    assert change("half", {**SMALL, "gpus": "1"}, at).shown["gpus"] == "1"
    bad = change("gpus", {**SMALL, "gpus": "4x8"}, at)
    assert bad.state == at
    assert bad.shown["gpus"] == "4x8"
    assert list(bad.messages) == ["gpus"]


def test_pinning_keeps_the_question_and_an_address_brings_both_back() -> None:
    pinned = change("pin", SMALL, DeskState(question=SMALL)).state
    assert pinned.base == pinned.question == SMALL
    after = change("gpus", {**SMALL, "gpus": "8"}, pinned).state
    assert after.base == SMALL
    assert change("unpin", SMALL, after).state.base == {}
    assert change("search", {}, DeskState(), "?gpus=8&model=0.5b").state.question == {
        "gpus": "8",
        "model": "0.5b",
    }
    assert "no field" in change("search", {}, pinned, "?gpuz=8").messages[""]


def test_the_first_answer_is_marked_and_the_proven_one_is_what_design_writes(
    answer: Answer, tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    screen = CliRunner().invoke(design, [*arguments(RUN), "--out", str(out)]).output
    assert answer.plan is not None
    assert plan_text(answer.plan) == out.read_text()
    assert " ".join(screen.split()).startswith(verdict(answer.plan))
    assert verdict(answer.plan) in shown(answer).replace("\\u00a0", " ")
    assert "not yet proven" in shown(first(lambda: asked(query(RUN), files=True)))
    assert "Proven: none of" in shown(answer)


def shown(answer: Answer | None, base: Answer | None = None, *, pinned: bool = False) -> str:
    """Everything that an answer puts on the page, as text."""
    parts = [*progress(answer, 0.0), *answer_view(answer, "rlhfsim design --gpus 4", base, pinned=pinned)]
    return json.dumps([part.to_plotly_json() for part in parts], default=lambda c: c.to_plotly_json())


def test_an_answer_shows_verdict_picture_time_memory_money_and_how_to_repeat_it(answer: Answer) -> None:
    page = shown(answer)
    for part in (
        "It fits",
        "nodes",
        "timeline",
        "resources",
        "memory-0",
        "pareto",
        "rlhfsim design --gpus 4",
    ):
        assert part in page, part
    assert "A target is missed" in page
    assert "Missed: cost of run at most 1\\u00a0USD; it is " in page
    assert "met with a probability of" in page
    assert "t fits and meets all targets with a probability of" in page
    assert "var(--" not in page.replace("var(--n", "")


def test_a_search_says_how_long_it_takes_and_promises_nothing(answer: Answer) -> None:
    assert state(None, 41.7) == "Searching: no plan is found yet. asked 41 seconds ago"
    early = replace(answer, stage="first")
    assert state(early, 1.2).startswith("First answer, not yet proven")
    assert state(early, 1.2).endswith("The proof is running. asked 1 second ago")
    assert state(answer, 50) == state(answer, 60)


def test_a_search_that_died_says_why_and_can_be_searched_again(answer: Answer) -> None:
    assert state(died("signal 9"), 3) == "The search died: signal 9. Search again"
    kept = died("signal 9", replace(answer, stage="first"))
    assert state(kept, 3) == "The search died: signal 9; the plan below is not proven. Search again"
    assert verdict(answer.plan) in shown(kept).replace("\\u00a0", " ")  # type: ignore[arg-type]


def state(answer: Answer | None, searching_s: float) -> str:
    """The state of the search as text."""
    return " ".join(part.children for part in progress(answer, searching_s))


def test_why_there_is_no_answer_is_said() -> None:
    page = shown(failed(RlhfsimError("x", "no such thing", help="ask another")))
    assert "No such thing" in page
    assert "Ask another" in page
    assert "nothing fits" in shown(Answer(stage="proven", missing=("2 GB are missing",)))


def test_what_differs_from_the_pinned_answer_is_listed(answer: Answer) -> None:
    assert answer.plan is not None
    p = answer.plan.prediction
    twice = replace(answer, plan=replace(answer.plan, prediction=replace(p, step_s=2 * p.step_s)))
    first, more = against(answer, twice)
    assert first.title.startswith("Against the pinned question: step ")  # type: ignore[union-attr]
    assert "+100 %" in first.title  # type: ignore[union-attr]
    assert any(text.startswith("step: ") for _, text in more.lines)  # type: ignore[union-attr]
    assert "nothing differs" in shown(answer, answer, pinned=True)
    assert "being searched" in shown(answer, None, pinned=True)


class Known:
    """Searches that answer from a table."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.asked: Counter[Any] = Counter()

    def ask(self, page: str, questions: tuple[str, ...], *, again: bool = False) -> None:
        self.asked[page, questions] += 1

    def searching_s(self, question: str) -> float:
        return 7.0

    def answer(self, question: str, wait_s: float = 0.0) -> Answer | None:
        return self.answers.get("now" if question == query(SMALL) else "base")


def test_a_look_sends_what_is_new_and_rests_when_nothing_is_left(answer: Answer) -> None:
    def at(searches: Known, seen: str, base: dict[str, str] | None = None) -> Any:
        state = DeskState(question=SMALL, base=base or {})
        return look(state, "page", seen, searches=searches)  # type: ignore[arg-type]

    none = at(Known(), "")
    assert none[3] == POLL_MS
    early, final = replace(answer, stage="proven"), answer
    some = at(Known(now=early), none[2])
    assert some[3] == POLL_MS
    assert at(Known(now=early), some[2])[1:3] == (no_update, no_update)
    done = at(Known(now=final), some[2])
    assert done[3] == REST_MS
    assert at(Known(now=final), done[2])[:3] == (no_update, no_update, no_update)
    both = Known(now=final)
    assert at(both, "", {"gpus": "8", "model": "0.5b"})[3] == POLL_MS
    assert at(Known(now=died("signal 9")), "")[3] == REST_MS
    assert both.asked["page", (query(SMALL), "gpus=8&model=0.5b")] == 1


def test_the_plan_is_saved_as_design_writes_it(answer: Answer) -> None:
    assert answer.plan is not None
    saved = plan_file(answer)
    assert saved["filename"] == "plan.json"
    assert saved["content"] == plan_text(answer.plan)
    assert plan_file(Answer(stage="proven")) is no_update


def test_reasons_and_other_sizes_come_last(answer: Answer) -> None:
    assert [s.gpus for s in answer.sizes.tried] == [2]
    assert "2 GPUs" in shown(answer)
    early = proven(lambda: asked(query(RUN), files=True))
    assert early.plan is not None
    assert answer.plan is not None
    assert early.plan.placement == answer.plan.placement
    assert "Reasons and other numbers of GPUs follow" in shown(early)
    assert early.sizes.tried == ()
