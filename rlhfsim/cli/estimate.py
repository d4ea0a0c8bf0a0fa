"""`rlhfsim estimate`: one plan, priced: time by phase, memory, money, energy."""

from __future__ import annotations

from typing import Any

import click

from rlhfsim.cli.params import FILE, detail_option, emit, option
from rlhfsim.cli.planned import plan_options, planned
from rlhfsim.plan import write_plan
from rlhfsim.present.terminal import estimate as view

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
@detail_option
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
    emit(given["as_json"], lambda: view.as_data(answer), lambda: view.report(answer, given["detail"]))
    ctx.exit(0 if answer.fits else 1)
