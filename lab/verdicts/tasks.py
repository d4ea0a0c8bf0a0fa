"""Tasks with a right and a wrong program, and tests of four styles. Written for this fuzzer; nothing is from a benchmark.

Every right answer holds a number of four digits or more, which no wrong answer holds (predicates apart).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

STYLES = ("humaneval+", "mbpp+", "mbpp", "unittest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem."""

    name: str
    right: str
    wrong: str
    tests: str
    prefix: str = ""
    entry_point: str = ""
    verdicts: tuple[bool, ...] = ()
    """Right answers of a predicate for 0, 1, 2, ..."""


FUNCTIONS = {
    "number": "def f(x): return {a} * (x + 1) + {b}",
    "list": "def f(n): return [{a} * i + {b} for i in range(n + 1)]",
    "text": "def f(n): return 'ab' * n + 'k' + str({a} * (n + 1) + {b})",
    "dictionary": "def f(n): return {{chr(97 + i): [{a} * i + {b}] for i in range(n + 1)}}",
    "tuple": "def f(n): return ({a} * (n + 1) + {b}, 'x', (n,))",
    "set": "def f(n): return {{{a} * i + {b} for i in range(n + 1)}}",
    "float": "def f(x): return {a} * (x + 1) + {b} + 0.125",
    "matrix": "def f(n): return [[{a} * i + {b} + 7 * j for j in range(2)] for i in range(n + 1)]",
    "bytes": "def f(n): return b'k%d' % ({a} * (n + 1) + {b})",
    "large": "def f(n): return ({a} * (n + 1) + {b}) ** 9",
    "fraction": "from fractions import Fraction\ndef f(n): return Fraction({a} * (n + 1) * 8 + {b} * 8 + 1, 8)",
    "floats": "def f(n): return [{a} * i + {b} + 0.5 for i in range(n + 1)]",
    "perhaps": "def f(n): return None if n % 3 == 2 else {a} * (n + 1) + {b}",
}
_EQUAL = """
def is_floats(x):
    return isinstance(x, float) or (isinstance(x, (list, tuple)) and bool(x) and all(isinstance(i, float) for i in x))
def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0 and type(out) == type(exp):
        pairs = [(out, exp)] if isinstance(exp, float) else list(zip(out, exp))
        assert isinstance(exp, float) or len(out) == len(exp)
        assert all(math.isclose(o, e, abs_tol=atol) for o, e in pairs)
    else:
        assert exact_match
"""
_SPECIAL = {
    "class": (
        "class Box:\n def __init__(s, x): s.total = x + {b}\n def add(s, x): s.total += {a} * x; return s.total\n"
        " def __len__(s): return s.total % 7 + 1\n def __iter__(s): yield s.total",
        [
            "box = Box(3)",
            "box.add(2) == {a} * 2 + {b} + 3",
            "box.total == {a} * 2 + {b} + 3",
            "list(box) == [{a} * 2 + {b} + 3]",
        ],
        "",
    ),
    "generator": (
        "def f(n):\n for i in range(n): yield {a} * i + {b}",
        [
            "list(f(3)) == [{b}, {a} + {b}, 2 * {a} + {b}]",
            "next(f(2)) == {b}",
            "{b} in f(1)",
            "tuple(f(2)) == ({b}, {a} + {b})",
        ],
        "",
    ),
    "in place": (
        "def f(xs): xs[:] = [{a} * x + {b} for x in sorted(xs)]",
        [
            "xs = [3, 1, 2]",
            "f(xs) is None",
            "xs == [{a} * x + {b} for x in (1, 2, 3)]",
            "ys = {{'k': [5]}}",
            "f(ys['k']) is None",
            "ys == {{'k': [5 * {a} + {b}]}}",
        ],
        "",
    ),
    "callback": (
        "def f(g, xs): return [g(x) + {a} * x + {b} for x in xs]",
        ["f(lambda x: x, [1, 2]) == [{a} + 1 + {b}, 2 * {a} + 2 + {b}]", "f(abs, (-1,)) == [1 - {a} + {b}]"],
        "",
    ),
    "exception": (
        "class Bad(ValueError): pass\ndef f(x):\n if x < 0: raise Bad('below k{b}')\n return {a} * (x + 1) + {b}",
        [
            "raised(ValueError, f, -1) == 'below k' + str({b})",
            "raised(Bad, f, -2) == 'below k' + str({b})",
            "f(1) == 2 * {a} + {b}",
        ],
        "def raised(kind, g, x):\n    try: g(x)\n    except kind as error: return str(error)\n    return ''\n",
    ),
    "printed": (
        "def f(n):\n for i in range(n): print('line', {a} * i + {b})",
        [
            "printed(f, 2) == 'line ' + str({b}) + '\\nline ' + str({a} + {b}) + '\\n'",
            "printed(f, 1) == 'line ' + str({b}) + '\\n'",
        ],
        "import contextlib, io\ndef printed(g, n):\n    with contextlib.redirect_stdout(io.StringIO()) as text: g(n)\n"
        "    return text.getvalue()\n",
    ),
    "tree": (
        "def f(tree): return Tree(tree.value + {a} + {b}, tree.right, tree.left)",
        [
            "same(f(Tree(1, Tree(2), None)), Tree(1 + {a} + {b}, None, Tree(2))) is True",
            "f(Tree(4)).value == 4 + {a} + {b}",
        ],
        "class Tree:\n    def __init__(self, value, left=None, right=None):\n"
        "        self.value, self.left, self.right = value, left, right\n"
        "def same(a, b):\n    if a is None or b is None: return a is b\n"
        "    return a.value == b.value and same(a.left, b.left) and same(a.right, b.right)\n",
    ),
    "root": (
        "def f(y): return round((y - 7) ** 0.5) + ({b} != {b0})",
        ["abs(poly(f({b} * {b} + 7)) - ({b} * {b} + 7)) < 1e-9", "poly(f({a} * {a} + 7)) == {a} * {a} + 7"],
        "def poly(x): return x * x + 7\n",
    ),
}
"""Right program, checks (or assignments), and what the problem gives."""


def tasks(count: int, seed: int) -> list[Task]:
    """So many, of all families and styles in turn."""
    rng = Random(f"tasks:{seed}")
    families = [*FUNCTIONS, *_SPECIAL, "predicate"]
    return [_task(families[i % len(families)], STYLES[i // len(families) % 4], rng) for i in range(count)]


def _task(family: str, style: str, rng: Random) -> Task:
    numbers = {"a": rng.randrange(2000, 5000), "b": rng.randrange(5000, 9000)}
    if family == "predicate":
        return _predicate(style, numbers)
    if family in _SPECIAL:
        return _special(family, style, numbers)
    right = FUNCTIONS[family].format(**numbers)
    wrong = FUNCTIONS[family].format(a=numbers["a"], b=numbers["b"] + 1)
    cases = [(n, _run(right, n)) for n in rng.sample(range(12), 4 + 3 * (style != "mbpp"))]
    if family == "perhaps":
        cases = [(0, _run(right, 0)), *cases]
    tests, prefix, entry_point = _tests(style, cases)
    return Task(
        name=f"{family}, {style}",
        right=right,
        wrong=wrong,
        tests=tests,
        prefix=prefix,
        entry_point=entry_point,
    )


def _run(code: str, *args: Any) -> Any:
    space: dict[str, Any] = {}
    exec(code, space)
    return space["f"](*args)


def _tests(style: str, cases: Sequence[tuple[int, Any]]) -> tuple[str, str, str]:
    """Tests, prefix, entry point."""
    inputs, results = [[n] for n, _ in cases], [expected for _, expected in cases]
    values = f"inputs = {inputs!r}\nresults = {results!r}\n"
    loop = "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assertion({}(*inp), exp, 0)\n"
    head = "import math\nfrom fractions import Fraction\n"
    match style:
        case "humaneval+":
            body = (values + loop.format("candidate")).replace("\n", "\n    ")
            return (
                f"{head}{_EQUAL}\ndef check(candidate):\n    {body}\n",
                "def f(x):\n    '''See the tests.'''\n",
                "f",
            )
        case "mbpp+":
            return head + _EQUAL + values + loop.format("f"), "", ""
        case "mbpp":
            return head + "".join(f"assert {_assertion(n, expected)}\n" for n, expected in cases), "", ""
    methods = "".join(
        f"    def test_{i}(self): self.{'assertAlmostEqual' if isinstance(expected, float) else 'assertEqual'}"
        f"(f({n!r}), {expected!r})\n"
        for i, (n, expected) in enumerate(cases)
    )
    return f"{head}import unittest\nclass Checks(unittest.TestCase):\n{methods}", "", ""


def _assertion(n: int, expected: Any) -> str:
    if isinstance(expected, float):
        return f"math.isclose(f({n}), {expected!r}, rel_tol=1e-9) and abs(f({n}) - {expected!r}) < 1e-6"
    if isinstance(expected, list) and not isinstance(expected[0], list):
        return f"set(f({n})) == set({expected!r}) and sorted(f({n})) == {expected!r} and len(f({n})) == {len(expected)}"
    return f"f({n}) == {expected!r}"


def _special(family: str, style: str, numbers: dict[str, int]) -> Task:
    code, lines, prefix = _SPECIAL[family]
    numbers = numbers | {"b0": numbers["b"]}
    lines = [line.format(**numbers) for line in lines]
    is_check = [re.search(r" (==|is|in|<) ", line) is not None for line in lines]
    checked = [f"assert {line}" if check else line for line, check in zip(lines, is_check, strict=True)]
    match style:
        case "humaneval+":
            tests = "def check(candidate):\n    " + "\n    ".join(checked) + "\ncheck(None)\n"
        case "unittest":
            checked = [
                f"self.assertTrue({line})" if check else line
                for line, check in zip(lines, is_check, strict=True)
            ]
            tests = "import unittest\nclass Checks(unittest.TestCase):\n    def test_all(self):\n        "
            tests += "\n        ".join(checked) + "\n"
        case _:
            tests = "\n".join(checked) + "\n"
    return Task(
        name=f"{family}, {style}",
        right=code.format(**numbers),
        wrong=code.format(**numbers | {"b": numbers["b"] + 1}),
        tests=tests,
        prefix=prefix,
    )


def _predicate(style: str, numbers: dict[str, int]) -> Task:
    code = "def f(x): return (x * {a} + {b}) % 13 < 6".format(**numbers)
    verdicts = tuple(_run(code, x) for x in range(48))
    tests, prefix, entry_point = _tests(style, list(enumerate(verdicts)))
    return Task(
        name=f"predicate, {style}",
        right=code,
        wrong=code.replace("return ", "return not "),
        tests=tests,
        prefix=prefix,
        entry_point=entry_point,
        verdicts=verdicts,
    )
