"""Commands of a shell script: words with the variables, arrays and sums that the script itself sets.

Nothing is run. What only a run would know (`$(...)`, variables from outside) stays in the words as `$...`.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from rlhfsim.errors import Place, RlhfsimError

_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^{}]*))?\}|(\w+))")
_SUM = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_RUN = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`")
_SET_DEFAULT = re.compile(r"\$\{(\w+):?=([^{}]*)\}")
"""`: ${NUM_GPUS:=8}` sets what is not set."""
_ARRAY = re.compile(r"^\s*(?:export\s+|declare\s+-a\s+|local\s+)?(\w+)(\+?)=\((.*)", re.DOTALL)
_WHOLE_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_PIECE = re.compile(
    r"""(?P<plain>[^ \t\r\n'"\\#]+) | '(?P<single>[^']*)' | "(?P<double>(?:[^"\\]|\\.)*)" | \\(?P<escaped>.)
      | (?P<gap>(?:[ \t\r\n]|\#[^\n]*)+)""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPED = re.compile(r'\\(["\\])')
_UNKNOWN = "$?"
_MOST_LINES = 400
"""Most lines of one statement: a quote that is never closed ends there."""
_DEPTH = 8
"""Most variables on the way to one value."""
MAX_SUM = 200
"""Characters of a sum that is worked out."""
_SAME = {"=": True, "==": True, "!=": False}
_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
"""Signs of a condition between words, and between numbers."""
_DIGITS = 12
"""Digits of a number in a condition."""
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


@dataclass(slots=True)
class _Branches:
    """Branches of `if` that enclose a statement."""

    around: list[tuple[bool, bool]] = field(default_factory=list)
    """(one of them was taken before or is now, this one may be), the outermost first."""

    def read(self, statement: str, names: _Names) -> bool:
        """Whether a statement may be run, by conditions on what the script itself sets."""
        match _branch(statement):
            case "if":
                value = _condition(statement, names)
                self.around.append((value is True, value is not False))
            case "elif" if self.around:
                taken, value = self.around[-1][0], _condition(statement, names)
                self.around[-1] = (taken or value is True, not taken and value is not False)
            case "else" if self.around:
                self.around[-1] = (True, not self.around[-1][0])
            case "fi" if self.around:
                read = all(may for _, may in self.around)
                self.around.pop()
                return read
        return all(may for _, may in self.around)


def _branch(statement: str) -> str:
    """Which of `if`, `elif`, `else` and `fi` a statement is, or ends with; empty for others and for whole
    ones in one line."""
    words = statement.rstrip("; \t").split()
    if not words:
        return ""
    first, closes = words[0].rstrip(";"), words[-1] == "fi" or words[0].rstrip(";") == "fi"
    if first == "if":
        return "" if closes else first
    return "fi" if closes else first if first in ("elif", "else") else ""


def commands_of(text: str, name: str, variables: Mapping[str, str] | None = None) -> list[list[str]]:
    """Words of the statements of a script, in order; `variables` are set outside of it.

    Raises:
        RlhfsimError: a quote that is never closed.
    """
    names, commands, branches = _Names(variables=dict(variables or {})), list[list[str]](), _Branches()
    statements = list(_statements(text, name))
    kinds = [_branch(statement) for _, statement in statements]
    closed = kinds.count("if") == kinds.count("fi")
    for number, statement in statements:
        if closed and not branches.read(statement, names):
            continue
        for variable, usual in _SET_DEFAULT.findall(statement):
            names.variables.setdefault(variable, expanded(usual, names.variables))
        array = _ARRAY.match(statement)
        inside = array[3].rstrip().removesuffix(")") if array else statement
        found = _expanded(_split(_computed(inside, names), name, number), names)
        if array:
            names.arrays[array[1]] = (names.arrays.get(array[1], []) if array[2] else []) + found
            continue
        _remember(found, names)
        commands.append(found)
    return commands


def _statements(text: str, name: str) -> Iterator[tuple[int, str]]:
    """(line, statement): lines that a backslash, an open quote or an open array continues are one."""
    lines = re.sub(r"\\\r?\n", " ", text).splitlines()
    at = 0
    while at < len(lines):
        end = _end(lines, at)
        yield at + 1, "\n".join(lines[at:end])
        at = end


def _end(lines: list[str], first: int) -> int:
    """Index behind the last line of the statement that begins there; one line where it is never closed."""
    array, unclosed, last = _ARRAY.match(lines[first]) is not None, "", ""
    for at in range(first, min(len(lines), first + _MOST_LINES + 1)):
        unclosed = f"{unclosed}\n{lines[at]}" if unclosed else lines[at]
        try:
            words = split(_RUN.sub(_UNKNOWN, _SUM.sub(_UNKNOWN, unclosed)))
        except ValueError:
            continue
        unclosed, last = "", words[-1] if words else last
        if not array or last.endswith(")"):
            return at + 1
    return first + 1


def split(statement: str) -> list[str]:
    """The words of `shlex.split(statement, comments=True)`, which reads character by character, sooner.

    Raises:
        ValueError: a quote or an escape that does not end.
    """
    words, begun, at = list[str](), False, 0
    for piece in _PIECE.finditer(statement):
        if piece.start() != at:
            break
        at, kind = piece.end(), piece.lastgroup
        if kind == "gap":
            begun = False
            continue
        text = piece[kind or 0]
        text = _ESCAPED.sub(r"\1", text) if kind == "double" else text
        if begun:
            words[-1] += text
        else:
            words.append(text)
        begun = True
    if at != len(statement):
        return shlex.split(statement, comments=True)  # it says what is not closed
    return words


def _condition(statement: str, names: _Names) -> bool | None:
    """The value of `if [ a = b ]`, also of numbers; None: it is not known, or has another form."""
    try:
        words = [word.rstrip(";") if word in ("];", "]];") else word for word in split(statement)][1:]
    except ValueError:
        return None
    if words[-1:] == ["then"]:
        words.pop()
    if len(words) != 5 or words[0] not in ("[", "[[") or words[-1] not in ("]", "]]"):
        return None
    ours, theirs = (expanded(word, names.variables) for word in (words[1], words[3]))
    if any(sign in f"{ours}{theirs}" for sign in "$`*?"):
        return None
    if words[2] in _SAME:
        return (ours == theirs) == _SAME[words[2]]
    compare = _COMPARED.get(words[2])
    numbers = [int(word) for word in (ours, theirs) if word.isdecimal() and len(word) <= _DIGITS]
    return compare(*numbers) if compare and len(numbers) == 2 else None


def _split(statement: str, name: str, line: int) -> list[str]:
    try:
        return split(statement)
    except ValueError as error:
        raise RlhfsimError(
            "malformed-script",
            f"cannot split the line into words: {str(error).lower()}",
            place=Place(file=name, line=line),
            help="give the arguments alone, one command without substitutions; a log is read by import-run",
        ) from error


def _expanded(words: list[str], names: _Names) -> list[str]:
    """Words with variables replaced; an array, or a variable that holds several arguments, becomes words."""
    result: list[str] = []
    for word in words:
        array = _WHOLE_ARRAY.fullmatch(word)
        if array is not None:
            result += names.arrays.get(array[1], [])
            continue
        word = _WHOLE_ARRAY.sub(lambda match: " ".join(names.arrays.get(match[1], [match[0]])), word)
        value = expanded(word, names.variables)
        several = _VARIABLE.fullmatch(word) and " " in value and ("=" in value or value.startswith("-"))
        result += value.split() if several else [value]
    return result


def expanded(word: str, variables: Mapping[str, str]) -> str:
    """A word with the variables that are known, or their defaults, in their place; `${name}` for others."""

    def value(match: re.Match[str]) -> str:
        name, usual = match[1] or match[3], match[2]
        if usual is None:
            usual = f"\0{name}\0"  # without braces, so that a default around it is read
        return variables.get(name, usual)

    for _ in range(_DEPTH):
        before, word = word, _VARIABLE.sub(value, word)
        if word == before:
            break
    return re.sub(r"\0(\w+)\0", r"${\1}", word)


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
