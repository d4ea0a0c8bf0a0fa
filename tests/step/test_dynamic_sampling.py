"""Dynamic sampling in a step: what is generated, scored and trained on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhfsim.api import estimate
from rlhfsim.plan import Plan
from rlhfsim.simulation.noise import Noise
from rlhfsim.simulation.run import simulate
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.workload.dataflow import dataflow
from rlhfsim.specs.workload.lengths import LogNormal
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.step.calls import CallSetting
from rlhfsim.step.rule_rewards import rules_cost

ROLE = RolePlacement(pool="t", layout=Layout(dp=8))
APART = Placement(
    pools=(ResourcePool(name="r", gpus=8), ResourcePool(name="t", start=8, gpus=8)),
    rollout=RolloutPlacement(pool="r", layout=RolloutLayout(tp=2, dp=4)),
    actor=ROLE,
    reference=ROLE,
    weight_path="broadcast",
)
ALL = Workload(
    algorithm="grpo",
    model="qwen2.5-1.5b",
    prompts=64,
    samples=8,
    reward=Reward(model=None, rules=Rules(seconds_per_sample=0.5, workers=64)),
    response_len=LogNormal(mean=800, sigma=0.8, max=4000),
)
HALF = replace(ALL, dynamic_sampling=DynamicSampling(kept=0.5))


def priced(workload: Workload, placement: Placement = APART) -> Plan:
    return estimate(placement, workload, parse_cluster(16, "h100"))


def seconds(plan: Plan, name: str) -> float:
    return sum(p.work_s or p.seconds for p in plan.prediction.phases if p.name == name)


def test_generation_and_rules_see_every_batch_and_training_what_is_kept() -> None:
    plain, half = priced(ALL), priced(HALF)
    batches = HALF.gen_batches
    assert 2 < batches < 3
    assert seconds(half, "actor.generate") == pytest.approx(batches * seconds(plain, "actor.generate"))
    assert seconds(half, "rules.score") == pytest.approx(batches * 64 * 8 * 0.5 / 64)
    for name in ("reference.logprob", "actor.logprob", "actor.train"):
        assert seconds(half, name) == pytest.approx(seconds(plain, name))
    generated = batches * 512 * 800
    assert half.prediction.discarded_tokens == pytest.approx(generated - 512 * 800, rel=0.03)
    assert plain.prediction.discarded_tokens == 0


def test_what_is_kept_is_known_before_anything_else_is_scored() -> None:
    assert {c.name: c.needs for c in dataflow(HALF)}["reference.logprob"] == ("rules.score",)


def test_a_larger_generation_batch_waits_once_for_the_longest() -> None:
    wide = replace(HALF, dynamic_sampling=DynamicSampling(kept=0.5, gen_prompts=192))
    assert wide.gen_batches == pytest.approx(1, abs=1e-4)
    assert seconds(priced(wide), "actor.generate") < seconds(priced(HALF), "actor.generate")


def test_drawn_steps_generate_whole_batches_and_agree_in_the_mean() -> None:
    cluster = parse_cluster(16, "h100")
    setting = CallSetting(models=models_of(HALF), placement=APART, workload=HALF, cluster=cluster)
    quiet = simulate(setting, 1e6)
    noisy = simulate(setting, 1e6, steps=40, seed=5, noise=Noise(lengths=True))
    assert np.mean(noisy.step_seconds) == pytest.approx(quiet.step_seconds[0], rel=0.05)
    assert len({round(s) for s in noisy.step_seconds}) > 1
    again = simulate(setting, 1e6, steps=40, seed=5, noise=Noise(lengths=True))
    assert again.step_seconds == noisy.step_seconds


def test_an_engine_that_never_drains_generates_one_over_the_share_kept() -> None:
    role = replace(ROLE, layout=Layout(dp=8, micro_batch=8))
    stale = replace(APART, actor=role, reference=role, schedule=Schedule(staleness=2))
    tiny = replace(ALL, prompts=512)  # the rollout decides
    half = replace(tiny, dynamic_sampling=DynamicSampling(kept=0.5))
    plain, twice = (priced(w, stale).prediction.step_s for w in (tiny, half))
    assert twice == pytest.approx(2 * plain, rel=0.1)


def test_rewards_take_at_least_the_latency_of_one() -> None:
    few = replace(
        ALL, prompts=1, samples=8, reward=Reward(model=None, rules=Rules(seconds_per_sample=2, workers=64))
    )
    assert rules_cost(few).seconds == pytest.approx(2.0)
    assert rules_cost(replace(few, prompts=16)).seconds == pytest.approx(4.0)
