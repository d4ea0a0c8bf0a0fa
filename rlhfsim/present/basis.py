"""What can be worked out from a plan on this machine: its cluster, its priced step, its memory by phase."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import NamedTuple

from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.cost import Cost
from rlhfsim.memory.ledger import ledger
from rlhfsim.plan import LedgerEntry, Plan
from rlhfsim.present.tables import added
from rlhfsim.present.words import MEMORY_GROUPS, is_move
from rlhfsim.search.candidates import timed
from rlhfsim.specs.frameworks.costs import with_software
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.hardware.prices import at_price
from rlhfsim.specs.hardware.profiles import load_profile, node_group, profile_hash
from rlhfsim.specs.model.roles import models_of
from rlhfsim.step.calls import CallSetting

SAME = 0.01
"""Relative difference up to which a step that is priced again is the plan's own."""

DERIVED = {
    "length_balance": "how evenly drawn lengths spread over the ranks: computed from their distribution",
    "rules.seconds_per_sample": "given by the workload",
    "custom.seconds_per_sample": "declared by own parts of the algorithm",
    "custom.measured_seconds_per_sample": "measured in the runs on which the profile was calibrated",
    "rules.measured_seconds_per_sample": "measured in the runs on which the profile was calibrated",
}
"""What a time can rest on in addition to coefficients and curves."""


class Basis(NamedTuple):
    """A plan with what this machine knows about it."""

    plan: Plan
    profiles: tuple[Profile | None, ...]
    """As in `plan.hardware`; None: not found here."""
    cluster: Cluster | None
    """None: some profile is not here."""
    cost: Cost | None
    """The critical chain, priced again; None: it cannot be, or comes out differently."""
    notes: tuple[str, ...]


def basis(plan: Plan) -> Basis:
    """The plan with everything that the shipped profiles say about it; what is missing is a note."""
    profiles = profiles_of(plan)
    cluster = cluster_of(plan, profiles)
    cost, why = (None, ()) if cluster is None else _priced(plan, cluster)
    return Basis(
        plan=plan,
        profiles=profiles,
        cluster=cluster,
        cost=cost,
        notes=(*_other_profiles(plan, profiles), *why),
    )


def cluster_of(plan: Plan, profiles: tuple[Profile | None, ...]) -> Cluster | None:
    """The cluster of a plan; None where a profile is missing."""
    groups = tuple(
        node_group(p, h.gpus, gpus_per_node=h.gpus_per_node, fabric=h.fabric, wan=h.wan)
        for p, h in zip(profiles, plan.hardware, strict=True)
        if p
    )
    if len(groups) < len(profiles):
        return None
    return Cluster(node_groups=groups, oversubscription=plan.oversubscription, framework=plan.framework)


def profiles_of(plan: Plan) -> tuple[Profile | None, ...]:
    """The profiles of a plan at the prices that it was made with; None where one is not found here."""
    asked = plan.choice.asked.price if plan.choice else None
    found = ((profile_of(h.profile, asked), h.price if asked is None else None) for h in plan.hardware)
    return tuple(profile and at_price(profile, price) for profile, price in found)


def profile_of(name: str, price: float | None = None) -> Profile | None:
    """A profile by name, at the price that was given; None where it is not found here."""
    try:
        return node_group(name, 1, price=price).profile
    except RlhfsimError:
        return None


def title_of(name: str) -> str:
    """What a kind of GPU is called; the name of its profile where that is not found here."""
    profile = profile_of(name)
    return profile.title if profile else name


_profile = lru_cache(maxsize=32)(load_profile)
"""A profile, read once: the views of one plan ask for it again and again."""


def profile_under(plan: Plan, pool: str) -> Profile | None:
    """The profile under a pool of the plan; None where it is not found here any more."""
    hardware = next((p.hardware for p in plan.placement.pools if p.name == pool), 0)
    try:
        found = _profile(plan.hardware[hardware].profile)
        return with_software(found, plan.framework, plan.placement.backend)
    except RlhfsimError:
        return None


def capacity_of(plan: Plan, pool: str) -> float:
    """Bytes that the driver offers on a GPU of the pool."""
    profile = profile_under(plan, pool)
    return profile.usable_memory.value if profile else plan.prediction.capacity_bytes


def cores(plan: Plan) -> str:
    """What takes the place of a GPU where there is none; empty where there are."""
    profiles = [profile_of(h.profile) for h in plan.hardware]
    cpu = any(p is not None and p.vendor == "cpu" for p in profiles)
    return "; there is no GPU here: every GPU below is one core of a CPU" if cpu else ""


def evidence(coefficient: str, profile: Profile | None) -> str:
    """Where a coefficient or curve that a time rests on comes from; empty: the cost model assumes it."""
    if profile and coefficient in profile.coefficients:
        return profile.coefficients[coefficient].source
    curves = (profile.curves or {}).get("tables", {}) if profile else {}
    if coefficient in curves:
        return str(curves[coefficient].get("source", "measured"))
    return DERIVED.get(coefficient, "")


def _other_profiles(plan: Plan, profiles: tuple[Profile | None, ...]) -> Iterator[str]:
    for planned, profile in zip(plan.hardware, profiles, strict=True):
        name = f"profile {planned.profile} is not"
        if profile is None:
            yield f"{name} on the machine that wrote this page: its values cannot be shown"
        elif profile_hash(profile) != planned.profile_hash:
            yield f"{name} the one the plan was made with (changed since, or a price was given)"


def _priced(plan: Plan, cluster: Cluster) -> tuple[Cost | None, tuple[str, ...]]:
    """The step priced again, if that gives the plan's step."""
    try:
        models = models_of(plan.workload)
        memory = ledger(models, plan.placement, plan.workload, cluster)
        setting = CallSetting(
            models=models, placement=plan.placement, workload=plan.workload, cluster=cluster
        )
        kv_tokens = memory.kv_tokens if memory.kv_tokens and memory.kv_tokens > 0 else None
        again = timed(setting, kv_tokens)
    except RlhfsimError as error:
        return None, (f"the step could not be priced again: {error.message}",)
    if not math.isclose(again.seconds, plan.prediction.step_s, rel_tol=SAME):
        return None, ("priced again the step differs from the plan: the profile or this release changed",)
    return again.cost, ()


# --- memory through the step ---------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A phase and what a GPU holds in it."""

    phase: str
    entries: tuple[LedgerEntry, ...]

    @cached_property
    def bytes(self) -> float:
        """All of it."""
        return sum(e.bytes for e in self.entries)

    @cached_property
    def components(self) -> dict[str, float]:
        """Component of the ledger -> bytes."""
        return added((e.component, e.bytes) for e in self.entries)

    @cached_property
    def groups(self) -> dict[str, float]:
        """Group of components -> bytes."""
        named = {c for components in MEMORY_GROUPS.values() for c in components}
        return {
            group: sum(
                e.bytes
                for e in self.entries
                if e.component in components or not (components or e.component in named)
            )
            for group, components in MEMORY_GROUPS.items()
        }


def states(plan: Plan, pool: str) -> list[State]:
    """The phases of a pool in order; moves after which memory is as before are left out."""
    rows = [e for e in plan.prediction.ledger if e.pool == pool]
    every = [State(phase, tuple(entries)) for phase, entries in groupby(rows, key=lambda e: e.phase)]
    peak = max((state.bytes for state in every), default=0.0)
    shown: list[State] = []
    for state in every:
        moved = state.phase == "end" or is_move(state.phase)
        if not moved or state.bytes == peak or all(state.bytes != s.bytes for s in (*shown[:1], *shown[-1:])):
            shown.append(state)
    return shown
