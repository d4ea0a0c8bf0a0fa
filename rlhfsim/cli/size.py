"""`rlhfsim size`: the fewest or cheapest GPUs that meet targets, across kinds of GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from rlhfsim.cli.constraints import constrained, constraint_options, requirements
from rlhfsim.cli.inputs import (
    MAX_PRICE,
    backend_option,
    build_workload,
    json_option,
    on_command_line,
    workload_options,
)
from rlhfsim.cli.params import Number, OneOf, Whole, bad_option
from rlhfsim.plan import write_plan
from rlhfsim.present.terminal.plan import console
from rlhfsim.present.terminal.size import front_dict, show, show_front, size_dict
from rlhfsim.search.request import Request
from rlhfsim.search.requirements import Requirement
from rlhfsim.search.space import roles_of
from rlhfsim.specs.hardware.hardware import MAX_GPUS, MAX_OVERSUBSCRIPTION, Cluster, Profile
from rlhfsim.specs.hardware.profiles import load_profile, node_group
from rlhfsim.specs.model.roles import Models, models_of
from rlhfsim.what_if.sizing import fronts, resized
from rlhfsim.what_if.sizing import size as search_size

EPILOG = """\b
Examples:
  rlhfsim size --model 70b --require 'step_time<120s'
  rlhfsim size --model 8b --gpu h100,h200,a100-80 --require 'cost_of_run<500' --steps 1000 --objective cost
  rlhfsim size --model 8b --gpu h100,h200 --max-gpus 64 --pareto
"""


@click.command(epilog=EPILOG)
@click.option(
    "--gpu",
    default="h100-sxm",
    show_default=True,
    metavar="NAME,...",
    help="Kinds of GPUs: names or aliases (rlhfsim gpus), or YAML files.",
)
@click.option("--max-gpus", type=Whole(1, MAX_GPUS), default=512, show_default=True, help="Largest cluster.")
@click.option(
    "--oversubscription",
    type=Number(1, MAX_OVERSUBSCRIPTION),
    default=1.0,
    show_default=True,
    help="2: the network between nodes carries half of what the NICs could.",
)
@click.option(
    "--price",
    type=Number(0, MAX_PRICE, "usd/h"),
    help="USD per GPU-hour of every kind, in place of the listed prices.",
)
@workload_options
@backend_option
@click.option(
    "--objective",
    type=OneOf("objective", ("gpus", "cost")),
    default="gpus",
    show_default=True,
    help="Fewest GPUs, or least USD per step.",
)
@constraint_options
@click.option(
    "--pareto", is_flag=True, help="Instead: every size that no other one beats in GPUs, time and money."
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the plan of the answer.")
@json_option
@click.pass_context
def size(ctx: click.Context, /, **given: Any) -> None:
    """Find the fewest or cheapest GPUs that meet targets."""
    profiles = _profiles(given["gpu"])
    request = _request(given, profiles)
    if given["pareto"]:
        trials = fronts(request, profiles, given["max_gpus"])
        if given["as_json"]:
            click.echo(json.dumps(front_dict(trials), indent=1))
        else:
            show_front(console(), trials)
        ctx.exit(0 if trials else 1)
    targets: tuple[Requirement, ...] = ()
    for profile in profiles:  # each must have a price where a target is money
        targets = requirements(given, resized(request, profile, 1))
    if not targets:
        raise bad_option(
            "no target to meet", "give --require 'step_time<120s', or --pareto to see every size"
        )
    answer = search_size(
        request, profiles, targets, aim=given["objective"], most=given["max_gpus"], steps=given["steps"]
    )
    if answer.best is not None and answer.best.plan is not None and given["out"]:
        write_plan(given["out"], answer.best.plan)
    if given["as_json"]:
        click.echo(json.dumps(size_dict(answer, targets, given["steps"]), indent=1))
    else:
        show(console(), answer, targets, given["steps"])
    ctx.exit(0 if answer.best is not None else 1)


def _profiles(text: str) -> list[Profile]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise bad_option("--gpu names no GPU", "as in --gpu h100,h200")
    with on_command_line():
        return list({p.name: p for p in map(load_profile, names)}.values())


def _request(given: dict[str, Any], profiles: list[Profile]) -> Request:
    """The question on one GPU of the first kind; each size replaces the cluster."""
    if given["objective"] == "cost" and given["price"] is None:
        for profile in profiles:
            if profile.price is None:
                raise bad_option(
                    f"no price is known for {profile.name}, so cost cannot be minimised",
                    "give --price USD_PER_GPU_HOUR, or leave it out",
                )
    with on_command_line():
        cluster = Cluster(
            node_groups=(node_group(profiles[0], 1),), oversubscription=given["oversubscription"]
        )
        base = Request(
            cluster=cluster,
            workload=build_workload({**given, "gpus": 1}),
            backend=given["backend"],
            price=given["price"],
        )
    request = constrained(base, given)
    _check_roles(request, models_of(request.workload))
    return request


def _check_roles(request: Request, models: Models) -> None:
    """What can be said about fixed roles without a size: the role exists, and TP splits its heads."""
    roles = roles_of(request, models)
    for role in (*request.fix, *(x.role for x in request.limits if x.field != "hardware")):
        if role not in roles:
            raise bad_option(f"--fix {role}: {request.workload.algorithm} has no {role} here", "leave it out")
    for role, fields in request.fix.items():
        with on_command_line(f"--fix {role}: "):
            models.of("actor" if role == "rollout" else role).check_tp(int(fields.get("tp", 1)))
