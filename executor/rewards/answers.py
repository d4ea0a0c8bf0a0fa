r"""Whether a response gives the expected answer: equal texts, equal numbers, or the last number of the text.

A `\boxed{...}` in the response is what counts where there is one. Numbers are equal by value: leading zeros,
a plus sign, a currency, thousands separators (1,234; 1{,}234; in a box 1\,234 and 1 234) and zeros after the
point do not matter; `\text{B}` is B. A last number that is part of an expression is none: the 4 of 3/4, of
\frac{3}{4} or of x^4. Fractions, units and symbolic expressions are compared as text only (expressions.py
parses them), and so is an answer that starts with a spare zero: `01` is a code, no number.
"""

from __future__ import annotations

import re
from decimal import Decimal

LOOKED_AT = 20_000
"""Characters from the end of a response that are looked at: the search stays linear in practice."""
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d*)?(?:[eE][-+]?\d{1,3}(?!\w))?")
_IN_GROUPS = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:,\d{2,3})*,\d{3})(?:\.|[eE]|$)")
"""A number without thousands separators, or with them where they belong (in India also after two digits)."""
_APART = re.compile(r"(?:^|[=:({\[,$#]|\b(?:is|are|be|equals|gives))\s*-\s+$", re.IGNORECASE)
"""Before a number that spaces separate from its minus; after a number or a variable it is a difference."""
_PART_AFTER = re.compile(r"(?:[/^_]|[}^_]\{|\\(?!boxed)[a-z]+\{)\s*$|\d\s*:\s*$|[\w)\]}][+*]$")
"""Before a number that is part of an expression."""
_LATEX_COMMA = re.compile(r"(?<=\d)(?:\{,\}|\\!,|,\\!|\\!,\\!)(?=\d)")
_SPACED = re.compile(r"(?<![\d.,])(\d{1,3})((?:(?:\\[,;:! ]|~|\s)\d{3})+)(?![\d])")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|fbox|underline)\{([^{}]*)\}")
_CURRENCY = re.compile(r"\\?\$|[\u20ac\u00a3\u00a5]")
CODE = re.compile(r"0\d+")
"""A text of digits, no number."""
_BOXED = "\\boxed{"
_MINUS_SIGNS = str.maketrans({"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-"})


def is_right(response: str, answer: str) -> bool:
    """Whether the response's final answer is that of `answer`."""
    answer = final(answer)
    response = response[-LOOKED_AT:].translate(_MINUS_SIGNS)
    if CODE.fullmatch(answer.strip()):
        inside = _boxed(response)
        return (response if inside is None else inside).strip() == answer.strip()
    wanted = _normal(answer.translate(_MINUS_SIGNS))
    inside = _boxed(response)
    if inside is not None:
        return _normal(joined(inside)) == wanted
    if _normal(response) == wanted:
        return True
    return isinstance(wanted, Decimal) and _last_number(_unwrapped(response)) == wanted


def final(answer: str) -> str:
    """What a data set's answer comes to: after its last `####` (GSM8K), in its last box (MATH), or all of it.

    Sources: Cobbe et al. 2021, arXiv 2110.14168, and Hendrycks et al. 2021, arXiv 2103.03874, whose answers
    are whole solutions.
    """
    _, mark, last = answer.rpartition("####")
    if mark:
        return last.strip()
    inside = _boxed(answer)
    return answer if inside is None else inside


def joined(text: str) -> str:
    """The text without spaces between the groups of a number, as `1 234` and `1\\,234` have them."""
    return _SPACED.sub(lambda number: number[1] + re.sub(r"\D", "", number[2]), text)


def digits_share(response: str) -> float:
    """Digits among the characters of a response; 0 for an empty one."""
    return sum(c.isdigit() for c in response) / len(response) if response else 0.0


def _normal(text: str) -> Decimal | str:
    """The number that the whole text is, or the text with single spaces."""
    text = " ".join(_unwrapped(text).split())
    bare = re.sub(r"^([-+])\s+", r"\1", _CURRENCY.sub("", text).strip())
    number = _decimal(bare) if _NUMBER.fullmatch(bare) else None
    return text if number is None else number


def _unwrapped(text: str) -> str:
    """Without LaTeX around words and in numbers."""
    return _LATEX_COMMA.sub(",", _WRAPPED.sub(r"\1", text))


def _last_number(text: str) -> Decimal | None:
    """None: there is none, or it is part of an expression."""
    numbers = list(_NUMBER.finditer(text))
    if not numbers or _PART_AFTER.search(before := text[: numbers[-1].start()][-12:]):
        return None
    value = _decimal(numbers[-1][0])
    return -value if value is not None and _APART.search(before) else value


def _decimal(text: str) -> Decimal | None:
    """None: there are commas where no thousands end."""
    return Decimal(text.replace(",", "")) if _IN_GROUPS.match(text) else None


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
