"""The configuration that a job printed into its own log.

Read are: what Python's `pprint` or `print` writes of nested dicts (verl, NeMo-RL, SkyRL), what a call looks
like (`Namespace(a=1)` of OpenRLHF, `GRPOConfig(...)` of TRL), the list of arguments of Megatron-LM (slime),
and the echoed command with the shell variables before it. Ray mixes lines of many processes: those of one are
read together. A value that a terminal wrapped is joined, a string that was cut (`'abc'+12`) ends where it was
cut, a text that breaks off gives what it has.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhfsim.interchange.logs.records import process_of
from rlhfsim.specs.loading import MAX_DEPTH

LEAST = 12
"""Fewer leaves than this are no configuration of a run."""
LONGEST = 6000
"""Lines of one printed configuration at most."""
_DICT = re.compile(r"^(?:.*?[\s:=])??(\{\s*['\"]\w+['\"]\s*:.*)$")
_CALL = re.compile(r"^.*?\b((?:[Nn]amespace|\w+(?:Config|Arguments|Args))\(.*)$")
_INSIDE = re.compile(r"^\s*(?:['\"{}\[\](),\d.+-]|None\b|True\b|False\b|inf\b|nan\b|<|\w+=|[A-Z]\w*\()")
"""How a line inside a printed value begins; others belong to somebody else."""
_QUOTED = r"(?<!\\)'(?:\\.|[^'\\])*'|(?<!\\)\"(?:\\.|[^\"\\])*\""
"""A string in quotes, which no backslash escapes: else one without end is read again from each of them."""
_TOKEN = re.compile(_QUOTED + r"|[{}\[\](),:=]|<[^<>]*>|[^\s{}\[\](),:='\"<]+|\S", re.DOTALL)
_LISTED = re.compile(r"^\s*(\w+) \.{2,} (.*)$")
"""`  micro_batch_size .......... 1` (megatron/training/arguments.py, `_print_args`)."""
_STARTER = re.compile(r"\b(?:python[\d.]*|torchrun|accelerate launch|ray job submit|uv run)\b")
_TRAINER = re.compile(
    r"(?:verl[\w./-]*|openrlhf[\w.]*|main_ppo|train_ppo_ray|run_grpo\w*|skyrl[\w./-]*|trl|train_async)\b"
)
_SET = re.compile(r"^\s*(?:export\s+)?[A-Za-z_]\w*=\S*")
_BEFORE = 60
"""Lines before a command in which its variables are looked for."""


def printed_values(text: str) -> list[Mapping[str, Any]]:
    """Nested values of every configuration that the text prints, in the order of the text."""
    by_process: dict[str, list[str]] = defaultdict(list)
    for process, line in process_of(text):
        by_process[process].append(line)
    return [values for lines in by_process.values() for values in (*_values(lines), *_listed(lines))]


def printed_command(text: str) -> str | None:
    """The command that the text echoes and the variables before it, as a script; None where there is none."""
    lines = [line for _, line in process_of(text)]
    for i, line in enumerate(lines):
        starter = _STARTER.search(line)
        if starter is None or not _TRAINER.search(line, starter.end()):
            continue
        end = i
        while lines[end].rstrip().endswith("\\") and end + 1 < len(lines):
            end += 1
        command = [lines[i].lstrip("+$ "), *lines[i + 1 : end + 1]]
        if sum("=" in word or word.startswith("--") for word in " ".join(command).split()) >= LEAST // 2:
            variables = [before for before in lines[max(0, i - _BEFORE) : i] if _SET.match(before)]
            return "\n".join([*variables, *command])
    return None


def _values(lines: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    at = 0
    while at < len(lines):
        match = _DICT.match(lines[at]) or _CALL.match(lines[at])
        if match is None:
            at += 1
            continue
        value, used = _whole(match[1], lines[at + 1 : at + LONGEST])
        if isinstance(value, Mapping) and _leaves(value) >= LEAST and not any("/" in str(k) for k in value):
            yield value
            at += used
        at += 1


def _listed(lines: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """The arguments that are printed as a list, one a line."""
    found = [match for line in lines if (match := _LISTED.match(line))]
    values = {match[1]: _literal(match[2].strip()) for match in found}
    if len(values) >= LEAST:
        yield values


def _whole(first: str, following: Sequence[str]) -> tuple[Any, int]:
    """The value that begins on a line, and how many of the following lines it takes."""
    parts, depth = [first], _depth(first)
    used = 0
    for used, line in enumerate(following, start=1):
        if depth <= 0:
            used -= 1
            break
        if _INSIDE.match(line):
            parts.append(line)
            depth += _depth(line)
    return _Reader(_TOKEN.findall("\n".join(parts))).value(), used


def _depth(line: str) -> int:
    """Brackets that the line opens less those that it closes, outside of strings."""
    bare = re.sub(_QUOTED, "", line)
    return sum(bare.count(c) for c in "{[(") - sum(bare.count(c) for c in "}])")


def _leaves(value: Any) -> int:
    return sum(map(_leaves, value.values())) if isinstance(value, Mapping) else 1


class _Reader:
    """Values from tokens; whatever breaks off ends there."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = tokens
        self._at = self._depth = 0

    def value(self) -> Any:
        """A dict, list, call (as a dict), string, number, truth value, None, or the words as written."""
        self._depth += 1
        if self._depth > MAX_DEPTH:  # no configuration: nothing that follows is read
            self._at = len(self._tokens)
        value = self._value()
        self._depth -= 1
        return value

    def _value(self) -> Any:
        token = self._peek()
        if token == "{":
            return self._items("}", ":")
        if token in ("[", "("):
            return self._list("]" if token == "[" else ")")
        if token[:1] in "'\"":
            return self._string()
        words = []
        while (token := self._peek()) and token not in ",}])":
            if token == "(":
                return self._items(")", "=")
            words.append(self._next())
        return _literal(" ".join(words))

    def _items(self, end: str, between: str) -> dict[str, Any]:
        self._next()
        values: dict[str, Any] = {}
        while (token := self._peek()) and token != end:
            if token == ",":
                self._next()
                continue
            key = str(self._string() if token[:1] in "'\"" else self._next())
            if self._peek() == between:
                self._next()
                values[key] = self.value()
        self._next()
        return values

    def _list(self, end: str) -> Any:
        self._next()
        values = []
        while (token := self._peek()) and token != end:
            if token == ",":
                self._next()
            else:
                values.append(self.value())
        closing = self._next()
        joined = closing == ")" and len(values) == 1 and isinstance(values[0], str)
        return values[0] if joined else values  # pprint breaks a long string into one in parentheses

    def _string(self) -> str:
        """Adjacent strings are one; a line break inside is the terminal's."""
        text = ""
        while self._peek()[:1] in ("'", '"'):
            text += re.sub(r"\n\s*", "", self._next()[1:-1])
        if re.fullmatch(r"\+\d+", self._peek()):  # cut by rich
            self._next()
        return text

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self._at += 1
        return token


def _literal(word: str) -> Any:
    named = {"None": None, "True": True, "False": False}
    if word in named:
        return named[word]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
