"""A plan over a run in draws: its steps, lengths of its batches, failures, restarts, checkpoints, rent.

    work = N T (1 + v e / sqrt(N))          T the mean step of a draw, v the spread of a step by its lengths
    run  = work (1 + C / D) + sum over n failures of (R + U D)
    n    ~ Poisson(work (1 + C / D) / (M - R - D / 2)),  U uniform,  D = sqrt(2 C M)    (Young 1974)

M is the time between failures of the job: that of a GPU, drawn from its interval, over their number.
A failure loses what was done since the last checkpoint and takes R until the run goes on. The rent is paid
for the whole run, at a price drawn from its range, one for all GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.simulation.noise import Draws, Noise, generator
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.step.iteration import closed_form
from rlhfsim.units import HOUR
from rlhfsim.what_if.estimate import PricedPlacement, priced_placement
from rlhfsim.what_if.risk.step import DRAWS, SEED, Floats, law_of, normals, two_sided

RESTART = Coefficient(
    value=600,
    low=120,
    high=1500,
    dimension="s",
    source="prior: from a failure until the run goes on; found in under 10 min and caught up within 15 min "
    "(MegaScale, arXiv 2402.15627, quoted from memory), minutes where a scheduler replaces the node",
)
CHECKPOINT = Coefficient(
    value=60,
    low=10,
    high=300,
    dimension="s",
    source="prior: time that one checkpoint blocks the run; seconds where it is written asynchronously, "
    "minutes for optimizer states over a shared file system",
)
LENGTH_DRAWS = 12
"""Batches that are priced for the spread of a step by its lengths."""
LEAST_PROGRESS = 0.01
"""Share of the time between failures that is taken to make progress at least."""


@dataclass(frozen=True)
class Outlook:
    """A plan over `steps` steps, in draws."""

    plan: Plan
    cluster: Cluster
    steps: int | None = None
    """Steps of the run; None: only the mean step is asked about."""
    usd_per_hour: float | None = None
    """Price of a GPU-hour, where the user gave it; else each profile's with its range."""

    @cached_property
    def step_s(self) -> Floats:
        """(draws,) mean seconds of a step of the run."""
        mean = law_of(self.plan).draws()
        if self.steps is None:
            return mean
        spread = self._length_spread / math.sqrt(self.steps)
        drawn: Floats = mean * np.exp(spread * normals("lengths"))
        return drawn

    @cached_property
    def run_s(self) -> Floats:
        """(draws,) seconds of the run, failures and checkpoints counted."""
        assert self.steps is not None, "a run has a length"
        return self._with_failures(self.steps * self.step_s, RESTART, CHECKPOINT)

    def _with_failures(self, work_s: Floats, restarts: Coefficient, checkpoints: Coefficient) -> Floats:
        """(draws,) seconds that so much work takes with its checkpoints and failures."""
        mtbf = self._mtbf_s
        restart, checkpoint = self._drawn("restart", restarts), self._drawn("checkpoint", checkpoints)
        interval = np.sqrt(2 * checkpoint * mtbf)
        busy = work_s * (1 + checkpoint / interval)
        progress = np.maximum(mtbf - restart - interval / 2, LEAST_PROGRESS * mtbf)
        random = generator(SEED, "failures")
        failures = random.poisson(busy / progress)
        # the sum of n uniform shares of an interval, by its mean and variance
        lost = failures / 2 + np.sqrt(failures / 12) * random.standard_normal(DRAWS)
        run: Floats = busy + failures * restart + np.clip(lost, 0, failures) * interval
        return run

    @property
    def _mtbf_s(self) -> Floats:
        """(draws,) seconds between failures of the whole job."""
        groups = self.cluster.node_groups
        name = "mtbf_per_gpu"
        rates = (g.gpus / self._drawn(name, g.profile.coefficient(name)) for g in groups)
        together: Floats = 1 / sum(rates, np.zeros(DRAWS))
        return together

    def _drawn(self, name: str, known: Coefficient) -> Floats:
        return two_sided(known.value, known.low, known.high, normals(name))

    @cached_property
    def usd_per_s(self) -> Floats | None:
        """(draws,) rent of the whole cluster; None where a price is unknown."""
        total, z = np.zeros(DRAWS), normals("price")
        for group in self.cluster.node_groups:
            price = group.profile.price
            if self.usd_per_hour is not None:
                total = total + group.gpus * self.usd_per_hour / HOUR
            elif price is None:
                return None
            else:
                total = total + group.gpus * two_sided(price.value, price.low, price.high, z) / HOUR
        return total

    @property
    def fits(self) -> float:
        """P(fits): bytes and seconds rest on no common coefficient, so that the ledger's own risk is it."""
        return 1.0 - self.plan.prediction.probability_out_of_memory

    @cached_property
    def _length_spread(self) -> float:
        """Standard deviation of ln(step) from batch to batch, on lengths drawn anew."""
        work = self.plan.workload
        if not work.generates or isinstance(work.response_len, Fixed):
            return 0.0
        priced = priced_placement(self.plan.placement, work, self.cluster)
        return float(np.std(np.log(_steps_drawn(priced)), ddof=1))


def _steps_drawn(priced: PricedPlacement) -> Sequence[float]:
    """Seconds of `LENGTH_DRAWS` steps, each with lengths of its own."""
    draws = Draws(priced.setting, Noise(lengths=True), SEED)
    schedule = priced.setting.placement.schedule
    return [closed_form(draws.program(priced.kv_tokens, i), schedule).seconds for i in range(LENGTH_DRAWS)]


def outlook_for(request: Request, plan: Plan, steps: int | None = None) -> Outlook:
    """The draws of a plan of a question, at its price."""
    return Outlook(plan, request.cluster, steps, request.price)
