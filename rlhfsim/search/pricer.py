"""Prices every option of a role on a number of GPUs: seconds of its calls, bytes of its states."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from rlhfsim.elementwise import alike, groups
from rlhfsim.kernels.cost import Cost
from rlhfsim.kernels.devices import device_on
from rlhfsim.memory.components import ENGINE, NO_SYNC, Rows, engine_sums
from rlhfsim.memory.kv_cache import EngineBytes, engine_bytes
from rlhfsim.memory.ledger import no_start
from rlhfsim.memory.risk import fitting
from rlhfsim.memory.states import CUT, PASSED
from rlhfsim.rollout.generation import FINISH_POINTS, Generation
from rlhfsim.search import clock
from rlhfsim.search.cache import RoleOptions, SearchCache, process_cache
from rlhfsim.search.columns import Floats, Ints, OptionTimes
from rlhfsim.search.fitting_options import fitting_options
from rlhfsim.search.layout_shapes import CutShapes
from rlhfsim.search.options import (
    HOME,
    OptionTable,
    PriceKey,
    Variants,
    Wish,
    agreed,
    broken_limit,
    role_variants,
    rollout_variants,
    sync_classes,
)
from rlhfsim.search.parallel import dealt, mapped
from rlhfsim.search.progress import Progress, tell
from rlhfsim.search.request import Request
from rlhfsim.search.role_rows import ALONE, RoleRows, joined
from rlhfsim.search.rollout_layouts import rollout_layouts
from rlhfsim.simulation.asynchronous.priced_rollout import continuous_bound
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.layout_columns import (
    FIELDS,
    Layouts,
    ManyRoles,
    RolloutRoles,
    kind_of,
    rollout_columns_of,
)
from rlhfsim.specs.placement.placement import (
    AnyRolePlacement,
    Placement,
    ResourcePool,
    Rest,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
from rlhfsim.specs.workload.dataflow import Call, dataflow
from rlhfsim.specs.workload.micro_batch import batch_lengths
from rlhfsim.step.calls import CallSetting, bias_of, generations_of, scorer, trainer
from rlhfsim.step.measured import memory_doubt
from rlhfsim.step.timetable import STREAM_CHUNKS
from rlhfsim.weight_sync.offload import moves

SCORED = (
    *("tp", "pp", "cp", "dp", "ep", "etp", "dispatcher", "ep_overlap", "sequence_parallel"),
    *("shards", "micro_batch", "score_micro_batch", "offload_params"),
)
"""With `zero` and the packs: what a forward pass reads of a layout."""
AT_ONCE = 24_000
"""Options that are priced together, so that a search hears within half a second that its time is up."""
FEW = 20_000
"""Most options that one process prices: with fewer a second one costs more than it saves."""
ADAPTERS = next(path for path, rules in WEIGHT_PATHS.items() if rules.adapters_only)


class Pricer:
    """Prices roles for one request; skeletons, and searches with the same cache, share the tables."""

    def __init__(self, request: Request, models: Models, cache: SearchCache | None = None) -> None:
        """Nothing is priced yet, but what the cache holds."""
        self.request = request
        self.models = models
        self.doubt = memory_doubt(models, request.backend, request.workload, request.cluster)
        self.calls = dataflow(request.workload)
        self._tables: dict[PriceKey, OptionTable] = {}
        self._whole: tuple[Pricer, Sequence[Wish]] | None = None
        """Where the tables are taken from, and what their options must be."""
        self.cache = cache or process_cache()
        self._shared = self.cache.of(request, models)
        self._runs: dict[object, dict[object, float]] = {}
        """Seconds of a call by layout: roles run the same whether they share their GPUs or not."""
        self._counted: dict[PriceKey, int] = {}
        """Options of rollouts in the space."""
        self._paces: dict[tuple[object, ...], float] = {}
        self._settings: dict[tuple[int, int], CallSetting] = {}
        self._rollouts = defaultdict[object, dict[float, Generation]](dict)

    def table(self, key: PriceKey) -> OptionTable:
        """The options of a role that fit alone, fastest first."""
        if key not in self._tables and self._whole:
            whole, wishes = self._whole
            self._tables[key] = whole.table(key).that(w.holds for w in wishes if key.role in w.roles)
        if key not in self._tables:
            shared = self._shared.tables(key)
            if key not in shared:
                [shared[key]] = self._at_once([key])
            self._tables[key] = shared[key]
        return self._tables[key]

    def again(self, request: Request, models: Models, changed: frozenset[str] = frozenset()) -> Pricer:
        """The prices that stay valid for another request: those of every role but the changed ones.

        It may allow less risk of running out of memory: pools are asked for theirs again.
        """
        other = Pricer(request, models, self.cache)
        tables = {k: t for k, t in self._tables.items() if k.role not in changed}
        if request.max_oom < self.request.max_oom:
            tables = {k: t.only(np.flatnonzero(t.no_start <= request.max_oom)) for k, t in tables.items()}
        if request.alike != self.request.alike:
            tables = {k: replace(t, agreed=agreed(request, k.role, t.options)) for k, t in tables.items()}
        other._tables = tables
        return other

    def only(self, wishes: Sequence[Wish]) -> Pricer:
        """The same prices for the options that all wishes hold for; `legal` and `refused` stay."""
        other = Pricer(self.request, self.models, self.cache)
        other._whole = self, wishes
        return other

    def tables(self, role: str) -> list[OptionTable]:
        """Everything priced so far for one role."""
        return [table for key, table in self._tables.items() if key.role == role]

    @property
    def priced(self) -> int:
        """Options that are priced, of all roles."""
        return sum(map(len, self._tables.values()))

    @property
    def paths(self) -> dict[Any, Any]:
        """What is known about weight paths, see `search.weight_paths`."""
        return self._shared.paths

    @property
    def refused(self) -> Counter[str]:
        """Layouts outside the space by reason, over all roles and pool sizes."""
        total: Counter[str] = Counter()
        for table in self._tables.values():
            total.update(table.refused)
        return total

    def has(self, key: PriceKey) -> bool:
        """Whether a role is priced, or takes its prices from another pricer, which has it."""
        return key in self._tables or (self._whole is not None and self._whole[0].has(key))

    def fits(self, key: PriceKey) -> bool:
        """Whether a role has an option that fits alone; none is timed."""
        if self._whole or key in self._tables:
            return self.prepare([key]) and len(self.table(key)) > 0
        return len(self._fitting(key)) > 0

    def legal(self, key: PriceKey) -> int:
        """Options of a role in the space, priced or not."""
        if key.role != "rollout":
            return self._options(key).legal
        if key not in self._counted:  # every skeleton that is left over asks
            self._counted[key] = len(self.every(key))
        return self._counted[key]

    def blocks(self, key: PriceKey) -> Sequence[CutShapes]:
        """The layouts of a trained or scoring role in the space, by their cut."""
        return self._options(key).space.blocks

    def prepare(self, keys: Iterable[PriceKey]) -> bool:
        """Prices many roles, the roles of one pool size on one core, while there is time; whether it was
        enough."""
        if self._whole:
            return self._whole[0].prepare(keys)
        wanted = sorted({k for k in keys if k not in self._tables})  # the same in every process
        self._tables |= {k: t for k in wanted if (t := self._shared.tables(k).get(k)) is not None}
        missing = [k for k in wanted if k not in self._tables]
        pools = [list(batch) for _, batch in groupby(missing, key=lambda k: (k.hardware, k.gpus))]
        largest_first = sorted(pools, key=lambda batch: (-len(batch), -batch[0].gpus))
        few = sum(self.legal(key) for key in missing if key.role != "rollout") <= FEW
        batches = [largest_first] if few else dealt(largest_first)

        def told(done: int) -> None:
            tell(Progress("pricing layouts", done * len(pools) // len(batches), len(pools), "pool sizes"))

        for tables in mapped(self._priced, batches, told):
            for table in tables:
                self._tables[table.key] = self._shared.tables(table.key)[table.key] = table
        clock.spend(sum(self._tables[key].legal for key in wanted if key in self._tables))
        self._runs.clear()  # few are priced again, and they are as many as layouts
        return self._tables.keys() >= set(wanted)

    def _priced(self, pools: Sequence[Sequence[PriceKey]]) -> list[OptionTable]:
        """The roles of as many numbers of GPUs as there is time for, those of one name together."""
        tables, name = list[OptionTable](), attrgetter("role")
        for piece in self._pieces(pools):
            for _, group in groupby(sorted(piece, key=name), name):
                some = list(group)
                if clock.over():
                    return tables
                tables += self._at_once(some)
        return tables

    def _at_once(self, keys: Sequence[PriceKey]) -> list[OptionTable]:
        """Roles of one name."""
        return self._engine_tables(keys) if keys[0].role == "rollout" else self._roles(keys)

    def _pieces(self, pools: Iterable[Sequence[PriceKey]]) -> Iterator[list[PriceKey]]:
        """The roles of neighbours with some `AT_ONCE` options: where time is up, all of a number of GPUs are
        priced or none."""
        piece, options = list[PriceKey](), 0
        for keys in pools:
            piece += keys
            options += sum(self.legal(key) for key in keys if key.role != "rollout")
            if options >= AT_ONCE:
                yield piece
                piece, options = [], 0
        if piece:
            yield piece

    def hardware(self, key: PriceKey) -> NodeGroup:
        """The nodes under a pool."""
        return self.request.cluster.node_groups[key.hardware]

    def setting(self, key: PriceKey) -> CallSetting:
        """A pool by itself, enough to price the calls of any role in it."""
        name = key.hardware, key.gpus
        if name not in self._settings:
            home = (ResourcePool(name=ALONE, gpus=key.gpus, hardware=key.hardware),)
            actor = RolePlacement(pool=ALONE, layout=Layout(dp=key.gpus))
            placement = Placement(pools=home, actor=actor, backend=self.request.backend)
            self._settings[name] = CallSetting(
                models=self.models,
                placement=placement,
                workload=self.request.workload,
                cluster=self.request.cluster,
            )
        return self._settings[name]

    # --- trained and scoring roles ----------------------------------------------------------------

    def _fitting(self, key: PriceKey) -> OptionTable:
        rollout = key.role == "rollout"
        known = self._shared.engines if rollout else self._shared.fitting
        if rollout and key not in known:
            known[key] = self._engines(key)
        elif key not in known:
            self._fit([key])
        return known[key]

    def _roles(self, keys: Sequence[PriceKey]) -> list[OptionTable]:
        """Roles of one name on several numbers of GPUs; those that cost the same in a layout are priced at
        once."""
        priced = list[OptionTable]()
        self._fit(keys)
        for some in self._alike(keys):
            tables = [self._fitting(key) for key in some]
            ends = np.cumsum([len(table) for table in tables])[:-1]
            roles = joined([t.options for t in tables if isinstance(t.options, RoleRows)])
            times = np.split(self._times(some[0], roles).values, ends)
            priced += [
                _sorted(replace(t, times=OptionTimes(own))) for t, own in zip(tables, times, strict=True)
            ]
        return priced

    def _alike(self, keys: Sequence[PriceKey]) -> Iterable[Sequence[PriceKey]]:
        """Keys of a role on the same GPUs whose calls are biased alike."""
        groups = defaultdict[object, list[PriceKey]](list)
        for key in keys:
            calls = (bias_of(self.setting(key), call.name, ALONE) for call in self.calls_of(key.role))
            groups[key.hardware, *calls].append(key)
        return groups.values()

    def _fit(self, keys: Iterable[PriceKey]) -> None:
        """Notes the options of a role that run when nobody else is there, not yet timed."""
        known, by = self._shared.fitting, attrgetter("hardware", "beside_actor")
        for _, group in groupby(sorted((k for k in keys if k not in known), key=by), by):
            some = list(group)
            spaces = [self._options(key).space for key in some]
            kinds = [call.kind for call in self.calls_of(some[0].role)]
            variants = list(map(self._variants, some))
            found = fitting_options(self.request, self.models, some, spaces, variants, kinds, self.doubt)
            known.update((key, self._fitted(key, *of)) for key, of in zip(some, found, strict=True))

    def _fitted(self, key: PriceKey, roles: RoleRows, rows: Rows, places: Ints, host: Floats) -> OptionTable:
        """The options of a role that fit, not yet timed."""
        options = self._options(key)
        return OptionTable(
            key=key,
            legal=options.legal,
            refused=options.refused,
            options=roles,
            times=OptionTimes(np.broadcast_to(0.0, (len(roles), 6))),
            bytes=rows,
            places=places,
            host=host,
            pieces=np.zeros((len(roles), 0)),
            continuous=np.zeros(len(roles)),
            no_start=np.zeros(len(roles)),
            sync_class=sync_classes(roles),
            agreed=agreed(self.request, key.role, roles),
        )

    def _options(self, key: PriceKey) -> RoleOptions:
        """The layouts of a role in the space, and how many options they make, whether or not those fit."""
        if key not in self._shared.options:
            space, variants = self._shared.space(self.request, self.models, key), self._variants(key)
            if variants.reads == HOME:
                homes = (
                    (Layout(offload_optimizer=a, offload_params=b, zero=zero), n)
                    for (a, b, zero), n in space.homes.items()
                )
                legal = sum(n * len(variants.of(layout)) for layout, n in homes)
            else:
                legal = sum(len(variants.of(layout)) for layout in space.layouts)
            self._shared.options[key] = RoleOptions(legal=legal, refused=space.dropped, space=space)
        return self._shared.options[key]

    def _variants(self, key: PriceKey) -> Variants:
        """What a role may do between its calls: that depends on where its states lie and are cut, and on
        limits."""
        request, role = self.request, key.role
        limited = any(limit.role == role for limit in request.limits)

        def rests(layout: Layout) -> tuple[Rest, ...]:
            every = role_variants(request, role, layout, beside_actor=key.beside_actor, shares=key.shares)
            left = (s for s in every if not (limited and broken_limit(request, role, s)))
            return tuple(Rest(s.residency, s.offload_between) for s in left)

        return Variants(FIELDS if limited else HOME, rests)

    def every(self, key: PriceKey) -> tuple[AnyRolePlacement, ...]:
        """The same in a row, and those of a rollout."""
        if key.role != "rollout":
            of = self._variants(key).of
            return tuple(
                RolePlacement(pool=ALONE, layout=layout, **rest._asdict())
                for layout in self._options(key).space.layouts
                for rest in of(layout)
            )
        layouts = rollout_layouts(
            self.request, self.models.actor, key.gpus, self.hardware(key), shares=key.shares
        )
        options = (
            s
            for x in layouts
            for s in rollout_variants(self.request, x, adapters=key.adapters, shares=key.shares)
        )
        return tuple(s for s in options if not broken_limit(self.request, "rollout", s))

    def _times(self, key: PriceKey, roles: RoleRows) -> OptionTimes:
        setting, model = self.setting(key), self.models.of(key.role)
        device = device_on(self.request.cluster, key.hardware, self.request.backend)
        times = OptionTimes(np.zeros((len(roles), 6)))
        apart = np.flatnonzero(roles.frees)
        cuts = [column[roles.layout[apart]] for column in roles.layouts.columns(CUT)]
        first, places = groups(roles.rest[apart], *cuts)
        rests = [roles.rests[rest] for rest in roles.rest[apart[first]].tolist()]
        movers = list(zip(rests, *(column[first].tolist() for column in cuts), strict=True))
        for call in self.calls_of(key.role):
            train = call.kind == "train"
            load, run, unload = times.of_call(train=train)
            run[:] = self._seconds(key, call, roles.layouts)[roles.layout]
            moved = self._shared.moves.setdefault((model, key.role, train, key.hardware), {})
            new = [i for i, mover in enumerate(movers) if mover not in moved]
            for rest, some in alike(rests[i] for i in new):
                mine = np.array(new)[some]
                many = ManyRoles(roles.layouts.only(roles.layout[apart[first[mine]]]), *rest)
                around = moves(device, model, many, call, self.request.workload, setting.placement)
                seconds = (np.broadcast_to(cost.seconds, len(mine)).tolist() for cost in around)
                moved.update(zip((movers[i] for i in mine.tolist()), zip(*seconds, strict=True), strict=True))
            if movers:
                load[apart], unload[apart] = np.array([moved[mover] for mover in movers])[places].T
        return times

    def _seconds(self, key: PriceKey, call: Call, layouts: Layouts) -> Floats:
        """Seconds of a call in each layout; what layouts share is priced once.

        A forward pass is the same whatever the backward does, a backward wherever the optimizer lies, an
        update whatever the micro-batches.
        """
        setting, model, train = self.setting(key), self.models.of(key.role), call.kind == "train"
        placed = setting.placement.actor
        adapted = call.role == "actor" and self.request.workload.lora is not None
        forward = model, call.kind == "logprob", bias_of(setting, call.name, ALONE), adapted
        known = self._runs.setdefault((key.hardware, call.name if train else forward), {})

        def priced(columns: Sequence[Any], cost: Callable[[Layouts], Cost]) -> Floats:
            first, places = groups(*columns)
            names = list(zip(*(column[first].tolist() for column in columns), strict=True))
            if new := [i for i, name in enumerate(names) if name not in known]:
                seconds = np.broadcast_to(cost(layouts.only(first[new])).seconds, len(new)).tolist()
                known.update(zip((names[i] for i in new), seconds, strict=True))
            return np.array([known[name] for name in names])[places]

        if not len(layouts):
            return np.zeros(0)
        if not train:
            read = (*layouts.columns(SCORED), layouts.zero == 3, layouts.pack(scoring=True))
            return priced(read, scorer(setting, call, placed).passes)
        pricing = trainer(setting, call.role, placed)
        passes = priced(layouts.columns((*PASSED, "offload_params")), pricing.passes)
        if pricing.updates is None:
            return passes
        return passes + priced(layouts.columns(CUT), pricing.updates)

    def calls_of(self, role: str) -> list[Call]:
        """Forward calls and training of a role."""
        return [c for c in self.calls if c.role == role and c.kind not in ("generate", "sync")]

    # --- rollout ----------------------------------------------------------------------------------

    def _engines(self, key: PriceKey) -> OptionTable:
        """Engines that start, and run when nobody else is there, not yet timed."""
        profile, most_risk = self.hardware(key).profile, self.request.max_oom
        batch = batch_lengths(self.request.workload)
        roles = [s for s in self.every(key) if isinstance(s, RolloutPlacement)]
        rows = np.zeros(len(roles), dtype=ENGINE)
        for _, same in alike(kind_of(s.layout) for s in roles):
            some = [roles[row] for row in same.tolist()]
            levels, residency = [s.sleep_level for s in some], [s.residency for s in some]
            layouts = rollout_columns_of([s.layout for s in some])
            columns = RolloutRoles(layouts, np.array(levels), np.array(residency))
            for name, size in engine_bytes(self.models.actor, columns, profile=profile)._asdict().items():
                rows[name][same] = size
        states = engine_sums(profile, rows, NO_SYNC, with_actor=False)
        fits = fitting(states["running"], profile.usable_memory.value, most_risk, self.doubt)
        starts = (rows["shortfall"] <= 0) & (rows["kv_tokens"] >= batch.max_tokens)
        fails, asked = np.where(starts, 0.0, 1.0), np.flatnonzero(fits & starts)
        for _, same in alike(roles[row].layout for row in asked):
            first = asked[same[0]]
            held = EngineBytes(*rows[first].item())
            fails[asked[same]] = no_start(self.models, roles[first], profile, held, batch)
        fits &= fails <= most_risk
        left = tuple(roles[i] for i in np.flatnonzero(fits))
        return OptionTable(
            key=key,
            legal=len(roles),
            refused=Counter(),
            options=left,
            bytes=rows[fits],
            times=OptionTimes(np.zeros((len(left), 6))),
            pieces=np.zeros((len(left), STREAM_CHUNKS)),
            no_start=fails[fits],
            continuous=np.zeros(len(left)),
            host=np.where(rows["sleep"] == 1, rows["weights"], 0.0)[fits] + profile["host_process_bytes"],
            sync_class=sync_classes(left),
            agreed=agreed(self.request, key.role, left),
        )

    def _engine_tables(self, keys: Sequence[PriceKey]) -> list[OptionTable]:
        """Rollouts on several numbers of GPUs, whose engines are priced together."""
        tables = [self._fitting(key) for key in keys]
        rows = [
            (table.key, role, held)
            for table in tables
            for role, held in zip(table.options, table.bytes["kv_tokens"].tolist(), strict=True)
            if isinstance(role, RolloutPlacement)
        ]
        priced, share = self._generations(rows), FINISH_POINTS // STREAM_CHUNKS
        times, pieces = OptionTimes(np.zeros((len(rows), 6))), np.zeros((len(rows), STREAM_CHUNKS))
        for _, same in alike((key.hardware, _woken(role)) for key, role, _ in rows):
            times.load[same], times.unload[same] = self._waking(*rows[same[0]][:2])
        times.run[:] = [generation.seconds for generation in priced]
        for row, generation in zip(pieces, priced, strict=True):
            row[:] = generation.finish[share - 1 :: share]
        pieces += times.load[:, None]
        continuous = np.array([self._continuous(*row) for row in rows])
        ends = np.cumsum([len(table) for table in tables]).tolist()
        return [
            _sorted(replace(table, times=times.only(mine), pieces=pieces[mine], continuous=continuous[mine]))
            for table, mine in zip(tables, map(slice, [0, *ends], ends), strict=True)
        ]

    def _waking(self, key: PriceKey, role: RolloutPlacement) -> tuple[float, float]:
        """Seconds until an engine is awake, and until it sleeps."""
        device = device_on(self.request.cluster, key.hardware, self.request.backend)
        home = self.setting(key).placement
        before, after = moves(device, self.models.actor, role, self.calls[0], self.request.workload, home)
        return before.seconds, after.seconds

    def _continuous(self, key: PriceKey, role: RolloutPlacement, kv_tokens: float) -> float:
        """The bound of a rollout that never drains; 0 where none may compete."""
        if not self.request.stale:
            return 0.0
        name = (key.hardware, key.gpus, key.adapters, role.layout, kv_tokens)
        if name not in self._paces:
            # staleness admits more sequences at a time, and a fuller engine works faster
            setting = self._with(key, role, Schedule(staleness=self.request.max_staleness))
            self._paces[name] = continuous_bound(setting, kv_tokens)
        return self._paces[name]

    def _with(self, key: PriceKey, role: RolloutPlacement, schedule: Schedule) -> CallSetting:
        setting = self.setting(key)
        placed = replace(setting.placement.having(rollout=role), schedule=schedule)
        if key.adapters:  # they cost a decode step time of their own
            placed = replace(placed, weight_path=ADAPTERS)
        return replace(setting, placement=placed)

    def _generations(self, rows: Sequence[tuple[PriceKey, RolloutPlacement, float]]) -> list[Generation]:
        """The rollout stages of engines: of each the one with most KV cache, then those that it says nothing
        of."""
        names = [(k.hardware, k.gpus, k.double_buffered, k.adapters, _read(s.layout)) for k, s, _ in rows]
        for whole in (False, True):
            new: dict[object, tuple[object, tuple[PriceKey, RolloutPlacement, float]]] = {}
            for name, row in zip(names, rows, strict=True):
                if self._known(name, row[2]) is None:
                    new.setdefault((name, row[2] if whole else None), (name, row))
            settings = [
                self._with(key, role, Schedule(double_buffered=key.double_buffered))
                for _, (key, role, _) in new.values()
            ]
            held = [row[2] for _, row in new.values()]
            for (told, (*_, tokens)), generation in zip(
                new.values(), generations_of(settings, held), strict=True
            ):
                assert generation is not None
                self._rollouts[told][tokens] = generation
        found = [self._known(name, held) for name, (*_, held) in zip(names, rows, strict=True)]
        return [generation for generation in found if generation]

    def _known(self, name: object, held: float) -> Generation | None:
        """A rollout stage that is priced: more KV cache changes nothing once all sequences run together."""
        for tokens, generation in self._rollouts[name].items():
            if tokens == held or (generation.waves <= 1 and generation.kv_tokens <= held):
                return generation
        return None


_read = attrgetter(
    *("tp", "pp", "ep", "attention_dp", "speculation", "prefill", "max_num_seqs", "max_batched_tokens")
)
"""What decides how long an engine of a pool generates, where its KV cache holds all sequences."""


def _woken(role: RolloutPlacement) -> tuple[object, ...]:
    """What decides how long an engine wakes and sleeps."""
    layout = role.layout
    return role.residency, role.sleep, layout.tp * layout.pp, layout.replica_gpus


def _sorted(table: OptionTable) -> OptionTable:
    """The fastest option first."""
    return table.only(np.argsort(table.times.total, kind="stable"))
