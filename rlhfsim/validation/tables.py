"""The kinds of rows that are scored: which table each reads and which module predicts it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from rlhfsim.errors import RlhfsimError
from rlhfsim.validation.outcome import Change, Outcome, unchanged
from rlhfsim.validation.rows import Row

PER_ROW = (RlhfsimError, AssertionError, ArithmeticError, LookupError, ValueError)
"""What one row may raise without stopping the others."""
Predict = Callable[[list[Row]], list[Outcome]]


SECTIONS = {
    "training": "training",
    "memory": "memory",
    "inference": "inference",
    "rlhf": "rlhf",
    "weight_sync": "weight_sync",
    "oom": "oom_cases",
}
"""First word of the kinds that a module predicts, with `outcomes(rows) -> list[Outcome]`, and the table that
it reads: optimizer steps; weights, KV cache and peaks; serving throughput; steps and phases of RLHF; weight
syncs; verdicts."""
ORDER = ("training", "memory", "decode", *list(SECTIONS)[2:])
"""Sections in the order in which figures are shown; rows of `decode` are not in a table."""


def run(section: str, rows: Sequence[Row], change: Change = unchanged) -> list[Outcome]:
    """The outcomes of a section, predicted with other coefficients where `change` says so.

    A row whose cells cannot be read (a range where a number is needed) is skipped with that
    reason; it does not stop the others. Neither does a bug of ours: the row says `internal error`,
    and a test keeps the published rows free of it.
    """
    module = importlib.import_module(f"rlhfsim.validation.kinds.{section}")
    predict: Predict = module.outcomes if change is unchanged else partial(module.outcomes, change=change)
    try:
        return predict(list(rows))
    except PER_ROW:
        return [outcome for row in rows for outcome in _alone(predict, row, section)]


def _alone(predict: Predict, row: Row, section: str) -> Iterable[Outcome]:
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
                kind=section, file=row.file, line=row.line, source=row.source, label=label, skipped=reason
            )
        ]
