"""Hardware profiles whose coefficients were fitted without one publisher.

    without("NVIDIA-NeMo/RL")(profile, None)     as fits give it that read no row of that publisher

A publisher is the repository, paper or thread of a row: all pages of a repository leave together. The results
of the fits (`lab.fits`) are in `data/left_out.json`, written by `python -m lab.fits.leave_one_out`. What no fit
reads has the shipped profile.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from lab.scoreboard.rows import DATA
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.validation.outcome import Change

FILE = "left_out.json"


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


@cache
def facts() -> dict[str, Any]:
    """The file: fit -> hash of its inputs, and publisher -> coefficients."""
    known: dict[str, Any] = json.loads((DATA / FILE).read_text(encoding="utf-8"))
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


def without(name: str) -> Change:
    """Profiles as they are when no row of the publisher is in any fit."""

    def change(profile: Profile, framework: str | None) -> Profile:
        return changed(profile, refits(name, framework))

    return change


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
