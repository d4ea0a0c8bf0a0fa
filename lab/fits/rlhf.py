"""Fits what an RL framework adds to its calls on the phase table of NeMo-RL v0.3, which is never scored.

    python -m lab.fits.rlhf        prints the lines for hardware_profiles/common.yaml

Six rows with the seconds of every phase. Each is predicted with the three coefficients at zero; what
is missing, row by row:

    rollout_step_overhead   (generation measured - predicted) / decode steps
    rl_call_overhead        (log-probs + training measured) / predicted - 1
    controller_time         step - its printed phases - moves that no timer covers

Value: median of the rows. Interval: their 10th and 90th percentile, at least 0.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from rlhfsim.kernels.cost import total
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.validation import assumptions
from rlhfsim.validation.cases.rlhf import setting_of
from rlhfsim.validation.kinds.rlhf import FIT_FILE, priced, timed_cost
from rlhfsim.validation.rows import Row, shipped

NAMES = ("rollout_step_overhead", "rl_call_overhead", "controller_time")
UNTIMED = ("actor.logprob.unload", "actor.train.load")
"""Moves of NeMo-RL outside its printed timers."""
PRINTED = ("generation", "logprob", "update_actor", "weight_sync")
"""Phases of the table, as columns without `_s`."""


def missing(row: Row) -> tuple[float, float, float]:
    """What the prediction of one row lacks, in the order of `NAMES`."""
    setting = setting_of(row)
    step = priced(replace(setting, cluster=_neutral(setting.cluster)))
    timed = {kind: timed_cost(row, step, kind).seconds for kind in PRINTED}
    shown = {kind: row.number(f"{kind}_s") or 0.0 for kind in PRINTED}
    assert step.generation is not None
    calls = (shown["logprob"] + shown["update_actor"]) / (timed["logprob"] + timed["update_actor"])
    moves = total(phase.cost for phase in step.phases if phase.name in UNTIMED).seconds
    rest = (row.number("step_time_s") or 0.0) - sum(shown.values()) - moves
    return ((shown["generation"] - timed["generation"]) / step.generation.decode_steps, calls - 1, rest)


def _neutral(cluster: Cluster) -> Cluster:
    """The cluster with the coefficients of `NAMES` at zero."""
    none = {name: Coefficient(value=0.0, low=0.0, high=0.0, source="fit") for name in NAMES}
    return replace(
        cluster,
        node_groups=tuple(
            replace(p, profile=replace(p.profile, coefficients={**p.profile.coefficients, **none}))
            for p in cluster.node_groups
        ),
    )


def fit() -> dict[str, tuple[float, float, float]]:
    """Value, low and high of every coefficient."""
    rows = [r for r in shipped("rlhf") if r.file == FIT_FILE]
    found = np.array([missing(assumptions.apply("rlhf", row)[0]) for row in rows])
    quantiles = np.maximum(0.0, np.percentile(found, (50, 10, 90), axis=0))
    return {name: (float(a), float(b), float(c)) for name, (a, b, c) in zip(NAMES, quantiles.T, strict=True)}


def main() -> None:
    """Print the values."""
    for name, (value, low, high) in fit().items():
        sys.stdout.write(f"{name}: value {value:.6g}, low {low:.6g}, high {high:.6g}\n")


if __name__ == "__main__":
    main()
