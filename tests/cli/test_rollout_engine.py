"""What generates in a rollout: typed, left open, read from a configuration and written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.api import estimate
from rlhfsim.cli.planned import fixed_fields
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.export import export
from rlhfsim.interchange.skyrl.configuration import CONFIGURATION as SKYRL
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.search.rollout_layouts import rollout_layouts
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.presets import preset
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Reward, Rules, Workload

WORK = Workload(
    algorithm="grpo",
    model="qwen2.5-7b",
    prompts=64,
    samples=4,
    response_len=Fixed(value=8192),
    reward=Reward(rules=Rules()),
)
VERL = (
    "python3 -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.model.path=Qwen/Qwen2.5-7B "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 trainer.n_gpus_per_node=8 "
    "actor_rollout_ref.rollout.name={}"
)
SKYRL_RUN = (
    "python -m skyrl.train.entrypoints.main_base trainer.policy.model.path=Qwen/Qwen2.5-1.5B "
    "trainer.train_batch_size=128 trainer.policy_mini_batch_size=128 generator.backend={}"
)


def plan(framework: str | None, engine: str | None) -> Plan:
    layout = Layout(tp=1, dp=8, zero=3, micro_batch=4)
    role = RolePlacement(pool="all", layout=layout)
    rollout = RolloutLayout(tp=2, dp=4, memory_utilization=0.5, engine=engine)  # type: ignore[arg-type]
    placed = Placement(
        pools=(ResourcePool(name="all", gpus=8),),
        actor=role,
        reference=role,
        rollout=RolloutPlacement(pool="all", layout=rollout, sleep=2),
        weight_path="ipc",
        backend="fsdp2",
    )
    return estimate(placed, WORK, replace(parse_cluster(8), framework=framework))


def generation(priced: Plan) -> float:
    return next(p.seconds for p in priced.prediction.phases if p.name == "actor.generate")


def test_an_engine_that_is_typed_is_that_of_every_layout() -> None:
    assert fixed_fields("rollout", "tp=2,engine=sglang", "--rollout") == {"tp": 2, "engine": "sglang"}
    request = Request(
        cluster=parse_cluster(8),
        workload=WORK,
        backend="fsdp2",
        framework="verl",
        fix={"rollout": {"tp": 2, "engine": "sglang"}},
    )
    layouts = rollout_layouts(request, preset("qwen2.5-7b"), 8, request.cluster.node_group)
    assert {layout.engine for layout in layouts} == {"sglang"}
    with pytest.raises(RlhfsimError, match="engine"):
        fixed_fields("rollout", "engine=triton", "--rollout")


def test_sglang_has_its_own_attention_and_the_engine_that_a_framework_has_anyway_changes_nothing() -> None:
    assert generation(plan("verl", "sglang")) != generation(plan("verl", None))
    assert generation(plan("verl", "vllm")) == generation(plan("verl", None))
    assert generation(plan("verl", "sglang")) == pytest.approx(generation(plan("verl", None)), rel=0.2)


def test_frameworks_refuse_an_engine_that_they_do_not_have() -> None:
    layout = RolloutLayout(engine="sglang")
    asked = ("verl", "areal", "slime", "trl", "skyrl", "openrlhf", "rlhfsim")
    refused = {n for n in asked if framework(n).lacks_rollout(layout, one_node=True) is not None}
    assert refused == {"trl", "skyrl", "openrlhf", "rlhfsim"}
    vllm = framework("slime").lacks_rollout(RolloutLayout(engine="vllm"), one_node=True)
    assert vllm is not None
    assert "SGLang" in vllm.remedy


@pytest.mark.parametrize(("word", "engine"), [("sglang", "sglang"), ("vllm", None)])
def test_the_engine_of_a_configuration_is_read_and_written(word: str, engine: str | None) -> None:
    configuration, settings = read_configuration(VERL.format(word), {})
    assert configuration.run(settings).rollout.engine == engine
    launch = export(plan("verl", engine), "verl", frozenset()).files["launch.sh"]
    assert f"actor_rollout_ref.rollout.name={word}" in launch


def test_skyrl_with_sglang_stops() -> None:
    for word, stops in (("sglang", True), ("vllm", False)):
        _, settings = read_configuration(SKYRL_RUN.format(word), {})
        found = [f for f in SKYRL.findings(settings, SKYRL.run(settings)) if "SGLang" in f.what]
        assert [f.stops for f in found] == [True] * stops
