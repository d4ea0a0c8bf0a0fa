"""Small random design questions, and every plan of their space written out one by one.

Nothing here uses what the search prunes with (`pricer`, `pools`, `subproblems`, `bound`, `exact`): options
come from `layouts` and `roles`, memory from the ledger, time from the simulator.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from math import inf
from typing import Any

import numpy as np
import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.devices import domain_of
from rlhfsim.memory.ledger import ledger
from rlhfsim.search.candidates import Candidate, risk, simulated
from rlhfsim.search.layouts import role_layouts
from rlhfsim.search.options import broken_limit, role_variants, rollout_variants
from rlhfsim.search.request import Limit, Request
from rlhfsim.search.rollout_layouts import rollout_layouts
from rlhfsim.search.space import Partition, Skeleton, partitions, splits
from rlhfsim.specs.frameworks.runs import ANY
from rlhfsim.specs.frameworks.says import value_of
from rlhfsim.specs.hardware.hardware import Cluster, NodeGroup, Profile
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.roles import Models, models_of
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.placement import Placement, RolePlacement, RolloutPlacement, model_cut
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.specs.workload.lengths import Fixed, LogNormal
from rlhfsim.specs.workload.workload import Environment, Lora, OwnParts, Reward, Rules, Workload

AnyRolePlacement = RolePlacement | RolloutPlacement
Where = tuple[int, tuple[int, int, float], bool, bool, bool]
"""GPUs of a role; its nodes; adapters only, beside the actor, sharing its GPUs or not."""
MODELS = ("smollm2-135m", "qwen2.5-0.5b", "llama-3.2-1b", "pythia-1b")
MOE = "olmoe-1b-7b"
GIB = float(1 << 30)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A design question with a small space."""

    request: Request
    models: Models
    plans: int

    def written_out(self) -> Iterator[tuple[Skeleton, Placement | None]]:
        """Every plan of the space, legal or not in memory."""
        for partition, sizes in skeletons(self.request, self.models):
            skeleton = Skeleton(partition=partition, sizes=sizes)
            yield from ((skeleton, p) for p in placements(self.request, self.models, skeleton))


load_cached = lru_cache(load_profile)


# --- every plan -------------------------------------------------------------------------------------


def skeletons(request: Request, models: Models) -> Iterator[tuple[Partition, tuple[int, ...]]]:
    """Every partition with every split."""
    for partition in partitions(request, models):
        for row in splits(request, partition).tolist():
            yield partition, tuple(row)


def options(
    request: Request, models: Models, role: str, hardware: int, gpus: int, path: str, group: tuple[str, ...]
) -> tuple[AnyRolePlacement, ...]:
    """What may sit in a role on a number of GPUs."""
    limits = tuple(x for x in request.limits if x.role == role)
    fix = tuple(sorted(request.fix.get(role, {}).items()))
    node = request.cluster.node_groups[hardware]
    forbid = request.left_out & {"offload", "recompute"}
    trainer = request.backend, request.framework
    nodes = node.gpus, node.gpus_per_node, node.profile.usable_memory.value
    beside, adapters = role == "reference" and "actor" in group, path == "lora"
    shares = request.runs is not None and request.runs.says.shares(role, group)
    where = gpus, nodes, adapters, beside, shares
    return _options(trainer, request.workload, models, limits, fix, forbid, role, where)


@lru_cache(maxsize=65536)
def _options(
    trainer: tuple[Backend, str | None],
    workload: Workload,
    models: Models,
    limits: tuple[Limit, ...],
    fix: tuple[tuple[str, Any], ...],
    forbid: frozenset[str],
    role: str,
    where: Where,
) -> tuple[AnyRolePlacement, ...]:
    """Those that the limits leave; only a limit on sequences decides what stands before it for choice."""
    sequences = tuple(x for x in limits if x.field == "micro_batch")
    every = _unlimited(trainer, workload, models, sequences, fix, forbid, role, where)
    if not limits:
        return every
    request = Request(cluster=_nodes(where[1]), workload=workload, limits=limits)
    return tuple(s for s in every if not broken_limit(request, role, s))


@lru_cache(maxsize=65536)
def _unlimited(
    trainer: tuple[Backend, str | None],
    workload: Workload,
    models: Models,
    sequences: tuple[Limit, ...],
    fix: tuple[tuple[str, Any], ...],
    forbid: frozenset[str],
    role: str,
    where: Where,
) -> tuple[AnyRolePlacement, ...]:
    gpus, nodes, adapters, beside, shares = where
    cluster = _nodes(nodes)
    group = cluster.node_groups[0]
    request = Request(
        cluster=cluster,
        workload=workload,
        backend=trainer[0],
        framework=trainer[1],
        limits=sequences,
        fix={role: dict(fix)},
        forbid=forbid,
    )
    if role == "rollout":
        return tuple(
            s
            for layout in rollout_layouts(request, models.actor, gpus, group, shares=shares)
            for s in rollout_variants(request, layout, adapters=adapters, shares=shares)
        )
    space = role_layouts(request, role, models.of(role), gpus, domain_of(group))
    return tuple(
        s for x in space.layouts for s in role_variants(request, role, x, beside_actor=beside, shares=shares)
    )


@cache
def _nodes(nodes: tuple[int, int, float]) -> Cluster:
    """Some GPUs, so many a node, with so much memory."""
    profile = load_cached("h100")
    profile = replace(profile, usable_memory=replace(profile.usable_memory, value=nodes[2]))
    return Cluster(node_groups=(NodeGroup(profile=profile, gpus=nodes[0], gpus_per_node=nodes[1]),))


def placements(request: Request, models: Models, skeleton: Skeleton) -> Iterator[Placement | None]:
    """The product of the options of every role; None where the framework cannot say them together."""
    partition, homes = skeleton.partition, skeleton.pools()
    roles, choices = [], []
    for group, hardware, home in zip(partition.groups, partition.hardware, homes, strict=True):
        for role in group:
            found = options(request, models, role, hardware, home.gpus, partition.path, group)
            roles.append(role)
            choices.append([replace(s, pool=home.name) for s in found])
    for chosen in product(*choices):
        yield placed(request, skeleton, dict(zip(roles, chosen, strict=True)))


def placed(request: Request, skeleton: Skeleton, roles: dict[str, Any]) -> Placement | None:
    """The plan with these roles; None where one key of the framework says different things for two, or a
    reference that is the base of the actor's adapters is cut otherwise on the same GPUs."""
    actor, reference = roles["actor"], roles.get("reference")
    base = request.workload.lora is not None and request.workload.reference == "same"
    if base and reference is not None and reference.pool == actor.pool:
        one, other = (model_cut(role.layout, request.backend) for role in (actor, reference))
        if one != other:
            return None
    for same in request.runs.says.same if request.runs else ():
        members = [placed for role, placed in roles.items() if role in same.roles]
        if len({value_of(same.aspect, member, request.backend) for member in members}) > 1:
            return None
    return Placement(
        pools=skeleton.pools(),
        weight_path=skeleton.partition.path,
        schedule=skeleton.partition.schedule,
        backend=request.backend,
        **roles,
    )


def sample(case: Case, rng: random.Random, number: int) -> Iterator[Placement]:
    """Random plans of the space, whether or not they fit."""
    request, models = case.request, case.models
    every = list(skeletons(request, models))
    for partition, sizes in rng.choices(every, k=number):
        skeleton = Skeleton(partition=partition, sizes=sizes)
        homes = skeleton.pools()
        roles: dict[str, Any] = {}
        for group, home in zip(partition.groups, homes, strict=True):
            for role in group:
                found = options(request, models, role, home.hardware, home.gpus, partition.path, group)
                roles[role] = replace(rng.choice(found), pool=home.name) if found else None
        if all(roles.values()) and (plan := placed(request, skeleton, roles)):
            yield plan


def count(request: Request, models: Models, enough: float = inf) -> int:
    """Plans of the space; some number above `enough` where there are more."""
    plans = 0
    counted: dict[object, int] = {}
    for partition in partitions(request, models):
        path = "lora" if partition.path == "lora" else ""
        shape = partition.groups, partition.hardware, path
        if shape not in counted:
            counted[shape] = _count_split(request, models, partition, path)
        plans += counted[shape]
        if plans > enough:
            break
    return plans


def _count_split(request: Request, models: Models, partition: Partition, path: str) -> int:
    """Plans of one partition, over all of its splits: Python integers, which do not overflow."""
    sizes = splits(request, partition)
    plans = np.ones(len(sizes), dtype=object)
    for i, (group, hardware) in enumerate(zip(partition.groups, partition.hardware, strict=True)):
        known, places = np.unique(sizes[:, i], return_inverse=True)
        each = [_count_pool(request, models, hardware, gpus, path, group) for gpus in known.tolist()]
        plans *= np.array(each, dtype=object)[places]
    return int(plans.sum())


def _count_pool(
    request: Request, models: Models, hardware: int, gpus: int, path: str, group: tuple[str, ...]
) -> int:
    """Plans of the roles of one pool; where one of them has none, no more is asked."""
    plans = 1
    for role in group:
        plans *= len(options(request, models, role, hardware, gpus, path, group))
        if not plans:
            break
    return plans


def outcome(case: Case, placement: Placement | None) -> Candidate | None:
    """The simulated plan; None where memory, host, weight path or label rule it out."""
    if placement is None:
        return None
    request, models = case.request, case.models
    label = placement.architecture
    if label in request.forbid or request.architecture not in (None, label):
        return None
    if label == "lend" and placement.rollout.layout.replica_gpus > placement.pool(placement.actor.pool).gpus:
        return None
    memory = ledger(models, placement, request.workload, request.cluster)
    if risk(request, memory):
        return None
    try:
        return simulated(request, models, placement, memory)
    except RlhfsimError as error:
        if error.code == "weight-path-unavailable":
            return None
        raise


def value(case: Case, candidate: Candidate) -> float:
    """What is minimised: seconds, or bytes on the fullest GPU."""
    if case.request.objective == "memory":
        return max(phase.bytes for phase in candidate.ledger.phases)
    return candidate.seconds


# --- random questions -------------------------------------------------------------------------------


def _profile(rng: random.Random, name: str) -> Profile:
    """A GPU with less memory, less host memory and a controller that does not hide the rest."""
    profile = load_cached(name)
    size = rng.choice((10, 16, 24, 40, 80)) * GIB
    host = rng.choice((64, 128, 2048)) * GIB
    node = profile.node
    quick = profile.coefficient("controller_time")
    seconds = rng.choice((0.0, 0.001, 0.1))
    coefficient = Coefficient(value=seconds, low=seconds, high=seconds, source=quick.source)
    return replace(
        profile,
        usable_memory=replace(profile.usable_memory, value=min(size, profile.usable_memory.value)),
        node=replace(node, host_memory=replace(node.host_memory, value=host)),
        coefficients={**profile.coefficients, "controller_time": coefficient},
    )


def _cluster(rng: random.Random) -> Cluster:
    shape = rng.random()
    if shape < 0.5:
        gpus = rng.choice((1, 2, 3, 4, 4, 6, 8))
        pools: tuple[tuple[str, int, int], ...] = ((rng.choice(("h100", "a100")), gpus, gpus),)
    elif shape < 0.8:
        each = rng.choice((1, 2, 4))
        gpus = each * rng.choice((2, 3, 4)) + rng.choice((0, 0, 0, each // 2))
        pools = ((rng.choice(("h100", "a100")), gpus, each),)
    else:
        one, two = rng.choice((1, 2, 4)), rng.choice((1, 2, 4))
        pools = (("h100", one, one), (rng.choice(("h20", "a100")), two, min(two, 2)))
    made = tuple(
        NodeGroup(profile=_profile(rng, name), gpus=gpus, gpus_per_node=each) for name, gpus, each in pools
    )
    return Cluster(node_groups=made, oversubscription=rng.choice((1.0, 1.0, 4.0)))


def _workload(rng: random.Random) -> Workload:
    algorithm = rng.choice(("ppo", "ppo", "grpo", "grpo", "grpo", "dpo"))
    generates = algorithm != "dpo"
    rules = Rules(seconds_per_sample=rng.choice((0.005, 0.5)), workers=rng.choice((4, 64)))
    kinds = (
        Reward(rules=rules, overlapped=rng.random() < 0.5),
        Reward(model="smollm2-135m"),
        Reward(model="smollm2-135m", rules=rules, overlapped=rng.random() < 0.5),
    )
    plain = rng.random() < 0.7
    return Workload(
        algorithm=algorithm,
        model=rng.choice(MODELS),
        critic=rng.choice(("same", "smollm2-135m")),
        reference=rng.choice(("same", "same", "none")) if generates else "same",
        reward=rng.choice(kinds) if generates else Reward(),
        prompts=rng.choice((4, 8, 32)),
        samples=rng.choice((1, 4)) if generates else 1,
        prompt_len=Fixed(value=rng.choice((64, 512))),
        response_len=rng.choice((Fixed(value=256), LogNormal(mean=200, max=rng.choice((1024, 4096))))),
        mini_batches=rng.choice((1, 1, 2)),
        epochs=rng.choice((1, 1, 2)),
        packing=rng.random() < 0.7,
        old_logprobs=rng.choice(("recompute", "recompute", "rollout")),
        optimizer=rng.choice(("adam", "adam", "adam8bit")),
        lora=None if plain else rng.choice((None, Lora(rank=16))),
        custom=OwnParts() if plain else OwnParts(loss=1e-3, filter=2e-3, logger=1e-4),
        rollout_precision="bf16" if plain else rng.choice(("bf16", "fp8")),
        environment=Environment(turns=2, seconds_per_turn=0.2, workers=rng.choice((2, 64)))
        if rng.random() < 0.1 and generates
        else None,
    )


def _restrictions(rng: random.Random, request: Request) -> list[Callable[[Request], Request]]:
    """Ways to make a space smaller, in random order."""

    def fixed(role: str, name: str, value: int | str) -> Callable[[Request], Request]:
        return lambda r: replace(r, fix={**r.fix, role: {**r.fix.get(role, {}), name: value}})

    def limited(role: str, name: str, relation: Any, value: Any) -> Callable[[Request], Request]:
        limit = Limit(role=role, field=name, relation=relation, value=value)
        return lambda r: replace(r, limits=(*r.limits, limit))

    def forbidden(name: str) -> Callable[[Request], Request]:
        return lambda r: replace(r, forbid=r.forbid | {name} - r.allow)

    found = [
        forbidden(n)
        for n in (
            "offload",
            "recompute",
            "disk",
            "host",
            "split",
            "standalone",
            "naive",
            "smart",
            "streaming",
            "disaggregated",
        )
    ]
    for role in ("actor", "critic", "reference", "reward"):
        found += [
            fixed(role, "micro_batch", rng.choice((1, 2, 4))),
            fixed(role, "tp", rng.choice((1, 1, 2))),
            fixed(role, "recompute", rng.choice(("none", "full"))),
            limited(role, "pp", "<=", rng.choice((1, 2))),
            limited(role, "zero", "=", rng.choice((0, 1, 2, 3))),
            limited(role, "zero", "<=", 2),
            limited(role, "offload_optimizer", "=", "none"),
            limited(role, "offload_between", "=", 0),
            limited(role, "residency", "=", rng.choice(("resident", "offloaded"))),
        ]
    found += [
        fixed("rollout", "tp", rng.choice((1, 1, 2))),
        limited("rollout", "sleep", "=", rng.choice((0, 1, 2))),
        limited("rollout", "memory_utilization", ">=", rng.choice((0.4, 0.7))),
        limited("rollout", "memory_utilization", "<=", rng.choice((0.4, 0.55))),
        limited("rollout", "sleep", "!=", rng.choice((0, 1, 2))),
        limited("rollout", "pp", "=", 1),
        limited("rollout", "gpus", "<=", 2),
        limited("actor", "gpus", ">=", 2),
        lambda r: replace(r, max_gpus_per_role=3),
    ]
    if request.workload.generates:
        kinds = ("naive", "smart", "hybrid", "disaggregated")
        one, path = rng.choice(kinds), rng.choice(("ipc", "host", "broadcast"))
        found += [lambda r: replace(r, architecture=one), lambda r: replace(r, weight_path=path)]
    rng.shuffle(found)
    return found


@cache
def drawn(seed: int, *, stale: str | None = None, least: int = 20, most: int = 80) -> Case | None:
    """The question of a seed; None where no restriction makes its space small enough.

    `stale`: a switch whose schedules compete; nothing else than plans that lend, of those that are asked for.
    """
    rng = random.Random(seed)
    workload = _workload(rng)
    backend = rng.choice(("deepspeed", "deepspeed", "fsdp2", "megatron"))
    if backend == "megatron" and rng.random() < 0.2:
        workload = replace(workload, model=MOE)
    models = models_of(workload)
    request = Request(
        cluster=_cluster(rng),
        workload=workload,
        backend=backend,
        framework=ANY if stale == "lend" or (backend == "megatron" and seed % 4) else None,
        architecture="lend" if stale == "lend" else None,
        objective=rng.choice(("time", "time", "time", "memory")),
        allow=frozenset(filter(None, [stale])),
        max_staleness=rng.choice((1, 2)),
    )
    plans = count(request, models, most)
    for narrower in _restrictions(rng, request):
        if least <= plans <= most:
            break
        changed = narrower(request)
        if stale == "lend" != changed.architecture:
            continue
        left = count(changed, models, most)
        if left >= least:
            request, plans = changed, left
    if not least <= plans <= most:
        return None
    return Case(request=request, models=models, plans=plans)


class Questions:
    """Everything above, for tests."""

    drawn = staticmethod(drawn)
    options = staticmethod(options)
    outcome = staticmethod(outcome)
    placements = staticmethod(placements)
    value = staticmethod(value)
    sample = staticmethod(sample)

    @staticmethod
    def case(request: Request, models: Models) -> Case:
        """A question that was not drawn."""
        _options.cache_clear()  # a test may have changed what is offered
        _unlimited.cache_clear()
        return Case(request=request, models=models, plans=count(request, models))

    @staticmethod
    def values(case: Case) -> list[float | None]:
        """What every plan of the space costs; None where it may not run."""
        found = (outcome(case, placement) for _, placement in case.written_out())
        return [None if c is None else value(case, c) for c in found]


@pytest.fixture(scope="session")
def questions() -> Questions:
    """Small random questions and their brute-force answers."""
    return Questions()
