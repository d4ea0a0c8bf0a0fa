"""Targets and their probabilities for people and for machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from rlhfsim.plan import AskedRun, RunOdds
from rlhfsim.present.tables import fields
from rlhfsim.present.terminal.console import plain_grid
from rlhfsim.present.words import likely
from rlhfsim.search.requirements import Verdict, shown
from rlhfsim.units import DAY, HOUR, format, significant
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


def chance_titles(quantities: Sequence[str]) -> list[str]:
    """A column for each target that has a probability."""
    return [f">{TITLES.get(name, name)}" for name in quantities if name not in CERTAIN]


def targets(verdicts: Sequence[Verdict]) -> RenderableType:
    """A line a target: met or not, what the plan reaches, and with which probability it meets it."""
    met, missed = Text("met", style="green"), Text("MISSED", style="bold red")
    return plain_grid(
        (
            f"  {v.requirement.text}",
            met if v.met else missed,
            shown(v.requirement, v.actual),
            f"probability {likely(v.probability)}" if v.probability is not None else "",
        )
        for v in verdicts
    )


def summary(run: AskedRun) -> str:
    """The run with its quantiles, and the probability of everything together; empty where none was drawn."""
    if (odds := run.odds) is None:
        return ""
    parts = [quantiles(run), f"it fits with a probability of {likely(odds.fits)}"]
    asked = sum(target.probability is not None for target in run.targets)
    parts += [f"and meets all targets with {likely(odds.together)}"] if asked else []
    return ", ".join(filter(None, parts))


def quantiles(run: AskedRun) -> str:
    """Time and money of the run in draws; empty where its length was not given, or nothing was drawn."""
    if run.odds is None or run.odds.run_s is None:
        return ""
    low, _, high = run.odds.run_s
    scale, unit = (DAY, "d") if high >= DAY else (HOUR, "h")
    time = f"P10-P90 {significant(low / scale)} to {significant(high / scale)} {unit}"
    return f"with failures and restarts {time}{_money(run.odds)}"


def _money(odds: RunOdds) -> str:
    if odds.usd is None:
        return ""
    low, _, high = odds.usd
    return f", {significant(low)} to {format(high, 'usd')} (range of prices)"


def odds_dict(odds: Odds | None) -> Mapping[str, Any] | None:
    """The same content: P10, median and P90 of times and money, and probabilities."""
    return None if odds is None else fields(odds, "fits", "together", "step_s", "run_s", "usd")


def asked_data(odds: Odds | None) -> dict[str, Any]:
    """`requirements` and `odds` of an answer."""
    verdicts = odds.verdicts if odds else ()
    asked = [{"text": v.requirement.text, **fields(v, "actual", "met", "probability")} for v in verdicts]
    return {"requirements": asked, "odds": odds_dict(odds)}
