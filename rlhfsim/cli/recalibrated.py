"""What calibration changed: the same question answered on the profile before, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rlhfsim import units
from rlhfsim.api import design, estimate
from rlhfsim.cli.calibrate_view import between, percent
from rlhfsim.cli.words import new_table
from rlhfsim.errors import RlhfsimError
from rlhfsim.phases.region import warnings
from rlhfsim.plan import Plan
from rlhfsim.search.design import Design
from rlhfsim.search.explain import kind
from rlhfsim.search.request import Request
from rlhfsim.specs.calibration import Provenance
from rlhfsim.specs.hardware import Cluster, Profile
from rlhfsim.specs.profiles import load_profile
from rlhfsim.specs.quantities import Coefficient

SHOWN = 8
"""Coefficients on the screen, those that moved most; --json has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The best plan of a kind, before and now; None where the answer does not list that kind."""

    kind: str
    place_before: int | None
    place: int | None
    before: Plan | None
    now: Plan | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalibrated:
    """The answer on calibrated profiles beside the one on the profiles before them."""

    profiles: dict[str, Provenance]
    moved: tuple[Moved, ...]
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
    profiles = {p.profile.name: p.profile for p in request.cluster.pools if p.profile.calibration}
    if not profiles or answer.chosen is None:
        return None
    bases = {name: base_of(profile) for name, profile in profiles.items()}
    before = design(replace(request, cluster=with_bases(request.cluster, bases)), explain=False)
    old = before.chosen
    same = old is not None and old.placement == answer.chosen.placement and old.workload == answer.chosen.workload  # fmt: skip
    return Recalibrated(
        profiles={name: p.calibration for name, p in profiles.items() if p.calibration},
        moved=tuple(sorted(_moved(profiles, bases), key=lambda m: -m.by)),
        ranks=tuple(_ranks(before, answer)),
        chosen_before=old,
        its_step_now=None if same or old is None else estimate(old.placement, old.workload, request.cluster),
        warnings=warnings(answer.chosen, [p.profile for p in request.cluster.pools]),
    )  # fmt: skip


def base_of(profile: Profile) -> Profile:
    """The profile before, with this one's own datasheet numbers (prices and links given on the command line stay).

    Raises:
        RlhfsimError: it is not found here.
    """
    assert profile.calibration is not None
    try:
        base = load_profile(profile.calibration.base)
    except RlhfsimError as error:
        raise RlhfsimError("no-profile-before", f"profile {profile.name} was calibrated from {profile.calibration.base}, which is not found here",
                           help="put its file into hardware_profiles/ or a folder of $RLHFSIM_PROFILES, to see what calibration changed") from error  # fmt: skip
    return replace(profile, coefficients=base.coefficients, calibration=base.calibration)


def with_bases(cluster: Cluster, bases: dict[str, Profile]) -> Cluster:
    """The cluster on the profiles before."""
    pools = tuple(replace(p, profile=bases.get(p.profile.name, p.profile)) for p in cluster.pools)
    return replace(cluster, pools=pools)


def _moved(profiles: dict[str, Profile], bases: dict[str, Profile]) -> Iterator[Moved]:
    for key, profile in profiles.items():
        for name, now in profile.coefficients.items():
            before = bases[key].coefficients[name]
            if (before.value, before.low, before.high) != (now.value, now.low, now.high):
                yield Moved(profile=key, name=name, before=before, now=now)


def _ranks(before: Design, now: Design) -> Iterator[Rank]:
    old, new = _listed(before), _listed(now)
    for name in dict.fromkeys((*new, *old)):
        (place_before, plan_before), (place, plan) = old.get(name, (None, None)), new.get(name, (None, None))  # fmt: skip
        yield Rank(kind=name, place_before=place_before, place=place, before=plan_before, now=plan)


def _listed(answer: Design) -> dict[str, tuple[int, Plan]]:
    """Place and best plan by kind."""
    found: dict[str, tuple[int, Plan]] = {}
    plans = (answer.chosen, *answer.runners_up) if answer.chosen else ()
    for i, plan in enumerate(plans, start=1):
        found.setdefault(kind(plan), (i, plan))
    return found


# --- for people -----------------------------------------------------------------------------------


def parts(found: Recalibrated, chosen: Plan, width: int) -> Iterator[RenderableType]:
    """Where the profile comes from, coefficients, ranks, and what the earlier choice would take."""
    for name, told in found.profiles.items():
        yield Padding(Text(_origin(name, told)), (0, 0, 0, 2))
    yield _coefficients(found, width)
    if len(found.moved) > SHOWN:
        yield Text(f"  and {len(found.moved) - SHOWN} more that moved less (--json has them)", style="dim")  # fmt: skip
    yield ""
    yield _rank_table(found, width)
    yield Padding(Text(verdict(found, chosen), style="bold"), (0, 0, 0, 2))
    for warning in found.warnings:
        yield Padding(Text(f"note: {warning}", style="yellow"), (0, 0, 0, 2))


def _origin(name: str, told: Provenance) -> str:
    runs = f"{len(told.runs)} run{'s' * (len(told.runs) != 1)} ({', '.join(told.runs[:6])}{', ...' * (len(told.runs) > 6)})"
    error = ""
    if told.step_error is not None:
        error = f"; median step error on unseen runs {percent(told.step_error[0])} -> {percent(told.step_error[1])}"
    return f"{name}: {told.base}, calibrated on {runs} of {told.device}, {told.date}{error}"


def _coefficients(found: Recalibrated, width: int) -> Table:
    table = new_table(width)
    table.add_column("coefficient", no_wrap=True, ratio=1, overflow="ellipsis")
    for name in ("before", "P10-P90", "now", "P10-P90"):
        table.add_column(name, justify="right", no_wrap=True)
    for m in found.moved[:SHOWN]:
        table.add_row(m.name, _value(m.before), between(m.before), _value(m.now), between(m.now))
    return table


def _value(c: Coefficient) -> str:
    return units.format(c.value, c.dimension)


def _rank_table(found: Recalibrated, width: int) -> Table:
    table = new_table(width)
    table.add_column("# was", justify="right", no_wrap=True)
    table.add_column("# now", justify="right", no_wrap=True)
    table.add_column("best plan of kind", no_wrap=True, ratio=1, overflow="ellipsis")
    for name in ("step before", "P10-P90", "step now", "P10-P90"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in found.ranks:
        places = (str(place or "-") for place in (rank.place_before, rank.place))
        table.add_row(*places, rank.kind, *_step(rank.before), *_step(rank.now))
    return table


def _step(plan: Plan | None) -> tuple[str, str]:
    if plan is None:
        return "-", "-"
    p = plan.prediction
    return units.format(p.step_s, "s"), f"{units.significant(p.low_s)}-{units.significant(p.high_s)}"  # fmt: skip


def verdict(found: Recalibrated, chosen: Plan) -> str:
    """What calibration does to the choice, in a sentence."""
    before = found.chosen_before
    if before is None:
        return "before calibration nothing fitted"
    if found.its_step_now is None:
        return f"the choice is the same: {plan_text(chosen)}"
    seconds, best = found.its_step_now.prediction.step_s, chosen.prediction.step_s
    return (
        f"another plan is chosen: {plan_text(chosen)}; the one chosen before, {plan_text(before)}, "
        f"would take {units.format(seconds, 's')} ({100 * (seconds / best - 1):+.1f} %)"
    )


def plan_text(plan: Plan) -> str:
    """Kind and layouts of a plan: `hybrid (actor TP1 DP8 ZeRO-2, rollout TP4 x2)`."""
    rollout = plan.placement.rollout
    beside = f", rollout {rollout.layout.label}" if rollout else ""
    return f"{kind(plan)} (actor {plan.placement.actor.layout.label}{beside})"


# --- for machines ---------------------------------------------------------------------------------


def as_data(found: Recalibrated, chosen: Plan) -> dict[str, Any]:
    """The same content; docs/calibration.md."""
    return {
        "profiles": {
            name: {"base": t.base, "runs": list(t.runs), "date": t.date, "device": t.device, "step_error": t.step_error, "phase_error": t.phase_error}
            for name, t in found.profiles.items()
        },
        "moved": [
            {"profile": m.profile, "name": m.name, "dimension": m.now.dimension, "before": _numbers(m.before), "now": _numbers(m.now)}
            for m in found.moved
        ],
        "ranks": [
            {"kind": r.kind, "place_before": r.place_before, "place": r.place, "before": _seconds(r.before), "now": _seconds(r.now)}
            for r in found.ranks
        ],
        "verdict": verdict(found, chosen),
        "same_choice": found.chosen_before is not None and found.its_step_now is None,
        "chosen_before": _seconds(found.chosen_before),
        "chosen_before_now": _seconds(found.its_step_now),
        "warnings": list(found.warnings),
    }  # fmt: skip


def _numbers(c: Coefficient) -> dict[str, float]:
    return {"value": c.value, "low": c.low, "high": c.high}


def _seconds(plan: Plan | None) -> dict[str, float] | None:
    if plan is None:
        return None
    p = plan.prediction
    return {"step_s": p.step_s, "low_s": p.low_s, "high_s": p.high_s}
