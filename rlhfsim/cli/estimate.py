"""`rlhfsim estimate`: one plan, priced: time by phase, memory, money, energy."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console
from rich.text import Text

from rlhfsim.cli.params import FILE, emit, option
from rlhfsim.cli.planned import plan_options, planned
from rlhfsim.plan import write_plan
from rlhfsim.present.terminal import plan as view
from rlhfsim.what_if.planned import Planned

SCHEMA = "rlhfsim.estimate/1"
EPILOG = """\b
Examples:
  rlhfsim estimate verl
  rlhfsim estimate plan.json
  rlhfsim estimate --gpus 64 --model 70b --architecture hybrid
  rlhfsim estimate --gpus 64 --model 70b --backend megatron --actor tp=8,pp=2 --rollout tp=8
"""


@click.command(epilog=EPILOG)
@plan_options
@option("--out", FILE, "Write the plan as plan.json.", metavar="FILE")
@click.pass_context
def estimate(ctx: click.Context, /, **given: Any) -> None:
    """Price one plan: time by phase and what binds it, memory, money, energy.

    FILE is a scenario (YAML), a shipped system (verl, openrlhf, trl, ...) or a plan.json. Without
    FILE, options describe cluster, workload and layouts; what they leave open is chosen for speed.

    Exit codes: 0 priced and it fits, 1 it does not fit, 2 bad input.
    """
    answer = planned(ctx, given)
    if given["out"] is not None and answer.plan is not None:
        write_plan(given["out"], answer.plan)
    emit(given["as_json"], lambda: as_data(answer), lambda: show(answer, view.console()))
    ctx.exit(0 if answer.fits else 1)


def as_data(answer: Planned) -> dict[str, Any]:
    """The same content; the plan in the schema of plan.json (docs/plan.md)."""
    return {
        "schema": SCHEMA,
        "fits": answer.fits,
        "rejected_by": answer.rejected_by,
        "remedy": answer.remedy,
        "notes": [*answer.notes, *answer.far],
        "plan": answer.plan.to_dict() if answer.plan else None,
    }


def show(answer: Planned, console: Console) -> None:
    """Verdict when it does not fit, then header, figures, phases, placement, sureness."""
    verdict(answer, console)
    if answer.plan is None:
        return
    for note in answer.far:
        console.print(Text(f"note: {note}", style="yellow"))
    console.print(view.header(answer.plan))
    console.print(view.summary(answer.plan))
    console.print()
    console.print(view.phase_table(answer.plan, console.width))
    console.print()
    console.print(view.placement_table(answer.plan, console.width))
    console.print()
    console.print(view.sureness(answer.plan, console.width))


def verdict(answer: Planned, console: Console) -> None:
    """Notes, and what does not fit with its remedy."""
    for note in answer.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    if answer.fits:
        return
    console.print(Text(f"does not fit: {answer.rejected_by}", style="bold red"))
    console.print(Text(f"smallest change that fits: {answer.remedy}", style="bold"))
    if answer.plan is not None:
        console.print(Text("the plan, priced all the same:\n", style="dim"))
