"""From a file or from options to one priced plan; shared by `rlhfsim estimate` and `rlhfsim memory`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource

from rlhfsim.cli import completion
from rlhfsim.cli.inputs import backend_options, build_cluster, build_workload, input_options
from rlhfsim.cli.params import (
    OneOf,
    Several,
    bad_option,
    field_option,
    json_option,
    on_command_line,
    option,
    together,
)
from rlhfsim.cli.roles import FIX, OPTIONS, check_layouts, fixed_layouts, role_options
from rlhfsim.plan import AskedRun, is_edited, read_plan
from rlhfsim.search.request import STALE, SWITCHES, Request, second_pool_for_rollout
from rlhfsim.specs.loading import parse_json, read_text
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.placement import Architecture
from rlhfsim.specs.scenario import system_names
from rlhfsim.what_if.estimate import Planned
from rlhfsim.what_if.plan_files import cluster_of, estimate_file, stale_profiles
from rlhfsim.what_if.planned import best_of, checked_plan
from rlhfsim.what_if.usual_trainer import trained
from rlhfsim.what_if.verdict import check_question

FREE_WITH_FILE = frozenset(
    ["file", "price", "as_json", "out", "detail", "require", "steps", "deadline", "budget", "confidence"]
)
"""Parameters that make sense beside a file."""


_ARCHITECTURES = get_args(Architecture)
plan_options = together(
    click.argument("file", required=False, shell_complete=completion.systems),
    input_options,
    backend_options,
    option(
        "--architecture",
        OneOf("architecture", _ARCHITECTURES),
        f"{', '.join(_ARCHITECTURES)}; default: the fastest.",
    ),
    role_options,
    option(
        "--allow",
        Several("switch", SWITCHES),
        f"May be used though they change what is learnt: {', '.join(SWITCHES)}.",
        default="",
    ),
    field_option(Request, "max_staleness", "Most policy versions of lag when async."),
    json_option,
)
"""FILE, or a cluster, a workload and layouts."""


def planned(ctx: click.Context, given: Mapping[str, Any]) -> Planned:
    """The plan that the command line asks about.

    Raises:
        RlhfsimError: bad input.
    """
    if given["file"] is not None:
        _alone(ctx)
        return from_file(given["file"], given["price"])
    if given["gpus"] is None or given["model"] is None:
        missing = "--gpus" if given["gpus"] is None else "--model"
        raise bad_option(
            f"{missing} is missing",
            "as in --gpus 64 --model 70b; or name a file (plan.json, a scenario) or a system: "
            f"{', '.join(system_names())}",
        )
    return best_of(request_of(given), OPTIONS)


def _alone(ctx: click.Context) -> None:
    for param in ctx.command.params:
        name = param.name or ""
        if name not in FREE_WITH_FILE and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise bad_option(
                f"{param.opts[0]} and a FILE: the file says it already",
                f"leave out {param.opts[0]}, or change the file",
            )


def from_file(file: str, price: float | str | None) -> Planned:
    """A scenario, a shipped system or a plan.json, priced now.

    Raises:
        RlhfsimError: bad input.
    """
    if isinstance(price, str):
        raise bad_option(f"--price {price} and a FILE", "give the price: rlhfsim prices lists them")
    with on_command_line():
        plan = estimate_file(file, price=price)
    return checked_plan(plan, cluster_of(plan), profile_notes(file))


def run_of(file: str | None) -> AskedRun | None:
    """The run that a plan.json was asked for; None for any other file.

    Raises:
        RlhfsimError: a plan.json that cannot be read.
    """
    return read_plan(Path(file)).run if file is not None and Path(file).suffix == ".json" else None


def profile_notes(file: str) -> tuple[str, ...]:
    """Whether a plan.json was edited since it was priced, and which of its profiles have changed."""
    if Path(file).suffix != ".json":
        return ()
    plan = read_plan(Path(file))
    edited = is_edited(parse_json(read_text(Path(file)), file).data)
    return (
        *(["this plan was edited after it was priced: its hash no longer fits"] if edited else []),
        *(
            f"profile {name} is not the one this plan was made with (changed since, or --price was given)"
            for name in stale_profiles(plan)
        ),
    )


# --- from options -----------------------------------------------------------------------------------


def request_of(given: Mapping[str, Any]) -> Request:
    """The design question with what the options fix.

    Raises:
        RlhfsimError: a bad value, or a layout that cannot exist.
    """
    cluster, workload = build_cluster(given), build_workload(given)
    wanted = given["architecture"]
    allow = given["allow"] | ({wanted} & STALE)
    with on_command_line():
        request = Request(
            cluster=cluster,
            workload=workload,
            framework=given["framework"],
            backend=given["backend"],
            allow=frozenset(allow),
            fix=fixed_layouts(given),
            architecture=wanted,
            max_staleness=given["max_staleness"],
        )
    return asked(second_pool_for_rollout(request), OPTIONS)


def asked(request: Request, options: Mapping[str, str] = FIX) -> Request:
    """The same question, which some plan can answer; `options`: with which roles' layouts were typed.

    Raises:
        RlhfsimError: it is refused, whatever the memory (`what_if.verdict`).
    """
    request = trained(request)
    check_layouts(request, models_of(request.workload), options)
    with on_command_line():
        check_question(request)
    return request
