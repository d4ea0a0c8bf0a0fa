"""The README's plan, scaled down, really runs on two Ray nodes: hybrid and with a pool for the rollout."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import runs

from executor.coordination import forks
from rlhfsim.api import design, estimate
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group, parse_cluster
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.placement.scaling import scaled_placement, scaled_workload
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.trace import read_trace

pytestmark = pytest.mark.slow


@contextmanager
def nodes_with(slots: int) -> Iterator[str]:
    """A cluster of two raylets with so many slots each; its head has none."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster as RayCluster

    small = {
        "object_store_memory": 128 * 2**20,
        "include_log_monitor": False,
        "setup_worker_path": forks.__file__,
    }
    cluster = RayCluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "no_monitor": True, **small},
    )
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, resources={"slot": slots}, **small)
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def two_nodes(fork_server: str) -> Iterator[str]:
    """Two slots a node."""
    with nodes_with(2) as address:
        yield address


def scaled(architecture: str, model: Path) -> Plan:
    """What `design --gpus 64 --model 70b` chooses, on about four slots, two of each node."""
    request = Request(
        cluster=parse_cluster(gpus=64), workload=Workload(model="70b"), architecture=architecture
    )
    chosen = design(request, explain=False, rivals=False).chosen
    assert chosen is not None
    placement = scaled_placement(chosen.placement, 4, ["deepspeed"])
    gpus = sum(pool.gpus for pool in placement.pools)
    cluster = Cluster(node_groups=(node_group("cpu-core", gpus, gpus_per_node=-(-gpus // 2)),))
    return estimate(placement, scaled_workload(chosen.workload, str(model / "config.json")), cluster)


@pytest.mark.parametrize("architecture", ["hybrid", pytest.param("disaggregated", marks=pytest.mark.long)])
def test_the_readmes_plan_runs_on_two_nodes(
    architecture: str, tiny_model: Path, tmp_path: Path, two_nodes: str
) -> None:
    made = scaled(architecture, tiny_model)
    assert made.architecture == architecture
    assert {node for role in made.gpu_map for node in role.nodes} == {0, 1}
    outcome, heard = runs.run(made, runs.settings(tiny_model), tmp_path / "run", two_nodes)
    assert [row["step"] for row in heard.rows] == [0, 1]
    assert all(row["mismatch/max_abs_dlogp"] < 1e-4 for row in heard.rows)
    assert {"actor.generate", "actor.train", "actor.sync"} <= {
        span.name for span in read_trace(outcome.files.trace).spans
    }


@pytest.mark.usefixtures("fork_server")
def test_a_rollout_replica_runs_on_two_nodes(tiny_model: Path, tmp_path: Path) -> None:
    grpo = Workload(algorithm="grpo", model="70b", reward=Reward(rules=Rules()), reference="none")
    workload = replace(scaled_workload(grpo, str(tiny_model / "config.json")), samples=2)
    every = ResourcePool(name="all", gpus=2)
    placement = Placement(
        pools=(every,),
        actor=RolePlacement(pool="all", layout=Layout(dp=2, zero=3)),
        rollout=RolloutPlacement(pool="all", layout=RolloutLayout(tp=2)),
        weight_path="ipc",
    )
    cluster = Cluster(node_groups=(node_group("cpu-core", 2, gpus_per_node=1),))
    made = estimate(placement, workload, cluster)
    assert not made.replicas_in_one_node
    with nodes_with(1) as address:
        _, heard = runs.run(made, runs.settings(tiny_model), tmp_path / "run", address)
    assert [row["step"] for row in heard.rows] == [0, 1]
    assert all(row["mismatch/max_abs_dlogp"] < 1e-4 for row in heard.rows)
    [told] = (tmp_path / "run").rglob("processes.json")
    assert {"rollout replica 0", "rollout replica 0 node 1"} <= json.loads(told.read_text()).keys()
