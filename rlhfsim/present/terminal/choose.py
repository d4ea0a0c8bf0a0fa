"""The answer of `rlhfsim choose` for people and for machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

from rlhfsim.present.tables import WORDS, TableData, fields, grid
from rlhfsim.present.terminal.choices import plan_dict
from rlhfsim.present.terminal.console import WIDTH, Part, drawn, styled, within
from rlhfsim.present.terminal.odds import CERTAIN, chance_titles, odds_dict
from rlhfsim.present.terminal.plan import batch, trained
from rlhfsim.present.verdict import assumed, learning
from rlhfsim.present.words import likely, percent, plural, signed, size
from rlhfsim.search.requirements import Requirement
from rlhfsim.step.measured import compared, model_error
from rlhfsim.units import format, significant
from rlhfsim.what_if.choose import ClusterOption

SCHEMA = "rlhfsim.choose/2"
TOGETHER = "likely"
"""Title of the probability that a candidate fits and meets all targets in one."""
NAMED = 1
"""Other frameworks that a row names."""
SPARE = ("others", ">P10-P90", ">memory", "backend", ">host", *chance_titles(["time_of_run", "cost_of_run"]))
"""Columns for which a terminal may have no room, the first to go first."""
MOST = 24
"""Rows of the table; the rest stands in --json."""


def report(
    options: Sequence[ClusterOption], targets: Sequence[Requirement], steps: int | None, width: int = WIDTH
) -> Iterator[Part]:
    """One line a candidate, the front marked; then what fits nowhere."""
    listed = rows(options)
    if listed:
        yield from _asked(listed)
    if trouble := warning(options, targets):
        yield styled(trouble, style="bold red")
    if listed:
        yield drawn(within(table(options, listed, targets, steps), width), None)
    for note in notes(options, listed, targets, steps):
        yield styled(note)


def _asked(listed: Sequence[ClusterOption]) -> Iterator[Part]:
    """The work that all candidates do."""
    plan = listed[0].plan
    assert plan is not None
    yield styled(trained(plan), style="bold")
    yield styled(batch(plan))


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
) -> TableData:
    """The candidates that are listed, each beside the other frameworks on its GPUs."""
    drawn_targets = [t.quantity for t in targets if t.quantity not in CERTAIN]
    chances = chance_titles(drawn_targets) if len(drawn_targets) > 1 else []
    money = "USD/step" if steps is None else "USD"
    several = len({x.framework for x in options}) > 1
    stale = any(_lag(x) for x in listed)
    head = ["", ">GPUs", "GPU", "framework", "backend", ">step", ">P10-P90", f">{money}"]
    head += [f">{TOGETHER}", *chances, *[">lag"] * stale, ">memory", ">host", *["others"] * several]
    cells = [
        [*_row(x, len(chances)), *[_lag(x)] * stale, *_memory(x), *[_others(x, options)] * several]
        for x in listed
    ]
    styles = ["bold green" if _best(x, options) else "" for x in listed]
    return grid(head, cells, fit=dict.fromkeys(("others", *chances), WORDS), styles=styles, spare=SPARE)


def _lag(option: ClusterOption) -> str:
    """Policy versions by which samples may be old when they are trained on; empty where by none."""
    assert option.plan is not None
    lag = option.plan.placement.schedule.staleness
    return f"{lag:g}" if lag else ""


def _memory(option: ClusterOption) -> tuple[str, str]:
    """Share of the fullest GPU, bytes of the fullest host."""
    assert option.plan is not None
    p = option.plan.prediction
    return percent(p.peak_memory_bytes / p.capacity_bytes), size(p.host_peak_bytes)


def _best(option: ClusterOption, options: Sequence[ClusterOption]) -> bool:
    return option is options[0] and option.meets


def _row(option: ClusterOption, chances: int) -> tuple[str, ...]:
    assert option.plan is not None
    assert option.odds is not None
    p, known = option.plan.prediction, option.odds
    drawn_targets = [v for v in known.verdicts if v.requirement.quantity not in CERTAIN]
    likelihoods = [likely(v.probability) if v.probability is not None else "" for v in drawn_targets]
    return (
        "*" if option.on_front else "",
        f"{option.gpus:,}",
        option.gpu,
        option.framework,
        option.backend,
        format(p.step_s, "s"),
        f"{significant(p.low_s)}-{significant(p.high_s)}",
        "unknown" if known.usd is None else f"{_usd(known.usd[0])}-{_usd(known.usd[2])}",
        likely(known.together),
        *likelihoods[:chances],
    )


def _others(option: ClusterOption, options: Sequence[ClusterOption], most: int = NAMED) -> str:
    """The next frameworks on the same GPUs, each by its own best plan, and how many more."""
    least: dict[str, float] = {}
    for x in options:
        if x.cluster == option.cluster and x.framework != option.framework and x.plan is not None:
            least[x.framework] = min(x.values[0], least.get(x.framework, inf))
    gaps = {name: least[name] / option.values[0] - 1 for name in sorted(least, key=lambda name: least[name])}
    near = [name for name in gaps if not _folded(name, gaps[name])]
    named = [f"{name} {signed(gaps[name])}" for name in near[:most]]
    named += [f"{len(near) - most} more"] * (len(near) > most)
    if folded := [name for name in gaps if name not in near]:
        what = str(len(folded)) if len(folded) > most else ", ".join(folded)
        named.append(f"within the error: {what}")
    return ", ".join(named) or "none"


def _folded(framework: str, gap: float) -> bool:
    """Whether a framework that was never compared with a run is no further off than the model's error."""
    return not compared(framework) and abs(gap) <= model_error()


def notes(
    options: Sequence[ClusterOption],
    listed: Sequence[ClusterOption],
    targets: Sequence[Requirement],
    steps: int | None,
) -> Iterator[str]:
    """How to read the table, and what it leaves out: that stands in --json."""
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
    if taken := dict.fromkeys(text for x in options if x.plan is not None for text in assumed(x.plan)):
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
    run = f"{steps:,} steps, failures counted" if steps else "a step"
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


def _usd(value: float) -> str:
    return significant(value, 2)


def choose_dict(options: Sequence[ClusterOption], confidence: float) -> dict[str, Any]:
    """The same content, every candidate."""
    return {"schema": SCHEMA, "confidence": confidence, "candidates": [_as_data(x) for x in options]}


def _as_data(option: ClusterOption) -> dict[str, Any]:
    verdicts = option.odds.verdicts if option.odds else ()
    return {
        **fields(option, "gpu", "gpus", "framework", "backend", "meets", "on_front", "shortage"),
        "requirements": [
            {"text": v.requirement.text, **fields(v, "actual", "met", "probability")} for v in verdicts
        ],
        "odds": odds_dict(option.odds),
        "plan": plan_dict(option.plan) if option.plan else None,
    }
