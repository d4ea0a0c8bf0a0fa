from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfsim.kernels import flop
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.devices import device_of
from rlhfsim.kernels.sequences import Sequences, uniform
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import preset
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.training import gradient_exchange as exchange
from rlhfsim.training import layer_time as roofline
from rlhfsim.training import pipeline
from rlhfsim.training.forward import forward
from rlhfsim.training.passes import Software
from rlhfsim.training.training import imbalance, micro_batches, train
from tests.oracles import one_f_one_b

PROFILE = load_profile("h100_sxm")
LLAMA, QWEN = preset("llama-3-8b"), preset("qwen3-30b-a3b")
BATCH = uniform(512, 2048)


def device(gpus: int = 64, oversubscription: float = 1.0) -> Device:
    return device_of(NodeGroup(profile=PROFILE, gpus=gpus, gpus_per_node=8), oversubscription)


def layout(**changes: object) -> Layout:
    base = Layout(tp=1, pp=1, dp=8, zero=1, micro_batch=2, recompute="none")
    return replace(base, **changes)  # type: ignore[arg-type]


def seconds(where: Layout, **changes: object) -> float:
    given = {"model": LLAMA, "sequences": BATCH, "backend": "megatron", "device": device(where.gpus)}
    given |= changes
    d, model, sequences = given.pop("device"), given.pop("model"), given.pop("sequences")
    return train(d, model, where, sequences, **given).seconds  # type: ignore[arg-type]


@given(t=st.floats(0.01, 10), p=st.integers(1, 8), m=st.integers(1, 40))
@settings(deadline=None, max_examples=50)
def test_the_recurrence_equals_the_closed_form_for_equal_micro_batches(t: float, p: int, m: int) -> None:
    ahead, back = [[t] * m] * p, [[2 * t] * m] * p
    closed = (m + p - 1) * 3 * t
    assert one_f_one_b(ahead, back) == pytest.approx(closed)
    assert pipeline.makespan([3 * t] * p, m) == pytest.approx(closed)


def test_interleaving_divides_the_ramp() -> None:
    assert pipeline.makespan([1.0] * 4, 8, chunks=1) == 11
    assert pipeline.makespan([1.0] * 4, 8, chunks=3) == 9


def test_unequal_micro_batches_take_longer_than_their_mean() -> None:
    uneven = [[1.0, 3.0, 1.0, 3.0]] * 4
    assert one_f_one_b(uneven, uneven) > one_f_one_b([[2.0] * 4] * 4, [[2.0] * 4] * 4)


def test_layers_that_do_not_divide_leave_room_for_embedding_and_head() -> None:
    stages = pipeline.split(126, 16, 8)
    assert (stages.first, stages.middle, stages.last) == (7, 8, 7)
    assert sum(pipeline.split(80, 8, 5).times(1.0, 0, 0)) == 80
    assert sum(pipeline.split(61, 16, 1).times(1.0, 0, 0)) == pytest.approx(61)


def test_no_step_beats_the_roofline_of_its_flop() -> None:
    for where in (layout(), layout(tp=8, dp=1), layout(pp=4, dp=2), layout(zero=3)):
        least = flop.hardware_flop(LLAMA, BATCH, "none") / (where.gpus * PROFILE.peak["bf16"].value)
        assert seconds(where) > least


def test_full_recomputation_costs_about_a_third_more() -> None:
    ratio = seconds(layout(recompute="full")) / seconds(layout())
    assert 1.2 < ratio < 1.4
    assert 1.0 < seconds(layout(recompute="selective")) / seconds(layout()) < 1.1


def test_lora_saves_the_weight_gradients_and_the_exchange() -> None:
    assert 0.55 < seconds(layout(), lora=Lora(rank=16)) / seconds(layout()) < 0.8


def test_fp8_is_faster_than_bf16_but_not_twice() -> None:
    ratio = seconds(layout(), precision="fp8") / seconds(layout())
    assert 0.5 < ratio < 1.0


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_more_network_bandwidth_is_never_slower(zero: int) -> None:
    where = layout(dp=64, zero=zero)
    slow = seconds(where, device=device(64, 8.0))
    assert seconds(where, device=device(64)) <= slow


@pytest.mark.parametrize("kind", [LLAMA, QWEN])
def test_twice_the_batch_takes_at_most_twice_as_long(kind: ModelSpec) -> None:
    one, two = (seconds(layout(ep=8), model=kind, sequences=uniform(n, 2048)) for n in (512, 1024))
    assert one < two <= 2.001 * one


def test_zero_3_moves_half_as_much_again_as_zero_2_with_one_micro_batch() -> None:
    d = device(64)
    shard = exchange.shards(d, LLAMA, layout(dp=64))[0]
    two = sum(exchange.traffic(d, shard, layout(dp=64, zero=2), 1, 2.0))
    three = sum(exchange.traffic(d, shard, layout(dp=64, zero=3), 1, 2.0))
    assert three == pytest.approx(1.5 * two, rel=0.01)  # arXiv 1910.02054: 3 Psi against 2 Psi


def test_the_optimizer_reads_and_writes_34_bytes_a_parameter() -> None:
    d = device(8)
    moved = exchange.update(d, LLAMA, layout(), optimizer="adam")[0].seconds
    rate = PROFILE.hbm.value * d["optimizer_hbm_efficiency"]
    assert moved == pytest.approx(LLAMA.num_params / 8 * 34 / rate, rel=0.01)


def test_an_optimizer_on_the_host_is_slower() -> None:
    assert seconds(layout(offload_optimizer="cpu")) > seconds(layout()) + 0.1
    assert seconds(layout(offload_optimizer="nvme")) > seconds(layout(offload_optimizer="cpu"))


def test_skewed_routing_costs_more_than_forced_balance() -> None:
    where = layout(ep=8)
    even = seconds(where, model=QWEN, software=Software(balanced=True, graphs="full"))
    assert seconds(where, model=QWEN, software=Software(graphs="full")) > even


def test_a_rank_with_few_sequences_runs_smaller_micro_batches() -> None:
    assert micro_batches(layout(dp=8, micro_batch=4), uniform(16, 100), 1, None) == (200, 1)
    assert micro_batches(layout(dp=8, micro_batch=2), uniform(64, 100), 2, None) == (200, 2)
    tokens, count = micro_batches(layout(dp=4, micro_batch=1), uniform(64, 1024), 1, 4096)
    assert (tokens, count) == (4096, 4)


def test_lengths_that_differ_make_ranks_wait() -> None:
    uneven = Sequences(count=64, mean=1000, mean_square=1.6e6, maximum=4000)
    assert imbalance(uneven, layout(), 1, 4, None) > 0
    assert imbalance(uneven, layout(zero=3), 1, 4, None) > imbalance(uneven, layout(), 1, 4, None)
    assert imbalance(uniform(64, 1000), layout(), 1, 4, None) == 0
    assert imbalance(uneven, layout(), 1, 4, 4096) == 0


def test_a_forward_takes_about_a_third_of_training() -> None:
    where = layout()
    ratio = forward(device(8), LLAMA, where, BATCH, backend="megatron").seconds / seconds(where)
    assert 0.25 < ratio < 0.4


def test_a_value_forward_skips_the_logits() -> None:
    args = (device(8), LLAMA, layout(), BATCH)
    value = forward(*args, backend="megatron", head="value").seconds
    assert value < forward(*args, backend="megatron").seconds


def test_a_pipeline_forward_has_a_ramp_of_p_minus_1() -> None:
    cost = forward(device(8), LLAMA, layout(pp=4, dp=2), BATCH, backend="megatron")
    idle = cost.by_resource()["bubble"]
    assert 0 < idle < cost.seconds * 0.2


def test_context_parallelism_hides_behind_long_attention() -> None:
    short, long = uniform(8, 16384), uniform(8, 131072)
    where = layout(dp=1, cp=8, micro_batch=1)
    exposed = [
        train(device(8), LLAMA, where, s, backend="megatron").by_resource().get("nvlink", 0.0)
        for s in (short, long)
    ]
    assert exposed[1] <= 8 * exposed[0] + 1e-9


def test_the_interval_holds_the_prediction() -> None:
    cost = train(device(8), LLAMA, layout(), BATCH, backend="fsdp2")
    low, high = cost.interval
    assert low < cost.seconds < high
    assert cost.bound_by == "compute"


def test_graphs_remove_the_launch_bound_of_small_micro_batches() -> None:
    tiny, where = uniform(8, 256), layout(micro_batch=1, ep=8)
    eager = seconds(where, model=QWEN, sequences=tiny, software=Software())
    assert seconds(where, model=QWEN, sequences=tiny, software=Software(graphs="full")) < 0.7 * eager


def test_the_embedding_and_a_windowed_layer_are_cheaper_than_full_ones() -> None:
    d, oss = device(8), preset("gpt-oss-20b")
    work = roofline.Work(tokens=32768, length=32768)
    full = replace(oss, attention=replace(oss.attention, num_windowed_layers=0))
    assert roofline.attention(d, oss, work) < 0.7 * roofline.attention(d, full, work)
    assert roofline.embedding(d, LLAMA, work).forward.memory < 1e-2
