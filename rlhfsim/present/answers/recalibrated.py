"""What calibration changed: the same question answered on the profile before, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rlhfsim.plan import Plan
from rlhfsim.present.answers.tree import Column, Listing, Page, hidden, table_of
from rlhfsim.present.answers.tree import answer as content
from rlhfsim.present.tables import COEFFICIENT, COEFFICIENT_ENDS, COUNT, CUT, SECONDS, STEP, STEP_ENDS, fields
from rlhfsim.present.words import error_text, plan_text, plural, signed
from rlhfsim.specs.hardware.calibrated import Provenance
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.what_if.recalibrated import Recalibrated

SHOWN = 8
"""Coefficients on the screen, those that moved most; --json has all."""


def page(answer: Recalibrated, chosen: Plan) -> Page:
    """Where the profile comes from, what the earlier choice would take, coefficients and ranks."""
    moved = table_of(
        "Coefficients",
        answer.moved,
        *hidden("profile", "now.dimension"),
        Column("coefficient", "name", fit=CUT),
        *_figures("before", lambda m: m.before),
        *_figures("now", lambda m: m.now),
        name="moved",
        most=SHOWN,
    )
    ranks = table_of(
        "Ranks",
        answer.ranks,
        Column("# was", "place_before", COUNT),
        Column("# now", "place", COUNT),
        Column("best plan of kind", "kind", fit=CUT),
        *_steps("before", lambda r: r.before),
        *_steps("now", lambda r: r.now),
        name="ranks",
    )
    told = verdict(answer, chosen)
    return content(
        "",
        moved,
        ranks,
        Listing(answer.warnings, mark="warn"),
        subtitle="\n".join(_origin(name, origin) for name, origin in answer.profiles.items()),
        verdict=told,
        data={
            "profiles": {
                name: fields(t, "base", "runs", "date", "device", "step_error", "phase_error")
                for name, t in answer.profiles.items()
            },
            "verdict": told,
            "same_choice": answer.chosen_before is not None and answer.its_step_now is None,
            "chosen_before": _seconds(answer.chosen_before),
            "chosen_before_now": _seconds(answer.its_step_now),
            "warnings": answer.warnings,
        },
    )


def _figures(key: str, of: Callable[[Any], Coefficient]) -> Iterator[Column]:
    yield Column(key, of, COEFFICIENT)
    yield Column("P10-P90", of, COEFFICIENT_ENDS)
    yield Column(None, lambda item: fields(of(item), "value", "low", "high"), key=key)


def _steps(key: str, of: Callable[[Any], Plan | None]) -> Iterator[Column]:
    yield Column(f"step {key}", of, STEP)
    yield Column("P10-P90", of, STEP_ENDS)
    yield Column(None, lambda item: _seconds(of(item)), key=key)


def _origin(name: str, origin: Provenance) -> str:
    names = ", ".join(origin.runs[:6]) + ", ..." * (len(origin.runs) > 6)
    runs = f"{plural(len(origin.runs), 'run')} ({names})"
    error = ""
    if origin.step_error is not None:
        error = (
            f"; median step error on unseen runs {error_text(origin.step_error[0])} -> "
            f"{error_text(origin.step_error[1])}"
        )
    return f"{name}: {origin.base}, calibrated on {runs} of {origin.device}, {origin.date}{error}"


def verdict(answer: Recalibrated, chosen: Plan) -> str:
    """What calibration does to the choice, in a sentence."""
    before = answer.chosen_before
    if before is None:
        return "before calibration nothing fitted"
    if answer.its_step_now is None:
        return f"the choice is the same: {plan_text(chosen)}"
    seconds, best = answer.its_step_now.prediction.step_s, chosen.prediction.step_s
    return (
        f"another plan is chosen: {plan_text(chosen)}; the one chosen before, {plan_text(before)}, "
        f"would take {SECONDS.shown(seconds)} ({signed(seconds / best - 1, 1)})"
    )


def _seconds(plan: Plan | None) -> dict[str, float] | None:
    return None if plan is None else fields(plan.prediction, "step_s", "low_s", "high_s")
