"""From a file or from options, with layouts of single roles, to one priced plan (`estimate`, `memory`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import click

from rlhfsim.cli import completion
from rlhfsim.cli.constraints import ARCHITECTURES
from rlhfsim.cli.inputs import PAIRS, backend_options, build_cluster, build_workload, input_options
from rlhfsim.cli.params import (
    Given,
    OneOf,
    Option,
    Several,
    bad_option,
    field_option,
    is_typed,
    json_option,
    on_command_line,
    option,
    parse_pairs,
    together,
)
from rlhfsim.plan import AskedRun, is_edited, read_plan
from rlhfsim.search.fixed_layouts import check_layout
from rlhfsim.search.request import STALE, SWITCHES, Request, second_pool_for_rollout
from rlhfsim.search.role_fields import field_of, named
from rlhfsim.specs.loading import parse_json, read_text
from rlhfsim.specs.model.roles import Models, models_of
from rlhfsim.specs.scenario import system_names
from rlhfsim.specs.workload.roles import ENDS, NAMES
from rlhfsim.what_if.estimate import Planned
from rlhfsim.what_if.plan_files import cluster_of, estimate_file, stale_profiles
from rlhfsim.what_if.planned import best_of, checked_plan
from rlhfsim.what_if.usual_trainer import trained
from rlhfsim.what_if.verdict import check_question

FREE_WITH_FILE = frozenset(
    ["file", "price", "as_json", "out", "detail", "require", "steps", "deadline", "budget", "confidence"]
)
"""Parameters that make sense together with a file."""


# --- layouts of single roles ------------------------------------------------------------------------

Fields = dict[str, int | str]
FIX = {role: f"--fix {role}" for role in NAMES}
"""Role -> what fixes its fields where the whole question is typed."""
PLAIN = {role: role for role in NAMES}
OPTIONS = {role: f"--{role}" if role in ENDS else f"--{role.replace('_', '-')}-layout" for role in NAMES}
"""Role -> option; the plain names of the others already name models."""


def _role_option(role: str, name: str) -> Option:
    fields = ", ".join(named(role, "fixed"))
    help = f"Layout of the {role}: {fields}." if role in ENDS else f"The same for the {role}."
    left_out = " What is left out is chosen." if role == "actor" else ""
    return option(f"{name} {role}_layout", PAIRS, help + left_out)


def fixed_layouts(given: Given) -> dict[str, Fields]:
    """Role -> field -> value, of the options that were given.

    Raises:
        RlhfsimError: an unknown field, or a value that is no degree.
    """
    texts = {role: given[f"{role}_layout"] for role in OPTIONS}
    return {role: fixed_fields(role, text, OPTIONS[role]) for role, text in texts.items() if text is not None}


def fixed_fields(role: str, text: str, option: str) -> Fields:
    """Field -> value of one role from `tp=8,pp=2`; errors name `option`."""
    fields: Fields = {}
    for name, value in parse_pairs(text, option).items():
        with on_command_line():
            fields[name] = cast(int | str, field_of(role, name, "fixed").read(value, f"{option} {name}"))
    return fields


def check_layouts(request: Request, models: Models, options: Mapping[str, str]) -> None:
    """Refuse a fixed layout that cannot exist on this cluster, with this model or this backend; `options`:
    with which each role's was typed.

    Raises:
        RlhfsimError: the first rule that is broken.
    """
    for role, fields in request.fix.items():
        model = models.actor if role == "rollout" else models.roles.get(role)
        if model is None or (role == "rollout" and not request.workload.generates):
            raise bad_option(
                f"{options[role]}: {request.workload.algorithm} has no {role} here",
                f"leave out {options[role]}",
            )
        with on_command_line(f"{options[role]}: "):
            check_layout(request, models, role, fields)


# --- from a file or from options ---------------------------------------------------------------------

plan_options = together(
    click.argument("file", required=False, shell_complete=completion.systems),
    input_options,
    backend_options,
    option(
        "--architecture",
        OneOf("architecture", ARCHITECTURES),
        f"{', '.join(ARCHITECTURES)}; default: the fastest.",
    ),
    *(_role_option(role, name) for role, name in OPTIONS.items()),
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


def planned(given: Given) -> Planned:
    """The plan that the command line asks about.

    Raises:
        RlhfsimError: bad input.
    """
    if given["file"] is not None:
        _alone()
        return from_file(given["file"], given["price"])
    if given["gpus"] is None or given["model"] is None:
        missing = "--gpus" if given["gpus"] is None else "--model"
        raise bad_option(
            f"{missing} is missing",
            "as in --gpus 64 --model 70b; or name a file (plan.json, a scenario) or a system: "
            f"{', '.join(system_names())}",
        )
    return best_of(request_of(given), OPTIONS)


def _alone() -> None:
    for param in click.get_current_context().command.params:
        name = param.name or ""
        if name not in FREE_WITH_FILE and is_typed(name):
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


def request_of(given: Given) -> Request:
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
