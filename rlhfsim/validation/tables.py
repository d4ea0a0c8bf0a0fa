"""The kinds of rows that are scored: which table each reads and which module predicts it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.validation.outcome import Outcome
from rlhfsim.validation.rows import Row, shipped

PER_ROW = (RlhfsimError, AssertionError, ArithmeticError, LookupError, ValueError)
"""What one row may raise without stopping the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKind:
    """One module of predictions; it may score several kinds (`memory.weights`, ...)."""

    name: str
    """First word of its kinds."""
    table: str | None
    """Table that it reads; None when the rows come from an installed package."""
    outside: tuple[str, ...] = ()
    """Its module where that is not in the wheel, and the package that it reads."""
    title: str
    """What is predicted, for people."""

    @property
    def module(self) -> str:
        """With `outcomes(rows) -> list[Outcome]`."""
        return self.outside[0] if self.outside else f"rlhfsim.validation.kinds.{self.name}"

    @property
    def runnable(self) -> bool:
        """Whether its module and its package are there."""
        try:
            return all(find_spec(module) is not None for module in self.outside)
        except ModuleNotFoundError:
            return False


SECTIONS: dict[str, RowKind] = {
    section.name: section
    for section in (
        RowKind(name="training", table="training", title="training step time"),
        RowKind(name="memory", table="memory", title="memory: weights, KV cache, training peak"),
        RowKind(
            name="decode",
            table=None,
            outside=("lab.decode.kind", "aiconfigurator_core"),
            title="decode step time",
        ),
        RowKind(name="inference", table="inference", title="serving throughput"),
        RowKind(name="rlhf", table="rlhf", title="RLHF step and phase time"),
        RowKind(name="weight_sync", table="weight_sync", title="weight sync time"),
        RowKind(name="oom", table="oom_cases", title="out-of-memory verdict"),
    )
}
"""In the order of the scoreboard."""


def select(kinds: Sequence[str]) -> dict[str, RowKind]:
    """The sections that score any of `kinds` (`memory` or `memory.weights`); all when empty.

    Raises:
        RlhfsimError: a kind that no section scores.
    """
    for kind in kinds:
        if kind.split(".")[0] not in SECTIONS:
            raise unknown_name("kind", kind, SECTIONS)
    wanted = {kind.split(".")[0] for kind in kinds}
    return {name: section for name, section in SECTIONS.items() if not kinds or name in wanted}


def wanted(outcome: Outcome, kinds: Sequence[str]) -> bool:
    """Whether an outcome is of one of the kinds asked for."""
    return not kinds or any(outcome.kind == kind or outcome.kind.startswith(f"{kind}.") for kind in kinds)


def run(section: RowKind, rows: Sequence[Row] | None = None) -> list[Outcome]:
    """The outcomes of a section, on the shipped rows by default.

    The split of rows that fitted a constant is one of the shipped rows; given rows are all scored.
    A row whose cells cannot be read (a range where a number is needed) is skipped with that
    reason; it does not stop the others. Neither does a bug of ours: the row says `internal error`,
    and a test keeps the shipped rows free of it.
    """
    if rows is None:
        return _predicted(section, shipped(section.table) if section.table else [])
    return [replace(outcome, part="report") for outcome in _predicted(section, rows)]


def _predicted(section: RowKind, rows: Sequence[Row]) -> list[Outcome]:
    module = importlib.import_module(section.module)
    predict: Callable[[list[Row]], list[Outcome]] = module.outcomes
    try:
        return predict(list(rows))
    except PER_ROW:
        if section.table is None:
            raise
        return [outcome for row in rows for outcome in _alone(predict, row, section)]


def _alone(predict: Callable[[list[Row]], list[Outcome]], row: Row, section: RowKind) -> Iterable[Outcome]:
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
