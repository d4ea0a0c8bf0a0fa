"""A run that goes on, calibrated: would another plan now be better than the one that runs?

Better means: faster with a probability of at least `SURE`, both plans priced on the profile as this run shows it
(coefficients that both rest on cancel, search.explain). The run itself keeps its plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from rlhfsim import units
from rlhfsim.api import design, estimate
from rlhfsim.calibration.fit import Calibration, calibrate
from rlhfsim.calibration.observation import Observation, observe
from rlhfsim.calibration.predict import cluster_with, with_lengths
from rlhfsim.calibration.profile_writer import provenance, write_profile
from rlhfsim.errors import RlhfsimError
from rlhfsim.memory.ledger import ledger
from rlhfsim.plan import Plan
from rlhfsim.present.terminal.recalibrated import plan_text
from rlhfsim.present.terminal.words import percent
from rlhfsim.search.explain import probability_better
from rlhfsim.search.parallel import serial
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.iteration import Iteration, iteration
from rlhfsim.trace import Trace

SEARCH_S = 10.0
"""Most seconds that the search for another plan may take while the run waits."""
SURE = 0.9
"""Probability from which another plan is called better."""
NAME = "calibrated"


class Replan:
    """What a run says about its profile, every few iterations."""

    def __init__(self, plan: Plan, name: str) -> None:
        """`name` is how the run is called in the calibrated profile."""
        self._plan, self._name = plan, name
        self._found: Calibration | None = None

    def look(self, trace: Trace, rows: Sequence[Mapping[str, float]]) -> str:
        """A line about the trace so far; what cannot be calibrated is said, and never ends a run."""
        try:
            seen = observe(
                self._plan, trace, name=self._name, rows=[{"step": i, **row} for i, row in enumerate(rows)]
            )
            self._found = calibrate([seen], load_profile(self._plan.hardware[0].profile), errors=False)
            count = f"{seen.steps} iteration{'s' * (seen.steps != 1)}"
            with serial():  # a fork of the driver would inherit the threads of Ray
                return f"recalibrated on {count}: {self._verdict(seen, self._found)}"
        except RlhfsimError as error:
            return f"not recalibrated: {error.message}"

    def _verdict(self, seen: Observation, found: Calibration) -> str:
        cluster, work = cluster_with(self._plan, calibrated(found)), lengths_of(seen)
        own = estimate(self._plan.placement, work, cluster)
        schedule = self._plan.placement.schedule
        best = design(
            Request(
                cluster=cluster,
                workload=work,
                backend=self._plan.placement.backend,
                time_limit=SEARCH_S,
                allow=frozenset({"async"} if schedule.staleness else ()),
                max_staleness=schedule.staleness or 1,
            ),
            explain=False,
        ).chosen
        measured = median(seen.step_s)
        told = f"{len(found.coefficients)} coefficients; a step takes {_s(measured)}, planned {_s(self._plan.prediction.step_s)}, now predicted {_s(own.prediction.step_s)}"
        if best is None or best.placement == own.placement:
            return f"{told}; this plan is still the best"
        sure = probability_better(step_of(best, cluster), step_of(own, cluster))
        p = best.prediction
        other = f"{plan_text(best)}, {_s(p.step_s)} (P10-P90 {_s(p.low_s)} to {_s(p.high_s)}), faster with a probability of {percent(sure)}"
        if sure < SURE:
            return f"{told}; no other plan is surely better (the best: {other})"
        return f"{told}; ANOTHER PLAN WOULD NOW BE BETTER: {other}"

    def write(self, folder: Path) -> Path | None:
        """The last calibration as a new profile in the run's folder; None where there was none."""
        if self._found is None:
            return None
        taken = sum(1 for _ in folder.glob(f"{NAME}*.yaml"))
        out = folder / (f"{NAME}_{taken + 1}.yaml" if taken else f"{NAME}.yaml")
        write_profile(out, self._found)
        return out


def profile_line(out: Path | None) -> str:
    """Where the calibrated profile of a run lies."""
    if out is None:
        return "no calibrated profile: the run was never long enough to calibrate"
    return f"calibrated profile: {out}; plan with it: rlhfsim design --profile {out} ..."


def calibrated(found: Calibration) -> Profile:
    """The profile with what was fitted, in memory."""
    moved = {c.name: c.after for c in found.coefficients}
    return replace(
        found.profile, coefficients={**found.profile.coefficients, **moved}, calibration=provenance(found)
    )


def step_of(plan: Plan, cluster: Cluster) -> Iteration:
    """The step of a plan in closed form, on this cluster."""
    models = models_of(plan.workload)
    tokens = ledger(models, plan.placement, plan.workload, cluster).kv_tokens
    return iteration(
        models, plan.placement, plan.workload, cluster, kv_tokens=tokens if tokens and tokens > 0 else None
    )


def lengths_of(seen: Observation) -> Workload:
    """The plan's workload with the lengths that were measured."""
    return with_lengths(seen.plan.workload, seen.prompt_tokens, seen.response_tokens)


def _s(seconds: float) -> str:
    return units.format(seconds, "s")
