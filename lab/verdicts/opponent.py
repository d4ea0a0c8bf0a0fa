"""The program's side of the protocol, played by a fuzzer against the verifier in this process."""

from __future__ import annotations

import builtins
import copy
import json
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import CodeType
from typing import Any

from executor.rewards.problem import ProblemTests, problem
from executor.rewards.program import _Program
from executor.rewards.values import Channel
from executor.rewards.verifier import PipedProgram, judged
from lab.verdicts.tasks import Task

Message = Any
"""What JSON holds."""
MOST_MESSAGES = 200
"""In one verdict; then the program ends."""
_DIGITS = re.compile(r"0x[0-9a-f]+|\d+")
_RARE = 1000
_FAKE = 900
"""From here on numbers of objects are functions that say yes to everything."""
_YES: tuple[Message, ...] = ([], True, 0, 0.0, "", None, {"t": "object", "v": _FAKE}, {"t": "tuple", "v": []})
_WORDS = ("", "a", "passed", "k", "x", "\ud800", "AssertionError", "__eq__", "self", "0", "value", "names")
_ERRORS = tuple(
    "AssertionError StopIteration ValueError KeyError SystemExit KeyboardInterrupt SkipTest Exception "  # noqa: SIM905 - words
    "BaseException MemoryError RecursionError OSError UnicodeDecodeError ExceptionGroup _Gone Malformed".split()
)
_TAGS = tuple(
    "tuple set frozenset deque list dict counter range complex fraction timedelta int bytes bytearray "  # noqa: SIM905 - words
    "Decimal date datetime time type named array instance object exception function iterator builtin".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """A task, ready to be played many times."""

    task: Task
    problem: ProblemTests
    wrong: CodeType
    right: CodeType
    rare: frozenset[int]
    """Numbers that the right program's messages hold."""
    withheld: tuple[frozenset[int], ...]
    """Numbers that each message withholds, where it alone holds some."""
    names: tuple[str, ...]
    """Names that the tests use and others define, and some that Python itself looks for."""


class _Recorded:
    """A channel whose messages are kept."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self.send = channel, channel.send
        self.received: list[Message] = []

    def receive(self) -> Message:
        """The next message."""
        self.received.append(self._channel.receive())
        return self.received[-1]


def game(task: Task) -> Game:
    """Play it once with the right program, which passes."""
    ready = problem(task.tests, task.prefix, task.entry_point)
    (asked, asks), (answers, answered) = os.pipe(), os.pipe()
    player = _player(task.prefix + task.right, Channel(asked, answered))
    thread = threading.Thread(target=player.serve, daemon=True)
    thread.start()
    link = _Recorded(Channel(answers, asks))
    found = judged(PipedProgram(link), ready)
    os.close(asks)
    thread.join()
    for descriptor in (asked, answers, answered):
        os.close(descriptor)
    assert found["status"] == "passed", (task.name, found)
    said = sorted({json.dumps(message) for message in link.received})
    words = set(re.findall(r"\w+", task.tests))
    alone = [numbers(text) - numbers(" ".join(t for t in said if t != text)) for text in said]
    return Game(
        task=task,
        problem=ready,
        wrong=compile(task.prefix + task.wrong, "<wrong>", "exec"),
        right=compile(task.prefix + task.right, "<right>", "exec"),
        rare=frozenset(numbers(" ".join(said))),
        withheld=tuple(frozenset(found) for found in alone if found),
        names=(*sorted(words & {*dir(builtins), *ready.given}), "__name__", "__builtins__"),
    )


def numbers(text: str) -> set[int]:
    """The numbers of four digits or more in a text."""
    return {
        number
        for found in _DIGITS.findall(text)
        if (number := int(found, 0 if "x" in found else 10)) >= _RARE
    }


def _player(code: str | CodeType, channel: Any) -> _Program:
    space: dict[str, Any] = {"__name__": "solution"}
    exec(code, space)
    player = _Program(space, {"status": "passed", "error": ""})
    player._channel = channel
    return player


class _NoQuestions:
    """The wrong program cannot ask in the middle of an answer; the fuzzer does."""

    def send(self, message: Message) -> None:
        """Refuse."""
        raise RuntimeError("no questions")


class Opponent:
    """A link whose other end is the fuzzer: a wrong program, or a right one that lacks one answer."""

    def __init__(self, game: Game, rng: Random, trace: list[Message]) -> None:
        """`trace`: messages of an earlier verdict to begin with."""
        self._verdicts, self._rng, self._trace, self._names = game.task.verdicts, rng, trace, game.names
        nearly = bool(game.withheld or game.task.verdicts) and rng.random() < 0.6
        self._player = _player(game.right if nearly else game.wrong, _NoQuestions())
        self._rare = rng.choice(game.withheld) if nearly and game.withheld else game.rare
        self._request: Message = None
        self._boldness = rng.choice((0.0, 0.1, 0.3, 0.6, 1.0))
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        """A request of the verifier."""
        self._request = json.loads(json.dumps(message))

    def receive(self) -> Message:
        """Our message, as bytes that were read.

        Raises:
            EOFError: the program has ended.
            ValueError: it sent no JSON.
        """
        if len(self.sent) >= MOST_MESSAGES:
            raise EOFError
        message = self._allowed(self._next())
        self.sent.append(message)
        body = json.dumps(message).encode()
        if self._rng.random() < 0.002:
            at = self._rng.randrange(len(body))
            body = body[:at] + bytes([self._rng.randrange(256)]) + body[at + self._rng.randrange(3) :]
            if numbers(body.decode("latin-1")) & self._rare:
                body = b"{"
        return json.loads(body)

    def _allowed(self, message: Message) -> Message:
        """The message, unless it would be a right answer."""
        if numbers(json.dumps(message)) & self._rare:
            return ["value", 0, None, ""]
        request = self._request
        if not self._verdicts or request[0] != "call" or message[:1] != ["value"] or len(message) < 2:
            return message
        asked, value = (request[1] + [0])[1], message[1]
        is_object = isinstance(value, dict) and value.get("t") == "object"
        if asked == len(self._verdicts) // 2 and not isinstance(value, list) and not is_object:
            return ["value", not self._verdicts[asked], None, ""]  # for 1.0 and Fraction(1) equal True
        return message

    def _next(self) -> Message:
        rng, place = self._rng, len(self.sent)
        if place < len(self._trace):
            old = copy.deepcopy(self._trace[place])
            return self._spoiled(old) if rng.random() < 1 / len(self._trace) else old
        request = self._request
        if request[0] == "call" and isinstance(request[1][0], dict) and request[1][0].get("v", 0) >= _FAKE:
            return ["value", copy.deepcopy(rng.choice(_YES)), None, ""]
        own = self._own()
        if request[0] == "names" and rng.random() < 0.3:
            return self._reply()
        if rng.random() >= self._boldness:
            return own
        return self._spoiled(own) if rng.random() < 0.5 else self._reply()

    def _own(self) -> Message:
        """What the program would say."""
        if self._request[0] not in ("answer", "raise"):
            try:
                return self._player._answer(self._request)
            except BaseException:
                return ["error", [None, "ValueError", "ValueError"], [], ""]
        return ["value", 0, None, ""]

    def _reply(self) -> Message:
        """One from the grammar."""
        rng = self._rng
        if self._request[0] == "names":
            ended = {"status": "passed", "error": ""}
            fakes = {"t": "object", "v": _FAKE + rng.randrange(9)}, self._value()
            chosen = rng.sample(self._names, min(len(self._names), rng.randrange(1, 4)))
            return [ended, self._own()[1] | {name: fakes[rng.random() < 0.3] for name in chosen}]
        match rng.randrange(8):
            case 0:
                kind = [rng.choice((None, rng.randrange(5))), rng.choice(_ERRORS), rng.choice(_ERRORS)]
                return ["error", kind, [self._value() for _ in range(rng.randrange(3))], ""]
            case 1:
                named = {"t": "dict", "v": [[rng.choice(_WORDS), self._value()]] * rng.randrange(2)}
                return ["ask", rng.randrange(-1, 3), [self._value() for _ in range(rng.randrange(3))], named]
            case 2:
                after = (
                    [self._value() for _ in self._request[1]] if isinstance(self._request[1], list) else []
                )
                return ["value", rng.choice((None, self._value())), after, ""]
            case 3:
                return ["value", {"t": "object", "v": rng.randrange(9)}, None, rng.choice(_WORDS)]
        return ["value", self._value(), None, rng.choice(("", "", rng.choice(_WORDS)))]

    def _value(self, depth: int = 0) -> Message:
        rng = self._rng
        if depth > 3 or rng.random() < 0.4:
            return self._scalar()
        if rng.random() < 0.3:
            return [self._value(depth + 1) for _ in range(rng.randrange(5))]
        tag = rng.choice(_TAGS)
        parts = [self._value(depth + 1) for _ in range(rng.randrange(4))]
        usual: dict[str, Callable[[], Message]] = {
            "dict": lambda: [[self._scalar(), part] for part in parts],
            "counter": lambda: [[self._scalar(), rng.randrange(5)] for _ in parts],
            "range": lambda: [rng.randrange(9), rng.randrange(999), rng.choice((1, 1, 2, -1, 0))],
            "complex": lambda: [float(rng.randrange(4)), 0.0],
            "fraction": lambda: [rng.randrange(99), rng.randrange(3)],
            "timedelta": lambda: [rng.randrange(9), 0, 0],
            "int": lambda: rng.choice(("0x3", "-0x1", "0x" + "f" * 40, "zz")),
            "bytes": lambda: rng.choice(_WORDS),
            "Decimal": lambda: rng.choice(("1.5", "NaN", "sNaN", "1E+999", "-0")),
            "type": lambda: rng.choice(("int", "list", "str", "bool", "eval")),
            "named": lambda: ["P", ["x", "count", "index", "y"][: len(parts)], parts],
            "array": lambda: [
                rng.choice(("<i8", "<f8", "|b1", "<U1", "|O")),
                [len(parts)],
                "\0" * 8 * len(parts),
            ],
            "instance": lambda: [
                "Tree",
                {"t": "dict", "v": [["value", self._scalar()], ["left", None], ["right", None]]},
            ],
            "object": lambda: rng.randrange(9),
            "exception": lambda: [rng.choice((None, 1)), rng.choice(_ERRORS), rng.choice(_ERRORS)],
        }
        return {"t": tag, "v": usual[tag]() if tag in usual and rng.random() < 0.97 else parts}

    def _scalar(self) -> Message:
        rng = self._rng
        numbers = (rng.randrange(-3, 13), rng.randrange(-3, 13), 10**18, -(2**63), 0.0, -0.0, 1.5)
        return rng.choice(
            (None, True, False, *numbers, float("nan"), float("inf"), rng.choice(_WORDS), *self._asked())
        )

    def _asked(self) -> list[Message]:
        """What the request holds."""
        request = self._request
        return (
            request[1]
            if isinstance(request, list) and len(request) > 1 and isinstance(request[1], list)
            else []
        )

    def _spoiled(self, message: Message) -> Message:
        """The message with one part changed."""
        rng = self._rng
        places: list[tuple[Any, Any]] = []
        _collect(message, places)
        if not places or rng.random() < 0.02:
            return self._value()
        holder, key = rng.choice(places)
        match rng.randrange(5):
            case 0 if isinstance(holder, list):
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, self._value())
            case 2:
                holder[key] = [holder[key]]
            case 3 if type(holder[key]) is int:
                holder[key] += rng.choice((-1, 1, 7, 2**64))
            case _:
                holder[key] = self._value()
        return message


def _collect(message: Message, places: list[tuple[Any, Any]]) -> None:
    """Every part of a message: what holds it, and where."""
    keys = message if isinstance(message, dict) else range(len(message)) if isinstance(message, list) else ()
    for key in list(keys)[:40]:
        places.append((message, key))
        _collect(message[key], places)
