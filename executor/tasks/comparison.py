"""The larger or the smaller of two numbers: `max(37,52)=` -> `52`, `min(37,52)=` -> `37`.

Difficulty is the digits of a number. A small model learns it steadily and answers pairs that it has never
seen, with thousands of different ones from two digits on: made for runs that must show learning.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two different numbers in the order asked."""

    left: int
    right: int
    larger: bool
    """Whether the larger one is asked for."""

    @property
    def prompt(self) -> str:
        """As `max(37,52)=`."""
        return f"{self._name}({self.left},{self.right})="

    @property
    def answer(self) -> str:
        """As `52`."""
        return str(max(self.left, self.right) if self.larger else min(self.left, self.right))

    @property
    def wrong(self) -> str:
        """The other one."""
        return str(min(self.left, self.right) if self.larger else max(self.left, self.right))

    @property
    def key(self) -> str:
        """Without the order of the numbers: max(37,52) must not teach a held-out max(52,37)."""
        low, high = sorted((self.left, self.right))
        return f"{self._name}({low},{high})"

    @property
    def _name(self) -> str:
        return "max" if self.larger else "min"


def draw(rng: np.random.Generator, difficulty: int) -> Pair:
    """Different numbers of `difficulty` digits, uniform; largest or smallest with equal odds."""
    lowest = 0 if difficulty == 1 else 10 ** (difficulty - 1)
    left, right = (int(number) for number in rng.integers(lowest, 10**difficulty, size=2))
    while left == right:
        right = int(rng.integers(lowest, 10**difficulty))
    return Pair(left=left, right=right, larger=bool(rng.integers(2)))
