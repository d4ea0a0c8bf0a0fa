"""A game that a tiny model can learn: find a hidden number, told after each guess whether it is larger.

The number is the task's answer (data.task: guess), else drawn from the task's seed. A guess is the first
number of a turn; the answer is `>` (the hidden number is larger), `<` or, where there is no number, `?`.
Finding it gives the reward 1; every turn costs `turn_cost`.
"""

from __future__ import annotations

import re

import numpy as np

from executor.environments.protocol import AgentEnvironment, Observed, between
from executor.samples import Task

_NUMBER = re.compile(r"\d+")


class GuessGame(AgentEnvironment):
    """One hidden number."""

    def __init__(self, numbers: float = 10, turn_cost: float = 0.0) -> None:
        """Numbers from 0 on."""
        self._numbers, self._hidden = int(between("numbers", numbers, 1, 1e9)), 0
        self._turn_cost = between("turn_cost", turn_cost, 0, 1e6)

    async def reset(self, task: Task) -> None:
        """Hide the number."""
        drawn = int(np.random.default_rng(task.seed).integers(self._numbers))
        self._hidden = int(task.answer) if task.answer.isdigit() else drawn

    async def step(self, response: str) -> Observed:
        """Compare."""
        number = _NUMBER.search(response)
        if number is None:
            return Observed(text="?", reward=-self._turn_cost)
        guess = int(number[0][:9])
        if guess == self._hidden:
            return Observed(reward=1.0 - self._turn_cost, done=True)
        return Observed(text=">" if self._hidden > guess else "<", reward=-self._turn_cost)
