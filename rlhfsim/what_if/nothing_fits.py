"""When nothing fits: what is missing, and the smallest change that helps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from rlhfsim.search.branch_and_bound import Found, Search
from rlhfsim.search.request import Request, switched
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.units import format

MORE_GPUS = (2, 3, 4, 6, 8, 16, 32, 64)


def nearest_change(request: Request) -> str | None:
    """The smallest change with which something fits: a restriction dropped, a switch, more GPUs."""
    for remedy, changed in _relaxations(request):
        if Search(changed, models_of(changed.workload)).first() is not None:
            return remedy
    return None


def shortage(request: Request, found: Found) -> str | None:
    """What the plan that misses memory by least lacks, in words; None where none was looked at."""
    if found.nearest is None:
        return None
    skeleton, pool, missing = found.nearest
    if not 0 < missing < inf:
        return None
    kinds = " or ".join(sorted(skeleton.partition.labels))
    return f"the nearest plan ({kinds}) misses {format(missing, 'byte')} per GPU in pool {pool}"


def _relaxations(request: Request) -> Iterator[tuple[str, Request]]:
    for name in sorted(request.forbid):
        yield f"allow {name} again", replace(request, forbid=request.forbid - {name})
    for role in request.fix:
        yield (
            f"do not fix the layout of the {role}",
            replace(request, fix={k: v for k, v in request.fix.items() if k != role}),
        )
    for limit in (x for x in request.limits if x not in request.hardware_limits):
        left = tuple(x for x in request.limits if x is not limit)
        yield f"do not ask for {limit.text}", replace(request, limits=left)
    if request.max_memory is not None:
        yield "more memory on a GPU", replace(request, max_memory=None)
    free = replace(
        request,
        fix={},
        limits=request.hardware_limits,
        forbid=frozenset(),
        architecture=None,
        weight_path=None,
        max_gpus_per_role=None,
        max_memory=None,
    )
    if free != request:
        yield "free every choice", free
    yield from (
        (f"--backend {b}", replace(request, backend=b, fix={})) for b in BACKENDS if b != request.backend
    )
    for name in ("adam8bit", "lora"):
        if name not in request.switches:
            yield (
                f"--allow {name}",
                replace(request, workload=switched(request.workload, frozenset({name}))),
            )
    for factor in MORE_GPUS:
        pool = request.cluster.node_group
        if pool.gpus > pool.gpus_per_node and pool.gpus_per_node < pool.profile.node.gpus:
            continue
        more = replace(
            pool, gpus=pool.gpus * factor, gpus_per_node=min(pool.gpus * factor, pool.profile.node.gpus)
        )
        yield (
            f"--gpus {more.gpus}",
            replace(
                request,
                cluster=replace(request.cluster, node_groups=(more, *request.cluster.node_groups[1:])),
            ),
        )
