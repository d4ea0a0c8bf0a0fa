"""The least that a pool can contribute to a step: the fastest options of its roles, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod

import numpy as np

from rlhfsim.search.bound import head_seconds, ruled
from rlhfsim.search.columns import Floats, Numbers
from rlhfsim.search.floors import Floor
from rlhfsim.search.options import OptionTable
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.timetable import STREAM_CHUNKS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Least:
    """The least that a pool can contribute, role by role."""

    numbers: Numbers
    legal: int
    """Combinations of its roles."""
    fitting: int
    """Those whose roles fit by themselves, or are not priced."""
    priced: bool
    """Whether all of its roles are."""


def least(
    tables: Sequence[OptionTable],
    workload: Workload,
    *,
    unpriced: Sequence[Floor] = (),
    continuous: bool,
    rules_streamed: bool,
) -> Least:
    """What a pool of these roles contributes at least, and of others that are `unpriced`."""
    others_legal, priced = prod(floor.legal for floor in unpriced), not unpriced
    legal, fitting = others_legal * prod(t.legal for t in tables), others_legal * prod(map(len, tables))
    if not fitting:
        nothing = Numbers(np.full(Numbers.FIXED + STREAM_CHUNKS, inf))
        return Least(numbers=nothing, legal=legal, fitting=0, priced=priced)
    others = [t.least for t in tables if t.key.role != "rollout"]
    score = sum(role.ready for role in others) + sum(floor.ready for floor in unpriced)
    if any(role.runs for role in others):
        score += head_seconds(workload)
    numbers = Numbers.of(
        pieces=np.zeros(STREAM_CHUNKS),
        r=score,
        f=score,
        x=sum(role.training for role in others) + sum(floor.training for floor in unpriced),
        peak=max((t.least.bytes for t in tables), default=0.0),
    )
    for table in tables:
        if table.key.role == "rollout":
            numbers.a[...] = generating(table, continuous=continuous).min()
            if not continuous:
                numbers.u[...] = ruled(workload, table.pieces, streamed=rules_streamed).min()
            numbers.values[Numbers.FIXED :] = table.pieces.min(axis=0)
    return Least(numbers=numbers, legal=legal, fitting=fitting, priced=priced)


def generating(table: OptionTable, *, continuous: bool) -> Floats:
    """Seconds of generation of each option: of a batch, or per batch where the engine never drains."""
    return table.continuous if continuous else table.times.ready
