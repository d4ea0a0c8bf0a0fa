"""Fits what an RL framework adds to its calls on the phase table of NeMo-RL v0.3, which is never scored.

    python -m lab.fits.rlhf        prints the values for hardware_profiles/common.yaml and frameworks/nemo_rl

Six rows with the seconds of every phase. Each is predicted with the four coefficients at zero; what
is missing, row by row:

    rollout_step_overhead   (generation measured - predicted) / decode steps
    controller_time         step - its printed phases - moves that no timer covers
    rl_call_time c,         log-probs and training, measured - predicted = calls c + launched layers h:
    rl_layer_time h         the c and h of least |error| / measured over the twelve phases

Value: median of the rows, and c and h. Interval: their 10th and 90th percentile, at least 0; of h over
the phases with c given; of c over refits without one row. Which form fits these rows (mean |error| / measured): c and h 0.160, seconds a
micro-batch in place of h 0.188, a share of the call 0.166.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lab.scoreboard.rows import FIT_FILE, rows_of
from rlhfsim.interchange.configuration.described import RunSpecs
from rlhfsim.kernels.cost import total
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.step.framework_overhead import launched_layers
from rlhfsim.training.packing import pack_len, sequences_of
from rlhfsim.training.training import micro_batches
from rlhfsim.validation import assumptions
from rlhfsim.validation.cases.rlhf import specs_of
from rlhfsim.validation.kinds.rlhf import priced, timed_cost
from rlhfsim.validation.rows import Row

NAMES = ("rollout_step_overhead", "rl_layer_time", "rl_call_time", "controller_time")
UNTIMED = ("actor.logprob.unload", "actor.train.load")
"""Moves of NeMo-RL outside its printed timers."""
PRINTED = ("generation", "logprob", "update_actor", "weight_sync")
"""Phases of the table, as columns without `_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """What the prediction of one row lacks."""

    step: float
    """Seconds of a decode step."""
    controller: float
    """Seconds of a step of the job."""
    calls: tuple[Call, ...]


class Call(NamedTuple):
    """A printed phase of scoring or training."""

    seconds: float
    """Measured, less the prediction."""
    measured: float
    calls: int
    """Calls that it covers."""
    launched: float
    """Layers that a host launches in them."""


def missing(row: Row) -> Missing:
    """What the prediction of one row lacks."""
    asked = specs_of(row)
    step = priced(replace(asked, cluster=neutral(asked.cluster, NAMES)))
    timed = {kind: timed_cost(row, step, kind).seconds for kind in PRINTED}
    shown = {kind: row.number(f"{kind}_s") or 0.0 for kind in PRINTED}
    assert step.generation is not None
    moves = total(phase.cost for phase in step.phases if phase.name in UNTIMED).seconds
    lacks = {kind: shown[kind] - timed[kind] for kind in PRINTED}
    scored, trained = launches(asked)
    return Missing(
        step=lacks["generation"] / step.generation.decode_steps,
        controller=(row.number("step_time_s") or 0.0) - sum(shown.values()) - moves,
        calls=(
            Call(lacks["logprob"], shown["logprob"], 2, 2 * scored),
            Call(lacks["update_actor"], shown["update_actor"], 1, trained),
        ),
    )


def launches(asked: RunSpecs) -> tuple[float, float]:
    """Layers that a host launches to score a step and to train on it, by the actor's layout."""
    work, layout = asked.workload, asked.placement.actor.layout
    layers, sequences = models_of(work).actor.num_layers, sequences_of(work)
    scored = micro_batches(layout, sequences, 1, pack_len(work, layout, scoring=True))[1]
    trained = (
        work.mini_batches * micro_batches(layout, sequences, work.mini_batches, pack_len(work, layout))[1]
    )
    return (
        launched_layers(layout, layers, scored, trained=False),
        launched_layers(layout, layers, trained, trained=True),
    )


def least_error(calls: Sequence[Call]) -> tuple[float, float]:
    """The c and h of least mean |missing - calls c - launched h| / measured; neither is below 0.

    Such a sum is least where it is exact in two calls, or in one with the other number at 0.
    """
    lines = [(c.calls, c.launched, c.seconds) for c in calls]
    tried = [(0.0, 0.0)]
    for n, x, y in lines:
        tried += [(y / n, 0.0), (0.0, y / x)]
        for other_n, other_x, other_y in lines:
            if abs(det := n * other_x - x * other_n) > 1e-9:
                tried.append(((y * other_x - x * other_y) / det, (n * other_y - y * other_n) / det))

    def error(pair: tuple[float, float]) -> float:
        return sum(abs(k.seconds - k.calls * pair[0] - k.launched * pair[1]) / k.measured for k in calls)

    return min((pair for pair in tried if min(pair) >= 0), key=error)


def neutral(cluster: Cluster, names: Sequence[str]) -> Cluster:
    """The cluster with these coefficients at zero."""
    none = {name: Coefficient(value=0.0, low=0.0, high=0.0, source="fit") for name in names}
    return replace(
        cluster,
        node_groups=tuple(
            replace(p, profile=replace(p.profile, coefficients={**p.profile.coefficients, **none}))
            for p in cluster.node_groups
        ),
    )


PRIORS: dict[str, tuple[float, float, float]] = {
    "rollout_step_overhead": (2e-3, 0.5e-3, 8e-3),
    "rl_layer_time": (1e-3, 0.1e-3, 5e-3),
    "rl_call_time": (0.2, 0.01, 1.5),
    "controller_time": (1.0, 0.1, 5.0),
}
"""Value, P10 and P90 before any row: a few milliseconds of Python a decode step, the eager launch of a layer two or
three times over, a remote call with its batch, a second of bookkeeping. They stand where no row is left to fit on."""


def fit_rows() -> list[Row]:
    """The rows of the phase table, blanks filled."""
    return [assumptions.apply("rlhf", r)[0] for r in rows_of("rlhf") if r.file == FIT_FILE]


def fit(rows: Sequence[Row]) -> dict[str, Coefficient]:
    """Value, P10 and P90 of every coefficient from the rows given; its prior where there are none."""
    if not rows:
        return {n: Coefficient(value=a, low=b, high=c, source="prior") for n, (a, b, c) in PRIORS.items()}
    lacks = [missing(row) for row in rows]
    calls = [call for one in lacks for call in one.calls]
    c, h = least_error(calls)
    samples = {
        "rollout_step_overhead": [one.step for one in lacks],
        "rl_layer_time": [(k.seconds - k.calls * c) / k.launched for k in calls],
        "rl_call_time": [least_error(_others(lacks, i))[0] for i in range(len(lacks))],
        "controller_time": [one.controller for one in lacks],
    }
    given = {"rl_layer_time": h, "rl_call_time": c}
    source = f"fitted on {len(rows)} rows of {FIT_FILE}: median or least error, P10 and P90"
    return {name: _coefficient(samples[name], given.get(name), source) for name in NAMES}


def _others(lacks: Sequence[Missing], left: int) -> list[Call]:
    """The phases of all rows but one."""
    return [call for i, one in enumerate(lacks) for call in one.calls if i != left]


def _coefficient(samples: Sequence[float], value: float | None, source: str) -> Coefficient:
    """The value given, or the median; P10 and P90 of the samples, at least 0 and around the value."""
    middle, low, high = (max(0.0, float(x)) for x in np.percentile(samples, (50, 10, 90)))
    middle = middle if value is None else value
    return Coefficient(value=middle, low=min(low, middle), high=max(high, middle), source=source)


def main() -> None:
    """Print the values."""
    for name, c in fit(fit_rows()).items():
        sys.stdout.write(f"{name}: value {c.value:.6g}, low {c.low:.6g}, high {c.high:.6g}\n")


if __name__ == "__main__":
    main()
