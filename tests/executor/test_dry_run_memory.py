"""A dry run holds at every instant what the plan's ledger says: engines come and go where the simulator has them.

The fake engines know the bytes of their components and what they were asked to do; when that happens is the
executor's.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs

from rlhfsim.api import estimate
from rlhfsim.plan import Plan
from rlhfsim.simulation.run import simulate
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.loading import convert, parse_yaml
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.calls import CallSetting
from rlhfsim.trace import Trace

pytestmark = pytest.mark.slow
CASES = ("hybrid", "smart", "smart", "disaggregated", "async", "naive", "hybrid", "lend")
WAYS: dict[str, dict[str, Any]] = {
    "naive": {"weight_path": "host", "sleeps": [0]},
    "smart": {"weight_path": "disk", "sleeps": [1, 2]},
    "hybrid": {"weight_path": "ipc", "sleeps": [1, 2]},
    "disaggregated": {"weight_path": "broadcast", "sleeps": [0], "apart": True},
    "async": {"weight_path": "broadcast", "sleeps": [0], "apart": True, "schedule": {"staleness": 2}},
    "lend": {
        "weight_path": "broadcast",
        "sleeps": [0],
        "apart": True,
        "schedule": {"staleness": 1, "partial_rollout": True, "lend": True},
    },
}
CLUSTER = Cluster(node_groups=(node_group("h100", 4, gpus_per_node=4),))


def drawn(number: int) -> tuple[Placement, Workload]:
    """A plan of two GPUs a pool: algorithm, sharding, residency and sleep are drawn."""
    draw, way = np.random.default_rng(number), WAYS[CASES[number]]
    empty = parse_yaml("{}", "tests")
    algorithm = str(draw.choice(["ppo", "grpo"]))
    work = convert(
        Workload,
        empty,
        {
            "algorithm": algorithm,
            "model": "qwen2.5-0.5b",
            "prompts": 8,
            "samples": 1 if algorithm == "ppo" else 4,
            "prompt_len": {"kind": "fixed", "value": 64},
            "response_len": {"kind": "fixed", "value": int(draw.choice([64, 256]))},
            "reward": {"rules": {"seconds_per_sample": "1 ms", "workers": 2}},
        },
    )
    dp = int(draw.choice([1, 2]))
    training = {"dp": dp, "zero": int(draw.choice([1, 2, 3])) if dp > 1 else 0, "micro_batch": 2}
    apart = way.get("apart", False)
    fields: dict[str, Any] = {
        "backend": "deepspeed",
        "weight_path": way["weight_path"],
        "schedule": way.get("schedule", {}),
        "pools": [{"name": "train" if apart else "all", "gpus": dp}]
        + ([{"name": "rollout", "start": dp, "gpus": 1}] if apart else []),
        "rollout": {
            "pool": "rollout" if apart else "all",
            "layout": {"dp": 1, "tp": 1 if apart else dp, "memory_utilization": 0.3},
            "sleep": int(draw.choice(way["sleeps"])),
        },
    }
    for role in ("actor", "reference", *(("critic",) if algorithm == "ppo" else ())):
        moves = {} if CASES[number] == "naive" else {"residency": str(draw.choice(["resident", "offloaded"]))}
        if role != "reference" and CASES[number] != "naive":
            moves["offload_between"] = bool(draw.integers(2))
        fields[role] = {"pool": fields["pools"][0]["name"], "layout": training, **moves}
    return convert(Placement, empty, fields), work


def held(trace: Trace) -> dict[tuple[str, str], float]:
    """(Phase, pool) -> most bytes on a GPU of the pool during that phase."""
    found = {}
    for span in trace.spans:
        if span.kind != "wait":
            groups = levels(trace, span.pool, span.start_s, span.end_s).values()
            most = max((size for sizes in groups for size in sizes), default=0.0)
            found[span.name, span.pool] = max(found.get((span.name, span.pool), 0.0), most)
    return found


def levels(trace: Trace, pool: str, start: float, end: float) -> dict[str, list[float]]:
    """GPU of a pool -> bytes that it holds one after the other."""
    found: dict[str, list[float]] = {}
    rows = [c for c in trace.counters if c.name == "memory_bytes" and c.pool == pool and c.time_s < end]
    for group in {c.group for c in rows}:
        mine = [c for c in rows if c.group == group]
        before = [c.value for c in mine if c.time_s <= start][-1:]
        every = [*before, *(c.value for c in mine if c.time_s > start)]
        found[group] = [level for level, _ in groupby(every)]
    return found


def turns(sizes: list[float]) -> tuple[list[float], list[float]]:
    """Every top and every distinct bottom of a sequence, in the order of size: calls of one pool may swap.

    The last top, the weight sync, counts once, with what lies between: trainer and engine let go one after the
    other.
    """
    level = [sizes[0]]
    for size in sizes[1:]:
        if abs(size - level[-1]) > 0.01 * size:
            level.append(size)
    at = [
        i
        for i, (a, b, c) in enumerate(zip([0.0, *level], level, [*level[1:], 0.0], strict=False))
        if a < b > c
    ]
    while len(at) > 1 and level[at[-1]] == pytest.approx(level[at[-2]], rel=0.01):
        del level[at[-2] : at[-1]]
        at.pop()
    tops = [level[i] for i in at]
    bottoms = [b for a, b, c in zip(level, level[1:], level[2:], strict=False) if a > b < c]
    return sorted(tops), sorted({round(b, -8) for b in bottoms})


def second_step(trace: Trace) -> tuple[float, float]:
    spans = [s for s in trace.spans if s.step == 1 and s.name != "controller"]
    return min(s.start_s for s in spans), max(s.end_s for s in spans)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_dry_run_holds_what_the_simulated_timeline_holds(
    number: int, tmp_path: Path, ray_address: str
) -> None:
    placement, workload = drawn(number)
    made: Plan = estimate(placement, workload, CLUSTER)
    assert made.architecture == CASES[number]
    outcome, _ = runs.run(
        made, runs.settings(tmp_path / "nowhere"), tmp_path / "run", ray_address, dry_run=True
    )
    setting = CallSetting(models=models_of(workload), placement=placement, workload=workload, cluster=CLUSTER)
    simulated = simulate(setting, None, steps=3, record="trace").trace
    assert simulated is not None
    recorded, planned = held(outcome.ended.trace), held(simulated)
    assert {name for name, _ in planned} <= {name for name, _ in recorded} | {"controller"}
    if CASES[number] == "lend":  # the first wait is lent, which the simulation finds too short for it
        rows = [e for e in made.prediction.ledger if (e.phase, e.pool) == ("actor.generate", "train")]
        planned["actor.generate", "train"] = sum(row.bytes for row in rows)
    for key, level in planned.items():
        assert recorded.get(key, 0.0) == pytest.approx(level, rel=0.01), key
    if not placement.schedule.asynchronous:  # else a step has no end at which all meet
        for pool in placement.pools:
            [expected] = levels(simulated, pool.name, *second_step(simulated)).values()
            for sizes in levels(outcome.ended.trace, pool.name, *second_step(outcome.ended.trace)).values():
                for mine, planned_ in zip(turns(sizes), turns(expected), strict=True):
                    assert mine == pytest.approx(planned_, rel=0.01), pool.name
