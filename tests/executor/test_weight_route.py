"""Which rank of the trainer sends to which rollout worker, and what is refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs

from executor.coordination import cluster, weights, worker_group
from executor.coordination.failures import PartFailed
from executor.coordination.tracing import Reply
from executor.coordination.worker_group import ReplicaPool, WorkerGroup
from executor.engines.protocols import ChannelSpec, Link
from executor.launch import LaunchOptions, launch
from executor.ranks import group_specs
from executor.resolve import Job
from executor.samples import Transfer
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.weight_paths import SEARCHED, WEIGHT_PATHS, paths_between, topology

NODES, GPUS = 2, 4


class _Method:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class _Rank:
    """A rank of the trainer that remembers its channels and sends at once."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.channels: dict[int, ChannelSpec] = {}
        self.address = _Method(lambda: (f"node-{rank // GPUS}", 1000 + rank))
        self.open_channels = _Method(self._open)
        self.close_channels = _Method(lambda route: Reply(value=None))
        self.send = _Method(lambda role, route, version, tags: Reply(value=self._sent(version)))

    def _open(self, route: str, channels: dict[int, ChannelSpec]) -> Reply:
        self.channels = channels
        return Reply(value=None)

    def _sent(self, version: int) -> Transfer | None:
        return transfer(version) if self.rank in self.channels else None


class _Replica:
    def __init__(self) -> None:
        self.links: list[Link] = []
        self.checksum = "same"
        self.connect = _Method(self._connect)
        self.receive = _Method(lambda version, keep, tags: Reply(value=transfer(version, self.checksum)))

    def _connect(self, links: list[Link]) -> Reply:
        self.links = links
        return Reply(value=None)


def transfer(version: int, checksum: str = "same") -> Transfer:
    return Transfer(version=version, bytes=8, buckets=1, seconds=0.1, checksum=checksum)


def plan_of(model: Path, architecture: str, **changes: Any) -> Plan:
    """Eight training GPUs on two nodes; colocated with four replicas of two GPUs unless `changes` say else."""
    replicas = {"pool": "all", "layout": {"tp": 2, "dp": 4, "memory_utilization": 0.3}, "sleep": 1}
    return runs.plan(
        architecture,
        "grpo",
        model,
        layout={"dp": NODES * GPUS, "zero": 3},
        placement={"rollout": replicas} | changes,
        gpus_per_node=GPUS,
    )


@pytest.fixture
def opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[weights.WeightRoute, list[_Rank], ReplicaPool]]:
    for module in (weights, worker_group):
        monkeypatch.setattr(module, "collect", lambda refs, *_: list(refs))

    def start(plan: Plan, *, gpu: bool) -> tuple[weights.WeightRoute, list[_Rank], ReplicaPool]:
        job = Job(plan=plan, settings=runs.settings(tmp_path), model="", gpu=gpu, max_prompt=1)
        spec = next(s for s in group_specs(plan, {}) if "actor" in s.roles)
        ranks = [_Rank(i) for i in range(len(spec.places))]
        role = plan.placement.rollout
        assert role is not None
        replicas = [_Replica() for _ in range(role.layout.dp)]
        pool = ReplicaPool(
            pool="all",
            actors=replicas,
            followers=[[] for _ in replicas],
            receivers_each=role.layout.replica_gpus,
            record=lambda parts, replies: None,
        )
        route = weights.WeightRoute(job, WorkerGroup(spec=spec, actors=ranks), tmp_path)
        route.open(pool)
        return route, ranks, pool

    return start


def links(pool: ReplicaPool) -> list[tuple[str, int, int]]:
    """Host and port of every worker's channel, and its number there."""
    return [(link.channel.host, link.channel.port, link.receiver) for a in pool.actors for link in a.links]


def test_each_rank_sends_to_the_worker_on_its_own_gpu(tiny_model: Path, opened: Any) -> None:
    _, ranks, pool = opened(plan_of(tiny_model, "hybrid"), gpu=True)
    assert links(pool) == [(f"node-{gpu // GPUS}", 1000 + gpu, 0) for gpu in range(NODES * GPUS)]
    for rank in ranks:
        assert list(rank.channels) == list(range(NODES * GPUS)), "all ranks know who needs tensors"
        assert {channel.receivers for channel in rank.channels.values()} == {1}
        assert {channel.native for channel in rank.channels.values()} == {"ipc"}
    assert len({channel.name for channel in ranks[0].channels.values()}) == NODES * GPUS


@pytest.mark.parametrize("path", ["ipc", "host"])
def test_without_gpus_each_node_has_one_sender(tiny_model: Path, opened: Any, path: str) -> None:
    _, ranks, pool = opened(plan_of(tiny_model, "hybrid", weight_path=path), gpu=False)
    assert links(pool) == [(f"node-{gpu // GPUS}", 1000 + gpu // GPUS * GPUS, gpu % GPUS) for gpu in range(8)]
    assert {rank: channel.receivers for rank, channel in ranks[0].channels.items()} == {0: GPUS, GPUS: GPUS}
    assert {channel.native for channel in ranks[0].channels.values()} == {None}


def test_between_two_pools_rank_0_sends_to_everybody(tiny_model: Path, opened: Any) -> None:
    replicas = {"pool": "rollout", "layout": {"tp": 1, "dp": 1, "memory_utilization": 0.3}, "sleep": 0}
    plan = plan_of(tiny_model, "disaggregated", rollout=replicas)
    assert plan.topology == "across nodes"
    _, ranks, pool = opened(plan, gpu=True)
    assert links(pool) == [("node-0", 1000, 0)]
    assert {rank: channel.native for rank, channel in ranks[3].channels.items()} == {0: "nccl"}


def test_adapters_go_by_ipc_in_one_pool(tiny_model: Path, opened: Any) -> None:
    plan = runs.plan(
        "hybrid", "grpo", tiny_model, placement={"weight_path": "lora"}, workload={"lora": {"rank": 4}}
    )
    _, ranks, _ = opened(plan, gpu=True)
    assert ranks[0].channels[0].transport == "ipc"
    assert ranks[0].channels[0].adapters_only


def test_a_replica_with_other_weights_is_named(tiny_model: Path, opened: Any) -> None:
    route, _, pool = opened(plan_of(tiny_model, "hybrid"), gpu=True)
    assert route.send(pool, 1, 0, lambda group, replies: None).checksum == "same"
    pool.actors[2].checksum = "other"
    with pytest.raises(PartFailed) as caught:
        route.send(pool, 2, 0, lambda group, replies: None)
    assert caught.value.part == "rollout replica 2"


def test_topology_is_the_rollouts_as_the_actor_sees_it() -> None:
    node = [(0, gpu) for gpu in range(4)]
    assert topology(node, node[1:3]) == "same GPU"
    assert topology([*node, (1, 0)], [(1, 0)]) == "same GPU"
    assert topology(node[:2], node[1:]) == "same node", "a part is not enough"
    assert topology(node, [(1, 0)]) == "across nodes"


def test_the_table_says_what_can_carry_weights_where() -> None:
    carried = {
        (path, where): transport
        for path, rules in WEIGHT_PATHS.items()
        for where, transport in rules.transports.items()
    }
    assert (
        carried["ipc", "same GPU"] == carried["reshard", "same GPU"] == carried["lora", "same GPU"] == "ipc"
    )
    assert carried["lora", "across nodes"] == carried["broadcast", "across nodes"] == "broadcast"
    assert {path for path, _ in carried} == set(SEARCHED) - {"p2p"}
    places = {how: {where for (_, where), by in carried.items() if by == how} for how in carried.values()}
    assert places["ipc"] == {"same GPU"}, "vLLM finds its handle by the GPU it sits on"
    assert places["broadcast"] == {"same node", "across nodes"}, "NCCL refuses two ranks on one GPU"
    assert places["host"] == {"same GPU", "same node"}
    assert places["disk"] == {"same GPU", "same node", "across nodes"}


def test_the_search_offers_a_broadcast_to_two_pools_only() -> None:
    for own_backend in (False, True):
        assert "broadcast" not in paths_between(one_pool=True, own_backend=own_backend)
        assert "broadcast" in paths_between(one_pool=False, own_backend=own_backend)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_broadcast_between_roles_that_share_gpus_is_refused_before_anything_starts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(cluster, "connect", refuse)
    made = plan_of(tiny_model, "hybrid")
    edited = replace(made, placement=replace(made.placement, weight_path="broadcast"))
    options = LaunchOptions(out=tmp_path / "run", dry_run=dry_run)
    with pytest.raises(RlhfsimError) as caught:
        launch(edited, runs.settings(tiny_model), options, runs.Quiet())
    assert caught.value.code == "weight-path-not-run"
    assert "ipc" in (caught.value.help or "")
