"""One seat of one pool: every layout priced for time and memory, the useless ones set aside."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from rlhfsim.costs.devices import domain_of
from rlhfsim.costs.memory import stages
from rlhfsim.phases.iteration import Setting, forward_cost, generation_of, train_cost
from rlhfsim.phases.offload import moves
from rlhfsim.phases.timeline import batch_of, engine_bytes, role_bytes
from rlhfsim.search.layouts import rollout_layouts, scoring_layouts, training_layouts
from rlhfsim.search.request import Request
from rlhfsim.search.structures import Policy
from rlhfsim.specs.dataflow import Call, dataflow
from rlhfsim.specs.layout import Layout
from rlhfsim.specs.models import Models
from rlhfsim.specs.placement import GpuSet, Placement, RolloutSeat, Seat

KEPT = 16
"""Non-dominated layouts of a seat that enter the combination."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A seat with a layout, by itself."""

    seat: Seat | RolloutSeat
    seconds: float
    """Its calls and moves in one step."""
    idle: float
    """Bytes on a GPU while others work."""
    busy: float
    """Most bytes on a GPU while it works."""


@dataclass(slots=True)
class Tally:
    """What was considered on the way."""

    layouts: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Reason -> layouts that the backend or the batch rules out."""
    too_large: Counter[str] = field(default_factory=Counter)
    """Seat -> layouts that do not fit even alone."""
    plans: int = 0
    """Complete plans: the cross product of layouts over seats, pools and policies."""
    unfit: int = 0
    """Plans that do not fit together, counted among the non-dominated ones."""
    priced: int = 0
    """Plans priced in full."""


class Pricer:
    """Prices seats for one request; results are kept, since structures share pools."""

    def __init__(self, request: Request, models: Models) -> None:
        """Nothing is priced yet."""
        self.request = request
        self.models = models
        self.calls = dataflow(request.workload)
        self.tally = Tally()
        self._raw: dict[tuple[str, int, int], list[tuple[Layout, float]]] = {}
        self._options: dict[tuple[str, int, int, Policy], tuple[Option, ...]] = {}
        self._counts: dict[tuple[str, int, int], int] = {}

    def options(self, seat: str, pool: GpuSet, policy: Policy) -> tuple[Option, ...]:
        """Non-dominated options of a seat in a pool, fastest first."""
        key = (seat, pool.hardware, pool.gpus, policy)
        if key not in self._options:
            found = (
                self._rollout(pool, policy) if seat == "rollout" else self._role(seat, pool, policy)
            )
            self._options[key] = _undominated(found)
        return self._options[key]

    def layouts(self, seat: str, pool: GpuSet) -> int:
        """Legal layouts of a seat in a pool, dominated ones included."""
        return self._counts.get((seat, pool.hardware, pool.gpus), 0)

    def setting(self, pool: GpuSet, seat: Seat | RolloutSeat) -> Setting:
        """A placement with this seat alone, enough to price its calls."""
        actor = (
            seat if isinstance(seat, Seat) else Seat(pool=pool.name, layout=Layout(dp=pool.gpus))
        )
        rollout = seat if isinstance(seat, RolloutSeat) else None
        placement = Placement(
            pools=(pool,), actor=actor, rollout=rollout, backend=self.request.backend
        )
        return Setting(
            models=self.models,
            placement=placement,
            workload=self.request.workload,
            cluster=self.request.cluster,
        )

    # --- trained and scoring roles ----------------------------------------------------------------

    def _role(self, role: str, pool: GpuSet, policy: Policy) -> list[Option]:
        trained = role in ("actor", "critic")
        offload = policy.optimizer_offloaded if trained else policy.frozen_offloaded
        found = []
        for layout, seconds in self._times(role, pool):
            away = offload and layout.offload_optimizer == "none"
            seat = Seat(
                pool=pool.name,
                layout=layout,
                residency="offloaded" if away and not trained else "resident",
                offload_between=away and trained,
            )
            idle, busy = self._bytes(role, seat, pool)
            if busy > self._usable(pool):
                self.tally.too_large[role] += 1
                continue
            found.append(
                Option(
                    seat=seat, seconds=seconds + self._moves(role, seat, pool), idle=idle, busy=busy
                )
            )
        return found

    def _times(self, role: str, pool: GpuSet) -> list[tuple[Layout, float]]:
        key = (role, pool.hardware, pool.gpus)
        if key not in self._raw:
            enumerate_ = training_layouts if role in ("actor", "critic") else scoring_layouts
            domain = domain_of(self.request.cluster.pools[pool.hardware])
            space = enumerate_(self.request, role, self.models.of(role), pool.gpus, domain)
            fitting = [x for x in space.layouts if self._fits_alone(role, x, pool)]
            self.tally.layouts += len(space.layouts)
            self.tally.refused.update(space.dropped)
            self.tally.too_large[role] += len(space.layouts) - len(fitting)
            self._counts[key] = len(space.layouts)
            self._raw[key] = [(x, self._seconds(role, x, pool)) for x in fitting]
        return self._raw[key]

    def _fits_alone(self, role: str, layout: Layout, pool: GpuSet) -> bool:
        """With everything of its own moved out of the way between calls."""
        return self._bytes(role, Seat(pool=pool.name, layout=layout), pool)[1] <= self._usable(pool)

    def _seconds(self, role: str, layout: Layout, pool: GpuSet) -> float:
        seat = Seat(pool=pool.name, layout=layout)
        setting = self.setting(pool, seat)
        times = [
            train_cost(setting, role, seat).seconds
            if call.kind == "train"
            else forward_cost(setting, call, seat).seconds
            for call in self._calls_of(role)
        ]
        return sum(times)

    def _calls_of(self, role: str) -> list[Call]:
        return [
            call
            for call in self.calls
            if call.role == role and call.kind not in ("generate", "sync")
        ]

    def _moves(self, role: str, seat: Seat, pool: GpuSet) -> float:
        if seat.residency == "resident" and not seat.offload_between:
            return 0.0
        setting = self.setting(pool, seat)
        device, model = setting.device(seat), self.models.of(role)
        pairs = [
            moves(device, model, seat, call, self.request.workload, setting.placement)
            for call in self._calls_of(role)
        ]
        return sum(before.seconds + after.seconds for before, after in pairs)

    def _bytes(self, role: str, seat: Seat, pool: GpuSet) -> tuple[float, float]:
        """Bytes between calls and at the peak of its calls, on the fullest pipeline stage."""
        workload = self.request.workload
        each = [
            role_bytes(
                self.models.of(role), seat, backend=self.request.backend, profile=self.request.cluster.pools[pool.hardware].profile,
                batch=batch_of(workload), trained=role in ("actor", "critic"), stage=stage, optimizer=workload.optimizer,
                lora=workload.lora if role == "actor" else None, shares_weights=role == "reference" and workload.lora is not None,
            )
            for stage in stages(seat.layout)
        ]  # fmt: skip
        return max(b.idle for b in each), max(max(b.training, b.scoring) for b in each)

    def _usable(self, pool: GpuSet) -> float:
        return self.request.cluster.pools[pool.hardware].profile.usable_memory.value

    # --- rollout ----------------------------------------------------------------------------------

    def _rollout(self, pool: GpuSet, policy: Policy) -> list[Option]:
        hardware = self.request.cluster.pools[pool.hardware]
        layouts = rollout_layouts(self.request, self.models.actor, pool.gpus, domain_of(hardware))
        self._counts["rollout", pool.hardware, pool.gpus] = len(layouts)
        self.tally.layouts += len(layouts)
        found = []
        for layout in layouts:
            seat = RolloutSeat(pool=pool.name, layout=layout, sleep=policy.sleep)
            memory = engine_bytes(self.models.actor, seat, profile=hardware.profile)
            if memory.shortfall > 0 or memory.running > hardware.profile.usable_memory.value:
                self.tally.too_large["rollout"] += 1
                continue
            setting = self.setting(pool, seat)
            generation = generation_of(setting, memory.kv_tokens)
            assert generation is not None
            before, after = moves(
                setting.device(seat),
                self.models.actor,
                seat,
                self.calls[0],
                self.request.workload,
                setting.placement,
            )
            seconds = generation.seconds + before.seconds + after.seconds
            found.append(Option(seat=seat, seconds=seconds, idle=memory.idle, busy=memory.running))
        return found


def _undominated(options: list[Option]) -> tuple[Option, ...]:
    """Options that no other beats in time, idle bytes and added bytes at once; fastest first.

    Where more than `KEPT` remain, the fastest half and an even sample of the leaner rest.
    """
    ordered = sorted(options, key=lambda o: (o.seconds, o.busy, o.idle))
    kept: list[Option] = []
    for option in ordered:
        if not any(
            k.idle <= option.idle and k.busy - k.idle <= option.busy - option.idle for k in kept
        ):
            kept.append(option)
    if len(kept) <= KEPT:
        return tuple(kept)
    lean = np.linspace(KEPT // 2, len(kept) - 1, KEPT - KEPT // 2).round().astype(int)
    return tuple(kept[: KEPT // 2] + [kept[i] for i in sorted(set(lean.tolist()))])
