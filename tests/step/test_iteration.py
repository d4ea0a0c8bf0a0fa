"""Order of the calls of a step, against timetables worked out by hand; then the steady state itself."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhfsim.kernels.cost import Cost, part
from rlhfsim.kernels.devices import device_of
from rlhfsim.rollout.continuous_batching import continuous_timeline
from rlhfsim.rollout.generation import Requests, step_table
from rlhfsim.rollout.steady_state import mean_of_longest, steady_state
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.workload.lengths import Fixed, LogNormal, draw, stats
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.step import calls as module
from rlhfsim.step.iteration import Iteration, iteration
from rlhfsim.step.timetable import STREAM_CHUNKS, Step, streamed_ends, timetable

SECONDS = {
    "generate": 60.0,
    "refilled": 45.0,
    "sync": 5.0,
    "actor.logprob": 4.0,
    "reference.logprob": 3.0,
    "reward.score": 6.0,
    "critic.value": 2.0,
    "actor.train": 20.0,
    "critic.train": 12.0,
}
PPO = Workload(algorithm="ppo", model="qwen3-0.6b", prompts=64)
GRPO = Workload(algorithm="grpo", model="qwen3-0.6b", prompts=64, samples=4, reward=Reward(rules=Rules()))


def seconds(value: float) -> Cost:
    return Cost(parts=(part("compute", value, "test"),)) if value else Cost()


@pytest.fixture(autouse=True)
def _fixed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every priced call takes the seconds of the table above."""
    finish = tuple(SECONDS["generate"] * (i + 1) / 64 for i in range(64))
    made = SimpleNamespace(cost=seconds(SECONDS["generate"]), finish=finish)
    made.scaled = {1.0: made}.__getitem__
    monkeypatch.setattr(module, "_generated", lambda jobs: [made for _ in jobs])
    monkeypatch.setattr(
        module, "steady_state", lambda *a, **k: SimpleNamespace(cost=seconds(SECONDS["refilled"]))
    )
    monkeypatch.setattr(module, "train_cost", lambda s, role, placed: seconds(SECONDS[f"{role}.train"]))
    monkeypatch.setattr(module, "forward_cost", lambda s, call, placed: seconds(SECONDS[call.name]))
    monkeypatch.setattr(module, "sync_cost", lambda s: seconds(SECONDS["sync"]))
    monkeypatch.setattr(module, "rules_cost", lambda w, c: seconds(8.0))
    monkeypatch.setattr("rlhfsim.step.iteration.controller_cost", lambda s: Cost())
    monkeypatch.setattr(module.offload, "moves", lambda *a: (Cost(), Cost()))


def cluster(gpus: int = 16) -> Cluster:
    return Cluster(node_groups=(node_group("h100", gpus),))


def placed(pools: dict[str, str], schedule: Schedule | None = None, **more: Any) -> Placement:
    names = list(dict.fromkeys(pools.values()))
    return Placement(
        pools=tuple(ResourcePool(name=n, start=4 * i, gpus=4) for i, n in enumerate(names)),
        rollout=RolloutPlacement(pool=pools["rollout"], layout=RolloutLayout(dp=4)),
        schedule=schedule or Schedule(),
        weight_path="broadcast" if len(names) > 1 else "ipc",
        **{r: RolePlacement(pool=p, layout=Layout(dp=4)) for r, p in pools.items() if r != "rollout"},
        **more,
    )


def priced(workload: Workload, placement: Placement) -> Iteration:
    found = iteration(models_of(workload), placement, workload, cluster())
    ends = [found.phases[i] for i in found.critical]
    assert ends[0].start == 0
    for before, after in itertools.pairwise(ends):
        assert after.start == pytest.approx(before.end)  # the chain has no gap
    assert found.seconds == pytest.approx(ends[-1].end)
    assert found.seconds == pytest.approx(sum(p.cost.seconds for p in ends))
    return found


def table(found: Iteration) -> dict[str, tuple[float, float]]:
    return {p.name: (round(p.start, 6), round(p.end, 6)) for p in found.phases}


FOUR = ("rollout", "actor", "critic", "reference", "reward")


def test_co_located_ppo_is_the_sum_of_its_calls() -> None:
    found = priced(PPO, placed(dict.fromkeys(FOUR, "all")))
    assert found.seconds == 60 + 6 + 3 + 2 + 4 + 12 + 20 + 5
    assert table(found)["actor.sync"] == (107, 112)


def test_critic_beside_actor_costs_the_longer_of_the_two() -> None:
    pools = {"rollout": "a", "actor": "a", "reference": "a", "critic": "b", "reward": "b"}
    found = priced(PPO, placed(pools))
    assert table(found) == {
        "actor.generate": (0, 60),
        "reward.score": (60, 66),
        "reference.logprob": (60, 63),
        "critic.value": (66, 68),
        "actor.logprob": (63, 67),
        "critic.train": (68, 80),
        "actor.train": (68, 88),
        "actor.sync": (88, 93),
    }
    assert found.seconds == 93


def test_the_step_waits_for_a_critic_that_trains_longer_than_actor_and_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SECONDS, "critic.train", 50.0)
    pools = {"rollout": "a", "actor": "a", "reference": "a", "critic": "b", "reward": "b"}
    assert priced(PPO, placed(pools)).seconds == 60 + 6 + 2 + 50


def test_disaggregated_synchronous_is_serial() -> None:
    pools = {"rollout": "r", "actor": "t", "reference": "t"}
    found = priced(GRPO, placed(pools))
    assert table(found)["rules.score"] == (60, 68)
    # rules (8 s) and scoring (3 + 4 s) run beside each other
    assert found.seconds == 60 + 8 + 20 + 5


@pytest.mark.parametrize(
    ("framework", "left"), [(None, 8), ("trl", 8), ("nemo-rl", 8), ("rlhfsim", 1), ("slime", 1)]
)
def test_rules_are_hidden_behind_generation_where_the_framework_begins_them(
    framework: str | None, left: float
) -> None:
    rules = Workload(algorithm="grpo", reward=Reward(rules=Rules(seconds_per_sample=0.5, workers=128)))
    pools = placed(dict.fromkeys(("rollout", "actor", "reference"), "all"))
    made = replace(cluster(), framework=framework)
    found = iteration(models_of(rules), pools, rules, made)
    assert table(found)["rules.score"] == (60, 60 + left)  # 8 s for all, in 8 pieces
    slow = replace(rules, reward=Reward(rules=Rules(seconds_per_sample=3, workers=1024)))
    assert table(iteration(models_of(slow), pools, slow, made))["rules.score"][1] == 60 + max(left, 3)
    held = replace(rules, reward=replace(rules.reward, overlapped=False))
    assert table(iteration(models_of(held), pools, held, made))["rules.score"] == (60, 68)


def test_rules_that_do_not_overlap_come_before_the_models() -> None:
    workload = replace(GRPO, reward=Reward(rules=Rules(), overlapped=False))
    found = priced(workload, placed({"rollout": "r", "actor": "t", "reference": "t"}))
    assert table(found)["reference.logprob"] == (68, 71)
    assert found.seconds == 60 + 8 + 3 + 4 + 20 + 5


def test_the_controller_works_between_scoring_and_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfsim.step.iteration.controller_cost", lambda s: seconds(2.0))
    found = priced(PPO, placed(dict.fromkeys(FOUR, "all")))
    assert table(found)["controller"] == (75, 77)
    assert table(found)["critic.train"] == (77, 89)
    assert found.seconds == 112 + 2


def test_one_step_off_is_the_slower_side_and_the_exposed_sync() -> None:
    pools = {"rollout": "r", "actor": "t", "reference": "t"}
    found = priced(GRPO, placed(pools, Schedule(staleness=1)))
    assert found.seconds == 60 + 5


def test_overlapped_sync_leaves_the_slower_side_alone() -> None:
    pools = {"rollout": "r", "actor": "t", "reference": "t"}
    found = priced(GRPO, placed(pools, Schedule(staleness=1, overlapped_sync=True)))
    assert found.seconds == 60


def test_an_overlapped_sync_longer_than_both_sides_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECONDS, "sync", 90.0)
    pools = {"rollout": "r", "actor": "t", "reference": "t"}
    assert priced(GRPO, placed(pools, Schedule(staleness=1, overlapped_sync=True))).seconds == 90


@pytest.mark.parametrize("schedule", [Schedule(staleness=2), Schedule(staleness=1, partial_rollout=True)])
def test_an_engine_that_never_drains_is_priced_by_its_steady_state(schedule: Schedule) -> None:
    pools = {"rollout": "r", "actor": "t", "reference": "t"}
    assert priced(GRPO, placed(pools, schedule)).seconds == 45 + 5


def test_asynchronous_training_that_is_slower_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECONDS, "actor.train", 100.0)
    pools = {"rollout": "r", "actor": "t", "reference": "t"}
    found = priced(GRPO, placed(pools, Schedule(staleness=2)))
    assert found.seconds == 8 + 100 + 5
    assert [found.phases[i].name for i in found.critical] == ["rules.score", "actor.train", "actor.sync"]


def test_streaming_hides_all_but_the_last_piece_when_training_keeps_up() -> None:
    pools = {"rollout": "r", "actor": "t", "reference": "t"}
    found = priced(GRPO, placed(pools, Schedule(streaming=True), backend="megatron"))
    # each of 8 pieces arrives 7.5 s after the one before and takes (3 + 4 + 20) / 8 = 3.4 s
    # the last: rules 1 s beside reference and logprob 0.875 s, then 2.5 s of training
    assert found.seconds == pytest.approx(60 + max(8, 3 + 4) / 8 + 20 / 8 + 5)


def test_streaming_never_does_more_work_than_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECONDS, "actor.train", 200.0)
    pools = {"rollout": "r", "actor": "t", "reference": "t"}
    found = priced(GRPO, placed(pools, Schedule(streaming=True), backend="megatron"))
    # the training pool is busy from the first piece (7.5 s, its first forward and rules) on
    first = 60 / 8 + 3 / 8 + 4 / 8 + 1 / 8
    assert found.seconds == pytest.approx(first + 200 + 7 * (3 + 4) / 8 + 5)


def test_streaming_leaves_training_of_several_mini_batches_at_the_end() -> None:
    pools = {"rollout": "r", "actor": "t", "reference": "t"}
    workload = replace(GRPO, mini_batches=4)
    found = priced(workload, placed(pools, Schedule(streaming=True), backend="megatron"))
    assert found.seconds == pytest.approx(60 + 8 / 8 + 20 + 5)


def test_streaming_leaves_training_at_the_end_where_the_backend_waits_for_the_whole_batch() -> None:
    pools = {"rollout": "r", "actor": "t", "reference": "t"}
    found = priced(GRPO, placed(pools, Schedule(streaming=True), backend="deepspeed"))
    assert found.seconds == pytest.approx(60 + 8 / 8 + 20 + 5)


def test_streaming_does_nothing_inside_one_pool() -> None:
    home = dict.fromkeys(FOUR, "all")
    serial, streamed = (priced(PPO, placed(home, Schedule(streaming=on))) for on in (False, True))
    assert streamed.seconds == serial.seconds


def test_moves_around_a_call_are_paid_before_and_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module.offload,
        "moves",
        lambda d, m, role, call, w, p: (
            (seconds(1.0), seconds(0.5)) if call.kind == "train" else (Cost(), Cost())
        ),
    )
    home = dict.fromkeys(("rollout", "actor", "reference"), "all")
    found = priced(GRPO, placed(home))
    assert found.seconds == 60 + 8 + 1 + 20 + 0.5 + 5
    assert table(found)["actor.train.load"] == (68, 69)


def test_preference_training_is_scoring_and_training_alone() -> None:
    workload = Workload(algorithm="dpo", model="qwen3-0.6b", prompts=64)
    placement = Placement(
        pools=(ResourcePool(name="all", gpus=4),),
        actor=RolePlacement(pool="all", layout=Layout(dp=4)),
        reference=RolePlacement(pool="all", layout=Layout(dp=4)),
    )
    found = priced(workload, placement)
    assert found.seconds == 3 + 20
    assert found.generation is None


def test_throughput_counts_prompts_and_responses_over_every_gpu() -> None:
    workload = replace(GRPO, prompt_len=Fixed(value=100), response_len=Fixed(value=300))
    found = priced(workload, placed({"rollout": "r", "actor": "t", "reference": "t"}))
    assert found.tokens == 64 * 4 * 400
    assert found.gpus == 16  # of the cluster: those that no pool uses are paid for too
    assert found.tokens_per_s_per_gpu == pytest.approx(64 * 4 * 400 / 93 / 16)


def test_streamed_calls_of_one_pool_share_it() -> None:
    steps = [
        Step(name="actor.generate", pools=("r",), cost=seconds(10)),
        Step(name="a", pools=("t",), cost=seconds(8), needs=("actor.generate",), streams=True),
        Step(name="b", pools=("t",), cost=seconds(8), needs=("actor.generate",), streams=True),
    ]
    finish = tuple(10 * (i + 1) / STREAM_CHUNKS for i in range(STREAM_CHUNKS))
    # 16 s of work that cannot begin before the first piece at 1.25 s
    assert streamed_ends(steps, Schedule(streaming=True), finish)["b"] == pytest.approx(1.25 + 16)
    phases, chain = timetable(steps, Schedule(streaming=True), finish)
    assert phases[chain[-1]].end == pytest.approx(17.25)


# --- the continuous engine ----------------------------------------------------------------------------

DEVICE = device_of(node_group("h100", 8), 1.0)
MODEL = resolve_model("qwen3-8b")
LENGTHS = LogNormal(mean=800, sigma=0.7, max=4096)
REQUESTS = Requests(prompts=512, samples=1, prompt_lengths=Fixed(value=256), response_lengths=LENGTHS)


def test_steady_state_agrees_with_many_batches_decoded_one_after_the_other() -> None:
    layout = RolloutLayout(tp=1, dp=2, max_num_seqs=64)
    found = steady_state(DEVICE, MODEL, layout, REQUESTS, staleness=4, interrupted=False, kv_tokens=1e6)
    assert found.running == 64
    lengths = np.maximum(1, draw(LENGTHS, 256 * 40, np.random.default_rng(0)))[None, :]
    timeline = continuous_timeline(lengths, 64, 256.0)
    steps = step_table(DEVICE, MODEL, layout, 64, 256 + 4096)
    end = timeline.start + timeline.steps
    decoded = steps.between(timeline.running, timeline.start, end).sum() / 40
    decode = found.step * 512 * stats(LENGTHS).mean / (2 * 64)
    assert decode == pytest.approx(decoded, rel=0.03)


def test_steady_state_pays_for_every_token_whatever_the_tail() -> None:
    layout = RolloutLayout(tp=1, dp=8)
    found = steady_state(DEVICE, MODEL, layout, REQUESTS, staleness=8, interrupted=True)
    steps = 512 * stats(LENGTHS).mean / (8 * found.running)
    assert found.cost.seconds >= steps * found.step + found.interrupt.seconds
    assert found.interrupt.seconds > 0


def test_a_longest_response_must_finish_within_the_staleness_unless_it_is_interrupted() -> None:
    layout = RolloutLayout(tp=1, dp=8, max_num_seqs=8)
    few = replace(REQUESTS, prompts=64)
    found = steady_state(DEVICE, MODEL, layout, few, staleness=2, interrupted=False)
    assert found.cost.seconds == pytest.approx(found.latency / 2)
    assert found.cost.by_resource()["tail"] > 0
    free = steady_state(DEVICE, MODEL, layout, few, staleness=2, interrupted=True)
    assert free.cost.seconds < found.cost.seconds


def test_little_staleness_admits_few_sequences() -> None:
    layout = RolloutLayout(tp=1, dp=8)
    small, one, four = (
        steady_state(DEVICE, MODEL, layout, REQUESTS, staleness=s, interrupted=True, kv_tokens=1e6)
        for s in (0.1, 1, 4)
    )
    assert small.running == pytest.approx(0.6 * 512 / 8)
    assert (one.running, four.running) == (pytest.approx(64), pytest.approx(256))
    assert small.cost.seconds > one.cost.seconds > four.cost.seconds


def test_a_group_of_samples_holds_its_place_until_the_longest_is_done() -> None:
    grouped = replace(REQUESTS, prompts=64, samples=8)
    layout = RolloutLayout(tp=1, dp=8)
    found = steady_state(DEVICE, MODEL, layout, grouped, staleness=1, interrupted=True)
    alive = stats(LENGTHS).mean / mean_of_longest(LENGTHS, 8)
    assert found.running == pytest.approx(64 * alive)
    assert 0.3 < alive < 0.7


def test_mean_of_the_longest_agrees_with_draws() -> None:
    drawn = draw(LENGTHS, 80_000, np.random.default_rng(1)).reshape(-1, 8).max(axis=1).mean()
    assert mean_of_longest(LENGTHS, 8) == pytest.approx(drawn, rel=0.01)
    assert mean_of_longest(LENGTHS, 1) == pytest.approx(stats(LENGTHS).mean, rel=1e-6)
