"""Problems to learn on: generated arithmetic, comparisons and logic, always the same for one (seed, index).

A source is random access: `batch(position, count)` depends on nothing but its arguments, so the data
position that a checkpoint saves is one integer. Problems of files: executor/tasks/files.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Literal, Protocol

import numpy as np

from executor.tasks import generators
from executor.tasks.text import Prompt
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen

Preference = Literal["none", "pairs", "labels", "responses"]
"""What meta has. pairs (DPO, reward models): `chosen`, `rejected`; labels (KTO): `response`,
`label` (+1 or -1); responses (SFT): `response`."""

HELD_OUT_SHARE = 0.2
"""Share of the problems, held out of training."""
MOST_DRAWS = 10_000
"""Until one is on the right side; a task of few problems may have none there."""
LEAST_SHARE = 0.01
"""Share of generated problems on either side: the others are drawn and thrown away."""


@frozen
class Problem:
    """What the model is asked and what a rule reward compares the response with."""

    prompt: Prompt
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the task: difficulty, tests of a code problem, sides of a preference."""


class ProblemSource(Protocol):
    """Problems by data position."""

    @property
    def size(self) -> int | None:
        """Training problems of an epoch; None: endless."""

    def batch(self, position: int, count: int) -> list[Problem]:
        """Exactly `count` training problems from `position` on; epochs follow one another without a gap."""

    def held_out(self, count: int) -> list[Problem]:
        """Up to `count` different problems that no training batch contains, always the same ones."""


GENERATORS: Mapping[str, Callable[[np.random.Generator, int], generators.DrawnProblem]] = {
    "arithmetic": generators.arithmetic,
    "comparison": generators.comparison,
    "logic": generators.logic,
    "guess": generators.guess,
}


@frozen
class Generated:
    """An endless stream of a task's problems; the hash of a problem's key decides training or held-out."""

    task: Literal["arithmetic", "comparison", "logic", "guess"]
    difficulty: int = 1
    seed: int = 0
    preference: Preference = "none"
    share: float = HELD_OUT_SHARE
    """Held out of training."""

    @property
    def size(self) -> None:
        """Endless."""

    def batch(self, position: int, count: int) -> list[Problem]:
        """Problems `position` to `position + count - 1` of the training stream."""
        assert position >= 0, "a data position counts problems from 0"
        return [self._problem(index, held_out=False) for index in range(position, position + count)]

    def held_out(self, count: int) -> list[Problem]:
        """Different held-out problems; fewer than `count` where the task has no more (one-digit sums)."""
        problems: dict[str, Problem] = {}
        count = count if self.share else 0
        for index in range(20 * count):
            problem = self._problem(index, held_out=True)
            problems.setdefault(f"{problem.prompt}{problem.answer}", problem)
            if len(problems) == count:
                break
        return list(problems.values())

    def _problem(self, index: int, *, held_out: bool) -> Problem:
        for attempt in range(MOST_DRAWS):
            rng = np.random.default_rng([self.seed, int(held_out), index, attempt])
            drawn = GENERATORS[self.task](rng, self.difficulty)
            if is_held_out(drawn.key, self.share) == held_out:
                break
        else:
            raise RlhfsimError(
                "task-too-small",
                f"{MOST_DRAWS} problems of {self.task} of difficulty {self.difficulty} are all "
                f"{'for training' if held_out else 'held out'}",
                help="raise data.difficulty, or hold out another share",
            )
        meta: dict[str, Any] = {"difficulty": self.difficulty}
        good = index % 2 == 0
        match self.preference:
            case "pairs":
                meta |= {"chosen": drawn.answer, "rejected": drawn.wrong}
            case "labels":
                meta |= {"response": drawn.answer if good else drawn.wrong, "label": 1.0 if good else -1.0}
            case "responses":
                meta |= {"response": drawn.answer}
            case "none":
                pass
        return Problem(prompt=drawn.prompt, answer=drawn.answer, meta=meta)


def is_held_out(key: str, share: float = HELD_OUT_SHARE) -> bool:
    """Whether the problem with this key is kept out of training; a property of the key alone."""
    if share == HELD_OUT_SHARE:
        return hashlib.blake2b(key.encode()).digest()[0] % 5 == 0
    return int.from_bytes(hashlib.blake2b(key.encode()).digest()[:8], "big") < share * 2**64
