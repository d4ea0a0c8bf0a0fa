"""The verdict on a question: refused, with an error, or a reason why it does not fit, or none.

Every command asks here. What a framework does not run is refused (exit code 2), whatever the memory; what is
left fits, or does not by pool, phase and bytes (exit code 1).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.refusal import check_runs
from rlhfsim.plan import Plan
from rlhfsim.search.candidates import Candidate
from rlhfsim.search.fixed_layouts import check_layout, pool_sizes
from rlhfsim.search.request import Request
from rlhfsim.search.space import partitions, roles_of, splits
from rlhfsim.specs.frameworks.features import APART
from rlhfsim.specs.frameworks.refusal import not_run
from rlhfsim.specs.frameworks.runs import ANY, LENDS, OWN, Lacks, Runs, frameworks, runs_of
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.model.roles import Models, models_of
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
from rlhfsim.step.measured import compared
from rlhfsim.what_if.engine import Question, good, variants
from rlhfsim.what_if.estimate import priced_placement

ASKED: Mapping[str, str] = {
    "residency=swapped": "reference swapped in place of the actor",
    "residency=recreated": "roles created anew for each call",
    "offload_optimizer=nvme": "offload to NVMe",
    "offload_params=nvme": "offload to NVMe",
}
"""What is fixed of a role -> the feature of a framework that it is."""


def check_question(request: Request) -> None:
    """Refuse a question that leaves no plan, whatever the memory.

    Raises:
        RlhfsimError: the framework does not run what is asked, a layout that cannot exist, or no way to share
            the GPUs.
    """
    if (error := refusal(request)) is not None:
        raise error


def aside(question: Question) -> Candidate | None:
    """A good plan of a question; None where it is refused or nothing fits."""
    return None if refusal(question.request) else good(question)


def check_plan(plan: Plan, cluster: Cluster) -> None:
    """Refuse a plan that its own framework does not run.

    Raises:
        RlhfsimError: what it does not run, and who does.
    """
    runs = runs_of(plan.framework)
    if runs is not None:
        check_runs(plan, runs, cluster.vendors)


def rejection(plan: Plan, cluster: Cluster) -> str | None:
    """Why a plan does not fit, by pool, phase and bytes; None where it does."""
    return priced_placement(plan.placement, plan.workload, cluster).memory.rejected_by


# --- questions ----------------------------------------------------------------------------------------


def refusal(request: Request, *, suggest: bool = True) -> RlhfsimError | None:
    """Why a question is refused, or None; `suggest`: with the frameworks that take it."""
    models = models_of(request.workload)
    roles = roles_of(request, models)
    bound = {x.role: x.text for x in request.limits if x.field != "hardware"}
    for role, text in {**{role: role for role in request.fix}, **bound}.items():
        if role not in roles:
            message = f"--fix {text}: {request.workload.algorithm} has no {role} here"
            return RlhfsimError("bad-option", message, help="leave it out")
    runs = request.runs
    if runs is not None and (lacks := _lacks(request, models)) is not None:
        return not_run(runs, [lacks], _takers(request) if suggest else [])
    try:
        for role, fields in request.fix.items():
            check_layout(request, models, role, fields)
    except RlhfsimError as error:
        return error
    return _empty(request, models, suggest=suggest)


def _lacks(request: Request, models: Models) -> Lacks | None:
    """The first thing that is asked for and that the framework does not run."""
    assert request.runs is not None
    fixed = (ASKED.get(x.text.removeprefix(f"{x.role}.")) for x in request.limits)
    apart = bool(request.fix.get("rollout", {}).get("prefill"))
    named = [*filter(None, fixed), *[LENDS] * ("lend" in request.switches), *[APART] * apart]
    found = (lacks for name in named if (lacks := request.runs.lacks_feature(name)))
    return (
        next(found, None)
        or request.runs.lacks_workload(request.workload, request.backend)
        or request.runs.lacks_kinds(models.actor, request.backend, generates=request.workload.generates)
    )


def _takers(request: Request) -> list[str]:
    """Options under which the same question is not refused, each asked again."""
    found: dict[str | None, str] = {}
    for option, other in _elsewhere(request):
        if other.framework not in found and refusal(other, suggest=False) is None:
            found[other.framework] = option
    return list(found.values())


def _elsewhere(request: Request) -> Iterator[tuple[str, Request]]:
    """The question put to every other framework, with each of its backends, that of the question first."""
    own = request.runs.name if request.runs else None
    for runs in frameworks():
        if runs.name == own or runs.lacks_hardware(request.cluster.vendors):
            continue
        for backend in sorted(runs.trainers, key=lambda name: name != request.backend):
            option = f"--framework {runs.name} --backend {backend}"
            yield option, put_to(request, runs.name, backend)
    yield f"--framework {ANY} --backend {request.backend}", put_to(request, ANY, request.backend)


def put_to(request: Request, framework: str | None, backend: Backend) -> Request:
    """The question as it reads with other `--framework` and `--backend`."""
    work = request.workload
    if work.old_logprobs == "reused":  # as the framework of the question does, not as was asked
        work = replace(work, old_logprobs="recompute")
    other = replace(request, workload=work, framework=framework, backend=backend, backend_by="option")
    pads, padded = (r.framework is not None and bool(r.runs and r.runs.pads) for r in (other, request))
    if pads == padded:
        return other
    return replace(other, workload=replace(other.workload, packing=not pads))


def put_to_each_backend(request: Request, runs: Runs) -> Iterator[Request]:
    """The question put to a framework, once for each backend with which it does not refuse it.

    A trainer that may lend its GPUs need not.
    """
    if LENDS not in runs.features:
        request = replace(request, allow=request.allow - {"lend"})
    for backend in runs.trainers:
        try:
            asked = put_to(request, runs.name, backend)
        except RlhfsimError:  # it does not run these GPUs
            continue
        if refusal(asked, suggest=False) is None:
            yield asked


def measured_frameworks() -> tuple[Runs, ...]:
    """Frameworks other than ours whose published runs were compared, the most often compared first."""
    runs = [x for x in frameworks() if x.name != OWN and compared(x.name)]
    return tuple(sorted(runs, key=lambda x: -len(compared(x.name))))


NEAR = ("naive", "smart", "hybrid", "lend")
"""Architectures of which the rollout has GPUs that train."""


def production(request: Request) -> Iterator[Request]:
    """The question put to every production framework whose runs were compared."""
    for runs in measured_frameworks():
        yield from put_to_each_backend(request, runs)


def _empty(request: Request, models: Models, *, suggest: bool) -> RlhfsimError | None:
    """Why no way to share the GPUs is left, or None."""
    shared = [
        partition
        for work in variants(request)
        for partition in partitions(replace(request, workload=work), models)
    ]
    if not shared:
        message = f"no way to share the GPUs is left by {_narrowed_by(request)}"
        return RlhfsimError("bad-option", message, help=_why_empty(request, suggest=suggest))
    if any(len(splits(request, partition)) for partition in shared):
        return None
    limits = tuple(x for x in request.limits if x.field != "gpus")
    free = replace(request, limits=limits, max_gpus_per_role=None)
    of = next((x.role for x in request.limits if x.field == "gpus"), roles_of(request, models)[0])
    sizes = pool_sizes(free, models, of)
    listed = ", ".join(map(str, sizes[:12])) + (", ..." if len(sizes) > 12 else "")
    return RlhfsimError(
        "bad-option",
        f"no split of the GPUs is left by {_narrowed_by(request)}",
        help=f"the pool of the {of} may have {listed} GPUs",
    )


def _narrowed_by(request: Request) -> str:
    """The options that narrow who shares GPUs with whom."""
    parts = [f"--architecture {request.architecture}"] if request.architecture else []
    parts += [f"--weight-path {request.weight_path}"] if request.weight_path else []
    parts += [f"--forbid {','.join(sorted(request.forbid))}"] if request.forbid else []
    parts += [f"--fix '{x.text}'" for x in request.limits if x.field == "gpus"]
    parts += [f"--max-gpus-per-role {request.max_gpus_per_role}"] if request.max_gpus_per_role else []
    return " and ".join(parts) or "these choices"


def _why_empty(request: Request, *, suggest: bool) -> str:
    path = request.weight_path
    rules = WEIGHT_PATHS[path] if path else None
    if rules and rules.adapters_only and request.workload.lora is None:
        return f"weight path {path} moves adapters only: add --allow lora"
    if request.architecture in NEAR and any(group.wan for group in request.cluster.node_groups):
        return f"{request.architecture} shares GPUs, and the rollout is in another region: ask for async"
    takers = _takers(request) if suggest else []
    if request.runs is not None and takers:
        return f"{request.runs.title} runs no such plan; these do: {', '.join(takers)}"
    if rules and rules.pools != "any":
        where = "the same GPUs" if rules.pools == "one" else "GPUs of their own"
        return f"weight path {path} needs actor and rollout on {where}"
    spare = list(_to_leave_out(request)) if suggest else []
    return f"leave out {' or '.join(spare)}" if spare else "drop one of these"


def _to_leave_out(request: Request) -> Iterator[str]:
    """Options without which alone the question is not refused, each asked again."""
    free: dict[str, Any] = dict.fromkeys(("architecture", "weight_path", "max_gpus_per_role"))
    for name, value in {**free, "forbid": frozenset()}.items():
        if getattr(request, name) and refusal(replace(request, **{name: value}), suggest=False) is None:
            yield f"--{name.replace('_', '-')}"


CUT = ("tp", "pp", "cp", "ep", "etp")
"""Degrees that cut a model, as `--fix` names them."""
PACKED, COUNTED = ("pack_tokens", "score_pack_tokens"), ("micro_batch", "score_micro_batch")
"""Sizes of a micro-batch in tokens, and in samples."""


def rules_broken(request: Request) -> Iterator[str]:
    """Rules of the framework's configuration that the request goes against, a sentence each."""
    runs = request.runs
    if runs is None:
        return
    yield from contradictions(request)
    moved = runs.says.sharing.between.get("actor", ("stays",))
    if runs.says.moves_with and "stays" not in moved and "offload" in request.left_out:
        states = "weights and optimizer states" if moved == ("leaves",) else "optimizer states"
        other = "another role" if runs.says.moves_with == "any" else "the rollout"
        yield (
            f"{runs.title} moves {states} of a policy that shares GPUs with {other} to the host, whatever "
            "its configuration says: without offload only plans on GPUs of their own compete"
        )


def contradictions(request: Request) -> Iterator[str]:
    """Values that are fixed for roles of which one key of the framework says the same, a sentence each."""
    if request.runs is None:
        return
    for same in request.runs.says.alike(request.backend):
        fixed = {role: request.fix.get(role, {}) for role in same.roles}
        one = f"one {'process' if same.aspect == 'groups' else 'key'} of {request.runs.title}"
        for degree in CUT if same.aspect in ("cut", "groups") else ():
            given = {role: values[degree] for role, values in fixed.items() if degree in values}
            if len(set(given.values())) > 1:
                roles, asked = " and ".join(given), (f"{role}.{degree}={v}" for role, v in given.items())
                yield f"{one} has {degree} for {roles}: {', '.join(asked)} cannot be told"
        if same.aspect in ("scoring", "training"):
            tokens, samples = (next(_sizes(fixed, names), None) for names in (PACKED, COUNTED))
            if tokens and samples:
                roles = ", ".join(same.roles)
                yield f"{one} sizes micro-batches of {roles}: {tokens} is in tokens, {samples} in samples"


def _sizes(fixed: Mapping[str, Mapping[str, int | str]], names: Collection[str]) -> Iterator[str]:
    """What is fixed of some roles under some names, but for single samples, which packs are too."""
    for role, values in fixed.items():
        yield from (f"{role}.{name}={v}" for name, v in values.items() if name in names and int(v) > 1)
