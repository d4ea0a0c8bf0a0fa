"""Play, count, and say who passed."""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import click

from executor.rewards.sandbox import CodeRun, Sandbox
from executor.rewards.verifier import PipedProgram, judged
from lab.verdicts.opponent import Game, Message, Opponent, game
from lab.verdicts.tasks import Task, tasks

NUM_TESTS = 200
VERDICT_S = 2.0
"""A verdict in this process that takes longer has failed, as in the sandbox."""
MEMORY_BYTES = 3 * 2**30
KEPT = 20
"""Traces of a task from which others are bred."""
_SENDS = """
import json as _json, os as _os, struct as _struct, sys as _sys
_sent = iter(_json.loads({messages!r}))
_channel = _sys.modules['executor.rewards.values'].Channel
_send = _channel.send
def _other(self, message):
    _send(self, next(_sent, message))
_channel.send = _other
"""


@dataclass(slots=True)
class Played:
    """What a run of the fuzzer has seen."""

    messages: int = 0
    verdicts: int = 0
    passed: list[tuple[str, list[Message]]] = field(default_factory=list)
    """Wrong programs that passed: the task and their messages."""
    endings: dict[tuple[str, str], int] = field(default_factory=dict)
    """How verdicts ended: status and first word of the error."""
    kept: dict[int, list[list[Message]]] = field(default_factory=dict)
    """Traces by task, each of which led further or elsewhere than those before."""


class _TooLong(BaseException):
    pass


def play(
    games: Sequence[Game], messages: int, seed: int, program: type[PipedProgram] = PipedProgram
) -> Played:
    """So many messages at least, against the verifier in this process."""
    rng, played = Random(f"play:{seed}"), Played()
    seen: set[tuple[Any, ...]] = set()
    with _alarmed():
        while played.messages < messages:
            number = rng.randrange(len(games))
            kept = played.kept.setdefault(number, [])
            trace = rng.choice(kept)[: rng.randrange(1, 30)] if kept and rng.random() < 0.5 else []
            opponent = Opponent(games[number], rng, trace)
            found = _verdict(program(opponent), games[number])
            played.verdicts += 1
            played.messages += len(opponent.sent)
            ending = found["status"], found["error"].partition(":")[0][:40]
            played.endings[ending] = played.endings.get(ending, 0) + 1
            if found["status"] == "passed":
                played.passed.append((games[number].task.name, opponent.sent))
            signature = (number, ending, found["error"][:60], min(len(opponent.sent), 30))
            if signature not in seen:
                seen.add(signature)
                kept[rng.randrange(KEPT) : KEPT] = [opponent.sent]
    return played


def _verdict(program: PipedProgram, game: Game) -> dict[str, str]:
    try:
        signal.setitimer(signal.ITIMER_REAL, VERDICT_S)
        try:
            return judged(program, game.problem)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _TooLong:  # while it judged, or while it was taken off
        return {"status": "timeout", "error": ""}


@contextmanager
def _alarmed() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def play_real(games: Sequence[Game], played: Played, count: int, seed: int, sandbox: Sandbox) -> list[str]:
    """Wrong programs that pass in the sandbox, which send kept traces, or those spoiled, in place of their own messages."""
    rng = Random(f"real:{seed}")
    runs, names = [], []
    for i in range(count):
        number = i % len(games)
        traces = played.kept.get(number) or [[]]
        messages = json.dumps(rng.choice(traces)) if i >= len(games) else "[]"
        one = games[number].task
        runs.append(_run(one, one.wrong + _SENDS.format(messages=messages)))
        names.append(one.name)
    outcomes = sandbox.map(runs)
    return [name for name, outcome in zip(names, outcomes, strict=True) if outcome.status == "passed"]


def right_that_fail(right: Sequence[Task], sandbox: Sandbox) -> list[str]:
    """Right programs that do not pass."""
    outcomes = sandbox.map([_run(task, task.right) for task in right])
    return [
        f"{task.name}: {outcome.status} {outcome.error[:80]}"
        for task, outcome in zip(right, outcomes, strict=True)
        if outcome.status != "passed"
    ]


def _run(task: Task, code: str) -> CodeRun:
    return CodeRun(code=code, tests=task.tests, prefix=task.prefix, entry_point=task.entry_point, wall_s=5.0)


@click.command()
@click.option("--messages", default=20_000, help="Of the program, against the verifier in this process.")
@click.option("--real", default=200, help="Wrong programs in the sandbox.")
@click.option("--right", default=200, help="Right programs in the sandbox.")
@click.option("--seed", default=0)
def main(messages: int, real: int, right: int, seed: int) -> None:
    """Exit code 1 where a wrong program passes, or more than 0.5 % of the right ones fail."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    started = time.process_time()
    games = [game(task) for task in tasks(NUM_TESTS, seed)]
    played = play(games, messages, seed)
    for (status, error), count in sorted(played.endings.items(), key=lambda item: -item[1])[:25]:
        print(f"{count:9} {status} {error!a}")
    print(
        f"{played.messages} messages in {played.verdicts} verdicts of {len(games)} tests: "
        f"{len(played.passed)} wrong programs passed ({time.process_time() - started:.0f} s of CPU)"
    )
    for name, sent in played.passed[:5]:
        print(f"  {name}: {json.dumps(sent)[:2000]}")
    with Sandbox() as sandbox:
        forged = play_real(games, played, real, seed, sandbox)
        failed = right_that_fail(tasks(right, seed + 1), sandbox)
    print(f"{real} wrong programs in the sandbox ({sandbox.mode}): {len(forged)} passed {forged[:5]}")
    print(f"{right} right programs in the sandbox: {len(failed)} failed {failed[:5]}")
    sys.exit(1 if played.passed or forged or len(failed) > right / 200 else 0)


if __name__ == "__main__":
    main()
