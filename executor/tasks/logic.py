"""Logical reasoning puzzles with one checkable answer.

order     `b>c,a>b;a?c=` -> `>`: a chain of comparisons in any order and direction; how do two ends compare?
knights   `a:-a+-b,b:a;ab=` -> ...: person a says "a lies or b lies" (+ or, * and, - not: lies); knights always
          tell the truth, knaves always lie; 1 for every knight, 0 for every knave, in the order asked.
Difficulty is the number of statements. One statement has no knights puzzle with exactly one solution, so
difficulty 1 is order only; above it both come with equal odds.
"""

from __future__ import annotations

import itertools
import string
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Puzzle:
    """A puzzle as text."""

    prompt: str
    answer: str
    wrong: str
    """Another answer of the same form."""
    key: str
    """Equal for puzzles that differ only in the order of a claim's two literals; else the text."""


def draw(rng: np.random.Generator, difficulty: int) -> Puzzle:
    """A puzzle of `difficulty` statements."""
    return _knights(rng, difficulty) if difficulty > 1 and rng.integers(2) else _order(rng, difficulty)


def _order(rng: np.random.Generator, statements: int) -> Puzzle:
    names = [str(name) for name in rng.permutation(list(string.ascii_lowercase))[: statements + 1]]
    chain = [_comparison(rng, high, low) for high, low in itertools.pairwise(names)]
    rng.shuffle(chain)
    high, low = sorted(int(place) for place in rng.choice(len(names), size=2, replace=False))
    larger = bool(rng.integers(2))
    ask = f"{names[high]}?{names[low]}" if larger else f"{names[low]}?{names[high]}"
    answer, wrong = (">", "<") if larger else ("<", ">")
    prompt = f"{','.join(chain)};{ask}="
    return Puzzle(prompt=prompt, answer=answer, wrong=wrong, key=prompt)


def _comparison(rng: np.random.Generator, high: str, low: str) -> str:
    return f"{high}>{low}" if rng.integers(2) else f"{low}<{high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """What a person says: two literals (person, negated) joined by `and` or `or`."""

    literals: tuple[tuple[int, bool], tuple[int, bool]]
    both: bool

    def holds(self, world: tuple[int, ...]) -> bool:
        truths = [bool(world[person]) != negated for person, negated in self.literals]
        return all(truths) if self.both else any(truths)

    @property
    def ordered(self) -> _Claim:
        """The same claim with its literals in order."""
        first, second = sorted(self.literals)
        return _Claim(literals=(first, second), both=self.both)

    def __str__(self) -> str:
        parts = [("-" if negated else "") + _name(person) for person, negated in self.literals]
        return ("*" if self.both else "+").join(parts)


def _knights(rng: np.random.Generator, people: int) -> Puzzle:
    while True:  # about every third draw has exactly one solution
        claims = [_claim(rng, people) for _ in range(people)]
        worlds = solutions(claims)
        if len(worlds) == 1:
            break
    said = ",".join(f"{_name(person)}:{claim}" for person, claim in enumerate(claims))
    asked = "".join(_name(person) for person in range(people))
    right = worlds[0]
    turned = int(rng.integers(people))
    other = tuple(1 - v if person == turned else v for person, v in enumerate(right))
    key = ",".join(f"{_name(person)}:{claim.ordered}" for person, claim in enumerate(claims))
    return Puzzle(prompt=f"{said};{asked}=", answer=_bits(right), wrong=_bits(other), key=key)


def solutions(claims: list[_Claim]) -> list[tuple[int, ...]]:
    """Worlds (1: knight) in which exactly the knights' claims hold."""
    return [
        world
        for world in itertools.product((0, 1), repeat=len(claims))
        if all(claim.holds(world) == bool(v) for claim, v in zip(claims, world, strict=True))
    ]


def _claim(rng: np.random.Generator, people: int) -> _Claim:
    first, second = (int(person) for person in rng.integers(people, size=2))
    not_first, not_second, both = (bool(coin) for coin in rng.integers(2, size=3))
    return _Claim(literals=((first, not_first), (second, not_second)), both=both)


def _name(person: int) -> str:
    return string.ascii_lowercase[person]


def _bits(world: tuple[int, ...]) -> str:
    return "".join(str(v) for v in world)
