"""What an environment is: one object a conversation, asked after every turn of the policy.

    class Countdown:
        def __init__(self, start: int = 3) -> None:           # `options` of the settings
            self.left = start

        async def reset(self, task: Task) -> None:            # or: the prompt in place of the task's
            ...

        async def step(self, response: str) -> Observed:
            self.left -= 1
            return Observed(text=f"{self.left} left\n", reward=float(self.left == 0), done=self.left == 0)

        async def close(self) -> None: ...

Methods may be plain functions too: each call then has a thread of its own, so it may block.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from executor.samples import Task, Turn
from rlhfsim.frozen import frozen

Prompt = str | tuple[Turn, ...]
"""Text that the model continues, or turns of a conversation."""


@frozen
class Observed:
    """What the policy is told after a turn."""

    text: Prompt = ""
    """Put behind the response as it is; with a chat template as a turn of the user, or the turns given."""
    reward: float = 0.0
    """Reward of this turn; a conversation's are added up."""
    done: bool = False
    """The conversation ends, and nobody reads the text."""


class AgentEnvironment(Protocol):
    """One conversation's environment.

    A class attribute `at_once` says how many answers of all its conversations are worked on together.
    """

    async def reset(self, task: Task) -> Prompt | None:
        """The conversation begins; a prompt in place of the task's, or None."""

    async def step(self, response: str) -> Observed:
        """The policy's turn is over."""

    async def close(self) -> None:
        """The conversation is over, also after a failure."""


def between(name: str, value: Any, low: float, high: float) -> float:
    """A number among the options of a shipped environment, which have no schema of their own.

    Raises:
        ValueError: it is none, or outside the range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"option {name} is {value!r}, not a number from {low:g} to {high:g}")
    return float(value)


def check_answer(method: str, value: Any) -> Any:
    """What `reset` or `step` returned, if it is what the protocol says.

    Raises:
        TypeError: it is something else.
        ValueError: a reward that is not finite.
    """
    if method == "step":
        if not isinstance(value, Observed):
            raise TypeError(f"step returned {type(value).__name__}, not Observed")
        if not math.isfinite(float(value.reward)):
            raise ValueError(f"step returned the reward {value.reward}")
        _check_prompt("step", value.text)
    elif method == "reset" and value is not None:
        _check_prompt("reset", value)
    return value


def _check_prompt(method: str, value: Any) -> None:
    turns = isinstance(value, list | tuple) and all(
        isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in value
    )
    if not isinstance(value, str) and not turns:
        raise TypeError(f"{method} returned {value!r:.60}, neither a text nor turns of role and content")
