"""Arguments of a Python script's configurations: `GRPOConfig(...)` and what is written in such calls.

Nothing is run. Literals, sums of them and names that the script sets once to one are read; everything else
stays as `${python:expression}`, which nothing resolves.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.interchange.configuration.settings import PYTHON

CALLED = ("Config", "Arguments", "Args", "Trainer")
"""How the names of calls end that configure a run."""
LOADED = "from_pretrained"
"""A call that means its first argument."""
REST = "**"
"""Beginning of the key that holds arguments which are handed on as a whole."""
_OPERATORS: Mapping[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_NUMBERS = (int, float)


def is_python(text: str) -> bool:
    """Whether a text without a suffix is such a script."""
    imports = re.search(r"^[ \t]*(?:from|import) \w", text, re.MULTILINE)
    return bool(imports and re.search(rf"\w(?:{'|'.join(CALLED)})\(", text))


def arguments_of(text: str, name: str) -> Iterator[tuple[str, Any]]:
    """Keywords of the configuring calls, each also under the name of its call: `r` and `LoraConfig.r`.

    Raises:
        RlhfsimError: it is not Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RlhfsimError(
            "malformed-script",
            f"cannot read the script as Python: {getattr(error, 'msg', error)}",
            place=Place(file=name, line=getattr(error, "lineno", None)),
            help="give the arguments alone, as a YAML file or a command",
        ) from error
    names = _assigned(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (called := _called(node)).endswith(CALLED):
            yield from _keywords(node, called, names)


def _keywords(call: ast.Call, called: str, names: Mapping[str, ast.expr]) -> Iterator[tuple[str, Any]]:
    for keyword in call.keywords:
        value = _value(keyword.value, names)
        if keyword.arg is not None:
            yield keyword.arg, value
            yield f"{called}.{keyword.arg}", value
        elif isinstance(value, dict):
            yield from ((str(key), inner) for key, inner in value.items())
        else:
            yield f"{REST}{ast.unparse(keyword.value)}", value


def _assigned(tree: ast.AST) -> dict[str, ast.expr]:
    """Names that are set once, with what they are set to."""
    found: dict[str, ast.expr] = {}
    times: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            times[node.id] += 1
        if isinstance(node, ast.arg):
            times[node.arg] += 2
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
    return {name: value for name, value in found.items() if times[name] == 1}


def _called(node: ast.Call) -> str:
    """The last name of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _value(node: ast.expr, names: Mapping[str, ast.expr]) -> Any:
    """What an expression is; `${python:expression}` where only a run would know."""
    try:
        return _literal(node, names, frozenset())
    except (ValueError, TypeError, ZeroDivisionError, OverflowError, RecursionError):
        return _unknown(node)


def _part(node: ast.expr, names: Mapping[str, ast.expr], within: frozenset[str]) -> str:
    """A piece of an f-string; what is not known stays as a variable."""
    inner = node.value if isinstance(node, ast.FormattedValue) else node
    try:
        return str(_literal(inner, names, within))
    except ValueError:
        return _unknown(inner)


def _unknown(node: ast.expr) -> str:
    return f"${{{PYTHON}{re.sub(r'[{}$]', '', ast.unparse(node))}}}"


def _literal(node: ast.expr, names: Mapping[str, ast.expr], within: frozenset[str]) -> Any:
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, str | int | float):
            return value
        case ast.JoinedStr(values=parts):
            return "".join(_part(part, names, within) for part in parts)
        case ast.Name(id=name) if name in names and name not in within:
            return _literal(names[name], names, within | {name})
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_literal(operand, names, within)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            sides = (_literal(left, names, within), _literal(right, names, within))
            if all(isinstance(side, _NUMBERS) for side in sides):
                return _OPERATORS[type(op)](*sides)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item, names, within) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            whole = zip(keys, values, strict=True)
            return {_literal(k, names, within): _literal(v, names, within) for k, v in whole if k is not None}
        case ast.Call(args=[first, *_]) if _called(node) == LOADED:
            return _literal(first, names, within)
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
            return {k.arg: _literal(k.value, names, within) for k in keywords if k.arg is not None}
    raise ValueError("not a literal")
