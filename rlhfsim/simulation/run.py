"""The entry point of the simulation: `simulate` runs a plan.

    simulate(setting, kv_tokens)                                   # one synchronous step
    simulate(setting, kv_tokens, steps=20, warmup=3, seed=0, noise=Noise(...), record="trace")
    simulate(setting, kv_tokens, record="strict")                  # raises where memory runs out

Schedules with staleness go to `asynchronous`. One seed gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rlhfsim.errors import RlhfsimError
from rlhfsim.simulation.result import Simulated, Staleness
from rlhfsim.simulation.simulator import Record, Simulator, simulator_of
from rlhfsim.simulation.synchronous import run_steps
from rlhfsim.specs.placement.placement import Schedule
from rlhfsim.step.calls import CallSetting
from rlhfsim.step.iteration import Iteration, Program, program

if TYPE_CHECKING:
    from rlhfsim.simulation.noise import Noise

__all__ = ["Record", "Simulated", "Staleness", "simulate"]

SAME = 1e-12
"""Relative difference below which a mean is the step itself."""


def simulate(
    setting: CallSetting,
    kv_tokens: float | None = None,
    *,
    steps: int = 1,
    warmup: int = 0,
    seed: int | None = None,
    noise: Noise | None = None,
    record: Record | None = None,
    cutoff: float | None = None,
) -> Simulated:
    """`steps` measured steps of a plan, after `warmup` that no figure counts.

    `cutoff`, in seconds per step, lets an asynchronous schedule stop early. The trace names no plan.

    Raises:
        RlhfsimError: "out-of-memory" at the first instant that does not fit, with record "strict".
    """
    if steps < 1 or warmup < 0:
        raise RlhfsimError(
            "bad-value",
            f"{steps} steps after {warmup} of warm-up cannot be simulated",
            help="simulate 1 step or more after 0 or more of warm-up",
        )
    if setting.placement.schedule.asynchronous:
        from rlhfsim.simulation.asynchronous import run as asynchronous

        asked = asynchronous.SteadyRun(kv_tokens, steps, warmup, seed, noise, record, cutoff)
        return asynchronous.simulate(setting, asked)
    programs = _programs(setting, kv_tokens, warmup + steps, seed, noise)
    simulator = simulator_of(setting, record)
    return run_programs(simulator, programs, setting.placement.schedule, warmup=warmup, seed=seed)


def run_programs(
    simulator: Simulator,
    programs: Sequence[Program],
    schedule: Schedule,
    *,
    warmup: int = 0,
    seed: int | None = None,
) -> Simulated:
    """Priced steps of a synchronous schedule, one after the other, in a simulator of their own."""
    ran = run_steps(simulator, programs, schedule)
    measured = ran[warmup:]
    seconds = tuple(r.seconds for r in measured)
    trace = simulator.recorder.trace(seed=seed, steps=len(ran)) if simulator.recorder.on else None
    return Simulated(
        iteration=_scaled(measured[0].iteration(), float(np.mean(seconds))),
        step_seconds=seconds,
        trace=trace,
        lost=dict(sorted(simulator.shared_links.lost.items())),
        peaks=simulator.memory_timeline.peaks() if simulator.memory_timeline is not None else (),
    )


def _programs(
    setting: CallSetting, kv_tokens: float | None, count: int, seed: int | None, noise: Noise | None
) -> list[Program]:
    if noise is None:
        return [program(setting, kv_tokens)] * count
    from rlhfsim.simulation.noise import Draws

    draws = Draws(setting, noise, seed)
    return [draws.program(kv_tokens, i) for i in range(count)]


def _scaled(iteration: Iteration, seconds: float) -> Iteration:
    """The iteration with the mean step as its time."""
    if abs(seconds - iteration.seconds) <= SAME * seconds:
        return iteration
    return replace(iteration, cost=iteration.cost.scaled(seconds / iteration.seconds))
