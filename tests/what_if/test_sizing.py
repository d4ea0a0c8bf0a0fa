"""Sizes: the floor lies below every plan, and skipping changes nothing about the answer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import rlhfsim
from rlhfsim.search.request import Request
from rlhfsim.search.requirements import requirement
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.lengths import LogNormal
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if import sizing
from rlhfsim.what_if.design import design
from rlhfsim.what_if.risk.odds import Odds, Targets
from rlhfsim.what_if.sizing import Sizing, between, doubled, floor_seconds, fronts, resized, size, sizes

GRPO = Workload(algorithm="grpo", model="qwen2.5-0.5b", prompts=32, samples=4, reward=Reward(rules=Rules()))
SMALL = Request(cluster=rlhfsim.parse_cluster(1, "h100"), workload=GRPO)
KINDS = (load_profile("h100"), load_profile("a100-80"))
MOST = 2


@cache
def best(gpu: str, gpus: int) -> tuple[float, float]:
    """Step and USD of the best plan, searched without any target."""
    plan = design(resized(SMALL, load_profile(gpu), gpus), explain=False, rivals=False).chosen
    assert plan is not None
    assert plan.prediction.usd_per_step is not None
    return plan.prediction.step_s, plan.prediction.usd_per_step


@cache
def every() -> dict[tuple[str, int], tuple[float, float]]:
    return {(p.name, n): best(p.name, n) for p in KINDS for n in sizes(p.node.gpus, MOST)}


@cache
def answer(text: str, aim: str) -> Sizing:
    return size(SMALL, KINDS, Targets(requirements=[requirement(text)]), aim=aim, max_gpus=MOST)  # type: ignore[arg-type]


def test_sizes_are_powers_of_two_in_a_node_then_whole_nodes() -> None:
    assert list(sizes(8, 128)) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    assert list(sizes(8, 6)) == [1, 2, 4]
    assert list(sizes(1, 8)) == [1, 2, 3, 4, 6, 8]
    assert list(sizes(4, 4)) == [1, 2, 4]
    assert doubled(8, 128) == [1, 2, 4, 8, 16, 32, 64, 128]


def test_sizes_before_the_first_that_meets_the_targets_are_tried_too() -> None:
    assert between(32, 48, 8) == [40]
    assert between(64, 96, 8) == [72, 80, 88]
    assert between(128, 192, 8) == [136, 160, 184]
    assert between(4, 8, 8) == between(8, 16, 8) == []


@pytest.mark.parametrize("share", [0.35, 0.7, 1.1])
def test_the_fewest_gpus_are_those_that_trying_every_size_finds(share: float) -> None:
    target = share * max(step for step, _ in every().values())
    met = {k: v for k, v in every().items() if v[0] < target}
    found = answer(f"step_time<{target}s", "gpus").best
    if not met:
        assert found is None
        return
    assert found is not None
    assert found.gpus == min(n for _, n in met)
    assert found.plan is not None
    assert found.plan.prediction.step_s < target


def test_a_confidence_is_looked_for_in_every_plan_that_was_met(monkeypatch: pytest.MonkeyPatch) -> None:
    sized, asked = (
        resized(SMALL, KINDS[0], MOST),
        Targets(requirements=[requirement("step_time<1h")], confidence=0.8),
    )
    fastest = sizing.attempt(sized, 3600.0, asked)
    assert fastest.plan is not None
    quick = fastest.plan.prediction.step_s
    slower = property(lambda known: known.verdicts[0].actual > quick)
    monkeypatch.setattr(Odds, "meets", slower)
    other = sizing.attempt(sized, 3600.0, asked)
    assert other.outcome == "meets"
    assert other.plan is not None
    assert other.plan.prediction.step_s > quick
    assert sizing.attempt(sized, quick * 1.000001, asked).outcome == "misses"


@pytest.mark.parametrize("share", [0.5, 1.1])
def test_the_cheapest_gpus_are_those_that_trying_every_size_finds(share: float) -> None:
    target = share * max(step for step, _ in every().values())
    met = [v for v in every().values() if v[0] < target]
    found = answer(f"step_time<{target}s", "cost").best
    assert found is not None
    assert found.values[2] == pytest.approx(min(usd for _, usd in met))


def test_at_the_break_even_price_a_step_costs_the_same() -> None:
    found = answer("step_time<1000s", "cost")
    (even,) = found.break_even
    other = next(t for t in found.per_gpu if t.gpu == even.gpu)
    assert other.values[2] * even.usd_per_hour / even.now == pytest.approx(found.per_gpu[0].values[2])


def test_a_target_out_of_reach_is_told_by_every_size() -> None:
    found = answer("step_time<1ms", "gpus")
    assert found.best is None
    assert {t.outcome for t in found.trials} == {"skipped"}


def test_a_target_on_memory_is_kept() -> None:
    found = size(SMALL, KINDS[:1], Targets(requirements=[requirement("memory<30GB")]), max_gpus=MOST)
    assert found.best is not None
    assert found.best.plan is not None
    assert found.best.plan.prediction.peak_memory_bytes < 30e9
    nothing = size(SMALL, KINDS[:1], Targets(requirements=[requirement("memory<2GB")]), max_gpus=2)
    assert {t.outcome for t in nothing.trials} == {"does not fit"}


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": True},
        {"rollout_precision": "fp8"},
        {"response_len": LogNormal(mean=300, max=2000)},
        {"algorithm": "dpo"},
        {"epochs": 2, "old_logprobs": "rollout"},
    ],
    ids=str,
)
@pytest.mark.parametrize("allow", [(), ("async",)])
def test_no_plan_is_faster_than_the_floor(changes: dict[str, object], allow: tuple[str, ...]) -> None:
    if changes.get("algorithm") == "dpo" and allow:
        return
    from rlhfsim.specs.workload.workload import Lora

    given = {k: Lora(rank=32) if k == "lora" else v for k, v in changes.items()}
    work = replace(GRPO, **given)  # type: ignore[arg-type]
    request = replace(SMALL, cluster=rlhfsim.parse_cluster(2, "h100"), workload=work, allow=frozenset(allow))
    found = design(request, explain=False)
    floor = floor_seconds(request, models_of(work))
    assert found.chosen is not None
    assert 0 < floor < min(p.prediction.step_s for p in (found.chosen, *found.runners_up))


def test_the_front_holds_the_fewest_the_fastest_and_the_cheapest() -> None:
    trials = fronts(SMALL, KINDS, MOST)
    values = [t.values for t in trials]
    assert min(v[0] for v in values) == 1
    assert min(v[1] for v in values) == pytest.approx(min(s for s, _ in every().values()))
    assert min(v[2] for v in values) == pytest.approx(min(c for _, c in every().values()))
