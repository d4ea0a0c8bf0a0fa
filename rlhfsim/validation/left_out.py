"""Hardware profiles whose coefficients were fitted without one publisher.

    without("NVIDIA-NeMo/RL")("h100")     the profile as fits give it that read no row of that publisher

A publisher is the repository, paper or thread of a row: all pages of a repository leave together. The fits
are in `lab.fits`, which the wheel does not hold, so that their results stand in `data/left_out.json`
(`python -m lab.fits.leave_one_out`). What no fit reads has the shipped profile.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.quantities import Coefficient

FILE = "left_out.json"
Lookup = Callable[[str], Profile]
"""Finds a hardware profile by name or alias; always the same object for the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """One coefficient as fitted without a publisher."""

    name: str
    profiles: tuple[str, ...]
    """Profiles that hold it; all when empty."""
    framework: str
    """Whose software it holds for; all when empty."""
    value: float
    low: float
    high: float


def publisher(source: str) -> str:
    """Repository, paper or thread of a publication: what is left out at a time."""
    return source.split("@")[0]


@cache
def facts() -> dict[str, Any]:
    """The file: fit -> hash of its inputs, and publisher -> coefficients."""
    text = (resources.files("rlhfsim.validation") / "data" / FILE).read_text(encoding="utf-8")
    known: dict[str, Any] = json.loads(text)
    return known


@cache
def refits(name: str, framework: str | None = None) -> tuple[Refit, ...]:
    """The coefficients of every fit that read rows of a publisher, fitted without them; () where none did.

    Those of a framework come after the pooled ones that they replace.
    """
    found = [
        Refit(**{**c, "profiles": tuple(c["profiles"]), "framework": c.get("framework", "")})
        for fit in facts().values()
        for c in fit["left_out"].get(name, ())
    ]
    return tuple(sorted((r for r in found if r.framework in ("", framework)), key=lambda r: r.framework))


@cache
def without(name: str) -> Lookup:
    """Profiles as they are when no row of the publisher is in any fit."""
    refitted = refits(name)

    @cache
    def find(gpu: str) -> Profile:
        return changed(_shipped(gpu), refitted)

    return find


@cache
def _shipped(gpu: str) -> Profile:
    return load_profile(gpu)


def cluster_without(cluster: Cluster, name: str) -> Cluster:
    """The same cluster on those profiles."""
    find = without(name)
    if not refits(name):
        return cluster
    groups = (replace(g, profile=find(g.profile.name)) for g in cluster.node_groups)
    return replace(cluster, node_groups=tuple(groups))


def changed(profile: Profile, refitted: tuple[Refit, ...]) -> Profile:
    """A profile with refitted coefficients in place of its own."""
    own = {
        c.name: Coefficient(
            value=c.value,
            low=c.low,
            high=c.high,
            source="fitted without the publisher",
            dimension=profile.coefficient(c.name).dimension,
        )
        for c in refitted
        if c.name in profile.coefficients and (not c.profiles or profile.name in c.profiles)
    }
    return replace(profile, coefficients={**profile.coefficients, **own}) if own else profile
