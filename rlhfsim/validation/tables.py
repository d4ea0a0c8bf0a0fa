"""The kinds of rows that are scored: which table each reads and which module predicts it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from rlhfsim.errors import RlhfsimError
from rlhfsim.validation.outcome import Change, Outcome, unchanged
from rlhfsim.validation.rows import Row

PER_ROW = (RlhfsimError, AssertionError, ArithmeticError, LookupError, ValueError)
"""What one row may raise without stopping the others."""
Predict = Callable[[list[Row]], list[Outcome]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKind:
    """One module of predictions; it may score several kinds (`memory.weights`, ...)."""

    name: str
    """First word of its kinds, and its module, with `outcomes(rows) -> list[Outcome]`."""
    table: str
    """Table that it reads."""
    title: str
    """What is predicted, for people."""


SECTIONS: dict[str, RowKind] = {
    section.name: section
    for section in (
        RowKind(name="training", table="training", title="training step time"),
        RowKind(name="memory", table="memory", title="memory: weights, KV cache, training peak"),
        RowKind(name="inference", table="inference", title="serving throughput"),
        RowKind(name="rlhf", table="rlhf", title="RLHF step and phase time"),
        RowKind(name="weight_sync", table="weight_sync", title="weight sync time"),
        RowKind(name="oom", table="oom_cases", title="out-of-memory verdict"),
    )
}
ORDER = ("training", "memory", "decode", *list(SECTIONS)[2:])
"""Sections in the order in which figures are shown; rows of `decode` are not in a table."""


def run(section: RowKind, rows: Sequence[Row], change: Change = unchanged) -> list[Outcome]:
    """The outcomes of a section, predicted with other coefficients where `change` says so.

    A row whose cells cannot be read (a range where a number is needed) is skipped with that
    reason; it does not stop the others. Neither does a bug of ours: the row says `internal error`,
    and a test keeps the published rows free of it.
    """
    module = importlib.import_module(f"rlhfsim.validation.kinds.{section.name}")
    predict: Predict = module.outcomes if change is unchanged else partial(module.outcomes, change=change)
    try:
        return predict(list(rows))
    except PER_ROW:
        return [outcome for row in rows for outcome in _alone(predict, row, section)]


def _alone(predict: Predict, row: Row, section: RowKind) -> Iterable[Outcome]:
    try:
        return predict([row])
    except PER_ROW as error:
        if isinstance(error, RlhfsimError):
            reason = error.message
        else:
            reason = f"internal error: {type(error).__name__} {error}"[:100].strip()
        label = row.values.get("model") or row.values.get("actor_model") or ""
        return [
            Outcome(
                kind=section.name,
                file=row.file,
                line=row.line,
                source=row.source,
                label=label,
                skipped=reason,
            )
        ]
