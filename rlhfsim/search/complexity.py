"""How much a plan asks of those who run it: the order in which plans are called simple."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import or_

from rlhfsim.elementwise import Size
from rlhfsim.search.role_rows import Roles
from rlhfsim.specs.placement.placement import Placement, Rest, RolloutPlacement, Schedule
from rlhfsim.specs.workload.roles import TRAINED


def complexity(placement: Placement) -> tuple[int, ...]:
    """What an operator has to build, watch and repair; fewer is simpler, what comes first counts most.

    Pools, and schedules in which they overlap: weights and samples cross the network, GPUs wait for others.
    Pipelines: an engine of their own, bubbles, and as many micro-batches as stages can hide.
    Layouts: each cut has process groups and checkpoints of its own, and is tuned by itself.
    Moves: host memory, pinned, and seconds at the start of every call.
    Uneven degrees: the powers of two are what engines are tested with.
    """
    roles = placement.roles
    return (
        len(placement.pools) + overlaps(placement.schedule),
        sum(map(piped, roles.values())),
        len(_cuts(placement)) + len(zero_stages(placement)),
        sum(map(moves, roles.values())),
        sum(map(uneven, roles.values())),
    )


def asks_more(best: Placement, simple: Placement) -> Iterator[str]:
    """What one plan asks that a simpler one does not, in the order of `complexity`."""

    def fewer(more: int, less: int, noun: str, which: str = "") -> Iterator[str]:
        if more > less:
            yield f"{more} {noun}{'s' * (more > 1)}{which} in place of {less or 'none'}"

    yield from fewer(len(best.pools), len(simple.pools), "pool")
    if overlaps(best.schedule) > overlaps(simple.schedule):
        yield "calls that overlap"
    for name, role in best.roles.items():
        other = simple.roles.get(name)
        if piped(role) and not (other and piped(other)):
            yield f"PP{role.layout.pp} for the {name}"
    yield from fewer(len(_cuts(best)), len(_cuts(simple)), "layout")
    yield from fewer(len(zero_stages(best)), len(zero_stages(simple)), "ZeRO stage")
    away, stays = (sum(map(moves, plan.roles.values())) for plan in (best, simple))
    yield from fewer(away, stays, "role", " partly on the host")
    odd, even = (sum(map(uneven, plan.roles.values())) for plan in (best, simple))
    yield from fewer(odd, even, "role", " with a degree that is no power of two")


def _cuts(placement: Placement) -> frozenset[tuple[int, ...]]:
    return frozenset(map(cut, placement.trainers.values()))


def overlaps(schedule: Schedule) -> int:
    """Ways in which calls of a schedule run at the same time."""
    overlaps = schedule.asynchronous, schedule.partial_rollout, schedule.overlapped_sync
    return sum((*overlaps, schedule.streaming, schedule.double_buffered, schedule.lend))


def cut(role: Roles) -> tuple[Size, ...]:
    """How a model is divided over GPUs; more replicas of it are no other layout."""
    x = role.layout
    return x.tp, x.pp, x.ep, getattr(x, "cp", 1), getattr(x, "vp", 1)


def zero_stages(placement: Placement) -> frozenset[int]:
    """ZeRO stages of the trained roles; where nothing is trained no states are sharded."""
    return frozenset(role.layout.zero for name, role in placement.trainers.items() if name in TRAINED)


def piped(role: Roles) -> Size:
    """Whether a role is cut into pipeline stages."""
    return role.layout.pp > 1


def moves(role: Roles) -> Size:
    """Whether a role that trains or scores keeps something on the host, or is made again."""
    if isinstance(role, RolloutPlacement):
        return False
    hosted = (role.layout.offload_optimizer != "none") | (role.layout.offload_params != "none")
    return hosted | Rest(role.residency, role.offload_between).frees


def uneven(role: Roles) -> Size:
    """Whether a degree of a layout is no power of two."""
    x = role.layout
    bits = [degree & (degree - 1) for degree in (x.tp, x.pp, x.dp, getattr(x, "cp", 1), x.ep)]
    return reduce(or_, bits) > 0
