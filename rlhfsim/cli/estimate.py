"""`rlhfsim estimate`: one plan, priced: time by phase, memory, money, energy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlhfsim.cli.constraints import SURE, SURELY, priced_targets, promise_options, target_options, targets_of
from rlhfsim.cli.params import Given, Output, Told, command, detail_option, option, together
from rlhfsim.cli.planned import plan_options, planned, run_of
from rlhfsim.plan import AskedRun, write_plan
from rlhfsim.present.answers.estimate import page
from rlhfsim.search.requirements import CONFIDENCE, Requirement, requirements_of
from rlhfsim.what_if.risk.odds import asked_run, odds
from rlhfsim.what_if.risk.run import Outlook

EPILOG = """\b
Examples:
  rlhfsim estimate verl
  rlhfsim estimate plan.json --steps 1000 --deadline 7d
  rlhfsim estimate --gpus 64 --model 70b --architecture hybrid
  rlhfsim estimate --gpus 64 --model 70b --backend megatron --actor tp=8,pp=2 --rollout tp=8
"""


@command(EPILOG)
@plan_options
@together(*target_options)
@promise_options
@option("--confidence", SURE, f"{SURELY} Default: that of plan.json, or {CONFIDENCE:.0%}.")
@option("--out", Output("plan"), "Write the plan as plan.json.", metavar="FILE")
@detail_option
def estimate(**given: Any) -> Told:
    """Price one plan: time by phase and what binds it, memory, money, energy.

    FILE is a scenario (YAML), a shipped system (verl, openrlhf, trl, ...) or a plan.json. Without
    FILE, options describe cluster, workload and layouts; what they leave open is
    as its framework has it where that fits, else chosen for speed.

    Exit codes: 0 priced and it fits, 1 it does not fit or misses a target, 2 bad input.
    """
    kept = run_of(given["file"])
    steps = given["steps"] or (kept.steps if kept else None)
    targets = _targets({**given, "steps": steps}, kept)
    answer = planned(given)
    known = None
    if answer.plan is not None and answer.cluster is not None and (targets or steps):
        priced_targets(targets, unknown=answer.plan.prediction.usd_per_step is None)
        price = given["price"] if isinstance(given["price"], float) else None
        sure = given["confidence"] or (kept.confidence if kept else None) or CONFIDENCE
        known = odds(targets, Outlook(answer.plan, answer.cluster, steps, price), sure)
        run = asked_run(targets, steps, known)
        answer = replace(answer, plan=replace(answer.plan, run=run))
    if given["out"] is not None and answer.plan is not None:
        write_plan(given["out"], answer.plan)
    return Told(page(answer, known, given["detail"]), answer.fits and (known is None or known.meets))


def _targets(given: Given, kept: AskedRun | None) -> tuple[Requirement, ...]:
    """The targets that the plan was asked for; those of the command line in place of the same ones.

    Raises:
        RlhfsimError: as `targets_of`.
    """
    own = targets_of(given)
    return tuple({target.name: target for target in (*requirements_of(kept), *own)}.values())
