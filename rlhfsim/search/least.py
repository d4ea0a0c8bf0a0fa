"""The least that a pool can contribute to a step: the fastest options of its roles, one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, prod

import numpy as np

from rlhfsim.search.bound import head_seconds, ruled
from rlhfsim.search.columns import Floats, Numbers
from rlhfsim.search.options import OptionTable, PriceKey
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.timetable import STREAM_CHUNKS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Floor:
    """The least that a role can take on a number of GPUs, and how many options it has."""

    key: PriceKey
    options: Callable[[], int]
    ready: float
    """Seconds until the result of its forward call is there."""
    training: float
    """Seconds of its training."""

    @property
    def legal(self) -> int:
        """Its options in the space."""
        return self.options()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Least:
    """The least that a pool can contribute, role by role."""

    numbers: Numbers
    tables: Sequence[OptionTable]
    unpriced: Sequence[Floor]
    """Floors of the roles that are not priced."""

    @property
    def priced(self) -> bool:
        """Whether all of its roles are."""
        return not self.unpriced

    @property
    def legal(self) -> int:
        """Combinations of its roles."""
        return self._others * prod(table.legal for table in self.tables)

    @property
    def fitting(self) -> int:
        """Those whose roles fit by themselves, or are not priced."""
        return self._others * prod(map(len, self.tables)) if all(map(len, self.tables)) else 0

    @property
    def _others(self) -> int:
        return prod(floor.legal for floor in self.unpriced)


def least(
    tables: Sequence[OptionTable],
    workload: Workload,
    *,
    gpus: int,
    unpriced: Sequence[Floor] = (),
    continuous: bool,
    rules_streamed: bool,
) -> Least:
    """What a pool of these roles contributes at least, and of others that are `unpriced`."""
    if not all(map(len, tables)):
        nothing = Numbers(np.full(Numbers.FIXED + STREAM_CHUNKS, inf))
        nothing.gpus[...] = gpus
        return Least(numbers=nothing, tables=tables, unpriced=unpriced)
    others = [t.least for t in tables if t.key.role != "rollout"]
    score = sum(role.ready for role in others) + sum(floor.ready for floor in unpriced)
    if any(role.runs for role in others):
        score += head_seconds(workload)
    numbers = Numbers.of(
        pieces=np.zeros(STREAM_CHUNKS),
        gpus=gpus,
        until_scored_s=score,
        until_free_s=score,
        training_s=sum(role.training for role in others) + sum(floor.training for floor in unpriced),
        peak=max((t.least.bytes for t in tables), default=0.0),
    )
    for table in tables:
        if table.key.role == "rollout":
            numbers.until_generated_s[...] = generating(table, continuous=continuous).min()
            if not continuous:
                numbers.until_ruled_s[...] = ruled(workload, table.pieces, streamed=rules_streamed).min()
            numbers.values[Numbers.FIXED :] = table.pieces.min(axis=0)
    return Least(numbers=numbers, tables=tables, unpriced=unpriced)


def generating(table: OptionTable, *, continuous: bool) -> Floats:
    """Seconds of generation of each option: of a batch, or per batch where the engine never drains."""
    return table.continuous if continuous else table.times.ready
