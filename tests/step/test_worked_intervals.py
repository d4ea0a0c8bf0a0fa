"""Distances from measured runs, intervals, energy and limits of hardware, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfsim.kernels.cost import Cost, part
from rlhfsim.kernels.device import Device
from rlhfsim.plan import PredictedPhase
from rlhfsim.specs.hardware.hardware import Cluster, NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile, parse_cluster
from rlhfsim.specs.model.presets import preset
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Lora, Reward, Rules, Workload
from rlhfsim.step import measured, region, speed_of_light, timetable
from rlhfsim.step.calls import CallSetting
from rlhfsim.step.engine_mode import mode_of, point_of, pool_of
from rlhfsim.step.measured import Conditions, MeasuredRun
from rlhfsim.step.prediction import joules_per_step, usd_per_step
from rlhfsim.step.rule_rewards import rules_cost
from rlhfsim.step.timetable import Step

H100 = load_profile("h100_sxm")
HERE = Conditions(
    kind="rlhf.step",
    framework="NeMo-RL",
    backend="megatron",
    gpu="h100_sxm",
    model="a",
    params=8e9,
    moe=False,
    length=2000.0,
    gpus=64,
    algorithm="grpo",
    precision="bf16",
)
WORK = Workload(
    model="llama-3.1-8b",
    algorithm="grpo",
    prompts=16,
    samples=4,
    prompt_len=Fixed(value=100),
    response_len=Fixed(value=400),
    reward=Reward(model=None, rules=Rules()),
)


# --- how unlike two runs are --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "distance"),
    [
        ({}, 0),
        ({"params": 8e9 * math.e}, 0.3),
        ({"length": 2000.0 / math.e**2}, 0.4),
        ({"gpus": 128}, 0.15 * math.log(2)),
        ({"framework": "nemo_rl"}, 0),
        ({"framework": "verl"}, 0.4),
        ({"backend": "fsdp2"}, 0.3),
        ({"moe": True}, 0.6),
        ({"mixer": "recurrent"}, 0.6),
        ({"algorithm": "ppo"}, 0.3),
        ({"precision": "fp8"}, 0.3),
        ({"gpu": "h200_sxm"}, 0.3),
        ({"gpu": "a100_sxm"}, 0.6),
        ({"gpu": "tpu_v5"}, 0.6),
        ({"backend": "fsdp2", "framework": "verl"}, 0.5),
    ],
)
def test_distance_of_a_run_that_differs_in_one_thing(change: dict[str, Any], distance: float) -> None:
    assert measured.distance(HERE, replace(HERE, **change)) == pytest.approx(distance)
    assert measured.distance(replace(HERE, **change), HERE) == pytest.approx(distance)


def test_gpus_of_one_generation_are_nearer() -> None:
    assert measured._gpu_distance("a100_sxm", "a800-80g") == 0.3
    assert measured._gpu_distance("rtx_4090", "l40s") == 0.3
    assert measured._gpu_distance("other", "other_x") == 0.3
    assert measured._gpu_distance("v100", "other") == 0.6
    assert measured._gpu_distance("b200_sxm", "b200_sxm") == 0


def test_the_nearest_run_says_in_what_it_differs_the_heaviest_first() -> None:
    def run(error: float, **changes: Any) -> MeasuredRun:
        return MeasuredRun(conditions=replace(HERE, **changes), release="1", error=error, source="s")

    runs = [
        run(0.1, framework="verl", params=2e9),
        run(-0.3, moe=True),
        run(0.2, moe=True),
        run(0, kind="training"),
    ]
    found = measured.nearest(HERE, runs)
    assert found is not None
    assert (found.run.error, found.distance, found.near) == (
        0.1,
        pytest.approx(math.hypot(0.4, 0.3 * math.log(4))),
        True,
    )
    assert found.differs == ("4 times the parameters here", "framework verl")
    moe = measured.nearest(HERE, runs[1:])
    assert moe is not None
    assert (moe.run.error, moe.differs) == (0.2, ("mixture of experts there",))
    assert measured.nearest(HERE, runs[3:]) is None
    small = measured.nearest(replace(HERE, length=1000.0, gpus=72), [run(0.1, precision="fp8")])
    assert small is not None
    assert small.differs == ("precision fp8", "1/2 of the length here")  # 72 of 64 GPUs are no difference
    edge = measured.nearest(replace(HERE, gpus=96), [run(0.1)])
    assert edge is not None
    assert edge.differs == ("1.5 times the GPUs here",)
    far = measured.nearest(
        HERE, [run(0.1, moe=True, gpu="a100_sxm", framework="verl", backend="fsdp2", precision="fp8")]
    )
    assert far is not None
    assert not far.near


def test_an_interval_widens_in_squares_on_both_sides() -> None:
    low, high = measured.widened(10.0, 10 / math.exp(0.3), 10 * math.exp(0.4), 0.3)
    assert (low, high) == (
        pytest.approx(10 * math.exp(-math.hypot(0.3, 0.3))),
        pytest.approx(10 * math.exp(0.5)),
    )
    assert measured.widened(10.0, 5.0, 20.0, 0.0) == (5, 20)
    assert measured.widened(0.0, 0.0, 0.0, 1.0) == (0, 0)
    assert measured.widened(10.0, 0.0, 20.0, 1.0)[0] == 0
    odd = measured.widened(10.0, 12.0, 8.0, 0.5)  # neither side is the other
    assert odd == (pytest.approx(10 * math.exp(-0.5)), pytest.approx(10 * math.exp(0.5)))
    assert measured.spread(0.2, 0.75) == pytest.approx(0.25)


def test_bytes_are_surer_within_the_reach_of_measured_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, reach = parse_cluster(8, "h100"), H100["memory_reach"]
    for away, doubt in ((0.0, 1.0), (2.0, math.hypot(1, 2) / math.hypot(1, reach))):
        monkeypatch.setattr(measured, "_peak_distance", lambda question, away=away: away)
        assert measured.memory_doubt(models_of(WORK), "megatron", WORK, cluster) == pytest.approx(
            max(1, doubt)
        )


def test_one_side_of_an_interval_far_from_runs() -> None:
    """u^2 = w^2 + r^2 (1 - exp(-(drift d)^2 / r^2)) with r^2 = far^2 - near^2."""
    room = 0.5**2 - 0.3**2
    expected = math.sqrt(0.3**2 + room * (1 - math.exp(-(0.2**2) / room)))
    assert region._between(0.3, 0.5, 0.2) == pytest.approx(expected)
    assert region._between(0.5, 0.3, 0.2) == 0.5
    assert region._between(0.3, math.inf, 0.4) == pytest.approx(0.5)


def _phase(name: str, seconds: float, low: float, high: float) -> Any:
    return PredictedPhase(
        name=name,
        pool="all",
        start_s=0.0,
        seconds=seconds,
        low_s=low,
        high_s=high,
        bound_by="hbm",
        by_resource_s={},
        rests_on=(),
        critical=True,
        work_s=None,
        limit_s=None,
    )


def test_an_interval_between_near_and_far_ones() -> None:
    near, far = _phase("a", 10.0, 8.0, 12.0), _phase("a", 10.0, 5.0, 20.0)
    got = region._farther(near, far, 10.0, 0.3)
    assert got.high_s == pytest.approx(10 * math.exp(region._between(math.log(1.2), math.log(2), 0.3)))
    assert got.low_s == pytest.approx(10 * math.exp(-region._between(math.log(1.25), math.log(2), 0.3)))
    assert region._farther(near, far, 10.0, 0.0) is near
    assert region._farther(near, far, 0.0, 1.0) is near
    open_ = region._farther(near, replace(far, low_s=0.0), 10.0, 0.3)
    assert open_.low_s == pytest.approx(10 * math.exp(-math.hypot(math.log(1.25), 0.3)))
    none = region._farther(replace(near, low_s=0.0), far, 10.0, 0.3)
    assert (none.low_s, none.high_s) == (0, got.high_s)
    above = region._farther(replace(near, low_s=11.0, high_s=9.0), far, 10.0, 0.3)
    assert above.high_s == pytest.approx(10 * math.exp(region._between(0, math.log(2), 0.3)))
    assert above.low_s == pytest.approx(10 * math.exp(-region._between(0, math.log(2), 0.3)))


def test_parts_of_a_step_that_move_together_add_up() -> None:
    """Two calls share a quarter of their variance; a move is off by itself."""
    phases = [_phase("a", 10.0, 7.0, 14.0), _phase("b", 10.0, 6.0, 13.0), _phase("c", 5.0, 4.0, 7.0)]
    below, above = region.apart(phases, {"a": 0.25, "b": 0.25})
    side = math.sqrt(0.75)
    assert below == pytest.approx(math.hypot(0.5 * (3 + 4), side * 3, side * 4, 1))
    assert above == pytest.approx(math.hypot(0.5 * (4 + 3), side * 4, side * 3, 2))


# --- rent, energy, rules --------------------------------------------------------------------------------------


def test_rent_of_a_step_is_that_of_every_gpu() -> None:
    cluster = parse_cluster(16, "h100", price=3.0)
    assert usd_per_step(cluster, 1800.0) == pytest.approx(16 * 3.0 / 2)
    assert usd_per_step(cluster, 3600.0, 5.0) == pytest.approx(80)
    free = replace(H100, price=None)
    unknown = Cluster(node_groups=(NodeGroup(profile=free, gpus=8, gpus_per_node=8),))
    assert usd_per_step(unknown, 3600.0) is None
    assert usd_per_step(unknown, 3600.0, 2.0) == pytest.approx(16)


def test_energy_of_a_step_by_hand() -> None:
    """n f TDP and the nodes' own draw, times PUE; a node of four has half of the draw of one of eight."""
    node = H100.node
    gpu = H100.tdp.value * H100["gpu_power_fraction"]
    for size, count in ((8, 2), (4, 4)):
        cluster = Cluster(node_groups=(NodeGroup(profile=H100, gpus=16, gpus_per_node=size),))
        own = node.power.value * size / node.gpus if node.power else 0.0
        assert joules_per_step(cluster, 10.0) == pytest.approx(10 * H100["pue"] * (16 * gpu + count * own))
    bare = replace(H100, node=replace(node, power=None))
    cluster = Cluster(node_groups=(NodeGroup(profile=bare, gpus=16, gpus_per_node=8),))
    assert joules_per_step(cluster, 10.0) == pytest.approx(10 * H100["pue"] * 16 * gpu)


def test_rules_take_their_share_of_workers_or_one_response() -> None:
    def seconds(workers: int) -> float:
        rules = Rules(seconds_per_sample=0.5, workers=workers)
        return rules_cost(replace(WORK, reward=Reward(model=None, rules=rules))).seconds

    assert seconds(16) == 0.5 * 64 / 16
    assert seconds(1000) == 0.5


# --- modes and places of a phase ------------------------------------------------------------------------------


def _placement(path="broadcast", *, zero: int = 1, together: bool = False, **layout: Any) -> Placement:
    pools = (ResourcePool(name="train", gpus=16), ResourcePool(name="rollout", start=16, gpus=16))
    return Placement(
        pools=pools[:1] if together else pools,
        actor=RolePlacement(pool="train", layout=Layout(tp=2, dp=8, zero=zero)),
        rollout=RolloutPlacement(
            pool="train" if together else "rollout", layout=RolloutLayout(**{"tp": 2, "dp": 8} | layout)
        ),
        weight_path=path,
    )


def test_modes_of_phases_by_hand() -> None:
    placed = _placement()
    assert mode_of("actor.generate", placed, WORK) == "graphs"
    assert mode_of("actor.generate", _placement(cuda_graphs=False), WORK) == "eager"
    assert mode_of("actor.sync", placed, WORK) == "broadcast"
    assert mode_of("actor.train", placed, WORK) == ("packed" if WORK.packing else "padded")
    lora = replace(WORK, lora=Lora())
    assert mode_of("actor.train", placed, lora).endswith(" lora")
    assert "lora" not in mode_of("reference.logprob", placed, lora)
    assert mode_of("actor.generate", _placement("lora"), lora) == "graphs lora"
    assert (pool_of("actor.generate", placed), pool_of("actor.train", placed)) == ("rollout", "train")
    assert pool_of("rules.score", placed) == "train"


def test_a_phase_lies_at_logarithms_of_sizes() -> None:
    point = point_of(8e9, "rollout", _placement(), WORK)
    assert point == pytest.approx([math.log(x) for x in (8e9, 64, 100, 400, 16)])


# --- limits of the hardware -----------------------------------------------------------------------------------


def _sync_limit(placement: Placement, gpus: int = 32, **workload: Any) -> float | None:
    work = replace(WORK, **workload)
    cluster = Cluster(node_groups=(NodeGroup(profile=H100, gpus=gpus, gpus_per_node=8),))
    setting = CallSetting(models=models_of(work), placement=placement, workload=work, cluster=cluster)
    return speed_of_light._sync(setting)


def test_least_seconds_of_a_weight_sync_by_hand() -> None:
    """A domain of eight holds four replicas of two GPUs: the whole model enters over its NICs."""
    size = 2 * preset("llama-3.1-8b").num_params
    nic = 50e9
    assert _sync_limit(_placement()) == pytest.approx(size / (8 * nic))
    wide = _sync_limit(_placement(tp=16, dp=1))
    assert wide == pytest.approx(max(size / 2 / (8 * nic), size / 16 / H100.hbm.value))
    near = Placement(
        pools=(ResourcePool(name="train", gpus=4), ResourcePool(name="rollout", start=4, gpus=4)),
        actor=RolePlacement(pool="train", layout=Layout(tp=2, dp=2)),
        rollout=RolloutPlacement(pool="rollout", layout=RolloutLayout(tp=1, dp=4)),
        weight_path="broadcast",
    )
    inside = max(size / (4 * H100.scale_up.bandwidth.value), size / H100.hbm.value)
    assert _sync_limit(near, 8) == pytest.approx(inside)
    held = _sync_limit(_placement("ipc", together=True), 16)  # every domain trains four copies
    assert held == pytest.approx(size / 2 / H100.hbm.value)
    cut = _sync_limit(_placement("ipc", together=True, zero=3), 16)  # a domain holds half of the shards
    assert cut == pytest.approx(0.5 * size / (8 * nic))
    assert _sync_limit(_placement("lora"), lora=Lora()) is None
    assert _sync_limit(replace(_placement("none", together=True))) is None


def test_the_peak_of_a_precision_or_of_the_next_wider_one() -> None:
    device: Any = SimpleNamespace(profile=H100)
    assert Device.peak(device, "fp8") == H100.peak["fp8"].value
    assert Device.peak(device, "fp4") == H100.peak["bf16"].value


# --- order in time --------------------------------------------------------------------------------------------


def _step(name: str, seconds: float, *pools: str, needs: tuple[str, ...] = (), **options: Any) -> Step:
    cost = Cost(parts=(part("compute", seconds, "x"),))
    return Step(name=name, pools=pools, cost=cost, needs=needs, **options)


def test_calls_start_when_pools_and_inputs_are_there() -> None:
    steps = [
        _step("a", 3, "p"),
        _step("b", 5, "q"),
        _step("c", 2, "p", needs=("b",)),
        _step("d", 1, "q", needs=("a",)),
    ]
    phases, chain = timetable.timetable(steps, Schedule())
    assert [(p.name, p.start, p.end) for p in phases] == [("a", 0, 3), ("b", 0, 5), ("c", 5, 7), ("d", 5, 6)]
    assert [phases[i].name for i in chain] == ["b", "c"]


def test_a_streamed_call_ends_one_piece_after_the_last_samples() -> None:
    """Eight pieces arrive at 1 to 8 s after a start at 0; half a second each, the last at 8.5."""
    steps = [
        _step("actor.generate", 8, "r"),
        _step("rules.score", 4, "cpu", needs=("actor.generate",), streams=True, ahead=True),
    ]
    finish = tuple(float(i) for i in range(1, 9))
    assert timetable.streamed_ends(steps, Schedule(), finish) == {"rules.score": pytest.approx(8.5)}
    phases, _ = timetable.timetable(steps, Schedule(), finish)
    assert (phases[1].start, phases[1].end, phases[1].work_s) == (8, pytest.approx(8.5), 4)
    late = [steps[0], replace(steps[1], latency_s=3.0)]
    assert timetable.streamed_ends(late, Schedule(), finish) == {"rules.score": pytest.approx(11)}
    slow = [steps[0], _step("rules.score", 16, "cpu", needs=("actor.generate",), streams=True, ahead=True)]
    assert timetable.streamed_ends(slow, Schedule(), finish) == {"rules.score": pytest.approx(1 + 16)}
