"""The searching process: first answers come before proofs, and a proof ends when nobody asks any longer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from multiprocessing import Pipe
from typing import Any

import pytest

from rlhfsim.cli.desk import asked
from rlhfsim.desk import searches
from rlhfsim.desk.answer import Answer, DeskQuestion, proven
from rlhfsim.errors import RlhfsimError


def unread(query: str) -> DeskQuestion:
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


def test_a_proof_whose_process_is_killed_leaves_the_first_answer_and_says_why(
    server: tuple[Any, Any, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, page, _ = server

    def killed(*_: object, **__: object) -> Iterator[None]:
        raise RlhfsimError(searches.ENDED, "the process was ended: signal 9 (SIGKILL)")
        yield None

    monkeypatch.setattr(searches, "forked", killed)
    page.send(("a", ("one",)))
    process._hear()
    process._answer_first()
    process._away(proven, "one")
    assert told(page) == [("one", "first"), ("one", "died")]
    assert process._known["one"].missing == ("the process was ended: signal 9 (SIGKILL)",)
    page.send(("a", ("one",)))
    process._hear()
    process._answer_first()
    assert told(page) == [("one", "first")]


def test_memory_that_runs_out_is_no_bug_of_ours(server: tuple[Any, Any, list[str]]) -> None:
    def full(_: DeskQuestion) -> Answer:
        raise MemoryError

    answer = server[0]._answered(full, "one")
    assert (answer.stage, answer.missing) == ("died", ("memory ran out",))


def test_a_killed_search_says_how_it_died_and_a_retry_starts_another_one() -> None:
    ours = searches.Searches(partial(asked, files=False))
    try:
        ours.ask("page", ("gpus=x",))
        os.kill(ours._process.pid or 0, signal.SIGKILL)
        dead = ours.answer("gpus=x", wait_s=60)
        assert dead is not None
        assert dead.stage == "died"
        assert "signal 9 (SIGKILL), as the system does where memory runs out" in dead.missing[0]
        ours.ask("page", ("gpus=x",))
        assert ours.answer("gpus=x") == dead  # nothing starts by itself, which would die again
        ours.ask("page", ("gpus=x",), again=True)
        answer = ours.answer("gpus=x", wait_s=60)
        assert answer is not None
        assert answer.stage == "failed"
    finally:
        ours.close()


def test_a_question_that_cannot_be_read_has_its_reason(server: tuple[Any, Any, list[str]]) -> None:
    process, _, _ = server
    process._read = unread
    answer = process._answered(proven, "gpus=x")
    assert answer.stage == "failed"
    assert answer.missing == ("gpus=x cannot be read", "ask another")
