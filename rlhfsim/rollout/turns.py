"""Sequences that wait for an environment between their turns, each by itself.

Sequence i decodes l_i tokens and waits W_i seconds for its k_i answers, drawn for each. On average they wait
a = sum W / sum l seconds a token. Of n sequences that are not done n' decode, the others wait:

    seconds a token = max( tau(n') + a, n a / w )      n' = n tau(n') / that      w workers of the replica

(the last term: w workers give answers no faster). When each is done follows from

    l'_i = (l_i + W_i / tau) sum l / sum(l + W / tau)

in place of l_i: those that wait more come later, the tokens stay as many. Source: a closed queueing network
with a delay, by mean values (Reiser and Lavenberg 1980, J. ACM 27(2), 313-322); tests/rollout/test_turns.py
compares it with sequences that are simulated one by one. Waiting sequences keep their KV cache here.

Not known here: turns of unequal length; tokens of answers, which are prefilled and not decoded.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rlhfsim.elementwise import Size
from rlhfsim.frozen import frozen
from rlhfsim.rollout.continuous_batching import StepTable
from rlhfsim.rollout.engine_step import Floats
from rlhfsim.specs.workload.workload import Environment

RESTS_ON = "environment.seconds_per_turn"
ROUNDS = 6
"""Rounds in which the number of sequences that decode settles."""


@lru_cache(maxsize=256)
def waits(environment: Environment, sequences: int, seed: int) -> Floats:
    """(n,) seconds that each sequence waits for all of its answers, drawn; their mean is the expected one.

    Where `mean_turns` is given a response ends after each turn with odds of its own until `turns`. Those
    that find no sandbox ready wait `cold_start` more, in which a worker makes theirs.
    """
    rng = np.random.default_rng([seed, sequences])
    turns = np.full(sequences, environment.turns)
    if environment.mean_turns is not None:
        odds = _odds(environment.mean_turns, environment.turns)
        turns = np.minimum(rng.geometric(odds, sequences), environment.turns)
    each = rng.lognormal(-(environment.sigma**2) / 2, environment.sigma, int(turns.sum()))
    drawn = np.add.reduceat(each, np.concatenate([[0], np.cumsum(turns)[:-1]]))
    mean: Floats = drawn * (environment.seconds_each / drawn.mean())
    mean[rng.permutation(sequences)[: environment.made(sequences)]] += environment.cold_start
    return mean


def _odds(mean: float, most: int) -> float:
    """Odds p that a response ends after a turn, so that E[min(k, most)] = (1 - (1-p)^most) / p is `mean`."""
    low, high = 1e-9, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if (1 - (1 - p) ** most) / p > mean else (low, p)
    return high


@frozen
class Waiting:
    """What sequences of one replica wait for their environment."""

    per_token: Size
    """Mean seconds a token; an array with an entry an interval, where replicas differ."""
    workers: Size
    """Environment workers of this replica."""

    def paced(
        self, table: StepTable, running: Floats, start: Floats, end: Floats, first: Size = 0
    ) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """(seconds, sequences that decode, whether the workers are the limit) of intervals in which `running`
        sequences are not done."""
        pause, decoding = self.per_token * (end - start), running
        answered = running * pause / self.workers
        for _ in range(ROUNDS):
            decode = table.between(decoding, start, end, first)
            seconds = np.maximum(decode + pause, answered)
            decoding = np.maximum(1.0, running * decode / np.maximum(seconds, 1e-12))
        return np.maximum(seconds, decode), decoding, answered > decode + pause


def delayed(lengths: Floats, waited: Floats, step: float) -> Floats:
    """l' of the module: lengths in the order of `lengths` whose sequences are done when they are."""
    own = lengths + waited / step
    scaled: Floats = own * (lengths.sum() / own.sum())
    return scaled
