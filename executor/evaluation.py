"""How good the model is on problems that it does not train on: by generation and rules, or given responses.

    pass@k = 1 - C(n - c, k) / C(n, k)      mean over problems

Legend: n responses of a problem, c of them right (full reward). Unbiased; source: Chen et al. 2021, arXiv
2107.03374, equation 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from executor.algorithms.protocols import LoopBackend
from executor.samples import Sample, Scored
from executor.settings import Settings
from executor.tasks.prompter import TaskPrompter
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.workload.dataflow import Call
from rlhfsim.specs.workload.workload import Workload

FIRST_ID = 10**9
"""Ids of evaluation requests start here, out of the way of training's."""
HEADLINES = {"sft": "loss", "kto": "margin"}
"""Algorithm -> the metric that says it in one number; of the others accuracy."""


@frozen
class Evaluated:
    """One evaluation."""

    metrics: Mapping[str, float]
    """By name, without `evaluation/`."""
    headline: str
    """The metric that says it in one number."""
    samples: tuple[Sample, ...] = ()
    """With their rewards; none where nothing was generated."""

    @property
    def value(self) -> float:
        """Value of the headline."""
        return self.metrics[self.headline]

    @property
    def score(self) -> float:
        """The same, where more is better."""
        return -self.value if self.headline == "loss" else self.value

    def row(self) -> dict[str, float]:
        """As metrics of an iteration."""
        return {f"evaluation/{name}": value for name, value in self.metrics.items()}


@frozen
class Evaluator:
    """Problems that are held out, and what says how good responses to them are."""

    prompter: TaskPrompter
    rules: Callable[[Sequence[Sample]], list[Scored]]
    workload: Workload
    settings: Settings

    def check(self) -> int:
        """How many problems there are.

        Raises:
            RlhfsimError: none.
        """
        problems = self.prompter.source.held_out(self.settings.evaluation.problems)
        if not problems:
            raise RlhfsimError(
                "nothing-held-out",
                "the settings ask for an evaluation, but the data hold no problem out of training",
                help="set data.held_out, name evaluation.data, or set evaluation.problems: 0",
            )
        return len(problems)

    def run(self, backend: LoopBackend, step: int) -> Evaluated:
        """Evaluate the model as it is."""
        problems = self.prompter.source.held_out(self.settings.evaluation.problems)
        if not self.workload.generates:
            given = self.prompter.answered(enumerate(problems))
            headline = HEADLINES.get(self.workload.algorithm, "accuracy")
            return Evaluated(metrics=self._given(backend, given, step), headline=headline)
        asked = self.settings.evaluation
        temperature = 0.0 if asked.samples == 1 else asked.temperature
        requests = self.prompter.evaluation(problems, FIRST_ID, asked.samples, temperature)
        samples = [self.prompter.sample(completion) for completion in backend.generate(requests, step)]
        samples = [replace(s, group=number // asked.samples) for number, s in enumerate(samples)]
        own = asked.rewards is not None  # rules of the evaluation alone: its environment does not count
        scored = [_rewarded(*pair, own=own) for pair in zip(samples, self.rules(samples), strict=True)]
        return Evaluated(metrics=_metrics(scored, asked.samples), headline="accuracy", samples=tuple(scored))

    def _given(self, backend: LoopBackend, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """Metrics of responses that the data have."""
        if self.workload.algorithm == "reward_model":
            return _pairs(np.array(backend.score(Call(role="actor", kind="score"), samples, step)))
        policy = backend.score(Call(role="actor", kind="logprob"), samples, step)
        if self.workload.algorithm == "sft":
            tokens = np.concatenate(policy)
            return {"loss": float(-tokens.mean(dtype=np.float64))}
        reference = backend.score(Call(role="reference", kind="logprob"), samples, step)
        ratios = [float((p - r).sum(dtype=np.float64)) for p, r in zip(policy, reference, strict=True)]
        rewards = self.settings.algorithm.beta * np.array(ratios)
        if self.workload.paired:
            return _pairs(rewards)
        good = np.array([s.label is not None and s.label > 0 for s in samples])
        if good.all() or not good.any():
            return {"margin": 0.0}
        return {"margin": float(rewards[good].mean() - rewards[~good].mean())}


def _rewarded(sample: Sample, found: Scored, *, own: bool) -> Sample:
    """With its reward; `own`: what its environment gave does not count."""
    if own or found.total is None or sample.reward is None:
        return replace(sample, reward=found.total, rewards=found.by_rule)
    by_rule = {**found.by_rule, **(sample.rewards or {})}
    return replace(sample, reward=found.total + sample.reward, rewards=by_rule)


def _pairs(scores: Any) -> dict[str, float]:
    """Pairs of the scores of both sides, chosen first."""
    margins = scores[::2] - scores[1::2]
    return {
        "accuracy": float((margins > 0).mean()),
        "margin": float(margins.mean()),
        "loss": float(np.logaddexp(0.0, -margins).mean()),
    }


def _metrics(samples: Sequence[Sample], each: int) -> dict[str, float]:
    """Metrics of generated responses, `each` to a problem."""
    rewards = np.array([0.0 if s.reward is None else s.reward for s in samples])
    right = rewards >= 1.0
    found = {
        "accuracy": float(right.mean()),
        "reward": float(rewards.mean()),
        "length_mean": float(np.mean([s.num_tokens for s in samples])),
        "truncated": float(np.mean([s.finish == "length" for s in samples])),
    }
    names = dict.fromkeys(name for s in samples for name in s.rewards or {})
    if len(names) > 1:
        found |= {
            n: float(np.mean([s.rewards[n] for s in samples if s.rewards and n in s.rewards])) for n in names
        }
    if each > 1:
        counts = right.reshape(-1, each).sum(axis=1)
        found |= {
            f"pass@{k}": float(np.mean([pass_at(each, int(c), k) for c in counts]))
            # 1, 2, 4, ... and the number itself
            for k in [*(2**power for power in range((each - 1).bit_length())), each]
        }
    return found


def pass_at(n: int, right: int, k: int) -> float:
    """Probability that one of k of n responses is right, `right` of which are."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)
