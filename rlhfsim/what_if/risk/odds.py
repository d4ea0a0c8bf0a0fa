"""Requirements against the draws of a plan: the probability of each, and of all of them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from rlhfsim import units
from rlhfsim.frozen import frozen
from rlhfsim.memory.risk import Item, probability_above
from rlhfsim.plan import AskedRun, Plan, RunOdds, RunTarget
from rlhfsim.search.request import Request
from rlhfsim.search.requirements import CONFIDENCE, Requirement, Verdict, meets, most_seconds, verdicts
from rlhfsim.training.packing import sequences_of
from rlhfsim.what_if.risk.run import Outlook, outlook_for
from rlhfsim.what_if.risk.step import Floats


@frozen
class Odds:
    """What is asked of a plan, with probabilities."""

    verdicts: tuple[Verdict, ...]
    fits: float
    """P(fits)."""
    together: float
    """P(it fits and meets every target that is drawn)."""
    step_s: tuple[float, float, float]
    """P10, median and P90 of the mean step."""
    run_s: tuple[float, float, float] | None = None
    """Seconds of the run, failures and checkpoints counted; None without its length."""
    usd: tuple[float, float, float] | None = None
    """Price of the run, or of a step without its length; None where a price is unknown."""
    confidence: float = CONFIDENCE
    """Probability with which it must fit and meet all targets."""

    @property
    def meets(self) -> bool:
        """Whether it fits and meets all targets in one, as surely as was asked."""
        return meets(self.verdicts, self.together)


def odds(requirements: Sequence[Requirement], look: Outlook, confidence: float = CONFIDENCE) -> Odds:
    """Every requirement with its probability."""
    judged = tuple(
        replace(v, probability=probability(v.requirement, look), confidence=confidence)
        for v in verdicts(requirements, look.plan, look.steps)
    )
    spent = _drawn("cost_per_step" if look.steps is None else "cost_of_run", look)
    return Odds(
        verdicts=judged,
        fits=look.fits,
        together=together(requirements, look),
        step_s=quantiles(look.step_s),
        run_s=None if look.steps is None else quantiles(look.run_s),
        usd=None if spent is None else quantiles(spent),
        confidence=confidence,
    )


@frozen
class Targets:
    """What is asked of the plans of a question."""

    requirements: Sequence[Requirement] = ()
    steps: int | None = None
    """Steps of the whole run; None: unknown."""
    confidence: float | None = None
    """Probability with which a plan must fit and meet all; None: by its own figures."""

    def most_s(self, request: Request) -> float:
        """Seconds of the longest step that meets all that limits time, throughput, money and energy."""
        tokens = sequences_of(replace(request.workload, packing=True)).tokens  # padding left out
        return most_seconds(request, self.requirements, tokens, self.steps)

    def odds(self, request: Request, plan: Plan) -> Odds:
        """What is asked, with probabilities, of a plan of the question."""
        return odds(self.requirements, outlook_for(request, plan, self.steps), self.confidence or CONFIDENCE)


UNTARGETED = Targets()


def asked_run(requirements: Sequence[Requirement], steps: int | None, known: Odds | None) -> AskedRun | None:
    """The run as a plan carries it; `known`: None where nothing was drawn. None where nothing was asked."""
    if not requirements and steps is None:
        return None
    chances = {v.requirement: v.probability for v in known.verdicts} if known else {}
    names = [f.name for f in fields(RunOdds)]
    return AskedRun(
        steps=steps,
        targets=tuple(RunTarget(**asdict(one), probability=chances.get(one)) for one in requirements),
        confidence=known.confidence if known and requirements else None,
        odds=RunOdds(**{name: getattr(known, name) for name in names}) if known else None,
    )


def money_of_step(look: Outlook) -> tuple[float, float, float] | None:
    """P10, median and P90 of the rent of one step; None where a price is unknown."""
    drawn = _drawn("cost_per_step", look)
    return None if drawn is None else quantiles(drawn)


def quantiles(drawn: Floats) -> tuple[float, float, float]:
    """P10, median and P90."""
    low, middle, high = np.quantile(drawn, (0.1, 0.5, 0.9)).tolist()
    return low, middle, high


def probability(one: Requirement, look: Outlook) -> float | None:
    """P(the plan meets it); None where it is a choice or itself a probability."""
    if one.quantity == "memory":
        return _leaner(one, look)
    met = _met(one, look)
    return None if met is None else float(np.mean(met))


def together(requirements: Sequence[Requirement], look: Outlook) -> float:
    """P(fits and meets all): what is drawn is met in one and the same draw, bytes apart."""
    bytes_met, all_met = look.fits, np.ones_like(look.step_s, dtype=bool)
    for one in requirements:
        if one.quantity == "memory":
            bytes_met = min(bytes_met, _leaner(one, look))  # within less is within what fits
        elif (met := _met(one, look)) is not None:
            all_met &= met
    return bytes_met * float(np.mean(all_met))


def _met(one: Requirement, look: Outlook) -> NDArray[np.bool_] | None:
    """(draws,) whether it is met; None where it is not drawn."""
    drawn = _drawn(one.quantity, look)
    if drawn is None:
        return None
    return np.asarray(drawn <= one.value if one.relation in ("<", "<=") else drawn >= one.value)


def _drawn(quantity: str, look: Outlook) -> Floats | None:
    """(draws,) of a quantity in base units; None where it is not drawn, or a price is unknown."""
    p = look.plan.prediction
    slower = look.step_s / p.step_s
    if quantity == "step_time":
        return look.step_s
    if quantity == "time_of_run":
        return look.run_s
    if quantity in ("cost_per_step", "cost_of_run"):
        rate = look.usd_per_s
        return None if rate is None else rate * (look.step_s if quantity == "cost_per_step" else look.run_s)
    if quantity == "energy":
        return p.kwh_per_step * units.JOULE_PER_KWH * slower
    if quantity.startswith("tokens_per_s"):
        gpus = 1 if quantity.endswith("gpu") else sum(h.gpus for h in look.plan.hardware)
        return p.tokens_per_s_per_gpu * gpus / slower
    return None


def _leaner(one: Requirement, look: Outlook) -> float:
    """P(no GPU holds more): the fullest phase of the ledger, as for the risk of running out."""
    p = look.plan.prediction
    limit = one.value * (p.capacity_bytes if one.share else 1.0)
    above = max((probability_above(items, limit) for items in _phases(look)), default=0.0)
    return 1.0 - above if one.relation in ("<", "<=") else above


def _phases(look: Outlook) -> Iterator[list[Item]]:
    entries = look.plan.prediction.ledger
    for _, phase in groupby(entries, key=lambda e: (e.phase, e.pool)):
        yield [Item(e.bytes, e.low_bytes, e.high_bytes) for e in phase]
