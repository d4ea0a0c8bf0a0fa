"""Second ways to the same numbers, for tests alone: recurrences, exact formulas and proven bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlhfsim.kernels import collectives
from rlhfsim.kernels.device import Device, Group
from rlhfsim.kernels.flop import FLASH_BACKWARD, attention_flop, matmul_flop
from rlhfsim.kernels.sequences import Sequences
from rlhfsim.simulation.asynchronous.bounds import ReplicaFloor
from rlhfsim.simulation.asynchronous.priced_rollout import PLAIN, floor_and_replicas
from rlhfsim.simulation.faults import Faults, daly_interval, simulate_faults
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.layout import Recompute
from rlhfsim.step.calls import CallSetting
from rlhfsim.step.iteration import Program
from rlhfsim.step.timetable import ROLLOUT, SYNC, learner_steps, timetable


def one_f_one_b(forward: Sequence[Sequence[float]], backward: Sequence[Sequence[float]]) -> float:
    """Seconds of 1F1B with times that differ by stage and micro-batch, `[stage][micro-batch]`.

    Max-plus recurrence: stage i runs min(p-i, m) - 1 forwards ahead, then alternates; a forward
    waits for the stage before, a backward for the stage after, and both for the GPU (T3).
    """
    stages, count = len(forward), len(forward[0])
    plans = [_order(stage, stages, count) for stage in range(stages)]
    done: dict[tuple[str, int, int], float] = {}
    position, free = [0] * stages, [0.0] * stages
    while any(position[i] < len(plans[i]) for i in range(stages)):
        for i in range(stages):
            while position[i] < len(plans[i]):
                kind, batch = plans[i][position[i]]
                ready = _ready(done, kind, i, batch, stages)
                if ready is None:
                    break
                seconds = (forward if kind == "F" else backward)[i][batch]
                free[i] = max(free[i], ready) + seconds
                done[kind, i, batch] = free[i]
                position[i] += 1
    return max(free)


def _ready(
    done: dict[tuple[str, int, int], float], kind: str, stage: int, batch: int, stages: int
) -> float | None:
    """When the input of a task is there; None while its producer has not been placed."""
    if kind == "F":
        return 0.0 if stage == 0 else done.get(("F", stage - 1, batch))
    if stage == stages - 1:
        return done.get(("F", stage, batch))
    return done.get(("B", stage + 1, batch))


def _order(stage: int, stages: int, count: int) -> list[tuple[str, int]]:
    ahead = min(stages - stage - 1, count)
    tasks = [("F", i) for i in range(ahead)]
    for i in range(count - ahead):
        tasks += [("F", ahead + i), ("B", i)]
    return tasks + [("B", i) for i in range(count - ahead, count)]


def exact_goodput(faults: Faults) -> float:
    """Goodput of this model without simulation: D / (e^(R/M) M (e^((D+C)/M) - 1)).

    The expected time of an interval under memoryless failures that also hit restarts.
    Source: Daly 2006, FGCS 22(3), eq. 12 to 13.
    """
    m, whole = faults.mtbf, faults.interval + faults.checkpoint
    return faults.interval / (math.exp(faults.restart / m) * m * math.expm1(whole / m))


def asynchronous_bound(
    priced: Program, setting: CallSetting, kv_tokens: float | None = None, *, queue: bool = True
) -> float:
    """Seconds per step that no simulated steady state without noise goes below.

        one-step-off:  max(g, L) + s;   overlapped:  max(g, L, s, (g + L + s) / 2)
        asynchronous:  max(L + max(0, (S - L r0) / r1), W / R) + s;   overlapped:  the same without s, and s

    S tokens and W replica seconds of a batch, R replicas, r0 and r1 the most tokens per second with eta
    and eta + 1 batches in the pool (`bounds`).

    Proof. One-step-off: generation, trainer and links each do one batch after the other; exposed, s follows
    both. Overlapped, batch k + 2 is generated after sync k, then trained, so from the start of sync k
    to that of sync k + 2 at least s + g + L pass, and the mean is that of an even number of steps.
    Asynchronous: take M measured steps, T their mean. (1) The trainer's steps follow each
    other, so each is its wait, L and, exposed, s; an overlapped transfer follows the one before. (2)
    While the trainer works at most eta batches are in the pool, and eta + 1 while it waits, for started
    <= (v + eta + 1) B and (v + 1) B or v B are taken; during an exposed sync nothing is generated. So the
    tokens made are at most M (w r1 + L r0), w the mean wait (for the batch, a drain, an earlier transfer).
    (3) Replica time holds the work done and, exposed,
    M s on each replica: R M T >= work + R M s. The result is T max(1, M S / tokens, M W / work), hence
    at least W / R (+ s), and with t = tokens / M < S at least (S / t) (L + s + max(0, t - L r0) / r1),
    which falls with t down to its value at t = S. Prefill, interruptions, drains, links and a full queue
    only add.
    """
    schedule = setting.placement.schedule
    calls, _ = timetable(learner_steps(priced.steps), PLAIN)
    learn = max((p.end for p in calls), default=0.0)
    sync = math.fsum(s.cost.seconds for s in priced.steps if s.name == SYNC)
    if schedule.one_step_off:
        made = math.fsum(s.cost.seconds for s in priced.steps if s.name.startswith(ROLLOUT))
        if schedule.overlapped_sync:
            return max(made, learn, sync, (made + learn + sync) / 2)
        return max(made, learn) + sync
    floor, replicas = floor_and_replicas(setting, kv_tokens)
    wait = max(0.0, floor.tokens - learn * _rate(floor, setting, replicas, 0.0))
    bound = max(learn + wait / _rate(floor, setting, replicas, 1.0), floor.work / replicas)
    return max(bound, sync) if schedule.overlapped_sync else bound + sync


def _rate(floor: ReplicaFloor, setting: CallSetting, replicas: int, more: float) -> float:
    batches = setting.placement.schedule.staleness + more
    return floor.pool_rate(batches * setting.workload.num_sequences, replicas)


def best_interval(
    faults: Faults, work: float, *, seed: int = 0, span: float = 4.0, points: int = 17
) -> float:
    """The interval with the best simulated goodput on a geometric grid around Daly's.

    All candidates see failures of the same seed (common random numbers).
    """
    center = daly_interval(faults)
    grid = center * np.geomspace(1 / span, span, points)
    tried = [simulate_faults(replace(faults, interval=float(d)), work, seed=seed) for d in grid]
    return float(grid[int(np.argmax([t.goodput for t in tried]))])


def hardware_flop(
    model: ModelSpec, sequences: Sequences, recompute: Recompute, *, lora: bool = False
) -> float:
    """FLOP that the GPUs execute in forward and backward.

        matrices: 2 N_a (1 forward + 2 backward, or + 1 with frozen weights) (+ 1 full recompute)
        attention: 1 forward + 2.5 flash backward (+ 1 with full or selective recompute)

    LoRA leaves out the weight gradients of frozen matrices (its own are below 1 %). The LM head is
    not recomputed, which is neglected here. Source: Korthikanti et al., arXiv 2205.05198, section 5.
    """
    matrices = matmul_flop(model, sequences.tokens)
    cores = attention_flop(model, sequences)
    again = 1 if recompute == "full" else 0
    cores_again = 0 if recompute == "none" else 1
    passes = (2 if lora else 3) + again
    return passes * matrices + (1 + FLASH_BACKWARD + cores_again) * cores


def broadcast(device: Device, size: float, group: Group) -> float:
    """Seconds of a pipelined broadcast of `size` bytes: steps a + S/B of the slowest tier.

    Source: NCCL's ring broadcast (Hu et al., arXiv 2507.04786); chunks hide all but the latency.
    """
    if group.ranks == 1 or size <= 0:
        return 0.0
    rate = collectives._bandwidth(device, "all_gather")
    if group.domains > 1:
        rate = min(rate, collectives._network(device) * group.per_domain)
    seconds: float = collectives._latency(device, group, 1) + size / rate
    return seconds
