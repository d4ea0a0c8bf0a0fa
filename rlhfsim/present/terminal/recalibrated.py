"""What calibration changed: the same question answered on the profile before, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhfsim import units
from rlhfsim.plan import Plan
from rlhfsim.present.answers.kinds import COEFFICIENT, COEFFICIENT_ENDS, COUNT, STEP, STEP_ENDS
from rlhfsim.present.answers.tree import Column, TypedTable, table_of
from rlhfsim.present.tables import CUT, fields
from rlhfsim.present.terminal.console import Part, indented, styled
from rlhfsim.present.terminal.page import drawn_table
from rlhfsim.present.words import error_text, plan_text, plural
from rlhfsim.specs.hardware.calibrated import Provenance
from rlhfsim.what_if.recalibrated import Recalibrated

SHOWN = 8
"""Coefficients on the screen, those that moved most; --json has all."""


# --- for people -----------------------------------------------------------------------------------


def parts(answer: Recalibrated, chosen: Plan, width: int) -> Iterator[Part]:
    """Where the profile comes from, coefficients, ranks, and what the earlier choice would take."""
    for name, origin in answer.profiles.items():
        yield indented(styled(_origin(name, origin)))
    yield from (drawn_table(_coefficients(answer), width), "", drawn_table(_ranks(answer), width))
    yield indented(styled(verdict(answer, chosen), style="bold"))
    for warning in answer.warnings:
        yield indented(styled(f"note: {warning}", style="yellow"))


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


def _coefficients(answer: Recalibrated) -> TypedTable:
    return table_of(
        "Coefficients",
        answer.moved,
        Column("coefficient", "name", fit=CUT),
        Column("before", kind=COEFFICIENT),
        Column("P10-P90", "before", COEFFICIENT_ENDS),
        Column("now", kind=COEFFICIENT),
        Column("P10-P90", "now", COEFFICIENT_ENDS),
        most=SHOWN,
    )


def _ranks(answer: Recalibrated) -> TypedTable:
    return table_of(
        "Ranks",
        answer.ranks,
        Column("# was", "place_before", COUNT),
        Column("# now", "place", COUNT),
        Column("best plan of kind", "kind", fit=CUT),
        Column("step before", "before", STEP),
        Column("P10-P90", "before", STEP_ENDS),
        Column("step now", "now", STEP),
        Column("P10-P90", "now", STEP_ENDS),
    )


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
        f"would take {units.format(seconds, 's')} ({100 * (seconds / best - 1):+.1f} %)"
    )


# --- for machines ---------------------------------------------------------------------------------


def as_data(answer: Recalibrated, chosen: Plan) -> dict[str, Any]:
    """The same content; docs/calibration.md."""
    return {
        "profiles": {
            name: {
                "base": t.base,
                "runs": list(t.runs),
                **fields(t, "date", "device", "step_error", "phase_error"),
            }
            for name, t in answer.profiles.items()
        },
        "moved": [
            {
                **fields(m, "profile", "name"),
                "dimension": m.now.dimension,
                "before": fields(m.before, "value", "low", "high"),
                "now": fields(m.now, "value", "low", "high"),
            }
            for m in answer.moved
        ],
        "ranks": [
            {
                **fields(r, "kind", "place_before", "place"),
                "before": _seconds(r.before),
                "now": _seconds(r.now),
            }
            for r in answer.ranks
        ],
        "verdict": verdict(answer, chosen),
        "same_choice": answer.chosen_before is not None and answer.its_step_now is None,
        "chosen_before": _seconds(answer.chosen_before),
        "chosen_before_now": _seconds(answer.its_step_now),
        "warnings": list(answer.warnings),
    }


def _seconds(plan: Plan | None) -> dict[str, float] | None:
    return None if plan is None else fields(plan.prediction, "step_s", "low_s", "high_s")
