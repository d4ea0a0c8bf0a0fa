"""Prices every option of a seat on a number of GPUs: seconds of its calls, bytes of its states."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from rlhfsim.costs.devices import Identity, domain_of
from rlhfsim.costs.memory import stages
from rlhfsim.phases.generation import Generation
from rlhfsim.phases.iteration import Setting, forward_cost, generation_of, train_cost
from rlhfsim.phases.ledger import no_start
from rlhfsim.phases.offload import moves
from rlhfsim.phases.timeline import EngineBytes, RoleBytes, batch_of, engine_bytes, role_bytes
from rlhfsim.phases.timetable import STREAM_CHUNKS
from rlhfsim.search.fit import (
    NO_SYNC,
    VIEWS,
    engine_sizes,
    engine_states,
    fitting,
    role_sizes,
    role_states,
)
from rlhfsim.search.layouts import role_layouts, rollout_layouts
from rlhfsim.search.parallel import mapped
from rlhfsim.search.request import Request
from rlhfsim.search.seats import (
    ALONE,
    TRAINED,
    Floats,
    Ints,
    Key,
    SeatTable,
    allowed,
    role_variants,
    rollout_variants,
    sync_classes,
)
from rlhfsim.simulation.stale import refilled_bound
from rlhfsim.specs.dataflow import Call, dataflow
from rlhfsim.specs.hardware import Pool
from rlhfsim.specs.layout import Layout, RolloutLayout
from rlhfsim.specs.models import Models
from rlhfsim.specs.placement import GpuSet, Placement, RolloutSeat, Schedule, Seat


class Pricer:
    """Prices seats for one request; tables are kept, since frames share them."""

    def __init__(self, request: Request, models: Models) -> None:
        """Nothing is priced yet."""
        self.request = request
        self.models = models
        self.calls = dataflow(request.workload)
        self._tables = _kept_tables(request)
        self._forward: dict[tuple[object, ...], float] = {}
        self._paces: dict[tuple[object, ...], float] = {}
        self._settings: dict[tuple[int, int], Setting] = {}
        self._rollouts: dict[tuple[int, int, object], Generation] = {}

    def table(self, key: Key) -> SeatTable:
        """The options of a seat that fit alone, fastest first."""
        if key not in self._tables:
            self._tables[key] = self._rollout(key) if key.seat == "rollout" else self._role(key)
        return self._tables[key]

    def again(
        self, request: Request, models: Models, changed: frozenset[str] = frozenset()
    ) -> Pricer:
        """The prices that stay valid for another request: those of every seat but the changed ones."""
        other = Pricer(request, models)
        known = {k: t for k, t in self._tables.items() if k.seat not in changed}
        other._tables = known | other._tables
        return other

    def tables(self, seat: str) -> list[SeatTable]:
        """Everything priced so far for one seat."""
        return [table for key, table in self._tables.items() if key.seat == seat]

    @property
    def refused(self) -> Counter[str]:
        """Layouts outside the space by reason, over all seats and pool sizes."""
        total: Counter[str] = Counter()
        for table in self._tables.values():
            total.update(table.refused)
        return total

    def prepare(self, keys: Iterable[Key]) -> None:
        """Price many seats, the seats of one pool size on one core."""
        missing = sorted({k for k in keys if k not in self._tables}, key=_size)
        batches = [list(batch) for _, batch in groupby(missing, key=lambda k: _size(k)[:2])]
        for tables in mapped(self._batch, sorted(batches, key=lambda b: -len(b))):
            self._tables |= {table.key: table for table in tables}

    def _batch(self, keys: list[Key]) -> list[SeatTable]:
        return [self.table(key) for key in keys]

    def hardware(self, key: Key) -> Pool:
        """The nodes under a pool."""
        return self.request.cluster.pools[key.hardware]

    def _setting(self, key: Key) -> Setting:
        """A pool by itself, enough to price the calls of any seat in it."""
        name = key.hardware, key.gpus
        if name not in self._settings:
            home = (GpuSet(name=ALONE, gpus=key.gpus, hardware=key.hardware),)
            actor = Seat(pool=ALONE, layout=Layout(dp=key.gpus))
            placement = Placement(pools=home, actor=actor, backend=self.request.backend)
            self._settings[name] = Setting(
                models=self.models, placement=placement, workload=self.request.workload, cluster=self.request.cluster,
            )  # fmt: skip
        return self._settings[name]

    # --- trained and scoring roles ----------------------------------------------------------------

    def _role(self, key: Key) -> SeatTable:
        role, trained = key.seat, key.seat in TRAINED
        pool, model = self.hardware(key), self.models.of(key.seat)
        space = role_layouts(self.request, role, model, key.gpus, domain_of(pool), trained=trained)
        legal, seats = 0, list[Seat]()
        for shape in space.shapes:
            works = True  # until a micro-batch is too large: a larger one needs more
            for layout in shape:
                variants = [s for s in role_variants(self.request, role, layout) if allowed(self.request, role, s)]  # fmt: skip
                legal += len(variants)
                works = works and (not variants or self._works(key, variants[0]))
                seats += variants if works else []
        parts = [self._bytes(key, s) for s in seats]
        process = pool.profile["host_process_bytes"]
        host = np.array([a.host + (a.framework > 0) * process for a, _ in parts])
        sizes = np.array([[role_sizes(p) for p in each] for each in parts]).reshape(-1, VIEWS, 19)
        fit = self._fitting(key, sizes, host)
        kept = [seats[i] for i in fit]
        return _sorted(SeatTable(
            key=key, legal=legal, refused=space.dropped, options=tuple(kept), sizes=sizes[fit],
            times=np.array([self._times(key, s) for s in kept]).reshape(-1, 6), host=host[fit],
            pieces=np.zeros((len(kept), STREAM_CHUNKS)), refilled=np.zeros(len(kept)), sync_class=sync_classes(kept),
        ))  # fmt: skip

    def _bytes(self, key: Key, seat: Seat) -> tuple[RoleBytes, RoleBytes]:
        """On the first and on the last pipeline stage."""
        work, role = self.request.workload, key.seat
        base = (
            role == "reference" and key.beside_actor and self.models.reference == self.models.actor
        )
        views = [
            role_bytes(
                self.models.of(role), seat, backend=self.request.backend, profile=self.hardware(key).profile,
                batch=batch_of(work), trained=role in TRAINED, stage=stage, optimizer=work.optimizer,
                lora=work.lora if role == "actor" else None, shares_weights=base and work.lora is not None,
                shares_process=key.beside_actor and self.request.backend != "deepspeed",
            )
            for stage in stages(seat.layout)
        ]  # fmt: skip
        return views[0], views[-1]

    def _works(self, key: Key, seat: Seat) -> bool:
        """Whether a layout's training fits, whatever happens to the seat between its calls."""
        if key.seat not in TRAINED:
            return True
        usable = self.hardware(key).profile.usable_memory.value
        return max(part.training for part in self._bytes(key, seat)) <= usable

    def _fitting(self, key: Key, sizes: Floats, host: Floats) -> Ints:
        """Options that run when nobody else is there."""
        pool = self.hardware(key)
        states = role_states(pool.profile, sizes, NO_SYNC)
        used = {"idle", *("train" if c.kind == "train" else "score" for c in self._calls(key.seat))}
        usable = pool.profile.usable_memory.value
        fits = np.ones(len(sizes), dtype=np.bool_)
        for name in used:
            fits &= fitting(states[name], usable, self.request.max_oom)
        each = min(key.gpus, pool.gpus_per_node)
        return np.flatnonzero(fits & (host * each <= pool.profile.node.host_memory.value))

    def _times(self, key: Key, seat: Seat) -> list[float]:
        """Load, run and unload of the forward call and of training."""
        setting = self._setting(key)
        device, model = setting.device(seat), self.models.of(key.seat)
        moved = seat.residency != "resident" or seat.offload_between
        found = [0.0] * 6
        for call in self._calls(key.seat):
            at = 3 if call.kind == "train" else 0
            if moved:
                before, after = moves(device, model, seat, call, self.request.workload, setting.placement)  # fmt: skip
                found[at], found[at + 2] = before.seconds, after.seconds
            found[at + 1] = (
                self._train(setting, key, seat)
                if call.kind == "train"
                else self._score(setting, key, seat)
            )
        return found

    def _train(self, setting: Setting, key: Key, seat: Seat) -> float:
        name = (key.seat, key.hardware, seat.layout)
        if name not in self._forward:
            self._forward[name] = train_cost(setting, key.seat, seat).seconds
        return self._forward[name]

    def _score(self, setting: Setting, key: Key, seat: Seat) -> float:
        """A forward pass is the same whatever the backward does."""
        x = seat.layout
        name = (key.seat, key.hardware, x.tp, x.pp, x.cp, x.dp, x.ep, x.zero, x.micro_batch, x.offload_params)  # fmt: skip
        if name not in self._forward:
            call = next(c for c in self._calls(key.seat) if c.kind != "train")
            self._forward[name] = forward_cost(setting, call, seat).seconds
        return self._forward[name]

    def _calls(self, role: str) -> list[Call]:
        return [c for c in self.calls if c.role == role and c.kind not in ("generate", "sync")]

    # --- rollout ----------------------------------------------------------------------------------

    def _rollout(self, key: Key) -> SeatTable:
        pool, model = self.hardware(key), self.models.actor
        layouts = rollout_layouts(self.request, model, key.gpus, domain_of(pool))
        seats = [s for x in layouts for s in rollout_variants(x, adapters=key.adapters)]
        seats = [s for s in seats if allowed(self.request, "rollout", s)]
        engines = [engine_bytes(model, s, profile=pool.profile) for s in seats]
        sizes = np.array([engine_sizes(e) for e in engines]).reshape(-1, 8)
        fit = self._running(key, seats, engines, sizes)
        kept, held = [seats[i] for i in fit], [engines[i] for i in fit]
        process = pool.profile["host_process_bytes"]
        stages = [self._stage(key, s, e) for s, e in zip(kept, held, strict=True)]
        refilled = [self._refilled(key, s, e) for s, e in zip(kept, held, strict=True)]
        return _sorted(SeatTable(
            key=key, legal=len(seats), refused=Counter(), options=tuple(kept), sizes=sizes[fit],
            times=np.array([times for times, _ in stages]).reshape(-1, 6),
            pieces=np.array([pieces for _, pieces in stages]).reshape(-1, STREAM_CHUNKS),
            refilled=np.array(refilled), host=np.array([e.host + process for e in held]), sync_class=sync_classes(kept),
        ))  # fmt: skip

    def _running(
        self, key: Key, seats: Sequence[RolloutSeat], engines: Sequence[EngineBytes], sizes: Floats
    ) -> list[int]:
        """Engines that start, and run when nobody else is there."""
        pool, batch = self.hardware(key), batch_of(self.request.workload)
        states = engine_states(pool.profile, sizes, NO_SYNC, with_actor=False)
        fits = fitting(states["running"], pool.profile.usable_memory.value, self.request.max_oom)
        found = []
        for i, (seat, engine) in enumerate(zip(seats, engines, strict=True)):
            starts = engine.shortfall <= 0 and engine.kv_tokens >= batch.max_tokens
            if fits[i] and starts and no_start(self.models, seat, pool.profile, engine, batch) <= self.request.max_oom:  # fmt: skip
                found.append(i)
        return found

    def _stage(
        self, key: Key, seat: RolloutSeat, engine: EngineBytes
    ) -> tuple[list[float], list[float]]:
        """Wake, generation and sleep; and when pieces of the batch are generated."""
        setting = self._with(key, seat)
        before, after = moves(
            setting.device(seat), self.models.actor, seat, self.calls[0], self.request.workload, setting.placement,
        )  # fmt: skip
        made = self._generation(setting, key, seat.layout, engine.kv_tokens)
        shares = len(made.finish) // STREAM_CHUNKS
        pieces = [before.seconds + t for t in made.finish[shares - 1 :: shares]]
        return [before.seconds, made.seconds, after.seconds, 0.0, 0.0, 0.0], pieces

    def _refilled(self, key: Key, seat: RolloutSeat, engine: EngineBytes) -> float:
        """The bound of a rollout that never drains; 0 where none may compete."""
        if "async" not in self.request.switches:
            return 0.0
        name = (key.hardware, key.gpus, seat.layout, engine.kv_tokens)
        if name not in self._paces:
            setting = self._with(key, seat)
            # staleness admits more sequences at a time, and a fuller engine works faster
            schedule = Schedule(staleness=self.request.max_staleness)
            setting = replace(setting, placement=replace(setting.placement, schedule=schedule))
            self._paces[name] = refilled_bound(setting, engine.kv_tokens)
        return self._paces[name]

    def _with(self, key: Key, seat: RolloutSeat) -> Setting:
        setting = self._setting(key)
        schedule = Schedule(double_buffered=key.double_buffered)
        return replace(
            setting, placement=replace(setting.placement, rollout=seat, schedule=schedule)
        )

    def _generation(
        self, setting: Setting, key: Key, layout: RolloutLayout, kv_tokens: float
    ) -> Generation:
        """The rollout stage; more KV cache changes nothing once all sequences run together."""
        name = (key.hardware, key.gpus, (layout.tp, layout.pp, layout.ep, key.double_buffered))
        known = self._rollouts.get(name)
        if known is None or known.waves > 1 or kv_tokens < known.kv_tokens:
            known = generation_of(setting, kv_tokens)
            assert known is not None
            self._rollouts[name] = known
        return known


def _sorted(table: SeatTable) -> SeatTable:
    order: Ints = np.argsort(table.seconds, kind="stable")
    return table.only(order)


def _size(key: Key) -> tuple[int, int, str, bool, bool, bool]:
    return key.hardware, key.gpus, key.seat, key.beside_actor, key.adapters, key.double_buffered


# --- tables of earlier searches ---------------------------------------------------------------------

_KEPT: OrderedDict[object, dict[Key, SeatTable]] = OrderedDict()
MOST_KEPT = 8
"""Requests whose prices a process remembers."""


def _kept_tables(request: Request) -> dict[Key, SeatTable]:
    """The tables of an earlier search that asked the same of every seat; prices depend on nothing else."""
    pools = tuple((Identity(p.profile), p.gpus, p.gpus_per_node) for p in request.cluster.pools)
    fixed = tuple((seat, *sorted(fields.items())) for seat, fields in sorted(request.fix.items()))
    name = (
        pools, request.cluster.oversubscription, request.workload, request.backend, request.forbid, fixed,
        request.limits, request.max_oom, request.max_memory, "async" in request.switches, request.max_staleness,
    )  # fmt: skip
    found = _KEPT.setdefault(name, {})
    _KEPT.move_to_end(name)
    while len(_KEPT) > MOST_KEPT:
        _KEPT.popitem(last=False)
    return found
