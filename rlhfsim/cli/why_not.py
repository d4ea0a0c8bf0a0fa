"""`--why-not`: choices, or a whole plan, that `rlhfsim design` compares its answer with."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from rlhfsim.cli.constraints import ARCHITECTURES, CHOICES, limit_of
from rlhfsim.cli.params import COMMAND_LINE, bad_option, on_command_line
from rlhfsim.cli.planned import PLAIN, check_layouts
from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.plan import read_plan
from rlhfsim.search.request import SWITCHES, Limit, Request
from rlhfsim.search.role_fields import FIXABLE_ROLES
from rlhfsim.search.space import roles_of
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.weight_paths import SEARCHED
from rlhfsim.what_if.engine import Question
from rlhfsim.what_if.why_not import FORBID_PREFIX, ROLES, Alternative, alternative, named_plan

OPTION = "--why-not"
DEGREE_FIELDS = {"mb": "micro_batch", "pack": "pack_tokens", "x": "dp"}
"""Degrees that a label writes otherwise than `--fix`: `TP4 x8`."""
_DEGREE = re.compile(r"([a-z]+?)-?(\d+)", re.IGNORECASE)


def alternatives(texts: Iterable[str], request: Request, models: Models) -> tuple[Alternative, ...]:
    """The choices of `--why-not`.

    Raises:
        RlhfsimError: one that is no choice here.
    """
    return tuple(_alternative(text, request, models) for text in texts)


def _alternative(text: str, request: Request, models: Models) -> Alternative:
    if text.strip().endswith(".json"):
        placement = read_plan(text.strip()).placement
        return Alternative(text=text, question=Question(request=request, placement=placement), exact=True)
    parts = [part.strip() for part in text.split(";") if part.strip()]
    if len(parts) > 1 or _is_layout(text):
        named = [part for part in parts if not _is_layout(part) and "." not in part]
        limits = [limit for part in parts if part not in named for limit in _limits(part, request, models)]
        with on_command_line():
            asked = named_plan(request, text, [_name(part, request) for part in named], limits)
        fix = {role: asked.question.request.fix.get(role, {}) for role in asked.roles}
        try:
            check_layouts(replace(asked.question.request, fix=fix), models, PLAIN)
        except RlhfsimError as error:  # which is the answer
            return replace(asked, refused=error.message)
        return asked
    if "." in text:
        [limit] = _limits(text, request, models)
        asked = alternative(request, text, limit)
        narrow = asked.question.request
        with on_command_line(f"{OPTION} {text}: "):
            check_layouts(replace(narrow, fix={limit.role: narrow.fix.get(limit.role, {})}), models, PLAIN)
        return asked
    name = _name(text, request)
    with on_command_line():
        return alternative(request, text, name)


def _name(text: str, request: Request) -> str:
    """An architecture, a sharing of GPUs, a switch, a backend, a weight path, or what is left out."""
    names = [*ARCHITECTURES, *ROLES, "streaming", *SWITCHES, *BACKENDS, *SEARCHED]
    names += [FORBID_PREFIX + name for name in CHOICES]
    name = text.strip().lower()
    if name not in names:
        raise unknown_name("choice", text[:40], names, place=COMMAND_LINE)
    if not request.workload.generates and name in (*ARCHITECTURES, "streaming", *SEARCHED):
        raise bad_option(f"{OPTION} {name}: {request.workload.algorithm} has no rollout", "leave it out")
    return name


def _is_layout(text: str) -> bool:
    """Whether it is `ROLE=DEGREES` rather than a name or `ROLE.FIELD=VALUE`."""
    role, equals, _ = text.partition("=")
    return bool(equals) and "." not in role


def _limits(text: str, request: Request, models: Models) -> list[Limit]:
    """`actor.tp<=4`, or `actor=tp8,pp2` with the names of layout labels."""
    if not _is_layout(text):
        limits = [limit_of(text, OPTION)]
    else:
        role, _, degrees = (part.strip() for part in text.partition("="))
        if role not in FIXABLE_ROLES:
            raise unknown_name("role", role[:40], FIXABLE_ROLES, place=COMMAND_LINE)
        limits = [
            limit_of(f"{role}.{degree}", OPTION) for degree in map(_degree, re.split(r"[,\s]+", degrees))
        ]
    for limit in limits:
        if limit.role not in roles_of(request, models):
            raise bad_option(
                f"{OPTION} {text}: {request.workload.algorithm} has no {limit.role} here", "leave it out"
            )
    return limits


def _degree(text: str) -> str:
    """`tp8` as `tp=8`."""
    match = _DEGREE.fullmatch(text)
    if match is None:
        raise bad_option(
            f"{OPTION}: {text[:40]!r} is no degree", "as in --why-not 'actor=tp8,pp2;rollout=tp4'"
        )
    name = match[1].lower()
    return f"{DEGREE_FIELDS.get(name, name)}={match[2]}"
