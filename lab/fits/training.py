"""Fits the software coefficients of a training step on the fit part of training.csv.

    python -m lab.fits.training        rewrites hardware_profiles/common.yaml; `fit` takes any rows

The fit part is the (publication, model) pairs that `training.part_of` names; rows that are scored are
never read here. Every publisher has the same total weight. Needs scipy (development only).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from functools import cache

import numpy as np

from lab.fits.posterior import Floats, Free, posterior, written
from lab.scoreboard.rows import NEVER_FITTED, part_of, rows_of
from rlhfsim import resources
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.validation import assumptions
from rlhfsim.validation.cases.training import Lookup, job, measured, shipped_profile
from rlhfsim.validation.kinds.training import price
from rlhfsim.validation.outcome import Skip
from rlhfsim.validation.rows import Row

UNEXPLAINED = r"gpt[- ]oss"
"""GPT OSS is reported only: a quarter of its time on most GPUs of Megatron-Bridge is unknown, and the one row that
would be fitted, of AutoModel over eight nodes, has a gate that keeps tokens on a node (docs/validation_training.md)."""
STACKS = ("megatron", "compiled", "eager")
FREE: tuple[Free, ...] = (
    Free(name="training_kernel_efficiency", value=0.88, low=0.75, high=0.98, most=1.0, varies=True),
    Free(name="training_attention_efficiency", value=0.85, low=0.70, high=1.0, most=1.1, varies=True),
    Free(name="training_fp8_gain", value=1.25, low=1.1, high=1.42),
    *(Free(name=f"kernel_speed_{stack}", value=1.0, low=0.9, high=1.1) for stack in STACKS),
    *(Free(name=f"attention_speed_{stack}", value=1.0, low=0.9, high=1.1) for stack in STACKS),
    *(Free(name=f"fp8_speed_{stack}", value=1.0, low=0.88, high=1.12) for stack in STACKS),
    Free(name="eager_traffic", value=2.0, low=1.2, high=3.0),
    Free(name="host_layer_time", value=0.3e-3, low=0.1e-3, high=0.8e-3, unit="ms", scale=1e-3, begin=0.8e-3),
    Free(name="host_moe_time", value=6e-3, low=4e-3, high=9e-3, unit="ms", scale=1e-3),
    Free(name="grouped_gemm_efficiency", value=0.8, low=0.6, high=0.95, most=1.0),
    Free(name="overlap_ep", value=0.2, low=0.05, high=0.6, most=0.95),
    Free(name="overlap_dp", value=0.8, low=0.5, high=0.95, most=1.0),
)
"""Priors as they stood before the fit; their sources are kept in the file. The clock of a GPU is not among them: it is
hardware, and what differs between kinds of training software are the three speeds of each."""


def fit_rows() -> list[Row]:
    """The rows of the fit part, blanks filled, but for models that lack a cost nobody has found (`UNEXPLAINED`)."""
    before = [r for r in rows_of("training") if r.file not in NEVER_FITTED]
    fitted = [r for r in before if part_of("training", r) == "fit"]
    return [
        assumptions.apply("training", r)[0]
        for r in fitted
        if not re.match(UNEXPLAINED, r.text("model") or "", re.IGNORECASE)
    ]


def publisher(row: Row) -> str:
    """Repository, paper or thread: what has one weight, and what is left out together."""
    return row.source.split("@")[0]


def residuals(values: Sequence[float], rows: Sequence[Row]) -> tuple[Floats, Floats]:
    """log(predicted/measured) of the rows that can be predicted, and their weights."""
    lookup = _lookup(tuple(values))
    found: list[tuple[str, float]] = []
    for row in rows:
        try:
            it = job(row, lookup)
            seconds, _ = measured(row, it)
        except Skip:
            continue
        found.append((publisher(row), math.log(price(it).seconds / seconds)))
    count = Counter(source for source, _ in found)
    mean = len(found) / len(count)
    weights = [math.sqrt(mean / count[source]) for source, _ in found]
    return np.array([r for _, r in found]), np.array(weights)


def _lookup(values: tuple[float, ...]) -> Lookup:
    """Profiles with these coefficients in place of their own."""

    @cache
    def find(name: str) -> Profile:
        profile = shipped_profile(name)
        changed = {
            f.name: Coefficient(value=v, low=v, high=v, source="fit")
            for f, v in zip(FREE, values, strict=True)
            if not f.profiles or profile.name in f.profiles
        }
        return replace(profile, coefficients={**profile.coefficients, **changed})

    return find


def fit(rows: Sequence[Row]) -> dict[str, Coefficient]:
    """Value, P10 and P90 of every coefficient of `FREE`, by `Free.key`, from the rows given."""
    source = f"fitted on the fit part of training.csv ({date.today().isoformat()})"
    return posterior(FREE, lambda values: residuals(values, rows), source)


def main() -> None:
    """Fit and rewrite the shipped common.yaml."""
    found = fit(fit_rows())
    for free in FREE:
        for name in free.profiles or ("common",):
            path = resources.shipped("hardware_profiles") / f"{name}.yaml"
            text = written(path.read_text(encoding="utf-8"), free, found[free.key])
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
