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
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlhfsim.kernels.cost import total
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.validation import assumptions
from rlhfsim.validation.cases.rlhf import specs_of
from rlhfsim.validation.kinds.rlhf import FIT_FILE, priced, timed_cost
from rlhfsim.validation.rows import Row, shipped

NAMES = ("rollout_step_overhead", "rl_call_overhead", "controller_time")
UNTIMED = ("actor.logprob.unload", "actor.train.load")
"""Moves of NeMo-RL outside its printed timers."""
PRINTED = ("generation", "logprob", "update_actor", "weight_sync")
"""Phases of the table, as columns without `_s`."""


def missing(row: Row) -> tuple[float, float, float]:
    """What the prediction of one row lacks, in the order of `NAMES`."""
    asked = specs_of(row)
    step = priced(replace(asked, cluster=_neutral(asked.cluster)))
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


PRIORS: dict[str, tuple[float, float, float]] = {
    "rollout_step_overhead": (2e-3, 0.5e-3, 8e-3),
    "rl_call_overhead": (0.2, 0.0, 0.6),
    "controller_time": (1.0, 0.1, 5.0),
}
"""Value, P10 and P90 before any row: a few milliseconds of Python a decode step, a call between one and one and
a half times that of pre-training, a second of bookkeeping. They stand where no row is left to fit on."""


def fit_rows() -> list[Row]:
    """The rows of the phase table, blanks filled."""
    return [assumptions.apply("rlhf", r)[0] for r in shipped("rlhf") if r.file == FIT_FILE]


def fit(rows: Sequence[Row]) -> dict[str, Coefficient]:
    """Value, P10 and P90 of every coefficient from the rows given; its prior where there are none."""
    if not rows:
        return {n: Coefficient(value=a, low=b, high=c, source="prior") for n, (a, b, c) in PRIORS.items()}
    quantiles = np.maximum(0.0, np.percentile([missing(row) for row in rows], (50, 10, 90), axis=0))
    source = f"fitted on {len(rows)} rows of {FIT_FILE}: median, P10 and P90"
    return {
        name: Coefficient(value=float(a), low=float(b), high=float(c), source=source)
        for name, (a, b, c) in zip(NAMES, quantiles.T, strict=True)
    }


def main() -> None:
    """Print the values."""
    for name, c in fit(fit_rows()).items():
        sys.stdout.write(f"{name}: value {c.value:.6g}, low {c.low:.6g}, high {c.high:.6g}\n")


if __name__ == "__main__":
    main()
