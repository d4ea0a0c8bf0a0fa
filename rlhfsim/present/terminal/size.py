"""The answer of `rlhfsim size` for people and for machines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal.choices import plan_dict
from rlhfsim.present.terminal.words import new_table
from rlhfsim.search.explain import kind
from rlhfsim.search.requirements import Requirement, shown, verdicts
from rlhfsim.units import format, significant
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


def show(console: Console, answer: Sizing, targets: Sequence[Requirement], steps: int | None) -> None:
    """Print the answer, what was tried, and the plan."""
    wanted = ", ".join(t.text for t in targets)
    if answer.best is None or answer.best.plan is None:
        most = max((t.gpus for t in answer.trials), default=0)
        console.print(
            Text("no size meets the targets: ", style="bold red")
            + Text(f"{wanted}, with up to {most:,} GPUs")
        )
        console.print(_trials(answer))
        console.print("give more with --max-gpus, other GPUs with --gpu, or a weaker target")
        return
    plan = answer.best.plan
    console.print(
        Text(f"{answer.best.gpus:,} x {answer.best.gpu}", style="bold green") + Text(f" for {wanted}")
    )
    for v in verdicts(targets, plan, steps):
        console.print(f"  {v.requirement.text}: {shown(v.requirement, v.actual)}", highlight=False)
    console.rule("what was tried", align="left", style="dim")
    console.print(_trials(answer))
    for line in _notes(answer):
        console.print(Padding(Text(line), (0, 0, 0, 2)))
    console.rule("the plan", align="left", style="dim")
    console.print(view.header(plan))
    console.print(view.summary(plan))
    console.print(view.placement_table(plan, console.width))


def _trials(answer: Sizing) -> Table:
    table = new_table(None)
    table.add_column("GPU", no_wrap=True)
    for name in ("GPUs", "step", "USD/step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plan", no_wrap=True)
    table.add_column("")
    for trial in answer.trials:
        style = "bold green" if trial is answer.best else None
        table.add_row(*_cells(trial), MEANINGS[trial.outcome], style=style)
    return table


def _cells(trial: Trial) -> list[str]:
    """GPU, GPUs, step, USD per step, plan."""
    if trial.plan is None:
        beyond = trial.floor_s if trial.outcome == "skipped" else trial.limit_s
        step = (
            f"> {format(beyond, 's')}" if math.isfinite(beyond) and trial.outcome != "does not fit" else "-"
        )
        return [trial.gpu, f"{trial.gpus:,}", step, "-", "-"]
    p = trial.plan.prediction
    money = "unknown" if p.usd_per_step is None else significant(p.usd_per_step)
    return [trial.gpu, f"{trial.gpus:,}", format(p.step_s, "s"), money, kind(trial.plan)]


def _notes(answer: Sizing) -> Iterator[str]:
    yield "a larger cluster is not always faster, so every size is searched for itself"
    for even in answer.break_even:
        yield f"{even.gpus:,} x {even.gpu} cost as little per step at {format(even.usd_per_hour, 'usd/h')} per GPU (now {format(even.now, 'usd/h')})"


def show_front(console: Console, trials: Sequence[Trial]) -> None:
    """Sizes between which only taste decides."""
    if not trials:
        console.print(Text("nothing fits on any of these sizes", style="bold red"))
        return
    console.print("sizes that no other one beats in GPUs, time and money:")
    table = new_table(None)
    table.add_column("GPU", no_wrap=True)
    for name in ("GPUs", "step", "USD/step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plan", no_wrap=True)
    table.add_column("actor", no_wrap=True)
    table.add_column("rollout", no_wrap=True)
    for trial in trials:
        assert trial.plan is not None
        roles = trial.plan.placement
        table.add_row(
            *_cells(trial), roles.actor.layout.label, roles.rollout.layout.label if roles.rollout else "-"
        )
    console.print(table)


# --- for machines -----------------------------------------------------------------------------------


def size_dict(answer: Sizing, targets: Sequence[Requirement], steps: int | None) -> dict[str, Any]:
    """The same content; schema in docs/plan.md."""
    best = answer.best
    met = verdicts(targets, best.plan, steps) if best is not None and best.plan is not None else ()
    return {
        "schema": SCHEMA,
        "best": _trial_dict(best) if best is not None else None,
        "requirements": [{"text": v.requirement.text, "actual": v.actual, "met": v.met} for v in met]
        or [{"text": t.text, "actual": None, "met": False} for t in targets],
        "per_gpu": [_trial_dict(t) for t in answer.per_gpu],
        "tried": [_trial_dict(t, plan=False) for t in answer.trials],
        "break_even": [
            {"gpu": e.gpu, "gpus": e.gpus, "usd_per_gpu_hour": e.usd_per_hour, "now": e.now}
            for e in answer.break_even
        ],
    }


def front_dict(trials: Sequence[Trial]) -> dict[str, Any]:
    """The front of GPUs, time and money."""
    return {"schema": SCHEMA, "pareto": [_trial_dict(t) for t in trials]}


def _trial_dict(trial: Trial, *, plan: bool = True) -> dict[str, Any]:
    made = trial.plan
    found: dict[str, Any] = {
        "gpu": trial.gpu,
        "gpus": trial.gpus,
        "outcome": trial.outcome,
        "floor_s": trial.floor_s,
        "limit_s": trial.limit_s if math.isfinite(trial.limit_s) else None,
        "step_s": made.prediction.step_s if made else None,
        "usd_per_step": made.prediction.usd_per_step if made else None,
    }
    return {**found, "plan": plan_dict(made)} if plan and made else found
