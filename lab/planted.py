"""Runs of a simulated cluster whose coefficients are known: what a calibration must find again.

The plan runs in the simulation on a profile with planted values; every phase of every step is then
stretched by exp(noise N(0, 1)), and what does not wait for it moves along. The result is a trace like
that of a real run, read by the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from rlhfsim.calibration.observation import Observation, observe
from rlhfsim.calibration.predict import cluster_with, with_coefficients
from rlhfsim.calibration.priors import Prior
from rlhfsim.memory.ledger import ledger
from rlhfsim.plan import Plan
from rlhfsim.simulation.run import simulate
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.model.roles import models_of
from rlhfsim.step.calls import CallSetting
from rlhfsim.trace import Span, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaws:
    """What is wrong with a run, besides noise."""

    noise: float = 0.05
    """Standard deviation of ln seconds of a phase from step to step."""
    missing: frozenset[str] = frozenset()
    """Phases without spans."""
    slowed: Mapping[str, float] = field(default_factory=dict)
    """Phases that take this many times as long in the whole run: an outlier."""


def drawn(prior: Prior, rng: np.random.Generator) -> float:
    """A value as the prior has it: either side equally likely, its P10 to P90 in 80 % of draws."""
    z = float(rng.normal())
    theta = prior.mean + z * (prior.above if z > 0 else prior.below)
    return float(np.exp(np.clip(theta, prior.least, prior.most)))


def planted_run(
    plan: Plan,
    profile: Profile,
    values: Mapping[str, float],
    rng: np.random.Generator,
    *,
    name: str,
    steps: int = 4,
    flaws: Flaws | None = None,
) -> Observation:
    """A run of `plan` on a cluster where `profile` has the coefficients `values`."""
    trace = planted_trace(plan, profile, values, rng, steps=steps, flaws=flaws)
    return observe(plan, trace, name=name)


def planted_trace(
    plan: Plan,
    profile: Profile,
    values: Mapping[str, float],
    rng: np.random.Generator,
    *,
    steps: int = 4,
    flaws: Flaws | None = None,
) -> Trace:
    """The trace of such a run."""
    wrong = flaws or Flaws()
    trace = _trace(plan, with_coefficients(profile, values), profile, steps)
    spans = tuple(s for s in trace.spans if s.name not in wrong.missing)
    factors = {
        key: wrong.slowed.get(key[0], 1.0) * float(np.exp(wrong.noise * rng.normal())) for key in _keys(spans)
    }
    return replace(trace, spans=stretched(spans, factors), counters=())


def _trace(plan: Plan, changed: Profile, profile: Profile, steps: int) -> Trace:
    models = models_of(plan.workload)
    memory = ledger(models, plan.placement, plan.workload, cluster_with(plan, profile))
    setting = CallSetting(
        models=models, placement=plan.placement, workload=plan.workload, cluster=cluster_with(plan, changed)
    )
    tokens = memory.kv_tokens if memory.kv_tokens and memory.kv_tokens > 0 else None
    trace = simulate(setting, tokens, steps=steps, record="trace").trace
    assert trace is not None
    return replace(trace, plan_hash=plan.input_hash)


def _keys(spans: Iterable[Span]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((s.name, s.step) for s in spans))


def stretched(spans: tuple[Span, ...], factors: Mapping[tuple[str, int], float]) -> tuple[Span, ...]:
    """The spans on a clock that runs at the factor of the phase at work, and at 1 between phases.

    Where several work at once the one that began last sets the pace.
    """
    instants = sorted({0.0, *(s.start_s for s in spans), *(s.end_s for s in spans)})
    ordered = sorted((s for s in spans if s.seconds > 0), key=lambda s: s.start_s)
    at, now, active, following = {instants[0]: 0.0}, 0.0, [], 0
    for start, end in pairwise(instants):
        while following < len(ordered) and ordered[following].start_s <= start:
            active.append(ordered[following])
            following += 1
        active = [s for s in active if s.end_s > start]
        pace = factors[(active[-1].name, active[-1].step)] if active else 1.0
        now += pace * (end - start)
        at[end] = now
    return tuple(replace(s, start_s=at[s.start_s], end_s=at[s.end_s]) for s in spans)
