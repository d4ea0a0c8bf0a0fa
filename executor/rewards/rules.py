r"""Rule rewards: every rule gives each response a value, the reward is their sum by weight.

answer    1 where the final answer is right (executor/rewards/answers.py), else 0
format    1 where `pattern` is found in the response (anchor it to match the whole), else 0; also 0 where the
          search runs past `timeout_s`: a response must not be able to stop the run
math      as answer, or where math-verify (optional) finds LaTeX or expressions equal: \frac12 and 0.5
digits    share of digits in the response
code      1 where the response's program passes all tests of the problem in the sandbox, else 0
function  what the user's function returns
judge     the score of a remote model, 0 to 1 (judge.py)

Tests of a code problem are in `meta["tests"]`: Python statements (a text, or a list of texts), which call
the program from a process of their own (verifier.py); or a list of {"input": ..., "output": ...}, each run
of its own, its output compared here with spaces collapsed. `meta["prefix"]` is put before the program (a
function's signature), `meta["entry_point"]` says what `check(candidate)` of the tests is called with. A
program in a fenced block is taken from the last one.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from executor.rewards.answers import digits_share, is_right
from executor.rewards.calls import Caller, CallError, CallTimeout
from executor.rewards.judge import JudgeError, RemoteJudge
from executor.rewards.operations import RuleCounts, RuleWatch, Tried
from executor.rewards.sandbox import CodeRun, Sandbox
from executor.samples import Scored
from executor.settings import OnError, RewardRule
from rlhfsim.errors import RlhfsimError
from rlhfsim.extras import need

_log = logging.getLogger(__name__)
FENCE = re.compile(r"```[ \t]*\w*[ \t]*\n(.*?)```", re.DOTALL)
_MATCHES, _IS_EQUAL = "executor.rewards.calls:matches", "executor.rewards.expressions:is_equal"


Plain = tuple[str, str, str, Mapping[str, Any]] | tuple[str, str, str, Mapping[str, Any], int]
"""(prompt, response, answer, meta), and the number of the sample in the run."""


class SampleText(NamedTuple):
    """A sample as text; a plain tuple of the four will do."""

    prompt: str
    response: str
    answer: str
    meta: Mapping[str, Any]
    number: int | None = None
    """Number of the sample in the run."""


class Scorer:
    """The rules of a run with their worker processes; `start` scores while the caller goes on."""

    def __init__(self, rules: Sequence[RewardRule], workers: int | None = None) -> None:
        """`workers` processes at most for code and for functions; None: one a core that this process may use.

        Raises:
            RlhfsimError: a rule lacks its pattern or target, or untrusted code cannot be confined here.
        """
        for rule in rules:
            _check(rule)
        self.rules = tuple(rules)
        kinds = [rule.kind for rule in rules]
        counts = [kinds[: i + 1].count(kind) for i, kind in enumerate(kinds)]
        self.names = [k if n == 1 else f"{k}#{n}" for k, n in zip(kinds, counts, strict=True)]
        self._workers = workers or len(os.sched_getaffinity(0))
        coded = [rule for rule in rules if rule.kind == "code"]
        modules = sorted({name for rule in coded for name in rule.modules})
        self._watches = [RuleWatch() for _ in rules]
        self._sandbox = Sandbox(self._workers, modules=modules) if coded else None
        self._refused: set[str] = set()
        self._callers: queue.SimpleQueue[Caller] = queue.SimpleQueue()
        self._all_callers = [Caller() for _ in range(self._workers)]
        for caller in self._all_callers:
            self._callers.put(caller)
        self._samples = ThreadPoolExecutor(self._workers, thread_name_prefix="reward")
        self._judges = {
            rule: (RemoteJudge(rule.judge), ThreadPoolExecutor(rule.judge.concurrency, "judge"))
            for rule in rules
            if rule.judge is not None
        }
        most = max([self._workers, *(rule.judge.concurrency for rule in rules if rule.judge)])
        self._batches = ThreadPoolExecutor(most, thread_name_prefix="rewards")

    def score(self, samples: Sequence[Plain]) -> list[Scored]:
        """Score all samples, in order.

        Raises:
            RlhfsimError: a user's function failed, ran too long or gave no number; code without tests.
        """
        if not self.rules:
            return [Scored(total=0.0, by_rule={}) for _ in samples]
        texts = [SampleText(*sample) for sample in samples]
        watched = zip(self.rules, self._watches, strict=True)
        columns = [list(column) for column in [self._column(*pair, texts) for pair in watched]]
        scored = []
        for values in zip(*columns, strict=True):
            total = sum(rule.weight * value for rule, value in zip(self.rules, values, strict=True))
            by_rule = {name: v for name, v in zip(self.names, values, strict=True) if math.isfinite(v)}
            scored.append(Scored(total=total if math.isfinite(total) else None, by_rule=by_rule))
        return scored

    def probe(self, samples: Sequence[Plain]) -> None:
        """Score samples before a run starts: a rule that can score none ends it, whatever `on_error` says.

        Raises:
            RlhfsimError: as `score`.
        """
        texts = [SampleText(*sample) for sample in samples]
        for rule, watch in zip(self.rules, self._watches, strict=True):
            dropping, stopping = self._variant(rule, "drop"), self._variant(rule, "stop")
            if rule.on_error == "stop" or not any(map(math.isfinite, self._column(dropping, watch, texts))):
                list(self._column(stopping, watch, texts))

    def taken(self) -> dict[str, RuleCounts]:
        """What happened to each rule since this was last called."""
        return {name: watch.taken() for name, watch in zip(self.names, self._watches, strict=True)}

    def _variant(self, rule: RewardRule, on_error: OnError) -> RewardRule:
        """The rule with another answer to errors; its judge is the same."""
        variant = replace(rule, on_error=on_error)
        if rule in self._judges:
            self._judges[variant] = self._judges[rule]
        return variant

    def start(self, samples: Callable[[], Sequence[Plain]]) -> Future[list[Scored]]:
        """Score in the background, several batches at once where there are workers."""
        return self._batches.submit(lambda: self.score(samples()))

    def close(self) -> None:
        """Finish what has begun, then end all workers."""
        for judge, _ in self._judges.values():
            judge.close()
        self._batches.shutdown(cancel_futures=True)
        self._samples.shutdown()
        for _, threads in self._judges.values():
            threads.shutdown()
        for caller in self._all_callers:
            caller.close()
        if self._sandbox:
            self._sandbox.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _column(self, rule: RewardRule, watch: RuleWatch, samples: Sequence[SampleText]) -> Iterable[float]:
        """One rule's value of every sample; those of workers are on their way."""
        match rule.kind:
            case "answer":
                return [float(is_right(s.response, s.answer)) for s in samples]
            case "digits":
                return [digits_share(s.response) for s in samples]
            case "format":
                return self._each(
                    samples, lambda _, s: self._judged(rule, watch, s, _MATCHES, rule.pattern, s.response)
                )
            case "math":
                return self._each(samples, lambda _, s: self._math(rule, watch, s))
            case "code":
                return self._each(samples, lambda i, s: self._code(rule, watch, i, s))
            case "function":
                return self._each(
                    samples, lambda i, s: _watched(rule, watch, s, partial(self._first_value, rule, i, s))
                )
            case "judge":
                judge, threads = self._judges[rule]
                return threads.map(
                    lambda s: _watched(rule, watch, s, partial(_score_of, judge, rule, s)), samples
                )

    def _each(
        self, samples: Sequence[SampleText], value: Callable[[int, SampleText], float]
    ) -> Iterable[float]:
        return self._samples.map(value, range(len(samples)), samples)

    def _judged(
        self, rule: RewardRule, watch: RuleWatch, sample: SampleText, target: str, *args: Any
    ) -> float:
        """What a function of ours says of a response; 0 where the response makes it run past the limit."""
        with watch.sample(sample.prompt, dropped=False, number=sample.number) as tried:
            try:
                value = float(self._call(target, rule.limit_s, *args))
            except CallTimeout as error:
                tried(error, timed_out=True)
                _log.warning("rule %s: %s ran past %g s: 0", rule.kind, target, rule.limit_s)
                return 0.0
            tried(None)
            return value

    def _math(self, rule: RewardRule, watch: RuleWatch, sample: SampleText) -> float:
        if is_right(sample.response, sample.answer):
            return 1.0
        return self._judged(rule, watch, sample, _IS_EQUAL, sample.response, sample.answer)

    def _first_value(self, rule: RewardRule, index: int, sample: SampleText, tried: Tried) -> float:
        """The user's value."""
        for left in reversed(range(rule.tries)):
            try:
                value = self._asked(rule, index, sample)
                tried(None)
                return value
            except RlhfsimError as error:
                late = error.code == "reward-timeout"
                tried(error, timed_out=late, again=left > 0)
                if left == 0:
                    raise
                _log.warning("%s", error)
        raise AssertionError("the last try returns or raises")

    def _asked(self, rule: RewardRule, index: int, sample: SampleText) -> float:
        assert rule.target, "checked at the start"
        # an empty answer is none: rows whose answer is empty are bad where rules use answers
        args = (sample.prompt, sample.response, sample.answer or None, dict(sample.meta))
        try:
            value = float(self._call(rule.target, rule.limit_s, *args))
        except CallTimeout as error:
            raise _failed("reward-timeout", rule.target, index, sample, str(error)) from None
        except (CallError, TypeError, ValueError) as error:
            raise _failed("reward-function", rule.target, index, sample, str(error)) from None
        if not math.isfinite(value):
            raise _failed("reward-function", rule.target, index, sample, f"it returned {value}")
        return value

    def _code(self, rule: RewardRule, watch: RuleWatch, index: int, sample: SampleText) -> float:
        assert self._sandbox, "made at the start"
        with watch.sample(sample.prompt, dropped=False, number=sample.number) as tried:
            for program, output in _programs(rule, index, sample):
                outcome = self._sandbox.run(program)
                tried(None, timed_out=outcome.status == "timeout")
                if "rewards[].modules" in outcome.error and outcome.error not in self._refused:
                    self._refused.add(outcome.error)
                    _log.warning("a program fails: %s", outcome.error)
                wrong = output is not None and outcome.output.split() != output.split()
                if outcome.status != "passed" or wrong:
                    return 0.0
        return 1.0

    def _call(self, target: str, timeout_s: float, *args: Any) -> Any:
        caller = self._callers.get()  # free soon: no more threads than callers
        try:
            return caller.call(target, *args, timeout_s=timeout_s)
        finally:
            self._callers.put(caller)


def program_of(response: str) -> str:
    """The program in a response: its last fenced block, else all of it."""
    blocks = FENCE.findall(response)
    return str(blocks[-1]) if blocks else response


def _programs(rule: RewardRule, index: int, sample: SampleText) -> list[tuple[CodeRun, str | None]]:
    """What to run for one sample, with the output expected of each run (None: its tests decide)."""
    tests = sample.meta.get("tests")
    if not tests:
        raise RlhfsimError(
            "code-without-tests",
            f"sample {index} has no tests for the code rule: {sample.prompt[:60]!r}",
            help="give every problem a column `tests`: statements, or a list of input and output",
        )
    program = CodeRun(
        code=program_of(sample.response),
        prefix=str(sample.meta.get("prefix", "")),
        entry_point=str(sample.meta.get("entry_point", "")),
        wall_s=rule.limit_s,
        memory_bytes=int(rule.memory_bytes),
    )
    if isinstance(tests, str) or all(isinstance(test, str) for test in tests):
        return [(replace(program, tests=tests if isinstance(tests, str) else "\n".join(tests)), None)]
    return [(replace(program, stdin=str(test["input"])), str(test["output"])) for test in tests]


def _watched(
    rule: RewardRule, watch: RuleWatch, sample: SampleText, value: Callable[[Tried], float]
) -> float:
    """A value; where all tries fail what `on_error` says: 0, NaN for a sample to be dropped, or none."""
    try:
        with watch.sample(sample.prompt, dropped=rule.on_error == "drop", number=sample.number) as tried:
            return value(tried)
    except RlhfsimError as error:
        if rule.on_error == "stop":
            raise
        _log.warning("%s", error)
        return 0.0 if rule.on_error == "zero" else math.nan


def _score_of(judge: RemoteJudge, rule: RewardRule, sample: SampleText, tried: Tried) -> float:
    """The remote judge's score."""
    texts = {"prompt": sample.prompt, "response": sample.response, "answer": sample.answer}
    try:
        return judge.score(texts, rule.limit_s, rule.tries - 1, tried)
    except JudgeError as error:
        raise RlhfsimError(
            "reward-judge",
            f"the judge gave no score (prompt {sample.prompt[:60]!r}): {error}",
            help="see url, timeout_s and retries of the rule; "
            "on_error: drop or zero lets a run go on while others are scored",
        ) from None


def _check(rule: RewardRule) -> None:
    for kind, needed in (("format", "pattern"), ("function", "target"), ("judge", "judge")):
        if rule.kind == kind and not getattr(rule, needed):
            raise RlhfsimError("reward-rule", f"rule of kind {rule.kind!r} needs a {needed}")
    if rule.judge and rule.kind != "judge":
        raise RlhfsimError("reward-rule", f"rule of kind {rule.kind!r} takes no judge", help="kind: judge")
    if rule.kind == "math":
        need("math_verify", purpose="a reward rule of kind 'math'", otherwise="or use kind: answer")
    if rule.pattern is not None:
        try:
            re.compile(rule.pattern)
        except re.error as error:
            raise RlhfsimError(
                "reward-pattern", f"pattern {rule.pattern!r} is no regular expression: {error}"
            ) from None
    if rule.target is not None and ":" not in rule.target:
        raise RlhfsimError(
            "reward-target",
            f"target {rule.target!r} does not name a function",
            help="write module:function, importable in the run's environment",
        )


def _failed(code: str, target: str, index: int, sample: SampleText, reason: str) -> RlhfsimError:
    return RlhfsimError(
        code,
        f"reward function {target} failed on sample {index} (prompt {sample.prompt[:60]!r}): {reason}",
        help="it gets (prompt, response, answer, meta) and returns a finite number within timeout_s; "
        "on_error: drop or zero lets a run go on while others are scored",
    )
