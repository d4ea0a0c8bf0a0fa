"""Commands of a shell script: words with the variables, arrays and sums that the script itself sets.

Nothing is run. What only a run would know (`$(...)`, variables from outside) stays in the words as `$...`.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rlhfsim.errors import Place, RlhfsimError

_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^{}]*))?\}|(\w+))")
_SUM = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_RUN = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`")
_SET_DEFAULT = re.compile(r"\$\{(\w+):?=([^{}]*)\}")
"""`: ${NUM_GPUS:=8}` sets what is not set."""
_ARRAY = re.compile(r"^\s*(?:export\s+|declare\s+-a\s+|local\s+)?(\w+)(\+?)=\((.*)", re.DOTALL)
_WHOLE_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_UNKNOWN = "$?"
_MOST_LINES = 400
"""Of one statement: a quote that is never closed ends there."""
_DEPTH = 8
"""Most variables on the way to one value."""
MAX_SUM = 200
"""Characters of a sum that is worked out."""
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(slots=True)
class _Names:
    """What the script has set so far."""

    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)


def words_of(text: str, name: str, variables: Mapping[str, str] | None = None) -> list[str]:
    """Words of all commands of a script, in order; see `commands_of`."""
    return [word for command in commands_of(text, name, variables) for word in command]


def commands_of(text: str, name: str, variables: Mapping[str, str] | None = None) -> list[list[str]]:
    """Words of the statements of a script, in order; `variables` are set outside of it.

    Raises:
        RlhfsimError: a quote that is never closed.
    """
    names, commands = _Names(variables=dict(variables or {})), list[list[str]]()
    for number, statement in _statements(text, name):
        for variable, usual in _SET_DEFAULT.findall(statement):
            names.variables.setdefault(variable, expanded(usual, names.variables))
        array = _ARRAY.match(statement)
        if array is not None:
            inside = array[3].rstrip().removesuffix(")")
            more = [] if not array[2] else names.arrays.get(array[1], [])
            names.arrays[array[1]] = [
                *more,
                *_expanded(_split(_computed(inside, names), name, number), names),
            ]
            continue
        found = _expanded(_split(_computed(statement, names), name, number), names)
        _remember(found, names)
        commands.append(found)
    return commands


def _statements(text: str, name: str) -> Iterator[tuple[int, str]]:
    """(line, statement): lines that a backslash, an open quote or an open array continues are one."""
    lines = re.sub(r"\\\r?\n", " ", text).splitlines()
    at = 0
    while at < len(lines):
        first, statement = at, lines[at]
        while not _closed(statement) and at + 1 < len(lines) and at - first < _MOST_LINES:
            at += 1
            statement += "\n" + lines[at]
        if not _closed(statement):
            statement, at = lines[first], first
        yield first + 1, statement
        at += 1


def _closed(statement: str) -> bool:
    try:
        words = shlex.split(statement, comments=True)
    except ValueError:
        return False
    return _ARRAY.match(statement) is None or (bool(words) and words[-1].endswith(")"))


def _split(statement: str, name: str, line: int) -> list[str]:
    try:
        return shlex.split(statement, comments=True)
    except ValueError as error:
        raise RlhfsimError(
            "malformed-script",
            f"cannot split the line into words: {str(error).lower()}",
            place=Place(file=name, line=line),
            help="give the arguments alone, one command without substitutions",
        ) from error


def _expanded(words: list[str], names: _Names) -> list[str]:
    """Words with variables replaced; an array, or a variable that holds several arguments, becomes words."""
    result: list[str] = []
    for word in words:
        array = _WHOLE_ARRAY.fullmatch(word)
        if array is not None:
            result += names.arrays.get(array[1], [])
            continue
        value = expanded(word, names.variables)
        several = _VARIABLE.fullmatch(word) and " " in value and ("=" in value or value.startswith("-"))
        result += value.split() if several else [value]
    return result


def expanded(word: str, variables: Mapping[str, str]) -> str:
    """A word with the variables that are known, or their defaults, in their place; `${name}` for others."""

    def value(match: re.Match[str]) -> str:
        known = variables.get(match[1] or match[3])
        if known is not None:
            return known
        if match[2] is not None:
            return match[2]
        return f"${{{match[1] or match[3]}}}"

    for _ in range(_DEPTH):
        before, word = word, _VARIABLE.sub(value, word)
        if word == before:
            break
    return word


def _remember(words: list[str], names: _Names) -> None:
    """Variables that a statement sets: `a=1`, `export a=1 b=2`, `a=1 command`."""
    for word in words[1:] if words[:1] in (["export"], ["local"], ["declare"]) else words:
        variable, equals, value = word.partition("=")
        if not equals or not variable.isidentifier():
            return
        names.variables[variable] = value


def _computed(statement: str, names: _Names) -> str:
    """The statement with its sums worked out; what a command would print is unknown."""
    statement = _SUM.sub(lambda match: _sum(match[1], names.variables), statement)
    return _RUN.sub(_UNKNOWN, statement)


def _sum(text: str, variables: Mapping[str, str]) -> str:
    """The value of `$((...))`, whole numbers as in a shell."""
    if len(text) > MAX_SUM:
        return _UNKNOWN
    try:
        return str(_value(ast.parse(expanded(text, variables).strip(), mode="eval").body, variables))
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return _UNKNOWN


def _value(node: ast.expr, variables: Mapping[str, str]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return int(variables[name])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, variables)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return int(_OPERATORS[type(op)](_value(left, variables), _value(right, variables)))
    raise ValueError("not a sum")
