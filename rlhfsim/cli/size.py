"""`rlhfsim size`: the fewest or cheapest GPUs that meet targets, across kinds of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlhfsim.cli.constraints import confidence_option, constrained, constraint_options, requirements
from rlhfsim.cli.inputs import (
    backend_options,
    build_workload,
    oversubscription_option,
    rent_option,
    workload_options,
)
from rlhfsim.cli.params import (
    Given,
    OneOf,
    Output,
    Told,
    Words,
    bad_option,
    command,
    flag,
    json_option,
    on_command_line,
    option,
)
from rlhfsim.plan import write_plan
from rlhfsim.present.answers.size import front_page, size_page
from rlhfsim.search.request import Request
from rlhfsim.search.requirements import Requirement
from rlhfsim.search.space import roles_of
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.hardware.profiles import load_profile, node_group
from rlhfsim.specs.model.roles import Models, models_of
from rlhfsim.specs.ranges import PoolGpus
from rlhfsim.what_if.risk.odds import Targets, asked_run
from rlhfsim.what_if.sizing import fronts, resized
from rlhfsim.what_if.sizing import size as search_size

EPILOG = """\b
Examples:
  rlhfsim size --model 70b --require 'step_time<120s'
  rlhfsim size --model 8b --gpu h100,h200,a100-80 --require 'cost_of_run<500' --steps 1000 --objective cost
  rlhfsim size --model 8b --require 'time_of_run<7d' --steps 1000 --confidence 90%
  rlhfsim size --model 8b --gpu h100,h200 --max-gpus 64 --pareto
"""


@command(EPILOG)
@option(
    "--gpu",
    Words("NAME,..."),
    "Kinds of GPUs: names or aliases (rlhfsim gpus), or YAML files.",
    default="h100-sxm",
)
@option("--max-gpus", PoolGpus, "Largest cluster.", default=512)
@oversubscription_option
@rent_option
@workload_options
@backend_options
@option(
    "--objective", OneOf("objective", ("gpus", "cost")), "Fewest GPUs, or least USD per step.", default="gpus"
)
@constraint_options
@confidence_option
@flag("--pareto", "Instead: every size that no other one beats in GPUs, time and money.")
@option("--out", Output("plan"), "Write the plan of the answer.")
@json_option
def size(**given: Any) -> Told:
    """Find the fewest or cheapest GPUs that meet targets."""
    profiles = kinds_of(given["gpu"], given["price"])
    request = _request(given, profiles)
    if given["pareto"]:
        if given["require"]:
            raise bad_option("--pareto shows every size, whatever --require asks for", "drop one of the two")
        trials = fronts(request, profiles, given["max_gpus"])
        return Told(front_page(trials), bool(trials))
    targets = targets_on(given, request, profiles, 1)
    if not targets:
        raise bad_option(
            "no target to meet", "give --require 'step_time<120s', or --pareto to see every size"
        )
    answer = search_size(
        request,
        profiles,
        Targets(requirements=targets, steps=given["steps"], confidence=given["confidence"]),
        aim=given["objective"],
        max_gpus=given["max_gpus"],
    )
    if answer.best is not None and answer.best.plan is not None:
        run = asked_run(targets, given["steps"], answer.best.odds)
        plan = replace(answer.best.plan, run=run)
        answer = replace(answer, best=replace(answer.best, plan=plan))
        if given["out"]:
            write_plan(given["out"], plan)
    return Told(size_page(answer, targets, given["confidence"]), answer.best is not None)


def targets_on(
    given: Given, request: Request, profiles: Sequence[Profile], gpus: int
) -> tuple[Requirement, ...]:
    """The targets; each kind must have a price where one is money."""
    return [requirements(given, resized(request, profile, gpus)) for profile in profiles][-1]


def kinds_of(text: str, price: float | str | None) -> list[Profile]:
    """The kinds named, at the prices of a market where one is named."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise bad_option("--gpu names no GPU", "as in --gpu h100,h200")
    with on_command_line():
        kinds = {p.name: p for p in map(load_profile, names)}.values()
        return [node_group(p, 1, price=price).profile if isinstance(price, str) else p for p in kinds]


def _request(given: Given, profiles: list[Profile]) -> Request:
    """The question on one GPU of the first kind; each size replaces the cluster."""
    if given["objective"] == "cost" and given["price"] is None:
        for profile in profiles:
            if profile.price is None:
                raise bad_option(
                    f"no price is known for {profile.name}, so cost cannot be minimised",
                    "give --price USD_PER_GPU_HOUR, or leave it out",
                )
    return on_one_gpu(given, profiles[0])


def on_one_gpu(given: Given, profile: Profile) -> Request:
    """What the options ask, on one GPU."""
    with on_command_line():
        cluster = Cluster(node_groups=(node_group(profile, 1),), oversubscription=given["oversubscription"])
        asked: dict[str, Any] = {name: given.get(name) for name in ("framework", "backend")}
        base = Request(
            cluster=cluster,
            workload=build_workload({**given, "gpus": 1}),
            **asked,
            price=None if isinstance(given["price"], str) else given["price"],
        )
    request = constrained(base, given)
    check_roles(request, models_of(request.workload))
    return request


def check_roles(request: Request, models: Models) -> None:
    """What can be said about fixed roles without a size: the role exists, and TP splits its heads."""
    roles = roles_of(request, models)
    for role in (*request.fix, *(x.role for x in request.limits if x.field != "hardware")):
        if role not in roles:
            raise bad_option(f"--fix {role}: {request.workload.algorithm} has no {role} here", "leave it out")
    for role, fields in request.fix.items():
        with on_command_line(f"--fix {role}: "):
            models.of("actor" if role == "rollout" else role).check_tp(int(fields.get("tp", 1)))
