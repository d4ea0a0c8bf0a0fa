"""What the keys of an export say of a plan when they are read again, against the plan itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.carried import carried
from rlhfsim.interchange.configuration.configuration import ENTRY_POINT, configuration_named
from rlhfsim.interchange.configuration.described import Lengths, placement_of, workload_of
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import AnyRolePlacement, Placement, RolePlacement
from rlhfsim.specs.workload.roles import TRAINED

NEVER_TRAINED = ("recompute", "offload_optimizer", "offload_fraction", "vp", "pack_tokens", "micro_batch")
"""Fields of a layout that a role which only scores does not use."""
ELSEWHERE = ("speculation", "prefill")
"""Fields of a rollout's layout that keys hold together with figures that only comments have."""
_LENGTHS = Lengths(prompt=1.0, response=1.0, longest=None)
WITH = {"score_pack_tokens": ("pack_tokens",), "score_micro_batch": ("micro_batch",)}
"""Field of a layout -> others that it follows where it says nothing."""
PLACED = ("residency", "offload_between")
"""Fields of a role outside its layout."""
Differences = Mapping[str, tuple[Any, Any]]
"""Field -> (the plan's, that of its keys)."""


def paths(role: str, field: str) -> tuple[str, ...]:
    """A field that differs, and what it follows, as entries of `unsaid` name them."""
    if role == "schedule":
        return (role,)
    if field in PLACED:
        return (f"{role}.{field}",)
    return tuple(f"{role}.layout.{name}" for name in (field, *WITH.get(field, ())))


def differences(
    plan: Plan, name: str, values: Mapping[str, Any], version: str, launch: str
) -> Mapping[str, Differences]:
    """By role, or `schedule`: what `values`, keys of a framework's release, say otherwise than the plan.

    `launch`: the script that hands them to its entry point.
    """
    placed = _read(plan, name, {**values, f"{name.replace('-', '_')}_version": version}, launch)
    if placed is None:
        return {}
    found = {}
    for role, own in plan.placement.roles.items():
        other = placed.roles.get(role)
        if other is not None:
            found[role] = dict(_of_role(role, own, other))
    ours, theirs = plan.placement.schedule, placed.schedule
    found["schedule"] = {
        f.name: (getattr(ours, f.name), getattr(theirs, f.name))
        for f in fields(ours)
        if getattr(ours, f.name) != getattr(theirs, f.name)
    }
    return {role: different for role, different in found.items() if different}


def _read(plan: Plan, name: str, values: Mapping[str, Any], launch: str) -> Placement | None:
    """The placement that the keys say; None where they ask for what only a user has, and where another file
    than the launch says by which algorithm given data are trained on."""
    way = configuration_named(name)
    entry = next((found[0] for e in way.entries if (found := re.search(e, launch))), None)
    bare = {key.lstrip("+-").replace("-", "_"): value for key, value in values.items()}
    settings = FrameworkSettings({**carried(plan, launch), **bare, ENTRY_POINT: entry}, "export")
    try:
        run = way.run(settings)
        if not plan.workload.generates and run.algorithm != plan.workload.algorithm:
            return None
        return placement_of(run, workload_of(run, _LENGTHS))
    except RlhfsimError:
        return None


def _of_role(
    role: str, own: AnyRolePlacement, other: AnyRolePlacement
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    ours, theirs = _used(role, own), _used(role, other)
    for field, value in ours.items():
        if value != theirs[field]:
            yield field, (value, theirs[field])


def _used(role: str, placed: AnyRolePlacement) -> dict[str, Any]:
    """Fields that a role uses, with what follows of others filled in."""
    layout: Layout | RolloutLayout = placed.layout
    said = {f.name: getattr(layout, f.name) for f in fields(layout) if f.init and f.name not in ELSEWHERE}
    if isinstance(layout, Layout) and isinstance(placed, RolePlacement):
        said["score_pack_tokens"] = layout.pack(scoring=True)
        said["score_micro_batch"] = layout.sequences(scoring=True)
        said["sequence_parallel"] = layout.sequence_parallel or layout.tp == 1
        if role not in TRAINED:
            said = {k: v for k, v in said.items() if k not in NEVER_TRAINED} | {"zero": layout.zero == 3}
        else:
            said["offload_between"] = placed.offload_between or placed.residency == "offloaded"
        said["residency"] = placed.residency
    return said
