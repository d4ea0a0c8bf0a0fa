"""A batch of sequences as the forward and training costs see it."""

from __future__ import annotations

import math
from dataclasses import replace

from rlhfsim.frozen import frozen


@frozen
class Sequences:
    """Sequences that one model processes in one call, prompt and response together."""

    count: int
    """Sequences over all data-parallel ranks."""
    mean: float
    """E[s], tokens."""
    mean_square: float
    """E[s^2], tokens squared; attention FLOP follow it."""
    maximum: float
    """Longest sequence; padded batches cost this for every sequence, memory is sized for it."""
    packed: bool = True
    """False: every sequence is padded to `maximum`."""
    together: int = 1
    """Sequences that no micro-batch of training parts."""

    def dealt(self, parts: int) -> list[Sequences]:
        """As many sequences in each of `parts`, up to one; where there are fewer, one in each."""
        each, more = divmod(max(self.count, parts), parts)
        return [replace(self, count=each + (i < more)) for i in range(parts)]

    @property
    def tokens(self) -> float:
        """Tokens that are computed."""
        return self.count * (self.mean if self.packed else self.maximum)

    @property
    def square_tokens(self) -> float:
        """Sum of s^2 over the sequences as computed."""
        return self.count * (self.mean_square if self.packed else self.maximum**2)

    @property
    def attention_length(self) -> float:
        """sum(s^2) / sum(s): the length that attention per token sees (physics T1)."""
        return self.square_tokens / self.tokens

    @property
    def deviation(self) -> float:
        """Standard deviation of the length, tokens."""
        return math.sqrt(max(0.0, self.mean_square - self.mean**2))


def uniform(count: int, length: float) -> Sequences:
    """`count` sequences of one length."""
    return Sequences(count=count, mean=length, mean_square=length**2, maximum=length)
