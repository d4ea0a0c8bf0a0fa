"""Parts of a run die while it works: they are found within seconds, named, and the run goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import runs
import survival

from executor.coordination import checkpoints
from executor.launch import LaunchOptions, launch
from executor.settings import RewardRule
from rlhfsim.errors import RlhfsimError

SECONDS = 20.0
"""Most between a kill and its detection on a machine that is busy; Ray needs one to four."""


@pytest.mark.slow
def test_dead_rank_replica_and_reward_worker_are_named_and_the_run_ends_as_if_nothing_had_died(
    survivor: Path,
    tiny_model: Path,
    tmp_path: Path,
    ray_address: str,
    record_property: Callable[[str, object], None],
) -> None:
    folder = tmp_path / "run"
    heard = survival.Assassin(
        folder, {1: "actor rank 1", 2: "rollout replica 0", 3: "reward rank 0"}, delay_s=0.05
    )
    wanted = survival.settings(tiny_model, every=1, retries=3)
    outcome = launch(survival.plan(tiny_model), wanted, LaunchOptions(out=folder, address=ray_address), heard)
    for line in heard.report():
        record_property("fault", line)
    for (killed_at, part), (found_at, text) in zip(heard.killed, heard.restarted, strict=True):
        assert text.startswith(f"{part} died"), text
        assert found_at - killed_at < SECONDS
    assert len(outcome.restarts) == 3
    assert survival.weights(folder) == survival.weights(survivor)
    assert survival.metrics(folder) == survival.metrics(survivor)


@pytest.mark.long
@pytest.mark.slow
def test_asynchronous_run_loses_a_replica_of_two_processes_and_trains_every_prompt_once(
    tiny_model: Path, tmp_path: Path, ray_address: str
) -> None:
    folder = tmp_path / "run"
    pools = [{"name": "train", "gpus": 2}, {"name": "rollout", "start": 2, "gpus": 2}]
    rollout = {"pool": "rollout", "layout": {"dp": 1, "tp": 2, "memory_utilization": 0.3}, "sleep": 0}
    made = runs.plan(
        "async",
        "grpo",
        tiny_model,
        layout={"dp": 2, "zero": 2},
        placement={"pools": pools, "rollout": rollout},
    )
    children: list[psutil.Process] = []

    class Watcher(survival.Assassin):
        def _kill(self, victim: str) -> None:
            children.extend(psutil.Process(survival.processes(folder)[victim]).children(recursive=True))
            super()._kill(victim)

    heard = Watcher(folder, {1: "rollout replica 0"})
    wanted = survival.settings(tiny_model, every=1, retries=1)
    outcome = launch(made, wanted, LaunchOptions(out=folder, address=ray_address), heard)
    assert len(outcome.restarts) == 1
    assert outcome.restarts[0].startswith("rollout replica 0 died")
    assert len(children) >= 2
    assert not [c for c in children if c.is_running()]
    found = checkpoints.newest(folder / "checkpoints")
    assert found is not None
    position = found.progress.data_position
    prompts = survival.ITERATIONS * made.workload.prompts
    assert position["prompts"] + len(position["ahead"]) == prompts


@pytest.mark.slow
def test_run_whose_retries_are_used_up_stops_and_names_the_part(
    tiny_model: Path, tmp_path: Path, ray_address: str
) -> None:
    heard = survival.Assassin(tmp_path / "run", {0: "rollout replica 0"}, delay_s=0.0)
    wanted = survival.settings(tiny_model)
    with pytest.raises(RlhfsimError, match="rollout replica 0 died") as error:
        launch(
            survival.plan(tiny_model),
            wanted,
            LaunchOptions(out=tmp_path / "run", address=ray_address, dry_run=True),
            heard,
        )
    assert error.value.code == "run-failed"
    assert "no checkpoint yet" in str(error.value.help)


@pytest.mark.long
@pytest.mark.slow
def test_lost_node_is_named_and_a_spare_node_takes_its_place(tiny_model: Path, tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {"num_cpus": 2, "object_store_memory": 128 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [
            cluster.add_node(num_cpus=2, resources={"slot": 2}, object_store_memory=128 * 2**20)
            for _ in range(3)
        ]
        made = survival.plan(tiny_model, gpus_per_node=2)
        assert {n for role in made.gpu_map for n in role.nodes} == {0, 1}
        removed: list[str] = []

        class Remover(runs.Quiet):
            def iteration(self, row: object, total: int) -> None:
                super().iteration(row, total)
                if len(removed) < 2 and row["step"] == 0:  # type: ignore[index]
                    busy = [n for n in nodes if n.node_id not in removed and _holds_an_actor(n.node_id)]
                    removed.append(busy[0].node_id)
                    cluster.remove_node(busy[0], allow_graceful=False)

        heard = Remover()
        wanted = survival.settings(tiny_model, retries=3)
        with pytest.raises(RlhfsimError, match="it cannot start again: the plan needs 4 slots") as error:
            launch(
                made,
                wanted,
                LaunchOptions(out=tmp_path / "run", address=cluster.address, dry_run=True),
                heard,
            )
        assert error.value.code == "cluster-too-small"
        [restart] = [text for text in heard.phases if "; restart 1 of 3" in text]
        assert f"its Ray node {removed[0][:8]}" in restart
        assert [row["step"] for row in heard.rows] == [0, 0]  # the spare node did the second one
    finally:
        cluster.shutdown()


def _holds_an_actor(node_id: str) -> bool:
    import ray

    free = ray._private.state.available_resources_per_node()[node_id].get("slot", 0)
    return float(free) < 2


def test_reward_process_that_is_killed_is_started_again(tmp_path: Path) -> None:
    from executor.rewards.rules import Scorer

    mark = tmp_path / "killed"
    with Scorer([RewardRule(kind="function", target="survival_reward:dies_once")], workers=1) as scorer:
        [scored] = scorer.score([("1+1=", "2", "2", {"mark": str(mark)})])
        assert scored.total == 1.0
        assert mark.exists()
        with pytest.raises(RlhfsimError, match="its process ended"):
            scorer.score([("1+1=", "2", "2", {"mark": ""})])
