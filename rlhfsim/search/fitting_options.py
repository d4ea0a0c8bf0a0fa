"""Which options of a role fit into the memory of a GPU and of its host when nobody else is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest

import numpy as np

from rlhfsim.elementwise import numbered
from rlhfsim.memory.components import (
    NO_SYNC,
    ROLE,
    STAGES,
    RoleState,
    Rows,
    host_of,
    rested,
    role_sums,
    stage_rows,
    training_bytes,
)
from rlhfsim.memory.risk import fitting
from rlhfsim.memory.role_bytes import RoleMemory, role_memory, software_of
from rlhfsim.search.columns import Floats, Ints
from rlhfsim.search.layout_shapes import Space, columns_of_shapes
from rlhfsim.search.options import PriceKey, Variants
from rlhfsim.search.request import Request
from rlhfsim.search.role_rows import RoleRows
from rlhfsim.specs.frameworks.runs import engine_of
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.layout_columns import Layouts
from rlhfsim.specs.placement.placement import Rest
from rlhfsim.specs.workload.roles import TRAINED

AT_A_TIME = 4_000
"""Rows that are made bytes and compared in one go: all at once they would take their memory again."""


def fitting_options(
    request: Request,
    models: Models,
    keys: Sequence[PriceKey],
    spaces: Sequence[Space],
    variants: Sequence[Variants],
    kinds: Iterable[str],
    doubt: float,
) -> Iterator[tuple[RoleRows, Rows, Ints, Floats]]:
    """Options of each key that fit, distinct rows of bytes and that of each option, and host bytes for each
    GPU; `kinds`: of its calls.

    The keys are of one role with the same `memory_of`.
    """
    pool, memory = request.cluster.node_groups[keys[0].hardware], memory_of(request, models, keys[0])
    usable = pool.profile.usable_memory.value
    limit = usable if keys[0].role in TRAINED else np.inf
    rows, roles, owners = _rows(memory, spaces, variants, limit)
    host = host_of(rows) + (rows["framework"][:, 0] > 0) * pool.profile["host_process_bytes"]
    in_node = np.array([min(key.gpus, pool.gpus_per_node) for key in keys])[owners]
    fits = host * in_node <= pool.profile.node.host_memory.value
    states: set[RoleState] = {"idle", *("train" if kind == "train" else "forward" for kind in kinds)}
    for state in role_sums(pool.profile, rows, NO_SYNC, states).values():
        fits &= fitting(state, usable, request.max_oom, doubt)
    for i in range(len(keys)):
        mine = np.flatnonzero(fits & (owners == i))
        yield roles.only(mine).alone, *_distinct(rows[mine]), host[mine]


def _distinct(rows: Rows) -> tuple[Rows, Ints]:
    """Distinct rows (option, stage), and the place among them of each option.

    A third of all are (Qwen3-235B on 4,096 GPUs with `async`: 110,812 of 328,915).
    """
    whole = rows.view(f"V{rows.itemsize * STAGES}")[:, 0]
    some = (whole[first : first + AT_A_TIME].tolist() for first in range(0, len(whole), AT_A_TIME))
    distinct, places = numbered(chain.from_iterable(some))
    held = np.frombuffer(b"".join(distinct), dtype=ROLE).reshape(-1, STAGES)
    return held, np.array(places, dtype=np.int64)


def memory_of(request: Request, models: Models, key: PriceKey) -> RoleMemory:
    """What decides the bytes of a role."""
    framework, work = request.cluster.framework, request.workload
    return role_memory(
        models,
        key.role,
        request.workload,
        backend=request.backend,
        profile=request.cluster.node_groups[key.hardware].profile,
        beside_actor=key.beside_actor,
        software=software_of(
            None, framework, request.backend, packing=work.packing, algorithm=work.algorithm
        ),
        engine=engine_of(framework),
    )


def _rows(
    memory: RoleMemory, spaces: Sequence[Space], variants: Sequence[Variants], usable: float
) -> tuple[Rows, RoleRows, Ints]:
    """Rows (option, stage) of what a role holds in each layout, its options, and the space of each.

    Left out are layouts in which training takes more than `usable` bytes whatever happens between the calls.
    """
    shapes = [(i, shape) for i, space in enumerate(spaces) for shape in space.shapes]
    if usable < np.inf and shapes:
        least = memory.standing_bytes([shape.cut for _, shape in shapes])
        shapes = [shapes[i] for i in np.flatnonzero(least <= usable)]
    if not shapes:
        none = np.zeros(0, dtype=np.int64)
        roles = RoleRows(layouts=columns_of_shapes([]), rests=(), layout=none, rest=none)
        return np.zeros((0, STAGES), dtype=ROLE), roles, none
    layouts = columns_of_shapes([shape for _, shape in shapes])
    rows = stage_rows(memory, layouts, swapped=False)
    hopeful = np.flatnonzero((training_bytes(rows) <= usable).all(axis=1))
    owners = np.repeat([i for i, _ in shapes], [len(shape.sizes) for _, shape in shapes])[hopeful]
    roles = _varied(layouts.only(hopeful), owners, variants)
    own = rows[hopeful[roles.layout]]
    if len(away := np.flatnonzero(roles.that(lambda role: role.residency == "swapped"))):
        own[away] = stage_rows(memory, roles.layouts.only(roles.layout[away]), swapped=True)
    return rested(own, roles.rests, roles.rest, memory.kind), roles, owners[roles.layout]


def _varied(layouts: Layouts, owners: Ints, variants: Sequence[Variants]) -> RoleRows:
    """Each layout with everything that may happen between calls in its space, one after the other."""
    rests, answers = dict[Rest, int](), list[list[int]]()
    answer = np.zeros(len(layouts), dtype=np.int64)
    for i, own in enumerate(variants):
        mine = np.flatnonzero(owners == i)
        found, places = own.each(layouts.only(mine))
        answer[mine] = len(answers) + places
        answers += [[rests.setdefault(rest, len(rests)) for rest in each] for each in found]
    counts = np.array(list(map(len, answers)), dtype=np.int64)[answer]
    layout = np.repeat(np.arange(len(layouts)), counts)
    place = np.arange(len(layout)) - np.repeat(np.cumsum(counts) - counts, counts)
    most = max(map(len, answers), default=0)
    table = np.array(list(zip_longest(*answers, fillvalue=-1)), dtype=np.int64).reshape(most, len(answers))
    return RoleRows(layouts=layouts, rests=tuple(rests), layout=layout, rest=table[place, answer[layout]])
