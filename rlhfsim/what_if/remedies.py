"""What makes something fit: the gentlest of the changes that are tried, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf
from typing import Any

from rlhfsim.frameworks.runs import frameworks
from rlhfsim.memory.ledger import ledger
from rlhfsim.search.branch_and_bound import SearchResult
from rlhfsim.search.parallel import mapped
from rlhfsim.search.request import Request, switched
from rlhfsim.specs.hardware.hardware import Cluster, NodeGroup
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.placement.backends import BACKENDS, Backend, violation
from rlhfsim.specs.placement.placement import Placement, RolePlacement
from rlhfsim.specs.workload.dataflow import TRAINED
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.step.measured import memory_doubt
from rlhfsim.step.prediction import usd_per_step
from rlhfsim.units import format
from rlhfsim.what_if.engine import Change, Question, first_that, good, setting

MORE_GPUS = (2, 3, 4, 6, 8, 16, 32, 64)
SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Shares of a GPU's memory that a rollout engine is left with."""
MAX_PAIRS = 300
RISKIEST = 0.3
"""Largest risk of running out of memory that a request may carry."""
LARGER = ("h200_sxm", "b200_sxm", "b300_sxm", "mi300x", "mi325x", "mi355x")
"""Kinds of GPU with more memory than most, by size."""
LIKELY = 0.5
"""Risk of running out of memory from which a plan does not count as fitting."""


# --- a request that nothing fits --------------------------------------------------------------------


def shortage(result: SearchResult) -> str | None:
    """What the plan that misses memory by least lacks, in words; None where none was looked at."""
    if result.nearest is None:
        return None
    skeleton, pool, lacking = result.nearest
    if not 0 < lacking < inf:
        return None
    kinds = " or ".join(sorted(skeleton.partition.labels))
    return f"the nearest plan ({kinds}) misses {format(lacking, 'byte')} per GPU in pool {pool}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change with which something fits, and a good plan under it (not proven)."""

    change: str
    step_s: float
    usd_per_step: float | None
    other_work: bool
    """Whether the step then trains or rewards otherwise."""


def remedies(request: Request) -> tuple[Remedy, ...]:
    """The first change of every family with which something fits, the gentlest family first."""
    question = Question(request=request)
    families = [family for family in map(list, _families(request)) if family]
    answers = mapped(lambda family: _first_good(question, family), families)
    return tuple(answer for answer in answers if answer is not None)


def _first_good(question: Question, family: list[Change]) -> Remedy | None:
    for change in family:
        there = change.apply(question)
        if (met := good(there)) is not None:
            request, asked = there.request, question.request.workload
            return Remedy(
                change=change.name,
                step_s=met.seconds,
                usd_per_step=usd_per_step(request.cluster, met.seconds, request.price),
                other_work=(request.workload.lora, request.workload.reward) != (asked.lora, asked.reward),
            )
    return None


def nearest_change(request: Request) -> str | None:
    """The smallest change with which something fits: a restriction dropped, a switch, more GPUs."""
    changes = (change for family in _families(request) for change in family)
    remedy = first_that(Question(request=request), changes, good)
    return remedy[0] if remedy else None


def _families(request: Request) -> Iterator[Iterator[Change]]:
    yield _restrictions(request)
    yield _others(request)
    for name in ("adam8bit", "lora", *(["fp8"] if request.workload.generates else [])):
        if name not in request.switches:
            work = switched(request.workload, frozenset({name}))
            yield iter([setting(f"--allow {name}", {"request.workload": work})])
    if request.workload.has_reward_model:
        rules = replace(request.workload, reward=Reward(rules=request.workload.reward.rules or Rules()))
        text = "--rules seconds_per_sample=5ms in place of the reward model"
        yield iter([setting(text, {"request.workload": rules})])
    yield _more_gpus(request.cluster)
    yield _larger_gpus(request.cluster)
    if request.max_oom < RISKIEST:
        yield iter([setting(f"--max-oom {RISKIEST:g}", {"request.max_oom": RISKIEST})])


def _restrictions(request: Request) -> Iterator[Change]:
    for name in sorted(request.forbid):
        yield setting(f"allow {name} again", {"request.forbid": request.forbid - {name}})
    for role in request.fix:
        others = {k: v for k, v in request.fix.items() if k != role}
        yield setting(f"do not fix the layout of the {role}", {"request.fix": others})
    for limit in (x for x in request.limits if x not in request.hardware_limits):
        left = tuple(x for x in request.limits if x is not limit)
        yield setting(f"do not ask for {limit.text}", {"request.limits": left})
    if request.max_memory is not None:
        yield setting("more memory on a GPU", {"request.max_memory": None})
    free: dict[str, Any] = {
        "fix": {},
        "limits": request.hardware_limits,
        "forbid": frozenset(),
        **dict.fromkeys(("architecture", "weight_path", "max_gpus_per_role", "max_memory")),
    }
    if any(getattr(request, name) != value for name, value in free.items()):
        yield setting("free every choice", {f"request.{name}": value for name, value in free.items()})


def _others(request: Request) -> Iterator[Change]:
    """Another backend or framework."""
    for backend in BACKENDS:
        if backend != request.backend:
            yield _trained_by(f"--backend {backend}", backend, None)
    for runs in frameworks():
        if runs is not request.runs:
            yield _trained_by(f"--framework {runs.name}", next(iter(runs.trainers)), runs.name)


def _trained_by(name: str, backend: Backend, framework: str | None) -> Change:
    def trained(request: Request) -> Request:
        return replace(request, backend=backend, framework=framework, fix={})

    return setting(name, {"request": trained})


def _more_gpus(cluster: Cluster) -> Iterator[Change]:
    pool = cluster.node_group
    if pool.gpus > pool.gpus_per_node and pool.gpus_per_node < pool.profile.node.gpus:
        return
    for factor in MORE_GPUS:
        groups = (sized(pool, pool.gpus * factor, pool.profile.node.gpus), *cluster.node_groups[1:])
        yield setting(f"--gpus {groups[0].gpus}", {"request.cluster.node_groups": groups})


def _larger_gpus(cluster: Cluster) -> Iterator[Change]:
    """As many GPUs with more memory, of the same vendor."""
    pool = cluster.node_group
    if len(cluster.node_groups) > 1:
        return
    for name in LARGER:
        group = node_group(name, pool.gpus)
        profile = group.profile
        if profile.vendor == pool.profile.vendor and profile.memory.value > pool.profile.memory.value:
            yield setting(f"--gpu {profile.aliases[0]}", {"request.cluster.node_groups": (group,)})


def sized(pool: NodeGroup, gpus: int, per_node: int) -> NodeGroup:
    """A node group of so many GPUs, in nodes of up to `per_node`."""
    return replace(pool, gpus=gpus, gpus_per_node=min(gpus, per_node))


# --- a placement that does not fit ------------------------------------------------------------------


def remedy(placement: Placement, workload: Workload, cluster: Cluster) -> str | None:
    """The smallest change of the placement with which it fits, or pair of them; None when none does."""
    question = Question(request=Request(cluster=cluster, workload=workload), placement=placement)
    edits = list(_edits(placement))
    pairs = [_both(a, b) for a, b in list(combinations(edits, 2))[:MAX_PAIRS]]
    fitting = first_that(question, [*edits, *pairs], _fits)
    return fitting[0] if fitting else None


def _both(one: Change, other: Change) -> Change:
    return Change(name=f"{one.name} and {other.name}", apply=lambda q: other.apply(one.apply(q)))


def _fits(question: Question) -> bool | None:
    assert question.placement is not None
    request = question.request
    doubt = memory_doubt(question.models, request.backend, request.workload, request.cluster)
    memory = ledger(question.models, question.placement, request.workload, request.cluster, doubt=doubt)
    return True if memory.fits and memory.probability_out_of_memory < LIKELY else None


def _edits(placement: Placement) -> Iterator[Change]:
    """Gentle first: memory share, micro-batch, recompute, moving states out, ZeRO, Adam on the host."""
    roles = {n: s for n, s in placement.roles.items() if isinstance(s, RolePlacement)}
    rollout = placement.rollout
    if rollout is not None:
        for share in SHARES:
            if share < rollout.layout.memory_utilization:
                words = f"memory_utilization {share} for the rollout"
                yield _edit(words, "rollout.layout.memory_utilization", share)
    for name, role in roles.items():
        if role.layout.micro_batch > 1:
            yield _edit(f"micro_batch 1 for {name}", f"{name}.layout.micro_batch", 1)
        if role.layout.pack_tokens:
            half = max(1, role.layout.pack_tokens // 2)
            yield _edit(f"pack_tokens {half} for {name}", f"{name}.layout.pack_tokens", half)
    for name, role in roles.items():
        trained = name in TRAINED
        if trained and role.layout.recompute != "full":
            yield _edit(f"recompute full for {name}", f"{name}.layout.recompute", "full")
        if not trained and role.residency == "resident":
            yield _edit(f"weights of {name} on the host between its calls", f"{name}.residency", "offloaded")
    if rollout is not None and rollout.sleep < 2 and rollout.pool == placement.actor.pool:
        yield _edit("sleep 2 for the rollout", "rollout.sleep", 2)
    for name, role in roles.items():
        yield from _heavier(placement, name, role)


def _heavier(placement: Placement, name: str, role: RolePlacement) -> Iterator[Change]:
    for zero in range(role.layout.zero + 1, 4):
        if violation(placement.backend, replace(role.layout, zero=zero)) is None:
            yield _edit(f"ZeRO-{zero} for {name}", f"{name}.layout.zero", zero)
    if name in TRAINED:
        if not role.offload_between:
            yield _edit(f"optimizer of {name} on the host between its calls", f"{name}.offload_between", True)
        if role.layout.offload_optimizer == "none":
            yield _edit(f"Adam of {name} on the CPU", f"{name}.layout.offload_optimizer", "cpu")


def _edit(name: str, path: str, value: Any) -> Change:
    return setting(name, {f"placement.{path}": value})
