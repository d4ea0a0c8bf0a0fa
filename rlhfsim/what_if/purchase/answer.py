"""The answer to a portfolio: priced runs, the purchase that keeps the deadlines, and what else it could cost.

GPUs that are busy all the time make runs wait. Purchases are solved with less and less of the hours planned
(`FILLS`); the cheapest that keeps all deadlines as surely as was asked, rents beyond the plan counted, is the
answer, or else the one that most likely does.

    P10, P90 of the cost = cost -+ sqrt(sum of squared swings)    figures and rents are taken as independent
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Literal

from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.units import HOUR
from rlhfsim.what_if.purchase.deadlines import Punctuality, punctuality
from rlhfsim.what_if.purchase.document import CostTerms, Portfolio, PortfolioJob, Supply
from rlhfsim.what_if.purchase.supply import JobMix, Purchase, RunOption, purchase
from rlhfsim.what_if.risk.odds import quantiles
from rlhfsim.what_if.risk.run import outlook_for
from rlhfsim.what_if.scenarios.designs import Designs
from rlhfsim.what_if.sizing import resized

FILLS = (0.95, 0.8, 0.6, 0.4)
"""Shares of the hours of owned and reserved GPUs that a purchase may plan."""
BOUGHT = "all bought"
INSTEAD: Mapping[str, tuple[Supply, ...]] = {
    BOUGHT: ("bought", "on-demand"),
    "all reserved": ("reserved",),
    "all on demand": ("on-demand",),
}
"""What the purchase is compared with; what is bought is rented until it arrives."""
SMALL = 5e-4
"""Share of the cost below which a figure moves nothing."""


@frozen
class Swing:
    """What one figure moves."""

    name: str
    low_usd: float
    """The cost where the figure is at its P10."""
    high_usd: float

    @property
    def reach(self) -> float:
        """Between both."""
        return abs(self.high_usd - self.low_usd)


@frozen
class Decision:
    """What to buy, reserve and rent, and how sure it is."""

    portfolio: Portfolio
    terms: CostTerms
    options: tuple[RunOption, ...]
    chosen: Purchase | None
    """None where the supply cannot serve all runs."""
    punctual: Punctuality | None = None
    confidence: float
    instead: Mapping[str, Purchase] = field(default_factory=dict)
    swings: tuple[Swing, ...] = ()
    """The widest first."""
    unserved: tuple[str, ...] = ()
    """Jobs that no kind and number of GPUs runs in time."""

    @property
    def meets(self) -> bool:
        """Whether all deadlines are kept as surely as was asked."""
        return self.punctual is not None and self.punctual.all_in_time >= self.confidence

    @property
    def usd(self) -> tuple[float, float, float]:
        """P10, value and P90 of the cost, with what is rented beyond the plan."""
        assert self.chosen is not None
        assert self.punctual is not None
        cost, (least, besides, most) = self.chosen.usd, self.punctual.rented_usd
        swings = [s for s in self.swings if not s.name.startswith("growth of ")]  # drawn with the runs
        sides = [(s.low_usd - cost, s.high_usd - cost) for s in swings]
        down = math.hypot(besides - least, *(min(0.0, *pair) for pair in sides))
        up = math.hypot(most - besides, *(max(0.0, *pair) for pair in sides))
        return cost + besides - down, cost + besides, cost + besides + up


def priced_options(
    portfolio: Portfolio, profiles: Mapping[str, Profile], designs: Designs
) -> tuple[RunOption, ...]:
    """Every job on every kind and size that fits, its run in draws.

    Raises:
        RlhfsimError: a workload that no framework runs there.
    """
    asked = [
        (job, profile.name, _request(job, profile, size))
        for job in portfolio.jobs
        for profile in profiles.values()
        for size in portfolio.sizes
    ]
    designed = designs.all([request for _, _, request in asked])
    return tuple(
        _option(job, gpu, request, found.plan)
        for (job, gpu, request), found in zip(asked, designed, strict=True)
        if found.plan is not None
    )


def _request(job: PortfolioJob, profile: Profile, size: int) -> Request:
    cluster = Cluster(node_groups=(node_group(profile, 1),))
    return resized(Request(cluster=cluster, workload=job.workload), profile, size)


def _option(job: PortfolioJob, gpu: str, request: Request, plan: Plan) -> RunOption:
    look = outlook_for(request, plan, job.steps)
    return RunOption(
        job=job.name,
        gpu=gpu,
        gpus=request.cluster.gpus,
        hours=quantiles(look.run_s)[1] / HOUR,
        in_time=float((look.run_s <= job.deadline).mean()) * look.fits,
        drawn_h=look.run_s / HOUR,
        plan=plan,
    )


def decided(mix: JobMix, confidence: float) -> Decision:
    """The purchase for a portfolio whose runs are priced."""
    portfolio = mix.portfolio
    sure = tuple(o for o in mix.options if o.in_time >= confidence)
    unserved = tuple(j.name for j in portfolio.jobs if j.name not in {o.job for o in sure})
    empty = Decision(
        portfolio=portfolio, terms=mix.terms, options=tuple(mix.options), chosen=None, confidence=confidence
    )
    if unserved:
        return replace(empty, unserved=unserved)
    mix = replace(mix, options=sure)
    tried = list(_tried(mix))
    if not tried:
        return empty
    kept = [pair for pair in tried if pair[1].all_in_time >= confidence]
    chosen, punctual = (
        min(kept, key=_whole_usd) if kept else max(tried, key=lambda p: (p[1].all_in_time, -_whole_usd(p)))
    )
    others = {
        name: purchase(mix, fill=chosen.fill, supply=supply)
        for name, supply in INSTEAD.items()
        if supply[0] in portfolio.supply
    }
    return replace(
        empty,
        options=sure,
        chosen=chosen,
        punctual=punctual,
        instead={
            name: other
            for name, other in others.items()
            if other is not None and (name != BOUGHT or other.bought)  # else renting is what costs least
        },
        swings=tuple(sorted(_swings(mix, chosen), key=lambda s: -s.reach)),
    )


def _whole_usd(pair: tuple[Purchase, Punctuality]) -> float:
    return pair[0].usd + pair[1].rented_usd[1]


def _tried(mix: JobMix) -> Iterator[tuple[Purchase, Punctuality]]:
    """A purchase for each share of hours that may be planned; one without GPUs of its own is tried once."""
    for fill in FILLS:
        found = purchase(mix, fill=fill)
        if found is None:
            return
        yield found, punctuality(mix, found)
        if not (found.bought or found.reserved):
            return


def _swings(mix: JobMix, chosen: Purchase) -> Iterator[Swing]:
    """What each figure moves: what is bought and reserved stays, its use is chosen anew.

    With another lead time everything is decided anew, and so where the GPUs would not suffice.
    """

    def cost(name: str, end: Literal["low", "high"]) -> float:
        moved = replace(mix, terms=mix.terms.at(name, end))
        again = None if name == "lead_time" else chosen
        found = purchase(moved, fill=chosen.fill, decided=again) or purchase(moved, fill=chosen.fill)
        return found.usd if found else math.nan

    for name, known in mix.terms.known.items():
        if known.low < known.high:
            swing = Swing(name=name, low_usd=cost(name, "low"), high_usd=cost(name, "high"))
            if swing.reach > SMALL * abs(chosen.usd):
                yield swing
