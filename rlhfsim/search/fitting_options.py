"""Which options of a role fit into the memory of a GPU and of its host when nobody else is there."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np

from rlhfsim.frameworks.runs import engine_of
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
from rlhfsim.search.columns import Floats
from rlhfsim.search.layout_shapes import Space, columns_of_shapes
from rlhfsim.search.options import PriceKey, Variants
from rlhfsim.search.request import Request
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.layout_columns import columns_of
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.specs.workload.dataflow import TRAINED


def fitting_options(
    request: Request,
    models: Models,
    key: PriceKey,
    space: Space,
    variants_of: Variants,
    kinds: Iterable[str],
    doubt: float,
) -> tuple[tuple[RolePlacement, ...], Rows, Floats]:
    """Options of a role that fit, their bytes, and host bytes for each GPU; `kinds`: of its calls."""
    pool, memory = request.cluster.node_groups[key.hardware], memory_of(request, models, key)
    usable = pool.profile.usable_memory.value
    rows, roles = _rows(memory, space, variants_of, usable if key.role in TRAINED else np.inf)
    host = host_of(rows) + (rows["framework"][:, 0] > 0) * pool.profile["host_process_bytes"]
    fits = host * min(key.gpus, pool.gpus_per_node) <= pool.profile.node.host_memory.value
    states: set[RoleState] = {"idle", *("train" if kind == "train" else "forward" for kind in kinds)}
    for state in role_sums(pool.profile, rows, NO_SYNC, states).values():
        fits &= fitting(state, usable, request.max_oom, doubt)
    return tuple(roles[i] for i in np.flatnonzero(fits)), rows[fits], host[fits]


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
    memory: RoleMemory, space: Space, variants_of: Variants, usable: float
) -> tuple[Rows, list[RolePlacement]]:
    """Rows (option, stage) of what a role holds in each layout, and its options.

    Left out are layouts in which training takes more than `usable` bytes whatever happens between the calls.
    """
    shapes = list(space.shapes)
    if usable < np.inf and shapes:
        least = memory.standing_bytes([shape.cut for shape in shapes])
        shapes = [shapes[i] for i in np.flatnonzero(least <= usable)]
    if not shapes:
        return np.zeros((0, STAGES), dtype=ROLE), []
    rows = stage_rows(memory, columns_of_shapes(shapes), swapped=False)
    hopeful = np.flatnonzero((training_bytes(rows) <= usable).all(axis=1))
    every = [(shape.fields, size) for shape in shapes for size in shape.sizes]
    layouts = (Layout(**fields, **size) for fields, size in map(every.__getitem__, hopeful.tolist()))
    variants = list(map(variants_of, layouts))
    roles = list(chain.from_iterable(variants))
    own = np.repeat(rows[hopeful], list(map(len, variants)), axis=0)
    if away := [i for i, role in enumerate(roles) if role.residency == "swapped"]:
        own[away] = stage_rows(memory, columns_of(roles[i].layout for i in away), swapped=True)
    return rested(own, roles, memory.kind), roles
