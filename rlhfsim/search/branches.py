"""Partitions with the bounds of their skeletons, from the fastest options of every role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf

import numpy as np

from rlhfsim.search.bound import objective_bound
from rlhfsim.search.columns import Bools, Floats, Ints, Numbers
from rlhfsim.search.merging import MERGE
from rlhfsim.search.request import Request
from rlhfsim.search.space import Partition, Skeleton
from rlhfsim.search.subproblems import Subproblems


@dataclass(slots=True, kw_only=True, eq=False)
class Branch:
    """A partition with the bounds of its skeletons."""

    partition: Partition
    sizes: Ints
    """(n, groups) GPUs."""
    bound: Floats
    """Of each skeleton; inf where a role fits nowhere. A weight path adds nothing yet."""
    priced: Bools
    """Whether time was left to price its roles; one that is not priced has its floor in the bound."""
    legal: list[int]
    """Plans of each skeleton."""
    fitting: list[int]
    """Those whose roles fit by themselves."""

    def skeleton(self, row: int) -> Skeleton:
        """One of them."""
        return Skeleton(partition=self.partition, sizes=tuple(self.sizes[row].tolist()))


def bounded(
    request: Request, subproblems: Subproblems, wanted: Sequence[Partition], sizes: Sequence[Ints]
) -> list[Branch]:
    """Every partition with its splits, all roles priced that there is time for."""
    subproblems.pricer.prepare(subproblems.keys(wanted, sizes))
    known: dict[tuple[object, ...], Branch] = {}
    branches = []
    for partition, rows in zip(wanted, sizes, strict=True):
        if len(rows):
            name = partition.groups, partition.hardware, partition.schedule, partition.adapters_only
            if name not in known:
                known[name] = _bounded(request, subproblems, partition, rows)
            branches.append(replace(known[name], partition=partition, sizes=rows))
    return branches


def _bounded(request: Request, subproblems: Subproblems, partition: Partition, sizes: Ints) -> Branch:
    legal, fitting = [1] * len(sizes), [1] * len(sizes)
    pools, fits = [], np.ones(len(sizes), dtype=np.bool_)
    priced = np.ones(len(sizes), dtype=np.bool_)
    for i in range(len(partition.groups)):
        values, at = np.unique(sizes[:, i], return_inverse=True)
        least = [subproblems.least(partition, i, int(gpus)) for gpus in values]
        fits &= np.array([row.fitting > 0 for row in least])[at]
        priced &= np.array([row.priced for row in least])[at]
        pools.append(Numbers(np.array([row.numbers.values for row in least])[at]))
        legal = [n * least[k].legal for n, k in zip(legal, at, strict=True)]
        fitting = [n * least[k].fitting for n, k in zip(fitting, at, strict=True)]
    bound = np.where(fits, objective_bound(partition, request, pools, np.zeros(len(sizes))), inf)
    return Branch(partition=partition, sizes=sizes, bound=bound, priced=priced, legal=legal, fitting=fitting)


def fit_alone(subproblems: Subproblems, wanted: Sequence[Partition], sizes: Sequence[Ints]) -> bool:
    """Whether every role has an option somewhere; roles are priced until one has none, or time is up."""
    keys = sorted(subproblems.keys(wanted, sizes), key=lambda key: MERGE.index(key.role))
    pricer = subproblems.pricer
    for _, same in groupby(keys, key=lambda key: key.role):
        of_role = list(same)
        if not pricer.prepare(of_role) or not any(len(pricer.table(key)) for key in of_role):
            return False
    return True
