"""Time until a reward is reached: schedules compared by a learning curve, not by their steps.

    samples = S (1 + B / C) / (1 + B_0 / C) (1 + p a) / (1 + p a_0)        time = samples / B x step

S: samples at which the curve reaches the target, learnt with batches of B_0 samples, a_0 updates old; B and
a: batch and mean age of a plan; C: critical batch (McCandlish et al. 2018, arXiv 1812.06162); p: share of
further samples for each update that samples are old. C and p are ranges, drawn once for all plans: where
they decide, the ranking is open, and the answer says so.

Not known here: runs that collapse on old samples, which no share of samples says; another learning rate for
another batch; a curve beyond its last row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.search.candidates import Candidate
from rlhfsim.search.planning import plan_for
from rlhfsim.search.request import Request
from rlhfsim.simulation.asynchronous.run import SteadyRun, simulate
from rlhfsim.specs.loading import checked, convert, parse_yaml, read_text
from rlhfsim.specs.quantities import Coefficient, CoefficientText, Text
from rlhfsim.specs.workload.workload import Count
from rlhfsim.what_if.curve_files import rows_of
from rlhfsim.what_if.engine import Question, answer
from rlhfsim.what_if.estimate import priced_placement
from rlhfsim.what_if.points import asking, first_of_each, points
from rlhfsim.what_if.risk.step import Floats, law_of, normals, two_sided

SURE = 0.9
"""Least probability of being first from which a ranking is not open."""
SEEN_AGE = 8.0
"""Mean age of samples up to which runs were published that reach the reward of a synchronous one (AReaL,
arXiv 2505.24298, section 7.4, with its decoupled loss)."""
STALENESS = Coefficient(
    value=0.02,
    low=0.0,
    high=0.15,
    source="prior: as many updates with samples one old (arXiv 2410.18252), two old with a loss made for it "
    "(arXiv 2602.17616) and up to eight old (arXiv 2505.24298); plain losses need more or collapse",
)
CRITICAL = Coefficient(
    value=2048,
    low=256,
    high=16_384,
    source="prior: samples of an update from which more of them save few updates; it grows with training "
    "and with old samples, and no public figure for GRPO was read",
)


@checked
@frozen
class Learning:
    """The file of `--learning`."""

    title: str = ""
    target: float
    """Reward to reach, in the unit of the curve."""
    curve: Text
    """CSV of samples trained on and reward, from the log of a run or a publication; relative to this file."""
    batch: Count
    """Samples of an update of that run."""
    age: Annotated[float, Field(ge=0, le=64)] = 0.0
    """Mean age of its samples, updates."""
    staleness: CoefficientText = STALENESS
    """Share of further samples for each update that samples are old."""
    critical_batch: CoefficientText = CRITICAL
    """Samples."""
    prompts: tuple[Count, ...] = ()
    """Batches that compete, in prompts; none: that of the question."""


@frozen
class Reached:
    """One schedule with one batch."""

    plan: Plan
    age: float
    """Mean updates between a sample and the update that it trains."""
    seconds: Floats
    """(draws,) until the reward is reached."""
    first: float = 0.0
    """Probability of being there before every other one."""

    @property
    def schedule(self) -> str:
        """synchronous, or how old samples may be."""
        lag = self.plan.placement.schedule.staleness
        return f"up to {lag:g} old" if lag else "synchronous"

    def quantile(self, share: float) -> float:
        """Seconds."""
        return float(np.quantile(self.seconds, share))


@frozen
class TimeToReward:
    """The answer."""

    learning: Learning
    samples: float
    """At which the curve reaches the target."""
    reached: tuple[Reached, ...]
    """The most likely first."""

    @property
    def open(self) -> bool:
        """Whether the evidence does not say which is first."""
        if len(self.reached) < 2:
            return False
        return self.reached[0].first < SURE or max(self.reached[0].age, self.learning.age) > SEEN_AGE


def read_learning(path: Path) -> tuple[Learning, float]:
    """The file, and samples at which its curve reaches the target.

    Raises:
        RlhfsimError: the first thing wrong with its place, or a target that the curve never reaches.
    """
    source = parse_yaml(read_text(path), str(path))
    learning = convert(Learning, source, source.data if isinstance(source.data, dict) else {})
    return learning, samples_to(learning, path.parent / learning.curve)


def samples_to(learning: Learning, path: Path) -> float:
    """Samples at which a curve first reaches the target, on straight lines between its rows.

    Raises:
        RlhfsimError: it never does, or starts above it.
    """
    rows = list(rows_of(path))
    reward = np.maximum.accumulate([row.value for row in rows]) if rows else np.zeros(0)
    if not len(reward) or not reward[0] < learning.target <= reward[-1]:
        ends = f"goes from {reward[0]:g} to {reward[-1]:g}" if len(reward) else "has no rows"
        raise RlhfsimError(
            "target-outside-curve",
            f"the curve {ends}, the target is {learning.target:g}",
            place=Place(file=str(path)),
            help="give a target that the run of the curve reached: nothing is known beyond it",
        )
    i = int(np.argmax(reward >= learning.target))
    share = (learning.target - reward[i - 1]) / (reward[i] - reward[i - 1])
    return float(rows[i - 1].step + share * (rows[i].step - rows[i - 1].step))


def more_samples(learning: Learning, batch: float, age: float) -> Floats:
    """(draws,) samples of a batch and an age over those of the curve."""
    drawn = {}
    for name in ("staleness", "critical_batch"):
        known = getattr(learning, name)
        value = max(known.value, 1e-6)
        drawn[name] = two_sided(value, known.low, max(known.high, value), normals(name))
    p, c = drawn["staleness"], drawn["critical_batch"]
    needed: Floats = (1 + batch / c) / (1 + learning.batch / c) * (1 + p * age) / (1 + p * learning.age)
    return needed


def time_to_reward(request: Request, learning: Learning, samples: float) -> TimeToReward:
    """The proven best plan of every schedule and batch, by the time until the reward is reached."""
    asked = (schedule for batch in _batches(request, learning) for schedule in _schedules(batch))
    each = (points(Question(request=one), [asking()], lambda asked: answer(asked).best) for one in asked)
    reached = [_reached(p.question.request, p.answer, learning, samples) for p in first_of_each(each)]
    if not reached:
        return TimeToReward(learning=learning, samples=samples, reached=())
    least = np.argmin([one.seconds for one in reached], axis=0)
    ranked = [replace(one, first=float(np.mean(least == i))) for i, one in enumerate(reached)]
    ranked.sort(key=lambda one: (-one.first, one.quantile(0.5)))
    return TimeToReward(learning=learning, samples=samples, reached=tuple(ranked))


def _batches(request: Request, learning: Learning) -> Iterator[Request]:
    for prompts in learning.prompts or (request.workload.prompts,):
        yield replace(request, workload=replace(request.workload, prompts=prompts))


def _schedules(request: Request) -> Iterator[Request]:
    """On-policy; and with old samples, those of one update and of the most that are allowed."""
    yield replace(request, allow=request.allow - {"async", "lend"}, architecture=None)
    if "async" in request.forbid:
        return
    for lag in sorted({1, request.max_staleness}):
        allow = request.allow | {"async"}
        yield replace(request, allow=allow, architecture="async", max_staleness=lag)


def _reached(request: Request, best: Candidate, learning: Learning, samples: float) -> Reached:
    work = request.workload
    plan = plan_for(request, best)
    age = 0.0
    if plan.placement.schedule.asynchronous:
        priced = priced_placement(best.placement, work, request.cluster)
        stale = simulate(priced.setting, SteadyRun(priced.kv_tokens)).staleness
        age = stale.mean if stale else plan.placement.schedule.staleness
    batch = work.num_sequences / work.mini_batches
    updates = samples * more_samples(learning, batch, age) / work.num_sequences
    seconds = updates * law_of(plan, best.iteration.cost).draws()
    return Reached(plan=plan, age=age, seconds=seconds)
