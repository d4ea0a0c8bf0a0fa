"""The answer of `rlhfsim choose` for people and for machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from rlhfsim.present.tables import WORDS, fields, grid
from rlhfsim.present.terminal.choices import plan_dict
from rlhfsim.present.terminal.console import drawn
from rlhfsim.present.terminal.odds import CERTAIN, chance_titles, likely, odds_dict
from rlhfsim.search.requirements import Requirement
from rlhfsim.units import format, significant
from rlhfsim.what_if.choose import ClusterOption

SCHEMA = "rlhfsim.choose/1"
NAMED = 2
"""Frameworks that a row names."""
MOST = 24
"""Rows of the table; the rest stands in --json."""


def report(
    options: Sequence[ClusterOption], targets: Sequence[Requirement], steps: int | None
) -> Iterator[RenderableType]:
    """One line a candidate, the front marked; then what fits nowhere."""
    fitting = [x for x in options if x.plan is not None]
    if not fitting:
        yield Text("nothing fits on any of these", style="bold red")
        return
    best = options[0] if options[0].run_by else None
    if best is None:
        yield Text("nothing is recommended: no framework here runs any of these plans", style="bold red")
    elif targets and not best.meets:
        yield Text("no candidate meets every target; the cheapest are shown", style="bold red")
    shown = _shown(fitting)
    money = "USD/step" if steps is None else "USD"
    names = chance_titles([t.quantity for t in targets])
    titles = ("", ">GPUs", "GPU", "backend", ">step", ">P10-P90", f">{money}", *names, "run by")
    rows = [_row(x, steps, len(names)) for x in shown]
    styles = ["bold green" if x is best else "" for x in shown]
    yield drawn(grid(titles, rows, fit={"run by": WORDS}, styles=styles), None)
    yield Text(
        "* no other that some framework runs is as fast and as cheap; "
        + (f"percentages: probability of {', '.join(t.text for t in targets)}; " if targets else "")
        + f"{money}: P10 to P90 over step and price; run by: the first is the one whose software is priced, "
        "none: no framework here runs the plan, so that it is not recommended"
    )
    if len(shown) < len(fitting):
        yield Text(f"{len(fitting) - len(shown)} slower or dearer candidates: --json")
    if none := [f"{x.gpus} x {x.gpu} {x.backend}" for x in options if x.plan is None]:
        yield Text(f"nothing fits: {', '.join(none)}")


def _shown(fitting: Sequence[ClusterOption]) -> list[ClusterOption]:
    """The front, and of each kind and size the best backend, in order."""
    first: dict[tuple[str, int], ClusterOption] = {}
    for option in fitting:
        first.setdefault((option.gpu, option.gpus), option)
    kept = {id(x) for x in first.values()} | {id(x) for x in fitting if x.on_front}
    return [x for x in fitting if id(x) in kept][:MOST]


def _row(option: ClusterOption, steps: int | None, targets: int) -> tuple[str, ...]:
    assert option.plan is not None
    assert option.odds is not None
    p, known = option.plan.prediction, option.odds
    drawn_targets = [v for v in known.verdicts if v.requirement.quantity not in CERTAIN]
    chances = [likely(v.probability) if v.probability is not None else "" for v in drawn_targets]
    money = "unknown" if known.usd is None else f"{_usd(known.usd[0])}-{_usd(known.usd[2])}"
    return (
        "*" if option.on_front else "",
        f"{option.gpus:,}",
        option.gpu,
        option.backend,
        format(p.step_s, "s"),
        f"{significant(p.low_s)}-{significant(p.high_s)}",
        money,
        *chances[:targets],
        _runners(option.run_by),
    )


def _runners(names: Sequence[str]) -> str:
    """The first two, and how many more."""
    more = f", {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more or "none"


def _usd(value: float) -> str:
    return significant(value, 2)


def choose_dict(options: Sequence[ClusterOption], confidence: float) -> dict[str, Any]:
    """The same content, every candidate."""
    return {"schema": SCHEMA, "confidence": confidence, "candidates": [_as_data(x) for x in options]}


def _as_data(option: ClusterOption) -> dict[str, Any]:
    verdicts = option.odds.verdicts if option.odds else ()
    return {
        **fields(option, "gpu", "gpus", "backend", "run_by", "meets", "on_front", "shortage"),
        "requirements": [
            {"text": v.requirement.text, **fields(v, "actual", "met", "probability")} for v in verdicts
        ],
        "odds": odds_dict(option.odds),
        "plan": plan_dict(option.plan) if option.plan else None,
    }
