"""What calibration changed: the same question answered on the profile before, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rlhfsim import units
from rlhfsim.plan import Plan
from rlhfsim.present.terminal.calibrate import between, percent
from rlhfsim.present.terminal.words import new_table
from rlhfsim.search.explain import kind
from rlhfsim.specs.hardware.calibrated import Provenance
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.what_if.recalibrated import Recalibrated

SHOWN = 8
"""Coefficients on the screen, those that moved most; --json has all."""


# --- for people -----------------------------------------------------------------------------------


def parts(found: Recalibrated, chosen: Plan, width: int) -> Iterator[RenderableType]:
    """Where the profile comes from, coefficients, ranks, and what the earlier choice would take."""
    for name, told in found.profiles.items():
        yield Padding(Text(_origin(name, told)), (0, 0, 0, 2))
    yield _coefficients(found, width)
    if len(found.moved) > SHOWN:
        yield Text(f"  and {len(found.moved) - SHOWN} more that moved less (--json has them)", style="dim")
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
    return units.format(p.step_s, "s"), f"{units.significant(p.low_s)}-{units.significant(p.high_s)}"


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
            name: {
                "base": t.base,
                "runs": list(t.runs),
                "date": t.date,
                "device": t.device,
                "step_error": t.step_error,
                "phase_error": t.phase_error,
            }
            for name, t in found.profiles.items()
        },
        "moved": [
            {
                "profile": m.profile,
                "name": m.name,
                "dimension": m.now.dimension,
                "before": _numbers(m.before),
                "now": _numbers(m.now),
            }
            for m in found.moved
        ],
        "ranks": [
            {
                "kind": r.kind,
                "place_before": r.place_before,
                "place": r.place,
                "before": _seconds(r.before),
                "now": _seconds(r.now),
            }
            for r in found.ranks
        ],
        "verdict": verdict(found, chosen),
        "same_choice": found.chosen_before is not None and found.its_step_now is None,
        "chosen_before": _seconds(found.chosen_before),
        "chosen_before_now": _seconds(found.its_step_now),
        "warnings": list(found.warnings),
    }


def _numbers(c: Coefficient) -> dict[str, float]:
    return {"value": c.value, "low": c.low, "high": c.high}


def _seconds(plan: Plan | None) -> dict[str, float] | None:
    if plan is None:
        return None
    p = plan.prediction
    return {"step_s": p.step_s, "low_s": p.low_s, "high_s": p.high_s}
