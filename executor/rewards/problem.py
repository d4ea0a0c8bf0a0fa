"""A problem's own texts, read before the program says anything: what the tests ask of the program.

A name of the tests comes from the first that has it: the tests, the problem's `prefix` where it defines it in
full, libraries that the tests forgot to import, built-ins; what is left is asked of the program. A name with
two underscores at both ends never is. Standard library only.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import symtable
import sys
from collections.abc import Mapping
from types import CodeType
from typing import Any

from rlhfsim.frozen import frozen

CANDIDATE = "_candidate"
"""Name of the program's function where it is called as a built-in is, which the tests keep."""
_MODULE_NAMES = {"np": "numpy", "pd": "pandas", "sp": "scipy", "plt": "matplotlib.pyplot"}
_LIBRARIES = {*_MODULE_NAMES, *_MODULE_NAMES.values(), "sklearn", "sympy", "torch"}
_USUAL = {
    "isclose": "math",
    "allclose": "numpy",
    "assert_allclose": "numpy.testing",
    "Counter": "collections",
    "OrderedDict": "collections",
    "defaultdict": "collections",
    "deque": "collections",
    "Decimal": "decimal",
    "Fraction": "fractions",
}
"""Names that compare or hold results: ours where the tests ask for something else of the program too."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@frozen
class ProblemTests:
    """The tests of one problem, ready to run."""

    code: CodeType
    given: Mapping[str, Any]
    """Names that the tests get from the problem's prefix and from libraries."""
    wanted: Mapping[str, str]
    """Names that the tests ask of the program, and the name that each has in its code."""
    classes: Mapping[str, type]
    """Classes that the prefix defines: their objects go by value."""
    has_cases: bool
    """Whether the tests are, or hold, cases of unittest."""


def problem(tests: str, prefix: str, entry_point: str) -> ProblemTests:
    """Read the texts.

    Raises:
        SyntaxError: the tests are no Python.
    """
    code = compile(_with_check(tests, entry_point), "<tests>", "exec", dont_inherit=True)
    given = _given(prefix, entry_point)
    wanted = {name for name in _wanted(tests, entry_point) if name not in given and not _is_special(name)}
    libraries = _libraries(wanted, tests, entry_point)
    asked = {name: name for name in wanted - libraries.keys()}
    if CANDIDATE in code.co_names:
        asked = {name: name for name in asked if not hasattr(builtins, name)} | {CANDIDATE: entry_point}
    classes = {
        name: value
        for name, value in given.items()
        if isinstance(value, type) and value.__module__ == "prefix"
    }
    has_cases = "unittest" in tests + prefix
    return ProblemTests(
        code=code, given=given | libraries, wanted=asked, classes=classes, has_cases=has_cases
    )


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _with_check(tests: str, entry_point: str) -> str:
    """The tests, with a call of their `check` where an entry point says of what and nobody calls it."""
    calls = re.search(r"^check\(", tests, re.MULTILINE)
    defines = re.search(r"^def check\(", tests, re.MULTILINE)
    if not entry_point or not defines or calls:
        return tests
    return f"{tests}\ncheck({CANDIDATE if hasattr(builtins, entry_point) else entry_point})\n"


def _wanted(tests: str, entry_point: str) -> set[str]:
    """Names that the tests use and do not define, built-ins apart unless the entry point is one."""
    free, built_in = set[str](), set[str]()
    for name in _free(symtable.symtable(f"{tests}\n{entry_point}\n", "<tests>", "exec")):
        (built_in if hasattr(builtins, name) else free).add(name)
    built_in = {name for name in built_in if not _is_special(name)}
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


def _libraries(wanted: set[str], tests: str, entry_point: str) -> dict[str, Any]:
    """Modules and usual names that the tests use without importing them, whatever the program calls so.

    Raises:
        ImportError: a library that is not there; the program does not stand in for it.
    """
    entry = set(re.findall(r"\w+", entry_point))
    dotted = {
        node.value.id
        for node in ast.walk(ast.parse(tests))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    found: dict[str, Any] = {}
    for name in (wanted & dotted) - entry:
        module = _MODULE_NAMES.get(name, name)
        if name in _LIBRARIES or module in sys.stdlib_module_names or module in sys.modules:
            found[name] = importlib.import_module(module)
    usual = (wanted & _USUAL.keys()) - entry
    for name in usual if wanted - usual - found.keys() else ():
        found[name] = getattr(importlib.import_module(_USUAL[name]), name)
    return found


def _given(prefix: str, entry_point: str) -> dict[str, Any]:
    """What the problem's own text defines in full; its last definition may wait for the program's lines."""
    tree, is_open = _parsed(prefix)
    asked = set(re.findall(r"\w+", entry_point))
    stubs = asked | {node.name for node in tree.body if isinstance(node, _DEFINITIONS) and _is_stub(node)}
    if is_open:
        stubs.add(getattr(tree.body[-1], "name", ""))
    tree.body = [node for node in tree.body if getattr(node, "name", None) not in stubs]
    space: dict[str, Any] = {"__name__": "prefix"}
    exec(compile(tree, "<prefix>", "exec", dont_inherit=True), space)
    return {name: value for name, value in space.items() if not _is_special(name)}


def _parsed(prefix: str) -> tuple[ast.Module, bool]:
    """The text as a tree, and whether its end is open; empty where it is Python in no way."""
    try:
        return ast.parse(prefix), False
    except SyntaxError:
        lines = prefix.rstrip().splitlines() or [""]
        indent = len(lines[-1]) - len(lines[-1].lstrip()) + 1
        try:
            return ast.parse("\n".join([*lines, " " * indent + "pass"])), True
        except SyntaxError:
            return ast.Module(body=[], type_ignores=[]), False


def _is_stub(node: ast.AST) -> bool:
    """Whether a function, or one of a class, still waits for its body."""
    if isinstance(node, ast.ClassDef):
        return any(_is_stub(part) for part in node.body if isinstance(part, _DEFINITIONS))
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    return all(
        isinstance(part, ast.Pass) or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
        for part in node.body
    )
