"""From a file or from options to one priced plan; shared by `rlhfsim estimate` and `rlhfsim memory`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from click.core import ParameterSource

from rlhfsim.api import cluster_of, estimate, estimate_file, stale_profiles
from rlhfsim.api import design as search_design
from rlhfsim.cli import completion
from rlhfsim.cli.inputs import (
    backend_option,
    build_cluster,
    build_workload,
    input_options,
    json_option,
    on_command_line,
)
from rlhfsim.cli.params import Number, OneOf, Several, bad_option
from rlhfsim.cli.remedies import remedy
from rlhfsim.cli.roles import check_layouts, fixed_layouts, ranks, role_options
from rlhfsim.errors import RlhfsimError
from rlhfsim.memory.ledger import ledger
from rlhfsim.plan import Plan, read_plan
from rlhfsim.search.request import SWITCHES, Request
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.model.roles import Models, models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Architecture,
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.scenario import system_names
from rlhfsim.step.region import warnings
from rlhfsim.what_if.nothing_fits import nearest_change

F = TypeVar("F", bound=Callable[..., Any])
FREE_WITH_FILE = ("file", "price", "as_json", "out")
"""Parameters that make sense beside a file."""
MAX_RELEASED = 3
"""Fixed values that are tried one by one when nothing fits; each costs a search."""
_GENTLE = ("micro_batch", "recompute", "zero", "vp", "cp", "ep", "dp", "pp", "tp")
"""Order in which fixed values are released."""
_PATH: dict[str, WeightPath] = {
    "naive": "host",
    "smart": "host",
    "hybrid": "ipc",
    "disaggregated": "broadcast",
    "async": "broadcast",
}
NOT_FOUND = "more GPUs, a GPU with more memory, or a smaller model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One priced plan and whether it can run."""

    plan: Plan | None
    """None when nothing fits and no example could be priced."""
    rejected_by: str | None
    """What does not fit, in words; None when all does."""
    remedy: str | None
    """The smallest change that would fit."""
    notes: tuple[str, ...] = ()
    far: tuple[str, ...] = ()
    """Phases far from the runs that their profile was calibrated on."""

    @property
    def fits(self) -> bool:
        """Whether the plan can run."""
        return self.rejected_by is None


def plan_options(command: F) -> F:
    """FILE, or a cluster, a workload and layouts."""
    architectures = get_args(Architecture)
    options = [
        click.argument("file", required=False, shell_complete=completion.systems),
        input_options,
        backend_option,
        click.option(
            "--architecture",
            type=OneOf("architecture", architectures),
            help=f"{', '.join(architectures)}; default: the fastest.",
        ),
        role_options,
        click.option(
            "--allow",
            type=Several("switch", SWITCHES),
            default="",
            help=f"May be used though they change what is learnt: {', '.join(SWITCHES)}.",
        ),
        click.option(
            "--max-staleness",
            type=Number(1, 64),
            default=1,
            show_default=True,
            help="Most policy versions of lag when async.",
        ),
        json_option,
    ]
    for option in reversed(options):
        command = option(command)
    return command


def planned(ctx: click.Context, given: Mapping[str, Any]) -> Planned:
    """The plan that the command line asks about.

    Raises:
        RlhfsimError: bad input.
    """
    if given["file"] is not None:
        _alone(ctx)
        return from_file(given["file"], given["price"])
    if given["gpus"] is None or given["model"] is None:
        missing = "--gpus" if given["gpus"] is None else "--model"
        raise bad_option(
            f"{missing} is missing",
            f"as in --gpus 64 --model 70b; or name a file (plan.json, a scenario) or a system: {', '.join(system_names())}",
        )
    return from_request(request_of(given))


def _alone(ctx: click.Context) -> None:
    for param in ctx.command.params:
        name = param.name or ""
        if name not in FREE_WITH_FILE and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise bad_option(
                f"{param.opts[0]} and a FILE: the file says it already",
                f"leave out {param.opts[0]}, or change the file",
            )


def from_file(file: str, price: float | None) -> Planned:
    """A scenario, a shipped system or a plan.json, priced now."""
    with on_command_line():
        plan = estimate_file(file, price=price)
    return judged(plan, cluster_of(plan), profile_notes(file))


def profile_notes(file: str) -> tuple[str, ...]:
    """Which profiles of a plan.json have changed since it was made."""
    if Path(file).suffix != ".json":
        return ()
    return tuple(
        f"profile {name} is not the one this plan was made with (changed since, or --price was given)"
        for name in stale_profiles(read_plan(Path(file)))
    )


def judged(plan: Plan, cluster: Cluster, notes: tuple[str, ...] = ()) -> Planned:
    """A given plan with the verdict of its ledger."""
    reason = ledger(models_of(plan.workload), plan.placement, plan.workload, cluster).rejected_by
    far = warnings(plan, [pool.profile for pool in cluster.node_groups])
    if reason is None:
        return Planned(plan=plan, rejected_by=None, remedy=None, notes=notes, far=far)
    help = remedy(plan.placement, plan.workload, cluster) or NOT_FOUND
    return Planned(plan=plan, rejected_by=reason, remedy=help, notes=notes, far=far)


# --- from options -----------------------------------------------------------------------------------


def request_of(given: Mapping[str, Any]) -> Request:
    """The design question with what the options fix.

    Raises:
        RlhfsimError: a bad value, or a layout that cannot exist.
    """
    cluster, workload = build_cluster(given), build_workload(given)
    wanted = given["architecture"]
    allow = given["allow"] | ({"async"} if wanted == "async" else set())
    with on_command_line():
        request = Request(
            cluster=cluster,
            workload=workload,
            backend=given["backend"],
            allow=frozenset(allow),
            fix=fixed_layouts(given),
            architecture=wanted,
            max_staleness=given["max_staleness"],
        )
    check_layouts(request, models_of(workload))
    return request


def from_request(request: Request) -> Planned:
    """The best plan that keeps what is fixed; or, when nothing fits, an example of what does not."""
    found = search_design(request, explain=False)
    if found.chosen is not None:
        far = warnings(found.chosen, [pool.profile for pool in request.cluster.node_groups])
        return Planned(plan=found.chosen, rejected_by=None, remedy=None, far=far)
    models = models_of(request.workload)
    help = _release(request) or _relax(request, models)
    example = _example(request, models)
    if example is not None:
        verdict = judged(example, request.cluster)
        return Planned(
            plan=example,
            rejected_by=verdict.rejected_by or found.shortage or "no plan with these choices fits",
            remedy=help,
        )
    return Planned(plan=None, rejected_by=found.shortage or _refused(found.refused), remedy=help)


def _refused(refused: Mapping[str, int]) -> str:
    worst = max(refused, key=lambda r: refused[r], default=None)
    return worst or "no way to share these GPUs is left"


def _release(request: Request) -> str | None:
    """The first single fixed value whose release lets something fit, and what it then becomes."""
    choices = [(s, f) for s, fields in request.fix.items() for f in fields]
    for role, name in sorted(choices, key=lambda c: _GENTLE.index(c[1]))[:MAX_RELEASED]:
        fields = {k: v for k, v in request.fix[role].items() if k != name}
        chosen = _fitting(replace(request, fix={**request.fix, role: fields}))
        if chosen is not None:
            value = getattr(chosen.placement.roles[role].layout, name)
            return f"{name}={value} for {role} instead of {request.fix[role][name]}"
    return None


def _fitting(request: Request) -> Plan | None:
    return search_design(request, explain=False).chosen


def _relax(request: Request, models: Models) -> str:
    """What lets something fit beyond a single value: layouts or architecture left open, then the rest."""
    open_layouts = replace(request, fix={})
    open_all = replace(open_layouts, architecture=None)
    if request.fix and (chosen := _fitting(open_layouts)) is not None:
        return f"other layouts, such as {chosen.placement.actor.layout.label} for the actor"
    if request.architecture and (chosen := _fitting(open_all)) is not None:
        return f"--architecture {chosen.architecture}"
    change = nearest_change(open_all)
    freed = " with layouts and architecture left open" if request.fix or request.architecture else ""
    return f"{change}{freed}" if change else NOT_FOUND


def _example(request: Request, models: Models) -> Plan | None:
    """A plan of the wanted architecture with the fixed layouts, to show what does not fit."""
    if len(request.cluster.node_groups) > 1:
        return None
    try:
        placement = _placement(request, models)
        return estimate(placement, request.workload, request.cluster)
    except RlhfsimError:
        return None


def _placement(request: Request, models: Models) -> Placement:
    """One pool, or halves for rollout and the rest; all that may wait on the host does."""
    total, wanted = request.cluster.node_group.gpus, request.architecture or "hybrid"
    apart = wanted in ("disaggregated", "async") and total > 1
    train = ResourcePool(name="train" if apart else "all", gpus=total - total // 2 if apart else total)
    home = ResourcePool(name="rollout", start=train.gpus, gpus=total // 2) if apart else train
    away = wanted != "naive"

    def role(name: str) -> RolePlacement | None:
        if getattr(models, name) is None:
            return None
        trained = name in ("actor", "critic")
        layout = _layout(request, name, train.gpus)
        moved = away and not trained
        return RolePlacement(
            pool=train.name,
            layout=layout,
            offload_between=away and trained,
            residency="offloaded" if moved else "resident",
        )

    rollout = None
    if request.workload.generates:
        fields: dict[str, Any] = {"tp": min(8, home.gpus), **request.fix.get("rollout", {})}
        engine = RolloutLayout(
            **fields, dp=home.gpus // ranks(fields), memory_utilization=0.9 if apart else 0.6
        )
        rollout = RolloutPlacement(pool=home.name, layout=engine, sleep=2 if away and not apart else 0)
    actor = role("actor")
    assert actor is not None
    return Placement(
        pools=(train, home) if apart else (train,),
        actor=actor,
        rollout=rollout,
        backend=request.backend,
        weight_path=_PATH[wanted] if rollout else "none",
        critic=role("critic"),
        reference=role("reference"),
        reward=role("reward"),
        schedule=Schedule(staleness=1 if wanted == "async" else 0),
    )


def _layout(request: Request, name: str, gpus: int) -> Layout:
    """The fixed layout of a role, or the actor's; micro-batch 1 and full sharding where it can be."""
    fields: dict[str, Any] = {**request.fix.get("actor", {}), **request.fix.get(name, {})}
    sharded = request.backend == "fsdp2" or (request.backend == "deepspeed" and ranks(fields) == 1)
    fields.setdefault("micro_batch", 1)
    fields.setdefault("zero", 3 if sharded else 1)
    return Layout(**{**fields, "dp": gpus // ranks(fields)})
