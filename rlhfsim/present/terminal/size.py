"""The answer of `rlhfsim size` for people and for machines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rlhfsim.present.tables import WORDS, fields, grid
from rlhfsim.present.terminal import first_screen as first
from rlhfsim.present.terminal import odds as odds_view
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal.choices import plan_dict
from rlhfsim.present.terminal.console import Display, Part, drawn, indented, labelled, styled
from rlhfsim.present.words import layout_labels, likely, percent
from rlhfsim.search.explain import kind
from rlhfsim.search.requirements import Requirement
from rlhfsim.units import format, significant
from rlhfsim.verdict import verdict as sentences
from rlhfsim.what_if.sizing import Sizing, Trial

SCHEMA = "rlhfsim.size/1"
MEANINGS = {
    "meets": "meets the targets",
    "misses": "found, but misses a target",
    "too slow": "too slow: no plan of it meets the targets",
    "does not fit": "no plan fits",
    "skipped": "skipped: its arithmetic alone takes too long",
    "no better": "no cheaper than a size before",
}


# --- for people -------------------------------------------------------------------------------------


def show(
    console: Display,
    answer: Sizing,
    targets: Sequence[Requirement],
    confidence: float,
    steps: int | None = None,
) -> None:
    """Print the answer, what was tried, and the plan."""
    wanted = f"{', '.join(t.text for t in targets)} with a probability of {percent(confidence)}"
    if answer.best is None or answer.best.plan is None:
        largest = max((t.gpus for t in answer.trials), default=0)
        nothing = styled("no size meets the targets: ", style="bold red")
        console.print(nothing + styled(f"{wanted}, with up to {largest:,} GPUs"))
        console.print(_trials(answer))
        console.print("give more with --max-gpus, other GPUs with --gpu, or a weaker target")
        return
    best, plan = answer.best, answer.best.plan
    console.print(styled(f"{best.gpus:,} x {best.gpu}", style="bold green") + styled(f" for {wanted}"))
    assert best.odds is not None
    console.print(odds_view.targets(plan))
    console.rule("what was tried", align="left", style="dim")
    console.print(_trials(answer))
    for line in _notes(answer):
        console.print(indented(styled(line)))
    console.rule("the plan", align="left", style="dim")
    rows = first.verdict(plan) | ({"odds": odds_view.summary(plan.run)} if plan.run else {})
    title = styled(view.task(plan), style="bold")
    for part in (
        styled(sentences(plan)),
        title,
        styled(view.batch(plan)),
        labelled(rows),
        first.roles(plan, console.width),
    ):
        console.print(part)


def _trials(answer: Sizing) -> Part:
    titles = ("GPU", ">GPUs", ">step", ">USD/step", "plan", ">likely", "")
    rows = ((*_cells(trial), _together(trial), MEANINGS[trial.outcome]) for trial in answer.trials)
    styles = ["bold green" if trial is answer.best else "" for trial in answer.trials]
    return drawn(grid(titles, rows, fit={"": WORDS}, styles=styles), None)


def _together(trial: Trial) -> str:
    """Probability that it fits and meets all targets in one."""
    return likely(trial.odds.together) if trial.odds and any(v.drawn for v in trial.odds.verdicts) else ""


def _cells(trial: Trial) -> list[str]:
    """GPU, GPUs, step, USD per step, plan."""
    start = [trial.gpu, f"{trial.gpus:,}"]
    if trial.plan is None:
        beyond = trial.floor_s if trial.outcome == "skipped" else trial.limit_s
        known = math.isfinite(beyond) and trial.outcome != "does not fit"
        return [*start, f"> {format(beyond, 's')}" if known else "-", "-", "-"]
    p = trial.plan.prediction
    money = "unknown" if p.usd_per_step is None else significant(p.usd_per_step)
    return [*start, format(p.step_s, "s"), money, kind(trial.plan)]


def _notes(answer: Sizing) -> Iterator[str]:
    if answer.larger is not None and answer.larger.plan is not None and answer.best is not None:
        gpus, seconds, usd = answer.larger.values
        _, before, paid = answer.best.values
        yield (
            f"{gpus:,.0f} x {answer.larger.gpu} are faster and cheaper: {format(seconds, 's')} and "
            f"{significant(usd)} USD a step, in place of {format(before, 's')} and {significant(paid)} USD"
        )
    yield "a larger cluster is not always faster, so every size is searched for itself"
    for even in answer.break_even:
        price, now = (format(x, "usd/h") for x in (even.usd_per_hour, even.now))
        yield f"{even.gpus:,} x {even.gpu} cost as little per step at {price} per GPU (now {now})"


def show_front(console: Display, trials: Sequence[Trial]) -> None:
    """Sizes between which only taste decides."""
    if not trials:
        console.print(styled("nothing fits on any of these sizes", style="bold red"))
        return
    console.print("sizes that no other one beats in GPUs, time and money:")
    titles = ("GPU", ">GPUs", ">step", ">USD/step", "plan", "actor", "rollout")
    rows = ((*_cells(trial), *layout_labels(trial.plan)) for trial in trials if trial.plan)
    console.print(drawn(grid(titles, rows), None))


# --- for machines -----------------------------------------------------------------------------------


def size_dict(answer: Sizing, targets: Sequence[Requirement], confidence: float) -> dict[str, Any]:
    """The same content; schema in docs/plan.md."""
    best = answer.best
    met = best.odds.verdicts if best is not None and best.odds is not None else ()
    return {
        "schema": SCHEMA,
        "best": _trial_dict(best) if best is not None else None,
        "requirements": [
            {"text": v.requirement.text, **fields(v, "actual", "met", "probability")} for v in met
        ]
        or [{"text": t.text, "actual": None, "met": False, "probability": None} for t in targets],
        "confidence": confidence,
        "larger": _trial_dict(answer.larger, plan=False) if answer.larger else None,
        "per_gpu": [_trial_dict(t) for t in answer.per_gpu],
        "tried": [_trial_dict(t, plan=False) for t in answer.trials],
        "break_even": [
            {**fields(e, "gpu", "gpus"), "usd_per_gpu_hour": e.usd_per_hour, "now": e.now}
            for e in answer.break_even
        ],
    }


def front_dict(trials: Sequence[Trial]) -> dict[str, Any]:
    """The front of GPUs, time and money."""
    return {"schema": SCHEMA, "pareto": [_trial_dict(t) for t in trials]}


def _trial_dict(trial: Trial, *, plan: bool = True) -> dict[str, Any]:
    best = trial.plan
    return {
        **fields(trial, "gpu", "gpus", "outcome", "floor_s"),
        "limit_s": trial.limit_s if math.isfinite(trial.limit_s) else None,
        "step_s": best.prediction.step_s if best else None,
        "usd_per_step": best.prediction.usd_per_step if best else None,
        "odds": odds_view.odds_dict(trial.odds),
        **({"plan": plan_dict(best)} if plan and best else {}),
    }
