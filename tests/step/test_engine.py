"""The inference engine that a rollout is priced with is its framework's."""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.kernels.devices import with_engine
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.calls import CallSetting, generation_of

WORK = Workload(algorithm="grpo", model="qwen2.5-1.5b", prompts=16, samples=4)
SETTING = CallSetting(
    models=models_of(WORK),
    placement=Placement(
        pools=(ResourcePool(name="all", gpus=8),),
        rollout=RolloutPlacement(pool="all", layout=RolloutLayout(dp=8)),
        actor=RolePlacement(pool="all", layout=Layout(dp=8)),
        weight_path="ipc",
    ),
    workload=WORK,
    cluster=parse_cluster(8, "h100"),
)


def test_slime_generates_with_sglang_and_trains_with_the_common_kernels() -> None:
    slime = replace(SETTING, cluster=replace(SETTING.cluster, framework="slime"))
    assert (SETTING.engine, slime.engine) == ("vllm", "sglang")
    rollout, actor = slime.placement.rollout, slime.placement.actor
    assert rollout is not None
    assert slime.device(rollout) is with_engine(slime.device(actor), "sglang")
    assert slime.device(rollout) is not slime.device(actor)
    one, other = generation_of(SETTING, 1e6), generation_of(slime, 1e6)
    assert one is not None
    assert other is not None
    assert other.mean_step != one.mean_step
