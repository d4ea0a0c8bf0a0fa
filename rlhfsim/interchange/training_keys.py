"""What decides training and changes no price: written or demanded by every export, and listed in its page."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

from rlhfsim.frozen import frozen
from rlhfsim.interchange.dapo import TITLE as DAPO_TITLE
from rlhfsim.interchange.dapo import dapo_settings, dapo_unsaid
from rlhfsim.interchange.export import Section, Setting, Unsaid, Value, Written
from rlhfsim.interchange.fields import PlanFields
from rlhfsim.interchange.table import bare, holds
from rlhfsim.plan import Plan
from rlhfsim.specs.frameworks.files import read_shipped

TITLE = "what decides training: yours to choose"
FAR = 10.0
"""Factor between a default and what the framework's own examples use from which it is named."""


@frozen
class TrainingKey:
    """One thing that decides training, and the key that says it."""

    decides: str
    key: str = ""
    """Empty: the framework has none, or it lies in the script of the user."""
    value: Value = None
    """What is written; `${NAME}`: demanded."""
    default: float | str
    """The framework's own."""
    examples: float | str | None = None
    """What its own examples use; None: the default."""
    when: str = ""
    """See `rlhfsim.interchange.table.holds`."""

    @property
    def demanded(self) -> bool:
        """Whether the launch ends at once without it."""
        return str(self.value).startswith("${")

    @property
    def far(self) -> bool:
        """Whether the default is a factor of `FAR` or more from the examples."""
        ends = (self.default, self.examples)
        low, high = sorted(float(end) if isinstance(end, int | float) else 0.0 for end in ends)
        return low > 0 and high >= FAR * low

    @property
    def own(self) -> str:
        """The framework's default in words."""
        used = "" if self.examples is None else f"; {shown(self.examples)} in its examples"
        return f"{shown(self.default)}{used}{f', {FAR:g} times or more apart' if self.far else ''}"


@cache
def training_keys(framework: str) -> tuple[TrainingKey, ...]:
    """Those of one framework, in the order in which they are written."""
    file = resources.files("rlhfsim.interchange") / "training_keys.yaml"
    rows: list[dict[str, Any]] = read_shipped(file)[framework]
    return tuple(
        TrainingKey(**row | {k: _number(row[k]) for k in ("default", "examples") if k in row}) for row in rows
    )


def written_for(plan: Plan, framework: str, sections: Iterable[Section], unsaid: Iterable[Unsaid]) -> Written:
    """What is written of a plan, with what decides training: keys that are there already stay as they are."""
    dapo = Section(title=DAPO_TITLE, settings=tuple(dapo_settings(plan, framework)))
    before, given = (*sections, *([dapo] if dapo.settings else [])), PlanFields(plan, {})
    known = {bare(setting.key) for section in before for setting in section.settings}
    settings = tuple(
        Setting(row.key, row.value, f"{row.decides}; {framework}'s own default is {row.own}")
        for row in training_keys(framework)
        if row.key and bare(row.key) not in known and holds(row.when, given)
    )
    return Written(
        sections=(*before, Section(title=TITLE, settings=settings)),
        unsaid=(*unsaid, *dapo_unsaid(plan, framework)),
    )


def _number(value: Any) -> float | str:
    """YAML reads `1e-6` as a word; a switch is one."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def shown(value: Value) -> str:
    """A value as people write it."""
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
