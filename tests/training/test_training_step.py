from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfsim.kernels import collectives
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.devices import device_of
from rlhfsim.kernels.flop import forward_flop
from rlhfsim.kernels.sequences import Sequences, uniform
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import preset, resolve_model
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.training import gradient_exchange as exchange
from rlhfsim.training import layer_time as roofline
from rlhfsim.training import pipeline
from rlhfsim.training.mixer_time import attention
from rlhfsim.training.training import micro_batches
from rlhfsim.training.unequal_lengths import Spread, spread_of, waits
from rlhfsim.training.work import Work
from tests.one_call import forward, train
from tests.oracles import hardware_flop, one_f_one_b

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
        least = hardware_flop(LLAMA, BATCH, "none") / (where.gpus * PROFILE.peak["bf16"].value)
        assert seconds(where) > least


def test_full_recomputation_costs_about_a_third_more() -> None:
    ratio = seconds(layout(recompute="full")) / seconds(layout())
    assert 1.2 < ratio < 1.4
    assert 1.0 < seconds(layout(recompute="selective")) / seconds(layout()) < 1.1


def test_lora_saves_the_weight_gradients_and_the_exchange() -> None:
    assert 0.65 < seconds(layout(), lora=Lora(rank=16)) / seconds(layout()) < 0.9


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


def test_a_base_in_4_bit_is_dequantised_in_every_pass() -> None:
    d, where = device(8), layout(zero=2)
    rate = PROFILE.hbm.value * d["nf4_dequantise_efficiency"]
    matrices = LLAMA.num_params - 2 * LLAMA.params_embedding
    once = exchange.dequantised(d, LLAMA, where, 1).seconds
    assert once == pytest.approx(matrices * 2.516 / rate, rel=0.01)
    four, half = Lora(rank=32, base="nf4"), Lora(rank=32)
    for recompute, passes in (("none", 2), ("full", 3)):
        changed = replace(where, recompute=recompute)
        more = seconds(changed, lora=four) - seconds(changed, lora=half)
        assert more == pytest.approx(512 / 8 / 2 * passes * once, rel=0.01)


def test_copies_of_shards_cross_the_network_with_a_share_of_their_gradients() -> None:
    d, one = device(64), layout(dp=64, zero=3)
    copies = replace(one, shards=8)
    [shard] = exchange.shards(d, LLAMA, copies)
    assert (shard.ranks.ranks, shard.ranks.domains) == (8, 1)
    assert shard.copies is not None
    assert (shard.copies.ranks, shard.copies.domains) == (8, 8)
    again = exchange.between_copies(d, shard, copies, 1, 4.0)
    # ring of 8: 2 x 7/8 of an eighth of the FP32 gradients
    rate = d.network_bandwidth * d["nic_efficiency"]
    assert again == pytest.approx(2 * 7 / 8 * 4 * LLAMA.num_params / 8 / rate, rel=0.1)
    many = uniform(64 * 32, 2048)
    each = Software(stack="eager", fused=False, copies_each=True)
    small = {"backend": "fsdp2", "sequences": many, "device": device(64, oversubscription=8)}
    assert seconds(copies, **small) < seconds(one, **small)
    assert seconds(copies, **small) < seconds(copies, **small, software=each)
    assert seconds(replace(one, dp=8), backend="fsdp2") == seconds(
        replace(one, dp=8, shards=8), backend="fsdp2"
    )


def test_sums_in_fp32_cost_traffic_of_memory_and_under_zero_1_a_whole_reduction() -> None:
    d, exact = device(8), Software(stack="eager", fused=False, fp32_sums=True)
    rate = PROFILE.hbm.value * d["optimizer_hbm_efficiency"]
    for zero, held in ((1, 1), (2, 1 / 8), (3, 1 / 8)):
        where = layout(zero=zero)
        more = exchange.summed(d, LLAMA, where, 16, share=1.0).seconds
        assert more == pytest.approx(16 * 4 * held * LLAMA.num_params / rate, rel=0.01)
        assert seconds(where, backend="deepspeed", software=exact) > seconds(where, backend="deepspeed")
    shard = exchange.shards(d, LLAMA, layout())[0]
    part, whole = (exchange.traffic(d, shard, layout(), 16, 2.0, whole=w)[1] for w in (False, True))
    assert whole == pytest.approx(2 * part, rel=0.2)  # all-reduce against reduce-scatter


def test_the_optimizer_reads_and_writes_34_bytes_a_parameter() -> None:
    d = device(8)
    moved = exchange.update(d, LLAMA, layout(), optimizer="adam")[0].seconds
    rate = PROFILE.hbm.value * d["optimizer_hbm_efficiency"]
    assert moved == pytest.approx(LLAMA.num_params / 8 * 34 / rate, rel=0.01)


def test_an_optimizer_on_the_host_is_slower() -> None:
    assert seconds(layout(offload_optimizer="cpu")) > seconds(layout()) + 0.1
    assert seconds(layout(offload_optimizer="nvme")) > seconds(layout(offload_optimizer="cpu"))


def test_states_on_the_host_change_the_update_alone() -> None:
    d = device(8)

    def parts(where: Layout) -> tuple[list[object], list[object]]:
        whole = train(d, LLAMA, where, BATCH, backend="megatron").parts
        update = [p for p in exchange.update(d, LLAMA, where, optimizer="adam") if p.seconds > 0]
        return list(whole[: -len(update)]), list(whole[-len(update) :])

    here, away = layout(), layout(offload_optimizer="cpu", offload_fraction=0.5)
    assert parts(here)[0] == parts(away)[0]
    assert parts(away)[1] == [p for p in exchange.update(d, LLAMA, away, optimizer="adam") if p.seconds > 0]


def test_a_share_of_the_optimizer_on_the_host_takes_its_share_of_the_time() -> None:
    d, where = device(8), layout(offload_optimizer="cpu")

    def parts(share: float) -> dict[str, float]:
        found = exchange.update(d, LLAMA, replace(where, offload_fraction=share), optimizer="adam")
        return {p.resource: p.seconds for p in found if p.resource != "overhead"}

    quarter, whole = parts(0.25), parts(1.0)
    for link in ("pcie", "host"):
        assert quarter[link] == pytest.approx(whole[link] / 4)
    rate = PROFILE.hbm.value * d["optimizer_hbm_efficiency"]
    assert quarter["hbm"] == pytest.approx(0.75 * LLAMA.num_params / 8 * 34 / rate, rel=0.01)
    assert "hbm" not in whole


def _on_host(model: str, where: Layout, gpu: str = "h100_sxm", gpus: int = 8) -> float:
    pool = NodeGroup(profile=load_profile(gpu), gpus=gpus, gpus_per_node=8)
    parts = exchange.update(device_of(pool), preset(model), where, optimizer="adam")
    return sum(p.seconds for p in parts if p.resource in ("pcie", "host"))


@pytest.mark.parametrize(
    ("model", "where", "gpu", "measured"),
    [
        (
            "qwen2.5-72b",
            Layout(dp=32, zero=3),
            "a100_sxm",
            10.0,
        ),  # deepspeedai/DeepSpeed#6834, gave the share
        ("glm-4.5-air-106b-a12b", Layout(dp=32, ep=8, zero=1), "h100_sxm", 9.6),  # THUDM/slime#1139
        ("qwen3-0.6b", Layout(dp=1), "h100_sxm", 0.93),  # NVIDIA-NeMo/RL#3628, 100 % with overlap
    ],
)
def test_adam_on_the_host_takes_what_was_measured(
    model: str, where: Layout, gpu: str, measured: float
) -> None:
    found = _on_host(model, replace(where, offload_optimizer="cpu"), gpu, max(8, where.gpus))
    assert found == pytest.approx(measured, rel=0.25)


def test_gpus_of_a_node_share_pcie_and_host_memory_in_a_host_update() -> None:
    where = layout(offload_optimizer="cpu", zero=0)
    alone, together = (_on_host("llama-3-8b", replace(where, dp=n)) for n in (1, 8))
    # without ZeRO each of eight GPUs updates the same parameters
    assert together > 2 * alone


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
    assert spread_of(uneven, layout(), 1, 4, None).slowest > 0
    tied = spread_of(uneven, layout(zero=3), 1, 4, None)
    assert tied.slowest > spread_of(uneven, layout(), 1, 4, None).slowest
    assert spread_of(uniform(64, 1000), layout(), 1, 4, None) == Spread(0, 0)
    assert spread_of(uneven, layout(), 1, 4, 4096) == Spread(0, 0)


def test_the_wait_for_the_longest_is_of_kernels_alone() -> None:
    twice = Spread(0.0, 1.0)
    assert waits(3.0, 0.0, twice, 1.0) == (0.0, 3.0)
    assert waits(3.0, 5.0, twice, 1.0) == (0.0, 1.0), "the longest takes 6, of which the host hides 5"
    assert waits(2.0, 5.0, twice, 1.0) == (0.0, 0.0)
    assert waits(2.0, 5.0, twice, 0.0) == (0.0, 2.0), "a core launches and computes one after the other"


def test_micro_batches_below_the_host_floor_take_the_floor() -> None:
    floor, _ = waits(1.0, 1.0, Spread(0.5, 0.0), 1.0)
    assert floor == pytest.approx(0.5 / math.sqrt(2 * math.pi)), "half of a normal, mean distance"
    assert waits(1.0, 0.0, Spread(0.01, 0.0), 1.0)[0] == pytest.approx(0, abs=1e-9)
    draws = np.random.default_rng(0).normal(1.0, 0.5, 400_000)
    least = np.maximum(draws, 0.8).mean()
    assert waits(1.0, 0.8, Spread(0.5, 0.0), 1.0)[0] == pytest.approx(least - 1.0, abs=2e-3)


def test_launch_bound_ranks_do_not_wait_for_long_sequences() -> None:
    short = Sequences(count=512, mean=64, mean_square=64**2 * 1.25, maximum=256)
    small = preset("qwen3-0.6b")
    cost = train(device(64), small, layout(dp=64, zero=3, micro_batch=1), short, backend="fsdp2")
    assert cost.by_resource().get("tail", 0.0) == 0


def test_context_parallelism_does_not_win_by_the_wait_alone() -> None:
    uneven = Sequences(count=512, mean=1000, mean_square=1.6e6, maximum=4000)
    over_data, over_context = (
        train(device(8), LLAMA, layout(dp=dp, cp=8 // dp, zero=3, micro_batch=1), uneven, backend="fsdp2")
        for dp in (8, 1)
    )
    assert over_context.by_resource()["overhead"] > over_data.by_resource()["overhead"]
    assert over_context.seconds > over_data.seconds


def test_no_step_of_zero_3_is_shorter_than_its_traffic() -> None:
    big, slow = preset("llama-3.1-70b"), device(64, oversubscription=2.0)  # 25 GB/s a GPU
    where = layout(dp=64, zero=3, micro_batch=1)
    for length in (256, 1024, 4096):
        cost = train(slow, big, where, uniform(512, length), backend="fsdp2")
        moved = sum(
            map(sum, [exchange.traffic(slow, s, where, 8, 4.0) for s in exchange.shards(slow, big, where)])
        )
        assert cost.seconds > moved


def test_shards_and_layers_share_the_link_that_they_cross() -> None:
    slow, where = device(64, oversubscription=8.0), layout(dp=64, ep=64, zero=3, micro_batch=1)
    cost = train(slow, QWEN, where, uniform(512, 1024), backend="fsdp2")
    raw = [exchange.traffic(slow, s, where, 8, 4.0) for s in exchange.shards(slow, QWEN, where)]
    room = exchange.Room(3.0, {"network": 2.0})
    assert (room.free("network"), room.free("nvlink")) == (1.0, 3.0)
    assert cost.by_resource()["network"] > 0.2 * sum(map(sum, raw))


def test_the_overlap_budget_of_zero_3_is_spent_once() -> None:
    # 10 s of gathers, 5 s of reductions, 2 micro-batches of 1 s ahead and 2 s back, all of it hidden where possible
    assert exchange.exposed(3, 2, 10.0, 5.0, 1.0, 2.0, 1.0, 100) == pytest.approx((5 - 2) + (5 + 5 - 4))
    assert exchange.exposed(1, 2, 10.0, 5.0, 1.0, 2.0, 1.0, 100) == pytest.approx((10 - 1) + (5 - 2))


def test_every_hop_between_stages_is_looked_at() -> None:
    assert pipeline.hops(16, 4, 8) == (False, True) * 7 + (False,)  # TP2 DP2 PP16 on nodes of 8: 7 of 15
    assert pipeline.hops(4, 2, 8) == (False,) * 3
    assert pipeline.hops(3, 8, 8) == (True, True)
    assert pipeline.hops(3, 6, 8) == (True, True)  # ranks 4 and 5 of the first stage send to the next node
    assert pipeline.hops(1, 8, 8) == ()


def test_the_slowest_stage_decides_the_rate_of_the_sends() -> None:
    assert pipeline.sends((False, True, False), 10) == (10 + 3, 10 + 1)
    assert pipeline.sends((True,), 4) == (0, 8)
    assert pipeline.sends((), 4) == (0, 0)
    assert pipeline.sends((False, True), 4, back=False) == (1, 4)


def test_a_pipeline_over_nodes_pays_the_network_between_them() -> None:
    where = layout(tp=2, dp=2, pp=16, micro_batch=1)
    assert train(device(64), LLAMA, where, uniform(64, 2048), backend="megatron").by_resource()["network"] > 0


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
    work = Work(tokens=32768, length=32768)
    full = replace(oss, attention=replace(oss.attention, num_windowed_layers=0))
    assert attention(d, oss, work) < 0.7 * attention(d, full, work)
    assert roofline.embedding(d, LLAMA, work).forward.memory < 1e-2


def test_several_teachers_score_a_part_each() -> None:
    qwen, where = resolve_model("qwen3-8b"), layout(dp=8)
    odd = replace(BATCH, count=129)
    parts = odd.dealt(2)
    assert [part.count for part in parts] == [65, 64]
    assert [part.count for part in replace(BATCH, count=1).dealt(2)] == [1, 1]
    args = device(8), where
    each = [
        forward(args[0], model, where, part, backend="megatron").seconds
        for model, part in zip((LLAMA, qwen), parts, strict=True)
    ]
    both = replace(LLAMA, others=(qwen,))
    assert forward(args[0], both, where, odd, backend="megatron").seconds == pytest.approx(sum(each))
    assert both.launched_layers == (LLAMA.num_layers + qwen.num_layers) / 2
    assert forward_flop(both, odd) == forward_flop(LLAMA, parts[0]) + forward_flop(qwen, parts[1])


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_that_are_reduced_once_hide_behind_the_last_backward_pass(zero: int) -> None:
    d, where = device(8), layout(dp=8, zero=zero)
    room, eta = exchange.Room(0.2, {}), device(8)["overlap_dp"]
    (shard,) = exchange.shards(d, LLAMA, where)
    gather, reduce = exchange.traffic(d, shard, where, 6, 4.0, reductions=1)

    def seen(once: bool) -> float:
        sums = exchange.GradientSums(4.0, once=once)
        parts = exchange.exchange(d, LLAMA, where, 6, forward=room, backward=room, sums=sums)
        return sum(part.seconds for part in parts if part.resource == "nvlink")

    ahead = exchange.exposed(zero, 6, gather, 0.0, 0.2, 0.2, eta, 32)
    assert seen(True) == pytest.approx(ahead + exchange.hidden_behind(reduce, 0.2, eta, 32))
    assert seen(True) != seen(False)


@pytest.mark.parametrize("zero", [2, 3])
def test_fsdp_that_sums_whole_gradients_sends_them_once_a_step(zero: int) -> None:
    d = device(8)
    where = layout(dp=8, zero=zero)
    (shard,) = exchange.shards(d, LLAMA, where)
    each, once = (exchange.traffic(d, shard, where, 6, 4.0, reductions=n) for n in (None, 1))
    assert once[0] == each[0]
    assert once[1] == pytest.approx(each[1] / 6)


@pytest.mark.parametrize(("zero", "times"), [(1, 1), (2, 6)])
def test_deepspeed_reduces_all_gradients_on_all_ranks_and_without_overlap_in_turn(
    zero: int, times: int
) -> None:
    d, where = device(8), layout(dp=8, zero=zero)
    assert zero in BACKENDS["deepspeed"].whole_stages
    room, eta = exchange.Room(0.2, {}), device(8)["overlap_dp"]
    (shard,) = exchange.shards(d, LLAMA, where)
    gather, reduce = exchange.traffic(d, shard, where, 6, 2.0, whole=True)
    one = collectives.all_reduce(d, 2.0 * shard.params, shard.ranks)
    assert reduce == pytest.approx(times * one)

    def seen(in_turn: bool) -> float:
        sums = exchange.GradientSums(2.0, whole=True, in_turn=in_turn)
        parts = exchange.exchange(d, LLAMA, where, 6, forward=room, backward=room, sums=sums)
        return sum(part.seconds for part in parts if part.resource == "nvlink")

    assert seen(True) == pytest.approx(gather + times * one)
    behind = exchange.hidden_behind(times * one, times * 0.2, eta, 32)
    assert seen(False) == pytest.approx(gather + behind)


def test_reductions_in_turn_lengthen_a_step_of_deepspeed_under_zero_2_alone() -> None:
    overlapped = Software(stack="eager", fused=False)
    in_turn = replace(overlapped, overlaps_reduction=False)
    for zero, longer in ((2, True), (3, False)):
        where = layout(dp=8, zero=zero)
        apart, beside = (seconds(where, backend="deepspeed", software=x) for x in (in_turn, overlapped))
        assert (apart > 1.02 * beside) == longer


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("full", 3)])
def test_autocast_reads_and_writes_weights_and_gradients_in_every_micro_batch(
    recompute: str, passes: int
) -> None:
    where = layout(dp=8, zero=0, recompute=recompute)
    usual = Software(stack="eager", fused=False, reduce_bytes=4)
    plain = replace(usual, plain_bytes=4)
    more = seconds(where, backend="deepspeed", software=plain) - seconds(
        where, backend="deepspeed", software=usual
    )
    d = device(8)
    one = 6 * LLAMA.num_params / (PROFILE.hbm.value * d["optimizer_hbm_efficiency"])
    count = micro_batches(where, BATCH, 1, None)[1]
    assert more == pytest.approx(passes * count * one, rel=0.01)
