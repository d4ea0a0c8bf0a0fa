"""A short share of `python -m lab.verdicts`: a fuzzer that plays the program's side of a code reward."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from executor.rewards.problem import ProblemTests
from executor.rewards.sandbox import Sandbox
from executor.rewards.verifier import PipedProgram
from lab.verdicts import __main__ as fuzzer
from lab.verdicts.__main__ import play, play_real, right_that_fail
from lab.verdicts.opponent import Game, Opponent, game
from lab.verdicts.tasks import STYLES, tasks

NUM_FAMILIES = 22


@pytest.fixture(scope="module")
def games() -> list[Game]:
    return [game(task) for task in tasks(NUM_FAMILIES * len(STYLES), 3)]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as made:
        yield made


def test_no_wrong_program_passes_whatever_it_sends(games: list[Game], sandbox: Sandbox) -> None:
    played = play(games, 2500, seed=3)
    assert played.passed == []
    assert len(played.endings) > 10, "the messages lead to many ends"
    assert play_real(games, played, 24, 3, sandbox) == []


def test_right_programs_of_every_family_pass(sandbox: Sandbox) -> None:
    assert right_that_fail(tasks(NUM_FAMILIES, 5), sandbox) == []


class Trusting(PipedProgram):
    """A verifier that takes the built-in functions that a program sends."""

    def names(self, problem: ProblemTests) -> tuple[dict[str, str], dict[str, Any]]:
        """As if the tests wanted them."""
        return super().names(replace(problem, wanted={**problem.wanted, **{n: n for n in dir(builtins)}}))


def test_the_fuzzer_forges_a_verdict_where_names_are_trusted(games: list[Game]) -> None:
    assert play(games, 2500, seed=3, program=Trusting).passed


def test_an_alarm_that_rings_while_it_is_taken_off_is_a_verdict_that_took_too_long(
    games: list[Game], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rings(_: int, seconds: float) -> None:
        if not seconds:
            raise fuzzer._TooLong

    monkeypatch.setattr("signal.setitimer", rings)
    monkeypatch.setattr(fuzzer, "judged", lambda *_: {"status": "failed", "error": ""})
    program = PipedProgram(Opponent(games[0], Random(3), []))
    assert fuzzer._verdict(program, games[0]) == {"status": "timeout", "error": ""}
