"""Options of a trained or scoring role as columns: a placement is made only where one is asked for.

A large question has hundreds of thousands of them. As objects they would take most of its memory, and once
more in every forked process, which writes into each object that it looks at (its count of references).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from rlhfsim.search.columns import Bools, Ints
from rlhfsim.specs.placement.layout_columns import FIELDS, Layouts, ManyRoles, all_of, array_of
from rlhfsim.specs.placement.placement import AnyRolePlacement, Rest, RolePlacement

ALONE = "alone"
"""Pool name while a role is priced by itself."""


Roles = AnyRolePlacement | ManyRoles
"""A role, or columns of roles: the same condition is asked of both."""
Condition = Callable[[Any], Any]
"""`Roles` -> whether it holds: of columns an array, or one answer for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoleRows(Sequence[RolePlacement]):
    """Options as pairs of a layout and of what happens between calls."""

    layouts: Layouts
    """Distinct ones, which tables of the same options share."""
    rests: tuple[Rest, ...]
    """Distinct ones."""
    layout: NDArray[np.integer[Any]]
    """(n,) which of the layouts each option has."""
    rest: NDArray[np.integer[Any]]
    """(n,) which of the rests."""

    def __len__(self) -> int:
        return len(self.layout)

    @overload
    def __getitem__(self, row: int) -> RolePlacement: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[RolePlacement]: ...
    def __getitem__(self, row: int | slice) -> RolePlacement | Sequence[RolePlacement]:
        if isinstance(row, slice):
            return self.only(np.arange(len(self))[row])
        rest = self.rests[self.rest[row]]
        layout = self.layouts.at(int(self.layout[row]))
        return RolePlacement(pool=ALONE, layout=layout, **rest._asdict())

    def only(self, rows: Ints | Bools) -> RoleRows:
        """Some of them, in this order."""
        return RoleRows(
            layouts=self.layouts, rests=self.rests, layout=self.layout[rows], rest=self.rest[rows]
        )

    @property
    def alone(self) -> RoleRows:
        """The same without layouts that none of them has, to be kept: in few bytes."""
        used, layout = np.unique(self.layout, return_inverse=True)
        return RoleRows(
            layouts=self.layouts.only(used),
            rests=self.rests,
            layout=layout.astype(np.int32),
            rest=self.rest.astype(np.int8),
        )

    def that(self, holds: Condition) -> Bools:
        """(n,) for which a condition holds; it is asked once for each rest, about all layouts."""
        found = np.zeros((len(self.rests), len(self.layouts)), dtype=np.bool_)
        for number, rest in enumerate(self.rests):
            found[number] = holds(ManyRoles(self.layouts, *rest))
        return np.asarray(found[self.rest, self.layout])

    @property
    def frees(self) -> Bools:
        """(n,) Whether something leaves GPU memory between calls."""
        return np.asarray(np.array([rest.frees for rest in self.rests], dtype=np.bool_)[self.rest])

    def like(self, role: RolePlacement) -> Ints:
        """Rows of the options that are this one."""
        one, number = role.layout, {rest: i for i, rest in enumerate(self.rests)}
        own = number.get(Rest(role.residency, role.offload_between), -1)
        same = self.rest == own
        for name in FIELDS:
            [value] = array_of(name, [getattr(one, name)])
            same &= (getattr(self.layouts, name) == value)[self.layout]
        return np.flatnonzero(same)


def joined(tables: Sequence[RoleRows]) -> RoleRows:
    """The options of some tables, one after the other."""
    tables = [table for table in tables if len(table)] or tables[:1]  # columns without rows have no type
    starts = np.cumsum([0, *(len(table.layouts) for table in tables)])
    rests = list(dict.fromkeys(rest for table in tables for rest in table.rests))
    places = [np.array([rests.index(rest) for rest in table.rests], dtype=np.int64) for table in tables]
    return RoleRows(
        layouts=all_of([table.layouts for table in tables]),
        rests=tuple(rests),
        layout=np.concatenate([start + t.layout for start, t in zip(starts, tables, strict=False)]),
        rest=np.concatenate([place[t.rest] for place, t in zip(places, tables, strict=True)]),
    )
