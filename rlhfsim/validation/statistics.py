"""How far predictions are from measurements: errors, bias, coverage, and verdict rates.

Errors are fractions, (predicted - measured) / measured. Rows that fitted a constant are never
scored. Percentiles interpolate linearly (numpy's default).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlhfsim.frozen import frozen
from rlhfsim.validation.outcome import Outcome

T = TypeVar("T")
Floats = NDArray[np.float64]
WILSON_Z = 1.959963984540054
"""Standard normal quantile of 97.5 %: two-sided 95 %."""
SAYS_OOM = 0.5
"""Probability from which a prediction counts as `out of memory`."""
FACTOR = 2.0
"""A transfer time is near when measured / 2 <= predicted <= 2 measured."""
NEARER = 1.5
"""The same, of a weight sync that is right."""


Figures = dict[str, Any]
"""Figures of a set of rows by name; None where no row can say it."""


def score(outcomes: Iterable[Outcome]) -> Figures:
    """Counts and errors of some rows of one kind.

    `fit` rows decided a constant: they are predicted, not scored. `coverage` is the share of measured values
    inside the predicted P10 to P90 (0.8 is right), `num_sources` counts publications among the scored rows.
    """
    rows = list(outcomes)
    judged = scored(rows)
    errors = signed_errors(judged)
    groups = [signed_errors(group) for group in by_source(judged).values()]
    with_prediction = [o for o in rows if predicted(o)]
    return {
        "rows": len(rows),
        "predicted": len(with_prediction),
        "skipped": len(rows) - len(with_prediction),
        "fit": sum(o.part == "fit" for o in with_prediction),
        "scored": len(judged),
        "num_sources": len(groups),
        **error_figures(errors),
        "coverage": coverage(judged),
        "within_factor_2": _within(errors),
        "within_factor_1_5": _within(errors, NEARER),
        "median_of_source_medians": _over(_of(np.median, np.abs(g)) for g in groups),
        "median_of_source_means": _over(_of(np.mean, np.abs(g)) for g in groups),
        "median_of_source_within_factor_2": _over(_within(g) for g in groups),
    }


def error_figures(errors: Floats) -> Figures:
    """Absolute errors, and the bias: the median signed error, above 0 where too much is predicted."""
    return {
        "median_abs_error": _of(np.median, np.abs(errors)),
        "mean_abs_error": _of(np.mean, np.abs(errors)),
        "p90_abs_error": _of(lambda e: np.percentile(e, 90), np.abs(errors)),
        "bias": _of(np.median, errors),
    }


def predicted(outcome: Outcome) -> bool:
    """Whether there is a prediction."""
    return outcome.predicted is not None and outcome.skipped is None


def scored(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Rows with prediction and measurement that fitted nothing."""
    return [o for o in outcomes if predicted(o) and o.measured is not None and o.part == "report"]


def signed_errors(outcomes: Sequence[Outcome]) -> Floats:
    """(predicted - measured) / measured of rows with a positive measured value."""
    errors = [o.error for o in outcomes if o.measured]
    return np.array([e for e in errors if e is not None], dtype=float)


def by_source(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Rows by publication, in order of first appearance."""
    return grouped(outcomes, lambda o: o.source)


def grouped(rows: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    """Rows by a key, in order of first appearance."""
    groups: dict[str, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def coverage(outcomes: Iterable[Outcome]) -> float | None:
    """Share of measured values inside [low, high], over rows that give both."""
    inside = [
        o.low <= o.measured <= o.high
        for o in outcomes
        if o.low is not None and o.high is not None and o.measured is not None
    ]
    return sum(inside) / len(inside) if inside else None


def skip_reasons(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Reasons with counts, the commonest first."""
    counts = Counter(o.skipped or "no prediction" for o in outcomes if not predicted(o))
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def worst(outcomes: Iterable[Outcome], count: int) -> list[Outcome]:
    """The rows with the largest |log(predicted / measured)|, so that halves and doubles are equal."""
    judged = [o for o in scored(outcomes) if o.measured]
    return sorted(judged, key=lambda o: (-abs(_log_ratio(o)), o.file, o.line))[:count]


def _log_ratio(outcome: Outcome) -> float:
    assert outcome.predicted is not None
    assert outcome.measured
    return math.log(max(outcome.predicted, np.finfo(float).tiny) / outcome.measured)


def _of(statistic: Callable[[Floats], np.floating | float], values: Floats) -> float | None:
    return float(statistic(values)) if values.size else None


def _over(values: Iterable[float | None]) -> float | None:
    return _of(np.median, np.array([v for v in values if v is not None], dtype=float))


def _within(errors: Floats, factor: float = FACTOR) -> float | None:
    ratio = 1 + errors
    return _of(np.mean, ((ratio >= 1 / factor) & (ratio <= factor)).astype(float))


@frozen
class HitRate:
    """A share with its 95 % Wilson interval."""

    hits: int
    of: int
    value: float | None
    low: float | None
    high: float | None


# --- order ------------------------------------------------------------------------------------------

ORDER_MARGIN = 0.10
"""Two measured times whose larger exceeds the smaller by less than this share have no order."""


@frozen
class Order:
    """How often of two plans for one job the faster one was told."""

    right: HitRate
    wrong: tuple[tuple[Outcome, Outcome], ...]
    """Pairs in the wrong order or with equal predictions, the faster measured one first."""


def order(outcomes: Iterable[Outcome], *, same_release: bool = True) -> Order:
    """Predicted against measured order of all scored pairs with the same `job`.

    `same_release` False also pairs rows of different releases of a framework.
    """
    rows = [o for o in scored(outcomes) if o.job and o.measured]
    groups = grouped(rows, lambda o: f"{o.job} {o.release}" if same_release else o.job)
    pairs = [pair for group in groups.values() for pair in combinations(group, 2)]
    ranked = [sorted(pair, key=lambda o: o.measured or 0.0) for pair in pairs]
    clear = [(a, b) for a, b in ranked if (b.measured or 0) > (1 + ORDER_MARGIN) * (a.measured or 0)]
    wrong = tuple((a, b) for a, b in clear if (a.predicted or 0) >= (b.predicted or 0))
    return Order(right=rate(len(clear) - len(wrong), len(clear)), wrong=wrong)


# --- verdicts -------------------------------------------------------------------------------------


@frozen
class Verdicts:
    """How well `runs out of memory` was told; measured is 1 (it did) or 0, predicted a probability."""

    recall: HitRate
    """Out-of-memory cases that were announced."""
    false_alarms: HitRate
    """Cases that worked and were announced as out of memory."""
    brier: float | None
    """Mean squared difference of probability and outcome; 0.25 is a coin."""


def verdicts(outcomes: Iterable[Outcome]) -> Verdicts:
    """Recall, false alarms and Brier score of scored rows."""
    judged = scored(outcomes)
    truth = np.array([o.measured for o in judged], dtype=float)
    chance = np.array([o.predicted for o in judged], dtype=float)
    says, failed = chance >= SAYS_OOM, truth >= SAYS_OOM
    return Verdicts(
        recall=rate(int((says & failed).sum()), int(failed.sum())),
        false_alarms=rate(int((says & ~failed).sum()), int((~failed).sum())),
        brier=_of(np.mean, (chance - truth) ** 2),
    )


def rate(hits: int, of: int) -> HitRate:
    """A share and its Wilson score interval.

        (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)

    Source: Wilson 1927, JASA 22(158), 209-212.
    """
    if not of:
        return HitRate(hits=0, of=0, value=None, low=None, high=None)
    p, z2 = hits / of, WILSON_Z**2
    middle = p + z2 / (2 * of)
    spread = WILSON_Z * math.sqrt(p * (1 - p) / of + z2 / (4 * of**2))
    scale = 1 + z2 / of
    return HitRate(
        hits=hits,
        of=of,
        value=p,
        low=max(0.0, (middle - spread) / scale),
        high=min(1.0, (middle + spread) / scale),
    )
