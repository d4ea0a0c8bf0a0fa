"""An offloaded actor comes back to send its weights where the profile says so; the simulation takes as
long."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.tasks import tiny
from rlhfsim.api import estimate, simulate_file
from rlhfsim.plan import Plan, write_plan
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.loading import convert, parse_yaml
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Reward, Rules, Workload

MOVES = ["actor.sync.load", "actor.sync.unload"]


def _plan(gpu: str, residency: str, folder: Path, backend: str = "deepspeed") -> Plan:
    """One device, one small step."""
    model = str(tiny.config(folder) / "config.json")
    role = {"pool": "all", "layout": {"dp": 1, "micro_batch": 4}, "residency": residency}
    fields = {
        "backend": backend,
        "pools": [{"name": "all", "gpus": 1}],
        "weight_path": "ipc",
        "actor": role,
        "reference": role,
        "rollout": {"pool": "all", "layout": {"dp": 1, "memory_utilization": 0.3}, "sleep": 2},
    }
    work = Workload(
        algorithm="grpo",
        model=model,
        prompts=4,
        samples=4,
        prompt_len=Fixed(value=16),
        response_len=Fixed(value=16),
        reward=Reward(rules=Rules(seconds_per_sample=0.001, workers=1)),
    )
    return estimate(
        convert(Placement, parse_yaml("{}", "test"), fields),
        work,
        Cluster(node_groups=(node_group(gpu, 1, gpus_per_node=1),)),
    )


@pytest.mark.parametrize(
    ("gpu", "residency", "found"),
    [("cpu-core", "offloaded", MOVES), ("cpu-core", "resident", []), ("h100", "offloaded", [])],
)
def test_moves_around_the_sync(gpu: str, residency: str, found: list[str], tmp_path: Path) -> None:
    names = [p.name for p in _plan(gpu, residency, tmp_path).prediction.phases]
    assert [name for name in names if name in MOVES] == found


def test_they_are_those_of_training(tmp_path: Path) -> None:
    phases = {p.name: p.seconds for p in _plan("cpu-core", "offloaded", tmp_path).prediction.phases}
    assert phases["actor.sync.load"] == phases["actor.train.load"] > 0
    assert phases["actor.sync.unload"] == phases["actor.train.unload"] > 0
    assert phases["actor.logprob.load"] == phases["actor.train.load"] > phases["reference.logprob.load"]


@pytest.mark.parametrize(("gpu", "backend"), [("cpu-core", "deepspeed"), ("h100", "megatron")])
def test_the_simulation_takes_as_long(gpu: str, backend: str, tmp_path: Path) -> None:
    plan = _plan(gpu, "offloaded", tmp_path, backend)
    write_plan(tmp_path / "plan.json", plan)
    [steps, *_] = simulate_file(tmp_path / "plan.json").runs
    assert sum(steps) / len(steps) == pytest.approx(plan.prediction.step_s, rel=0.02)
