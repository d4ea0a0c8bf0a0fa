"""A reward model that verl serves: designed, said and read as whole copies of an engine of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.export import export
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.placement.backends import violation
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Reward, Workload
from rlhfsim.what_if.design import design

WORK = Workload(
    algorithm="grpo",
    model="qwen2.5-1.5b",
    prompts=32,
    samples=4,
    reward=Reward(model="same"),
    prompt_len=Fixed(value=256),
    response_len=Fixed(value=256),
)
COMMAND = (
    "python3 -m verl.trainer.main_ppo trainer.nnodes=1 trainer.n_gpus_per_node=8 "
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B algorithm.adv_estimator=grpo "
    "reward.reward_model.enable=True reward.reward_model.model_path=Qwen/Qwen3-8B "
)
PREFIX = "reward.reward_model"


def designed(backend: Any, gpus: int = 16, **more: Any) -> Plan:
    request = Request(
        cluster=parse_cluster(gpus, "h100"), workload=WORK, backend=backend, framework="verl", **more
    )
    plan = design(request, explain=False, rivals=False, simplest_s=None).chosen
    assert plan is not None
    return plan


def keys_of(plan: Plan) -> dict[str, Any]:
    sections = export(plan, "verl", frozenset()).written.sections
    return {setting.key: setting.value for section in sections for setting in section.settings}


def read(more: str) -> Any:
    configuration, settings = read_configuration(COMMAND + more, {})
    return configuration.run(settings).roles["reward"]


@pytest.mark.parametrize("backend", ["megatron", "fsdp2"])
def test_beside_the_actor_it_is_whole_copies_that_sleep(backend: Any) -> None:
    plan = designed(backend, forbid=frozenset({"split", "standalone"}))
    reward = plan.placement.role("reward")
    assert reward is not None
    layout = reward.layout
    assert (layout.pp, layout.cp, layout.ep, layout.zero, reward.residency) == (1, 1, 1, 0, "offloaded")
    keys = keys_of(plan)
    assert keys[f"{PREFIX}.enable_resource_pool"] is False
    assert keys[f"{PREFIX}.rollout.tensor_model_parallel_size"] == layout.tp
    assert keys[f"{PREFIX}.rollout.free_cache_engine"] is True
    assert keys[f"{PREFIX}.rollout.max_num_batched_tokens"] == layout.pack_tokens


def test_a_rollout_on_gpus_of_its_own_asks_for_a_reward_model_on_its_own() -> None:
    """`separate_async` asserts `enable_resource_pool`."""
    plan = designed("fsdp2", 8, architecture="async", allow=frozenset({"async"}), max_staleness=1)
    placement = plan.placement
    assert placement.role("reward") is not None
    assert placement.rollout is not None
    assert len({placement.role("reward").pool, placement.actor.pool, placement.rollout.pool}) == 3
    keys = keys_of(plan)
    gpus = keys[f"{PREFIX}.nnodes"] * keys[f"{PREFIX}.n_gpus_per_node"]
    assert keys[f"{PREFIX}.enable_resource_pool"] is True
    assert gpus == placement.pool(placement.role("reward").pool).gpus
    beside = replace(placement, reward=replace(placement.role("reward"), pool=placement.actor.pool))
    with pytest.raises(RlhfsimError, match="refuses a reward model on the actor's GPUs"):
        export(replace(plan, placement=beside), "verl", frozenset())


def test_the_engine_gets_no_more_memory_than_the_plan_leaves() -> None:
    plan = designed("megatron", forbid=frozenset({"split", "standalone"}))
    assert plan.placement.role("reward") is not None
    usual = keys_of(plan)[f"{PREFIX}.rollout.gpu_memory_utilization"]
    full = [
        replace(e, bytes=0.7 * plan.prediction.capacity_bytes)
        for e in plan.prediction.ledger
        if e.phase == "reward.score" and e.role == "actor"
    ][:1]
    rest = [e for e in plan.prediction.ledger if e.phase != "reward.score" or e.role == "reward"]
    ledger = tuple(rest + full)
    crowded = replace(plan, prediction=replace(plan.prediction, ledger=ledger))
    assert usual == 0.5
    assert keys_of(crowded)[f"{PREFIX}.rollout.gpu_memory_utilization"] == 0.25


def test_pipelines_and_shards_of_it_are_not_run() -> None:
    runs = framework("verl")
    served = Layout(tp=2, dp=4, zero=0)
    assert runs.lacks_layout("fsdp2", served, WORK, "reward") is None
    for layout in (Layout(pp=2, dp=4, zero=0), Layout(dp=8, zero=3), Layout(cp=2, dp=4, zero=0)):
        assert runs.lacks_layout("fsdp2", layout, WORK, "reward") is not None
    own = framework("rlhfsim")
    assert own.lacks_layout("fsdp2", Layout(dp=8, zero=3), WORK, "reward") is None


def test_its_defaults_are_read() -> None:
    """Tensor parallelism 2, 8,192 tokens a batch and sleep, of verl's reward.yaml."""
    reward = read("")
    assert (reward.layout.tp, reward.layout.dp, reward.layout.zero) == (2, 4, 0)
    assert (reward.layout.pack_tokens, reward.residency, reward.pool) == (8192, "offloaded", None)
    awake = read(f"{PREFIX}.rollout.free_cache_engine=False {PREFIX}.rollout.tensor_model_parallel_size=4")
    assert (awake.layout.tp, awake.residency) == (4, "resident")
    own = read(f"{PREFIX}.enable_resource_pool=True {PREFIX}.n_gpus_per_node=4 {PREFIX}.nnodes=2")
    assert (own.gpus, own.layout.dp, own.residency, own.pool) == (8, 4, "resident", "reward")


def test_whole_copies_under_tensor_parallelism_are_a_served_model_s_alone() -> None:
    layout = Layout(tp=2, dp=4, zero=0)
    assert violation("fsdp2", layout, "reward") is None
    assert violation("fsdp2", layout, "reference") is not None
