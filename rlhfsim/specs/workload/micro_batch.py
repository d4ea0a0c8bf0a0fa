"""Tokens of the largest micro-batch: what memory is sized for is what the executor fills."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rlhfsim.elementwise import Size, ceil, most, where
from rlhfsim.frozen import frozen
from rlhfsim.specs.hashing import Hashed, hashed_once
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.layout_columns import AnyLayout, Layouts, columns_of
from rlhfsim.specs.workload.lengths import stats
from rlhfsim.specs.workload.workload import Workload

Floats = NDArray[np.float64]


@hashed_once
@frozen
class BatchLengths(Hashed):
    """The largest micro-batch of a call."""

    max_tokens: float
    """Longest sequence, prompt and response."""
    mean_tokens: float
    """Mean sequence; the maximum where sequences are padded."""
    deviation: float
    """Standard deviation of the length, tokens; 0 where sequences are padded."""
    sequences: int
    """Sequences of one optimizer step over all ranks."""
    scored: int
    """Sequences that are scored in an iteration, over all ranks."""
    together: int = 1
    """Sequences that no micro-batch of training parts: both sides of a pair."""

    def tokens(self, layout: Layout, *, scoring: bool = False) -> float:
        """Tokens of the fullest micro-batch that one must expect, over its cp ranks.

            min( b max, max( max, b mean + 4 sqrt(b) sd ) ), or max( max, pack )

        One sequence of the maximal length will come (a pair, where its sides train together); that all b are
        that long will not, when they are packed. A sequence longer than its pack comes alone; a pack holds no
        more than a rank has for one optimizer step (in passes without gradients: than all ranks have).
        """
        return float(self.each(columns_of([layout]))[0][0 if scoring else 1, 0])

    def each(self, layouts: Layouts) -> tuple[Floats, Floats]:
        """Micro-batches of many layouts: (2, n) tokens in scoring and training, (n,) number in training."""
        dp, own = layouts.dp, layouts.score_micro_batch
        pack = np.stack([layouts.pack(scoring=True), layouts.pack(scoring=False)])
        # of a size of its own, a micro-batch without gradients holds no more than a rank has
        scored = np.where(own > 0, np.minimum(own, np.ceil(self.scored / dp)), layouts.micro_batch)
        sizes = np.stack([scored, whole_units(layouts.micro_batch, self.together)])
        longest = self.max_tokens * np.array([[1.0], [self.together]])
        alone = np.minimum(sizes * self.max_tokens, np.maximum(longest, self._typical(sizes)))
        ranks = np.stack([np.full(len(layouts), float(self.sequences)), np.ceil(self.sequences / dp)])
        most = np.minimum(self._typical(ranks), self.sequences * self.mean_tokens)
        packed = np.maximum(longest, np.minimum(pack, most))
        return np.where(pack > 0, packed, alone), self.micro_batches(layouts)

    def _typical(self, sequences: Floats) -> Floats:
        """b mean + 4 sqrt(b) sd."""
        return sequences * self.mean_tokens + 4 * np.sqrt(sequences) * self.deviation

    def micro_batches(self, layout: AnyLayout) -> Size:
        """Micro-batches of an optimizer step on each data-parallel rank, at least; packs all full."""
        pack: Size = layout.pack(scoring=False)
        pack = 0 if pack is None else pack
        each = where(pack > 0, pack / self.mean_tokens, whole_units(layout.micro_batch, self.together))
        return most(1, ceil(self.sequences / (layout.dp * most(self.together, each)) - 1e-9))


def whole_units(sequences: Size, together: int) -> Size:
    """The largest number of whole units up to `sequences`, at least one of them."""
    return most(together, sequences // together * together)


@lru_cache(maxsize=4096)
def batch_lengths(workload: Workload) -> BatchLengths:
    """The lengths that memory is sized for, and that the executor keeps to."""
    prompt, response = stats(workload.prompt_len), stats(workload.response_len)
    longest = workload.prompt_len.maximum + workload.response_len.maximum
    mean, variance = longest, 0.0
    if workload.packing:
        mean = prompt.mean + response.mean
        variance = prompt.mean_square - prompt.mean**2 + response.mean_square - response.mean**2
    return BatchLengths(
        max_tokens=longest,
        mean_tokens=mean,
        deviation=math.sqrt(max(0.0, variance)),
        sequences=workload.num_sequences // workload.mini_batches,
        scored=workload.num_sequences,
        together=workload.together,
    )
