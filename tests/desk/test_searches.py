"""The searching process: first answers come before proofs, and a proof ends when nobody asks any longer."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import Pipe
from typing import Any

import pytest

from rlhfsim.desk import searches
from rlhfsim.desk.answer import Answer, Asked, proven
from rlhfsim.errors import RlhfsimError


def unread(query: str) -> Asked:
    raise RlhfsimError("bad-option", f"{query} cannot be read", help="ask another")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any, list[str]]]:
    """The process's end, the page's end, and what became of the proof, which never comes to its end."""
    ours, theirs = Pipe()
    fate: list[str] = []

    def never(*_: object, **__: object) -> Iterator[None]:
        try:
            while True:
                yield None
        finally:
            fate.append("ended")

    monkeypatch.setattr(searches, "forked", never)
    monkeypatch.setattr(searches, "may_fork", lambda: True)
    monkeypatch.setattr(searches, "first", lambda asked: Answer(stage="first"))
    yield searches._Server(lambda query: query, theirs), ours, fate  # type: ignore[arg-type,return-value]
    ours.close()
    theirs.close()


def told(pipe: Any) -> list[tuple[str, str]]:
    answers = []
    while pipe.poll():
        question, answer = pipe.recv()
        answers.append((question, answer.stage))
    return answers


def test_a_newer_question_of_the_page_ends_the_older_proof(server: tuple[Any, Any, list[str]]) -> None:
    process, page, fate = server
    page.send(("a", ("old",)))
    process._hear()
    process._answer_first()
    assert told(page) == [("old", "first")]
    page.send(("a", ("new",)))
    process._away(proven, "old")
    assert fate == ["ended"]
    process._answer_first()
    assert told(page) == [("new", "first")]


def test_a_question_that_cannot_be_read_has_its_reason(server: tuple[Any, Any, list[str]]) -> None:
    process, _, _ = server
    process._read = unread
    answer = process._answered(proven, "gpus=x")
    assert answer.stage == "failed"
    assert answer.missing == ("gpus=x cannot be read", "ask another")
