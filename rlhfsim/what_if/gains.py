"""What the choices left out would bring: each switch and each other backend, on the pools of the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rlhfsim.search.branch_and_bound import Search
from rlhfsim.search.candidates import Candidate
from rlhfsim.search.parallel import mapped
from rlhfsim.search.pricer import Pricer
from rlhfsim.search.request import SWITCHES, Request, switched
from rlhfsim.search.space import ROLES, Partition
from rlhfsim.specs.model.roles import Models, models_of
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.placement import Placement, RolePlacement

TOUCHED: dict[str, frozenset[str]] = {
    "adam8bit": frozenset({"actor", "critic"}),
    "fp8": frozenset({"rollout"}),
    "lora": frozenset({"actor", "reference", "rollout"}),
    "rollout-logprobs": frozenset({"actor"}),
}
"""Roles whose price a switch changes; with LoRA the reference shares the weights of the actor."""
NEED_ROLLOUT = ("async", "fp8", "rollout-logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What one choice that does not compete would bring."""

    name: str
    """Switch or backend."""
    meaning: str
    seconds: float | None
    """Best step with it; None when nothing fits."""
    saved: float | None
    """Share of the chosen step that it saves; negative when it is slower."""
    launchable: bool


def gains(request: Request, models: Models, pricer: Pricer, chosen: Candidate) -> list[Gain]:
    """A good step with each switch or backend that does not compete: met by a warm start, not proven.

    A switch that changes the workload and a backend are searched on the pools of the chosen plan;
    `async` on a rollout pool beside one for everything else.
    """
    online = request.workload.generates
    names = [
        n
        for n in sorted(SWITCHES)
        if n not in request.switches | request.forbid and (online or n not in NEED_ROLLOUT)
    ]
    backends = [b for b in BACKENDS if b != request.backend]
    slowest_first = [*reversed(backends), *names]  # so that the cores finish together
    found = dict(
        zip(
            slowest_first,
            mapped(lambda n: _gain(n, request, models, pricer, chosen), slowest_first),
            strict=True,
        )
    )
    return [found[name] for name in (*names, *backends)]


def _gain(name: str, request: Request, models: Models, pricer: Pricer, chosen: Candidate) -> Gain:
    launchable, meaning = True, SWITCHES.get(name, "")
    search = _search(name, request, models, pricer, chosen.placement)
    if name in BACKENDS:
        rules = BACKENDS[name]
        meaning, launchable = f"training by {rules.title}", rules.launchable
    best = search.first()
    seconds = best.seconds if best is not None else None
    saved = 1 - seconds / chosen.seconds if seconds is not None else None
    return Gain(name=name, meaning=meaning, seconds=seconds, saved=saved, launchable=launchable)


def _search(name: str, request: Request, models: Models, pricer: Pricer, like: Placement) -> Search:
    if name == "async":
        changed = replace(request, allow=request.allow | {name}, architecture="async")
        return Search(changed, models, pricer.again(changed, models, frozenset({"rollout"})), only=_two_pools)
    only, sizes = _pools_of(like)
    if name in BACKENDS:
        lean = request.forbid | (frozenset() if _offloads(like) else {"offload"})
        changed = replace(request, backend=name, fix={}, limits=request.hardware_limits, forbid=lean)
        return Search(changed, models, only=only, sizes=sizes)
    work = switched(request.workload, frozenset({name}))
    changed = replace(request, allow=request.allow | {name}, workload=work)
    again = models_of(work)
    return Search(changed, again, pricer.again(changed, again, TOUCHED[name]), only=only, sizes=sizes)


def _two_pools(partition: Partition) -> bool:
    return len(partition.groups) == 2


def _pools_of(like: Placement) -> tuple[Callable[[Partition], bool], tuple[int, ...]]:
    """Partitions that share the GPUs as a plan does, and the sizes of its pools."""
    homes = {name: role.pool for name, role in like.roles.items()}
    present = [s for s in ROLES if s in homes]
    order = tuple(dict.fromkeys(homes[s] for s in present))
    groups = {frozenset(s for s in present if homes[s] == pool) for pool in order}
    architecture = like.architecture

    def same(partition: Partition) -> bool:
        return {frozenset(g) for g in partition.groups} == groups and architecture in partition.labels

    return same, tuple(like.pool(pool).gpus for pool in order)


def _offloads(placement: Placement) -> bool:
    """Whether a plan moves anything trained or scored to the host."""
    roles = [s for s in placement.roles.values() if isinstance(s, RolePlacement)]
    return any(
        s.residency != "resident" or s.offload_between or s.layout.offload_optimizer != "none" for s in roles
    )
