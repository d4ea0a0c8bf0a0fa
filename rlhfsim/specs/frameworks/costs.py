"""What the software of a framework costs, in addition to what the hardware under it does.

Software costs are coefficients of the profile by name, unit and interval: `common.yaml` holds them pooled
over frameworks, with the doubt of not knowing which one runs. A framework's folder may hold a file
`costs.yaml`, whose numbers take the place of the pooled ones; where it has none, no published run prints
phases with lengths. A profile that gives a coefficient itself (one of `rlhfsim calibrate`, a CPU) keeps its
own: it was measured where the plan runs.

    own of the profile > framework and training backend > framework > pooled

Not known here: how the costs change from release to release, unless a framework's folder says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from functools import cache
from typing import Any

from rlhfsim import resources
from rlhfsim.errors import unknown_name
from rlhfsim.frozen import frozen
from rlhfsim.specs.frameworks.files import data_of
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import coefficients_of
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.quantities import Coefficient


@frozen
class Costs:
    """Software costs of one framework, by name of the coefficient; what it leaves out is pooled."""

    shared: Mapping[str, Coefficient] = field(default_factory=dict)
    """Whatever trains."""
    by_backend: Mapping[Backend, Mapping[str, Coefficient]] = field(default_factory=dict)
    """Coefficients of one training backend, over `shared`."""
    biased: bool = True
    """Whether a phase may be off as a whole. The calls of our own executor are priced piece by piece."""

    fitted_modes: frozenset[str] = frozenset()
    """Engine modes (`step.engine_mode`) whose runs fitted these costs: other modes' biases are not theirs."""

    def of(self, backend: Backend | None) -> Mapping[str, Coefficient]:
        """All numbers that hold with a training backend."""
        return {**self.shared, **(self.by_backend.get(backend, {}) if backend else {})}


def names() -> tuple[str, ...]:
    """Frameworks that are known here: their folders, `-` for `_`."""
    return resources.frameworks_with("costs", "runs", "logs")


@cache
def costs_of(framework: str) -> Costs:
    """Software costs of one of `names`.

    Raises:
        RlhfsimError: there is no such framework.
    """
    if framework not in names():
        raise unknown_name("framework", framework, names())
    given = data_of(framework, "costs")
    return Costs(
        shared=_coefficients(given.get("shared", {})),
        by_backend={backend: _coefficients(own) for backend, own in given.get("by_backend", {}).items()},
        biased=given.get("biased", True),
        fitted_modes=frozenset(given.get("fitted_modes", ())),
    )


def _coefficients(given: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Coefficient]:
    return {name: Coefficient(**numbers) for name, numbers in given.items()}


@cache
def pooled() -> Mapping[str, Coefficient]:
    """The shipped coefficients that all profiles share."""
    return coefficients_of(resources.shipped("hardware_profiles") / "common.yaml")


def with_software(profile: Profile, framework: str | None, backend: Backend | None = None) -> Profile:
    """The profile with a framework's costs where its own are only the pooled ones."""
    if framework is None:
        return profile
    own, shared = profile.coefficients, pooled()
    given = costs_of(framework).of(backend)
    taken = {name: c for name, c in given.items() if own.get(name) == shared.get(name)}
    return replace(profile, coefficients={**own, **taken}) if taken else profile
