"""What earlier searches of this process priced, where they asked the same of a role."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

from rlhfsim.kernels.devices import DeviceKey, domain_of
from rlhfsim.memory.components import Rows
from rlhfsim.search.columns import Floats
from rlhfsim.search.layouts import is_long
from rlhfsim.search.options import Key, OptionTable
from rlhfsim.search.request import Request
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.placement import RolePlacement


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """The options of a role that the space has."""

    legal: int
    refused: Counter[str]
    """Layouts outside the space, by reason."""
    shapes: tuple[tuple[tuple[RolePlacement, ...], ...], ...]
    """Shape -> layout (rising micro-batch) -> what the role does between its calls."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """The options of a role that fit by themselves, before they are timed."""

    legal: int
    """Options of the space, those that do not fit included."""
    refused: Counter[str]
    """Layouts outside the space, by reason."""
    roles: tuple[RolePlacement, ...]
    bytes: Rows
    """(n, stage) of `memory.components.ROLE`."""
    host: Floats
    """(n,) bytes of host memory for each GPU."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kept:
    """Tables of earlier searches that asked the same of a role.

    Layouts do not depend on lengths (long contexts apart) and on the GPU, bytes do not depend on the network, and roles not on how stale samples may be; no price of a
    call depends on the price of a GPU, on the objective or on which architectures compete.
    """

    options: dict[Key, Options]
    fits: dict[Key, Fit]
    roles: dict[Key, OptionTable]
    rollouts: dict[Key, OptionTable]
    paths: dict[Any, Any]
    moves: dict[Any, dict[object, tuple[float, float]]]
    """Role, call and hardware -> what moves -> seconds in and out."""

    @classmethod
    def of(cls, request: Request, models: Models) -> Kept:
        """What this process remembers of a request."""
        work, cluster = request.workload, request.cluster
        pools = tuple((DeviceKey(p.profile), p.gpus, p.gpus_per_node) for p in cluster.node_groups)
        fixed = tuple((role, *sorted(fields.items())) for role, fields in sorted(request.fix.items()))
        asked = models, request.backend, request.forbid, fixed, request.limits
        domains = tuple((p.gpus, p.gpus_per_node, domain_of(p)) for p in cluster.node_groups)
        layouts = asked, domains, work.num_sequences // work.mini_batches, is_long(work)
        bytes_ = asked, pools, work, request.max_oom
        times = bytes_, cluster.oversubscription
        synced = models.actor, request.backend, work.lora, pools, cluster.oversubscription
        stale = times, "async" in request.switches, request.max_staleness
        return cls(
            options=_recalled(layouts),
            fits=_recalled(bytes_),
            roles=_recalled(times),
            rollouts=_recalled(stale),
            paths=_recalled(("paths", *synced)),
            moves=_recalled(("moves", work.optimizer, *synced)),
        )

    def tables(self, key: Key) -> dict[Key, OptionTable]:
        """Where the table of a role is kept."""
        return self.rollouts if key.role == "rollout" else self.roles


_RECALLED: OrderedDict[object, dict[Any, Any]] = OrderedDict()
MOST_KEPT = 48
"""Of the six kinds together: those of eight requests."""


def _recalled(name: object) -> dict[Any, Any]:
    found = _RECALLED.setdefault(name, {})
    _RECALLED.move_to_end(name)
    while len(_RECALLED) > MOST_KEPT:
        _RECALLED.popitem(last=False)
    return found
