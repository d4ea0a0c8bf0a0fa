"""What `rlhfsim choose` answers: kinds and numbers of GPUs, frameworks and backends on one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

from rlhfsim.present.answers.choices import plan_dict
from rlhfsim.present.answers.odds import CERTAIN, TITLES, asked_data
from rlhfsim.present.answers.tree import GPUS, STEP_TIME, Column, Listing, Page, TypedTable, answer, table_of
from rlhfsim.present.plan_words import batch, trained
from rlhfsim.present.tables import BYTES, COARSE_ENDS, ENDS, NUMBER, PROBABILITY, SHARE, fields
from rlhfsim.present.verdict import assumed, learning
from rlhfsim.present.words import full, percent, plural, signed
from rlhfsim.search.requirements import Requirement, Verdict
from rlhfsim.step.measured import compared, model_error
from rlhfsim.what_if.choose import ClusterOption

TOGETHER = "likely"
"""Title of the probability that a candidate fits and meets all targets in one."""
NAMED = 1
"""Other frameworks that a row names."""
MOST = 24
"""Rows of the table; the rest is in --json."""


def choose_page(
    options: Sequence[ClusterOption], targets: Sequence[Requirement], steps: int | None, confidence: float
) -> Page:
    """One line a candidate, the front marked; then what fits nowhere."""
    listed, trouble = rows(options), warning(options, targets)
    plan = listed[0].plan if listed else None
    return answer(
        "rlhfsim.choose/2",
        table(options, listed, targets, steps) if listed else None,
        Listing(tuple(notes(options, listed, targets, steps))),
        title=trained(plan) if plan else "",
        subtitle=batch(plan) if plan else "",
        verdict=trouble or "",
        mark="bad" if trouble else "plain",
        data={"confidence": confidence, "candidates": [_as_data(x) for x in options]},
    )


def warning(options: Sequence[ClusterOption], targets: Sequence[Requirement]) -> str | None:
    """Why nothing is recommended; None where something is."""
    if not options or options[0].plan is None:
        return "nothing fits on any of these"
    if targets and not options[0].meets:
        return "no candidate meets every target; the cheapest are shown"
    return None


def rows(options: Sequence[ClusterOption]) -> list[ClusterOption]:
    """The front, and the best of each kind and size, in order."""
    fitting = [x for x in options if x.plan is not None]
    first: dict[tuple[str, int], ClusterOption] = {}
    for option in fitting:
        first.setdefault(option.cluster, option)
    kept = {id(x) for x in first.values()} | {id(x) for x in fitting if x.on_front}
    return [x for x in fitting if id(x) in kept][:MOST]


def table(
    options: Sequence[ClusterOption],
    listed: Sequence[ClusterOption],
    targets: Sequence[Requirement],
    steps: int | None,
) -> TypedTable:
    """The candidates that are listed, each with the other frameworks on its GPUs."""
    drawn = [t.quantity for t in targets if t.quantity not in CERTAIN]
    chances = (
        Column(TITLES.get(name, name), lambda x, i=i: _drawn(x)[i].probability, PROBABILITY, spare=6 + i)
        for i, name in enumerate(drawn)
    )
    others = Column("others", lambda x: _others(x, options), spare=1)
    return table_of(
        "Candidates",
        listed,
        Column("", lambda x: "*" * x.on_front),
        GPUS,
        Column("GPU", "gpu"),
        Column("framework"),
        Column("backend", spare=4),
        STEP_TIME,
        Column("P10-P90", lambda x: (x.plan.prediction.low_s, x.plan.prediction.high_s), ENDS, spare=2),
        Column("USD/step" if steps is None else "USD", lambda x: x.odds.usd and x.odds.usd[::2], COARSE_ENDS),
        Column(TOGETHER, "odds.together", PROBABILITY),
        *(chances if len(drawn) > 1 else ()),
        Column("lag", lambda x: x.plan.placement.schedule.staleness or None, NUMBER.where(""), spare=9),
        Column("memory", lambda x: full(x.plan.prediction), SHARE, spare=3),
        Column("host", "plan.prediction.host_peak_bytes", BYTES, spare=5),
        *[others] * (len({x.framework for x in options}) > 1),
        style=lambda x: "bold green" * (x is options[0] and x.meets),
    )


def _drawn(option: ClusterOption) -> list[Verdict]:
    verdicts = option.odds.verdicts if option.odds else ()
    return [v for v in verdicts if v.requirement.quantity not in CERTAIN]


def _others(option: ClusterOption, options: Sequence[ClusterOption], most: int = NAMED) -> str:
    """The next frameworks on the same GPUs, each by its own best plan, and how many more."""
    least: dict[str, float] = {}
    for x in options:
        if x.cluster == option.cluster and x.framework != option.framework and x.plan is not None:
            least[x.framework] = min(x.values[0], least.get(x.framework, inf))
    gaps = {name: least[name] / option.values[0] - 1 for name in sorted(least, key=lambda name: least[name])}
    # one that was never compared with a run is named where it is further off than the model's error
    near = [name for name in gaps if compared(name) or abs(gaps[name]) > model_error()]
    named = [f"{name} {signed(gaps[name])}" for name in near[:most]]
    named += [f"{len(near) - most} more"] * (len(near) > most)
    if folded := [name for name in gaps if name not in near]:
        what = str(len(folded)) if len(folded) > most else ", ".join(folded)
        named.append(f"within the error: {what}")
    return ", ".join(named) or "none"


def notes(
    options: Sequence[ClusterOption],
    listed: Sequence[ClusterOption],
    targets: Sequence[Requirement],
    steps: int | None,
) -> Iterator[str]:
    """How to read the table, and what it leaves out: that is in --json."""
    if listed:
        yield from _hidden(options, listed)
        yield " ".join(_reading(listed[0], options, targets, steps))
    fitting = [x for x in options if x.plan is not None]
    if len(listed) < len(fitting):
        yield f"{len(fitting) - len(listed)} slower or dearer candidates: rlhfsim choose --json lists them"
    fits = {x.cluster for x in fitting}
    if none := dict.fromkeys(f"{x.gpus} x {x.gpu}" for x in options if x.cluster not in fits):
        yield f"nothing fits on {', '.join(none)}"


def _hidden(options: Sequence[ClusterOption], listed: Sequence[ClusterOption]) -> Iterator[str]:
    """What is assumed of any candidate, and what those that are listed change of learning."""
    if taken := dict.fromkeys(
        text for x in options if x.plan is not None for text in assumed(x.plan, ranges=False)
    ):
        yield f"assumed: {'; '.join(taken)}"
    plans = [x.plan for x in listed if x.plan is not None]
    changes = Counter(learning(plan) for plan in plans)
    for text, count in changes.items():
        of = "" if len(changes) == 1 else f", {count} of {plural(len(plans), 'row')}"
        yield f"learning{of}: {text}"


def _reading(
    option: ClusterOption, options: Sequence[ClusterOption], targets: Sequence[Requirement], steps: int | None
) -> Iterator[str]:
    """What the columns of a candidate mean."""
    yield "* no other is as fast and as cheap."
    yield "Each row is the fastest plan that its framework runs, with the costs of its software."
    run = f"{plural(steps, 'step')}, failures counted" if steps else "a step"
    yield f"USD: P10 to P90 over step and price of {run}."
    chance = ", ".join(t.text for t in targets if t.quantity not in CERTAIN)
    kept = f" and keeps {chance}, in one" if chance else ""
    yield f"{TOGETHER}: probability that it fits{kept}."
    yield "memory, host: of the fullest GPU and the fullest node."
    if any(x.framework != option.framework for x in options):
        longer = _others(option, options, most=len(options))
        yield f"How much longer a step takes with another framework, in the first row: {longer}."
        error = percent(model_error())
        yield f"Within the error ({error}): no run of theirs was ever compared, their order is not known."


def _as_data(option: ClusterOption) -> dict[str, Any]:
    return {
        **fields(option, "gpu", "gpus", "framework", "backend", "meets", "on_front", "shortage"),
        **asked_data(option.odds),
        "plan": plan_dict(option.plan) if option.plan else None,
    }
