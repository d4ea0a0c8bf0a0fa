"""Which options of a role fit into the memory of a GPU and of its host when nobody else is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from rlhfsim.memory.components import NO_SYNC, ROLE, STAGES, Rows, host_of, rested, role_sums
from rlhfsim.memory.risk import fitting
from rlhfsim.memory.role_bytes import RoleBytes, RoleMemory, role_memory, software_of
from rlhfsim.memory.states import stages
from rlhfsim.search.columns import Floats
from rlhfsim.search.options import PriceKey, Variants
from rlhfsim.search.request import Request
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.specs.workload.dataflow import TRAINED


def fitting_options(
    request: Request,
    models: Models,
    key: PriceKey,
    shapes: Sequence[Sequence[Layout]],
    variants_of: Variants,
    kinds: Iterable[str],
    doubt: float,
) -> tuple[tuple[RolePlacement, ...], Rows, Floats]:
    """Options of a role that fit, their bytes, and host bytes for each GPU; `kinds`: of its calls."""
    pool, memory = request.cluster.node_groups[key.hardware], _memory(request, models, key)
    usable, roles = pool.profile.usable_memory.value, list[RolePlacement]()
    parts, counts = list[list[RoleBytes]](), list[int]()
    for variants, ends in _hopeful(memory, shapes, variants_of, usable if key.role in TRAINED else np.inf):
        roles += variants
        parts.append(ends)
        counts.append(len(variants))
    layouts = np.array(parts, dtype=ROLE).reshape(len(parts), STAGES)
    rows = rested(np.repeat(layouts, counts, axis=0), roles, memory.kind)
    host = host_of(rows) + (rows["framework"][:, 0] > 0) * pool.profile["host_process_bytes"]
    states = role_sums(pool.profile, rows, NO_SYNC)
    fits = host * min(key.gpus, pool.gpus_per_node) <= pool.profile.node.host_memory.value
    for name in {"idle", *("train" if kind == "train" else "forward" for kind in kinds)}:
        fits &= fitting(states[name], usable, request.max_oom, doubt)
    return tuple(roles[i] for i in np.flatnonzero(fits)), rows[fits], host[fits]


def _memory(request: Request, models: Models, key: PriceKey) -> RoleMemory:
    framework, packing = request.cluster.framework, request.workload.packing
    return role_memory(
        models,
        key.role,
        request.workload,
        backend=request.backend,
        profile=request.cluster.node_groups[key.hardware].profile,
        beside_actor=key.beside_actor,
        software=software_of(None, framework, request.backend, packing=packing),
    )


def _hopeful(
    memory: RoleMemory, shapes: Sequence[Sequence[Layout]], variants_of: Variants, usable: float
) -> Iterator[tuple[tuple[RolePlacement, ...], list[RoleBytes]]]:
    """What a role may do between its calls in each layout, and its bytes on the first and the last stage.

    Where training takes more than `usable` bytes whatever happens between the calls, larger micro-batches of
    the same shape take more still.
    """
    for shape in shapes:
        for variants in filter(None, map(variants_of, shape)):
            ends = _ends(memory, variants[0], usable)
            if ends is None:
                break
            yield variants, ends


def _ends(memory: RoleMemory, role: RolePlacement, usable: float) -> list[RoleBytes] | None:
    """What a role holds on the first and the last stage; None where training takes more than `usable`."""
    views = list[RoleBytes]()
    for stage in stages(role.layout):
        views.append(memory.of(role, stage))
        if views[-1].training > usable:
            return None
    return [views[0], views[-1]]
