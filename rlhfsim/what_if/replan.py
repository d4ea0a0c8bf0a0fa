"""A run that goes on, calibrated: would another plan now be better than the one that runs?

Better means: faster with a probability of at least `SURE`, both plans priced on the profile as this run
shows it (coefficients that both rest on cancel, what_if.risk). The run itself keeps its plan.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from rlhfsim.calibration.fit import Calibration
from rlhfsim.calibration.observation import Observation
from rlhfsim.calibration.predict import cluster_with, with_lengths
from rlhfsim.calibration.profile_writer import biases_after, provenance, workload_after
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.what_if.design import design
from rlhfsim.what_if.estimate import estimate, priced_placement
from rlhfsim.what_if.risk.step import law_of, probability_faster
from rlhfsim.what_if.simplest import CLOSE

SEARCH_S = 10.0
"""Most seconds that the search for another plan may take while the run waits."""
SURE = 0.9
"""Probability from which another plan is called better."""


@frozen
class Replanned:
    """The plan that runs against the best one, on the profile as the run shows it."""

    measured_s: float
    """Median step of the run."""
    current: Plan
    """The plan that runs, priced again."""
    best: Plan | None = None
    """The best other plan; None where it saves less than what `design` gives up for a simpler one."""
    probability: float = 0.0
    """That the other one is faster."""

    @property
    def better(self) -> bool:
        """Whether the other plan is surely better."""
        return self.probability >= SURE


def replanned(plan: Plan, run: Observation, calibration: Calibration) -> Replanned:
    """The question of a plan asked again, with the lengths and the coefficients that its run shows."""
    work = with_lengths(run.plan.workload, run.prompt_tokens, run.response_tokens)
    cluster = cluster_with(plan, calibrated(calibration))
    current = estimate(plan.placement, work, cluster)
    staleness = plan.placement.schedule.staleness
    request = Request(
        cluster=cluster,
        workload=work,
        backend=plan.placement.backend,
        framework=plan.choice.asked.framework if plan.choice else None,
        time_limit=SEARCH_S,
        allow=frozenset({"async"} if staleness else ()),
        max_staleness=staleness or 1,
    )
    best = design(request, explain=False, simplest_s=None).best
    answer = Replanned(measured_s=median(run.step_s), current=current)
    if best is None or current.prediction.step_s <= best.prediction.step_s * (1 + CLOSE):
        return answer
    other, running = (
        law_of(p, priced_placement(p.placement, p.workload, cluster).iteration.cost) for p in (best, current)
    )
    return replace(answer, best=best, probability=probability_faster(other, running))


def calibrated(calibration: Calibration) -> Profile:
    """The profile with what was fitted, in memory."""
    fitted = {c.name: c.after for c in calibration.coefficients}
    profile = calibration.profile
    return replace(
        profile,
        coefficients={**profile.coefficients, **fitted},
        calibration=provenance(calibration),
        biases=biases_after(calibration),
        workload=workload_after(calibration),
    )
