"""Rule rewards: matchers, formats, code, functions of the user, weights, limits."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor.rewards.answers import digits_share, is_right
from executor.rewards.calls import Caller, CallError, CallTimeout
from executor.rewards.rules import SampleText, Scored, Scorer, program_of
from executor.settings import RewardRule
from rlhfsim.errors import RlhfsimError

FUNCTIONS = """
import os, time
def length(prompt, response, answer, meta): return len(response) * meta.get("scale", 1)
def broken(prompt, response, answer, meta): raise KeyError("no such thing")
def broken_for_ab(prompt, response, answer, meta): assert response != "ab", "not ab"; return 1
def slow(prompt, response, answer, meta): time.sleep(30)
def lazy(prompt, response, answer, meta): time.sleep(0.5); return 1
def text(prompt, response, answer, meta): return "good"
def nothing(prompt, response, answer, meta): return float("nan")
def die(prompt, response, answer, meta): os._exit(3)
def fails_once(prompt, response, answer, meta):
    if not os.path.exists(meta["mark"]):
        open(meta["mark"], "w").close()
        raise RuntimeError("not yet")
    return 1.0
def loud(prompt, response, answer, meta): print("hello"); return 1.0
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_rewards"


def score(rules: list[RewardRule], samples: list[Any]) -> list[Scored]:
    with Scorer(rules) as scorer:
        return scorer.score(samples)


def _text(response: str, answer: str = "", **meta: object) -> SampleText:
    return SampleText("a question", response, answer, meta)


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("19", "19", True),
        (" 19\n", "19", True),
        ("019", "19", True),
        ("+19", "19", True),
        ("19.0", "19", True),
        ("1,234", "1234", True),
        ("-5", "-5", True),
        ("\N{MINUS SIGN}5", "-5", True),
        ("-0", "0", True),
        ("5", "-5", False),
        ("191", "19", False),
        ("so 12 and 7 make 19.", "19", True),
        ("so 19 is made of 12 and 7", "19", False),
        ("12-5", "5", True),
        ("12-5", "-5", False),
        ("v2", "2", False),
        (r"19 or \boxed{20}", "20", True),
        (r"\boxed{19} or 20", "20", False),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
        (r"\boxed{20", "20", True),
        (r"\boxed{1{,}234}", "1234", True),
        (r"\boxed{1\,234}", "1,234", True),
        (r"\boxed{12 345 678}", "12345678", True),
        (r"\boxed{10,\!000}", "10000", True),
        (r"\boxed{\$1,234.50}", "1234.5", True),
        ("\\boxed{\N{EURO SIGN}5}", "$5.00", True),
        (r"\boxed{5.}", "5", True),
        (r"\boxed{1e3}", "1000", True),
        (r"\boxed{\text{Yes}}", "Yes", True),
        (r"\boxed{\text{2:30 PM}}", "2:30 PM", True),
        (r"\textbf{Answer: 5}", "5", True),
        ("12,34,567", "1234567", True),
        ("so 1234", "48 and 6 are 54\n#### 1,234", True),
        (r"\boxed{\text{B}}", "first A, then B\n#### B", True),
        ("54", "48 and 6 are 54\n#### 1,234", False),
        (r"\boxed{7}", r"We add 3 and 4: \boxed{3 + 4} is $\boxed{7}$.", True),
        ("4", r"We add 3 and 4: \boxed{3 + 4} is $\boxed{7}$.", False),
        ("the answer is 3/4", "4", False),
        (r"it is $\frac{3}{4}$", "4", False),
        ("so x^2", "2", False),
        (r"so $2^{10}$", "10", False),
        (r"\sqrt{2}", "2", False),
        ("at 2:30", "30", False),
        ("y=2x+3", "3", False),
        ("1,2", "12", False),
        ("3,14", "314", False),
        ("2024 123", "2024123", False),
        (">", ">", True),
        ("< ", ">", False),
        ("110", "110", True),
        ("0", "00", False),
        ("1", "01", False),
        (" 01", "01", True),
        ("a  b", "a b", True),
        ("", "19", False),
        ("", "", True),
        ("9" * 5000, "9" * 5000, True),
    ],
)
def test_answers_are_compared_by_value(response: str, answer: str, right: bool) -> None:
    assert is_right(response, answer) == right


def test_math_finds_equal_expressions_and_survives_endless_ones() -> None:
    pytest.importorskip("math_verify")
    rule = RewardRule(kind="math", timeout_s=4.0)
    with Scorer([rule], workers=1) as scorer:
        scored = scorer.score(
            [
                _text("19", "19"),
                _text(r"\boxed{\frac12}", "1/2"),
                _text(r"so $\sqrt{8}$", r"2\sqrt{2}"),
                _text(r"\boxed{3}", "4"),
                _text(r"\boxed{9^{9^{9^{9}}}}", "7"),
                _text(r"\boxed{0.5}", r"\frac{1}{2}"),
                _text("1", "01"),
            ]
        )
    assert [s.total for s in scored] == [1, 1, 1, 0, 0, 1, 0]


EQUAL = [
    (r"\boxed{\frac12}", "1/2"),
    (r"$\frac{3}{6}$", "0.5"),
    (r"I think 1/2", "0.5"),
    (r"\boxed{3\frac{1}{2}}", "3.5"),
    (r"\boxed{1.5\times10^3}", "1500"),
    (r"so $x=5$", "5"),
    (r"\boxed{x=5}", "5"),
    (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}"),
    (r"\boxed{(1,2)}", "(1, 2)"),
    (r"\boxed{(-\infty,2]\cup[3,\infty)}", r"(-\infty, 2] \cup [3, \infty)"),
    (r"\boxed{50\%}", "50%"),
    (r"\boxed{0.5}", "50%"),
    (r"\boxed{50}", "50%"),
    (r"\boxed{50\%}", "0.5"),
    (r"\boxed{50\%}", "50"),
    (r"half of 20\%: \boxed{0.1}", "10%"),
    (r"\boxed{5\text{ cm}}", "5"),
    (r"\boxed{\$5.00}", "5"),
    (r"the answer is $12$ dollars", "12 dollars"),
    (r"\boxed{10^\circ}", "10"),
    (r"\boxed{2\sqrt{2}}", r"$\sqrt{8}$"),
    (r"\boxed{\frac{1}{\sqrt2}}", r"\frac{\sqrt2}{2}"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2"),
    (r"\boxed{2x+1=y}", "y=2x+1"),
    (r"\boxed{2\pi}", "6.283185307"),
    (r"\boxed{\log_2 8}", "3"),
    (r"\boxed{5!}", "120"),
    (r"\boxed{\pm 2}", r"\{-2,2\}"),
    (r"\boxed{\text{B}}", "B"),
    (r"\boxed{1\,234 \text{ cm}}", "1234"),
    (r"\boxed{1 234}", "1234"),
    (r"\boxed{0.75}", "three of four\n#### 3/4"),
    (r"so $\frac{3}{4}$", r"Three of four, hence $\boxed{\frac34}$."),
]
DIFFERENT = [
    (r"\boxed{50\%}", "5"),
    (r"\boxed{5000\%}", "50%"),
    (r"\boxed{(1,2)}", "(2,1)"),
    (r"\boxed{[0,1]}", "[0,1)"),
    (r"\boxed{2}", "(x+1)^2"),
    (r"\boxed{x^2+2x+1}", "(x-1)^2"),
    (r"\boxed{\pi}", "3.14"),
    (r"\boxed{0.333}", r"\frac13"),
    (r"\boxed{-3}", "3"),
    (r"\boxed{10} and \boxed{20}", "10"),
    ("the answer is 3/4", "4"),
    (r"it is $\frac{3}{4}$", "4"),
    (r"\boxed{12, 345}", "12345"),
]


def test_typical_pairs_of_answers_are_equal_or_not_as_documented() -> None:
    expressions = pytest.importorskip("executor.rewards.expressions", reason="math-verify")
    assert [pair for pair in EQUAL if not expressions.is_equal(*pair)] == []
    assert [pair for pair in DIFFERENT if is_right(*pair) or expressions.is_equal(*pair)] == []


def test_math_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(RlhfsimError, match="needs math_verify") as caught:
        Scorer([RewardRule(kind="math")])
    assert "rlhfsim[math]" in str(caught.value.help)


def test_a_long_response_is_matched_in_time() -> None:
    start = time.monotonic()
    for text in (
        r"\text{" + " " * 10**6,
        "1 " * 10**6,
        r"\boxed{" + "1 234" * 10**5 + "}",
        "1" * 10**6,
        "-" * 10**6,
        "1," * 10**6,
        r"\boxed{" * 10**5,
        " " * 10**6,
    ):
        is_right(text, "7")
    assert time.monotonic() - start < 2.0


def test_digits_are_counted_by_share() -> None:
    assert digits_share("12ab") == 0.5
    assert digits_share("") == 0.0


def test_rules_are_summed_by_weight_and_named_apart() -> None:
    rules = [
        RewardRule(kind="answer", weight=2.0),
        RewardRule(kind="digits", weight=0.5),
        RewardRule(kind="format", pattern=r"\A\d+\Z"),
        RewardRule(kind="format", pattern="x", weight=-1.0),
    ]
    right, wrong = score(rules, [_text("19", "19"), _text("x9", "19")])
    assert right.by_rule == {"answer": 1.0, "digits": 1.0, "format": 1.0, "format#2": 0.0}
    assert right.total == 2.0 + 0.5 + 1.0
    assert wrong.total == 0.25 - 1.0


def test_no_rules_give_zero_and_no_samples_give_nothing() -> None:
    assert [scored.total for scored in score([], [("p", "r", "a", {})])] == [0.0]
    assert score([RewardRule(kind="answer")], []) == []


def test_a_response_that_makes_the_pattern_explode_gets_zero_in_time() -> None:
    rule = RewardRule(kind="format", pattern=r"\A(a+)+\Z", timeout_s=0.5)
    start = time.monotonic()
    with Scorer([rule], workers=1) as scorer:
        samples = [_text("a" * 40 + "b"), _text("aaa")]
        assert [scored.total for scored in scorer.score(samples)] == [0.0, 1.0]
    assert time.monotonic() - start < 10.0


@pytest.fixture(scope="module")
def coder() -> Iterator[Scorer]:
    with Scorer([RewardRule(kind="code", timeout_s=2.0)], workers=2) as scorer:
        yield scorer


def test_code_is_scored_by_its_tests(coder: Scorer) -> None:
    asserts = "assert twice(3) == 6\nassert twice(0) == 0"
    good, bad = "def twice(x): return 2 * x", "def twice(x): return x * x"
    samples = [
        _text(good, tests=asserts),
        _text(bad, tests=asserts),
        _text(good, tests=asserts.splitlines()),
        _text(f"Here it is:\n```python\n{good}\n```\nDone.", tests=asserts),
        _text("    return 2 * x", tests=asserts, prefix="def twice(x):\n"),
        _text("import sys; sys.exit(0)", tests=asserts),
        _text("while True: pass", tests=asserts),
        _text("no code at all", tests=asserts),
    ]
    assert [s.total for s in coder.score(samples)] == [1, 0, 1, 1, 1, 0, 0, 0]


def test_programs_are_scored_by_input_and_output(coder: Scorer) -> None:
    tests = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10"}]
    right = "a, b = map(int, input().split())\nprint(a + b)"
    fixed = "print(3)"
    quiet = "import os; os._exit(0)"
    found = coder.score([_text(code, tests=tests) for code in (right, fixed, quiet)])
    assert [scored.total for scored in found] == [1.0, 0.0, 0.0]


def test_a_code_problem_without_tests_is_named(coder: Scorer) -> None:
    with pytest.raises(RlhfsimError, match="sample 0 has no tests"):
        coder.score([_text("x = 1")])


def test_the_last_fenced_block_is_the_program() -> None:
    assert program_of("```\na\n```\nor\n```py\nb\n```") == "b\n"
    assert program_of("plain") == "plain"


def test_a_function_of_the_user_gets_the_sample(functions: str) -> None:
    rule = RewardRule(kind="function", target=f"{functions}:length")
    assert score([rule], [_text("abcd", scale=2)])[0].total == 8.0


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("broken", "reward-function", "no such thing"),
        ("missing", "reward-function", "missing"),
        ("text", "reward-function", "could not convert"),
        ("nothing", "reward-function", "returned nan"),
        ("die", "reward-function", "its process ended"),
        ("slow", "reward-timeout", "no result within 0.5 s"),
    ],
)
def test_a_failing_function_is_named_with_its_sample(
    functions: str, name: str, code: str, words: str
) -> None:
    rule = RewardRule(kind="function", target=f"{functions}:{name}", timeout_s=0.5)
    with pytest.raises(RlhfsimError, match=words) as caught:
        score([rule], [_text("abcd")])
    assert caught.value.code == code
    assert f"{functions}:{name} failed on sample 0" in caught.value.message


def test_a_reward_that_fails_is_tried_again_and_then_does_what_was_asked(
    functions: str, tmp_path: Path
) -> None:
    samples = [_text("abc"), _text("ab")]
    broken = RewardRule(kind="function", target=f"{functions}:broken", weight=2.0, retries=0)
    digits = RewardRule(kind="digits")
    cases: list[tuple[Any, list[float | None]]] = [("zero", [0.0, 0.0]), ("drop", [None, None])]
    for on_error, totals in cases:
        scored = score([replace(broken, on_error=on_error), digits], samples)
        assert [s.total for s in scored] == totals
        assert [("function" in s.by_rule, "digits" in s.by_rule) for s in scored] == [
            (on_error == "zero", True)
        ] * 2
    once = RewardRule(kind="function", target=f"{functions}:fails_once")
    assert score([once], [_text("abc", mark=str(tmp_path / "a"))])[0].total == 1.0
    with pytest.raises(RlhfsimError, match="not yet"):
        score([replace(once, retries=0)], [_text("abc", mark=str(tmp_path / "b"))])


def test_a_reward_that_cannot_run_is_known_before_the_run(functions: str) -> None:
    rule = RewardRule(kind="function", target="nosuchmodule:nosuchfunction", on_error="zero")
    with Scorer([rule]) as scorer, pytest.raises(RlhfsimError, match="nosuchmodule"):
        scorer.probe([("p", "1", "1", {})])
    with Scorer([RewardRule(kind="function", target=f"{functions}:length")]) as scorer:
        scorer.probe([("p", "1", "1", {"scale": 1})])
    some = RewardRule(kind="function", target=f"{functions}:broken_for_ab", retries=0)
    two = [("p", "ab", "1", {}), ("p", "abc", "1", {})]
    with Scorer([replace(some, on_error="drop")]) as scorer:
        scorer.probe(two)  # as the run itself will take it
        with pytest.raises(RlhfsimError, match="not ab"):
            scorer.probe(two[:1])
    with Scorer([some]) as scorer, pytest.raises(RlhfsimError, match="not ab"):
        scorer.probe(two)


def test_a_function_beside_the_users_settings_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_reward.py").write_text("def one(prompt, response, answer, meta):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    assert score([RewardRule(kind="function", target="my_reward:one")], [_text("a")])[0].total == 1.0


def test_a_worker_works_again_after_a_timeout_an_error_and_a_death(functions: str) -> None:
    caller = Caller()
    args = ("p", "abc", "", {})
    try:
        with pytest.raises(CallTimeout):
            caller.call(f"{functions}:slow", *args, timeout_s=0.3)
        with pytest.raises(CallError):
            caller.call(f"{functions}:die", *args, timeout_s=5.0)
        assert caller.call(f"{functions}:loud", *args, timeout_s=5.0) == 1.0
    finally:
        caller.close()


def test_scoring_goes_on_in_the_background(functions: str) -> None:
    rule = RewardRule(kind="function", target=f"{functions}:lazy")
    with Scorer([rule], workers=1) as scorer:
        scorer.score([_text("warm")])
        start = time.monotonic()
        running = scorer.start(lambda: [_text("a"), _text("b")])
        assert time.monotonic() - start < 0.2
        assert not running.done()
        assert [scored.total for scored in running.result(30.0)] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (RewardRule(kind="format"), "reward-rule"),
        (RewardRule(kind="function"), "reward-rule"),
        (RewardRule(kind="format", pattern="("), "reward-pattern"),
        (RewardRule(kind="function", target="no_colon"), "reward-target"),
    ],
)
def test_an_incomplete_rule_is_refused_at_the_start(rule: RewardRule, code: str) -> None:
    with pytest.raises(RlhfsimError) as caught:
        Scorer([rule])
    assert caught.value.code == code


def test_closing_leaves_no_process() -> None:
    def children() -> set[str]:
        found = set()
        for task in Path(f"/proc/{os.getpid()}/task").iterdir():
            found |= set((task / "children").read_text().split())
        return found

    before = children()
    rules = [RewardRule(kind="code"), RewardRule(kind="format", pattern="a")]
    with Scorer(rules, workers=2) as scorer:
        scorer.score([_text("x = 1", tests="assert x")])
        assert children() > before
    assert children() == before


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("The answer is - 72", "-72", True),
        ("The answer is - 72", "72", False),
        ("x = - 72.", "-72", True),
        ("- 72", "-72", True),
        (r"\boxed{- 72}", "-72", True),
        ("#### - 72", "-72", True),
        ("so 100 - 72", "-72", False),
        ("72", "#### - 72", False),
        ("-72", "#### - 72", True),
        ("total: -  1,072", "-1072", True),
    ],
)
def test_a_minus_apart_from_its_number_counts_unless_it_is_a_difference(
    response: str, answer: str, right: bool
) -> None:
    assert is_right(response, answer) is right
