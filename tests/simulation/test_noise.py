"""What is random in a run: off by default, and the same for the same seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.cost import Cost, part
from rlhfsim.rollout.schedule import expected_lengths
from rlhfsim.simulation.noise import Draws, Noise, stretched
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.lengths import LogNormal
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.step.calls import CallSetting, requests_of
from rlhfsim.step.timetable import Step

WORKLOAD = Workload(
    algorithm="grpo",
    model="qwen3-0.6b",
    prompts=64,
    samples=4,
    reward=Reward(rules=Rules()),
    response_len=LogNormal(mean=500, sigma=0.8, max=4000),
)
SETTING = CallSetting(
    models=models_of(WORKLOAD),
    workload=WORKLOAD,
    cluster=Cluster(node_groups=(node_group("h100", 16),)),
    placement=Placement(
        pools=(ResourcePool(name="r", start=0, gpus=8), ResourcePool(name="t", start=8, gpus=8)),
        rollout=RolloutPlacement(pool="r", layout=RolloutLayout(tp=2, dp=4)),
        actor=RolePlacement(pool="t", layout=Layout(dp=8)),
        reference=RolePlacement(pool="t", layout=Layout(dp=8)),
        weight_path="broadcast",
    ),
)
SLOW = Noise(straggler_share=1 / 16, straggler_slowdown=1.5)


def call(name: str, pool: str = "t") -> Step:
    cost = Cost(parts=(part("compute", 4.0, "a"), part("network", 2.0, "b")))
    return Step(name=name, pools=(pool,), cost=cost)


def test_without_noise_a_call_is_left_as_it_is() -> None:
    draws = Draws(SETTING, Noise(), seed=1)
    step = call("actor.train")
    assert draws.disturbed(step, 0) is step
    assert Noise().quiet
    assert draws.pace("t") == 1.0
    assert draws.replica_paces() == (1.0,) * 4


def test_every_step_has_the_same_lengths_in_another_order() -> None:
    first, second = (Draws(SETTING, seed=1).lengths(k) for k in (0, 1))
    assert not np.array_equal(first, second)
    expected = np.sort(expected_lengths(requests_of(SETTING)))
    assert np.array_equal(np.sort(first), expected)
    assert np.array_equal(np.sort(second), expected)


def test_given_lengths_are_kept() -> None:
    given = tuple(float(x) for x in range(1, 257))
    found = Draws(replace(SETTING, drawn=given), seed=1).lengths(3)
    assert tuple(sorted(found.tolist())) == given


def test_drawn_lengths_differ_between_steps_and_seeds_and_repeat() -> None:
    noise = Noise(lengths=True)
    found = [Draws(SETTING, noise, seed=s).lengths(k) for s, k in ((1, 0), (1, 1), (2, 0))]
    sums = {float(x.sum()) for x in found}
    assert len(sums) == 3
    again = Draws(SETTING, noise, seed=1)
    again.lengths(7)
    assert np.array_equal(again.lengths(0), found[0])
    assert all(x.min() >= 1 and x.max() <= 4000 for x in found)


def test_reward_times_vary_around_their_mean() -> None:
    draws = Draws(SETTING, Noise(reward_spread=0.5), seed=4)
    step = call("rules.score", "cpu")
    seconds = np.array([draws.disturbed(step, k).cost.seconds for k in range(4000)])
    assert seconds.mean() == pytest.approx(6.0, rel=0.03)
    assert np.log(seconds).std() == pytest.approx(0.5, rel=0.05)
    assert draws.disturbed(call("actor.train"), 0).cost.seconds == 6.0


def test_one_slow_gpu_slows_its_replica_and_every_call_of_its_pool() -> None:
    paces, trains = set(), set()
    for seed in range(40):
        draws = Draws(SETTING, SLOW, seed=seed)
        (rank,) = draws.stragglers
        assert draws.pace("r" if rank < 8 else "t") == 1.5
        assert draws.pace("t" if rank < 8 else "r") == 1.0
        paces.add(draws.replica_paces().index(1.5) if rank < 8 else None)
        trains.add(draws.disturbed(call("actor.train"), 0).cost.seconds)
    assert paces == {None, 0, 1, 2, 3}
    assert trains == {6.0, 8.0}  # 4 s on the GPU become 6, 2 s on the network stay


def test_links_keep_their_rate_on_a_slow_gpu() -> None:
    by = stretched(call("x").cost, 3.0).by_resource()
    assert by == {"compute": 12.0, "network": 2.0}


def test_a_noisy_program_is_the_same_for_the_same_seed() -> None:
    noise = Noise(lengths=True, reward_spread=0.3, straggler_share=0.1, straggler_slowdown=1.2)
    first, again, other = (Draws(SETTING, noise, s).program(1e5, 2) for s in (3, 3, 4))
    assert first == again
    assert first.steps != other.steps


def test_a_slowdown_below_one_is_refused() -> None:
    with pytest.raises(RlhfsimError, match="straggler_slowdown"):
        Noise(straggler_slowdown=0.5)
