"""The least that a pool can contribute to a step: the fastest options of its roles, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod

import numpy as np

from rlhfsim.search.bound import head_seconds, ruled
from rlhfsim.search.columns import Floats, Numbers
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
    """Those whose roles fit by themselves."""


def least(
    tables: Sequence[OptionTable], workload: Workload, *, continuous: bool, rules_streamed: bool
) -> Least:
    """What a pool of these roles contributes at least."""
    legal, fitting = prod(t.legal for t in tables), prod(map(len, tables))
    if not fitting:
        return Least(numbers=Numbers(np.full(Numbers.FIXED + STREAM_CHUNKS, inf)), legal=legal, fitting=0)
    others = [t.least for t in tables if t.key.role != "rollout"]
    score = sum(role.ready for role in others)
    if any(role.runs for role in others):
        score += head_seconds(workload)
    numbers = Numbers.of(
        pieces=np.zeros(STREAM_CHUNKS),
        r=score,
        f=score,
        x=sum(role.training for role in others),
        peak=max(t.least.bytes for t in tables),
    )
    for table in tables:
        if table.key.role == "rollout":
            numbers.a[...] = generating(table, continuous=continuous).min()
            if not continuous:
                numbers.u[...] = ruled(workload, table.pieces, streamed=rules_streamed).min()
            numbers.values[Numbers.FIXED :] = table.pieces.min(axis=0)
    return Least(numbers=numbers, legal=legal, fitting=fitting)


def generating(table: OptionTable, *, continuous: bool) -> Floats:
    """Seconds of generation of each option: of a batch, or per batch where the engine never drains."""
    return table.continuous if continuous else table.times.ready
