"""Sums and differences: `12+7=` -> `19`, `3-8=` -> `-5`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """left +- right, both non-negative."""

    left: int
    right: int
    minus: bool
    error: int
    """What the wrong answer is off by; not 0."""

    @property
    def prompt(self) -> str:
        """As `12+7=`."""
        return f"{self.left}{'-' if self.minus else '+'}{self.right}="

    @property
    def answer(self) -> str:
        """As `19`."""
        return str(self._value)

    @property
    def wrong(self) -> str:
        """A number near the answer."""
        return str(self._value + self.error)

    @property
    def key(self) -> str:
        """Without the order of summands: 3+4 must not teach a held-out 4+3."""
        if self.minus:
            return self.prompt
        low, high = sorted((self.left, self.right))
        return f"{low}+{high}"

    @property
    def _value(self) -> int:
        return self.left - self.right if self.minus else self.left + self.right


def draw(rng: np.random.Generator, difficulty: int) -> Sum:
    """Numbers below 10^difficulty, uniform; sum or difference with equal odds."""
    left, right = (int(number) for number in rng.integers(10**difficulty, size=2))
    error = int(rng.integers(1, 10)) * (1 if rng.integers(2) else -1)
    return Sum(left=left, right=right, minus=bool(rng.integers(2)), error=error)
