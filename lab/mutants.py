"""Whether the tests of a folder notice a broken formula: changes the code of one folder, one node at a time.

    python -m lab.mutants                          # every folder of physics, 60 CPU seconds each
    python -m lab.mutants kernels --cpu 600        # one folder, every mutant that the time allows
    python -m lab.mutants --sample 12 --cpu 30     # what CI runs

A mutant changes a number, a sign, an operator, max or min, or takes one side of a branch always. It is made in
memory, in a fork of a process that has the tests collected: the code object of the function (or the value of
the constant) is replaced, and of the folder's own tests those run that reach the line, the fastest first,
until one fails. Mutants are drawn by a hash of what they change, so a sample stays the same while other code
changes. A survivor is either a missing test or listed with a reason in `lab/equivalent_mutants.yaml`.

Not noticed here: defaults of fields and of arguments, comparison by `<` instead of `<=`, `and` instead of `or`.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import copy
import functools
import gc
import importlib
import os
import resource
import sys
import time
import types
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from _pytest.runner import runtestprotocol

from rlhfsim.kernels.curves import KernelCurves

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "memory", "training", "rollout", "weight_sync", "step")
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.yaml")
LEFT_OUT = "tests/memory/test_oracle.py"
"""Fake tensors of whole models, two seconds a test: too slow for every mutant."""
MUTANT_CPU_S = 10
OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], str]] = {
    ast.Add: (ast.Sub, "+ to -"),
    ast.Sub: (ast.Add, "- to +"),
    ast.Mult: (ast.Div, "* to /"),
    ast.Div: (ast.Mult, "/ to *"),
    ast.FloorDiv: (ast.Mult, "// to *"),
    ast.Mod: (ast.Mult, "% to *"),
    ast.Pow: (ast.Mult, "** to *"),
}
EXTREMES = {"max": "min", "min": "max", "maximum": "minimum", "minimum": "maximum"}
Way = tuple[tuple[str, int | None], ...]
UNTESTED = (ast.Raise, ast.Assert, ast.JoinedStr)
"""Nodes whose numbers are words for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one node."""

    folder: str
    path: str
    """From the root of the repository."""
    line: int
    scope: str
    """Qualified name of the outermost function, or the name of a constant of the module."""
    text: str
    """The source of the node."""
    change: str
    number: int
    """Position among mutants of its scope with the same text and change."""
    statement: ast.stmt = field(repr=False)
    """The statement of the module that holds the node."""
    way: Way = field(repr=False)
    """From the statement down to the node."""
    other: ast.AST = field(repr=False)
    """What takes the node's place."""

    @property
    def name(self) -> str:
        """What stays the same while lines above it move."""
        place = f"{self.path}:{self.scope}: `{self.text}` {self.change}"
        return place if self.number == 0 else f"{place} ({self.number})"

    @property
    def mutated(self) -> ast.stmt:
        """A copy of the statement with the change."""
        copied = copy.deepcopy(self.statement)
        holder: Any = copied
        for name, index in self.way[:-1]:
            holder = getattr(holder, name) if index is None else getattr(holder, name)[index]
        name, index = self.way[-1]
        old = getattr(holder, name) if index is None else getattr(holder, name)[index]
        other = ast.copy_location(self.other, old)
        if index is None:
            setattr(holder, name, other)
        else:
            getattr(holder, name)[index] = other
        return ast.fix_missing_locations(copied)

    @property
    def order(self) -> int:
        """A draw that depends on the change alone."""
        return zlib.crc32(self.name.encode())


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Each change of one node: its words and the node that takes its place."""
    match node:
        case ast.Constant(value=bool() | str() | bytes() | None):
            return
        case ast.Constant(value=int() | float() as value):
            other = value + 1 if isinstance(value, int) else value * 1.5 or 1.0
            yield f"to {other:g}", ast.Constant(other)
        case ast.BinOp(op=operator) if type(operator) in OPERATORS:
            other_operator, words = OPERATORS[type(operator)]
            yield words, ast.BinOp(node.left, other_operator(), node.right)
        case ast.AugAssign(op=operator) if type(operator) in OPERATORS:
            other_operator, words = OPERATORS[type(operator)]
            yield words, ast.AugAssign(node.target, other_operator(), node.value)
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "without its sign", operand
        case ast.Call(func=ast.Name(id=name), args=args) if name in EXTREMES:
            yield f"to {EXTREMES[name]}", ast.Call(ast.Name(EXTREMES[name], ast.Load()), args, node.keywords)
        case ast.Call(func=ast.Attribute(attr=name, value=module)) if name in EXTREMES:
            function = ast.Attribute(module, EXTREMES[name], ast.Load())
            yield f"to {EXTREMES[name]}", ast.Call(function, node.args, node.keywords)
        case ast.If() | ast.IfExp():
            for taken in (True, False):
                mutated = copy.copy(node)
                mutated.test = ast.Constant(taken)
                yield f"always {taken}", mutated


def _nodes(node: ast.AST, path: Way = ()) -> Iterator[tuple[Way, ast.AST]]:
    """Nodes that are priced, with the way down to each: no annotations, decorators, defaults or messages."""
    if isinstance(node, UNTESTED):
        return
    yield path, node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        if isinstance(value, ast.AST):
            yield from _nodes(value, (*path, (name, None)))
        elif isinstance(value, list):
            for index, child in enumerate(value):
                if isinstance(child, ast.AST):
                    yield from _nodes(child, (*path, (name, index)))


def _scopes(tree: ast.Module) -> Iterator[tuple[str, ast.stmt, Way, ast.AST]]:
    """Functions, methods and constants: name, the module's statement, the way down to it, its node."""
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            yield statement.name, statement, (), statement
        elif isinstance(statement, ast.ClassDef):
            for index, member in enumerate(statement.body):
                if isinstance(member, ast.FunctionDef):
                    yield f"{statement.name}.{member.name}", statement, (("body", index),), member
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            if isinstance(target, ast.Name) and not target.id.startswith("__"):
                yield target.id, statement, (), statement


def mutants(folder: str) -> list[Mutant]:
    """Every mutant of the folder, in the order in which they are drawn."""
    drawn = []
    for file in sorted((ROOT / "rlhfsim" / folder).rglob("*.py")):
        path = str(file.relative_to(ROOT))
        for scope, statement, way, root in _scopes(ast.parse(file.read_text())):
            seen: dict[tuple[str, str], int] = defaultdict(int)
            for inner, node in _nodes(root):
                for change, other in changes(node):
                    text = ast.unparse(node.test if isinstance(node, ast.If | ast.IfExp) else node)
                    number = seen[text, change]
                    seen[text, change] += 1
                    line = getattr(node, "lineno", statement.lineno)
                    drawn.append(
                        Mutant(
                            folder=folder,
                            path=path,
                            line=line,
                            scope=scope,
                            text=text,
                            change=change,
                            number=number,
                            statement=statement,
                            way=(*way, *inner),
                            other=other,
                        )
                    )
    return sorted(drawn, key=lambda mutant: mutant.order)


def _function(module: types.ModuleType, scope: str) -> types.FunctionType:
    """The plain function under its decorators."""
    owner: Any = module
    for name in scope.split("."):
        owner = owner.__dict__[name]
    while not isinstance(owner, types.FunctionType) or hasattr(owner, "__wrapped__"):
        if isinstance(owner, property):
            owner = owner.fget
        elif isinstance(owner, functools.cached_property):
            owner = owner.func
        else:
            owner = owner.__wrapped__
    return owner


def _code(code: types.CodeType, scope: str) -> types.CodeType:
    """The code object of `scope` inside compiled `code`."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_qualname == scope:
                return constant
            if scope.startswith(f"{constant.co_qualname}."):
                return _code(constant, scope)
    raise LookupError(scope)


def apply(mutant: Mutant) -> None:
    """Replaces the function's code, or the constant wherever it was imported, and forgets cached prices."""
    module = importlib.import_module(mutant.path.removesuffix(".py").replace("/", "."))
    flags = __future__.annotations.compiler_flag
    code = compile(ast.Module([mutant.mutated], []), mutant.path, "exec", flags=flags, dont_inherit=True)
    if isinstance(mutant.statement, ast.FunctionDef | ast.ClassDef):
        _function(module, mutant.scope).__code__ = _code(code, mutant.scope)
    else:
        old, namespace = getattr(module, mutant.scope), dict(vars(module))
        exec(code, namespace)
        for other in [m for name, m in sys.modules.items() if name.startswith(("rlhfsim", "tests"))]:
            if vars(other).get(mutant.scope) is old:
                setattr(other, mutant.scope, namespace[mutant.scope])


def forget() -> None:
    """Empties the caches of prices, not those of profiles and models."""
    gc.unfreeze()  # what was frozen after the tests were collected is no longer listed
    for cached in gc.get_objects():
        if isinstance(cached, KernelCurves):
            cached._known.clear()
        if isinstance(cached, functools._lru_cache_wrapper):
            module = cached.__module__
            if module.startswith("rlhfsim.") and not module.startswith("rlhfsim.specs."):
                cached.cache_clear()


class Runner:
    """A pytest plugin that runs the tests once with their lines, and then on each mutant."""

    def __init__(self, folders: list[str], sample: int | None, cpu_s: float) -> None:
        self.folders, self.sample, self.cpu_s = folders, sample, cpu_s
        self.drawn: dict[str, list[Mutant]] = {}
        self.lines: dict[tuple[str, int], set[int]] = defaultdict(set)
        """Line of a drawn mutant, or next to one -> tests that reach it."""
        self._codes: dict[int, tuple[types.CodeType, bool]] = {}
        """Identity of code -> the code, and whether a drawn mutant stands on one of its lines."""
        self._wanted: set[tuple[str, int]] = set()
        self.seconds: dict[int, float] = {}
        self.failed: list[str] = []
        self.verdicts: dict[str, list[tuple[Mutant, bool]]] = {}
        self.total: dict[str, int] = {}
        self.spent: dict[str, float] = {}

    def pytest_configure(self, config: pytest.Config) -> None:
        """A failure is not described: that takes longer than the test."""
        config.option.tbstyle = "native"

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In place of pytest's own loop."""
        items, known = session.items, tuple(equivalent())
        for folder in self.folders:
            drawn = [mutant for mutant in mutants(folder) if not mutant.name.startswith(known)]
            self.total[folder], self.drawn[folder] = len(drawn), drawn[: self.sample]
            self._wanted |= {(mutant.path, mutant.line) for mutant in self.drawn[folder]}
        for index, item in enumerate(items):
            self._observe(index, item, items[index + 1] if index + 1 < len(items) else None)
        forget()
        gc.collect()
        gc.freeze()
        for folder in self.folders:
            start, self.verdicts[folder] = cpu_seconds(), []
            for mutant in self.drawn[folder]:
                if cpu_seconds() - start > self.cpu_s:
                    break
                self.verdicts[folder].append((mutant, self._dies(mutant, items)))
            self.spent[folder] = cpu_seconds() - start
        return True

    def _observe(self, index: int, item: pytest.Item, following: pytest.Item | None) -> None:
        lines = self.lines

        def each(frame: types.FrameType, event: str, _: object) -> Any:
            lines[_short(frame.f_code), frame.f_lineno].add(index)
            return each

        def watch(frame: types.FrameType, event: str, _: object) -> Any:
            code = frame.f_code
            known = self._codes.get(id(code))
            if known is None:
                known = self._codes[id(code)] = (code, self._is_wanted(code))
            return each(frame, event, None) if known[1] else None

        start = time.process_time()
        sys.settrace(watch)
        try:
            reports = runtestprotocol(item, log=False, nextitem=following)
        finally:
            sys.settrace(None)
        self.seconds[index] = time.process_time() - start
        self.failed += [item.nodeid for report in reports if report.failed]

    def _is_wanted(self, code: types.CodeType) -> bool:
        return any((_short(code), line) in self._wanted for *_, line in code.co_lines() if line is not None)

    def _dies(self, mutant: Mutant, items: list[pytest.Item]) -> bool:
        chosen = self._reaching(mutant, items)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (MUTANT_CPU_S, MUTANT_CPU_S))
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(1, 2)
                apply(mutant)
                code = int(any(_fails(items[index]) for index in chosen))
            finally:
                os._exit(code)
        return os.waitpid(child, 0)[1] != 0

    def _reaching(self, mutant: Mutant, items: list[pytest.Item]) -> list[int]:
        """Tests that reach the line of a function, or any line of the folder for a constant; fastest first."""
        if isinstance(mutant.statement, ast.FunctionDef | ast.ClassDef):
            tests = self.lines[mutant.path, mutant.line]
        else:
            tests = set(self.seconds)
        own = str(ROOT / "tests" / mutant.folder) + os.sep
        inside = [index for index in tests if str(items[index].path).startswith(own)]
        return sorted(inside, key=lambda index: self.seconds[index])


def _short(code: types.CodeType) -> str:
    """Path of the file of code, from the repository."""
    return code.co_filename.removeprefix(f"{ROOT}{os.sep}")


def _fails(item: pytest.Item) -> bool:
    return any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def cpu_seconds() -> float:
    """CPU seconds of this process and of the forks that it waited for."""
    own, forks = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + forks.ru_utime + forks.ru_stime


def equivalent() -> dict[str, str]:
    """Mutants that no test can notice: the beginning of their names -> reason."""
    return yaml.safe_load(EQUIVALENT.read_text()) or {} if EQUIVALENT.is_file() else {}


def run(folders: list[str], *, sample: int | None, cpu_s: float) -> Runner:
    """The verdicts on the mutants of `folders`; `sample` and `cpu_s` hold for each folder."""
    runner = Runner(folders, sample, cpu_s)
    tests = [str(ROOT / "tests" / folder) for folder in folders]
    options = [
        "-o",
        "addopts=--import-mode=importlib -p no:dash",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:timeout",
    ]
    options += ["--assert=plain", "-p", "no:terminal", "-m", "not slow", f"--ignore={ROOT / LEFT_OUT}"]
    pytest.main([*tests, *options], plugins=[runner])
    return runner


def main() -> int:
    """Prints the share that died and every survivor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folders", nargs="*", default=list(FOLDERS))
    parser.add_argument(
        "--sample", type=int, help="mutants of each folder; all that the time allows without it"
    )
    parser.add_argument("--cpu", type=float, default=60.0, help="CPU seconds of each folder")
    asked = parser.parse_args()
    runner = run(asked.folders, sample=asked.sample, cpu_s=asked.cpu)
    if runner.failed:
        print("tests that fail without a mutant:", *runner.failed, sep="\n  ")
        return 1
    for verdicts in runner.verdicts.values():
        for mutant, _ in sorted((v for v in verdicts if not v[1]), key=lambda v: (v[0].path, v[0].line)):
            print(f"{mutant.path}:{mutant.line}: {mutant.scope}: `{mutant.text}` {mutant.change}")
    for folder, verdicts in runner.verdicts.items():
        died = sum(dead for _, dead in verdicts)
        share = died / max(1, len(verdicts))
        print(
            f"{folder}: {died} of {len(verdicts)} died ({share:.0%}), {runner.total[folder]} mutants in all, "
            f"{runner.spent[folder]:.0f} CPU s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
