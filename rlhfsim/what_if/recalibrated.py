"""What calibration changed: the same question answered on the profile before, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.search.explain import kind
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.calibrated import Provenance
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.step.region import warnings
from rlhfsim.what_if.design import Design, design
from rlhfsim.what_if.dotted_paths import keys, put
from rlhfsim.what_if.estimate import estimate


@frozen
class ChangedCoefficient:
    """One coefficient that is another than before."""

    profile: str
    name: str
    before: Coefficient
    now: Coefficient

    @property
    def by(self) -> float:
        """|ln(now / before)| of the values."""
        if self.before.value <= 0 or self.now.value <= 0:
            return math.inf
        return abs(math.log(self.now.value / self.before.value))


@frozen
class Rank:
    """The best plan of a kind, before and now; None where the answer does not list that kind."""

    kind: str
    place_before: int | None
    place: int | None
    before: Plan | None
    now: Plan | None


@frozen
class Recalibrated:
    """The answer on calibrated profiles and the one on the profiles before them."""

    profiles: dict[str, Provenance]
    moved: tuple[ChangedCoefficient, ...]
    """Those that moved most come first."""
    ranks: tuple[Rank, ...]
    """In the order of now, then of before."""
    chosen_before: Plan | None
    its_step_now: Plan | None
    """The plan chosen before, priced as calibrated; None where it is chosen again."""
    warnings: tuple[str, ...]
    """Phases of the chosen plan far from the calibrated runs."""


def recalibrated(request: Request, answer: Design) -> Recalibrated | None:
    """What calibration changed; None where no profile of the request was calibrated or nothing fits.

    Raises:
        RlhfsimError: a profile before is not found here.
    """
    now = [pool.profile for pool in request.cluster.node_groups]
    profiles = {p.name: p for p in now if p.calibration}
    if not profiles or answer.chosen is None or answer.best is None:
        return None
    bases = {name: base_of(profile) for name, profile in profiles.items()}
    cluster = put(
        request.cluster, keys("node_groups.*.profile"), lambda profile: bases.get(profile.name, profile)
    )
    before = design(replace(request, cluster=cluster), explain=False, simplest_s=None)
    old, new = before.best, answer.best
    same = old is not None and (old.placement, old.workload) == (new.placement, new.workload)
    return Recalibrated(
        profiles={name: p.calibration for name, p in profiles.items() if p.calibration},
        moved=tuple(sorted(_changed(profiles, bases), key=lambda change: -change.by)),
        ranks=tuple(_ranks(before, answer)),
        chosen_before=old,
        its_step_now=None if same or old is None else estimate(old.placement, old.workload, request.cluster),
        warnings=warnings(answer.chosen, now),
    )


def base_of(profile: Profile) -> Profile:
    """The profile before, with this one's datasheet numbers: prices and links of the command line stay.

    Raises:
        RlhfsimError: it is not found here.
    """
    assert profile.calibration is not None
    try:
        base = load_profile(profile.calibration.base)
    except RlhfsimError as error:
        raise RlhfsimError(
            "no-profile-before",
            f"profile {profile.name} was calibrated from {profile.calibration.base}, which is not found here",
            help="put its file into hardware_profiles/ or a folder of $RLHFSIM_PROFILES, "
            "to see what calibration changed",
        ) from error
    return replace(profile, coefficients=base.coefficients, calibration=base.calibration, biases=base.biases)


def _changed(profiles: dict[str, Profile], bases: dict[str, Profile]) -> Iterator[ChangedCoefficient]:
    for key, profile in profiles.items():
        for name, now in profile.coefficients.items():
            before = bases[key].coefficients[name]
            if (before.value, before.low, before.high) != (now.value, now.low, now.high):
                yield ChangedCoefficient(profile=key, name=name, before=before, now=now)


def _ranks(before: Design, now: Design) -> Iterator[Rank]:
    old, new = _listed(before), _listed(now)
    for name in dict.fromkeys((*new, *old)):
        (place_before, plan_before), (place, plan) = old.get(name, (None, None)), new.get(name, (None, None))
        yield Rank(kind=name, place_before=place_before, place=place, before=plan_before, now=plan)


def _listed(answer: Design) -> dict[str, tuple[int, Plan]]:
    """Place and best plan by kind."""
    plans = (answer.best, *answer.runners_up) if answer.best else ()
    places: dict[str, tuple[int, Plan]] = {}
    for i, plan in enumerate(plans, start=1):
        places.setdefault(kind(plan), (i, plan))
    return places
