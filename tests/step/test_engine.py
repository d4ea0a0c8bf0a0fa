"""The inference engine that a rollout is priced with is its framework's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlhfsim.kernels.devices import with_engine
from rlhfsim.rollout.generation import generate
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.calls import CallSetting, generation_of, requests_of

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


@pytest.mark.parametrize("model", ["qwen2.5-1.5b", "qwen3-30b-a3b"])
@pytest.mark.parametrize(("shape", "stays"), [({"tp": 4, "ep": 4}, True), ({"tp": 8, "pp": 2}, False)])
def test_an_engine_inside_a_domain_is_priced_once_for_all_networks(
    model: str, shape: dict[str, int], stays: bool
) -> None:
    """It has no network at all: a price that read one would be none."""
    if model == "qwen2.5-1.5b":
        shape = shape | {"ep": 1}
    work = replace(WORK, model=model)
    engine = RolloutLayout(**shape, dp=32 // (shape["tp"] * shape.get("pp", 1)))  # type: ignore[arg-type]
    where = replace(
        SETTING.placement,
        pools=(ResourcePool(name="all", gpus=32),),
        rollout=RolloutPlacement(pool="all", layout=engine),
        actor=RolePlacement(pool="all", layout=Layout(dp=32)),
    )
    nodes = parse_cluster(32, "h100")
    slow, slower = (
        replace(
            SETTING,
            models=models_of(work),
            placement=where,
            workload=work,
            cluster=replace(nodes, oversubscription=x),
        )
        for x in (1.0, 4.0)
    )
    rollout = where.rollout
    assert rollout is not None
    assert (slow.generator(rollout) is slower.generator(rollout)) == stays
    assert (slow.generator(rollout).network_bandwidth == math.inf) == stays
    one, other = generation_of(slow, 1e6), generation_of(slower, 1e6)
    assert one is not None
    assert other is not None
    assert (one.seconds == other.seconds) == stays
    if stays:
        unknown = replace(slow.generator(rollout), network_bandwidth=math.nan)
        asked = generate(unknown, slow.models.actor, engine, requests_of(slow), kv_tokens=1e6, worker=True)
        assert asked.seconds == one.seconds
