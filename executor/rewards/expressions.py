r"""Answers as expressions, LaTeX or plain, by math-verify: optional, and a second to import.

Equal are: fractions, decimals, mixed numbers and powers of ten (1/2, 0.5, \frac12, 3\frac12, 1.5\times10^3);
roots, logarithms, factorials, and \pi where the answer has its digits; sets in any order, tuples and
matrices in theirs, intervals and unions; polynomials in any form, equations in any order of sides, `x = 5`
and 5; \pm 2 and {-2, 2}; \text{B} and B. Units, currencies and degrees do not count (5 cm is 5, and 5 m), nor
does the percent sign (50 and 0.5 are 50%). Different are: a rounded decimal and its fraction (0.333 and 1/3),
x > 3 and (3, \infty), a letter in a sentence without a box. The last box counts, else the last expression.

It may run for ever (`9^{9^{9^9}}`), and its own time limits are signals that only a main thread hears: call
it in a process that can be killed (calls.py), which imports this before the clock of a call starts.
"""

from __future__ import annotations

import importlib
import logging
import re
from typing import Any

from executor.rewards.answers import CODE, LOOKED_AT, final, joined

_library: Any = importlib.import_module("math_verify")
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of missing time limits at every call
_WITH_UNIT = re.compile(r"[-+]?[\d.,]+ [A-Za-z ]+")
_PERCENT = re.compile(r"([-+]?\d[\d.,]*)\s*\\?%")


def is_equal(response: str, answer: str) -> bool:
    """Whether the response's last expression equals `answer`; a code such as `01` is text only."""
    answer = final(answer).strip().strip("$")
    if CODE.fullmatch(answer):
        return False
    # whole: outside a box only the last number of (x+1)^2 would count
    expected = answer if _WITH_UNIT.fullmatch(answer) else f"\\boxed{{{answer}}}"
    response = response[-LOOKED_AT:]
    start = response.rfind(r"\boxed")
    # from the last box on, numbers in it without spaces; without a box all of it
    last = response if start < 0 else joined(response[start:])
    ours, theirs = _readings(expected), _readings(last)
    if len(ours) == len(theirs) == 2:
        return _same(ours[0], theirs[0])
    return any(_same(first, second) for first in ours for second in theirs)


def _readings(text: str) -> list[str]:
    """The text; with percent signs as their numbers, and as hundredths: parsers of ANTLR 4.9 know no sign."""
    if not _PERCENT.search(text):
        return [text]
    return [_PERCENT.sub(r"\1", text), _PERCENT.sub(r"\\frac{\1}{100}", text)]


def _same(expected: str, response: str) -> bool:
    first, second = (_library.parse(text, parsing_timeout=None) for text in (expected, response))
    return bool(_library.verify(first, second, timeout_seconds=None))


_same(r"\boxed{\frac12}", "1/2")  # its first comparison loads parsers: seconds that are not a response's
