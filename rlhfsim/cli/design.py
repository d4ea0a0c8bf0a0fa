"""`rlhfsim design`: choose architecture and layouts for a cluster and a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click

from rlhfsim.cli.constraints import (
    confidence_option,
    constrained,
    constraint_options,
    promise_options,
    requirements,
)
from rlhfsim.cli.inputs import (
    backend_options,
    build_cluster,
    build_workload,
    cluster_options,
    workload_options,
)
from rlhfsim.cli.params import (
    FILE,
    Given,
    OneOf,
    Output,
    Told,
    Words,
    bad_option,
    command,
    detail_option,
    emit,
    flag,
    json_option,
    on_command_line,
    option,
)
from rlhfsim.cli.planned import asked
from rlhfsim.cli.search_progress import shown
from rlhfsim.cli.why_not import alternatives
from rlhfsim.plan import write_plan
from rlhfsim.present.answers import recalibrated as calibration
from rlhfsim.present.answers.design import page
from rlhfsim.present.answers.design_details import Extras
from rlhfsim.present.answers.plan_blocks import wants
from rlhfsim.present.terminal.console import console
from rlhfsim.present.terminal.page import show
from rlhfsim.search import clock
from rlhfsim.search.pareto import front
from rlhfsim.search.request import Objective, Request
from rlhfsim.search.requirements import Requirement, narrowed
from rlhfsim.specs.model.roles import models_of
from rlhfsim.what_if.bottleneck import bottleneck
from rlhfsim.what_if.design import Design
from rlhfsim.what_if.design import design as search_design
from rlhfsim.what_if.missed_targets import that_meet
from rlhfsim.what_if.recalibrated import recalibrated
from rlhfsim.what_if.risk.choice import chances, likeliest
from rlhfsim.what_if.risk.odds import Targets, asked_run
from rlhfsim.what_if.simplest import CLOSE
from rlhfsim.what_if.why_not import Alternative

EPILOG = """\b
Examples:
  rlhfsim design --gpus 64 --model 70b
  rlhfsim design --gpus 8 --gpu a100-80 --model 7b --algorithm grpo --prompts 128 --samples 8
  rlhfsim design --gpus 64 --model 70b --allow async,lora --max-staleness 2 --fix rollout.tp=8
  rlhfsim design --gpus 64 --model 70b --why-not async --why-not actor.tp=4
  rlhfsim design --gpus 16 --model 8b --why-not 'actor=tp8,zero1;rollout=tp4'
  rlhfsim design --gpus 64 --model 70b --profile calibrated.yaml
  rlhfsim design --gpus 64 --model 70b --require 'step_time<180s' --steps 1000
  rlhfsim design --gpus 64 --model 70b --steps 1000 --deadline 7d --budget 50kUSD
  rlhfsim design --gpus 16 --model 8b --algorithm grpo --run run.yaml --deadline 21d --page run.html
"""
REWARDED = "time-to-reward"
"""Objective of a question with a learning curve."""
OBJECTIVES = (*get_args(Objective), REWARDED)
ANSWERED_EARLY = 3
"""Exit code of a search that Ctrl-C ended with an answer."""


@command(EPILOG)
@cluster_options
@workload_options
@backend_options
@option(
    "--objective",
    OneOf("objective", OBJECTIVES),
    f"What is optimised: {', '.join(OBJECTIVES)}. "
    "All but memory and time-to-reward choose the shortest step: the cluster is rented whole.",
    default="time",
)
@constraint_options
@promise_options
@confidence_option
@option(
    "--why-not",
    Words("CHOICE"),
    "Compare with the best plan of another choice "
    "(actor.tp=4, async, disaggregated, disk, megatron, no-offload), or of several that name a plan: "
    "'hybrid;actor=tp8,pp2;rollout=tp4', plan.json; repeatable.",
    multiple=True,
)
@flag(
    "--fastest",
    "Write the best plan of the objective, however complex; else the simplest within "
    f"{CLOSE:.0%} of it (fewest pools, pipelines, layouts, moves to the host).",
)
@flag("--gains", "Also what each switch and backend that does not compete would bring.")
@flag("--pareto", "Also the plans that trade time for memory, staleness or risk.")
@option("--run", FILE, "A run whose lengths, limits and batch change (docs/budget.md): one plan or several.")
@option("--learning", FILE, "With --objective time-to-reward: a learning curve (docs/budget.md).")
@option("--page", Output("page"), "With --run or --learning: the answer also as a page that works offline.")
@option("--out", Output("plan"), "Where the plan is written.", default=Path("plan.json"))
@detail_option
@json_option
@click.pass_context
def design(ctx: click.Context, /, **given: Any) -> Told | None:
    """Choose architecture and layouts for a cluster and a model."""
    limit = ctx.with_resource(ExitStack())
    limit.enter_context(clock.within(given["time_limit"]))  # who leads is looked for too
    rewarded = given["objective"] == REWARDED
    request = question({**given, "objective": "time"} if rewarded else given)
    if rewarded:
        from rlhfsim.cli.time_to_reward import planned_reward

        return planned_reward(request, given)
    if given["learning"]:
        raise bad_option("--learning goes with --objective time-to-reward", "give both, or neither")
    if given["run"]:
        from rlhfsim.cli.long_run import planned_long_run  # read only where it is asked for

        return planned_long_run(request, given)
    if given["page"]:
        raise bad_option(
            "--page goes with --run or --learning", "write a page of one plan with: rlhfsim report plan.json"
        )
    targets = requirements(given, request)
    instead = alternatives(given["why_not"], request, models_of(request.workload))
    steps = given["steps"]
    wanted = Targets(requirements=targets, steps=steps, confidence=given["confidence"])
    known, asked = None, bool(targets or steps)
    with clock.within(request.time_limit), clock.answering(), shown():
        answer = designed(request, targets, instead, given)
        if answer.chosen and asked:
            known = wanted.odds(answer.request, answer.chosen)
        meeting = that_meet(request, wanted) if known and not known.meets else ()
        plans = front(request) if given["pareto"] and answer.chosen else None
        late = clock.over()
    limit.close()  # what calibration changed has a time of its own
    changed = None if clock.was_asked() else recalibrated(narrowed(request, targets), answer)
    extras = Extras(
        steps=steps,
        meeting=meeting,
        late=late,
        side=chances(answer, targets, steps),
        bottleneck=bottleneck(answer.chosen, request.cluster) if answer.chosen else None,
        odds=known,
        run=asked_run(targets, steps, known),
        front=plans,
        calibration=calibration.page(changed, answer.best) if changed and answer.best else None,
    )
    if (plan := answer.told) is not None:
        write_plan(given["out"], replace(plan, run=extras.run))
    content = page(answer, extras, str(given["out"]), given["detail"])
    emit(given["as_json"], lambda: content.as_data, lambda: show(console(), content))
    if clock.was_asked() and answer.chosen is not None:
        ctx.exit(ANSWERED_EARLY)
    ctx.exit(0 if answer.chosen is not None and (known is None or known.meets) else 1)


def designed(
    request: Request,
    targets: Sequence[Requirement],
    instead: Sequence[Alternative],
    given: Given,
    *,
    explain: bool = True,
) -> Design:
    """The plan that keeps the targets on memory, risk and staleness; without them if none does."""
    within = narrowed(request, targets)
    limit = Targets(requirements=targets, steps=given["steps"]).most_s(request)

    def answered(asked: Request, *, remedied: bool) -> Design:
        return search_design(
            asked,
            explain=explain,
            instead=instead,
            left_out=given["gains"],
            simplest_s=None if given["fastest"] else limit,
            remedied=remedied,
            overturned=given["as_json"] or wants(given["detail"], "proof"),
        )

    answer = answered(within, remedied=within == request)
    if answer.chosen is None and within != request:
        return answered(request, remedied=True)
    return answer if given["fastest"] else likeliest(answer, targets, given["steps"])


def question(given: Given) -> Request:
    """What the options ask.

    Raises:
        RlhfsimError: a value that is not known, or options that contradict each other.
    """
    cluster, workload = build_cluster(given), build_workload(given)
    if given["objective"] == "cost" and any(p.profile.price is None for p in cluster.node_groups):
        raise bad_option(
            "no price is known for this hardware, so cost cannot be minimised",
            "give --price USD_PER_GPU_HOUR",
        )
    with on_command_line():
        base = Request(
            cluster=cluster,
            workload=workload,
            framework=given["framework"],
            backend=given["backend"],
            objective=given["objective"],
        )
    request = constrained(base, given)
    return asked(request)
