"""What the hardware's limits allow: worked out by hand for one placement, and never above what is predicted."""

from __future__ import annotations

import pytest

import rlhfsim
from rlhfsim.present.answers.plan_blocks import limit_share
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if.estimate import estimate

GPUS = 8


def test_limits_are_flop_and_bytes_at_the_rates_of_the_datasheet() -> None:
    cluster = rlhfsim.parse_cluster(GPUS, "h100")
    profile = cluster.node_group.profile
    peak, hbm = profile.peak["bf16"].value, profile.hbm.value
    work = Workload(
        algorithm="grpo",
        model="qwen3-8b",
        prompts=64,
        samples=8,
        reward=Reward(rules=Rules()),
        prompt_len=Fixed(value=512),
        response_len=Fixed(value=1000),
    )
    trained = RolePlacement(pool="all", layout=Layout(dp=GPUS, zero=3), offload_between=True)
    placement = Placement(
        pools=(ResourcePool(name="all", gpus=GPUS),),
        actor=trained,
        reference=RolePlacement(pool="all", layout=Layout(dp=GPUS, zero=3)),
        rollout=RolloutPlacement(
            pool="all", layout=RolloutLayout(tp=2, dp=4, memory_utilization=0.6), sleep=2
        ),
        weight_path="ipc",
        backend="fsdp2",
    )
    phases = {p.name: p for p in estimate(placement, work, cluster).prediction.phases}
    model, sequences, length = resolve_model("qwen3-8b"), 512, 1512
    matrices = 2 * model.num_matmul_params_active * sequences * length
    heads = 4 * model.attention.num_heads * model.attention.head_dim
    cores = model.num_layers * heads * sequences * length**2 / 2
    scored = (matrices + cores) / (GPUS * peak)
    assert phases["reference.logprob"].limit_s == pytest.approx(scored)
    assert phases["actor.train"].limit_s == pytest.approx(3 * scored)
    weights = 1000 * 2 * model.num_matmul_params_active / 2  # every replica has two GPUs
    cache = sequences * (512 * 1000 + 1000**2 / 2) * model.kv_bytes_per_token() / GPUS
    assert phases["actor.generate"].limit_s == pytest.approx((weights + cache) / hbm)
    assert phases["rules.score"].limit_s is None
    for phase in phases.values():
        assert phase.limit_s is None or phase.limit_s < phase.seconds


@pytest.mark.parametrize("staleness", [1, 4, 8])
def test_batches_that_overlap_share_the_reads_of_the_weights(staleness: int) -> None:
    work = Workload(
        algorithm="grpo", model="qwen3-32b", prompts=16, samples=4, response_len=Fixed(value=4096)
    )
    scores = RolePlacement(pool="train", layout=Layout(dp=16, zero=3))
    placement = Placement(
        pools=(ResourcePool(name="train", gpus=16), ResourcePool(name="gen", start=16, gpus=16)),
        actor=RolePlacement(pool="train", layout=Layout(dp=16, zero=3, recompute="full")),
        reference=scores,
        reward=scores,
        rollout=RolloutPlacement(pool="gen", layout=RolloutLayout(tp=2, dp=8)),
        weight_path="broadcast",
        backend="fsdp2",
        schedule=Schedule(staleness=staleness, partial_rollout=True),
    )
    phases = estimate(placement, work, rlhfsim.parse_cluster(32, "h100")).prediction.phases
    generated = next(p for p in phases if p.name == "actor.generate")
    assert generated.limit_s is not None
    assert 0.2 < limit_share(generated, phases) < 1  # type: ignore[operator]
