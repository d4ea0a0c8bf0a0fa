"""The question as fields, as the query of an address, and as options of `rlhfsim design`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Literal, NamedTuple, TypeVar
from urllib.parse import parse_qsl, urlencode

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen

BASE = "base"
"""Name of the pinned question in an address."""
MAX_TEXT = 2000
"""Characters of one field; more is a slip."""
COMPARED = (
    "model",
    "algorithm",
    "prompts",
    "samples",
    "prompt-len",
    "response-len",
    "steps",
    "deadline",
    "budget",
    "allow",
    "more",
)
"""Fields that `rlhfsim choose` takes too."""
OTHER_GPUS = ("h200", "b200", "a100-80")
"""Kinds in addition to the one of the question."""
T = TypeVar("T")
Kind = Literal["text", "one", "several"]
"""Written, or picked from a list."""


class Field(NamedTuple):
    """One field of the page."""

    name: str
    """The option of `rlhfsim design` without its dashes; `more`: any others, as they are typed."""
    label: str
    hint: str = ""
    """What the empty field shows: the option's default."""
    kind: Kind = "text"
    offered: tuple[str, ...] = ()


Question = dict[str, str]
"""Field -> its text; a field that is empty is not in it."""


@frozen
class DeskState:
    """What an address holds: the question, and the one that it is compared with."""

    question: Question = field(default_factory=dict)
    base: Question = field(default_factory=dict)
    """Empty: nothing is pinned."""


def of_search(search: str, names: Mapping[str, Field]) -> DeskState:
    """The state of `?gpus=64&model=70b&base=gpus%3D32%26model%3D70b`.

    Raises:
        RlhfsimError: a name that is no field.
    """
    given = dict(parse_qsl(search.removeprefix("?")))
    base = dict(parse_qsl(given.pop(BASE, "")))
    for name in {**given, **base}:
        if name not in names:
            raise RlhfsimError(
                "unknown-field",
                f"the address names {name[:40]!r}, which is no field",
                help=f"fields: {', '.join(names)}; other options of rlhfsim design go into `more`",
            )
    return DeskState(question=kept(given, names), base=kept(base, names))


def kept(values: Mapping[str, str | None], names: Mapping[str, Field]) -> Question:
    """The fields that say something, in the order of the page."""
    texts = {name: str(values.get(name) or "").strip()[:MAX_TEXT] for name in names}
    return {name: text for name, text in texts.items() if text}


def query(question: Question) -> str:
    """The question as the query of an address, without `?`."""
    return urlencode(question)


def to_search(state: DeskState) -> str:
    """The whole state as the query of an address."""
    base = {BASE: query(state.base)} if state.base else {}
    return f"?{urlencode({**state.question, **base})}"


def arguments(question: Question) -> list[str]:
    """Options of `rlhfsim design` that ask this question.

    Raises:
        RlhfsimError: quotes in `more` that do not close.
    """
    words: list[str] = []
    for name, text in question.items():
        if name == "more":
            try:
                words += shlex.split(text)
            except ValueError as error:
                raise RlhfsimError(
                    "bad-quotes", f"more options: {str(error).lower()}", help="close the quotes"
                ) from error
        else:
            words.append(f"--{name}={text}" if text.startswith("-") else f"--{name}")
            words += [] if text.startswith("-") else [text]
    return words


def command(question: Question) -> str:
    """What to type for the same answer in plan.json."""
    return shlex.join(["rlhfsim", "design", *arguments(question), "--out", "plan.json"])


def compared(question: Question, elsewhere: Question) -> Question:
    """Options of `rlhfsim choose` for a question; `elsewhere`: GPUs and framework, where given."""
    gpu, gpus = question.get("gpu", "h100"), question.get("gpus", "")
    most = int(gpus) if re.fullmatch(r"\d{1,9}", gpus) else 64
    kinds = ",".join(dict.fromkeys([gpu, *OTHER_GPUS]))
    usual = {"gpu": kinds, "gpus": f"{min(8, most)}..{most}"}
    return {**work(question), **usual, **elsewhere}


def work(question: Question) -> Question:
    """What a question asks of any GPUs."""
    return {name: text for name, text in question.items() if name in COMPARED}


def comparison(choice: Question) -> str:
    """What to type for the same table."""
    return shlex.join(["rlhfsim", "choose", *arguments(choice)])


def wrong(
    read: Callable[[Question], T], question: Question, good: Question, names: Mapping[str, Field]
) -> tuple[str, RlhfsimError] | None:
    """The field that makes a question wrong, and why; None where nothing is, "" where no single field is.

    It is the one without which, put back to what was answered last, the question can be read.
    """
    try:
        read(question)
    except RlhfsimError as error:
        moved = [name for name in names if question.get(name) != good.get(name)]
        for name in moved:
            without = {**question, name: good.get(name, "")}
            try:
                read(kept(without, names))
            except RlhfsimError:
                continue
            return name, error
        return (moved[0] if len(moved) == 1 else ""), error
    return None
