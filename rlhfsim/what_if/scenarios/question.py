"""The `request` of a scenario as a design question: what is fixed, bounded, allowed and forbidden."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import reduce

from rlhfsim.errors import RlhfsimError
from rlhfsim.search.request import STALE, Limit, Request, limited, second_pool_for_rollout
from rlhfsim.search.role_fields import bound
from rlhfsim.search.space import roles_of
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.loading import Source
from rlhfsim.specs.model.roles import models_of
from rlhfsim.what_if.scenarios.document import Base, RequestText

MAX_POOLS = 2
_BOUND = re.compile(r"^\s*(<=|>=|!=|=|<|>)?\s*(\S+)\s*$")
At = tuple[int | str, ...]
REQUEST: At = ("base", "request")


def request_of(base: Base, cluster: Cluster, source: Source) -> Request:
    """The question of a (patched) base on its cluster.

    Raises:
        RlhfsimError: choices that contradict each other or the workload, with their place.
    """
    if len(cluster.node_groups) > MAX_POOLS:
        raise RlhfsimError(
            "too-many-pools",
            f"the cluster has {len(cluster.node_groups)} pools",
            place=source.place(("base", "cluster", "node_groups", MAX_POOLS)),
            help="one pool, or one that trains and one for the rollout",
        )
    text = base.request
    limits = list(_limits(text, source))
    try:
        models = models_of(base.workload)
    except RlhfsimError as error:
        raise error.at(source.place(("base", "workload", "model"))) from error
    open_choices = {
        f.name: getattr(text, f.name) for f in fields(text) if f.name not in ("fix", "second_pool")
    }
    if text.architecture in STALE:
        open_choices["allow"] = text.allow | {text.architecture}
    try:
        request = Request(cluster=cluster, workload=base.workload, **open_choices)
    except RlhfsimError as error:
        raise error.at(source.place(REQUEST)) from error
    request = reduce(limited, limits, request)
    roles = roles_of(request, models)
    for role in text.fix:
        if role not in roles:
            raise RlhfsimError(
                "role-without-role",
                f"{role} is fixed, but {base.workload.algorithm} has no {role} here",
                place=source.place((*REQUEST, "fix", role)),
                help="leave it out",
            )
    return second_pool_for_rollout(request) if text.second_pool == "rollout" else request


def _limits(text: RequestText, source: Source) -> Iterator[Limit]:
    for role, values in text.fix.items():
        for field, value in values.items():
            try:
                yield _limit(role, field, value)
            except RlhfsimError as error:
                raise error.at(source.place((*REQUEST, "fix", role, field))) from error


def _limit(role: str, field: str, value: int | str) -> Limit:
    match = _BOUND.match(str(value))
    relation, wanted = (match[1] or "=", match[2]) if match else ("=", str(value))
    known, number = bound(role, field, relation, wanted)
    return Limit(role=role, field=field, relation=known, value=number)
