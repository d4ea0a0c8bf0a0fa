"""Rule rewards of responses while others are still decoded: each is scored as soon as it arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from executor.rewards.operations import RuleCounts
from executor.rewards.rules import Plain, Scorer
from executor.samples import Completion, Sample, Scored, Tokens
from rlhfsim.errors import RlhfsimError


class RuleRewards(Protocol):
    """Rule rewards."""

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        """One a sample."""

    def ahead(self, completion: Completion) -> None:
        """A response has arrived, whose sample will be asked for."""

    def taken(self) -> Mapping[str, RuleCounts]:
        """What happened to each rule since this was last called."""


class NoRules:
    """Rules of a run that scores nothing."""

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        """None."""
        return []

    def ahead(self, completion: Completion) -> None:
        """Nothing to begin."""

    def taken(self) -> Mapping[str, RuleCounts]:
        """Nothing happened."""
        return {}


class EarlyRules:
    """The rules of a scorer."""

    def __init__(
        self,
        scorer: Scorer,
        texts: Callable[[Sequence[Sample]], list[Plain]],
        preview: Callable[[Completion], Sample],
    ) -> None:
        """`preview`: the sample that a completion will be."""
        self._scorer, self._texts, self._preview = scorer, texts, preview
        self._started: dict[int, tuple[Tokens, Future[list[Scored]]]] = {}

    def ahead(self, completion: Completion) -> None:
        """Begin to score it; an error waits until its sample is asked for."""
        try:
            sample = self._preview(completion)
        except (KeyError, RlhfsimError):
            return  # nobody will ask for it
        scoring = self._scorer.start(lambda: self._texts([sample]))
        self._started[completion.id] = completion.tokens, scoring

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        """What was begun, and the rest at once."""
        started = [self._of(sample) for sample in samples]
        rest = [s for s, scoring in zip(samples, started, strict=True) if scoring is None]
        scored = iter(self._scorer.score(self._texts(rest)))
        return [next(scored) if scoring is None else scoring.result()[0] for scoring in started]

    def taken(self) -> Mapping[str, RuleCounts]:
        """As the scorer counts."""
        return self._scorer.taken()

    def _of(self, sample: Sample) -> Future[list[Scored]] | None:
        """Its scoring; None where none was begun, or that of another response (a self-check's)."""
        tokens, scoring = self._started.pop(sample.id, (None, None))
        return scoring if tokens is not None and np.array_equal(tokens, sample.response) else None
