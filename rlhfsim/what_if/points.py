"""Points along an axis: one question under one change after the other, each asked when its turn comes.

    points(question, axis, ask)

What else fits, the first that meets a target, the fewest GPUs, the batch worth most: each is a fold over
points, and who has enough stops listening. A `Line` is an axis of numbers, each asked once, on which halving
finds where something begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.search import clock
from rlhfsim.search.parallel import mapped
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.what_if.dotted_paths import keys, put
from rlhfsim.what_if.engine import Question

T = TypeVar("T")
MAX_HALVINGS = 60
GROUPS = "request.cluster.node_groups"
LARGER = ("h200_sxm", "b200_sxm", "b300_sxm", "mi300x", "mi325x", "mi355x")
"""Kinds of GPU with more memory than most, by size."""


@frozen
class Change:
    """Another question, and its name in words."""

    name: str
    apply: Callable[[Question], Question]


def setting(name: str, values: Mapping[str, Any]) -> Change:
    """The change that puts values, or functions of the value there, at dotted paths, in this order."""

    def apply(question: Question) -> Question:
        for path, given in values.items():
            question = put(question, keys(path), given)
        return question

    return Change(name=name, apply=apply)


def asking(name: str = "", **fields: Any) -> Change:
    """The change of some fields of the request."""
    return setting(name, {"request": partial(replace, **fields)})


def on_gpus(request: Request, counts: Iterable[int]) -> Iterator[Change]:
    """The axis of some numbers of GPUs of the first kind, in whole nodes where they are more."""
    group, *others = request.cluster.node_groups
    for gpus in counts:
        per_node = group.profile.node.gpus if gpus > group.gpus else group.gpus_per_node
        yield setting(f"--gpus {gpus}", {GROUPS: (group.sized(gpus, per_node), *others)})


def on_larger(request: Request, least: float = 0.0) -> Iterator[Change]:
    """The axis of other kinds of GPU with much memory, above `least` bytes, that the vendor makes as well."""
    now = request.cluster.node_group
    for group in (node_group(name, now.gpus) for name in LARGER if name != now.profile.name):
        if group.profile.vendor == now.profile.vendor and group.profile.memory.value > least:
            yield setting(f"--gpu {group.profile.aliases[0]}", {GROUPS: (group,)})


def with_memory(cluster: Cluster, factor: float, *, hosts: bool = False) -> Cluster:
    """The same cluster with another size of GPU memory, and of host memory too where `hosts`."""

    def grown(profile: Profile) -> Profile:
        host = profile.node.host_memory
        host = replace(host, value=host.value * factor) if hosts else host
        return replace(
            profile,
            memory=replace(profile.memory, value=profile.memory.value * factor),
            usable_memory=replace(profile.usable_memory, value=profile.usable_memory.value * factor),
            node=replace(profile.node, host_memory=host),
        )

    changed: Cluster = put(cluster, keys("node_groups.*.profile"), grown)
    return changed


@frozen
class Point(Generic[T]):
    """A question on an axis, and its answer."""

    name: str
    question: Question
    answer: T


def points(
    question: Question,
    axis: Iterable[Change],
    ask: Callable[[Question], T | None],
    *,
    skipped: tuple[type[RlhfsimError], ...] = (),
) -> Iterator[Point[T]]:
    """The questions along an axis that have an answer, until time is up.

    `skipped`: errors of changes that the question cannot have.
    """
    for change in axis:
        if clock.over():
            return
        try:
            asked = change.apply(question)
        except skipped:
            continue
        if (answer := ask(asked)) is not None:
            yield Point(name=change.name, question=asked, answer=answer)


def first_of_each(families: Iterable[Iterator[T]]) -> tuple[T, ...]:
    """The first of every family that has one, families side by side on the cores of this machine."""
    firsts = mapped(lambda family: next(family, None), list(families))
    return tuple(first for first in firsts if first is not None)


# --- an axis of numbers -----------------------------------------------------------------------------


class Line(Generic[T]):
    """What was asked at values of a quantity, each once."""

    def __init__(self, ask: Callable[[float], T]) -> None:
        """Nothing is asked yet."""
        self.ask = ask
        self.answers: dict[float, T] = {}

    def at(self, x: float) -> T:
        """The answer at one value."""
        if x not in self.answers:
            self.answers[x] = self.ask(x)
        return self.answers[x]

    @property
    def ordered(self) -> tuple[T, ...]:
        """Every answer, by ascending value."""
        return tuple(self.answers[x] for x in sorted(self.answers))


def edge(
    near: float,
    far: float,
    beyond: Callable[[float], bool],
    middle: Callable[[float, float], float] = lambda near, far: (near + far) / 2,
    halvings: int = MAX_HALVINGS,
) -> float:
    """The value nearest to `near` that was seen to lie beyond, by halving; `far` does, `near` does not.

    It ends early where the middle is one of the ends.
    """
    for _ in range(halvings):
        between = middle(near, far)
        if between in (near, far):
            break
        if beyond(between):
            far = between
        else:
            near = between
    return far


def geometric(low: float, high: float) -> float:
    """The middle of two positive values in equal factors."""
    return math.sqrt(low * high)
