"""A planned run in draws: when it is done, what it costs, whether it fits all the way.

    work = sum_k seconds_k x (step of a draw / step)_k x length_k    +  changes of plan
    run  = work with its checkpoints and failures                      (what_if.risk.run)

What the model leaves out is one draw for all stretches, and so is the length: a curve that lies at its P90
does so everywhere. The spread of single batches is left out: over hundreds of steps it averages out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rlhfsim.search.requirements import Requirement
from rlhfsim.step.prediction import usd_per_step
from rlhfsim.what_if.long_run.document import LongRun
from rlhfsim.what_if.long_run.replanning import PlannedStretch, RunPlan
from rlhfsim.what_if.risk.odds import Odds, odds
from rlhfsim.what_if.risk.run import Outlook
from rlhfsim.what_if.risk.step import Floats, law_of, normals, two_sided


@dataclass(frozen=True, kw_only=True)
class LongOutlook(Outlook):
    """The draws of a run whose steps change; `plan` has the mean step."""

    run: LongRun
    stretches: tuple[PlannedStretch, ...]
    changes: int

    @cached_property
    def step_s(self) -> Floats:
        """(draws,) mean seconds of a step, evaluations and changes of plan shared out over all steps."""
        z, run = normals("response lengths"), self.run
        change = self._drawn("checkpoint", run.checkpoint) + self._drawn("restart", run.restart)
        change += self._drawn("warm-up", run.warm_up)
        work = sum((_seconds(s, z) for s in self.stretches), self.changes * change)
        return work / run.steps

    @cached_property
    def run_s(self) -> Floats:
        """(draws,) seconds of the run with the checkpoints and failures of its file."""
        return self._with_failures(self.run.steps * self.step_s, self.run.restart, self.run.checkpoint)

    @property
    def fits(self) -> float:
        """P(fits): the tightest stretch decides, since bytes of all rest on the same coefficients."""
        return 1 - max(s.plan.prediction.probability_out_of_memory for s in self.stretches)


def _seconds(part: PlannedStretch, z: Floats) -> Floats:
    """(draws,) seconds of a stretch."""
    step = part.plan.prediction.step_s
    drawn = law_of(part.plan).draws() / step
    return part.seconds * drawn * two_sided(1.0, part.low_s / step, part.high_s / step, z)


def outlook_of(answer: RunPlan, parts: Sequence[PlannedStretch], changes: int) -> LongOutlook:
    """The draws of a choice of plans."""
    request, steps = answer.request, answer.run.steps
    mean = (sum(s.seconds for s in parts) + changes * answer.run.replan_s) / steps
    last = parts[-1].plan
    usd = usd_per_step(request.cluster, mean, request.price)
    prediction = replace(
        last.prediction,
        step_s=mean,
        usd_per_step=usd,
        probability_out_of_memory=max(s.plan.prediction.probability_out_of_memory for s in parts),
    )
    return LongOutlook(
        plan=replace(last, prediction=prediction),
        cluster=request.cluster,
        steps=steps,
        usd_per_hour=request.price,
        run=answer.run,
        stretches=tuple(parts),
        changes=changes,
    )


def run_odds(answer: RunPlan, targets: Sequence[Requirement], confidence: float) -> tuple[Odds, Odds | None]:
    """Probabilities of the answer, and of the best single plan where one fits."""
    chosen = odds(targets, outlook_of(answer, answer.stretches, len(answer.changes)), confidence)
    fixed = odds(targets, outlook_of(answer, answer.fixed, 0), confidence) if answer.fixed else None
    return chosen, fixed
