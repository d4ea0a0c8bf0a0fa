"""What the predictions must reach, fixed before they were scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A limit on one figure of one kind."""

    kind: str
    figure: str
    """Key of the kind's figures on the scoreboard."""
    limit: float
    at_most: bool = True
    """Whether the figure must stay below the limit, else above."""
    title: str

    def value(self, figures: Mapping[str, Any]) -> float | None:
        """The figure reached, or None when no row says it."""
        figure = figures.get(self.figure)
        return None if figure is None else float(figure)

    def met(self, figures: Mapping[str, Any]) -> bool | None:
        """Whether it is reached; None when no row says it."""
        value = self.value(figures)
        if value is None:
            return None
        return value <= self.limit if self.at_most else value >= self.limit

    @property
    def counts(self) -> bool:
        """Whether the figure is a number of rows, not a share."""
        return self.figure == "predicted"


def _pair(kind: str, statistic: str, limit: float) -> tuple[Target, Target]:
    """The same limit over rows and over publications, so that no large source decides alone."""
    return (
        Target(kind=kind, figure=f"{statistic}_abs_error", limit=limit, title=f"{statistic} error over rows"),
        Target(
            kind=kind,
            figure=f"median_of_source_{statistic}s",
            limit=limit,
            title=f"median of the sources' {statistic}s",
        ),
    )


TARGETS: tuple[Target, ...] = (
    Target(kind="training", figure="predicted", limit=450, at_most=False, title="rows predicted"),
    *_pair("training", "median", 0.12),
    Target(kind="training", figure="p90_abs_error", limit=0.35, title="P90 error over rows"),
    *_pair("memory.weights", "median", 0.02),
    *_pair("memory.kv_tokens", "median", 0.08),
    *_pair("memory.training_peak", "median", 0.12),
    *_pair("decode", "median", 0.12),
    *_pair("rlhf.step", "mean", 0.20),
    Target(
        kind="rlhf.step",
        figure="right_order",
        limit=0.85,
        at_most=False,
        title="pairs of plans in the right order",
    ),
    Target(
        kind="rlhf.calibrated", figure="median_abs_error", limit=0.15, title="median error over ordered pairs"
    ),
    Target(
        kind="weight_sync",
        figure="within_factor_2",
        limit=0.70,
        at_most=False,
        title="rows within a factor 2",
    ),
    Target(
        kind="weight_sync",
        figure="median_of_source_within_factor_2",
        limit=0.70,
        at_most=False,
        title="median of the sources' shares",
    ),
    Target(kind="oom", figure="recall", limit=0.80, at_most=False, title="recall"),
    Target(kind="oom", figure="false_alarms", limit=0.15, title="false alarms"),
)


def results(kinds: Mapping[str, Mapping[str, Any]], *, counts: bool = True) -> list[dict[str, Any]]:
    """Every target of the scored kinds with the figure reached and `PASS`, `MISSED` or `NO ROWS`.

    `counts` is False for a user's own rows, where a least number of rows means nothing.
    """
    table = []
    for target in TARGETS:
        if target.kind not in kinds or (target.counts and not counts):
            continue
        reached = target.met(kinds[target.kind])
        table.append(
            {
                "kind": target.kind,
                "figure": target.figure,
                "title": target.title,
                "limit": target.limit,
                "at_most": target.at_most,
                "value": target.value(kinds[target.kind]),
                "verdict": "NO ROWS" if reached is None else "PASS" if reached else "MISSED",
            }
        )
    return table
