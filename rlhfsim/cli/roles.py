"""Layouts of single roles on the command line, checked before anything is searched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast, get_args

from rlhfsim.cli.params import (
    COMMAND_LINE,
    OneOf,
    Option,
    Whole,
    Words,
    bad_option,
    on_command_line,
    option,
    parse_pairs,
    together,
)
from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.kernels.devices import domain_of
from rlhfsim.search.layouts import splits_layers
from rlhfsim.search.request import Request
from rlhfsim.search.space import partitions, splits
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.backends import violation
from rlhfsim.specs.placement.layout import Layout, Recompute
from rlhfsim.what_if.planned import ranks

Fields = dict[str, int | str]
OPTIONS = {
    "actor": "--actor",
    "rollout": "--rollout",
    "critic": "--critic-layout",
    "reference": "--reference-layout",
    "reward": "--reward-layout",
}
"""RolePlacement -> option; the plain names of the others already name models."""
ROLE_FIELDS = ("tp", "pp", "dp", "cp", "ep", "vp", "zero", "micro_batch", "recompute")
ROLLOUT_FIELDS = ("tp", "pp", "ep")
MAX_DEGREE = 65536


def _role_option(role: str, name: str) -> Option:
    fields = ", ".join(ROLLOUT_FIELDS if role == "rollout" else ROLE_FIELDS)
    help = f"Layout of the {role}: {fields}." if role in ("actor", "rollout") else f"The same for the {role}."
    left_out = " What is left out is chosen." if role == "actor" else ""
    return option(f"{name} {role}_layout", Words("KEY=VALUE,..."), help + left_out)


role_options = together(*(_role_option(role, name) for role, name in OPTIONS.items()))
"""`--actor tp=8,pp=2`, `--rollout tp=8`, ...: what is left out is chosen."""


def fixed_layouts(given: Mapping[str, Any]) -> dict[str, Fields]:
    """RolePlacement -> field -> value, of the options that were given.

    Raises:
        RlhfsimError: an unknown field, or a value that is no degree.
    """
    texts = {role: given[f"{role}_layout"] for role in OPTIONS}
    return {role: fixed_fields(role, text, OPTIONS[role]) for role, text in texts.items() if text is not None}


def fixed_fields(role: str, text: str, option: str) -> Fields:
    """Field -> value of one role from `tp=8,pp=2`; errors name `option`."""
    allowed = ROLLOUT_FIELDS if role == "rollout" else ROLE_FIELDS
    found: Fields = {}
    for name, value in parse_pairs(text, option).items():
        if name not in allowed:
            raise unknown_name("layout field", name[:40], allowed, place=COMMAND_LINE)
        found[name] = _value(option, name, value)
    return found


def _value(option: str, name: str, value: str) -> int | str:
    if name == "recompute":
        return OneOf("recompute", get_args(Recompute)).read(value)
    low, high = (0, 3) if name == "zero" else (1, MAX_DEGREE)
    return Whole(low, high).read(value, f"{option} {name}")


# --- checks -----------------------------------------------------------------------------------------


def check_layouts(request: Request, models: Models) -> None:
    """Refuse a fixed layout that cannot exist on this cluster, with this model or this backend.

    Raises:
        RlhfsimError: the first rule that is broken.
    """
    for role, fields in request.fix.items():
        model = models.actor if role == "rollout" else getattr(models, role)
        if model is None or (role == "rollout" and not request.workload.generates):
            raise bad_option(
                f"{OPTIONS[role]}: {request.workload.algorithm} has no {role} here",
                f"leave out {OPTIONS[role]}",
            )
        with on_command_line(f"{OPTIONS[role]}: "):
            _check_model(model, fields)
            _check_hardware(request, role, fields)
            if role != "rollout":
                _check_backend(request, fields)
            _check_pools(request, models, role, fields)


def _degree(fields: Mapping[str, int | str], name: str) -> int:
    return int(fields.get(name, 1))


def _check_model(model: ModelSpec, fields: Mapping[str, int | str]) -> None:
    tp, pp, ep, vp = (_degree(fields, name) for name in ("tp", "pp", "ep", "vp"))
    model.check_tp(tp)
    layers = model.num_layers
    if not splits_layers(model, pp) or (vp > 1 and layers % (pp * vp)):
        raise RlhfsimError(
            "pp-does-not-divide-layers",
            f"pipeline parallelism {pp}{f' times vp {vp}' if vp > 1 else ''} does not divide the {layers} layers of {model.name}",
            help=f"use pp of {', '.join(str(p) for p in range(1, min(layers, 32) + 1) if splits_layers(model, p) and (vp == 1 or layers % (p * vp) == 0))}",
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


def _check_hardware(request: Request, role: str, fields: Mapping[str, int | str]) -> None:
    pools = request.cluster.node_groups
    pool = pools[-1] if role == "rollout" else pools[0]
    tp, domain = _degree(fields, "tp"), domain_of(pool)
    if tp > domain:
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


def _check_backend(request: Request, fields: Mapping[str, int | str]) -> None:
    wide = max(_degree(fields, "dp"), request.cluster.node_group.gpus // ranks(fields))
    degrees = {k: v for k, v in fields.items() if k != "dp"}
    base = Layout(dp=wide, **cast(dict[str, Any], {"recompute": "none", **degrees}))
    tried = [base] if "zero" in fields else [replace(base, zero=z) for z in (1, 3, 2, 0)]
    broken = [violation(request.backend, layout) for layout in tried]
    if all(broken):
        raise RlhfsimError(
            "backend-cannot-run", str(broken[0]), help="choose another layout, or another --backend"
        )


def _check_pools(request: Request, models: Models, role: str, fields: Mapping[str, int | str]) -> None:
    """Some way to share the GPUs must give the role a pool that the layout divides."""
    sizes = sorted(set(_pool_sizes(request, models, role)))
    unit = ranks(fields)
    good = [s for s in sizes if s % unit == 0 and fields.get("dp", s // unit) == s // unit]
    if sizes and not good:
        dp = f" and dp={fields['dp']}" if "dp" in fields else ""
        pools = (
            f"its pool has {sizes[0]}"
            if len(sizes) == 1
            else f"its pool may have {', '.join(map(str, sizes[:8]))}"
        )
        raise RlhfsimError(
            "layout-does-not-divide",
            f"tp x pp x cp = {unit}{dp} does not fill the GPUs evenly: {pools}",
            help="choose degrees whose product divides the GPUs",
        )


def _pool_sizes(request: Request, models: Models, role: str) -> Iterator[int]:
    for partition in partitions(request, models):
        index = partition.pool_of(role)
        if index is not None:
            yield from set(splits(request, partition)[:, index].tolist())
