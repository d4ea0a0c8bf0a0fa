"""Layouts of single roles on the command line, checked before anything is searched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rlhfsim.cli.params import Option, Words, bad_option, on_command_line, option, parse_pairs, together
from rlhfsim.search.fixed_layouts import check_layout
from rlhfsim.search.request import Request
from rlhfsim.search.role_fields import field_of, named
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.workload.roles import ENDS, NAMES

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
    return option(f"{name} {role}_layout", Words("KEY=VALUE,..."), help + left_out)


role_options = together(*(_role_option(role, name) for role, name in OPTIONS.items()))
"""`--actor tp=8,pp=2`, `--rollout tp=8`, ...: what is left out is chosen."""


def fixed_layouts(given: Mapping[str, Any]) -> dict[str, Fields]:
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


# --- checks -----------------------------------------------------------------------------------------


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
