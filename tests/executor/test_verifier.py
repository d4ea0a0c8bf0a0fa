"""Tests of generated code: what reaches the program and what comes back, and who decides."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from executor.rewards.rules import SampleText, Scorer
from executor.rewards.sandbox import CodeRun, Sandbox
from executor.settings import RewardRule
from rlhfsim.errors import RlhfsimError

TREE = """
class Tree:
    def __init__(self, value, left=None, right=None): self.value, self.left, self.right = value, left, right
def tree(values): return Tree(*values)
def same(a, b): return (a.value, a.left, a.right) == (b.value, b.left, b.right)
"""
PASSING = {
    "data of all kinds": (
        "def f(x): return x",
        "import collections, datetime, decimal, fractions, math\n"
        "for x in (None, True, 2**200, -0.5, 'a\\ud800', b'\\xff', (1, [2]), {1: {2}}, frozenset([3]), 1j, range(3),"
        " decimal.Decimal('1.10'), fractions.Fraction(1, 3), datetime.date(2026, 1, 2), datetime.timedelta(1),"
        " collections.Counter('aab'), collections.deque([1]), bytearray(b'x'), int):\n"
        "    assert f(x) == x and type(f(x)) is type(x)\n"
        "assert math.isnan(f(math.nan)) and list(f(iter([1, 2]))) == [1, 2] and f(len)('abc') == 3",
    ),
    "named tuples": (
        "import collections; f = lambda: collections.namedtuple('P', 'x y')(1, 2)",
        "assert f() == (1, 2) and f().y == 2",
    ),
    "in place": (
        "def f(x): x[0].append(x.pop())",
        "x = [[1], 2]; y = x[0]; f(x); assert x == [[1, 2]] and y is x[0]",
    ),
    "a function of the tests": (
        "def f(g, xs): return sorted(xs, key=g), g(len(xs))",
        "assert f(lambda x: -x, (1, 3, 2)) == ([3, 2, 1], -3)",
    ),
    "objects": (
        "class P:\n def __init__(self, x): self.x = x\n def __add__(self, o): return P(self.x + o.x)\n"
        " def __eq__(self, o): return self.x == o.x\n def __repr__(self): return f'P({self.x})'\n"
        " def __len__(self): return self.x\n def __getitem__(self, i): return (7, 8)[i]\n",
        "a = P(1) + P(2); assert a == P(3) and a.x == 3 and str([a]) == '[P(3)]' and len(a) == 3 and bool(a)\n"
        "assert a[1] == 8 and list(a) == [7, 8] and 8 in a and isinstance(a, P); a.x = 5; assert a.x == 5 and a != 5",
    ),
    "generators": ("def f(): yield from 'ab'", "g = f(); assert next(g) == 'a' and list(g) == ['b']"),
    "exceptions": (
        "class Bad(ValueError): pass\ndef f(x): raise Bad('no', x) if x else KeyError('k')",
        "try: f(3); assert False\nexcept Bad as e: assert e.args == ('no', 3)\n"
        "try: f(0); assert False\nexcept KeyError as e: assert e.args == ('k',)",
    ),
    "printed": (
        "def f(): print('hello')",
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as t: f()\n"
        "assert t.getvalue() == 'hello\\n'",
    ),
    "a built-in's name": ("def sum(a, b): return a + b + 1", "assert sum(10, 15) == 26"),
    "a module unsaid": ("def f(): return 0.1 + 0.2", "assert math.isclose(f(), 0.3)"),
    "state (data of the program as it was at the start)": (
        "n = [0]\ndef f(): n[0] += 1; return n[0]",
        "assert f() == 1 and f() == 2 and n == [0]",
    ),
}
FAILING = {
    "a helper of the prefix is the prefix's": (
        "    return 1\ndef poly(x): return 0",
        "assert abs(poly(f())) < 1",
        "def poly(x): return x + 1\ndef f():\n    '''A root.'''\n",
    ),
    "an assertion in a function of the tests": (
        "def f(g):\n try: g(1)\n except AssertionError: pass",
        "def g(x): assert x == 2\nf(g)",
        "",
    ),
    "no exception is swallowed": (
        "class f:\n def __enter__(s): return s\n def __exit__(s, *a): return True",
        "with f() as x: assert x == 3",
        "",
    ),
    "another name for all exceptions": (
        "Bad = AssertionError\ndef f(): pass",
        "try: f(); assert False\nexcept Bad: pass",
        "",
    ),
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as made:
        yield made


@pytest.mark.parametrize("name", PASSING)
def test_right_programs_pass(sandbox: Sandbox, name: str) -> None:
    code, tests = PASSING[name]
    outcome = sandbox.run(CodeRun(code=code, tests=tests))
    assert (outcome.status, outcome.error) == ("passed", "")


@pytest.mark.parametrize("name", FAILING)
def test_the_program_does_not_decide(sandbox: Sandbox, name: str) -> None:
    code, tests, prefix = FAILING[name]
    assert sandbox.run(CodeRun(code=code, tests=tests, prefix=prefix)).error.startswith("AssertionError")


def test_check_is_called_with_the_entry_point_and_prefix_classes_go_by_value(sandbox: Sandbox) -> None:
    code = "class Solution:\n def invert(self, root): return Tree(root.value, root.right, root.left)"
    tests = "def check(candidate):\n assert same(candidate(root=tree([1, 2, 3])), tree([1, 3, 2]))"
    for entry_point, status in (("Solution().invert", "passed"), ("Solution().revert", "failed")):
        program = CodeRun(code=code, tests=tests, prefix=TREE, entry_point=entry_point)
        assert sandbox.run(program).status == status
    liar = (
        "Tree.same = lambda *a: True\nclass Liar(Tree):\n __eq__ = lambda *a: True\ndef f(): return Liar(0)"
    )
    assert (
        sandbox.run(CodeRun(code=liar, tests="assert same(f(), tree([1]))", prefix=TREE)).status == "failed"
    )


def test_a_module_is_allowed_by_a_setting_or_named(caplog: pytest.LogCaptureFixture) -> None:
    sample = SampleText(
        "", "import numpy as np\ndef f(n): return np.arange(n)", "", {"tests": "assert f(3).sum() == 3"}
    )
    with Scorer([RewardRule(kind="code", modules=("numpy",))], workers=1) as scorer:
        assert scorer.score([sample])[0].total == 1
    with caplog.at_level(logging.WARNING), Scorer([RewardRule(kind="code")], workers=1) as scorer:
        assert [s.total for s in scorer.score([sample, sample])] == [0, 0]
    assert [r.getMessage().count("rewards[].modules") for r in caplog.records] == [1]
    with pytest.raises(RlhfsimError, match="cannot be imported here"):
        Scorer([RewardRule(kind="code", modules=("no_such_module",))])


CASES = """
import unittest
class Squares(unittest.TestCase):
    def test_two(self): self.assertEqual(f(2), 4)
    def test_below_zero(self):
        with self.assertRaises(ValueError): f(-1)
"""


@pytest.mark.parametrize(
    "run",
    [
        "",
        "unittest.main()",
        "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(Squares))",
    ],
)
def test_cases_of_unittest_are_run_and_counted_whoever_runs_them(sandbox: Sandbox, run: str) -> None:
    right = "def f(x):\n if x < 0: raise ValueError\n return x * x"
    for code, status in ((right, "passed"), ("def f(x): return x * x", "failed")):
        assert sandbox.run(CodeRun(code=code, tests=CASES + run)).status == status


def test_an_exception_of_the_prefix_is_caught_by_its_name(sandbox: Sandbox) -> None:
    prefix = "class Bad(Exception): pass\n"
    tests = "try: f()\nexcept Bad as error: assert error.args == (3,)\nelse: assert False"
    assert sandbox.run(CodeRun(code="def f(): raise Bad(3)", tests=tests, prefix=prefix)).status == "passed"
