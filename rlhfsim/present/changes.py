"""Words of differences: `~` changed, `+` new, `-` gone, `!` another architecture."""

from __future__ import annotations

from rlhfsim import units
from rlhfsim.what_if.differences import ChangedField, Leaf, Value
from rlhfsim.what_if.scenarios.points import worded

MAIN = ("architecture", "role_placement")
"""Fields whose change is another design, not another number."""


def mark(before: object, after: object) -> str:
    """The sign of a change."""
    return "+" if before is None else "-" if after is None else "~"


def mark_of(change: ChangedField) -> str:
    """The sign of a changed field."""
    return "!" if change.path in MAIN else mark(change.before, change.after)


def leaf_text(leaf: Leaf, digits: int = 4) -> str:
    """A field's value."""
    if leaf is None or isinstance(leaf, bool):
        return {None: "-", True: "yes", False: "no"}[leaf]
    return units.significant(leaf, digits) if isinstance(leaf, float | int) else leaf


def asked_leaf(path: str, leaf: Leaf) -> str:
    """A value that a scenario sets; a list or a mapping without its brackets."""
    if isinstance(leaf, str) and leaf.startswith(("{", "[")):
        return leaf.strip("{}[]").replace('"', "")
    return worded(path, leaf)


def value_text(value: Value | None) -> str:
    """A figure of the outcome."""
    if value is None:
        return "-"
    if value.likelihood:
        return units.likely(value.value)
    return units.significant(value.value, 4) if value.unit == "1" else units.format(value.value, value.unit)
