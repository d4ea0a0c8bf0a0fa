"""Answers as expressions, LaTeX or plain, by math-verify: optional, and a second to import.

It may run for ever (`9^{9^{9^9}}`), and its own time limits are signals that only a main thread hears: call
it in a process that can be killed (calls.py), which imports this before the clock of a call starts.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from executor.rewards.answers import CODE, LOOKED_AT

_library: Any = importlib.import_module("math_verify")
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of missing time limits at every call


def is_equal(response: str, answer: str) -> bool:
    """Whether the response's last expression equals `answer`; a code such as `01` is text only."""
    if CODE.fullmatch(answer.strip()):
        return False
    expected = f"${answer}$" if "\\" in answer and "$" not in answer else answer
    first, second = (_library.parse(text, parsing_timeout=None) for text in (expected, response[-LOOKED_AT:]))
    return bool(_library.verify(first, second, timeout_seconds=None))
