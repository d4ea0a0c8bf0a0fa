"""What an answer says about measured runs near it, and about GPUs that were never timed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import rlhfsim
from rlhfsim.kernels.devices import device_of
from rlhfsim.plan import Plan
from rlhfsim.present.known import borrowed_text, known, nearest_text
from rlhfsim.rollout.engine_step import CURVE_SPREAD, cost_of
from rlhfsim.specs.hardware.calibrated import Provenance
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile, parse_cluster
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.step.measured import COEFFICIENTS, spread
from rlhfsim.training.layer_time import Pass
from rlhfsim.training.training import work_parts

RULES = Reward(model=None, rules=Rules())
SOME_RUN = Provenance(
    base="mi300x",
    date="2026-01-01",
    device="MI300X",
    interconnect="xGMI",
    runs=("a",),
    data=3,
    drift=Coefficient(value=0.2, low=0.1, high=0.4, source="prior"),
    region={},
)


def planned(gpu: str = "h100_sxm") -> Plan:
    """GRPO of a small model on one node, priced and not searched for."""
    layout, rollout = Layout(dp=8, zero=3), RolloutLayout(tp=1, dp=8, memory_utilization=0.5)
    role = RolePlacement(pool="all", layout=layout)
    placement = Placement(
        pools=(ResourcePool(name="all", gpus=8),),
        backend="fsdp2",
        weight_path="ipc",
        actor=role,
        reference=role,
        rollout=RolloutPlacement(pool="all", layout=rollout),
    )
    lengths = {"prompt_len": Fixed(value=200), "response_len": Fixed(value=1000)}
    work = Workload(algorithm="grpo", model="qwen2.5-1.5b", prompts=64, samples=8, reward=RULES, **lengths)
    return rlhfsim.estimate(placement, work, parse_cluster(8, gpu))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


def test_every_plan_names_its_nearest_run_and_our_error_there(plan: Plan) -> None:
    assert plan.nearest is not None
    text = known(plan)["measured"]
    assert "our error there" in text
    assert plan.nearest.framework in text
    assert plan.to_dict()["nearest"]["error"] == plan.nearest.error


def test_where_nothing_is_near_the_answer_says_so(plan: Plan) -> None:
    assert plan.nearest is not None
    far = replace(plan.nearest, near=False, distance=2.0)
    assert nearest_text(far).startswith("nothing near this was measured")
    assert nearest_text(plan.nearest).startswith("nearest: ")


def test_the_interval_of_a_plan_holds_the_discrepancy_of_the_model(plan: Plan) -> None:
    least = load_profile("h100")[COEFFICIENTS["rlhf.step"]]
    p = plan.prediction
    assert math.log(p.high_s / p.step_s) > 1.28 * least
    assert math.log(p.step_s / p.low_s) > 1.28 * least


def test_a_gpu_that_nobody_measured_is_farther_away(plan: Plan) -> None:
    far = planned("l40s").nearest
    assert far is not None
    assert plan.nearest is not None
    assert far.distance > plan.nearest.distance
    assert spread(0.1, far.distance) > spread(0.1, plan.nearest.distance)


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("h100_96gb", "kernel times of h100_sxm"),
        ("h800", "kernel times of h100_sxm"),
        ("mi300x", "never timed"),
    ],
)
def test_a_gpu_that_was_never_timed_says_so(gpu: str, words: str) -> None:
    assert words in (borrowed_text(load_profile(gpu)) or "")


def test_intervals_of_borrowed_kernel_times_are_as_much_wider_as_the_answer_says() -> None:
    own, lent = (
        device_of(NodeGroup(profile=load_profile(g), gpus=8, gpus_per_node=8)) for g in ("h100", "mi300x")
    )
    measured = replace(lent, profile=replace(lent.profile, calibration=SOME_RUN))
    low, high = CURVE_SPREAD
    for resource in ("compute", "hbm", "nvlink"):
        spreads = [cost_of(device, {resource: 1.0}).parts[0].spread for device in (own, lent, measured)]
        assert spreads == [(low, high), (low / 1.5, high * 1.5), (low, high)]
    parts = [
        work_parts(device, Layout(), Pass(1.0, 0.0, 0.0, 0.0, 0.0, 0.0), 1.0)[0].spread
        for device in (own, lent)
    ]
    assert parts[1] == pytest.approx((parts[0][0] / 1.5, parts[0][1] * 1.5))


def test_a_gpu_with_its_own_tables_says_nothing() -> None:
    assert borrowed_text(load_profile("h100")) is None
