"""The verdict: a problem's tests, run in a process that the program cannot touch.

The program lives in another process (program.py); here its functions are `Remote` objects, which send their
arguments and get plain data back, compared by our own types. So a patched built-in, a class that equals
everything, a trace function or a look into frames changes nothing: to pass, the program must answer rightly.

Of the program come only those names that the tests need and nobody else defines: not built-ins, not modules,
not what the problem's `prefix` defines in full. Rules that keep an object of the program from judging itself:
it equals no data; arithmetic and order with data are refused; `in` looks at what it yields; no exception is
swallowed by its `__exit__`; an assertion that fails in a function of the tests counts, whoever called it.
What the tests compare only with other words of the program is the program's word, as in any judge.
Standard library only.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import re
import symtable
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from executor.rewards.program import PAIRS, in_words
from executor.rewards.values import Channel, Codec, Refused, renew

ANSWERS, ASKED = 3, 4
"""File descriptors: results come in, calls go out."""
VERDICT, TESTS = 5, 6
_MODULE_NAMES = {"np": "numpy", "pd": "pandas"}
_ATTRIBUTES = {"__name__", "__qualname__", "__doc__", "__dict__", "__annotations__", "__module__"}
"""Special attributes that the program may answer; others make libraries trust it (`__array_interface__`)."""
_NOT_RAISED = (StopIteration, StopAsyncIteration)
"""They would end a loop of the tests."""
_MOST_ITEMS = 1_000_000


class _Gone(BaseException):
    """The program has ended; not an Exception: tests must not catch it."""


class Remote:
    """An object of the program."""

    __slots__ = ("_remote_number", "_remote_program")

    def __init__(self, program: Program, number: int) -> None:
        object.__setattr__(self, "_remote_program", program)
        object.__setattr__(self, "_remote_number", number)

    def _remote_do(self, operation: str, *args: Any, **named: Any) -> Any:
        return self._remote_program.ask(operation, (self, *args), named)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Its result."""
        return self._remote_do("call", *args, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _ATTRIBUTES:
            raise AttributeError(name)
        return self._remote_do("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote_do("set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._remote_do("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._remote_do("setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        self._remote_do("delitem", key)

    def __iter__(self) -> Iterator[Any]:
        found = self._remote_do("iter")
        return found if isinstance(found, Remote) else iter(found)

    def __next__(self) -> Any:
        return self._remote_do("next")

    def __len__(self) -> int:
        return int(self._remote_do("len"))

    def __bool__(self) -> bool:
        return bool(self._remote_do("bool"))

    def __repr__(self) -> str:
        return str(self._remote_do("repr"))

    def __str__(self) -> str:
        return str(self._remote_do("str"))

    def __neg__(self) -> Any:
        return self._remote_do("neg")

    def __contains__(self, value: Any) -> bool:
        return any(item is value or item == value for item in self)

    def __hash__(self) -> int:
        return int(self._remote_number)

    def __eq__(self, other: object) -> bool:
        return bool(self._remote_do("eq", other)) if isinstance(other, Remote) else False

    def __ne__(self, other: object) -> bool:
        return bool(self._remote_do("ne", other)) if isinstance(other, Remote) else True

    def __instancecheck__(self, other: object) -> bool:
        return isinstance(other, Remote) and bool(self._remote_program.ask("isinstance", (other, self), {}))

    def __enter__(self) -> Any:
        return self._remote_do("enter")

    def __exit__(self, *error: object) -> None:
        self._remote_do("exit")


def _between(operation: str) -> Any:
    """A method for two objects of the program; with data it is refused."""

    def method(self: Remote, other: object) -> Any:
        if not isinstance(other, Remote):
            raise Refused(
                f"{operation} of an object of the program and {type(other).__name__}: the program would "
                f"decide; test its attributes or its text"
            )
        return self._remote_do(operation, other)

    return method


for _name in PAIRS[2:]:
    setattr(Remote, f"__{_name.rstrip('_')}__", _between(_name))


class Program:
    """The program, by its pipes."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._codec = Codec(self._export, self._meet)
        self._objects: dict[int, Remote] = {}
        self._exceptions: dict[int, type[Exception]] = {}
        self._functions: list[Any] = []
        self.failures: list[BaseException] = []
        """Of functions of the tests that the program called."""
        self._ended = False

    def names(
        self, names: Iterable[str], classes: Mapping[str, type]
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """How the program's code ended, and the values of names that it defines."""
        self._codec.classes = classes
        ended, values = self._exchange(["names", [sorted(names), list(classes)], {}, False])
        return ended, {str(name): self._codec.decode(value) for name, value in values.items()}

    def ask(self, operation: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """One operation on its objects."""
        captured = sys.stdout is not sys.__stdout__
        encoded = [self._codec.encode(value) for value in args]
        named = {name: self._codec.encode(value) for name, value in named.items()}
        keywords = {"t": "dict", "v": [list(pair) for pair in named.items()]}
        reply = self._exchange([operation, encoded, keywords, captured])
        while reply[0] == "ask":
            reply = self._exchange(self._called(*reply[1:]))
        if captured:
            sys.stdout.write(str(reply[-1]))
        if reply[0] == "error":
            self._raise(operation, reply[1], reply[2])
        for before, after in zip(args, reply[2] or (), strict=False):
            renew(before, self._codec.decode(after))
        return self._codec.decode(reply[1])

    def _exchange(self, message: list[Any]) -> Any:
        if self._ended:
            raise _Gone
        try:
            self._channel.send(message)
            return self._channel.receive()
        except (OSError, EOFError):
            self._ended = True
            raise _Gone from None

    def _called(self, number: int, args: Any, named: Any) -> list[Any]:
        """What one of the tests' functions says to the program."""
        try:
            result = self._functions[number](*self._codec.decode(args), **self._codec.decode(named))
            return ["answer", self._codec.encode(result)]
        except Exception as error:
            if isinstance(error, AssertionError):
                self.failures.append(error)
            return ["raise", type(error).__name__, str(error)]

    def _raise(self, operation: str, info: list[Any], args: Any) -> NoReturn:
        values = self._codec.decode(args)
        kind = self._exception(*info)
        if issubclass(kind, _NOT_RAISED) and operation != "next":
            raise RuntimeError(f"the program raised {kind.__name__}")
        try:
            error = kind(*values)
        except TypeError:  # UnicodeDecodeError wants five arguments
            error = RuntimeError(f"{kind.__name__}: {values}")
        raise error

    def _exception(self, number: int | None, name: str, base: str) -> type[Exception]:
        """A class of ours for one of the program; never AssertionError by another name."""
        built_in = getattr(builtins, base, None)
        if not (isinstance(built_in, type) and issubclass(built_in, Exception)):
            return RuntimeError
        if number is None:
            return built_in
        if number not in self._exceptions:
            parent = Exception if issubclass(built_in, (AssertionError, *_NOT_RAISED)) else built_in
            self._exceptions[number] = type(str(name), (parent,), {})
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
        if tag == "exception":
            number, name, base = content  # another name for a built-in one catches nothing of the tests
            return self._exception(-1 - len(self._exceptions) if number is None else number, name, base)
        if tag != "object":
            raise Refused(f"a value of kind {tag}")
        return self._objects.setdefault(content, Remote(self, int(content)))


def main() -> None:
    """Read the tests, write the verdict."""
    found = verdict(**Channel(TESTS, -1).receive())
    sys.stdout.flush()
    os.write(VERDICT, json.dumps(found).encode())


def verdict(tests: str, prefix: str, entry_point: str) -> dict[str, str]:
    """Status and error of a program: `passed` where all statements of the tests ran to their end."""
    program = Program(Channel(ANSWERS, ASKED))
    space: dict[str, Any] = {"__name__": "tests"}
    try:
        code = compile(_with_check(tests, entry_point), "<tests>", "exec", dont_inherit=True)
        given = _given(prefix, entry_point)
        wanted = _wanted(tests, entry_point) - given.keys()
        classes = {name: value for name, value in given.items() if isinstance(value, type)}
        ended, values = program.names(wanted, classes)
        if ended.get("status") != "passed":
            return {name: str(ended.get(name, "")) for name in ("status", "error")}
        space |= given | values | _modules(wanted, tests)
        exec(code, space)
        if program.failures:
            raise program.failures[0]
    except _Gone:
        return {"status": "gone", "error": ""}
    except MemoryError:
        return {"status": "memory", "error": "MemoryError"}
    except BaseException as error:
        return {"status": "failed", "error": in_words(error)}
    return {"status": "passed", "error": ""}


def _with_check(tests: str, entry_point: str) -> str:
    """The tests, with a call of their `check` where an entry point says of what and nobody calls it."""
    calls = re.search(r"^check\(", tests, re.MULTILINE)
    defines = re.search(r"^def check\(", tests, re.MULTILINE)
    return f"{tests}\ncheck({entry_point})\n" if entry_point and defines and not calls else tests


def _wanted(tests: str, entry_point: str) -> set[str]:
    """Names that the tests use and do not define, built-ins apart unless the entry point is one."""
    free, built_in = set[str](), set[str]()
    for name in _free(symtable.symtable(f"{tests}\n{entry_point}\n", "<tests>", "exec")):
        (built_in if hasattr(builtins, name) else free).add(name)
    entry = set(re.findall(r"\w+", entry_point)) & built_in
    # a problem may ask for a function `sum`: nothing else can be meant where the tests use one name only
    return free | entry or (built_in if len(built_in) == 1 else set())


def _free(table: symtable.SymbolTable) -> set[str]:
    """Names read in a scope or in those within it, that no scope around assigns."""
    own, names = set[str](), set[str]()
    for symbol in table.get_symbols():
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_parameter() or symbol.is_namespace():
            own.add(symbol.get_name())
        elif symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
            names.add(symbol.get_name())
    for child in table.get_children():
        inner = _free(child)
        names |= inner - own if table.get_type() == "module" else inner
    return names


def _modules(wanted: Iterable[str], tests: str) -> dict[str, types.ModuleType]:
    """Modules that the tests use without importing them: ours, whatever the program calls by their name."""
    found = {}
    for name in wanted:
        module = _MODULE_NAMES.get(name, name)
        there = module in sys.stdlib_module_names or module in sys.modules
        if there and re.search(rf"\b{name}\.", tests):
            found[name] = importlib.import_module(module)
    return found


def _given(prefix: str, entry_point: str) -> dict[str, Any]:
    """What the problem's own text defines in full; nothing where it is no whole program."""
    try:
        tree = ast.parse(prefix)
    except SyntaxError:
        return {}
    asked = set(re.findall(r"\w+", entry_point))
    stubs = asked | {node.name for node in tree.body if isinstance(node, _DEFINITIONS) and _is_stub(node)}
    tree.body = [node for node in tree.body if getattr(node, "name", None) not in stubs]
    space: dict[str, Any] = {"__name__": "prefix"}
    exec(compile(tree, "<prefix>", "exec", dont_inherit=True), space)
    return {name: value for name, value in space.items() if not name.startswith("__")}


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _is_stub(node: ast.AST) -> bool:
    """Whether a function, or one of a class, still waits for its body."""
    if isinstance(node, ast.ClassDef):
        return any(_is_stub(part) for part in node.body if isinstance(part, _DEFINITIONS))
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    return all(
        isinstance(part, ast.Pass) or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
        for part in node.body
    )
