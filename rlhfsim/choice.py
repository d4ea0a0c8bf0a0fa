"""Why a plan was chosen: what was asked, what was searched, what else there was; a part of `plan.json`."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from rlhfsim.frozen import frozen
from rlhfsim.specs.hardware.hardware import Count
from rlhfsim.specs.loading import checked
from rlhfsim.specs.quantities import AboveZero, Amount, Finite, Positive, Share
from rlhfsim.units import Dimension

Plans = Annotated[int, Field(ge=0)]
"""A number of complete plans, which multiplies over the roles: nothing bounds it."""


@checked
@frozen
class AskedLimit:
    """A bound on one field of a role that was asked for: `actor.tp<=4`."""

    role: Annotated[str, Field(validation_alias=AliasChoices("role", "seat"))]
    field: str
    relation: Literal["=", "!=", "<=", ">="]
    value: bool | int | str


@checked
@frozen
class AskedBound:
    """What may compete, as it was asked: with workload and hardware of the plan the whole question."""

    backend: str
    framework: str | None = None
    objective: str
    allow: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    fix: dict[str, dict[str, int | str]] = field(default_factory=dict)
    limits: tuple[AskedLimit, ...] = ()
    architecture: str | None = None
    weight_path: str | None = None
    max_gpus_per_role: Count | None = None
    time_limit: Amount | None = None
    max_staleness: Amount
    max_oom: Share
    max_memory: Amount | None = None
    price: Amount | None = None


@checked
@frozen
class Searched:
    """Complete plans by what happened to them; docs/cli.md, "Reading the answer"."""

    space: Plans
    infeasible: Plans
    dominated: Plans
    bounded: Plans
    simulated: Plans
    unexplored: Plans
    gap: Amount
    """Share of the step by which an unexplored plan could be shorter; 0 when proven."""


@checked
@frozen
class BreakEven:
    """One change from which on another kind of plan is the best."""

    change: str
    factor: AboveZero
    now: Finite | None
    """The quantity as it is, in base units; None where it has no single value."""
    unit: Dimension
    winner: str
    step_s: AboveZero
    """The winner's step there."""
    chosen_step_s: AboveZero | None
    """The best one's of the kind that is the best now; None: none fits. Both designed anew there."""

    @property
    def value(self) -> float | None:
        """The quantity at the break-even."""
        return None if self.now is None else self.now * self.factor


@checked
@frozen
class RunnerUp:
    """Another plan in short: the best, or the best that was met of another kind."""

    label: str
    """Architecture and role placement in words."""
    actor: str
    """Layout in short."""
    rollout: str | None
    step_s: AboveZero
    low_s: Amount
    high_s: Amount
    usd_per_step: Amount | None
    peak_memory_bytes: Amount
    capacity_bytes: Annotated[float, Positive]
    probability_out_of_memory: Share
    by_call_s: dict[str, Amount]
    """The step by call; moves around calls are listed as `moves`, instants without work as `waiting`."""
    gap: float | None = None
    """Share by which a plan of its kind could still be better; None: not proven, and in older files."""


@checked
@frozen
class Choice:
    """Why this plan: what was asked, what else there was, and what would change the answer."""

    asked: AskedBound
    confidence: Share | None
    """Probability that the plan is faster than the first runner-up; None without one."""
    reasons: tuple[str, ...]
    break_evens: Annotated[
        tuple[BreakEven, ...] | None, Field(validation_alias=AliasChoices("break_evens", "flips"))
    ]
    """None: not looked for."""
    certificate: Searched
    runners_up: tuple[RunnerUp, ...]
    fastest: bool = False
    """Whether the best was asked for, however complex."""
    best: RunnerUp | None = None
    """The proven best plan, where this one is the simplest close to it; None: this one is the best. With it
    are compared the runners-up, `confidence` and `break_evens`."""
