"""Fits what verl adds to its calls, and what adapters cost it, on its logs of MATH, which are not scored.

    python -m lab.fits.verl        prints the values for frameworks/verl/costs.py

Five LoRA runs of 3B to 72B on H100 with the seconds of every phase; five of the same publisher on GSM8K are
scored. Each is predicted with the four coefficients at zero:

    rl_call_time c, rl_layer_time h   reference measured - predicted = c + launched layers h (`rlhf.least_error`);
                                      the reference is the actor without adapters
    adapter_gather_time               (log-probs and training measured - predicted - c - launched h) / passes
    adapter_layer_time a,             generation measured - predicted moves, prefill and worker = decode steps
    adapter_sequence_time b           layers a + tokens of a replica b, of least error

Value: median of the phases; interval: their P10 and P90, each of a and b with the other given. Every matrix has two adapters, and FSDP1 shards each
by itself (`get_fsdp_wrap_policy` with `is_lora`, verl/utils/fsdp_utils.py, verl 0.3 to 0.10), so that one layer
and pass gathers fourteen.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lab.fits.rlhf import Call, launches, least_error, neutral
from lab.scoreboard.rows import FIT_LOGS, rows_of
from rlhfsim.kernels.devices import device_on
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.validation import assumptions
from rlhfsim.validation.cases.rlhf import specs_of
from rlhfsim.validation.kinds.rlhf import priced, timed_cost
from rlhfsim.validation.outcome import Skip
from rlhfsim.validation.rows import Row

NAMES = (
    "rl_layer_time",
    "rl_call_time",
    "adapter_gather_time",
    "adapter_layer_time",
    "adapter_sequence_time",
)
PRIORS: dict[str, tuple[float, float, float]] = {
    "rl_layer_time": (1.33e-3, 0.1e-3, 7.38e-3),
    "rl_call_time": (0.2, 0.01, 1.2),
    "adapter_gather_time": (5e-3, 1.5e-3, 12e-3),
    "adapter_layer_time": (1.9e-3, 0.3e-3, 2.5e-3),
    "adapter_sequence_time": (0.0, 0.0, 0.4e-3),
}
"""Value, P10 and P90 where no row is left: the pooled values, and fourteen gathers of 0.1 to 0.8 ms of hooks, views
and one small collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """What the prediction of one row lacks."""

    reference: Call
    adapters: tuple[tuple[Call, float], ...]
    """Log-probs and training, with the passes of gathers over all layers in each."""
    decode: Call
    """Generation without moves and prefill: `calls` are the tokens of a replica, `launched` layers of decode steps."""


def missing(row: Row) -> Missing:
    """What the prediction of one row lacks."""
    asked = specs_of(row)
    step = priced(replace(asked, cluster=neutral(asked.cluster, NAMES)))
    lacks = {
        kind: (row.number(f"{kind}_s") or 0.0) - timed_cost(row, step, kind).seconds
        for kind in ("logprob", "ref_logprob", "update_actor")
    }
    scored, trained = launches(asked)
    layers = models_of(asked.workload).actor.num_layers
    assert step.generation is not None
    assert asked.placement.rollout is not None
    decode = step.generation.seconds - step.generation.prefill_seconds
    steps = step.generation.decode_steps
    worker = steps * device_on(asked.cluster, 0, asked.placement.backend)["rollout_step_overhead"]
    other = timed_cost(row, step, "generation").seconds - decode + worker
    measured = row.number("generation_s") or 0.0
    reduced = trained * (4 / 3 if asked.placement.actor.layout.recompute == "full" else 3 / 2)
    return Missing(
        reference=Call(lacks["ref_logprob"], row.number("ref_logprob_s") or 1.0, 1, scored),
        adapters=(
            (Call(lacks["logprob"], row.number("logprob_s") or 1.0, 1, scored), scored),
            (Call(lacks["update_actor"], row.number("update_actor_s") or 1.0, 1, trained), reduced),
        ),
        decode=Call(
            measured - other,
            measured,
            round(step.generation.decode_tokens / asked.placement.rollout.layout.dp),
            steps * layers,
        ),
    )


def fit_rows() -> list[Row]:
    """The rows of the logs that can be predicted, blanks filled."""
    filled = (assumptions.apply("rlhf", r)[0] for r in rows_of("rlhf") if r.source.startswith(FIT_LOGS))
    return [row for row in filled if _predicted(row)]


def _predicted(row: Row) -> bool:
    try:
        specs_of(row)
    except Skip:
        return False
    return True


def fit(rows: Sequence[Row]) -> dict[str, Coefficient]:
    """Value, P10 and P90 of every coefficient from the rows given; its prior where there are none."""
    if not rows:
        return {n: Coefficient(value=a, low=b, high=c, source="prior") for n, (a, b, c) in PRIORS.items()}
    lacks = [missing(row) for row in rows]
    calls = [one.reference for one in lacks]
    c, h = least_error(calls)
    b, a = least_error(decodes := [one.decode for one in lacks])
    phases = [phase for one in lacks for phase in one.adapters]
    samples = {
        "rl_layer_time": [(k.seconds - c) / k.launched for k in calls],
        "rl_call_time": [k.seconds - k.launched * h for k in calls],
        "adapter_gather_time": [(k.seconds - c - k.launched * h) / passes for k, passes in phases],
        "adapter_layer_time": [(k.seconds - k.calls * b) / k.launched for k in decodes],
        "adapter_sequence_time": [(k.seconds - k.launched * a) / k.calls for k in decodes],
    }
    given = {"rl_layer_time": h, "rl_call_time": c, "adapter_layer_time": a, "adapter_sequence_time": b}
    return {name: _coefficient(samples[name], given.get(name), len(rows)) for name in NAMES}


def _coefficient(samples: Sequence[float], value: float | None, rows: int) -> Coefficient:
    middle, low, high = (max(0.0, float(x)) for x in np.percentile(samples, (50, 10, 90)))
    middle = middle if value is None else value
    source = f"fitted on {rows} logs of {FIT_LOGS}: median or least error, P10 and P90"
    return Coefficient(value=middle, low=min(low, middle), high=max(high, middle), source=source)


def main() -> None:
    """Print the values."""
    for name, c in fit(fit_rows()).items():
        sys.stdout.write(f"{name}: value {c.value:.6g}, low {c.low:.6g}, high {c.high:.6g}\n")


if __name__ == "__main__":
    main()
