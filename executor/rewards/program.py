"""The program's side: run untrusted code, then answer calls of its functions, confined.

Nothing here is trusted: the code shares this interpreter and may answer what it likes, which is no more than
its functions could return. The verdict is made by another process (verifier.py) that gets plain data only.
Standard library only.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.abc
import io
import json
import operator
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from executor.rewards.values import Channel, ValueCodec

REPORT = 3
"""File descriptor on which a program without tests says how it ended: its own word, about itself."""
ASKED, ANSWERS = 3, 4
"""File descriptors of a program with tests: calls come in, results go out."""
_MAX_ERROR = 2000  # characters
PAIRS = tuple(
    "eq ne lt le gt ge add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split()  # noqa: SIM905 - names of operator
)
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in PAIRS},
    "call": lambda function, *args, **named: function(*args, **named),
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "repr": repr,
    "str": str,
    "neg": operator.neg,
    "isinstance": isinstance,
    "enter": lambda thing: type(thing).__enter__(thing),
    "exit": lambda thing: type(thing).__exit__(thing, None, None, None),
}


class Allowed(importlib.abc.MetaPathFinder):
    """Imports of the standard library and of the modules that the user's settings allow."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Refuse a module of others by a word; None: whoever comes next may find it."""
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top in self._modules or top in sys.modules:
            return
        also = f" and {', '.join(self._modules)}" if self._modules else ""
        raise ModuleNotFoundError(
            f"No module named {name!r}: generated code may import the standard library{also}; "
            f"the setting rewards[].modules allows others",
            name=name,
        )


def run_alone(code: str) -> None:
    """A program whose output is judged outside."""
    report = json.dumps(_executed(code, {"__name__": "__main__"}, exits=True))
    sys.stdout.flush()
    os.write(REPORT, report.encode())


def answer_calls(code: str) -> None:
    """Run the code, then do what the verifier asks until it ends."""
    space: dict[str, Any] = {"__name__": "solution"}
    ended = _executed(code, space, exits=False)
    sys.stdout.flush()
    _Program(space, ended).serve()


def _executed(code: str, space: dict[str, Any], *, exits: bool) -> dict[str, str]:
    """How the code ended; `exits`: it may do so by exit(0)."""
    try:
        exec(compile(code, "<code>", "exec", dont_inherit=True), space)
    except MemoryError:
        return {"status": "memory", "error": "MemoryError"}
    except SystemExit as error:
        if not exits:
            return {"status": "exited", "error": f"exit with {error.code!r}"}
        if error.code not in (None, 0):
            return {"status": "error", "error": f"exit with {error.code!r}"}
    except BaseException as error:
        return {"status": "error", "error": in_words(error)}
    return {"status": "passed", "error": ""}


def in_words(error: BaseException) -> str:
    """An exception as its last line."""
    return "".join(traceback.format_exception_only(error)).strip()[-_MAX_ERROR:]


class _Program:
    """The code's objects, under numbers."""

    def __init__(self, space: dict[str, Any], ended: dict[str, str]) -> None:
        self._space, self._ended = space, ended
        self._channel = Channel(ASKED, ANSWERS)
        self._codec = ValueCodec(self._export, self._meet)
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def serve(self) -> None:
        """Answer until the verifier has ended."""
        with contextlib.suppress(EOFError):
            while True:
                self._channel.send(self._answer(self._channel.receive()))
                sys.stdout.flush()

    def _answer(self, request: list[Any]) -> list[Any]:
        operation, args, named, captured = request
        if operation == "names":
            return self._names(*args)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed) if captured else contextlib.nullcontext():
            try:
                values = self._codec.decode(args)
                result = OPERATIONS[operation](*values, **self._codec.decode(named))
                encoded = self._codec.encode(result)
                after = None
                if operation == "call" and result is None:
                    after = [self._codec.encode(value) for value in values]
                reply = ["value", encoded, None if after == args else after]
            except BaseException as error:
                reply = ["error", self._class(type(error)), self._args(error)]
        return [*reply, printed.getvalue()]

    def _names(self, names: list[str], classes: list[str]) -> list[Any]:
        """How the code ended, and what it defines of `names`; `classes` are known to the verifier too."""
        here = {name: self._space.get(name) for name in classes}
        self._codec.classes = {name: kind for name, kind in here.items() if isinstance(kind, type)}
        try:
            values = {name: self._codec.encode(self._space[name]) for name in names if name in self._space}
        except BaseException as error:
            return [{"status": "error", "error": in_words(error)}, {}]
        return [self._ended, values]

    def _export(self, value: Any) -> Any:
        """A number in place of the object."""
        if isinstance(value, type) and issubclass(value, Exception):
            return {"t": "exception", "v": self._class(value)}
        return {"t": "object", "v": self._number(value)}

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)  # alive, so that its id stays its own
        return self._numbers[id(value)]

    def _meet(self, tag: str, content: Any) -> Any:
        if tag == "object":
            return self._objects[content]
        if tag == "iterator":
            return iter(self._codec.decode(content))
        if tag == "builtin":
            return getattr(builtins, content)
        return lambda *args, **named: self._ask(content, args, named)

    def _ask(self, number: int, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a function of the tests, given as an argument; calls of ours may come in between."""
        self._channel.send(["ask", number, self._codec.encode(list(args)), self._codec.encode(named)])
        while True:
            operation, *reply = self._channel.receive()
            if operation == "answer":
                return self._codec.decode(reply[0])
            if operation == "raise":
                raise getattr(builtins, reply[0], RuntimeError)(reply[1])
            self._channel.send(self._answer([operation, *reply]))

    def _class(self, kind: type[BaseException]) -> list[Any]:
        """[number (None: built in), name, nearest built-in name] of a class of exceptions."""
        base = next(c for c in kind.__mro__ if c.__module__ == "builtins")
        return [None if base is kind else self._number(kind), kind.__name__, base.__name__]

    def _args(self, error: BaseException) -> Any:
        try:
            return self._codec.encode(list(error.args))
        except BaseException:
            return []
