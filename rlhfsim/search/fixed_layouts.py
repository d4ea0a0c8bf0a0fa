"""A layout that is fixed for a role, checked before anything is searched: can it exist at all?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any, cast

from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.devices import domain_of
from rlhfsim.search.layouts import splits_layers
from rlhfsim.search.request import Request
from rlhfsim.search.space import partitions, splits
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.backends import broken_rule
from rlhfsim.specs.placement.layout import Layout

Fields = Mapping[str, int | str]


def check_layout(request: Request, models: Models, role: str, fields: Fields) -> None:
    """Refuse fields of a layout that the model, the hardware, the backend or every pool rules out.

    Raises:
        RlhfsimError: the first rule that is broken.
    """
    _check_model(models.of("actor" if role == "rollout" else role), fields)
    _check_hardware(request, role, fields)
    if role != "rollout":
        _check_backend(request, role, fields)
    _check_pools(request, models, role, fields)


def ranks(fields: Fields) -> int:
    """GPUs of one model replica: tp x pp x cp."""
    return prod(_degree(fields, name) for name in ("tp", "pp", "cp"))


def _degree(fields: Fields, name: str) -> int:
    return int(fields.get(name, 1))


def _check_model(model: ModelSpec, fields: Fields) -> None:
    tp, pp, ep, vp = (_degree(fields, name) for name in ("tp", "pp", "ep", "vp"))
    model.check_tp(tp)
    layers = model.num_layers
    if not splits_layers(model, pp) or (vp > 1 and layers % (pp * vp)):
        times = f" times vp {vp}" if vp > 1 else ""
        degrees = [p for p in range(1, min(layers, 32) + 1) if splits_layers(model, p)]
        raise RlhfsimError(
            "pp-does-not-divide-layers",
            f"pipeline parallelism {pp}{times} does not divide the {layers} layers of {model.name}",
            help=f"use pp of {', '.join(str(p) for p in degrees if vp == 1 or layers % (p * vp) == 0)}",
        )
    if ep > 1 and model.moe is None:
        raise RlhfsimError(
            "ep-without-experts",
            f"expert parallelism {ep}, but {model.name} has no experts",
            help="leave out ep",
        )
    if ep > 1 and model.moe is not None and model.moe.num_experts % ep:
        raise RlhfsimError(
            "ep-does-not-divide-experts",
            f"expert parallelism {ep} does not divide the {model.moe.num_experts} experts of {model.name}",
            help="use a divisor",
        )


def _check_hardware(request: Request, role: str, fields: Fields) -> None:
    pools = request.cluster.node_groups
    pool = pools[-1] if role == "rollout" else pools[0]
    tp, domain = _degree(fields, "tp"), domain_of(pool)
    if tp > domain and (role != "rollout" or tp % domain):
        raise RlhfsimError(
            "tp-exceeds-node",
            f"tensor parallelism {tp} crosses nodes: GPUs reach each other fast only within {domain} GPUs",
            help=f"use tp <= {domain} and add pp or dp",
        )
    if (size := ranks(fields) * _degree(fields, "dp")) > pool.gpus:
        raise RlhfsimError(
            "layout-exceeds-cluster",
            f"the layout needs {size:,} GPUs, there are {pool.gpus:,}",
            help="lower tp, pp, cp or dp",
        )


def _check_backend(request: Request, role: str, fields: Fields) -> None:
    wide = max(_degree(fields, "dp"), request.cluster.node_group.gpus // ranks(fields))
    degrees = {k: v for k, v in fields.items() if k != "dp"}
    base = Layout(dp=wide, **cast(dict[str, Any], {"recompute": "none", **degrees}))
    tried = [base] if "zero" in fields else [replace(base, zero=z) for z in (1, 3, 2, 0)]
    broken = [broken_rule(request.rules(role), layout) for layout in tried]
    if all(broken):
        raise RlhfsimError(
            "backend-cannot-run", str(broken[0]), help="choose another layout, or another --backend"
        )


def _check_pools(request: Request, models: Models, role: str, fields: Fields) -> None:
    """Some way to share the GPUs must give the role a pool that the layout divides."""
    sizes = pool_sizes(request, models, role)
    unit = ranks(fields)
    good = [s for s in sizes if s % unit == 0 and fields.get("dp", s // unit) == s // unit]
    if sizes and not good:
        dp = f" and dp={fields['dp']}" if "dp" in fields else ""
        pools = f"its pool {'has' if len(sizes) == 1 else 'may have'} {', '.join(map(str, sizes[:8]))}"
        raise RlhfsimError(
            "layout-does-not-divide",
            f"tp x pp x cp = {unit}{dp} does not fill the GPUs evenly: {pools}",
            help="choose degrees whose product divides the GPUs",
        )


def pool_sizes(request: Request, models: Models, role: str) -> list[int]:
    """GPUs that the pool of a role may have."""
    return sorted(
        {
            int(gpus)
            for partition in partitions(request, models)
            if (index := partition.pool_of(role)) is not None
            for gpus in splits(request, partition)[:, index]
        }
    )
