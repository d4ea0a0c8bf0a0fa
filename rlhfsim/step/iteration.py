"""One RLHF step, priced and ordered: the calls of `step.calls`, put in order by `timetable`.

Closed forms (physics section 8). In a pool calls run one after the other;
pools run side by side; a call starts when its inputs and its pool are ready, so the synchronous step
is the length of the critical chain. With staleness the pools run side by side for good and the step
is the slower side (steady state) plus the exposed weight sync.

Not known here: contention on shared links and host memory, stragglers, queues between pools.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Protocol, TypeVar

from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Cost, total
from rlhfsim.rollout.environment import Turns
from rlhfsim.rollout.generation import Generation
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.placement import Placement, Schedule
from rlhfsim.specs.workload.dataflow import Call, dataflow
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.calls import (
    CallSetting,
    continuous_cost,
    controller_cost,
    generation_of,
    passed_on,
    steps_of,
    turns_of,
)
from rlhfsim.step.framework_overhead import own_parts, with_driver
from rlhfsim.step.timetable import ROLLOUT, SYNC, Phase, Step, steady_timetable, timetable
from rlhfsim.training.packing import sequences_of


@frozen
class Iteration:
    """A priced step."""

    phases: tuple[Phase, ...]
    critical: tuple[int, ...]
    """Indices of the phases that make up the step time, in order."""
    cost: Cost
    """The critical chain as one cost; its sum is the step time."""
    generation: Generation | None
    tokens: float
    """Prompt and response tokens of the step."""
    gpus: int
    """GPUs of the cluster, idle ones too."""

    @property
    def seconds(self) -> float:
        """Seconds per step (steady state where staleness is allowed)."""
        return self.cost.seconds

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Prompt and response tokens / step time / all GPUs, as NeMo-RL counts."""
        return self.tokens / self.seconds / self.gpus


@frozen
class Program:
    """The priced steps of one iteration, before anything is said about when they run."""

    steps: tuple[Step, ...]
    """In the order of the dataflow, moves around their calls."""
    generation: Generation | None
    continuous: Cost | None
    """Generation per batch of an engine that never drains; None where each batch drains."""
    tokens: float
    """Prompt and response tokens of the iteration."""
    gpus: int
    turns: Turns | None = None
    """How the rollout alternates with its environment; its time is part of `generation`."""

    def longer(self, factors: Mapping[str, float]) -> Program:
        """The program with the calls named taking so many times as long."""
        if all(factor == 1 for factor in factors.values()):
            return self
        generate = factors.get("actor.generate", 1.0)
        return replace(
            self,
            steps=tuple(replace(s, cost=s.cost.scaled(factors.get(s.name, 1.0))) for s in self.steps),
            generation=self.generation.scaled(generate) if self.generation else None,
            continuous=self.continuous.scaled(generate) if self.continuous else None,
        )


Known = dict[tuple[object, ...], list[Step]]
"""Steps of calls, by the call and the roles that decide them."""
T = TypeVar("T")
GENERATION = "generation"
"""Name of the piece that the rollout is, without the moves around it."""


class PricePiece(Protocol):
    """Prices one piece of a program, or finds it; `after`: the piece whose result `price` holds."""

    def __call__(self, name: str, price: Callable[[CallSetting], T], *, after: str | None = None) -> T:
        """The piece."""


def program(
    setting: CallSetting,
    kv_tokens: float | None = None,
    known: Known | None = None,
    piece: PricePiece | None = None,
) -> Program:
    """Every call and move of the step, priced; `kv_tokens` is the KV capacity of one rollout replica.

    `known`: steps of plans with the same pools, workload, backend and weight path; those of this plan are
    added. `piece` prices one piece of it; None: all on `setting`.
    """
    known = {} if known is None else known
    price = piece or _on(setting)
    generation = price(GENERATION, partial(generation_of, kv_tokens=kv_tokens))
    steps: list[Step] = []
    for call in dataflow(setting.workload):
        name = _decided_by(setting.placement, call, kv_tokens)
        if name not in known:
            after = GENERATION if call.kind == "generate" else None
            known[name] = price(
                call.name, partial(steps_of, call=call, generation=generation if after else None), after=after
            )
        steps += known[name]
    own = own_parts(setting.workload, setting.cluster)
    for part, seconds in own.items():
        steps = with_driver(steps, seconds, name=part, streams=False)
    if setting.workload.router_replay or setting.workload.teacher_top:
        for part, seconds in price("passed on", passed_on).items():
            steps = with_driver(steps, seconds, name=part)
    if setting.workload.generates:
        cost, blocking = price("controller", _controller)
        steps = with_driver(steps, cost, streams=not own, blocking=blocking)
    return Program(
        steps=tuple(steps),
        generation=generation,
        continuous=price("continuous", partial(continuous_cost, kv_tokens=kv_tokens)),
        tokens=sequences_of(_unpadded(setting.workload), setting.trained).tokens,
        gpus=sum(group.gpus for group in setting.cluster.node_groups),
        turns=price("turns", partial(turns_of, kv_tokens=kv_tokens)),
    )


def _on(setting: CallSetting) -> PricePiece:
    def price(name: str, price: Callable[[CallSetting], T], *, after: str | None = None) -> T:
        del name, after
        return price(setting)

    return price


def _controller(setting: CallSetting) -> tuple[Cost, bool]:
    """The controller's own work, and whether moves wait for it."""
    return controller_cost(setting), bool(setting.device(setting.placement.actor)["blocking_moves"])


def _decided_by(placement: Placement, call: Call, kv_tokens: float | None) -> tuple[object, ...]:
    if call.role == "rules":
        return (call.name,)
    if call.kind == "sync":
        return call.name, placement.actor, placement.rollout
    if call.kind == "generate":
        return call.name, placement.rollout, kv_tokens
    return call.name, placement.roles.get(call.role)


@lru_cache(maxsize=64)
def _unpadded(workload: Workload) -> Workload:
    return replace(workload, packing=True)


def switch_seconds(setting: CallSetting, kv_tokens: float | None) -> tuple[float, float]:
    """Seconds until the trainer's GPUs generate with new weights, and until their engine sleeps again."""
    steps = program(replace(setting, placement=setting.placement.lent), kv_tokens).steps
    wake, sleep = (
        math.fsum(s.cost.seconds for s in steps if s.name in names)
        for names in ((f"{ROLLOUT}.load", SYNC), (f"{ROLLOUT}.unload",))
    )
    return wake, sleep


def iteration(
    models: Models,
    placement: Placement,
    workload: Workload,
    cluster: Cluster,
    *,
    kv_tokens: float | None = None,
) -> Iteration:
    """The priced step of a plan in closed form: no link is shared, no queue fills."""
    setting = CallSetting(models=models, placement=placement, workload=workload, cluster=cluster)
    return closed_form(program(setting, kv_tokens), placement.schedule)


def closed_form(priced: Program, schedule: Schedule) -> Iteration:
    """The program put in order by `timetable`, in steady state where staleness is allowed."""
    steps = list(priced.steps)
    if schedule.asynchronous:
        phases, critical = steady_timetable(steps, schedule, priced.continuous)
    else:
        finish = priced.generation.finish if priced.generation else None
        phases, critical = timetable(steps, schedule, finish)
    return Iteration(
        phases=phases,
        critical=critical,
        cost=total(phases[i].cost for i in critical),
        generation=priced.generation,
        tokens=priced.tokens,
        gpus=priced.gpus,
    )
