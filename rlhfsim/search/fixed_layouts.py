"""A layout that is fixed for a role, checked before anything is searched: can it exist at all?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.devices import domain_of
from rlhfsim.search.degrees import divides_heads, powers_of_two, splits_layers
from rlhfsim.search.layouts import CONTEXTS, interleaves
from rlhfsim.search.request import Request
from rlhfsim.search.role_fields import EXCHANGE
from rlhfsim.search.rollout_layouts import rollout_layouts
from rlhfsim.search.space import partitions, splits
from rlhfsim.specs.frameworks.runs import ANY
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.backends import broken_rule
from rlhfsim.specs.placement.layout import Layout

Fields = Mapping[str, int | str]


def check_layout(request: Request, models: Models, role: str, fields: Fields) -> None:
    """Refuse fields of a layout that the model, the hardware, the backend or every pool rules out.

    What the fields leave open is derived first, from each pool that the role may have.

    Raises:
        RlhfsimError: the first rule that is broken.
    """
    sizes = pool_sizes(request, models, role)
    try:
        _check(request, models, role, fields, sizes)
    except RlhfsimError as error:

        def passes(other: Fields) -> bool:
            try:
                _check(request, models, role, other, sizes)
            except RlhfsimError:
                return False
            return True

        raise error.with_help(_remedy(error.code, fields, passes) or "choose another layout") from error


TRIED: Mapping[str, tuple[str, Iterable[int]]] = {
    "tp-does-not-divide-heads": ("tp", range(1, 65)),
    "tp-exceeds-node": ("tp", powers_of_two(64)),
    "pp-does-not-divide-layers": ("pp", range(1, 33)),
    "vp-without-pp": ("pp", range(2, 33)),
    "ep-does-not-divide-experts": ("ep", powers_of_two(256)),
    "ep-exceeds-ranks": ("ep", powers_of_two(256)),
    "shards-do-not-divide": ("shards", powers_of_two(1024)[1:]),
    "backend-cannot-run": ("zero", range(4)),
}
"""Error -> the field that it is about and the values that are tried in its place."""


def _remedy(code: str, fields: Fields, passes: Callable[[Fields], bool]) -> str | None:
    """Values of the field that an error is about, or fields to leave out, with which all checks pass."""
    name, values = TRIED.get(code, ("", ()))
    if good := [str(value) for value in values if passes({**fields, name: value})]:
        return f"use {name} of {', '.join(good)}"
    spare = [x for x in fields if passes({k: v for k, v in fields.items() if k != x})]
    return f"leave out {' or '.join(spare)}" if spare else None


def _check(request: Request, models: Models, role: str, fields: Fields, sizes: Sequence[int]) -> None:
    model = models.of("actor" if role == "rollout" else role)
    for one in model.each:
        _check_model(one, fields)
    _check_hardware(request, role, fields)
    if not sizes:
        return
    cuts = list(_cuts(request, model, role, sizes, fields))
    if not cuts:
        raise _uneven(sizes, fields)
    if role == "rollout":
        _check_replicas(request, model, sizes, fields)
        return
    _check_backend(request, role, _with_experts(cuts, fields), fields)


def ranks(fields: Fields) -> int:
    """GPUs of one model replica: tp x pp x cp."""
    return prod(_degree(fields, name) for name in ("tp", "pp", "cp"))


def _degree(fields: Fields, name: str) -> int:
    return int(fields.get(name, 1))


def _check_model(model: ModelSpec, fields: Fields) -> None:
    tp, pp, ep, vp = (_degree(fields, name) for name in ("tp", "pp", "ep", "vp"))
    model.check_tp(tp)
    if "pp" in fields and pp == 1 and vp > 1:
        Layout(vp=vp)
    layers = model.num_layers
    degrees = [p for p in range(1, min(layers, 32) + 1) if splits_layers(model, p)]
    even = [p for p in degrees if vp == 1 or interleaves(model, p, vp)]
    if not (interleaves(model, pp, vp) if "pp" in fields and vp > 1 else splits_layers(model, pp) and even):
        times = f" times vp {vp}" if vp > 1 else ""
        raise RlhfsimError(
            "pp-does-not-divide-layers",
            f"pipeline parallelism {pp}{times} does not divide the {layers} layers of {model.name}",
        )
    asked = next((name for name in EXCHANGE if name in fields), None)
    if model.moe is None and (ep > 1 or asked):
        what = f"expert parallelism {ep}" if ep > 1 else asked
        raise RlhfsimError("ep-without-experts", f"{what}, but {model.name} has no experts")
    if ep > 1 and model.moe is not None and model.moe.num_experts % ep:
        raise RlhfsimError(
            "ep-does-not-divide-experts",
            f"expert parallelism {ep} does not divide the {model.moe.num_experts} experts of {model.name}",
        )


def _check_hardware(request: Request, role: str, fields: Fields) -> None:
    pools = request.cluster.node_groups
    pool = pools[-1] if role == "rollout" else pools[0]
    tp, domain = _degree(fields, "tp"), domain_of(pool)
    if tp > domain and (role != "rollout" or tp % domain):
        raise RlhfsimError(
            "tp-exceeds-node",
            f"tensor parallelism {tp} crosses nodes: GPUs reach each other fast only within {domain} GPUs",
        )
    if (size := ranks(fields) * _degree(fields, "dp")) > pool.gpus:
        raise RlhfsimError(
            "layout-exceeds-cluster", f"the layout needs {size:,} GPUs, there are {pool.gpus:,}"
        )


# --- what is left open --------------------------------------------------------------------------------


def _cuts(
    request: Request, model: ModelSpec, role: str, sizes: Sequence[int], fields: Fields
) -> Iterator[dict[str, int]]:
    """Degrees that keep the fields and fill a pool that the role may have, the plainest of each first."""
    groups, vp = request.cluster.node_groups, _degree(fields, "vp")
    domain = domain_of(groups[-1] if role == "rollout" else groups[0])
    tps = _given(fields, "tp", (tp for tp in powers_of_two(domain) if divides_heads(model, tp)))
    cps = _given(fields, "cp", CONTEXTS)
    for size in reversed(sizes):
        pps = (pp for pp in range(1, size + 1) if size % pp == 0 and splits_layers(model, pp))
        for tp, pp, cp in product(tps, _given(fields, "pp", pps), cps):
            dp, rest = divmod(size, tp * pp * cp)
            if not rest and fields.get("dp", dp) == dp and (vp == 1 or interleaves(model, pp, vp)):
                yield {"tp": tp, "pp": pp, "cp": cp, "dp": dp}


def _given(fields: Fields, name: str, open_values: Iterable[int]) -> list[int]:
    return [int(fields[name])] if name in fields else list(open_values)


def _uneven(sizes: Sequence[int], fields: Fields) -> RlhfsimError:
    dp = f" and dp={fields['dp']}" if "dp" in fields else ""
    pools = f"its pool {'has' if len(sizes) == 1 else 'may have'} {', '.join(map(str, sizes[:8]))}"
    return RlhfsimError(
        "layout-does-not-divide", f"tp x pp x cp = {ranks(fields)}{dp} does not fill the GPUs evenly: {pools}"
    )


def _with_experts(cuts: Sequence[dict[str, int]], fields: Fields) -> list[dict[str, int]]:
    """Those whose ranks hold as many groups of experts as the fields ask for.

    Raises:
        RlhfsimError: there are none.
    """
    ep = _degree(fields, "ep")
    ranks_of = [cut["dp"] * cut["cp"] * cut["tp"] for cut in cuts]
    if all(n % ep for n in ranks_of):
        raise RlhfsimError(
            "ep-exceeds-ranks",
            f"expert parallelism {ep} does not divide dp x cp x tp, which is at most {max(ranks_of)} here",
        )
    return [cut for cut, n in zip(cuts, ranks_of, strict=True) if n % ep == 0]


def _check_backend(request: Request, role: str, cuts: Sequence[dict[str, int]], fields: Fields) -> None:
    """Some of the complete layouts must run on the backend."""
    stages = [int(fields["zero"])] if "zero" in fields else (1, 3, 2, 0)
    packs = {"pack_tokens": fields["score_pack_tokens"]} if "score_pack_tokens" in fields else {}
    given: dict[str, Any] = {"recompute": "none", **packs, **fields}
    reasons: list[str | RlhfsimError] = []
    for cut, zero in product(cuts, stages):
        try:
            reason = broken_rule(request.rules(role), Layout(**{**given, **cut, "zero": zero}))
        except RlhfsimError as error:  # shards that do not divide the ranks of this cut
            reasons.append(error)
            continue
        if reason is None:
            return
        reasons.append(reason)
    if isinstance(reasons[0], RlhfsimError):
        raise reasons[0]
    raise RlhfsimError("backend-cannot-run", reasons[0])


def _check_replicas(request: Request, model: ModelSpec, sizes: Sequence[int], fields: Fields) -> None:
    """Some pool must hold replicas with these experts."""
    ep, group = _degree(fields, "ep"), request.cluster.node_groups[-1]
    alone = replace(request, framework=ANY, fix={"rollout": fields})
    if ep > 1 and not any(rollout_layouts(alone, model, size, group) for size in sizes):
        raise RlhfsimError(
            "ep-exceeds-ranks",
            f"expert parallelism {ep} does not divide the GPUs of any replica of the rollout",
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
