"""Options that narrow a search: what is fixed, bounded, forbidden and required."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import cast, get_args

from rlhfsim.cli.params import (
    COMMAND_LINE,
    Given,
    Number,
    OneOf,
    Several,
    Words,
    bad_option,
    field_option,
    on_command_line,
    option,
    together,
)
from rlhfsim.errors import unknown_name
from rlhfsim.search.request import FORBIDDABLE, STALE, SWITCHES, Limit, Request, second_pool_for_rollout
from rlhfsim.search.requirements import CONFIDENCE, QUANTITIES, Requirement, check_steps, requirement
from rlhfsim.search.role_fields import FIXABLE_ROLES, bound, named
from rlhfsim.specs.placement.placement import Architecture
from rlhfsim.specs.placement.weight_paths import SEARCHED
from rlhfsim.specs.ranges import Steps
from rlhfsim.units import DAY, Dimension, format

CHOICES = {**FORBIDDABLE, **SWITCHES}
ARCHITECTURES = get_args(Architecture)
ALIASES = {"offload": "offload_optimizer"}
MAX_BUDGET = 1e12
"""USD; more is a slip."""
_FORM = re.compile(r"^\s*([^\s.=<>!]+)\.([^\s=<>!]+)\s*(<=|>=|!=|=|<|>)\s*(\S+)\s*$")


require_option = option(
    "--require",
    Words("QUANTITY<VALUE"),
    "A target, as in 'step_time<90s'; exit code 1 where it is missed; repeatable. "
    f"Quantities: {', '.join(QUANTITIES)}.",
    multiple=True,
)
target_options = (require_option, option("--steps", Steps, "Steps of the whole run, for its time and cost."))
"""Targets, and the run that some of them need."""
constraint_options = together(
    option(
        "--allow",
        Several("switch", SWITCHES),
        f"Choices that change what is learnt may compete: {', '.join(SWITCHES)}.",
        default="",
    ),
    field_option(Request, "max_staleness", "Most policy versions of lag with --allow async."),
    option(
        "--architecture", OneOf("architecture", ARCHITECTURES), f"Only this one: {', '.join(ARCHITECTURES)}."
    ),
    option(
        "--weight-path",
        OneOf("weight path", SEARCHED),
        f"Only this way of weights to the rollout: {', '.join(SEARCHED)}.",
    ),
    option(
        "--fix",
        Words("ROLE.FIELD=VALUE"),
        "Fix or bound a field of a role: actor.tp=8, 'actor.tp<=4', rollout.gpus=16; repeatable.",
        multiple=True,
    ),
    option("--forbid", Several("choice", CHOICES), f"Rule out: {', '.join(CHOICES)}.", default=""),
    field_option(Request, "max_gpus_per_role", "Largest pool where there are several."),
    field_option(Request, "max_oom", "Largest risk of running out of memory that a plan may carry."),
    field_option(
        Request,
        "time_limit",
        "Longest search; then the best plan so far, and how much better one could still be. "
        "Without it the largest searches end after a fixed amount of work, in the same way.",
    ),
    *target_options,
)
"""Everything that narrows the space."""


promise_options = together(
    option("--deadline", Number(1, 100_000 * DAY, "s"), "The run of --steps N is done by then: 7d."),
    option("--budget", Number(0, MAX_BUDGET, "usd"), "The run of --steps N costs no more: 50kUSD."),
)
"""What a run must keep; the plan that most likely does is chosen among those near the fastest."""
SURE, SURELY = Number(0.5, 0.999), "Probability with which it must fit and meet all targets in one: 90%."
confidence_option = option("--confidence", SURE, SURELY, default=CONFIDENCE)
PROMISES: dict[str, tuple[str, Dimension]] = {
    "deadline": ("time_of_run", "s"),
    "budget": ("cost_of_run", "usd"),
}
"""Option -> quantity and dimension."""


# --- fields of roles --------------------------------------------------------------------------------


def limit_of(text: str, option: str) -> Limit:
    """`actor.tp<=4` as a limit.

    Raises:
        RlhfsimError: another form, an unknown role or field, or a value that the field cannot have.
    """
    match = _FORM.match(text)
    if match is None:
        raise bad_option(
            f"{option} {text[:60]!r} is not ROLE.FIELD=VALUE",
            f"write {option} actor.tp=8, or {option} 'actor.tp<=4' with quotes",
        )
    role, field, relation, value = match.groups()
    if role not in FIXABLE_ROLES:
        raise unknown_name("role", role[:40], FIXABLE_ROLES, place=COMMAND_LINE)
    field = ALIASES.get(field, field)
    with on_command_line(f"{option} "):
        known, number = bound(role, field, relation, value)
    return Limit(role=role, field=field, relation=known, value=number)


def constraints(items: Iterable[str]) -> tuple[dict[str, dict[str, int | str]], tuple[Limit, ...]]:
    """What `--fix` says: degrees that are fixed, and limits on everything else.

    Raises:
        RlhfsimError: a bad item, or one field that is fixed twice.
    """
    fixed: dict[str, dict[str, int | str]] = {}
    limits: list[Limit] = []
    for text in (part for item in items for part in item.split(",")):
        limit = limit_of(text, "--fix")
        if limit.relation == "=" and limit.field in named(limit.role, "fixed"):
            fields = fixed.setdefault(limit.role, {})
            if fields.get(limit.field, limit.value) != limit.value:
                raise bad_option(
                    f"--fix {limit.role}.{limit.field} is both {fields[limit.field]} and {limit.value}",
                    "give one value",
                )
            fields[limit.field] = cast(int | str, limit.value)
        else:
            limits.append(limit)
    return fixed, tuple(limits)


# --- the request ------------------------------------------------------------------------------------


def constrained(request: Request, given: Given) -> Request:
    """A request with everything that `constraint_options` say.

    Raises:
        RlhfsimError: options that contradict each other.
    """
    fix, limits = constraints(given["fix"])
    wanted = given["architecture"]
    allow = given["allow"] | ({wanted} & STALE)
    if wanted in given["forbid"]:
        raise bad_option(f"--architecture {wanted} and --forbid {wanted}", "drop one of the two")
    with on_command_line():
        narrow = replace(
            request,
            allow=frozenset(allow),
            forbid=frozenset(given["forbid"]),
            fix=fix,
            limits=limits,
            architecture=wanted,
            weight_path=given["weight_path"],
            max_gpus_per_role=given["max_gpus_per_role"],
            max_staleness=given["max_staleness"],
            max_oom=given["max_oom"],
            time_limit=given["time_limit"],
        )
    return second_pool_for_rollout(narrow)


# --- targets ----------------------------------------------------------------------------------------


def targets_of(given: Given) -> tuple[Requirement, ...]:
    """The targets of `--require`, `--deadline` and `--budget`.

    Raises:
        RlhfsimError: one that cannot be read, or that needs a number of steps.
    """
    with on_command_line():
        targets = tuple(requirement(text) for text in given["require"])
        check_steps(targets, given["steps"])
    return (*targets, *_promises(given))


def requirements(given: Given, request: Request) -> tuple[Requirement, ...]:
    """The targets of the command line.

    Raises:
        RlhfsimError: as `targets_of`, or one that needs a price which is not known.
    """
    unknown = request.price is None and any(p.profile.price is None for p in request.cluster.node_groups)
    return priced_targets(targets_of(given), unknown=unknown)


def priced_targets(targets: tuple[Requirement, ...], *, unknown: bool) -> tuple[Requirement, ...]:
    """The targets; `unknown`: no price is known.

    Raises:
        RlhfsimError: one on money, and no price is known.
    """
    for target in targets:
        if target.quantity.startswith("cost") and unknown:
            raise bad_option(
                f"--require {target.text}: no price is known for this hardware",
                "give --price USD_PER_GPU_HOUR",
            )
    return targets


def _promises(given: Given) -> Iterator[Requirement]:
    """`--deadline` and `--budget` as targets."""
    for name, (quantity, dimension) in PROMISES.items():
        value = given.get(name)
        if value is None:
            continue
        if given["steps"] is None:
            raise bad_option(f"--{name} needs the length of the run", "give --steps N")
        text = f"{quantity}<={format(value, dimension, digits=6)}"
        yield Requirement(quantity=quantity, relation="<=", value=value, text=text, name=name)
