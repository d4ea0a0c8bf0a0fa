"""Fits the software coefficients of a training step on the fit part of training.csv.

    python -m rlhfsim.validation.training_fit        rewrites hardware_profiles/common.yaml

The fit part is the (publication, model) pairs that `training.part_of` names; rows that are scored are
never read here. Every publication has the same total weight. Needs scipy (development only).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from functools import cache

import numpy as np

from rlhfsim import resources
from rlhfsim.calibration.training_fit import Floats, Free, posterior, written
from rlhfsim.specs.hardware import Profile
from rlhfsim.specs.profiles import load_profile
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.validation import assumptions
from rlhfsim.validation.rows import Row, shipped
from rlhfsim.validation.training import part_of, price
from rlhfsim.validation.training_rows import Lookup, Skip, job, measured

FREE: tuple[Free, ...] = (
    Free(name="training_kernel_efficiency", value=0.85, low=0.70, high=0.97, most=1.0),
)
"""Priors as they stood before the fit; their sources are kept in the file."""


def fit_rows() -> list[Row]:
    """The rows of the fit part, blanks filled."""
    return [assumptions.apply("training", r)[0] for r in shipped("training") if part_of(r) == "fit"]


def residuals(values: Sequence[float], rows: Sequence[Row]) -> tuple[Floats, Floats]:
    """log(predicted/measured) of the rows that can be predicted, and their weights."""
    lookup = _lookup(dict(zip((f.name for f in FREE), values, strict=True)))
    found: list[tuple[str, float]] = []
    for row in rows:
        try:
            it = job(row, lookup)
            seconds, _ = measured(row, it)
        except Skip:
            continue
        found.append((row.source, math.log(price(it).seconds / seconds)))
    count = Counter(source for source, _ in found)
    mean = len(found) / len(count)
    weights = [math.sqrt(mean / count[source]) for source, _ in found]
    return np.array([r for _, r in found]), np.array(weights)


def _lookup(values: dict[str, float]) -> Lookup:
    """Profiles with these coefficients in place of their own."""

    @cache
    def find(name: str) -> Profile:
        profile = load_profile(name)
        changed = {
            key: Coefficient(value=v, low=v, high=v, source="fit") for key, v in values.items()
        }
        return replace(profile, coefficients={**profile.coefficients, **changed})

    return find


def main() -> None:
    """Fit and rewrite the shipped common.yaml."""
    rows = fit_rows()
    source = f"fitted on the fit part of training.csv ({date.today().isoformat()})"
    found = posterior(FREE, lambda values: residuals(values, rows), source)
    path = resources.shipped("hardware_profiles") / "common.yaml"
    path.write_text(written(path.read_text(encoding="utf-8"), FREE, found), encoding="utf-8")


if __name__ == "__main__":
    main()
