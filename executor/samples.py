"""What flows between the calls of a step: requests, completions, samples (plain numpy), losses, transfers.

Legend: P tokens of a prompt, R tokens of a response. Arrays travel through Ray's object store without a
copy; engines turn them into tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhfsim.frozen import frozen

Tokens = NDArray[np.int64]
Floats = NDArray[np.float32]
Finish = Literal["stop", "length"]
LossName = Literal["policy", "value", "dpo", "kto", "sft", "reward_model", "distillation"]
PAIRED: frozenset[LossName] = frozenset({"dpo", "reward_model"})
"""Losses of pairs: both sides are in one micro-batch."""


Turn = Mapping[str, str]
"""One turn of a conversation: `role` and `content`."""


@frozen
class Task:
    """What an environment begins a conversation with."""

    prompt: str | tuple[Turn, ...]
    """What the model is asked."""
    answer: str = ""
    """What the data expect."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """What the data attached."""
    seed: int = 0
    """Seed of this conversation alone: an environment that draws takes its numbers from it."""


@frozen
class GenerationRequest:
    """One response that is asked of the rollout engine."""

    id: int
    """Unique in the run."""
    prompt: Tokens
    """(P,)"""
    max_tokens: int
    """Most tokens of the response."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    seed: int = 0
    """Seed of this request alone: equal seeds give equal random streams."""
    task: Task | None = None
    """For the environment that answers between its turns; None: one turn, and nobody answers."""
    begun: Completion | None = None
    """What another replica has sampled of the response, which goes on behind it."""


class Fault(NamedTuple):
    """How an environment failed in a conversation."""

    kind: Literal["timeout", "error"]
    what: str


@frozen
class Conversation:
    """What an environment did with a response: its turns follow one another in the tokens."""

    sampled: NDArray[np.bool_]
    """(R,) False at tokens that the environment wrote: nothing is learnt from them."""
    turns: int
    """That the policy sampled."""
    reward: float | None = 0.0
    """Sum of the environment's rewards; None: it failed, and the sample is to be dropped."""
    seconds: float = 0.0
    """That the environment took, all turns together."""
    fault: Fault | None = None
    """The conversation ended with it."""


@frozen
class Completion:
    """One response, with the log-prob and the weight version of every token."""

    id: int
    """Number of its request."""
    tokens: Tokens
    """(R,) with the end-of-sequence tokens where they were sampled."""
    logprobs: Floats
    """(R,) of the sampled tokens under the engine's (temperature-scaled) distribution; others 0."""
    versions: NDArray[np.int32]
    """(R,) weight version that sampled each token; of others that of the turn before."""
    finish: Finish
    prompt: Tokens | None = None
    """(P,) that the environment put in place of the request's."""
    conversation: Conversation | None = None
    """None: no environment answered."""


@frozen
class Sample:
    """A prompt with its response and all that later calls found out about it; None: not computed yet."""

    id: int
    group: int
    """Samples of one prompt share it; unique in the run; so do both sides of a pair."""
    prompt: Tokens
    """(P,)"""
    response: Tokens
    """(R,)"""
    mask: Floats | None = None
    """(R,) 0 at tokens that are not learned from, 1 elsewhere; None: all that were sampled are."""
    finish: Finish = "stop"
    versions: NDArray[np.int32] | None = None
    """(R,)"""
    rollout_logprobs: Floats | None = None
    """(R,)"""
    old_logprobs: Floats | None = None
    """(R,) of the policy before this step's update, from the training engine."""
    reference_logprobs: Floats | None = None
    """(R,)"""
    values: Floats | None = None
    """(R,) value before each response token is sampled."""
    reward: float | None = None
    """Sum of rule rewards and reward model; None with an empty response: dropped, it teaches nothing."""
    rewards: Mapping[str, float] | None = None
    """Value of each rule and of the reward model (`model`), before its weight."""
    label: float | None = None
    """KTO: +1 desirable, -1 undesirable. Pairs: +1 chosen, -1 rejected."""
    advantages: Floats | None = None
    """(R,)"""
    returns: Floats | None = None
    """(R,) targets of the critic."""
    answer: str = ""
    """What the task expects, for rule rewards."""
    meta: dict[str, Any] | None = None
    """What the task attached (tests of a code problem, difficulty, ...)."""
    conversation: Conversation | None = None
    """None: no environment answered."""

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """(R,) True at the tokens that the policy sampled, False at those of an environment."""
        if self.conversation is None:
            return np.ones(len(self.response), np.bool_)
        return self.conversation.sampled

    @property
    def num_sampled(self) -> int:
        """Response tokens that the policy sampled."""
        return int(self.sampled.sum())

    @property
    def dropped(self) -> bool:
        """Whether its reward failed."""
        return self.reward is None and not len(self.response)

    @property
    def num_tokens(self) -> int:
        """Response tokens."""
        return len(self.response)

    @property
    def learned(self) -> NDArray[np.bool_]:
        """(R,) True at the tokens that are learned from: those sampled that `mask` leaves."""
        return self.sampled if self.mask is None else self.sampled & (self.mask > 0)

    @property
    def num_learned(self) -> int:
        """Response tokens that are learned from."""
        return int(self.learned.sum())

    @property
    def length(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt) + len(self.response)


def emptied(sample: Sample, *, with_reference: bool) -> Sample:
    """The sample without its response: it keeps its place in the batch, and nothing is learnt from it."""
    none, talk = np.zeros(0, np.float32), sample.conversation
    return replace(
        sample,
        response=sample.response[:0],
        mask=None,
        reward=None,
        conversation=None if talk is None else replace(talk, sampled=talk.sampled[:0]),
        versions=None if sample.versions is None else sample.versions[:0],
        rollout_logprobs=none,
        old_logprobs=none,
        reference_logprobs=none if with_reference else None,
        values=none,
    )


class Scored(NamedTuple):
    """What the rules gave one sample."""

    total: float | None
    """Sum of weight x value; None: a rule failed, and the sample is to be dropped."""
    by_rule: Mapping[str, float]
    """Value of each rule before its weight; rules of one kind are told apart by #2, #3."""


@frozen
class LossSpec:
    """A loss by name with its settings; `executor.algorithms.losses` computes it."""

    name: LossName
    settings: Mapping[str, Any]
    """Keyword arguments of that loss, see executor/algorithms/losses.py."""


@frozen
class Transfer:
    """What one end of a weight transfer saw."""

    version: int
    bytes: int
    """That travelled."""
    buckets: int
    seconds: float
    checksum: str
    """Checksum of names, dtypes, shapes and bytes in the order sent; equal at both ends."""
