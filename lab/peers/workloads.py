"""Ten asynchronous workloads with affine costs, and the seconds a step that our simulation gives them.

A decode step of a replica takes F + G n + A n c seconds (n running sequences, c their mean context), a
prefilled token G; a training step and a weight sync take fixed seconds. Legend: B samples a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from rlhfsim.kernels.cost import Cost, part
from rlhfsim.rollout.continuous_batching import tabulate
from rlhfsim.rollout.engine_step import on
from rlhfsim.simulation.asynchronous.engine import ReplicaEngine, StepClock
from rlhfsim.simulation.asynchronous.replica import RolloutReplica
from rlhfsim.simulation.asynchronous.rollout_pool import RolloutPool
from rlhfsim.simulation.asynchronous.run import least_warmup
from rlhfsim.simulation.asynchronous.schedules import Async, LearnerRun, OneStepOff
from rlhfsim.simulation.simulator import Simulator
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Late,
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.workload.workload import Reward, Rules
from rlhfsim.specs.workload.workload import Workload as Task
from rlhfsim.step.calls import CallSetting
from rlhfsim.step.iteration import Program
from rlhfsim.step.timetable import ROLLOUT, SYNC, Step

PROMPT = 512
"""Tokens of every prompt."""
BLOCK = 16
"""Tokens of a block of the KV cache."""
STEPS, WARMUP = 24, 8
"""Steps measured, and steps before them that do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a replica takes, seconds."""

    fixed: float
    """Seconds of a decode step that are fixed (F)."""
    each: float
    """Seconds of a token in a step, generated or prefilled (G)."""
    read: float
    """Seconds of a token of context that a step reads (A)."""


QWEN_7B = Costs(fixed=1.13e-2, each=2.0e-5, read=1.76e-8)
"""Least squares of our step table, Qwen2.5-7B on an H100, 8 to 256 sequences of 600 to 4500 tokens: within
1.4 % with 1.6e-5 a generated and 2.1e-5 to 2.2e-5 a prefilled token, one number here because peers have one."""
QWEN_32B = Costs(fixed=1.34e-2, each=3.1e-5, read=2.06e-8)
"""The same of Qwen2.5-32B, TP4: 2.8e-5 a generated and 3.4e-5 a prefilled token."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One question to both simulators."""

    name: str
    law: str
    """Law of the response lengths."""
    batch: int
    replicas: int
    staleness: int
    """eta."""
    learn: float
    """Seconds of a training step."""
    sync: float
    """Seconds of a weight sync."""
    partial: bool = True
    """Weight updates interrupt running sequences."""
    slots: int = 256
    capacity: int = 960_000
    """KV cache of a replica, tokens."""
    costs: Costs = QWEN_7B

    @cache  # noqa: B019 (ten workloads)
    def lengths(self) -> tuple[int, ...]:
        """Response lengths of the samples in the order of their start, enough for every step."""
        rng = np.random.default_rng(sum(map(ord, self.name)))
        n = self.batch * (STEPS + WARMUP + self.staleness + 2)
        match self.law:
            case "uniform":
                drawn = rng.integers(200, 1800, n).astype(float)
            case "bimodal":
                drawn = rng.permutation([4000.0 if i % 8 == 0 else 500.0 for i in range(n)])
            case _:
                drawn = np.clip(rng.lognormal(np.log(700), 0.8, n), 16, 6000)
        return tuple(int(x) for x in drawn)


WORKLOADS = (
    Workload(name="uniform-2", law="uniform", batch=64, replicas=2, staleness=1, learn=12, sync=1),
    Workload(name="uniform-4-train", law="uniform", batch=128, replicas=4, staleness=2, learn=40, sync=2),
    Workload(name="bimodal-2", law="bimodal", batch=64, replicas=2, staleness=2, learn=15, sync=1),
    Workload(name="bimodal-4-deep", law="bimodal", batch=128, replicas=4, staleness=4, learn=10, sync=1),
    Workload(name="lognormal-1", law="lognormal", batch=64, replicas=1, staleness=1, learn=10, sync=0.5),
    Workload(name="lognormal-4", law="lognormal", batch=128, replicas=4, staleness=2, learn=18, sync=1),
    Workload(
        name="lognormal-32b",
        law="lognormal",
        batch=128,
        replicas=2,
        staleness=4,
        learn=60,
        sync=4,
        costs=QWEN_32B,
    ),
    Workload(
        name="on-policy", law="uniform", batch=64, replicas=2, staleness=0, learn=12, sync=1, partial=False
    ),
    Workload(
        name="drained", law="lognormal", batch=64, replicas=2, staleness=2, learn=14, sync=1, partial=False
    ),
    Workload(name="few-slots", law="bimodal", batch=64, replicas=2, staleness=3, learn=10, sync=1, slots=32),
)


# --- ours -----------------------------------------------------------------------------------------------


def seconds(workload: Workload, *, one_step_off: bool = False, late: Late = "wait") -> float:
    """Mean step of our asynchronous simulation; `one_step_off`: whole batches, one ahead."""
    schedule = (
        Schedule(staleness=1)
        if one_step_off
        else Schedule(staleness=workload.staleness, partial_rollout=workload.partial, late=late)
    )
    run = LearnerRun(
        simulator=Simulator(setting(workload, schedule)),
        programs=lambda k: program(workload, _drain(workload, k) if one_step_off else 0.0),
        steps=STEPS,
        warmup=max(WARMUP, least_warmup(schedule)),
        cutoff=None,
    )
    way = OneStepOff(run, schedule) if one_step_off else Async(run, _pool(workload, schedule))
    run.simulator.env.run(until=run.simulator.env.process(way.train()))
    return run.mean


def engine(workload: Workload) -> ReplicaEngine:
    """One replica of these costs."""
    costs = workload.costs
    n, c = np.array([1.0, 2.0, 1024.0]), np.array([1.0, 1000.0, 1e6])
    tau = costs.fixed + costs.each * n[:, None] + costs.read * n[:, None] * c
    return ReplicaEngine(
        clock=StepClock(tabulate(n, c, on("hbm", tau))),
        slots=workload.slots,
        capacity=workload.capacity,
        prompt=PROMPT,
        own=PROMPT + BLOCK / 2,
        prefill=costs.each * PROMPT,
        again=lambda sequences, context: costs.each * sequences * context,
    )


def _pool(workload: Workload, schedule: Schedule, first: int = 0) -> RolloutPool:
    lengths, size = workload.lengths(), workload.batch

    def of_batch(k: int) -> list[list[float]]:
        start = (k + first) * size % len(lengths)
        return [[float(x)] for x in lengths[start : start + size]]

    return RolloutPool(
        replicas=[RolloutReplica(engine(workload)) for _ in range(workload.replicas)],
        lengths=of_batch,
        batch=size,
        staleness=schedule.staleness,
        partial=schedule.partial_rollout,
        late=schedule.late,
    )


def _drain(workload: Workload, k: int) -> float:
    """Seconds in which batch k is generated whole."""
    pool = _pool(workload, Schedule(), first=k)
    end = pool.run(1e12, idle=True)
    assert end is not None
    return end


def program(workload: Workload, generate: float) -> Program:
    """A step that takes the given seconds."""
    made: Any = None
    steps = (
        Step(name=ROLLOUT, pools=("rollout",), cost=_cost(generate)),
        Step(name="actor.train", pools=("train",), cost=_cost(workload.learn), needs=(ROLLOUT,)),
        Step(name=SYNC, pools=("train", "rollout"), cost=_cost(workload.sync), needs=("actor.train",)),
    )
    return Program(steps=steps, generation=made, continuous=_cost(generate), tokens=1.0, gpus=16)


def _cost(value: float) -> Cost:
    return Cost(parts=(part("compute", value, "given"),)) if value else Cost()


def setting(workload: Workload, schedule: Schedule) -> CallSetting:
    """Pools, schedule and workload; the model is a name only: nothing is priced."""
    task = Task(
        algorithm="grpo",
        model="qwen2.5-7b",
        prompts=workload.batch,
        samples=1,
        reward=Reward(rules=Rules()),
        kl=False,
    )
    rollout = RolloutLayout(dp=workload.replicas, max_num_seqs=workload.slots)
    placement = Placement(
        pools=(
            ResourcePool(name="train", gpus=8),
            ResourcePool(name="rollout", start=8, gpus=workload.replicas),
        ),
        actor=RolePlacement(pool="train", layout=Layout(dp=8)),
        rollout=RolloutPlacement(pool="rollout", layout=rollout, sleep=0),
        schedule=schedule,
        weight_path="broadcast",
    )
    return CallSetting(
        models=models_of(task),
        placement=placement,
        workload=task,
        cluster=Cluster(node_groups=(node_group("h100", 16),)),
    )
