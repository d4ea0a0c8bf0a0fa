"""What the columns of a data set mean: a row as a problem, or the reason why it is none.

Settings name the columns; one that is named must be there. Where none is named and the usual name is not
there, another usual one is taken and said. A prompt is text or a conversation: turns of `role` and `content`
(or `from` and `value`), whose content is text or parts of text. A conversation that ends with a turn of the
assistant holds its response. Pairs without a prompt hold whole conversations that differ in their last turn:
as turns, or as text with blank lines, then `Human:` or `Assistant:` before each (hh-rlhf has this form; Bai
et al. 2022, arXiv 2204.05862).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from executor.settings import Answers, Data, Say
from executor.tasks.prompts import Preference, Problem
from executor.tasks.rows import BadRow, Row
from executor.tasks.text import Message, Prompt
from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frozen import frozen

NEEDED: Mapping[Preference, tuple[str, ...]] = {
    "none": ("answer_column",),
    "pairs": ("chosen_column", "rejected_column"),
    "labels": ("answer_column", "label_column"),
    "responses": ("answer_column",),
}
"""Settings that name a needed column, in addition to the prompt's."""
USUAL: Mapping[str, tuple[str, ...]] = {
    "prompt_column": (
        *("prompt", "question", "problem", "instruction", "query", "input"),
        *("messages", "conversations", "conversation"),
    ),
    "answer_column": (
        *("answer", "ground_truth", "solution", "response", "completion", "output", "target"),
        "reward_model",
    ),
    "chosen_column": ("chosen", "chosen_response", "preferred"),
    "rejected_column": ("rejected", "rejected_response", "dispreferred"),
    "label_column": ("label", "is_desirable"),
}
"""Setting -> names that such a column has in public data sets, the most usual first."""
SIDES = ("chosen", "rejected")
IMAGES = ("image", "images", "video", "videos", "audio")
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
"""Before a turn of a conversation as text."""
_TURN = re.compile(rf"({HUMAN}|{ASSISTANT})")
_UNANSWERED = "the conversation does not end with a turn of the assistant"
TRUE, FALSE = ("true", "yes", "desirable", "good"), ("false", "no", "undesirable", "bad", "")


@frozen
class ProblemColumns:
    """Where a row has what a problem needs."""

    preference: Preference
    chat: bool
    """Conversations may be prompts."""
    used: Mapping[str, str]
    """Setting -> column; what is missing is the last turn of a conversation, or not needed."""
    answers: Answers
    """Answers of rule rewards; where they are used, a row whose answer is empty is bad."""

    def problem(self, row: Row) -> Problem:
        """The row as a problem.

        Raises:
            BadRow: it is none.
        """
        values = dict(row)
        for name in IMAGES:
            if values.get(name) is not None and values.get(name) != []:
                raise BadRow(f"column {name!r} holds {name}, which no model here reads: take a set of texts")
        prompt, ending = self._prompt(values)
        answer = self._answer(values, ending)
        return Problem(prompt=prompt, answer=answer or "", meta=values | self._given(values, answer))

    def _answer(self, values: Row, ending: str | None) -> str | None:
        """Answer in its column, else how its conversation ends; None: the row has none and needs none."""
        column = self.used.get("answer_column")
        if column is None:
            if ending is None and self.preference == "none" and self.answers == "required":
                raise BadRow(_UNANSWERED)
            return ending
        value = values.get(column)
        needed = self.preference in ("labels", "responses") or self.answers != "unused"
        if not needed and (value is None or self.preference == "pairs"):
            return None
        answer = _plain(value, column)
        if needed and not answer.strip():
            raise BadRow(f"column {column!r} is empty here")
        return answer

    def _given(self, values: Row, answer: str | None) -> dict[str, Any]:
        """What the model is to learn from."""
        match self.preference:
            case "none":
                return {}
            case "pairs" if "prompt_column" not in self.used:
                return {side: self._whole(values, side)[1] for side in SIDES}
            case "pairs":
                return {side: _answered(values, self.used[f"{side}_column"]) for side in SIDES}
        if answer is None:
            raise BadRow(_UNANSWERED)
        if self.preference == "responses":
            return {"response": answer}
        column = self.used["label_column"]
        label = 1.0 if _is_true(values.get(column), column) else -1.0
        return {"response": answer, "label": label}

    def _whole(self, values: Row, side: str) -> tuple[Prompt, str]:
        """What a whole conversation of a pair begins with, and its last turn."""
        column = self.used[f"{side}_column"]
        value = values.get(column)
        if isinstance(value, list):
            turns, answer = _ended(value, column)
            return self._conversation(turns, column), answer
        text, answer = _ended_text(value, column)
        return (_spoken(text, column), answer.strip()) if self.chat else (text, answer)

    def _prompt(self, values: Row) -> tuple[Prompt, str | None]:
        """The prompt, and the response that a conversation ends with."""
        column = self.used.get("prompt_column")
        if column is None:  # pairs of whole conversations
            begin, other = (self._whole(values, side)[0] for side in SIDES)
            if begin != other:
                raise BadRow("the conversations of the pair differ before their last turn")
            return begin, None
        value = values.get(column)
        if not isinstance(value, list):
            text = _plain(value, column)
            if not text.strip():
                raise BadRow("an empty prompt")
            return text, None
        turns = _turns(value, column)
        answered = len(turns) > 1 and turns[-1]["role"] == "assistant"
        prompt = self._conversation(turns[:-1] if answered else turns, column)
        return prompt, turns[-1]["content"] if answered else None

    def _conversation(self, turns: tuple[Message, ...], column: str) -> tuple[Message, ...]:
        if not self.chat:
            raise BadRow(f"column {column!r} holds a conversation, which needs data.chat_template: true")
        return turns


def columns_of(
    data: Data, preference: Preference, first: Row, *, answers: Answers, say: Say
) -> ProblemColumns:
    """The columns by the settings and the first row; guesses are said. `answers`: of rule rewards.

    Raises:
        RlhfsimError: a needed or named column is missing.
    """
    used: dict[str, str] = {}
    needed = NEEDED[preference] if answers != "unused" or preference != "none" else ()
    named = [setting for setting in USUAL if getattr(data, setting) is not None]
    for setting in dict.fromkeys(("prompt_column", *needed, *named)):
        column = _column(data, setting, first, set(used.values()), say)
        if column is not None:
            used[setting] = column
        elif setting == "answer_column" and setting not in named and answers == "read":
            say("data: no column of answers: reward functions get None (data.answer_column names one)")
        elif setting in named or not _in_conversation(data, setting, preference, first, used):
            name = getattr(data, setting) or USUAL[setting][0]
            raise RlhfsimError(
                "data-column",
                f"no column {name!r}",
                place=Place(file=str(data.path)),
                help=_mapping(setting, name, preference, first),
            )
    return ProblemColumns(preference=preference, chat=data.chat_template, used=used, answers=answers)


def _mapping(setting: str, name: str, preference: Preference, first: Row) -> str:
    """What there is, and what to set."""
    near = get_close_matches(name, list(first), n=3, cutoff=0.5)
    there = ", ".join(f"{name} ({_kind(value)})" for name, value in first.items())
    text = f"did you mean {', '.join(near)}; " if near else ""
    text += f"columns: {there}; name the right one with data.{setting}"
    if setting == "prompt_column" and preference == "pairs":
        text += f'; without one, both sides are conversations: turns, or text with "{_shown(ASSISTANT)}"'
    elif setting == "prompt_column" and preference == "responses":
        text += "; a text that is not cut into prompt and response is no example of an answer"
    return text


def _kind(value: Any) -> str:
    names = {str: "text", bool: "true or false", int: "number", float: "number", dict: "object"}
    if isinstance(value, list):
        return "turns" if value and isinstance(value[0], dict) else "list"
    return "empty" if value is None else names.get(type(value), type(value).__name__)


def _shown(text: str) -> str:
    return text.encode("unicode_escape").decode()


def _column(data: Data, setting: str, first: Row, taken: Iterable[str], say: Say) -> str | None:
    """The column of a setting; None: there is none."""
    wanted, usual = getattr(data, setting), USUAL[setting][0]
    if wanted is not None:
        return str(wanted) if wanted in first else None
    names = [name for name in USUAL[setting] if name in first and (name == usual or name not in taken)]
    if usual in names or not names:
        return usual if names else None
    if names[:2] == ["instruction", "input"]:
        raise RlhfsimError(
            "data-column",
            "a question is in two columns, 'instruction' and 'input'",
            place=Place(file=str(data.path)),
            help="write both into one column, or name one with data.prompt_column: the other would be lost",
        )
    say(f"data: there is no column {usual!r}, {names[0]!r} is used (data.{setting})")
    return names[0]


def _in_conversation(
    data: Data, setting: str, preference: Preference, first: Row, used: Mapping[str, str]
) -> bool:
    """Whether conversations hold what has no column of its own."""
    if setting == "prompt_column":
        sides = [first.get(name) for name in (data.chosen_column or "", *USUAL["chosen_column"])]
        return preference == "pairs" and any(
            isinstance(side, list) or (isinstance(side, str) and ASSISTANT in side) for side in sides
        )
    return setting == "answer_column" and isinstance(first.get(used.get("prompt_column", "")), list)


def _turns(value: list[Any], column: str) -> tuple[Message, ...]:
    """Turns of a conversation as role and text."""
    turns = []
    for turn in value:
        role = turn.get("role") or turn.get("from") if isinstance(turn, dict) else None
        if not isinstance(role, str):
            raise BadRow(f"column {column!r} must be text or turns of role and content")
        content = turn["content"] if turn.get("content") is not None else turn.get("value")
        turns.append({"role": ROLES.get(role, role), "content": _content(content, column)})
    if not turns:
        raise BadRow(f"column {column!r} must be text or turns of role and content")
    return tuple(turns)


def _content(content: Any, column: str) -> str:
    """Text of a turn; parts of text are joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRow(f"column {column!r} must be text or turns of role and content: one has no text")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in ("text", "input_text", "output_text"):
            raise BadRow(
                f"column {column!r} holds a part of type {kind!r}, which no model here reads: text only"
            )
        texts.append(str(part.get("text") or "") if isinstance(part, dict) else str(part))
    return "".join(texts)


def _ended(value: Any, column: str) -> tuple[tuple[Message, ...], str]:
    """A conversation before its last turn, and that turn's text."""
    turns = _turns(value, column)
    if turns[-1]["role"] != "assistant":
        raise BadRow(f"the conversation in column {column!r} does not end with a turn of the assistant")
    return turns[:-1], turns[-1]["content"]


def _answered(values: Row, column: str) -> str:
    """An answer of a pair that has a prompt of its own."""
    value = values.get(column)
    return _ended(value, column)[1] if isinstance(value, list) else _plain(value, column)


def _ended_text(value: Any, column: str) -> tuple[str, str]:
    """A conversation as text, up to the mark of its last turn of the assistant, and what follows."""
    text = _plain(value, column)
    before, mark, answer = text.rpartition(ASSISTANT)
    if not mark or HUMAN in answer:
        raise BadRow(
            f'the conversation in column {column!r} does not end with a turn of "{_shown(ASSISTANT)}"'
        )
    return before + mark, answer


def _spoken(text: str, column: str) -> tuple[Message, ...]:
    """The turns of a conversation as text; the last mark is that of the answer."""
    parts = _TURN.split(text)
    if parts[0].strip() or len(parts) < 4:
        raise BadRow(f'the conversation in column {column!r} does not begin with "{_shown(HUMAN)}"')
    roles = ["user" if mark == HUMAN else "assistant" for mark in parts[1::2]]
    said = [part.strip() for part in parts[2::2]]
    return tuple({"role": role, "content": words} for role, words in zip(roles[:-1], said[:-1], strict=True))


def _plain(value: Any, column: str) -> str:
    """A text or number as text; verl's {"ground_truth": ...} counts by what it holds."""
    if isinstance(value, dict) and "ground_truth" in value:
        value = value["ground_truth"]
    if value is None or value != value:  # NaN: how Parquet has what is missing among numbers
        raise BadRow(f"column {column!r} has no value here")
    if not isinstance(value, (str, int, float)):
        raise BadRow(f"column {column!r} must be text")
    return str(value)


def _is_true(value: Any, column: str) -> bool:
    """A label: a number, true or false, or a word for it."""
    if isinstance(value, str):
        word = value.strip().lower()
        if word in TRUE or word in FALSE:
            return word in TRUE
        try:
            value = float(word)
        except ValueError:
            value = None
    if not isinstance(value, (bool, int, float)):
        raise BadRow(f"column {column!r} must be a number, or true or false")
    return float(value) > 0
