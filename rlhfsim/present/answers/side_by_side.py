"""What `rlhfsim launch` runs next to a production framework whose runs were compared, on the first screen."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from rlhfsim.plan import Plan
from rlhfsim.present.answers.choices import plan_dict
from rlhfsim.present.answers.kinds import NAME, NUMBER, PROBABILITY, STEP, STEP_ENDS
from rlhfsim.present.answers.tree import Column, TypedTable, table_of
from rlhfsim.present.words import percent
from rlhfsim.specs.frameworks.runs import OWN
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.step.measured import compared


def table(chosen: Plan, other: Plan, chances: tuple[float, float]) -> TypedTable:
    """The chosen plan first, then that of the other side; `chances`: that each fits and meets all targets."""
    return table_of(
        "Next to a framework whose runs were compared",
        zip("* ", (chosen, other), chances, strict=True),
        Column("", lambda row: row[0].strip(), NAME),
        Column("run by", lambda row: row[1].framework, NAME),
        Column("training", lambda row: BACKENDS[row[1].placement.backend].title, NAME),
        Column("step", 1, STEP),
        Column("P10-P90", 1, STEP_ENDS),
        Column("USD", lambda row: row[1].prediction.usd_per_step, NUMBER.where("unknown")),
        Column("likely", 2, PROBABILITY),
        Column("its figures", lambda row: evidence(row[1].framework or ""), NAME),
        style=lambda row: "bold green" if row[1] is chosen else "",
        look="bare",
    )


def evidence(framework: str) -> str:
    """`56 runs compared, off by 10 %`: published runs of a framework, and our median error on them."""
    errors = compared(framework)
    if errors:
        return f"{len(errors)} runs compared, off by {percent(median(map(abs, errors)))}"
    return "run on CPUs, never compared" if framework == OWN else "never compared with a run"


def records(chosen: Plan, other: Plan, chances: tuple[float, float]) -> Iterator[dict[str, Any]]:
    """The same for machines."""
    for plan, chance in zip((chosen, other), chances, strict=True):
        errors = compared(plan.framework or "")
        yield {
            "framework": plan.framework,
            "leads": plan is chosen,
            "fits_and_meets": chance,
            "runs_compared": len(errors),
            "median_error": median(map(abs, errors)) if errors else None,
            **plan_dict(plan),
        }
