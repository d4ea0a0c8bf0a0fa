"""Options of several roles that go together only where one key of the framework says the same for all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np

from rlhfsim.frozen import frozen
from rlhfsim.search.columns import Bools, Ints
from rlhfsim.search.dominance import mixed
from rlhfsim.search.options import OptionTable
from rlhfsim.specs.frameworks.says import Same

Placed = tuple[str, OptionTable, Ints]
"""A role, its table, and the row of its option in each combination."""


@frozen
class Agreement:
    """What one key says for several roles of a pool, and perhaps of others."""

    column: int
    """Column of `OptionTable.agreed`."""
    roles: tuple[str, ...]
    outside: bool
    """Whether some of the roles have other GPUs."""
    in_a_pool: bool
    """Whether roles on other GPUs need not agree."""


def agreements(
    alike: Sequence[Same], present: Collection[str], group: Collection[str]
) -> tuple[Agreement, ...]:
    """Those that roles of a pool take part in, in plans with the roles `present`."""
    found = []
    for column, same in enumerate(alike):
        members = set(present) & set(same.roles)
        if len(members) > 1 and members & set(group):
            outside = not same.in_a_pool and bool(members - set(group))
            found.append(
                Agreement(column=column, roles=same.roles, outside=outside, in_a_pool=same.in_a_pool)
            )
    return tuple(found)


def agreeing(
    agreement: Sequence[Agreement], placed: Sequence[Placed], added: Placed, count: int
) -> tuple[Ints, Ints]:
    """A number of each of `count` combinations, and of each option of a role that is `added` to them.

    They go together where it is the same.
    """
    ours, theirs = np.zeros(count, dtype=np.int64), np.zeros(len(added[2]), dtype=np.int64)
    for each in agreement:
        others = [x for x in placed if x[0] in each.roles]
        if others and added[0] in each.roles:
            ours, theirs = mixed(ours, _numbers(each, others[0])), mixed(theirs, _numbers(each, added))
    return ours, theirs


def agree_apart(agreement: Sequence[Agreement], pools: Sequence[Sequence[Placed]]) -> Bools:
    """Whether combinations of several pools say the same, one axis a pool; each agrees in itself."""
    possible = np.ones([len(pool[0][2]) for pool in pools], dtype=np.bool_)
    for each in (each for each in agreement if not each.in_a_pool):
        members = [next((x for x in pool if x[0] in each.roles), None) for pool in pools]
        along = [
            _numbers(each, member).reshape([-1 if k == i else 1 for k in range(len(pools))])
            for i, member in enumerate(members)
            if member is not None
        ]
        for one, two in pairwise(along):
            possible &= one == two
    return possible


def open_classes(
    agreement: Sequence[Agreement], group: Collection[str], placed: Sequence[Placed], classes: Ints
) -> Ints:
    """Classes that tell apart what roles must agree with that are not yet `placed`."""
    missing = set(group) - {role for role, _, _ in placed}
    for each in agreement:
        members = [x for x in placed if x[0] in each.roles]
        if members and (each.outside or missing & set(each.roles)):
            classes = mixed(classes, _numbers(each, members[0]))
    return classes


def _numbers(each: Agreement, placed: Placed) -> Ints:
    _, table, rows = placed
    assert table.agreed is not None
    return np.asarray(table.agreed[rows, each.column])
