"""The outcome of one measured row: predicted, or skipped for a stated reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, Literal, TypeVar

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Cost
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.step.measured import Conditions
from rlhfsim.validation.rows import Row

ZERO = "a measured 0 is no measurement"
"""Why a row is skipped whose result is 0: its error is not defined, and unknown cells stay blank."""

T = TypeVar("T")
Change = Callable[[Profile, str | None], Profile]
"""A hardware profile, and the framework that runs on it, to the same profile with other coefficients."""


def unchanged(profile: Profile, framework: str | None) -> Profile:
    """The profile itself."""
    del framework
    return profile


def publisher(source: str) -> str:
    """Repository, paper or thread of a publication: all pages of a repository are of one publisher."""
    return source.split("@")[0]


class Skip(RlhfsimError):
    """Why a row has no prediction: it leaves open what decides it, or holds what is not modelled."""

    def __init__(self, reason: str) -> None:
        super().__init__("row-skipped", reason)


def needed(value: T | None, reason: str) -> T:
    """The value of a cell that decides the prediction.

    Raises:
        Skip: it is blank, for this reason.
    """
    if value is None:
        raise Skip(reason)
    return value


@frozen
class Outcome:
    """One row of a measurement CSV against its prediction."""

    kind: str
    """`training`, `memory.weights`, `memory.kv_tokens`, `memory.training_peak`, `decode`, `rlhf.step`,
    `rlhf.generation`, ..., `weight_sync`, `oom`."""
    file: str
    """CSV file name."""
    line: int
    """1-based line in the CSV (the header is line 1)."""
    source: str
    """Publication, as scored: rows of one source are listed together."""
    label: str
    """Model, GPUs and layout for people."""
    unit: str = "s"
    measured: float | None = None
    predicted: float | None = None
    low: float | None = None
    """P10 of the prediction."""
    high: float | None = None
    """P90 of the prediction."""
    median: float | None = None
    """P50 of the prediction; None: the prediction itself."""
    blind: float | None = None
    """The prediction with no row of the same publisher in any fit; None: no fit that it rests on read one."""
    blind_low: float | None = None
    """P10 of that prediction."""
    blind_high: float | None = None
    """P90 of that prediction."""
    blind_median: float | None = None
    """P50 of that prediction; None: the prediction itself."""
    skipped: str | None = None
    """Why there is no prediction; None when there is one."""
    assumptions: tuple[str, ...] = ()
    """Blank columns that were filled: `micro_batch=1 (framework default)`."""
    part: Literal["report", "fit"] = "report"
    """Rows used to fit a constant are shown but never scored."""
    job: str = ""
    """Model, workload and framework: rows with the same text are plans for one job, and their order is
    scored; empty where no other row can be compared."""
    release: str = ""
    """Release of that framework."""
    conditions: Conditions | None = None
    """What was run on what, where the kind has a model discrepancy."""
    detail: dict[str, float | str] = field(default_factory=dict)
    """Anything worth a column in `--out`: which peak, per-part seconds."""

    @classmethod
    def of(cls, row: Row, kind: str, label: str, cost: Cost | None = None, **known: Any) -> Outcome:
        """The outcome of a row, with a priced cost as its prediction."""
        if known.get("measured") == 0 and kind != "oom":
            known["skipped"], cost = ZERO, None
        if cost is not None:
            low, high = cost.interval
            known |= {"predicted": cost.seconds, "low": low, "high": high}
        known.setdefault("source", row.source)
        return cls(kind=kind, file=row.file, line=row.line, label=label, **known)

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; None without one of them or where 0 was measured."""
        if self.predicted is None or not self.measured or self.skipped:
            return None
        return self.predicted / self.measured - 1
