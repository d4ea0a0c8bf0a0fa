"""Rule rewards of responses while others are still decoded: each is scored as soon as it arrives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from executor.rewards.operations import RuleCounts
from executor.rewards.rules import Plain, Scorer
from executor.samples import Completion, Sample, Scored, Tokens
from rlhfsim.errors import RlhfsimError


class RuleRewards:
    """Rule rewards; these are of a run that scores nothing."""

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        """One a sample."""
        return []

    def ahead(self, completions: Sequence[Completion]) -> None:
        """Responses have arrived, whose samples will be asked for."""

    def taken(self) -> Mapping[str, RuleCounts]:
        """What happened to each rule since this was last called."""
        return {}


class EarlyRules(RuleRewards):
    """The rules of a scorer."""

    def __init__(
        self,
        scorer: Scorer,
        texts: Callable[[Sequence[Sample]], list[Plain]],
        preview: Callable[[Completion], Sample],
    ) -> None:
        """`preview`: the sample that a completion will be."""
        self._scorer, self._texts, self._preview = scorer, texts, preview
        self._started: dict[int, tuple[Tokens, int, Future[list[Scored]]]] = {}

    def ahead(self, completions: Sequence[Completion]) -> None:
        """Begin to score what arrived together, in one go; an error waits until a sample is asked for."""
        samples = list[Sample]()
        for completion in completions:
            with contextlib.suppress(KeyError, RlhfsimError):  # nobody will ask for it
                samples.append(self._preview(completion))
        if samples:
            scoring = self._scorer.start(lambda: self._texts(samples))
            self._started |= {s.id: (s.response, place, scoring) for place, s in enumerate(samples)}

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        """What was begun, and the rest at once."""
        started = [self._of(sample) for sample in samples]
        rest = [s for s, ahead in zip(samples, started, strict=True) if ahead is None]
        scored = iter(self._scorer.score(self._texts(rest)))
        return [next(scored) if ahead is None else ahead() for ahead in started]

    def taken(self) -> Mapping[str, RuleCounts]:
        """As the scorer counts."""
        return self._scorer.taken()

    def _of(self, sample: Sample) -> Callable[[], Scored] | None:
        """Waits for its score; None where none was begun, or that of another response (a self-check's)."""
        tokens, place, scoring = self._started.pop(sample.id, (None, 0, None))
        same = tokens is not None and np.array_equal(tokens, sample.response)
        return (lambda: scoring.result()[place]) if scoring is not None and same else None
