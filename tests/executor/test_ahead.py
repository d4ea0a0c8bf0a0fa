"""Rule rewards begun while other responses are decoded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import pytest

from executor.rewards import rules
from executor.rewards.ahead import EarlyRules
from executor.rewards.rules import Plain, Scorer
from executor.samples import Completion, Sample, Scored
from executor.settings import RewardRule
from rlhfsim.errors import RlhfsimError


def _completion(number: int, tokens: list[int]) -> Completion:
    return Completion(
        id=number,
        tokens=np.array(tokens, np.int64),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int32),
        finish="stop",
    )


def _sample(completion: Completion) -> Sample:
    if completion.id == 9:
        raise KeyError(9)
    return Sample(
        id=completion.id,
        group=0,
        prompt=np.ones(1, np.int64),
        response=completion.tokens,
        finish="stop",
        versions=completion.versions,
        rollout_logprobs=completion.logprobs,
    )


def _texts(samples: Sequence[Sample]) -> list[Plain]:
    return [("", "".join(map(str, s.response.tolist())), "", {}) for s in samples]


def test_a_response_is_scored_once_and_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[str] = []
    both, first_two = threading.Event(), [_completion(0, [1]), _completion(1, [1, 2])]

    def length(response: str) -> float:
        scored.append(response)
        if len(scored) >= 2:
            both.set()
        return float(len(response))

    monkeypatch.setattr(rules, "digits_share", length)
    with Scorer([RewardRule(kind="digits", weight=0.5)], workers=2) as scorer:
        early = EarlyRules(scorer, _texts, _sample)
        early.ahead([first_two[0]])
        early.ahead([first_two[1], _completion(9, [4])])
        assert both.wait(10.0)
        samples = [_sample(c) for c in (*first_two, _completion(2, [3, 3, 3]))]
        assert [s.total for s in early(samples)] == [0.5, 1.0, 1.5]
        early.ahead([_completion(0, [7, 7])])
        assert [s.total for s in early([_sample(_completion(0, [5, 5, 5]))])] == [1.5]
    assert {"1", "12", "333", "555"} <= set(scored)
    assert (scored.count("1"), scored.count("12")) == (1, 1)


def test_responses_that_arrive_together_are_scored_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[int]()

    def start(scorer: Scorer, samples: Callable[[], Sequence[Plain]]) -> Future[list[Scored]]:
        started.append(len(samples()))
        return usual(scorer, samples)

    usual = Scorer.start
    monkeypatch.setattr(Scorer, "start", start)
    monkeypatch.setattr(rules, "digits_share", len)
    together = [_completion(i, [1] * (i + 1)) for i in range(5)]
    with Scorer([RewardRule(kind="digits")], workers=2) as scorer:
        early = EarlyRules(scorer, _texts, _sample)
        early.ahead([*together, _completion(9, [4])])
        early.ahead([_completion(9, [4])])
        assert [s.total for s in early([_sample(c) for c in reversed(together)])] == [5, 4, 3, 2, 1]
    assert started == [5]


def test_an_error_waits_until_its_sample_is_asked_for() -> None:
    rule = RewardRule(kind="function", target="nosuchmodule:nosuchfunction", retries=0)
    with Scorer([rule], workers=1) as scorer:
        early = EarlyRules(scorer, _texts, _sample)
        early.ahead([_completion(0, [1])])
        with pytest.raises(RlhfsimError, match="nosuchmodule"):
            early([_sample(_completion(0, [1]))])
