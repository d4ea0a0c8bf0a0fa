"""Problems that are drawn, each with one checkable answer and a wrong one of the same form.

arithmetic  sums and differences of two numbers below 10^difficulty: `12+7=` -> `19`, `3-8=` -> `-5`
comparison  the larger or smaller of two numbers of `difficulty` digits: `max(37,52)=` -> `52`. A small
            model learns it steadily and answers pairs that it has never seen, with thousands of them from two
            digits on: made for runs that must show learning
guess       a hidden number for the game of that name: prompt `?`, answer the number
logic       puzzles of `difficulty` statements, of one of two kinds:
  order     `b>c,a>b;a?c=` -> `>`: a chain of comparisons in any order and direction; how do two ends compare?
  knights   `a:-a+-b,b:a;ab=` -> ...: person a says "a lies or b lies" (+ or, * and, - not: lies); knights
            always tell the truth, knaves always lie; 1 for every knight, 0 for every knave, in the order
            asked. One statement has no knights puzzle with exactly one solution, so difficulty 1 is order
            only; above it both kinds come with equal odds.
"""

from __future__ import annotations

import itertools
import string

import numpy as np

from rlhfsim.frozen import frozen


@frozen
class DrawnProblem:
    """A problem as text."""

    prompt: str
    """What the model continues."""
    answer: str
    """The one right continuation."""
    wrong: str
    """A continuation that looks right and is not."""
    key: str
    """Equal for problems that are the same but for their spelling: 3+4 must not teach a held-out 4+3."""


def arithmetic(rng: np.random.Generator, difficulty: int) -> DrawnProblem:
    """Numbers uniform; sum or difference with equal odds; the wrong answer is near the right one."""
    left, right = (int(number) for number in rng.integers(10**difficulty, size=2))
    error = int(rng.integers(1, 10)) * (1 if rng.integers(2) else -1)
    minus = bool(rng.integers(2))
    value = left - right if minus else left + right
    prompt = f"{left}{'-' if minus else '+'}{right}="
    key = prompt if minus else f"{min(left, right)}+{max(left, right)}"
    return DrawnProblem(prompt=prompt, answer=str(value), wrong=str(value + error), key=key)


def guess(rng: np.random.Generator, difficulty: int) -> DrawnProblem:
    """A hidden number below 10^difficulty, for the game of executor/environments/guess.py."""
    hidden = int(rng.integers(10**difficulty))
    key = f"{hidden} {rng.integers(2**31)}"
    return DrawnProblem(prompt="?", answer=str(hidden), wrong=str((hidden + 1) % 10**difficulty), key=key)


def comparison(rng: np.random.Generator, difficulty: int) -> DrawnProblem:
    """Different numbers, uniform; largest or smallest with equal odds; the wrong answer is the other one."""
    lowest = 0 if difficulty == 1 else 10 ** (difficulty - 1)
    left, right = (int(number) for number in rng.integers(lowest, 10**difficulty, size=2))
    while left == right:
        right = int(rng.integers(lowest, 10**difficulty))
    low, high = sorted((left, right))
    name, answer, wrong = ("max", high, low) if rng.integers(2) else ("min", low, high)
    return DrawnProblem(
        prompt=f"{name}({left},{right})=", answer=str(answer), wrong=str(wrong), key=f"{name}({low},{high})"
    )


def logic(rng: np.random.Generator, difficulty: int) -> DrawnProblem:
    """A puzzle of `difficulty` statements; the order of a claim's two literals is spelling."""
    return _knights(rng, difficulty) if difficulty > 1 and rng.integers(2) else _order(rng, difficulty)


def _order(rng: np.random.Generator, statements: int) -> DrawnProblem:
    names = [str(name) for name in rng.permutation(list(string.ascii_lowercase))[: statements + 1]]
    chain = [
        f"{high}>{low}" if rng.integers(2) else f"{low}<{high}" for high, low in itertools.pairwise(names)
    ]
    rng.shuffle(chain)
    high, low = sorted(int(place) for place in rng.choice(len(names), size=2, replace=False))
    larger = bool(rng.integers(2))
    ask = f"{names[high]}?{names[low]}" if larger else f"{names[low]}?{names[high]}"
    answer, wrong = (">", "<") if larger else ("<", ">")
    prompt = f"{','.join(chain)};{ask}="
    return DrawnProblem(prompt=prompt, answer=answer, wrong=wrong, key=prompt)


@frozen
class _Claim:
    """What a person says: two literals (person, negated) joined by `and` or `or`."""

    literals: tuple[tuple[int, bool], tuple[int, bool]]
    both: bool

    def holds(self, knights: tuple[int, ...]) -> bool:
        truths = [bool(knights[person]) != negated for person, negated in self.literals]
        return all(truths) if self.both else any(truths)

    @property
    def ordered(self) -> _Claim:
        """The same claim with its literals in order."""
        first, second = sorted(self.literals)
        return _Claim(literals=(first, second), both=self.both)

    def __str__(self) -> str:
        parts = [
            ("-" if negated else "") + string.ascii_lowercase[person] for person, negated in self.literals
        ]
        return ("*" if self.both else "+").join(parts)


def _knights(rng: np.random.Generator, people: int) -> DrawnProblem:
    while True:  # about every third draw has exactly one solution
        claims = [_claim(rng, people) for _ in range(people)]
        answers = solutions(claims)
        if len(answers) == 1:
            break
    names = string.ascii_lowercase[:people]
    statements = ",".join(f"{name}:{claim}" for name, claim in zip(names, claims, strict=True))
    right = answers[0]
    turned = int(rng.integers(people))
    wrong = tuple(1 - v if person == turned else v for person, v in enumerate(right))
    return DrawnProblem(
        prompt=f"{statements};{names}=",
        answer="".join(map(str, right)),
        wrong="".join(map(str, wrong)),
        key=",".join(f"{name}:{claim.ordered}" for name, claim in zip(names, claims, strict=True)),
    )


def solutions(claims: list[_Claim]) -> list[tuple[int, ...]]:
    """Who is a knight (1) or knave (0) so that exactly the knights' claims hold."""
    return [
        knights
        for knights in itertools.product((0, 1), repeat=len(claims))
        if all(claim.holds(knights) == bool(v) for claim, v in zip(claims, knights, strict=True))
    ]


def _claim(rng: np.random.Generator, people: int) -> _Claim:
    first, second = (int(person) for person in rng.integers(people, size=2))
    not_first, not_second, both = (bool(coin) for coin in rng.integers(2, size=3))
    return _Claim(literals=((first, not_first), (second, not_second)), both=both)
