"""Prices every layout of a seat in a pool: seconds of its calls, bytes between and during them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from rlhfsim.costs.devices import domain_of
from rlhfsim.costs.memory import shard, stages, trained_states
from rlhfsim.phases.generation import Generation
from rlhfsim.phases.iteration import Setting, forward_cost, generation_of, train_cost
from rlhfsim.phases.offload import moves
from rlhfsim.phases.timeline import batch_of, engine_bytes, role_bytes
from rlhfsim.search.layouts import role_layouts, rollout_layouts
from rlhfsim.search.options import Option, Tally, undominated
from rlhfsim.search.parallel import mapped
from rlhfsim.search.request import Request
from rlhfsim.search.structures import Policy
from rlhfsim.specs.dataflow import Call, dataflow
from rlhfsim.specs.hardware import Pool
from rlhfsim.specs.layout import Layout, RolloutLayout
from rlhfsim.specs.models import Models
from rlhfsim.specs.placement import GpuSet, Placement, Residency, RolloutSeat, Seat

TRAINED = ("actor", "critic")
ALONE = "alone"
"""Pool name while a seat is priced by itself."""
OFFLOAD_SHARE = 0.25
"""An optimizer on the host is considered where the states fill this share of a GPU."""


Priced = tuple[
    dict[tuple[str, int, int, bool], tuple[Option, ...]], dict[tuple[str, int, int], int], Tally
]
"""Options, numbers of layouts and the tally of a part of the work."""


class Pricer:
    """Prices seats for one request; results are kept, since structures share pools."""

    def __init__(self, request: Request, models: Models) -> None:
        """Nothing is priced yet."""
        self.request = request
        self.models = models
        self.calls = dataflow(request.workload)
        self.tally = Tally()
        self._timed: dict[tuple[str, int, int], list[tuple[Layout, float]]] = {}
        self._options: dict[tuple[str, int, int, bool], tuple[Option, ...]] = {}
        self._forward: dict[tuple[object, ...], float] = {}
        self._counts: dict[tuple[str, int, int], int] = {}
        self._memory: dict[tuple[str, int, Seat], tuple[float, float]] = {}

    def again(
        self, request: Request, models: Models, changed: frozenset[str] = frozenset()
    ) -> Pricer:
        """The prices that stay valid for another request: those of every seat but the changed ones."""
        other = Pricer(request, models)
        other._options = {k: v for k, v in self._options.items() if k[0] not in changed}
        other._counts = {k: v for k, v in self._counts.items() if k[0] not in changed}
        return other

    def fastest(self, seat: str, pool: GpuSet) -> float | None:
        """Seconds of the fastest option of a seat so far, whatever moves; None when nothing fits."""
        found = [
            o[0].seconds
            for k, o in self._options.items()
            if k[:3] == (seat, pool.hardware, pool.gpus) and o
        ]
        return min(found, default=None)

    def options(self, seat: str, pool: GpuSet, policy: Policy) -> tuple[Option, ...]:
        """Non-dominated options of a seat in a pool, fastest first."""
        away = policy.moves(seat)
        key = (seat, pool.hardware, pool.gpus, away)
        if key not in self._options:
            found = self._rollout(pool, away) if seat == "rollout" else self._role(seat, pool, away)
            self._options[key] = undominated(found)
        return self._options[key]

    def prefill(self, wanted: Iterable[tuple[str, GpuSet, Policy]]) -> None:
        """Price many seats at once, the seats of each pool size on one core.

        One pool is priced here, so that later workers inherit what its kernels cost.
        """
        pools: dict[tuple[int, int], dict[tuple[str, bool], tuple[str, GpuSet, Policy]]] = {}
        for seat, pool, policy in wanted:
            away = policy.moves(seat)
            if (seat, pool.hardware, pool.gpus, away) not in self._options:
                pools.setdefault((pool.hardware, pool.gpus), {})[seat, away] = (seat, pool, policy)
        for options, counts, tally in mapped(
            self._price_pool, sorted(pools.values(), key=len, reverse=True)
        ):
            self._options |= options
            self._counts |= counts
            self.tally = self.tally.plus(tally)

    def _price_pool(self, wanted: dict[tuple[str, bool], tuple[str, GpuSet, Policy]]) -> Priced:
        """What pricing these seats adds."""
        alone = Pricer(self.request, self.models)
        for seat, pool, policy in wanted.values():
            alone.options(seat, pool, policy)
        return alone._options, alone._counts, alone.tally

    def layouts(self, seat: str, pool: GpuSet) -> int:
        """Legal layouts of a seat in a pool, dominated ones included."""
        return self._counts.get((seat, pool.hardware, pool.gpus), 0)

    def _setting(self, pool: GpuSet, seat: Seat | RolloutSeat) -> Setting:
        """A placement with this seat alone, enough to price its calls."""
        home = (GpuSet(name=ALONE, gpus=pool.gpus, hardware=pool.hardware),)
        if isinstance(seat, RolloutSeat):
            actor = Seat(pool=ALONE, layout=Layout(dp=pool.gpus))
            placement = Placement(
                pools=home, actor=actor, rollout=seat, backend=self.request.backend
            )
        else:
            placement = Placement(pools=home, actor=seat, backend=self.request.backend)
        return Setting(
            models=self.models,
            placement=placement,
            workload=self.request.workload,
            cluster=self.request.cluster,
        )

    def _hardware(self, pool: GpuSet) -> Pool:
        return self.request.cluster.pools[pool.hardware]

    def _usable(self, pool: GpuSet) -> float:
        return self._hardware(pool).profile.usable_memory.value

    # --- trained and scoring roles ----------------------------------------------------------------

    def _role(self, role: str, pool: GpuSet, offload: bool) -> list[Option]:
        trained = role in TRAINED
        found = []
        for layout, seconds in self._times(role, pool):
            away = offload and layout.offload_optimizer == "none"
            residency: Residency = "offloaded" if away and not trained else "resident"
            seat = Seat(
                pool=ALONE, layout=layout, residency=residency, offload_between=away and trained
            )
            idle, busy = self._bytes(role, seat, pool)
            moved = self._moves(role, seat, pool) if away else 0.0
            found.append(Option(seat=seat, seconds=seconds + moved, idle=idle, busy=busy))
        return found

    def _times(self, role: str, pool: GpuSet) -> list[tuple[Layout, float]]:
        """Layouts that fit alone and are worth a price, with the seconds of the role's calls."""
        key = (role, pool.hardware, pool.gpus)
        if key not in self._timed:
            space = role_layouts(
                self.request,
                role,
                self.models.of(role),
                pool.gpus,
                domain_of(self._hardware(pool)),
                trained=role in TRAINED,
            )
            self._counts[key] = space.size
            self.tally.layouts += space.size
            self.tally.refused.update(space.dropped)
            worthy = [x for shape in space.shapes for x in self._worthy(role, shape, pool)]
            self._timed[key] = [(x, self._seconds(role, x, pool)) for x in worthy]
        return self._timed[key]

    def _worthy(self, role: str, shape: tuple[Layout, ...], pool: GpuSet) -> list[Layout]:
        """Of layouts that differ in the micro-batch alone, those that fit: the least and the largest two."""
        usable = self._usable(pool)
        if not self._states_fit(role, shape[0], usable) or not self._offload_pays(
            role, shape[0], pool
        ):
            self.tally.too_large[role] += len(shape)
            return []
        fitting = bisect_left(
            shape,
            True,
            key=lambda x: self._bytes(role, Seat(pool=ALONE, layout=x), pool)[1] > usable,
        )
        self.tally.too_large[role] += len(shape) - fitting  # a larger micro-batch needs more
        return [x for i, x in enumerate(shape[:fitting]) if i == 0 or i >= fitting - 2]

    def _states_fit(self, role: str, layout: Layout, usable: float) -> bool:
        """Whether the states alone leave room: most layouts of a large model fail here, cheaply."""
        lean = role not in TRAINED or (role == "actor" and self.request.workload.lora is not None)
        if lean:
            return True
        part = shard(self.models.of(role), layout, self.request.backend, stages(layout)[0])
        return (
            trained_states(
                part, layout, self.request.backend, optimizer=self.request.workload.optimizer
            ).total
            < usable
        )

    def _offload_pays(self, role: str, layout: Layout, pool: GpuSet) -> bool:
        """An optimizer on the host competes only where it frees a good part of the GPU."""
        if layout.offload_optimizer == "none":
            return True
        here = Seat(pool=ALONE, layout=replace(layout, offload_optimizer="none"))
        return self._bytes(role, here, pool)[0] >= OFFLOAD_SHARE * self._usable(pool)

    def _seconds(self, role: str, layout: Layout, pool: GpuSet) -> float:
        """Seconds of a role's calls; a forward pass is the same whatever the backward does."""
        seat = Seat(pool=ALONE, layout=layout)
        setting = self._setting(pool, seat)
        total = 0.0
        for call in self._calls_of(role):
            if call.kind == "train":
                total += train_cost(setting, role, seat).seconds
                continue
            x = layout
            key = (
                call.name,
                pool.hardware,
                x.tp,
                x.pp,
                x.cp,
                x.dp,
                x.ep,
                x.zero,
                x.micro_batch,
                x.offload_params,
            )
            if key not in self._forward:
                self._forward[key] = forward_cost(setting, call, seat).seconds
            total += self._forward[key]
        return total

    def _calls_of(self, role: str) -> list[Call]:
        return [
            call
            for call in self.calls
            if call.role == role and call.kind not in ("generate", "sync")
        ]

    def _moves(self, role: str, seat: Seat, pool: GpuSet) -> float:
        setting = self._setting(pool, seat)
        device, model = setting.device(seat), self.models.of(role)
        pairs = [
            moves(device, model, seat, call, self.request.workload, setting.placement)
            for call in self._calls_of(role)
        ]
        return sum(before.seconds + after.seconds for before, after in pairs)

    def _bytes(self, role: str, seat: Seat, pool: GpuSet) -> tuple[float, float]:
        """Bytes between calls and at the peak of its calls, on the fullest pipeline stage."""
        key = (role, pool.hardware, seat)
        if key not in self._memory:
            workload, trained = self.request.workload, role in TRAINED
            each = [
                role_bytes(
                    self.models.of(role), seat, backend=self.request.backend, profile=self._hardware(pool).profile,
                    batch=batch_of(workload), trained=trained, stage=stage, optimizer=workload.optimizer,
                    lora=workload.lora if role == "actor" else None, shares_weights=role == "reference" and workload.lora is not None,
                )
                for stage in stages(seat.layout)
            ]  # fmt: skip
            busy = max(max(b.training if trained else 0.0, b.scoring) for b in each)
            self._memory[key] = max(b.idle for b in each), busy
        return self._memory[key]

    # --- rollout ----------------------------------------------------------------------------------

    def _rollout(self, pool: GpuSet, sleeps: bool) -> list[Option]:
        layouts = rollout_layouts(
            self.request, self.models.actor, pool.gpus, domain_of(self._hardware(pool))
        )
        self._counts["rollout", pool.hardware, pool.gpus] = len(layouts)
        self.tally.layouts += len(layouts)
        found: list[Option] = []
        for (_, pp, _), group in groupby(
            sorted(layouts, key=lambda x: x.pp), key=lambda x: (x.tp, x.pp, x.ep)
        ):
            if pp > 1 and found and sleeps:
                break  # a pipeline only saves memory, which an engine that sleeps gives back
            found += self._utilizations(list(group), pool, sleeps)
        return found

    def _utilizations(
        self, layouts: list[RolloutLayout], pool: GpuSet, sleeps: bool
    ) -> list[Option]:
        """One layout at falling shares of memory: the same time while all sequences still fit."""
        found: list[Option] = []
        last: Generation | None = None
        for layout in sorted(layouts, key=lambda x: -x.memory_utilization):
            seat = RolloutSeat(pool=ALONE, layout=layout, sleep=2 if sleeps else 0)
            memory = engine_bytes(self.models.actor, seat, profile=self._hardware(pool).profile)
            if memory.shortfall > 0 or memory.running > self._usable(pool):
                self.tally.too_large["rollout"] += 1
                continue
            setting = self._setting(pool, seat)
            if last is None or last.waves > 1 or memory.kv_tokens < last.kv_tokens:
                last = generation_of(setting, memory.kv_tokens)
            assert last is not None
            before, after = moves(
                setting.device(seat),
                self.models.actor,
                seat,
                self.calls[0],
                self.request.workload,
                setting.placement,
            )
            seconds = last.seconds + before.seconds + after.seconds
            found.append(Option(seat=seat, seconds=seconds, idle=memory.idle, busy=memory.running))
        return found
