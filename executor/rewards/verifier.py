"""The verdict: a problem's tests, run in a process that the program cannot touch.

The program lives in another process (program.py); here its functions are `Remote` objects, which send their
arguments and get plain data back, compared by our own types. So a patched built-in, a class that equals
everything, a trace function or a look into frames changes nothing: to pass, the program must answer rightly.

Of the program come only those names that the tests need and nobody else defines (problem.py): not built-ins,
not modules, not what the problem's `prefix` defines in full; what else it sends is left out. A message that
its codec does not write ends the tests, whatever they catch. Rules that keep an object of the program from
judging itself: it equals no data; arithmetic and order with data are refused; its truth, length and text are
a bool, an int and a str; `in` looks at what it yields; no exception is swallowed by its `__exit__`; an
assertion that fails in a function of the tests counts, whoever called it. A function changes its arguments
only where it returns None. What the tests compare only with other words of the program is the program's
word, as in any judge. Standard library only.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

from executor.rewards.cases import counted
from executor.rewards.problem import ProblemTests, problem
from executor.rewards.program import PAIRS, in_words
from executor.rewards.values import Channel, Malformed, Refused, ValueCodec, exact, renew

ANSWERS, ASKED = 3, 4
"""File descriptors: results come in, calls go out."""
VERDICT, TESTS = 5, 6
_ATTRIBUTES = {"__name__", "__qualname__", "__doc__", "__dict__", "__annotations__", "__module__"}
"""Special attributes that the program may answer; others make libraries trust it (`__array_interface__`)."""
_MARKS = {"_typ", "_sympy_"}
"""Attributes by which pandas and sympy know their own."""
_ENDED = ("memory", "exited", "error")
"""How a program's code may say that it ended, where it did not pass."""
_NOT_RAISED = (StopIteration, StopAsyncIteration)
"""They would end a loop of the tests."""
_MOST_ITEMS = 1_000_000
_MOST_MESSAGES = 1_000_000


class _Gone(BaseException):
    """The program has ended or breaks the protocol; not an Exception: tests should not catch it."""


class MessageLink(Protocol):
    """Where messages go and come from."""

    def send(self, message: Any) -> None:
        """One to the program."""

    def receive(self) -> Any:
        """The next of the program."""


def _does(operation: str) -> Any:
    """A method that asks the program for an operation on its object."""

    def method(self: Remote, *args: Any, **named: Any) -> Any:
        return self._remote_program.ask(operation, (self, *args), named)

    return method


def _gives(operation: str, kind: type) -> Any:
    """A method whose answer is data of this very type."""
    ask = _does(operation)

    def method(self: Remote) -> Any:
        return self._remote_program.checked(lambda value: exact(value, kind), ask(self))

    return method


class Remote:
    """An object of the program."""

    __slots__ = ("_remote_number", "_remote_program")

    def __init__(self, program: PipedProgram, number: int) -> None:
        object.__setattr__(self, "_remote_program", program)
        object.__setattr__(self, "_remote_number", number)

    __call__ = _does("call")
    __setattr__ = _does("set")
    __getitem__ = _does("item")
    __setitem__ = _does("setitem")
    __delitem__ = _does("delitem")
    __next__ = _does("next")
    __neg__ = _does("neg")
    __enter__ = _does("enter")
    __len__ = _gives("len", int)
    __bool__ = _gives("bool", bool)
    __repr__ = _gives("repr", str)
    __str__ = _gives("str", str)

    def __getattr__(self, name: str) -> Any:
        if name in _MARKS or (name.startswith(("__", "_remote_")) and name not in _ATTRIBUTES):
            raise AttributeError(name)
        return self._remote_program.ask("get", (self, name), {})

    def __iter__(self) -> Iterator[Any]:
        found = self._remote_program.ask("iter", (self,), {})
        return found if isinstance(found, Remote) else iter(found)

    def __contains__(self, value: Any) -> bool:
        return any(item is value or item == value for item in self)

    def __hash__(self) -> int:
        return int(self._remote_number)

    def __eq__(self, other: object) -> bool:
        return bool(_does("eq")(self, other)) if isinstance(other, Remote) else False

    def __ne__(self, other: object) -> bool:
        return bool(_does("ne")(self, other)) if isinstance(other, Remote) else True

    def __instancecheck__(self, other: object) -> bool:
        return isinstance(other, Remote) and bool(self._remote_program.ask("isinstance", (other, self), {}))

    def __exit__(self, *error: object) -> None:
        self._remote_program.ask("exit", (self,), {})


def _between(operation: str) -> Any:
    """A method for two objects of the program; with data it is refused."""
    ask = _does(operation)

    def method(self: Remote, other: object) -> Any:
        if not isinstance(other, Remote):
            raise Refused(
                f"{operation} of an object of the program and {type(other).__name__}: the program would "
                f"decide; test its attributes or its text"
            )
        return ask(self, other)

    return method


for _name in PAIRS[2:]:
    setattr(Remote, f"__{_name.rstrip('_')}__", _between(_name))


class PipedProgram:
    """The program, by its pipes."""

    def __init__(self, link: MessageLink) -> None:
        self._link = link
        self._codec = ValueCodec(self._export, self._meet)
        self._objects: dict[int, Remote] = {}
        self._exceptions: dict[int, type[Exception]] = {}
        self._functions: list[Any] = []
        self._messages = 0
        self.failures: list[BaseException] = []
        """Failures of functions of the tests that the program called."""
        self.is_gone = False
        self.broken = ""
        """How it broke the protocol; tests that catch everything do not hide it."""

    def names(self, problem: ProblemTests) -> tuple[dict[str, str], dict[str, Any]]:
        """How the program's code ended, and the values of the names that the tests want of it."""
        self._codec.classes = problem.classes
        asked = sorted({*problem.wanted.values()})
        reply = self._exchange(["names", [asked, list(problem.classes)], {}, False])
        ended, values = self.checked(_ended, reply)
        there = {name: name_there for name, name_there in problem.wanted.items() if name_there in values}
        return ended, {name: self._decoded(values[name_there]) for name, name_there in there.items()}

    def ask(self, operation: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """One operation on its objects."""
        captured = sys.stdout is not sys.__stdout__
        encoded = [self._codec.encode(value) for value in args]
        named = {name: self._codec.encode(value) for name, value in named.items()}
        keywords = {"t": "dict", "v": [list(pair) for pair in named.items()]}
        reply = self._exchange([operation, encoded, keywords, captured])
        while True:
            match reply:
                case ["ask", int(number), list(given), given_named]:
                    reply = self._exchange(self._called(number, given, given_named))
                case ["value", value, after, str(printed)]:
                    self._print(printed, captured)
                    if operation == "call" and value is None and type(after) is list:
                        if len(after) != len(args):
                            self._break(f"{len(after)} arguments in place of {len(args)}")
                        for before, data in zip(args, after, strict=True):  # as it left them
                            renew(before, self._decoded(data))
                    return self._decoded(value)
                case ["error", [int() | None as number, str(name), str(base)], list(values), str(printed)]:
                    self._print(printed, captured)
                    self._raise(operation, (number, name, base), values)
                case _:
                    self._break(f"a reply of a kind that is none: {str(reply)[:80]}")

    def checked(self, check: Callable[[Any], Any], value: Any) -> Any:
        """What a check makes of a message; one that it refuses ends the tests."""
        try:
            return check(value)
        except MemoryError:
            raise
        except Exception as error:
            self._break(in_words(error))

    def _decoded(self, data: Any) -> Any:
        return self.checked(self._codec.decode, data)

    def _break(self, reason: str) -> NoReturn:
        self.broken = self.broken or f"the program breaks the protocol: {reason}"
        raise _Gone

    def _exchange(self, message: list[Any]) -> Any:
        if self.is_gone or self.broken:
            raise _Gone
        self._messages += 1
        if self._messages > _MOST_MESSAGES:
            self._break(f"more than {_MOST_MESSAGES} messages")
        try:
            self._link.send(message)
            return self._link.receive()
        except (OSError, EOFError):
            self.is_gone = True
            raise _Gone from None
        except (ValueError, RecursionError) as error:
            self._break(in_words(error))

    def _print(self, text: str, captured: bool) -> None:
        if captured:
            sys.stdout.write(text)

    def _called(self, number: int, args: list[Any], named: Any) -> list[Any]:
        """What one of the tests' functions says to the program."""
        if not 0 <= number < len(self._functions):
            self._break(f"a function {number} that nobody gave it")
        values, keywords = self._decoded(args), self.checked(_keywords, self._decoded(named))
        try:
            result = self._functions[number](*values, **keywords)
            return ["answer", self._codec.encode(result)]
        except Exception as error:
            if isinstance(error, AssertionError):
                self.failures.append(error)
            return ["raise", type(error).__name__, str(error)]

    def _raise(self, operation: str, info: tuple[int | None, str, str], args: list[Any]) -> NoReturn:
        values = self._decoded(args)
        kind = self._exception(*info)
        if issubclass(kind, _NOT_RAISED) and operation != "next":
            raise RuntimeError(f"the program raised {kind.__name__}")
        try:
            error = kind(*values)
        except Exception:  # a built-in one that does not take them
            error = RuntimeError(f"{kind.__name__}: {values}")
        raise error

    def _exception(self, number: int | None, name: str, base: str) -> type[Exception]:
        """A class of ours for one of the program; never AssertionError by another name."""
        known = self._codec.classes.get(name)
        if number is not None and known is not None and issubclass(known, Exception):
            return known
        built_in = getattr(builtins, base, None)
        if not (isinstance(built_in, type) and issubclass(built_in, Exception)):
            return RuntimeError
        if number is None:
            return built_in
        if number not in self._exceptions:
            parent = Exception if issubclass(built_in, (AssertionError, *_NOT_RAISED)) else built_in
            self._exceptions[number] = type(name if name.isidentifier() else "Exception", (parent,), {})
        return self._exceptions[number]

    def _export(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"t": "object", "v": value._remote_number}
        name = getattr(value, "__name__", "")
        if name and getattr(builtins, name, None) is value:
            return {"t": "builtin", "v": name}
        if isinstance(value, Iterator):
            items = [item for item, _ in zip(value, range(_MOST_ITEMS), strict=False)]
            return {"t": "iterator", "v": self._codec.encode(items)}
        if callable(value):
            self._functions.append(value)
            return {"t": "function", "v": len(self._functions) - 1}
        raise Refused(f"{type(value).__name__} cannot be given to the program: data and functions can")

    def _meet(self, tag: str, content: Any) -> Any:
        match tag, content:
            case "exception", [int() | None as number, str(name), str(base)]:
                # another name for a built-in one catches nothing of the tests
                return self._exception(-1 - len(self._exceptions) if number is None else number, name, base)
            case "object", int() if type(content) is int and 0 <= content < _MOST_ITEMS:
                if content not in self._objects:
                    self._objects[content] = Remote(self, content)
                return self._objects[content]
        raise Malformed(f"a value of kind {tag}")


def _ended(reply: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """How the code ended, and encoded values by name."""
    ended, values = exact(reply, list)
    return {name: exact(ended[name], str) for name in ("status", "error")}, exact(values, dict)


def _keywords(named: Any) -> dict[str, Any]:
    return {exact(name, str): value for name, value in exact(named, dict).items()}


def main() -> None:
    """Read the tests, write the verdict."""
    found = verdict(Channel(ANSWERS, ASKED), **Channel(TESTS, -1).receive())
    sys.stdout.flush()
    os.write(VERDICT, json.dumps(found).encode())


def verdict(link: MessageLink, tests: str, prefix: str, entry_point: str) -> dict[str, str]:
    """Status and error of a program: `passed` where all statements of the tests ran to their end."""
    try:
        return judged(PipedProgram(link), problem(tests, prefix, entry_point))
    except MemoryError:
        return {"status": "memory", "error": "MemoryError"}
    except BaseException as error:
        return {"status": "failed", "error": in_words(error)}


def judged(program: PipedProgram, problem: ProblemTests) -> dict[str, str]:
    """Run the tests on what the program answers."""
    try:
        failure = _failure(program, problem)
    except _Gone:
        failure = {"status": "gone", "error": ""}
    except MemoryError:
        failure = {"status": "memory", "error": "MemoryError"}
    except BaseException as error:
        failure = {"status": "failed", "error": in_words(error)}
    if program.broken:
        return {"status": "failed", "error": program.broken}
    return {"status": "gone", "error": ""} if program.is_gone else failure


def _failure(program: PipedProgram, problem: ProblemTests) -> dict[str, str]:
    ended, values = program.names(problem)
    if ended["status"] != "passed":
        return ended if ended["status"] in _ENDED else ended | {"status": "error"}
    if not values:
        return {"status": "failed", "error": "the program defines nothing that the tests use"}
    space: dict[str, Any] = values | dict(problem.given) | {"__name__": "tests"}
    with counted(space) if problem.has_cases else contextlib.nullcontext():
        exec(problem.code, space)
    if program.failures:
        raise program.failures[0]
    return {"status": "passed", "error": ""}
