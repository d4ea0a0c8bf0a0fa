"""Targets and their probabilities for people and for machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhfsim.plan import AskedRun, Plan
from rlhfsim.present.tables import NUMBER, USD, Word, each, fields
from rlhfsim.present.words import likely, percent
from rlhfsim.search.requirements import meets_all, shown, verdicts_of
from rlhfsim.units import DAY, HOUR
from rlhfsim.what_if.risk.odds import Odds

CERTAIN = ("oom", "staleness")
"""Targets without a probability."""
TITLES = {
    "time_of_run": "in time",
    "cost_of_run": "in budget",
    "step_time": "step kept",
    "cost_per_step": "cost kept",
}
"""Quantity of a target -> title of its probability."""


def target_texts(plan: Plan) -> Iterator[tuple[str | Word, ...]]:
    """What is asked for, met or not, what the plan reaches, and how surely."""
    verdicts, run = verdicts_of(plan), plan.run
    words = {True: Word("met", "good"), False: Word("MISSED", "bad")}
    if run is not None and run.odds is not None and run.confidence and any(v.drawn for v in verdicts):
        asked, together = f"asked for with {percent(run.confidence)}", _chance(run.odds.together)
        yield "fits and meets all", words[meets_all(plan)], asked, together
    for v in verdicts:
        yield v.requirement.text, words[v.met], shown(v.requirement, v.actual), _chance(v.probability)


def _chance(probability: float | None) -> str:
    return "" if probability is None else f"probability {likely(probability)}"


def told(plan: Plan) -> dict[str, str]:
    """The line of a verdict about the run that was asked for; nothing where none was."""
    return {"odds": summary(plan.run)} if plan.run else {}


def summary(run: AskedRun) -> str:
    """The run with its quantiles, and the probability of everything together; empty where none was drawn."""
    if (odds := run.odds) is None:
        return ""
    fits = f"it fits with a probability of {likely(odds.fits)}"
    return ", ".join(filter(None, [quantiles(run), fits]))


def together(run: AskedRun) -> str:
    """The probability that it fits and meets all targets in one; empty where none was drawn."""
    if run.odds is None or not any(target.probability is not None for target in run.targets):
        return ""
    return f"it fits and meets all targets with a probability of {likely(run.odds.together)}"


def quantiles(run: AskedRun) -> str:
    """Time and money of the run in draws; empty where its length was not given, or nothing was drawn."""
    if run.odds is None or run.odds.run_s is None:
        return ""
    low, _, high = run.odds.run_s
    scale, unit = (DAY, "d") if high >= DAY else (HOUR, "h")
    time = f"P10-P90 {NUMBER.shown(low / scale)} to {NUMBER.shown(high / scale)} {unit}"
    usd = run.odds.usd
    money = f", {NUMBER.shown(usd[0])} to {USD.shown(usd[2])} (range of prices)" if usd else ""
    return f"with failures and restarts {time}{money}"


def odds_dict(odds: Odds | None) -> Mapping[str, Any] | None:
    """The same content: P10, median and P90 of times and money, and probabilities."""
    return None if odds is None else fields(odds, "fits", "together", "meets", "step_s", "run_s", "usd")


def asked_data(odds: Odds | None) -> dict[str, Any]:
    """`requirements` and `odds` of an answer."""
    return {"requirements": reached(odds), "odds": odds_dict(odds)}


def reached(odds: Odds | None) -> list[dict[str, Any]]:
    """Every target and what the plan reaches."""
    verdicts = odds.verdicts if odds else ()
    return each(verdicts, "requirement.text", "actual", "met", "probability")
