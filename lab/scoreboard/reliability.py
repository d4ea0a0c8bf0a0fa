"""Whether stated probabilities come true, and intervals group by group; publishers left out.

A deadline is a multiple of the predicted seconds, fixed without looking at a measurement: the probability of
meeting it is what `P(done by)` says of a step, true where the measured step took no longer. For memory the
probability of fitting is held against whether the run ran out.

    Brier score = mean (stated - happened)^2       always stating the share p that happens has p (1 - p)

Source: Brier 1950, Mon. Weather Rev. 78, 1; Murphy & Winkler 1977, Appl. Statist. 26, 41 (the curve).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import NormalDist, fmean, median

import numpy as np

from lab.scoreboard.blind import blind
from rlhfsim.kernels.cost import Z90
from rlhfsim.step.groups import groups_of
from rlhfsim.validation.outcome import Outcome, publisher
from rlhfsim.validation.statistics import Figures, coverage, grouped, order, rate, scored

DEADLINES = (0.7, 0.85, 1.0, 1.15, 1.3, 1.6)
"""Multiples of the predicted seconds."""
BINS = 5
"""Bins of stated probability."""
FEWEST = 8
"""Rows of a group whose coverage is judged."""
COVERED = (0.65, 0.95)
"""Shares inside P10 to P90 that so few rows leave to intervals that hold 80 %."""
TIMED = ("training", "rlhf.step")
"""Kinds whose deadlines have stated probabilities."""


def probability_within(seconds: float, low: float, middle: float, high: float) -> float:
    """P(true <= `seconds`) of a time that is log-normal to both sides of its P50."""
    apart = math.log(seconds / middle)
    side = math.log(high / middle) if apart > 0 else math.log(middle / low)
    return NormalDist().cdf(apart / side * Z90) if side > 0 else float(apart >= 0)


def reliability(stated: Sequence[float], happened: Sequence[bool]) -> Figures:
    """The Brier score, what the plain share would have, and the curve."""
    chance, truth = np.array(stated), np.array(happened, dtype=float)
    share = float(truth.mean())
    places = np.minimum((chance * BINS).astype(int), BINS - 1)
    bins = [
        {
            "low": i / BINS,
            "high": (i + 1) / BINS,
            "cases": int((places == i).sum()),
            "stated": float(chance[places == i].mean()),
            "happened": float(truth[places == i].mean()),
        }
        for i in range(BINS)
        if (places == i).any()
    ]
    return {
        "cases": len(chance),
        "brier": float(((chance - truth) ** 2).mean()),
        "brier_of_share": share * (1 - share),
        "stated": float(chance.mean()),
        "happened": share,
        "bins": bins,
    }


def odds(outcomes: Iterable[Outcome]) -> dict[str, Figures]:
    """Reliability of the odds of time and of fitting, by kind."""
    by_kind = grouped(outcomes, lambda o: o.kind)
    pairs = {kind: list(_deadlines(by_kind.get(kind, []))) for kind in TIMED}
    pairs["oom"] = [(1 - (o.predicted or 0.0), not o.measured) for o in scored(by_kind.get("oom", []))]
    return {kind: reliability(*zip(*each, strict=True)) for kind, each in pairs.items() if each}


def _deadlines(rows: Iterable[Outcome]) -> Iterator[tuple[float, bool]]:
    for o in blind(rows):
        if o.predicted and o.measured and o.low and o.high:
            for times in DEADLINES:
                due = times * o.predicted
                yield probability_within(due, o.low, o.median or o.predicted, o.high), o.measured <= due


def by_group(outcomes: Iterable[Outcome]) -> dict[str, Figures]:
    """Coverage, share above P50 and bias of groups of rows that saw nothing of their publisher."""
    rows = [o for o in blind(outcomes) if o.conditions and o.measured and o.predicted]
    ran = {(o.conditions.framework, publisher(o.source)) for o in rows if o.conditions}
    publishers = Counter(framework for framework, _ in ran)
    groups: dict[str, list[Outcome]] = {}
    for o in rows:
        for name in _names(o, publishers):
            groups.setdefault(name, []).append(o)
    return {name: _figures(groups[name]) for name in sorted(groups)}


def _names(o: Outcome, publishers: Mapping[str, int]) -> Iterator[str]:
    """Groups of a row; `publishers`: how many ran each framework."""
    assert o.conditions is not None
    for level, group in groups_of(o.conditions)[1:]:
        yield f"{level.replace('_', ' ')}: {group}"
    if trainer := o.detail.get("trainer"):
        yield f"trainer's memory: {trainer}"
    known = "run by others too" if publishers[o.conditions.framework] > 1 else "run by no other publisher"
    yield f"framework: {known}"


def _figures(rows: list[Outcome]) -> Figures:
    middles = [(o.median or o.predicted or 0.0) / (o.measured or 1.0) for o in rows]
    errors = [o.error for o in rows if o.error is not None]
    return {
        "rows": len(rows),
        "publishers": len({publisher(o.source) for o in rows}),
        "coverage": coverage(rows),
        "above_median": fmean(x < 1 for x in middles),
        "bias": median(errors),
        "median_abs_error": median(map(abs, errors)),
        "median_bias": median(middles) - 1,
    }


def groups_covered(groups: dict[str, Figures]) -> float | None:
    """Share of the groups of `FEWEST` rows or more whose coverage lies in `COVERED`; None without one."""
    judged = [g["coverage"] for g in groups.values() if g["rows"] >= FEWEST]
    low, high = COVERED
    return rate(sum(low <= c <= high for c in judged), len(judged)).value


def above_median(outcomes: Iterable[Outcome]) -> float | None:
    """Share of measured values above P50."""
    above = [o.measured > (o.median or o.predicted) for o in outcomes if o.measured and o.predicted]
    return fmean(above) if above else None


def order_across_gpus(outcomes: Iterable[Outcome]) -> float | None:
    """Share of pairs of one job and release, on two kinds of GPU, that are predicted in the right order."""
    rows = [o for o in outcomes if o.conditions]
    by_gpu = grouped(rows, lambda o: o.conditions.gpu if o.conditions else "")
    every, alone = order(rows).right, [order(of_one).right for of_one in by_gpu.values()]
    return rate(every.hits - sum(x.hits for x in alone), every.of - sum(x.of for x in alone)).value
