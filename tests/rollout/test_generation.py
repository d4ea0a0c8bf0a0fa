"""Continuous batching, KV capacity and the whole rollout stage."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from rlhfsim.kernels.device import Device
from rlhfsim.kernels.devices import device_of
from rlhfsim.rollout.continuous_batching import (
    StepTable,
    continuous_timeline,
    lower_bound,
    one_wave,
    tabulate,
)
from rlhfsim.rollout.engine_step import EngineStep
from rlhfsim.rollout.generation import Generation, Requests, generate, kv_capacity
from rlhfsim.rollout.schedule import deal
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.workload.lengths import Fixed, LogNormal
from rlhfsim.specs.workload.workload import Environment

MODEL = resolve_model("qwen2.5-7b")
LONG = LogNormal(mean=2000, sigma=0.8, max=16384)


@cache
def device(hbm: float = 1.0) -> Device:
    profile = load_profile("h100")
    profile = replace(profile, hbm=replace(profile.hbm, value=profile.hbm.value * hbm))
    return device_of(NodeGroup(profile=profile, gpus=64, gpus_per_node=8))


def linear_table(a: float = 3.0, b: float = 2.0, d: float = 0.5) -> StepTable:
    """tau = a + b n + d n c, in seconds: all of it HBM time."""
    n, c = np.array([1.0, 2, 4, 8, 64]), np.array([0.0, 10, 1000])
    zero = np.zeros(())
    tau = a + b * n[:, None] + d * n[:, None] * c[None, :]
    return tabulate(n, c, EngineStep(compute=zero, hbm=tau, nvlink=zero, network=zero, overhead=zero))


def requests(prompts: int = 256, samples: int = 4, **changes: object) -> Requests:
    known = {"prompt_lengths": Fixed(value=512), "response_lengths": LONG}
    return Requests(prompts=prompts, samples=samples, **(known | changes))  # type: ignore[arg-type]


def stage(layout: RolloutLayout, asked: Requests | None = None, **extra: object) -> Generation:
    return generate(device(), MODEL, layout, asked or requests(), **extra)  # type: ignore[arg-type]


def total(table: StepTable, timeline) -> float:  # type: ignore[no-untyped-def]
    end = timeline.start + timeline.steps
    return float(table.between(timeline.running, timeline.start, end).sum())


def test_the_drain_of_one_wave_is_the_sum_of_g8():
    table, prompt = linear_table(), 7.0
    lengths = np.array([[5.0, 2.0, 5.0]])
    by_hand = sum(
        3 + 2 * n + 0.5 * n * (prompt + s + 0.5) for s, n in [(0, 3), (1, 3), (2, 2), (3, 2), (4, 2)]
    )
    timeline = one_wave(lengths, prompt)
    assert total(table, timeline) == pytest.approx(by_hand)
    assert timeline.completions.tolist() == [1, 2]
    assert timeline.tokens == 12
    assert timeline.kv_tokens == max(3 * 9, 2 * 12)


def test_the_table_integrates_and_evaluates_exactly_where_tau_is_linear():
    table = linear_table()
    n, c = np.array([3.0]), np.array([250.0])
    assert table.tau(n, c)[0] == pytest.approx(3 + 6 + 0.5 * 3 * 250)
    parts = table.parts(n, c, c + 4)
    assert parts["hbm"] == pytest.approx(table.between(n, c, c + 4)[0])
    assert parts["compute"] == 0


def test_refill_lies_between_the_bounds_of_g9():
    rng, table = np.random.default_rng(1), linear_table(d=0.0)
    lengths, slots = np.rint(rng.lognormal(4, 0.8, 200)) + 1, 8
    taken = total(table, continuous_timeline(lengths[None, :], slots, 10.0))
    one, full = 3 + 2.0, 3 + 2 * 8.0
    work, longest = lengths.sum() * full / slots, lengths.max()
    # tau(n)/n falls with n, so the last sequences, at smaller n, stay below l_max tau(n)
    assert max(work, longest * one) * 0.999 <= taken <= work + longest * full


def test_refill_with_a_slot_for_each_is_one_wave():
    lengths = np.array([[4.0, 9.0, 1.0, 9.0]])
    table = linear_table()
    a, b = continuous_timeline(lengths, 4, 3.0), one_wave(lengths, 3.0)
    assert total(table, a) == pytest.approx(total(table, b))
    assert a.completions.sum() == b.completions.sum() == 4


def test_refill_with_one_slot_runs_one_after_the_other():
    timeline = continuous_timeline(np.array([[4.0, 9.0]]), 1, 3.0)
    assert timeline.steps.tolist() == [4, 9]
    assert timeline.start.tolist() == [3, 3]
    assert timeline.running.tolist() == [1, 1]


def test_dealing_keeps_groups_together_and_loses_nothing():
    lengths = np.arange(1.0, 25.0)
    dealt = deal(lengths, 4, 2, seed=3)
    assert dealt.shape == (4, 6)
    assert sorted(dealt[dealt > 0]) == lengths.tolist()
    assert (deal(lengths, 5, 1, seed=0) == 0).sum() == 1


def test_no_stage_is_shorter_than_the_longest_response_alone():
    for dp in (1, 4, 16, 64):
        result = stage(RolloutLayout(tp=1, dp=dp))
        assert result.seconds >= result.lower_bound


def test_generation_stops_scaling_at_the_longest_response():
    asked = requests(1024, 4, response_lengths=LogNormal(mean=1000, sigma=0.5, max=4096))
    results = [stage(RolloutLayout(tp=1, dp=dp), asked) for dp in (1, 4, 16, 256, 1024)]
    times = [result.seconds for result in results]
    assert times == sorted(times, reverse=True)
    assert times[0] / times[1] > 2.5
    assert times[-2] / times[-1] < 1.1
    assert times[-1] < 1.3 * results[-1].lower_bound


def test_the_tail_is_nothing_for_equal_lengths_and_grows_with_their_spread():
    equal = stage(RolloutLayout(dp=4), requests(response_lengths=Fixed(value=1000)))
    assert "tail" not in equal.cost.by_resource()
    wide = stage(RolloutLayout()).cost.by_resource()
    assert wide["tail"] > 0
    assert stage(RolloutLayout()).cost.seconds == pytest.approx(sum(wide.values()))


def test_a_short_cache_makes_waves_preemptions_and_time():
    free = stage(RolloutLayout(dp=4))
    tight = stage(RolloutLayout(dp=4), kv_tokens=50_000.0)
    assert free.waves == 1
    assert free.preemptions == 0
    assert free.fits
    assert tight.waves > 5
    assert tight.preemptions > 0
    assert tight.kv_tokens <= 1.05 * 50_000
    assert tight.fits
    assert tight.seconds > 1.3 * free.seconds
    assert not stage(RolloutLayout(), kv_tokens=100.0).fits


def test_the_engine_limit_on_sequences_makes_waves_without_preemption():
    limited = stage(RolloutLayout(max_num_seqs=128))
    assert limited.waves == pytest.approx(8)
    assert limited.running == 128
    assert limited.preemptions == 0


def test_kv_capacity_grows_with_utilisation_and_shrinks_with_weights():
    high = kv_capacity(device(), MODEL, RolloutLayout(tp=1, memory_utilization=0.9))
    low = kv_capacity(device(), MODEL, RolloutLayout(tp=1, memory_utilization=0.5))
    assert 0 < low < high
    assert kv_capacity(device(), MODEL, RolloutLayout(tp=2)) > 2 * high
    assert kv_capacity(device(), resolve_model("llama-3.1-70b"), RolloutLayout(tp=1)) == 0


def test_sharing_prompts_saves_prefill_and_cache():
    shared = stage(RolloutLayout(dp=4))
    alone = stage(RolloutLayout(dp=4), requests(prompts=1024, samples=1))
    assert alone.prefill_seconds > 3 * shared.prefill_seconds
    assert alone.kv_tokens > shared.kv_tokens


def test_more_bandwidth_and_more_replicas_are_never_slower():
    for layout in (RolloutLayout(), RolloutLayout(tp=2, dp=4)):
        quick = generate(device(2.0), MODEL, layout, requests())
        assert quick.seconds <= generate(device(), MODEL, layout, requests()).seconds
    assert stage(RolloutLayout(dp=2)).seconds < stage(RolloutLayout(dp=1)).seconds


def test_observed_lengths_replace_the_expected_ones():
    given = np.full(1024, 300.0)
    result = stage(RolloutLayout(dp=4), lengths=given)
    assert result.decode_tokens == given.sum()
    assert result.decode_steps == 300


def test_finish_times_rise_to_the_end_of_the_stage():
    result = stage(RolloutLayout(dp=4))
    assert list(result.finish) == sorted(result.finish)
    assert result.finish[-1] == pytest.approx(result.seconds)
    at_80_percent = result.finish[int(0.8 * len(result.finish)) - 1]
    assert at_80_percent < 0.8 * result.seconds


def test_the_interval_of_a_stage_holds_its_value():
    cost = stage(RolloutLayout()).cost
    low, high = cost.interval
    assert low < cost.seconds < high


def test_the_longest_alone_is_the_integral_of_one_sequence():
    table = linear_table()
    assert lower_bound(table, 4.0, 6.0) == pytest.approx(sum(3 + 2 + 0.5 * (6 + s + 0.5) for s in range(4)))


@pytest.mark.parametrize(("workers", "bound"), [(512, "environment"), (100_000, "hbm")])
def test_workers_that_answer_no_faster_bind_the_rollout_and_hide_its_decoding(
    workers: int, bound: str
) -> None:
    asked = requests(prompts=128, samples=8, response_lengths=Fixed(value=1024))
    slow = Environment(turns=19, seconds_per_turn=10.0 if workers == 512 else 0.01, workers=workers)
    made = stage(RolloutLayout(tp=1, dp=16), replace(asked, environment=slow))
    waited = made.cost.by_resource()["environment"]
    assert made.cost.bound_by == bound
    if bound == "environment":
        assert waited == pytest.approx(1024 * 19 * 10 / 512, rel=1e-3)
        assert made.seconds == pytest.approx(waited, rel=0.02)  # prefill comes before
