"""What searches that ask the same of a role share: layouts, bytes, seconds, weight paths and moves."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from rlhfsim.kernels.devices import DeviceKey, domain_of
from rlhfsim.search.layout_shapes import ModelCut, Shapes, Space
from rlhfsim.search.layouts import role_layouts
from rlhfsim.search.micro_batches import lengths_key
from rlhfsim.search.options import OptionTable, PriceKey
from rlhfsim.search.request import Request
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.workload.roles import TRAINED

MOST_TABLES = 64
"""Most tables of the eight kinds together: those of eight requests."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoleOptions:
    """The options of a role that the space has, those that do not fit included."""

    legal: int
    refused: Counter[str]
    """Layouts outside the space, by reason."""
    space: Space


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedTables:
    """Tables for one request, together with all others that ask the same of a role.

    Layouts do not depend on lengths (long contexts apart), and on the GPU only where experts exchange tokens;
    bytes do not depend on the network, and roles not on how old samples may be; no price of a call depends
    on the price of a GPU, on the objective or on which architectures compete.
    """

    options: dict[PriceKey, RoleOptions]
    layouts: dict[Any, Space]
    """Those of like roles, see `space`."""
    shapes: dict[Any, dict[ModelCut, Shapes]]
    """Those of like roles, or of one role whose refusals name it, that are run on any number of GPUs."""
    fitting: dict[PriceKey, OptionTable]
    """Options that fit, before they are timed."""
    engines: dict[PriceKey, OptionTable]
    """The same of rollouts."""
    roles: dict[PriceKey, OptionTable]
    rollouts: dict[PriceKey, OptionTable]
    paths: dict[Any, Any]
    """See `search.weight_paths`."""
    moves: dict[Any, dict[object, tuple[float, float]]]
    """Role, call and hardware -> what moves -> seconds in and out."""

    def tables(self, key: PriceKey) -> dict[PriceKey, OptionTable]:
        """Where the table of a role is."""
        return self.rollouts if key.role == "rollout" else self.roles

    def space(self, request: Request, models: Models, key: PriceKey) -> Space:
        """The layouts of a role: those of like roles where they are known, and no refusal names a role."""
        role, model = key.role, models.of(key.role)
        domain = domain_of(request.cluster.node_groups[key.hardware])
        fixed = tuple(sorted(request.fix.get(role, {}).items()))
        limits = tuple(replace(limit, role="") for limit in request.limits if limit.role == role)
        adapted = role == "actor" and request.workload.lora is not None
        rules = request.rules(role).title
        like = domain, model.with_value_head(), rules, role in TRAINED, adapted, fixed, limits
        name = key.gpus, *like
        if name in self.layouts:
            return self.layouts[name]
        own = self.shapes.setdefault((role, *like), {})
        known = own or self.shapes.setdefault(like, {})
        space = role_layouts(request, role, model, key.gpus, domain, known)
        if not any(role in reason for reason in space.dropped):
            self.layouts[name] = space
        elif not own:
            own.update(known)
            for cut in [cut for cut, shapes in known.items() if any(role in why for why in shapes.refused)]:
                del known[cut]
        return space


class SearchCache:
    """Tables of earlier searches; whoever asks many questions passes one to each search."""

    def __init__(self) -> None:
        """Nothing was asked yet."""
        self._tables: OrderedDict[object, dict[Any, Any]] = OrderedDict()

    def of(self, request: Request, models: Models) -> SharedTables:
        """Those that a request may read and fill."""
        work, cluster = request.workload, request.cluster
        groups = tuple(
            (DeviceKey(p.profile), p.gpus, p.gpus_per_node, p.fabric, p.wan) for p in cluster.node_groups
        )
        fixed = tuple((role, *sorted(fields.items())) for role, fields in sorted(request.fix.items()))
        competing = (
            models,
            request.backend,
            request.runs and request.runs.name,
            request.forbid,
            fixed,
            request.limits,
        )
        domains = tuple((p.gpus, p.gpus_per_node, domain_of(p)) for p in cluster.node_groups)
        exchanged = any(model.moe for model in models.roles.values()) and (
            groups[0],
            cluster.oversubscription,
        )
        bytes_ = competing, groups, work, request.max_oom
        times = bytes_, cluster.oversubscription
        synced = models.actor, request.backend, cluster.framework, work.lora, groups, cluster.oversubscription
        space = (
            competing,
            domains,
            exchanged,
            work.num_sequences // work.mini_batches,
            lengths_key(work),
            work.lora,
            work.gradients,
        )
        return SharedTables(
            options=self._table(*space),
            layouts=self._table("layouts", *space),
            shapes=self._table("shapes", *space),
            fitting=self._table(*bytes_, exchanged),
            engines=self._table("engines", bytes_, exchanged, request.stale, request.max_staleness),
            roles=self._table(*times),
            rollouts=self._table(times, request.stale, request.max_staleness),
            paths=self._table("paths", *synced),
            moves=self._table("moves", work.optimizer, *synced),
        )

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Tables that are asked for first meanwhile are dropped at the end, as nobody asks for them again."""
        before = set(self._tables)
        try:
            yield
        finally:
            for question in self._tables.keys() - before:
                del self._tables[question]

    def _table(self, *question: object) -> dict[Any, Any]:
        """Table that all who ask this share; those that were asked for longest ago are dropped."""
        table = self._tables.setdefault(question, {})
        self._tables.move_to_end(question)
        while len(self._tables) > MOST_TABLES:
            self._tables.popitem(last=False)
        return table


@cache
def process_cache() -> SearchCache:
    """The cache of searches to which none is passed."""
    return SearchCache()
