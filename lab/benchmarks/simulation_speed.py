"""Seconds of a simulated step, steps and events a second, beside the limit.

    python lab/benchmarks/simulation_speed.py [--repeats 20]

64 H100, 70B PPO, 8,192 long-tailed samples (log-normal, mean 1,500 tokens, sigma 0.8, at most 8,192). Cold:
the first run of a workload, pricing of every call included, in a process that has run another; the first
run of the process also loads modules. Events are those of the SimPy queue and, where replicas never drain,
the events of their own
queue (completions, full caches). Rates are by CPU time; the steps of an asynchronous run include its warm-up.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from process import pace

from rlhfsim.memory.ledger import ledger
from rlhfsim.simulation.asynchronous.rollout_pool import RolloutPool
from rlhfsim.simulation.asynchronous.run import least_warmup
from rlhfsim.simulation.noise import Noise
from rlhfsim.simulation.run import simulate
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.workload.lengths import LogNormal
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.calls import CallSetting

TAIL = LogNormal(mean=1500, sigma=0.8, max=8192)
WORKLOAD = Workload(model="70b", prompts=512, samples=16, response_len=TAIL)
_CHANGE = itertools.count(1)
ASYNC_STEPS = 8
STEP_LIMIT_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run and the limit of one of its steps."""

    title: str
    setting: CallSetting
    steps: int
    noise: Noise | None = None
    record: bool = False
    limit_s: float | None = None


def main() -> None:
    """Print one row for each case."""
    parser = argparse.ArgumentParser(description="Seconds of a simulated step")
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    print(pace())
    print(
        f"{'64 GPUs, 8,192 samples; ms (CPU ms)':<38}{'cold':>18}{'warm':>18}{'a step, warm':>18}{'steps/s':>9}{'events':>8}{'events/s':>10}  limit"
    )
    cases = _cases()
    _row(replace(cases[0], title="first of the process", limit_s=None), 1)
    for case in cases:
        _row(replace(case, setting=_other(case.setting)), repeats)


def _row(case: Case, repeats: int) -> None:
    tokens = _kv_tokens(case.setting)

    def once() -> object:
        return simulate(
            case.setting,
            tokens,
            steps=case.steps,
            warmup=0,
            seed=0,
            noise=case.noise,
            record="trace" if case.record else None,
        )

    cold = _seconds(once)
    with _events() as count:
        once()
    fewer = repeats if case.steps == 1 else max(1, repeats // 10)
    warm = _median([_seconds(once) for _ in range(fewer)])
    steps = case.steps + (
        least_warmup(schedule) if (schedule := case.setting.placement.schedule).staleness else 0
    )
    wall, cpu = (seconds / steps for seconds in warm)
    limit = ""
    if case.limit_s is not None:
        met = "ok" if max(wall, cold[0] / steps) <= case.limit_s else "MISSED"
        limit = f"{case.limit_s * 1e3:g} ms a step {met}"
    print(
        f"{case.title:<38}{_ms(cold)}{_ms(warm)}{_ms((wall, cpu))}{1 / cpu:>9.0f}{count[0]:>8}{count[0] / warm[1]:>10.0f}  {limit}",
        flush=True,
    )


def _ms(seconds: tuple[float, float]) -> str:
    return f"{seconds[0] * 1e3:>9.1f}{f'({seconds[1] * 1e3:.1f})':>9}"


def _median(times: list[tuple[float, float]]) -> tuple[float, float]:
    walls, cpus = zip(*times, strict=True)
    return statistics.median(walls), statistics.median(cpus)


def _cases() -> tuple[Case, ...]:
    together, apart = _settings()
    off = _scheduled(apart, Schedule(staleness=1))
    stale = _scheduled(apart, Schedule(staleness=4, partial_rollout=True, overlapped_sync=True))
    drains = _scheduled(apart, Schedule(staleness=4))
    noise = Noise(lengths=True, straggler_share=0.05, straggler_slowdown=1.5)
    return (
        Case(title="synchronous, one pool", setting=together, steps=1, limit_s=STEP_LIMIT_S),
        Case(title="  with a trace", setting=together, steps=1, record=True, limit_s=STEP_LIMIT_S),
        Case(
            title="  20 steps, lengths drawn, stragglers",
            setting=together,
            steps=20,
            noise=noise,
            limit_s=STEP_LIMIT_S,
        ),
        Case(
            title="synchronous, pools apart, streaming",
            setting=_scheduled(apart, Schedule(streaming=True)),
            steps=1,
            limit_s=STEP_LIMIT_S,
        ),
        Case(title=f"one-step-off, {ASYNC_STEPS} steps", setting=off, steps=ASYNC_STEPS),
        Case(title=f"asynchronous, partial, {ASYNC_STEPS} steps", setting=stale, steps=ASYNC_STEPS),
        Case(title=f"asynchronous, drains, {ASYNC_STEPS} steps", setting=drains, steps=ASYNC_STEPS),
    )


def _settings() -> tuple[CallSetting, CallSetting]:
    """All roles on 64 GPUs, and the rollout on 32 beside the others."""
    trained, frozen = Layout(tp=8, dp=8, zero=3), Layout(tp=8, dp=8, zero=3)
    together = Placement(
        pools=(ResourcePool(name="all", gpus=64),),
        rollout=RolloutPlacement(pool="all", layout=RolloutLayout(tp=8, dp=8), sleep=1),
        actor=RolePlacement(pool="all", layout=trained),
        critic=RolePlacement(pool="all", layout=trained),
        reference=RolePlacement(pool="all", layout=frozen),
        reward=RolePlacement(pool="all", layout=frozen),
        weight_path="ipc",
    )
    half = replace(trained, dp=4)
    apart = Placement(
        pools=(ResourcePool(name="rollout", gpus=32), ResourcePool(name="trainer", gpus=32, start=32)),
        rollout=RolloutPlacement(pool="rollout", layout=RolloutLayout(tp=8, dp=4), sleep=0),
        actor=RolePlacement(pool="trainer", layout=half),
        critic=RolePlacement(pool="trainer", layout=half),
        reference=RolePlacement(pool="trainer", layout=half),
        reward=RolePlacement(pool="trainer", layout=half),
        weight_path="broadcast",
    )
    cluster, models = parse_cluster(64, "h100-sxm"), models_of(WORKLOAD)
    return tuple(
        CallSetting(models=models, placement=p, workload=WORKLOAD, cluster=cluster) for p in (together, apart)
    )  # type: ignore[return-value]


def _other(setting: CallSetting) -> CallSetting:
    """The same plan with other answers: nothing of its rollout is priced yet."""
    longer = replace(WORKLOAD, response_len=replace(TAIL, mean=TAIL.mean + next(_CHANGE)))
    return replace(setting, workload=longer)


def _scheduled(setting: CallSetting, schedule: Schedule) -> CallSetting:
    return replace(setting, placement=replace(setting.placement, schedule=schedule))


def _kv_tokens(setting: CallSetting) -> float | None:
    """What a replica's cache holds; the plans here need not fit otherwise."""
    found = ledger(setting.models, setting.placement, setting.workload, setting.cluster).kv_tokens
    return found if found and found > 0 else None


def _seconds(function: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    begin, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - begin, time.process_time() - cpu


@contextmanager
def _events() -> Iterator[list[int]]:
    """Counts events while it lasts: SimPy steps and those inside the rollout pool."""
    import simpy

    count = [0]
    step, fire = simpy.Environment.step, RolloutPool._fire

    def counted_step(self: simpy.Environment) -> None:
        count[0] += 1
        step(self)

    def counted_fire(self: RolloutPool, replica: int, time: float) -> bool:
        count[0] += 1
        return fire(self, replica, time)

    simpy.Environment.step, RolloutPool._fire = counted_step, counted_fire  # type: ignore[method-assign]
    try:
        yield count
    finally:
        simpy.Environment.step, RolloutPool._fire = step, fire  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
