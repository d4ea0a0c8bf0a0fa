"""The centre and the width of intervals by group, from rows that were predicted without their publisher.

    e_i = r_i - c_i            r_i = ln(measured / predicted), c_i the centres of the row's groups
    c_g = h median of r_i - (centres of wider groups)
    k_g = exp(h ln q)          q: quantile of |e_i| / (w_i x widths of wider groups) at min(1, 0.8 (1 + 1/n))
    h = m / (m + 4)            m = n (1 - n / N), of all rows N: n = N, effective rows
    n                          sum over publishers of sqrt(rows of the publisher)
    doubt = s sqrt(h / K)      s: spread of e, K publishers, uneven ones counted for less (Kish 1965)

w_i is the side of the row's interval on which it lies, with the discrepancy (`discrepancy`). The level of q
is that of split conformal prediction for n rows (Lei et al. 2018, JASA 113, 1094): the fewer, the wider. A
row counts 1 / sqrt(rows of its publisher). Groups follow each other from wide to narrow; a median or a width
of few rows stays near that of the wider group, and so does that of nearly all rows, which says the same
again. The doubt is that of a mean after such shrinkage. The 4 is a judgement: 2 and 8 were looked at.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from lab.scoreboard.discrepancy import INSIDE, Floats, Residuals, base_of, weighted_quantile
from rlhfsim.kernels.cost import Z90
from rlhfsim.step.groups import LEVELS, Effect, Estimate, Group, GroupLaw

SHRINK = 4.0
"""Effective rows of which a group is believed half."""
LEAST = 0.05
"""Width below which a group of rows does not count as more certain."""
Measure = Callable[[Residuals, Floats, float], float]
"""An effect of rows, given those of wider groups, for as many effective rows."""


def law_of(rows: Residuals) -> tuple[float, GroupLaw]:
    """The discrepancy and the law of a kind; the numbers of the law without intervals of their own."""
    centres, centre = _by_level(rows, _median)
    apart = rows.around(centre)
    base = base_of(apart)
    widths, _ = _by_level(apart, _width(base), skip=1)
    effects = {
        group: Effect(
            rows=int(rows.has(group).sum()),
            publishers=rows.at(rows.has(group)).publishers,
            centre=Estimate(*[centres[group]] * 3),
            width=Estimate(*[math.exp(widths.get(group, 0.0))] * 3),
        )
        for group in _named(rows)
    }
    return base, GroupLaw(doubt=_doubt(apart), effects=effects)


def with_ends(law: GroupLaw, without: Sequence[GroupLaw]) -> GroupLaw:
    """The law with P10 and P90 of its numbers over the laws without one publisher at a time."""

    def ends(group: Group, of: Callable[[Effect], Estimate]) -> Estimate:
        value = of(law.effects[group]).value
        others = [of(other.effects[group]).value for other in without if group in other.effects]
        low, high = np.percentile(others or [value], (10, 90)).tolist()
        return Estimate(value, min(value, low), max(value, high))

    effects = {
        group: Effect(
            rows=e.rows,
            publishers=e.publishers,
            centre=ends(group, lambda x: x.centre),
            width=ends(group, lambda x: x.width),
        )
        for group, e in law.effects.items()
    }
    return GroupLaw(doubt=law.doubt, effects=effects)


def _named(rows: Residuals) -> list[Group]:
    """The groups of the rows, from wide to narrow."""
    named = {group for groups in rows.groups for group in groups}
    return sorted(named, key=lambda group: (LEVELS.index(group[0]), group[1]))


def _by_level(rows: Residuals, measure: Measure, skip: int = 0) -> tuple[dict[Group, float], Floats]:
    """Shrunk effects of groups, each on top of the wider ones, and their sums for the rows."""
    effects: dict[Group, float] = {}
    total = np.zeros(len(rows.error))
    everything = _effective(rows)
    for level in LEVELS[skip:]:
        more = np.zeros_like(total)
        for group in [g for g in _named(rows) if g[0] == level]:
            at = rows.has(group)
            n = _effective(rows.at(at))
            told = n if level == LEVELS[0] else n * (1 - n / everything)
            effects[group] = told / (told + SHRINK) * measure(rows.at(at), total[at], n)
            more[at] = effects[group]
        total = total + more
    return effects, total


def _median(rows: Residuals, wider: Floats, _: float) -> float:
    return weighted_quantile(rows.error - wider, rows.weights, 0.5)


def _width(base: float) -> Measure:
    def measure(rows: Residuals, wider: Floats, n: float) -> float:
        sides = np.sqrt(rows.variance + base**2 * (1 + rows.distance**2)) * Z90
        level = min(1.0, INSIDE * (1 + 1 / n))
        scores = np.abs(rows.error) / np.maximum(sides, 1e-9) / np.exp(wider)
        return math.log(max(LEAST, weighted_quantile(scores, rows.weights, level)))

    return measure


def _effective(rows: Residuals) -> float:
    return math.fsum(math.sqrt(count) for count in Counter(rows.publisher).values())


def _doubt(rows: Residuals) -> float:
    n = _effective(rows)
    publishers = n**2 / len(rows.error)
    spread = weighted_quantile(np.abs(rows.error), rows.weights, INSIDE) / Z90
    return spread * math.sqrt(n / (n + SHRINK) / publishers)
