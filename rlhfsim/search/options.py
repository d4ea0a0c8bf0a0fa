"""The options of a role on a number of GPUs, as a table.

An option is a layout with what happens to the role between its calls (stays, moves its optimizer
states or all of itself to the host, sleeps). What a role costs does not depend on the other roles,
so it is priced once for each pool size (`search.pricer`) and serves every skeleton.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhfsim.elementwise import groups, numbered
from rlhfsim.frozen import frozen
from rlhfsim.kernels.devices import DeviceKey
from rlhfsim.memory.components import NO_SYNC, RUNNING, STATES, Rows, SyncBytes, engine_sums, role_sums
from rlhfsim.memory.role_bytes import Extra
from rlhfsim.search.columns import Floats, Ints, OptionTimes
from rlhfsim.search.request import Limit, Request
from rlhfsim.search.role_rows import ALONE, Condition, RoleRows
from rlhfsim.specs.frameworks.says import READS, Aspect, value_of
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.layout_columns import Layouts
from rlhfsim.specs.placement.placement import AnyRolePlacement, Rest, RolePlacement, RolloutPlacement
from rlhfsim.specs.placement.weight_paths import BOTH, End
from rlhfsim.specs.workload.roles import ENDS, TRAINED

FEW_ROWS = 5_000
"""Rows of bytes whose sums are kept."""
HOME = ("zero", "offload_optimizer", "offload_params")
"""Where the states of a layout lie and how they are cut, which decides what may happen between calls."""


@dataclass(frozen=True, slots=True)
class Variants:
    """What a role may do between its calls, layout by layout."""

    reads: tuple[str, ...]
    """Fields of a layout that decide it."""
    of: Callable[[Layout], tuple[Rest, ...]]

    def each(self, layouts: Layouts) -> tuple[list[tuple[Rest, ...]], Ints]:
        """Distinct answers, and which of them holds for each of some layouts."""
        first, places = groups(*layouts.columns(self.reads))
        return [self.of(layouts.at(row)) for row in first.tolist()], places


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PriceKey:
    """What a role's price depends on."""

    hardware: int
    gpus: int
    role: str
    beside_actor: bool = False
    """A reference that shares the actor's pool: one process, and with LoRA one copy of the weights."""
    shares: bool = False
    """Its GPUs, as the framework counts (`Says.shares`): what it may do between its calls depends on it."""
    adapters: bool = False
    """A rollout that receives adapters only: its base weights must survive sleep."""
    double_buffered: bool = False
    """A rollout in two halves that take turns with an environment."""


class LeastOfRole(NamedTuple):
    """Least numbers among the options of a role."""

    ready: float
    """Seconds until the forward call's result is there."""
    training: float
    """Seconds of training with its moves."""
    bytes: float
    """On a GPU while it works."""
    runs: bool
    """Whether it has a forward call at all."""


@frozen
class Wish:
    """What the options of some roles must be to compete."""

    roles: frozenset[str]
    holds: Condition
    """Asked once about a table, however many wishes have this very function."""


@dataclass(slots=True, kw_only=True, eq=False)
class OptionTable:
    """The options of one role that fit by themselves; arrays have one row an option."""

    key: PriceKey
    legal: int
    """Options of the space, those that do not fit included."""
    refused: Counter[str]
    """Layouts outside the space, by reason."""
    options: Sequence[AnyRolePlacement]
    times: OptionTimes
    bytes: Rows
    """Columns of `memory.components`: (m, stage) of a role (`ROLE`), (m,) of an engine (`ENGINE`)."""
    host: Floats
    """Bytes of host memory for each GPU, processes included."""
    pieces: Floats
    """(n, pieces) seconds until equal shares of the samples are generated, waking included; other roles have
    no pieces."""
    continuous: Floats
    """(n,) seconds per batch that continuous batching does not go below; 0 where it does not compete."""
    no_start: Floats
    """(n,) probability that an engine does not start; 0 for other roles."""
    sync_class: Ints
    """Options of one class have the same layout for the weight sync."""
    agreed: Ints | None = None
    """(n, `Request.alike`) a number for what several roles share, 0 where it is not about this one; None:
    they share nothing."""
    places: Ints | None = None
    """(n,) row of `bytes` of each option, which tables of the same options share; None: the m options."""
    of_rows: dict[object, Mapping[str, Floats]] = field(default_factory=dict, repr=False)
    """What `sums` says of each row of `bytes`, where these are few; shared like them."""
    _states: dict[object, Mapping[str, Floats]] = field(default_factory=dict, init=False, repr=False)
    _least: LeastOfRole | None = field(default=None, init=False, repr=False)
    _held: dict[object, NDArray[np.bool_]] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.options)

    @property
    def least(self) -> LeastOfRole:
        """The best of its options, of which there are some, in each number; computed once, for many pools."""
        if self._least is None:
            times = self.times
            self._least = LeastOfRole(
                float(times.ready.min()),
                float(times.training.min()),
                self._least_bytes(),
                bool(times.run.any()),
            )
        return self._least

    @property
    def held(self) -> Rows:
        """The row of `bytes` of each option."""
        return self.bytes if self.places is None else self.bytes[self.places]

    def _least_bytes(self) -> float:
        held = self.held
        if self.key.role == "rollout":
            return float(np.stack([held[name] for name in RUNNING], axis=-1).sum(axis=-1).min())
        needed = [held["states"][name] for name in STATES]
        if self.key.role not in TRAINED:
            needed += [held["score"][name] for name in Extra._fields]
        return float(np.stack(needed, axis=-1).sum(axis=-1).max(axis=1).min())

    @property
    def frees(self) -> NDArray[np.bool_]:
        """Options that take something out of GPU memory between calls."""
        options = self.options
        return options.frees if isinstance(options, RoleRows) else _each(frees, options)

    @property
    def moved(self) -> Ints:
        """Whether a move surrounds the forward call (1) and training (2): such calls do not stream."""
        times = self.times
        waits = (times.load + times.unload > 0) + 2 * (times.train_load + times.train_unload > 0)
        return np.asarray(waits, dtype=np.int64)

    def states(
        self, profile: Profile, sync: SyncBytes, *, with_actor: bool = True
    ) -> tuple[Mapping[str, Floats], Ints | None]:
        """State -> bytes, mean and variance (see `memory.components`) of some rows, and which of them each
        option has (None: its own); computed once, for many pools."""
        return self._known(self._states, profile, sync, with_actor=with_actor)

    def sums(self, profile: Profile, sync: SyncBytes, *, with_actor: bool = True) -> Mapping[str, Floats]:
        """The same of each option."""
        states, at = self._known({}, profile, sync, with_actor=with_actor)
        return states if at is None else {state: one[at] for state, one in states.items()}

    def _known(
        self,
        known: dict[object, Mapping[str, Floats]],
        profile: Profile,
        sync: SyncBytes,
        *,
        with_actor: bool,
    ) -> tuple[Mapping[str, Floats], Ints | None]:
        sync = sync if self.key.role in ENDS else NO_SYNC
        name = DeviceKey(profile), sync, with_actor and self.key.role == "rollout"
        many, few = len(self.bytes) > max(len(self), FEW_ROWS), len(self.bytes) <= FEW_ROWS
        known = self.of_rows if few else known
        if name not in known:
            rows = self.held if many else self.bytes
            known[name] = (
                engine_sums(profile, rows, sync, with_actor=with_actor)
                if self.key.role == "rollout"
                else role_sums(profile, rows, sync)
            )
        return known[name], None if many else self.places

    def that(self, wishes: Iterable[Condition]) -> OptionTable:
        """The table with those options alone that all of the wishes hold for; `legal` stays."""
        left = np.ones(len(self), dtype=np.bool_)
        for holds in wishes:
            if holds not in self._held:
                options = self.options
                known = options.that(holds) if isinstance(options, RoleRows) else _each(holds, options)
                self._held[holds] = known
            left &= self._held[holds]
        return self if left.all() else self.only(np.flatnonzero(left))

    def only(self, rows: Ints) -> OptionTable:
        """The table with these options alone, in this order; `legal` stays."""
        options = self.options
        return replace(
            self,
            options=options.only(rows)
            if isinstance(options, RoleRows)
            else tuple(options[i] for i in rows.tolist()),
            times=self.times.only(rows),
            places=rows if self.places is None else self.places[rows],
            host=self.host[rows],
            pieces=self.pieces[rows],
            continuous=self.continuous[rows],
            no_start=self.no_start[rows],
            sync_class=self.sync_class[rows],
            agreed=None if self.agreed is None else self.agreed[rows],
        )

    def like(self, role: AnyRolePlacement) -> Ints:
        """Rows of the options that are this one."""
        if isinstance(self.options, RoleRows):
            assert isinstance(role, RolePlacement)
            return self.options.like(role)
        return np.array([i for i, own in enumerate(self.options) if own == role], dtype=np.int64)


def _each(holds: Condition, options: Sequence[AnyRolePlacement]) -> NDArray[np.bool_]:
    return np.fromiter(map(holds, options), np.bool_, len(options))


# --- the options of the space -----------------------------------------------------------------------


def role_variants(
    request: Request, role: str, layout: Layout, *, beside_actor: bool = False, shares: bool = False
) -> Iterator[RolePlacement]:
    """What a role may do between its calls: stay, move its optimizer states, move altogether.

    Of those what the framework can say where it `shares` its GPUs or not. Where it always swaps, a reference
    in the actor's pool (`beside_actor`) is swapped, or comes from the host with an actor that does so too.
    """
    says = request.runs.says.places(shares=shares).between.get(role) if request.runs else None
    if layout.offload_params != "none":  # all is on the host whenever it is not used
        says = None
    if beside_actor and request.runs is not None and request.runs.always_swaps:
        yield RolePlacement(pool=ALONE, layout=layout, residency="swapped")
        if says is None or "leaves" in says:
            yield RolePlacement(pool=ALONE, layout=layout, residency="offloaded")
        return
    if says is None or "stays" in says:
        yield RolePlacement(pool=ALONE, layout=layout)
    if "offload" in request.left_out or layout.offload_params != "none":
        return
    if says is None or "optimizer leaves" in says:
        apart = layout.offload_optimizer == "none" or (says is not None and "stays" not in says)
        if role in TRAINED and apart:
            yield RolePlacement(pool=ALONE, layout=layout, offload_between=True)
    stuck = request.runs is not None and layout.zero not in request.runs.says.leaves_under
    if (says is None or "leaves" in says) and (role in TRAINED or not stuck):
        yield RolePlacement(pool=ALONE, layout=layout, residency="offloaded")


def rollout_variants(
    request: Request, layout: RolloutLayout, *, adapters: bool, shares: bool = False
) -> Iterator[RolloutPlacement]:
    """Sleep levels that the framework can say; an engine that receives adapters only must keep its base
    weights."""
    levels = request.runs.says.places(shares=shares).sleep if request.runs else (0, 1, 2)
    for sleep in sorted({min(level, 1) for level in levels} if adapters else levels):
        yield RolloutPlacement(pool=ALONE, layout=layout, sleep=sleep)


def agreed(request: Request, name: str, roles: Sequence[AnyRolePlacement]) -> Ints | None:
    """(n, `Request.alike`) numbers of what one key of the framework says for several roles."""
    same = request.alike
    if not same:
        return None
    columns = [
        _numbers(each.aspect, roles, request.backend) if name in each.roles else np.zeros(len(roles))
        for each in same
    ]
    return np.array(columns, dtype=np.int64).reshape(len(same), len(roles)).T


def _numbers(aspect: Aspect, roles: Sequence[AnyRolePlacement], backend: Backend) -> Ints:
    """(n,) A number for what each role says of an aspect; of rows it is asked once for all that say the
    same."""
    if not isinstance(roles, RoleRows):
        return np.array([_number(value_of(aspect, role, backend)) for role in roles], dtype=np.int64)
    first, places = groups(roles.rest, *(c[roles.layout] for c in roles.layouts.columns(READS[aspect])))
    found = [_number(value_of(aspect, roles[row], backend)) for row in first.tolist()]
    return np.array(found, dtype=np.int64)[places]


@lru_cache(maxsize=65536)
def _number(value: object) -> int:
    """The same in every process, and above 0."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=7).digest()) + 1


def frees(role: AnyRolePlacement) -> bool:
    """Whether a role takes something out of GPU memory between its calls."""
    if isinstance(role, RolloutPlacement):
        return role.sleep > 0
    return role.offload_between or role.residency != "resident"


def broken_limit(request: Request, name: str, role: AnyRolePlacement) -> Limit | None:
    """A limit of the user that leaves an option out of the space."""
    for limit in request.limits:
        if limit.role == name and limit.field not in ("gpus", "hardware"):
            holder = role if hasattr(role, limit.field) else role.layout
            if not limit.holds(getattr(holder, limit.field)):
                return limit
    return None


def sync_classes(roles: Sequence[AnyRolePlacement]) -> Ints:
    """A number for each distinct layout as the weight sync sees it."""
    if not isinstance(roles, RoleRows):
        return np.array(numbered(map(sync_layout, roles))[1], dtype=np.int64)
    x = roles.layouts
    _, places = groups(*x.columns(("tp", "pp", "ep", "etp")), x.gpus, x.zero == 3)
    used, number = groups(places[roles.layout])
    return np.argsort(np.argsort(used))[number]  # in the order of their first options


def sync_layout(role: AnyRolePlacement, counts: Collection[End] = BOTH) -> object:
    """The fields of a layout that the weight sync reads; `counts`: see `WeightPathRules`."""
    x = role.layout
    if isinstance(x, RolloutLayout):
        replicas = x.dp if "rollout" in counts else None
        return x.tp, x.pp, replicas, x.ep, x.attention_dp, x.precision, x.bf16_attention, x.bf16_layers
    cut_over_all = x.zero == 3
    return x.tp, x.pp, x.gpus if cut_over_all or "train" in counts else None, x.ep, x.etp, cut_over_all
