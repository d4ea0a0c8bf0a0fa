r"""Whether a response gives the expected answer: equal texts, equal numbers, or the last number of the text.

A `\boxed{...}` in the response is what counts where there is one. Numbers are equal by value: leading zeros,
a plus sign, thousands separators and zeros after the point do not matter. Fractions, units and symbolic
expressions are compared as text only (expressions.py parses them), and so is an answer that starts with a
spare zero: `01` is a code, no number.
"""

from __future__ import annotations

import re
from decimal import Decimal

LOOKED_AT = 20_000
"""Characters from the end of a response that are looked at: the search stays linear in practice."""
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?")
CODE = re.compile(r"0\d+")
"""A text of digits, no number."""
_BOXED = "\\boxed{"
_MINUS_SIGNS = str.maketrans({"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-"})


def is_right(response: str, answer: str) -> bool:
    """Whether the response's final answer is `answer`."""
    response = response[-LOOKED_AT:].translate(_MINUS_SIGNS)
    if CODE.fullmatch(answer.strip()):
        inside = _boxed(response)
        return (response if inside is None else inside).strip() == answer.strip()
    wanted = _normal(answer.translate(_MINUS_SIGNS))
    inside = _boxed(response)
    if inside is not None:
        return _normal(inside) == wanted
    if _normal(response) == wanted:
        return True
    return isinstance(wanted, Decimal) and _last_number(response) == wanted


def digits_share(response: str) -> float:
    """Digits among the characters of a response; 0 for an empty one."""
    return sum(c.isdigit() for c in response) / len(response) if response else 0.0


def _normal(text: str) -> Decimal | str:
    """The number that the whole text is, or the text with single spaces."""
    text = " ".join(text.split())
    return _decimal(text) if _NUMBER.fullmatch(text) else text


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return _decimal(numbers[-1]) if numbers else None


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def _boxed(text: str) -> str | None:
    """What the last box holds, with nested braces; None without a closed box."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 1
    for end in range(start + len(_BOXED), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len(_BOXED) : end]
    return None
