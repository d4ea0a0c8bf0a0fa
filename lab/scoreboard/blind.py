"""Rows as predicted without their publisher, and the errors of another tool on the same rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from rlhfsim.validation.outcome import Outcome, publisher
from rlhfsim.validation.statistics import Figures, error_figures, predicted, scored


def blind(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Measured rows as predicted without any row of their publisher in any fit.

    A row of a fit counts here where the fit was repeated without its publisher. Where a kind's fit was not,
    no row of a publisher counts that the fit read.
    """
    rows = [o for o in outcomes if predicted(o) and o.measured is not None]
    read = {(_fit_of(o), publisher(o.source)) for o in rows if o.part == "fit" and o.blind is None}
    return [
        replace(
            o,
            part="report",
            predicted=o.predicted if o.blind is None else o.blind,
            low=o.low if o.blind is None else o.blind_low,
            high=o.high if o.blind is None else o.blind_high,
            median=o.median if o.blind is None else o.blind_median,
        )
        for o in rows
        if (_fit_of(o), publisher(o.source)) not in read
    ]


def _fit_of(outcome: Outcome) -> str:
    """Kinds that rest on one fit: the phases and the step of an RL run do."""
    return "rlhf" if outcome.kind.startswith("rlhf.") else outcome.kind


def reference_errors(outcomes: Iterable[Outcome], key: str) -> Figures:
    """Errors of another tool on the same scored rows, whose prediction stands in `detail[key]`."""
    pairs = [(o.detail.get(key), o.measured) for o in scored(outcomes)]
    errors = np.array([float(p) / m - 1 for p, m in pairs if isinstance(p, float | int) and m])
    return {**error_figures(errors), "rows": float(errors.size)}
