"""What `rlhfsim launch` runs next to a production framework whose runs were compared, on the first screen."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from rlhfsim.frameworks.runs import OWN
from rlhfsim.plan import Plan
from rlhfsim.present.tables import TableData, grid
from rlhfsim.present.terminal.choices import plan_dict
from rlhfsim.present.words import likely, percent
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.step.measured import compared
from rlhfsim.units import format, significant

TITLES = ("", "run by", "training", ">step", ">P10-P90", ">USD", ">likely", "its figures")


def table(chosen: Plan, other: Plan, chances: tuple[float, float]) -> TableData:
    """The chosen plan first, then that of the other side; `chances`: that each fits and meets all targets."""
    rows = [_row(mark, plan, p) for mark, plan, p in zip("* ", (chosen, other), chances, strict=True)]
    return grid(TITLES, rows, styles=["bold green", ""])


def _row(mark: str, plan: Plan, chance: float) -> tuple[str, ...]:
    p, name = plan.prediction, plan.framework or ""
    return (
        mark.strip(),
        name,
        BACKENDS[plan.placement.backend].title,
        format(p.step_s, "s"),
        f"{significant(p.low_s)}-{significant(p.high_s)}",
        "unknown" if p.usd_per_step is None else significant(p.usd_per_step),
        likely(chance),
        evidence(name),
    )


def evidence(framework: str) -> str:
    """`56 runs compared, off by 10 %`: published runs of a framework, and our median error on them."""
    errors = compared(framework)
    if errors:
        return f"{len(errors)} runs compared, off by {percent(median(map(abs, errors)))}"
    return "run on CPUs, never compared" if framework == OWN else "never compared with a run"


def side_by_side_dict(chosen: Plan, other: Plan, chances: tuple[float, float]) -> list[dict[str, Any]]:
    """The same content."""
    return list(_dicts(chosen, other, chances))


def _dicts(chosen: Plan, other: Plan, chances: tuple[float, float]) -> Iterator[dict[str, Any]]:
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
