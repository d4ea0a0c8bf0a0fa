"""Seconds of parts of a training step by hand, on an H100 with coefficients that are all different from 1."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlhfsim.kernels import collectives, layers
from rlhfsim.kernels.device import Device, Group, group
from rlhfsim.kernels.devices import device_of
from rlhfsim.kernels.flop import attended_pairs
from rlhfsim.kernels.links import host_rate
from rlhfsim.kernels.routing import Routing
from rlhfsim.kernels.sequences import Sequences
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.mixers import DENSE, EXPERTS
from rlhfsim.specs.model.presets import preset
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Lora, Workload
from rlhfsim.training import gradient_exchange as exchange
from rlhfsim.training import layer_time, mixer_time, packing, passes, pipeline, unequal_lengths
from rlhfsim.training import training as step
from rlhfsim.training.gradient_exchange import GradientShard, Room
from rlhfsim.training.layer_time import Pass
from rlhfsim.training.work import Work
from tests.one_call import forward, train

H100 = load_profile("h100_sxm")
LLAMA, MOE, LITE = preset("llama-3.1-8b"), preset("qwen3-30b-a3b"), preset("deepseek-v2-lite")
NEMOTRON, NEXT = preset("nemotron-h-8b"), preset("qwen3-next-80b-a3b")
PLANTED = {
    "hbm_efficiency": 0.8,
    "attention_half_length": 300.0,
    "eager_traffic": 2.5,
    "overlap_tp": 0.3,
    "overlap_tp_user_buffers": 0.6,
    "overlap_ep": 0.2,
    "overlap_ep_scheduled": 0.7,
    "overlap_launch": 0.75,
    "overlap_dp": 0.5,
    "sustained_clock": 0.9,
    "training_kernel_efficiency": 0.85,
    "training_attention_efficiency": 0.7,
    "kernel_speed_eager": 0.95,
    "attention_speed_eager": 0.65,
    "rank_contention": 1.25,
    "host_layer_time": 3e-4,
    "host_moe_time": 5e-4,
    "grouped_gemm_efficiency": 0.9,
    "zero_tensor_time": 1e-5,
    "zero_step_time": 0.02,
    "adapter_gather_time": 1e-4,
    "adapter_sets_time": 3e-4,
}


@pytest.fixture(scope="module")
def device() -> Device:
    known = dict(H100.coefficients)
    for name, value in PLANTED.items():
        known[name] = replace(known[name], value=value, low=value * 0.9, high=value * 1.1)
    profile = replace(H100, coefficients=known)
    return device_of(NodeGroup(profile=profile, gpus=64, gpus_per_node=8))


@pytest.fixture(scope="module")
def hbm() -> float:
    """Bytes a second that kernels reach."""
    return H100.hbm.value * 0.8


# --- pipelines --------------------------------------------------------------------------------------------


def test_a_pipeline_by_hand() -> None:
    """Ramp of the two others over 2 chunks, and five micro-batches of the slowest stage."""
    assert pipeline.makespan([1.0, 3.0, 2.0], 5, 2) == 3 / 2 + 15
    assert pipeline.makespan([4.0], 5) == 20


def test_hops_leave_a_domain_where_any_pair_of_ranks_does() -> None:
    assert pipeline.hops(4, 2, 4) == (False, True, False)
    assert pipeline.hops(3, 8, 8) == (True, True)
    assert pipeline.hops(4, 3, 8) == (False, True, True)
    assert pipeline.hops(1, 8, 8) == ()


def test_sends_that_the_slowest_stage_waits_for() -> None:
    assert pipeline.sends((), 10) == (0, 0)
    # near hops alone: two a round; the ramp passes three hops and back, less the round that is counted
    assert pipeline.sends((False, False, False), 10) == (20 + 4, 0)
    # the middle hop is far: every stage has one near and one far
    assert pipeline.sends((False, True, False), 10) == (10 + 3, 10 + 1)
    assert pipeline.sends((True, True), 10) == (0, 20 + 2)
    assert pipeline.sends((False, False, False), 10, back=False) == (10 + 2, 0)
    assert pipeline.sends((False, True, False), 10, back=False) == (2, 10)
    assert pipeline.sends((True,), 10) == (0, 20)


def test_layers_of_stages_by_hand() -> None:
    def held(*asked: int) -> tuple[float, ...]:
        stages = pipeline.split(*asked)
        return stages.first, stages.middle, stages.last, stages.number

    assert held(32, 4) == (8, 8, 8, 4)
    assert held(61, 8) == (6.5, 8, 6.5, 8)  # 63 units in chunks of 8; the six in the middle are full
    assert held(126, 4, 4) == (31, 32, 31, 4)  # 128 units in 16 chunks of 8
    assert held(5, 1) == (5, 0, 0, 1)
    assert held(9, 8) == (9 / 8, 9 / 8, 9 / 8, 8)  # chunks of two would leave the ends nothing
    stages = pipeline.split(61, 8)
    assert stages.times(2.0, 0.5, 3.0) == [13.5, *[16.0] * 6, 16.0]
    assert pipeline.split(5, 1).times(2.0, 0.5, 3.0) == [13.5]


# --- what unequal lengths cost ----------------------------------------------------------------------------


def _spread(layout: Layout, *, count: int = 128, steps: int = 2, batches: int = 4, maximum: float = 300.0):
    sequences = Sequences(count=count, mean=100.0, mean_square=12500.0, maximum=maximum)  # deviation 50
    return unequal_lengths.spread_of(sequences, layout, steps, batches, None)


def test_spread_of_micro_batches_and_ranks_by_hand() -> None:
    """16 sequences a rank and step, four a micro-batch: 0.5 / 2, and 0.5 / 16 of the ranks."""
    assert _spread(Layout(dp=4, zero=1)) == (0.25, 0.5 / 16)
    assert _spread(Layout(dp=4, zero=3)) == (0.25, 0.5 / 4)
    few = _spread(Layout(dp=4, zero=1), count=8)
    assert few == (0.5, 0.5)
    two = _spread(Layout(dp=2, zero=1), count=4, maximum=1e6)
    assert two.slowest == pytest.approx(0.5 * min(1, math.sqrt(2 * math.log(2))))
    assert _spread(Layout(dp=1, zero=1)).slowest == 0
    assert _spread(Layout(dp=4, zero=1), count=8, maximum=120.0).slowest == pytest.approx(0.2)
    packed = Sequences(count=8, mean=100.0, mean_square=12500.0, maximum=300.0)
    assert unequal_lengths.spread_of(packed, Layout(dp=4), 1, 1, 512.0) == (0, 0)
    padded = replace(packed, packed=False)
    assert unequal_lengths.spread_of(padded, Layout(dp=4), 1, 1, None) == (0, 0)
    equal = replace(packed, mean_square=10000.0)
    assert unequal_lengths.spread_of(equal, Layout(dp=4), 1, 1, None) == (0, 0)


def test_waits_of_short_micro_batches_and_of_the_slowest_rank_by_hand() -> None:
    """E[max(K, H)] of a normal K with mean 2 and deviation 1 above H = 2: 2 + 1/sqrt(2 pi)."""
    spread = unequal_lengths.Spread(0.5, 0.25)
    floor, behind = unequal_lengths.waits(2.0, 2.0, spread, 1.0)
    assert floor == pytest.approx(1 / math.sqrt(2 * math.pi))
    assert behind == 0.5
    # kernels of 2 beside a launch of 3: one deviation below; only 2.5 - 3 of the longest shows, none
    z = -1.0
    density, share = math.exp(-0.5) / math.sqrt(2 * math.pi), (1 + math.erf(z / math.sqrt(2))) / 2
    floor, behind = unequal_lengths.waits(2.0, 3.0, spread, 0.8)
    assert floor == pytest.approx(0.8 * (3 + density - share - 3))
    assert behind == pytest.approx(0.2 * 0.5)
    assert unequal_lengths.waits(2.0, 0.0, unequal_lengths.Spread(0.0, 0.5), 1.0) == (0, 1.0)
    assert unequal_lengths.waits(4.0, 4.5, unequal_lengths.Spread(0.0, 0.5), 1.0) == (0, 1.5)


def test_waits_take_as_long_as_the_pipeline_stretches_them(device: Device) -> None:
    spread = unequal_lengths.Spread(0.5, 0.25)
    floor, behind = unequal_lengths.waits(2.0, 2.0, spread, 0.75)
    parts = unequal_lengths.late_parts(device, 2.0, 2.0, spread, 3.0)
    assert [p.seconds for p in parts] == pytest.approx([3 * floor, 3 * behind])
    assert [p.spread for p in parts] == [device.spread("host_layer_time"), (0.3, 2.0)]


# --- packs ------------------------------------------------------------------------------------------------


def test_moments_of_prompt_and_response_add_up() -> None:
    work = Workload(
        model="llama-3.1-8b",
        algorithm="grpo",
        prompts=4,
        samples=2,
        prompt_len=Fixed(value=100),
        response_len=Fixed(value=400),
    )
    joined = packing.sequences_of(work)
    assert (joined.count, joined.mean, joined.mean_square, joined.maximum) == (8, 500, 250_000, 500)
    drawn = packing.sequences_of(work, (100.0, 300.0))
    assert (drawn.mean, drawn.mean_square, drawn.maximum) == (300, 300**2 + 100**2, 400)


# --- kernels of a layer -----------------------------------------------------------------------------------


def test_rows_of_experts_are_padded_to_tiles() -> None:
    """4000 tokens choose 8 of 128: 250 rows each and half a tile, or half as many rows again where few."""
    up = layers.expert_matrices(MOE, 1)[1]
    work = Work(tokens=4000.0, length=1000.0)
    half = layer_time.TILE / 2
    assert layer_time._rows(up, work) == 128 * (250 + min(half, 125))
    few = Work(tokens=160.0, length=10.0)
    assert layer_time._rows(up, few) == 128 * (10 + 5)
    assert layer_time._rows(up, Work(tokens=1.0, length=1.0)) == 128 * 1.5
    assert layer_time._rows(up, replace(few, skew=1.5)) == 128 * 22.5
    assert layer_time._rows(up, replace(few, tp=2)) == 128 * 7.5
    one, two = (replace(up, rows=1.0, experts=experts) for experts in (1, 2))
    assert [layer_time._rows(x, work) for x in (one, two)] == [4000, 2 * (2000 + half)]
    assert layer_time._rows(replace(one, rows=2.0), work) == 8000 + half
    router, plain = layers.expert_matrices(MOE, 1)[0], layers.mlp_matrices(LLAMA, 1)[0]
    assert layer_time._rows(router, replace(few, tp=2)) == 80
    assert layer_time._rows(plain, replace(few, tp=2)) == 160
    assert replace(few, tp=2, sequence_parallel=False).held == 160


def _traffic(model, work: Work, kind) -> float:
    matrices = layers.layer_matrices(model, work.tp, work.ep, work.etp, kind=kind)
    return layer_time._traffic(model, matrices, work, kind)


def test_bytes_that_pass_through_memory_beside_the_products() -> None:
    """5 h a block, rotary of 32 + 8 heads of 128 four times, 3 f of a gated MLP; two bytes each."""
    work = Work(tokens=1000.0, length=1000.0)
    elements = 5 * 2 * 4096 + 4 * 40 * 128 + 3 * 14336
    assert _traffic(LLAMA, work, DENSE) == 2 * 1000 * elements
    cut = replace(work, tp=2, cp=3)
    elements = 5 * 2 * 4096 / 2 + 4 * 20 * 128 + 3 * 2 * 16 * 128 + 3 * 14336 / 2
    assert _traffic(LLAMA, cut, DENSE) == 2 * 1000 * elements
    phi = preset("phi-2")
    assert _traffic(phi, work, DENSE) == 2 * 1000 * (10 * 2560 + 4 * 64 * 80 + 2 * 10240)
    mamba = NEMOTRON.kinds[0]
    scan = 5 * 4096 + 3 * NEMOTRON.recurrent.in_width
    assert _traffic(NEMOTRON, work, mamba) == 2 * 1000 * scan
    half = 5 * 4096 / 2 + 3 * NEMOTRON.recurrent.in_width / 2
    assert _traffic(NEMOTRON, replace(work, tp=2), mamba) == 2 * 1000 * half
    assert _traffic(NEMOTRON, work, NEMOTRON.kinds[2]) == 2 * 1000 * (5 * 4096 + 2 * NEMOTRON.ffn)


def test_experts_permute_their_copies_through_memory() -> None:
    work = Work(tokens=4000.0, length=1000.0, ep=2)
    up = layers.expert_matrices(MOE, 2)[1]
    plain = 5 * 2 * 2048 + 4 * (32 + 4) * 128
    copies, product = 4 * 8 * 2048, 1.5 * 2 * 768 * layer_time._rows(up, work)
    assert _traffic(MOE, work, EXPERTS) == pytest.approx(2 * (4000 * (plain + copies) + product))
    fused = replace(work, fused_experts=True)
    assert _traffic(MOE, fused, EXPERTS) == 2 * 4000 * (plain + copies)
    two = replace(fused, etp=2)
    assert _traffic(MOE, two, EXPERTS) == pytest.approx(2 * 4000 * (plain + 2 * copies))
    plain_exchange = _traffic(MOE, replace(work, ep=2, dispatcher="alltoall"), EXPERTS)
    other_exchange = _traffic(MOE, replace(work, ep=2, dispatcher="deepep"), EXPERTS)
    assert plain_exchange - other_exchange == pytest.approx(2 * 4000 * copies)


@pytest.mark.parametrize(("dispatcher", "down"), [("alltoall", 4.7), ("deepep", 11.3), (None, 11.3)])
def test_biases_of_experts_pass_through_memory_one_by_one(dispatcher, down: float) -> None:
    """GPT-OSS: three elements for each that goes up, more for each that comes down; fused kernels add them inside."""
    model, work = preset("gpt-oss-20b"), Work(tokens=4096.0, length=4096.0, ep=4, dispatcher=dispatcher)
    kind = next(k for k in model.kinds if k.ffn == "experts")
    matrices = {x.name: x for x in layer_time.layers.layer_matrices(model, 1, 4, 1, kind=kind)}
    up, back = matrices["expert_up"], matrices["expert_down"]
    with_bias = _traffic(model, work, kind) - _traffic(replace(model, mlp_bias=False), work, kind)
    rows = layer_time._rows(up, work)
    assert with_bias == pytest.approx(2 * rows * (3 * up.n + down * back.n))
    fused = replace(work, fused_experts=True)
    assert _traffic(model, fused, kind) == _traffic(replace(model, mlp_bias=False), fused, kind)


def test_collectives_of_tensor_parallelism(device: Device) -> None:
    """Two blocks of a dense layer; experts that are not cut and no shared one leave the attention's."""
    ranks, size = Group(ranks=4, per_domain=4), 2 * 1000 * 4096.0
    work = Work(tokens=1000.0, length=1000.0, tp=4)
    gather, scatter = (f(device, size, ranks) for f in (collectives.all_gather, collectives.reduce_scatter))
    assert layer_time._tensor_parallel(device, LLAMA, work, DENSE) == pytest.approx(2 * (gather + scatter))
    whole = replace(work, sequence_parallel=False)
    reduce = collectives.all_reduce(device, size, ranks)
    assert layer_time._tensor_parallel(device, LLAMA, whole, DENSE) == pytest.approx(2 * reduce)
    small = 2 * 1000 * 2048.0
    pair = sum(f(device, small, ranks) for f in (collectives.all_gather, collectives.reduce_scatter))
    assert layer_time._tensor_parallel(device, MOE, work, EXPERTS) == pytest.approx(pair)
    assert layer_time._tensor_parallel(device, MOE, replace(work, etp=4), EXPERTS) == pytest.approx(2 * pair)
    assert layer_time._tensor_parallel(device, LITE, work, EXPERTS) == pytest.approx(2 * pair)
    assert layer_time._tensor_parallel(device, LLAMA, replace(work, tp=1), DENSE) == 0
    mlp = layer_time._tensor_parallel(device, NEMOTRON, work, NEMOTRON.kinds[2])
    assert mlp == pytest.approx(gather + scatter)


def test_dispatch_goes_there_and_back(device: Device) -> None:
    work = Work(tokens=1000.0, length=1000.0, ep=8, tp=2, skew=1.5)
    ranks = Group(ranks=8, per_domain=8)
    once = collectives.dispatch(device, 500.0, 2 * 2048.0, Routing(top_k=8), ranks, skew=1.5)
    assert layer_time._expert_parallel(device, MOE, work) == pytest.approx(2 * once)
    each = collectives.dispatch(device, 500.0, 2 * 2048.0, Routing(top_k=8), ranks, skew=1.5, by="alltoall")
    assert layer_time._expert_parallel(device, MOE, replace(work, dispatcher="alltoall")) == pytest.approx(
        2 * each
    )
    assert layer_time._expert_parallel(device, LLAMA, work) == 0
    assert layer_time._expert_parallel(device, MOE, replace(work, ep=1)) == 0


def test_what_is_not_said_of_the_exchange_is_in_its_interval(device: Device) -> None:
    """Half to one and a half of a known price; overlap unknown reaches (1 - 0.7) / (1 - 0.2), each dispatcher
    its own price over that of one copy."""
    work = Work(tokens=1000.0, length=1000.0, ep=16, dispatcher="deepep", ep_overlap=False)
    assert layer_time.ep_spread(device, MOE, work) == (0.5, 1.5)
    low, high = layer_time.ep_spread(device, MOE, replace(work, ep_overlap=None))
    assert (low, high) == (pytest.approx(0.3 / 0.8), 1.5)
    one = layer_time._expert_parallel(device, MOE, replace(work, dispatcher=None))
    each = [
        layer_time._expert_parallel(device, MOE, replace(work, dispatcher=d)) / one
        for d in layer_time.TRAINS_WITH
    ]
    assert max(each) > 1.5
    unknown = layer_time.ep_spread(device, MOE, replace(work, dispatcher=None))
    assert unknown == pytest.approx((0.5 * min(1, *each), max(each)))
    assert layer_time.ep_spread(device, MOE, replace(work, dispatcher=None, ep=1)) == (0.5, 1.5)
    few = replace(work, dispatcher=None, tokens=10.0, ep=2)
    gathered = layer_time._expert_parallel(device, MOE, few, "allgather")
    cheaper = gathered / layer_time._expert_parallel(device, MOE, few)
    assert cheaper < 1
    assert layer_time.ep_spread(device, MOE, few)[0] == pytest.approx(0.5 * cheaper)


def test_keys_and_values_go_round_the_ring(device: Device) -> None:
    """8 KV heads of 128 + 128, 1000 tokens a rank, three steps of which two wait for their latency too."""
    work = Work(tokens=1000.0, length=4000.0, cp=4)
    size = 2 * 8 * 256 * 1000 * 3.0
    ring = collectives.p2p(device, size, False) + 2 * collectives.p2p(device, 1.0, False)
    assert layer_time._context_parallel(device, LLAMA, work, DENSE) == pytest.approx(ring)
    two = layer_time._context_parallel(device, LLAMA, replace(work, cp=2), DENSE)
    assert two == pytest.approx(collectives.p2p(device, size / 3, False))
    wide = replace(work, tp=8)
    far = collectives.p2p(device, size / 8, True) + 2 * collectives.p2p(device, 1.0, True)
    assert layer_time._context_parallel(device, LLAMA, wide, DENSE) == pytest.approx(far)
    block = NEMOTRON.recurrent
    moved = 2 * (block.in_width + block.inner) * 1000 * 3 / 4
    state = layer_time._context_parallel(device, NEMOTRON, work, NEMOTRON.kinds[0])
    assert state == pytest.approx(collectives.p2p(device, moved, False))
    assert layer_time._context_parallel(device, NEMOTRON, work, NEMOTRON.kinds[2]) == 0
    assert layer_time._context_parallel(device, LLAMA, replace(work, cp=1), DENSE) == 0


def test_a_product_beyond_the_curve_grows_with_its_shape(device: Device) -> None:
    m, n, k = layer_time.MAX_M, layer_time.MAX_N, layer_time.MAX_K
    inside = layer_time._gemm(device, "bf16", 1.0, m, n, k, False, 0.0)
    assert inside == float(device.curves.gemm(m, n, k))
    assert layer_time._gemm(device, "bf16", 1.0, 2 * m, 3 * n, 5 * k, False, 0.0) == pytest.approx(
        30 * inside
    )
    assert layer_time._gemm(device, "bf16", 1.0, m, n, k, True, 0.0) == pytest.approx(inside / 0.9)
    assert layer_time._gemm(device, "bf16", 2.0, m, n, k, True, 1e6) == 5e5


def test_head_and_embedding_by_hand(device: Device, hbm: float) -> None:
    work = Work(tokens=1000.0, length=1000.0, tp=2, fused=False)
    one = layer_time.head(device, LLAMA, work)
    logits, norm = 1000 * 64128 / hbm, 2 * 2 * 500 * 4096 / hbm
    assert one.forward.memory == pytest.approx(12 * logits + norm)
    assert one.backward.memory == pytest.approx(8 * logits + 2 * norm)
    fused = layer_time.head(device, LLAMA, replace(work, fused=True))
    assert fused.forward.memory == pytest.approx(6 * logits + norm)
    assert fused.backward.memory == pytest.approx(4 * logits + 2 * norm)
    own = layer_time.head(device, LLAMA, work, traffic=(20.0, 30.0))
    assert own.forward.memory == pytest.approx(20 * logits + norm)
    value = layer_time.head(device, LLAMA.with_value_head(), work)
    assert value.forward.memory == pytest.approx(norm)
    assert layer_time.head(device, LLAMA, work, logprob=False).forward.memory == pytest.approx(norm)
    forward, back = (float(device.curves.gemm(*at)) for at in ((1000, 64128, 4096), (1000, 4096, 64128)))
    assert one.forward.gemm == pytest.approx(forward)
    assert one.backward.gemm - one.weight_gradient == pytest.approx(back)
    rows = layer_time.embedding(device, LLAMA, work)
    assert rows.forward.memory == pytest.approx(2 * 2 * 1000 * 4096 / hbm)
    assert rows.backward.memory == pytest.approx(10 * 1000 * 4096 / hbm)


def test_a_layer_adds_its_parts(device: Device, hbm: float) -> None:
    work = Work(tokens=2000.0, length=1000.0, tp=2, fused=False, cp=2)
    one = layer_time.layer(device, LLAMA, work, kind=DENSE)
    assert one.forward.memory == pytest.approx(2.5 * _traffic(LLAMA, work, DENSE) / hbm)
    assert one.backward.memory == pytest.approx(2 * one.forward.memory)
    assert one.core == one.forward.attention == mixer_time.attention(device, LLAMA, work)
    ratio = 2.5 / device["attention_backward_rate"]
    assert one.backward.attention == pytest.approx(ratio * one.core)
    assert one.backward.cp == pytest.approx(2 * one.forward.cp)
    assert one.backward.tp == one.forward.tp > 0
    old = layer_time.layer(device, LLAMA, replace(work, flash=False), kind=DENSE)
    assert old.backward.attention == pytest.approx(2 * old.core)
    gemms = sum(
        float(device.curves.gemm(2000, m.n, m.k)) for m in layers.layer_matrices(LLAMA, 2, kind=DENSE)
    )
    assert one.forward.gemm == pytest.approx(gemms)
    weight = sum(
        float(device.curves.gemm(m.k, m.n, 2000)) for m in layers.layer_matrices(LLAMA, 2, kind=DENSE)
    )
    assert one.weight_gradient == pytest.approx(weight)
    fused = layer_time.layer(device, LLAMA, replace(work, fused=True), kind=DENSE)
    assert fused.forward.memory == pytest.approx(one.forward.memory / 2.5)
    scans = layer_time.layer(device, NEMOTRON, work, kind=NEMOTRON.kinds[0])
    assert scans.forward.scan == mixer_time.scan(device, NEMOTRON, work) > 0
    assert scans.backward.scan == pytest.approx(layer_time.SCAN_BACKWARD * scans.forward.scan)
    assert (scans.forward.attention, one.forward.scan) == (0, 0)


def test_adapters_pass_over_outputs_going_ahead_and_over_inputs_going_back(
    device: Device, hbm: float
) -> None:
    work = Work(tokens=1000.0, length=1000.0)
    matrices = layers.layer_matrices(LLAMA, kind=DENSE)
    ahead, back = sum(m.k + 3 * m.n for m in matrices), sum(2 * m.n + 4 * m.k for m in matrices)
    fused = layer_time.adapter_time(device, LLAMA, work, kind=DENSE)
    assert fused == pytest.approx((2 * 1000 * ahead / hbm, 2 * 1000 * back / hbm))
    eager = layer_time.adapter_time(device, LLAMA, replace(work, fused=False), kind=DENSE)
    assert eager == pytest.approx([2.5 * x for x in fused])


@pytest.mark.parametrize(
    ("modules", "share"),
    [
        ((), 0),
        (("layernorm",), 0.3),
        (("mlp",), 0.3),
        (("layernorm", "moe_act", "moe"), 0.6),
        (("core_attn",), 0),
    ],
)
def test_share_of_traffic_that_recomputed_modules_repeat(modules, share: float) -> None:
    assert layer_time.repeated_traffic(modules) == pytest.approx(share)
    assert layer_time.repeated_traffic((layer_time.OPERATORS,)) == 1


# --- what mixes tokens ------------------------------------------------------------------------------------


def test_attention_without_flash_by_hand(device: Device, hbm: float) -> None:
    """Three sequences of 100 with 32 heads: e = 960,000 scores; 4 d e FLOP and 12 bytes of each."""
    local, scores = layers.heads(LLAMA.attention, 1), 3 * 32 * 100 * 100
    peak = H100.peak["bf16"].value * device["gemm_efficiency"]
    expected = 4 * 128 * scores / peak + 12 * scores / hbm
    assert mixer_time._unfused(device, local, 3.0, 100.0) == pytest.approx(expected)
    work = Work(tokens=300.0, length=100.0, flash=False, attention_slowdown=1.5)
    assert mixer_time.attention(device, LLAMA, work) == pytest.approx(1.5 * expected)
    cut = replace(work, cp=2, tokens=150.0, fp8_attention=True)
    slower = (100 + 600) / (100 + 300) / 2 * 1.5 * device["fp8_attention_time"]
    assert mixer_time.attention(device, LLAMA, cut) == pytest.approx(slower * expected)


def test_windowed_layers_take_their_share_of_pairs_or_of_bytes(device: Device, hbm: float) -> None:
    """gpt-oss-20b: half of the layers see 128 tokens back."""
    model = preset("gpt-oss-20b")
    work = Work(tokens=20000.0, length=10000.0, flash=False)
    full = mixer_time._unfused(device, layers.heads(model.attention, 1), 2.0, 10000.0)
    seen = (128 * 10000 - 128**2 / 2) / (10000**2 / 2)
    io = 2 * 20000 * 2 * (64 + 8) * 64 / hbm
    assert full * seen > io
    assert mixer_time.attention(device, model, work) == pytest.approx((full + full * seen) / 2)
    short = Work(tokens=200.0, length=100.0, flash=False)
    full = mixer_time._unfused(device, layers.heads(model.attention, 1), 2.0, 100.0)
    assert mixer_time.attention(device, model, short) == pytest.approx(full)


def test_flash_takes_the_faster_of_two_kernels_and_grows_with_pairs(device: Device) -> None:
    local = layers.heads(LLAMA.attention, 1)
    curve = device.curves.prefill_attention
    long = float(curve(1.0, 16384, 32, 8, 128, 0))
    assert mixer_time._flash(device, local, 1.0, 16384.0) == pytest.approx(long)
    assert mixer_time._flash(device, local, 3.0, 32768.0) == pytest.approx(
        3 * 4 * min(float(curve(3.0, 16384, 32, 8, 128, 0)) / 3, long)
    )
    timed = float(curve(4.0, 512, 32, 8, 128, 0)) / 4
    other = long * (512 / 16384) ** 2 * (1 + 300 / 512) / (1 + 300 / 16384)
    assert mixer_time._flash(device, local, 4.0, 512.0) == pytest.approx(4 * min(timed, other))
    half = float(curve(1.0, 512, 32, 8, 128, 0))  # less than one sequence is a share of one
    assert mixer_time._flash(device, local, 0.5, 512.0) == pytest.approx(0.5 * min(half, other))


def test_narrow_heads_keep_most_of_the_rate_of_wide_ones(device: Device) -> None:
    narrow, wide = (
        layers.Heads(query=32, kv=8, qk_dim=64, v_dim=64),
        layers.Heads(query=32, kv=8, qk_dim=128, v_dim=128),
    )
    as_wide = mixer_time._flash(device, wide, 1.0, 8192.0) * 0.5**0.8
    own = float(device.curves.prefill_attention(1.0, 8192, 32, 8, 64, 0))
    half = 300.0
    long = (
        float(device.curves.prefill_attention(1.0, 16384, 32, 8, 64, 0))
        / 4
        * (1 + half / 8192)
        / (1 + half / 16384)
    )
    assert mixer_time._flash(device, narrow, 1.0, 8192.0) == pytest.approx(min(own, long, as_wide))


def test_scan_and_indexer_by_hand(device: Device) -> None:
    work = Work(tokens=1000.0, length=500.0, tp=2)
    rate = H100.peak["bf16"].value * device["scan_efficiency"]
    scan = mixer_time.scan(device, NEMOTRON, work)
    assert scan == pytest.approx(NEMOTRON.recurrent.scan_flop * 1000 / 2 / rate)
    assert mixer_time.scan(device, LLAMA, work) == 0
    sparse = preset("deepseek-v3.2")
    flop = sparse.attention.index_flop(2 * 500**2 / 2)
    rate = H100.peak["fp8"].value * device["indexer_efficiency"]
    assert mixer_time.index(device, sparse, work) == pytest.approx(flop / rate)
    assert mixer_time.index(device, LLAMA, work) == 0
    long = Work(tokens=8192.0, length=8192.0, flash=False)
    whole = mixer_time._unfused(device, layers.heads(sparse.attention, 1), 1.0, 8192.0)
    chosen = attended_pairs(8192, 2048) / attended_pairs(8192)
    assert mixer_time.attention(device, sparse, long) == pytest.approx(
        whole * chosen * (192 + 128) / (2 * 192)
    )


# --- passes -----------------------------------------------------------------------------------------------


def test_exposed_parts_of_a_pass_by_hand(device: Device) -> None:
    one = Pass(1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 0.5, 0.25)
    shown = passes.exposed(device, one, Software(stack="eager", fused=False))
    assert shown == pytest.approx(
        (1 / (0.9 * 0.85 * 0.95), 2 / (0.9 * 0.7 * 0.65), 3, 0.7 * 4, 0.8 * 5, 4.5, 0.5, 0.25)
    )
    other = Software(stack="eager", fused=False, user_buffers=True)
    assert passes.exposed(device, one, other, True)[3:5] == pytest.approx((0.4 * 4, 0.3 * 5))
    assert passes.exposed(device, one, other, False).ep == shown.ep
    assert passes.exposed(device, one._replace(cp=1.0), other).cp == 0


def test_launch_contention_and_slowing_by_hand(device: Device) -> None:
    assert passes.launched(device, 3.0, 2.0) == 3 + 0.25 * 2
    assert passes.launched(device, 2.0, 3.0) == 3 + 0.25 * 2
    assert passes.contention(device, 3) == 1 + 2 * 0.25
    assert passes.contention(device, 64) == 1 + 7 * 0.25
    assert (passes.contention(device, 1), Pass(*range(8)).times(2)) == (1, Pass(*range(0, 16, 2)))


@pytest.mark.parametrize(
    ("graphs", "dense", "experts"), [("none", 3e-4, 8e-4), ("partial", 0, 2.5e-4), ("full", 0, 0)]
)
def test_host_time_of_a_layer(device: Device, graphs, dense: float, experts: float) -> None:
    assert passes.host_time(device, graphs, kind=DENSE) == pytest.approx(dense)
    assert passes.host_time(device, graphs, kind=EXPERTS) == pytest.approx(experts)
    if graphs == "none":
        assert passes.host_time(device, graphs, kind=NEMOTRON.kinds[0]) == pytest.approx(1.5e-4)


def test_hosts_handle_adapters_one_by_one(device: Device) -> None:
    assert passes._adapter_host(device, Software()) == 1e-4
    assert passes._adapter_host(device, Software(adapters=2)) == 3e-4


def test_passes_of_a_micro_batch_add_up_its_layers(device: Device) -> None:
    work, software = Work(tokens=4000.0, length=1000.0, fused=False), Software(stack="eager", fused=False)
    one = layer_time.layer(device, LLAMA, work, kind=DENSE)
    ahead, back = (sum(passes.exposed(device, p, software)) for p in (one.forward, one.backward))
    got = passes.passes(device, LLAMA, work, software, "none")
    ends = [layer_time.embedding(device, LLAMA, work), layer_time.head(device, LLAMA, work)]
    shown = [[sum(passes.exposed(device, p, software)) for p in (e.forward, e.backward)] for e in ends]
    assert got.layer_forward == pytest.approx(passes.launched(device, ahead, 3e-4))
    assert got.layer == pytest.approx(got.layer_forward + passes.launched(device, back, 3e-4))
    assert got.ends == pytest.approx([sum(s) for s in shown])
    assert got.ends_forward == pytest.approx([s[0] for s in shown])
    assert sum(got.forward) == pytest.approx(32 * ahead + shown[0][0] + shown[1][0])
    assert sum(got.backward) == pytest.approx(32 * back + shown[0][1] + shown[1][1])
    assert got.launch == pytest.approx(32 * 2 * 3e-4)
    full = passes.passes(device, LLAMA, work, software, "full")
    again = sum(passes.exposed(device, one.backward.plus(one.forward), software))
    assert full.layer == pytest.approx(got.layer_forward + passes.launched(device, again, 6e-4))
    assert full.launch == pytest.approx(32 * 3 * 3e-4)
    core = passes.passes(device, LLAMA, work, software, "selective")
    behind = one.backward._replace(attention=one.backward.attention + one.core)
    more = sum(passes.exposed(device, behind, software))
    assert core.layer == pytest.approx(got.layer_forward + passes.launched(device, more, 3e-4))


def test_passes_over_a_frozen_base_have_no_weight_gradients_but_adapters(device: Device) -> None:
    work, software = Work(tokens=4000.0, length=1000.0, fused=False), Software(stack="eager", fused=False)
    one = layer_time.layer(device, LLAMA, work, kind=DENSE)
    more, later = layer_time.adapter_time(device, LLAMA, work, kind=DENSE)
    ahead = one.forward._replace(memory=one.forward.memory + more)
    back = one.backward._replace(
        memory=one.backward.memory + later, gemm=one.backward.gemm - one.weight_gradient
    )
    first, second = (sum(passes.exposed(device, p, software)) for p in (ahead, back))
    got = passes.passes(device, LLAMA, work, software, "none", frozen=True)
    assert got.layer_forward == pytest.approx(passes.launched(device, first, 6e-4) + 1e-4)
    assert got.layer == pytest.approx(got.layer_forward + passes.launched(device, second, 6e-4) + 2e-4)


def test_a_slowed_micro_batch_scales_every_time(device: Device) -> None:
    work, software = Work(tokens=4000.0, length=1000.0), Software()
    got = passes.passes(device, LLAMA, work, software, "none")
    twice = passes.slowed(got, 2.0)
    assert (twice.layer, twice.layer_forward, twice.launch) == (
        2 * got.layer,
        2 * got.layer_forward,
        2 * got.launch,
    )
    assert twice.ends == tuple(2 * e for e in got.ends)
    assert twice.ends_forward == tuple(2 * e for e in got.ends_forward)
    assert twice.forward == got.forward.times(2)
    assert twice.backward == got.backward.times(2)
    assert twice.sent == (got.sent[0].times(2), got.sent[1].times(2))
    assert passes.slowed(got, 1.0) is got


# --- what ranks exchange ----------------------------------------------------------------------------------


def test_elements_and_ranks_of_gradients_by_hand(device: Device) -> None:
    """Qwen3-30B-A3B on tp 2, dp 8, ep 4: experts on 2 x 8 / 4 ranks."""
    layout = Layout(tp=2, dp=8, ep=4)
    wide, narrow = exchange.shards(device, MOE, layout)
    ends = 2 * MOE.vocab * 2048 / 2
    assert wide.params == 48 * layers.layer_params(MOE, 2, kind=EXPERTS) + ends
    assert narrow.params == 48 * 3 * 2048 * 768 * 32
    assert wide.ranks == group(8, 2, 8)
    assert narrow.ranks == Group(ranks=4, per_domain=2)
    half = exchange.shards(device, MOE, replace(layout, pp=2), share=0.25)
    assert half[0].params == wide.params / 8
    assert half[1].params == narrow.params / 8
    (copied,) = exchange.shards(device, MOE, Layout(dp=16, zero=3, shards=4))
    assert (copied.ranks, copied.copies) == (group(4, 1, 8), group(4, 4, 8))
    assert (copied.owned(3), copied.owned(0)) == (copied.params / 4, copied.params)
    tied = exchange.shards(device, preset("llama-3.2-1b"), Layout(dp=2))[0]
    assert tied.params == 16 * layers.layer_params(preset("llama-3.2-1b"), 1, kind=DENSE) + 128256 * 2048


@pytest.mark.parametrize(("zero", "gathers", "reduces"), [(0, 0, 1), (1, 1, 1), (2, 1, 5), (3, 10, 5)])
def test_traffic_of_each_stage_of_zero(device: Device, zero: int, gathers: int, reduces: int) -> None:
    shard = GradientShard(params=1e9, ranks=Group(ranks=8, per_domain=8))
    gather = collectives.all_gather(device, 2e9, shard.ranks)
    op = collectives.reduce_scatter if zero else collectives.all_reduce
    reduce = op(device, 4e9, shard.ranks)
    got = exchange.traffic(device, shard, Layout(dp=8, zero=zero), 5, 4.0)
    assert got == pytest.approx((gathers * gather, reduces * reduce))
    if zero == 1:
        whole = exchange.traffic(device, shard, Layout(dp=8, zero=1), 5, 4.0, whole=True)
        assert whole[1] == pytest.approx(collectives.all_reduce(device, 4e9, shard.ranks))


def test_copies_of_shards_sum_their_part(device: Device) -> None:
    shard = GradientShard(params=8e9, ranks=Group(ranks=8, per_domain=8), copies=Group(ranks=4, per_domain=1))
    once = collectives.all_reduce(device, 4e9, shard.copies)
    assert exchange.between_copies(device, shard, Layout(dp=32, zero=3, shards=8), 3, 4.0) == pytest.approx(
        3 * once
    )


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (0, (8 - 0.5 * 3) + (6 - 0.5 * 4)),  # gathers behind one forward, reductions behind the last backward
        (1, (8 - 0.5 * 3) + (6 - 0.5 * 4)),
        (2, (8 - 0.5 * 3) + max(6 / 10, 6 - 0.5 * 2 * 4)),
        (3, max(4 / 10, 4 - 0.5 * 2 * 3) + max(10 / 10, 10 - 0.5 * 2 * 4)),
    ],
)
def test_what_stays_exposed_of_gathers_of_8_and_reductions_of_6_seconds(zero: int, expected: float) -> None:
    assert exchange.exposed(zero, 2, 8.0, 6.0, 3.0, 4.0, 0.5, 10) == pytest.approx(expected)
    assert exchange.hidden_behind(10.0, 100.0, 0.5, 4) == 2.5
    assert exchange.hidden_behind(10.0, 100.0, 0.5, 0) == 10
    assert Room(5.0, {"nvlink": 2.0}).free("nvlink") == 3
    assert Room(5.0, {"nvlink": 7.0}).free("nvlink") == 0
    assert Room(5.0, {}).free("network") == 5


def test_an_exchange_by_hand(device: Device) -> None:
    """One link, ZeRO-1: gathers and reductions behind half of the free time; what hides slows the rest."""
    layout = Layout(dp=8, zero=1)
    (shard,) = exchange.shards(device, LLAMA, layout)
    gather, reduce = exchange.traffic(device, shard, layout, 4, 4.0)
    room = Room(gather, {"nvlink": gather / 2})
    parts = exchange.exchange(
        device, LLAMA, layout, 4, forward=room, backward=room, sums=exchange.GradientSums(4.0)
    )
    seen = (gather - 0.25 * gather) + (reduce - 0.25 * gather)
    assert [p.resource for p in parts] == ["nvlink", "compute"]
    assert parts[0].seconds == pytest.approx(seen)
    assert parts[1].seconds == pytest.approx(device["sm_share_nvlink"] * (gather + reduce - seen))
    whole = exchange.exchange(
        device, LLAMA, layout, 4, forward=room, backward=room, sums=exchange.GradientSums(4.0, whole=True)
    )
    all_of_it = collectives.all_reduce(device, 4 * shard.params, shard.ranks)
    assert whole[0].seconds == pytest.approx(0.75 * gather + all_of_it)
    three = exchange.exchange(
        device,
        LLAMA,
        replace(layout, zero=3),
        4,
        forward=room,
        backward=room,
        sums=exchange.GradientSums(4.0),
    )
    assert three[-1].seconds == pytest.approx(8 * exchange.weights_of(LLAMA).tensors * 1e-5)
    alone = exchange.exchange(
        device, LLAMA, Layout(dp=1, zero=1), 4, forward=room, backward=room, sums=exchange.GradientSums(4.0)
    )
    assert alone == []


def test_copies_cross_the_network_once_or_after_every_micro_batch(device: Device) -> None:
    layout = Layout(dp=16, zero=3, shards=8)
    (shard,) = exchange.shards(device, LLAMA, layout)
    none = Room(0.0, {})
    once = collectives.all_reduce(device, 4 * shard.params / 8, shard.copies)
    for each, times in ((False, 1), (True, 4)):
        parts = exchange.exchange(
            device,
            LLAMA,
            layout,
            4,
            forward=none,
            backward=none,
            sums=exchange.GradientSums(4.0, copies_each=each),
        )
        far = sum(p.seconds for p in parts if p.resource == "network")
        assert far == pytest.approx(times * once)


def test_gathers_of_a_forward_are_one_a_layer_and_micro_batch(device: Device) -> None:
    layout = Layout(dp=8, zero=3)
    (shard,) = exchange.shards(device, LLAMA, layout)
    raw = 4 * collectives.all_gather(device, 2 * shard.params, shard.ranks)
    parts = exchange.gathers(device, LLAMA, layout, 4, raw)
    assert parts[0].seconds == pytest.approx(raw - 0.5 * raw)
    assert parts[-1].seconds == pytest.approx(4 * exchange.weights_of(LLAMA).tensors * 1e-5)
    assert exchange.gathers(device, LLAMA, replace(layout, zero=2), 4, raw) == []
    hidden = exchange.gathers(device, LLAMA, layout, 4, 1e9)
    assert hidden[0].seconds == pytest.approx(raw / 32)


def test_an_optimizer_step_by_hand(device: Device) -> None:
    """26 + 8 bytes a parameter of its own; sharded steps take 0.02 s more."""
    rate = H100.hbm.value * device["optimizer_hbm_efficiency"]
    layout = Layout(dp=8, zero=1)
    (shard,) = exchange.shards(device, LLAMA, layout)
    here, launch, own = exchange.update(device, LLAMA, layout, optimizer="adam")
    assert here.seconds == pytest.approx(shard.params / 8 * 34 / rate)
    assert (launch.seconds, own.seconds) == (device["optimizer_overhead"], 0.02)
    small = exchange.update(device, LLAMA, replace(layout, zero=0), optimizer="adam8bit")
    assert small[0].seconds == pytest.approx(shard.params * 22 / rate)
    assert small[-1].seconds == 0
    assert exchange.update(device, LLAMA, Layout(dp=1, zero=1), optimizer="sgd")[-1].seconds == 0
    assert exchange.STATE_BYTES == {"adam": 26, "adam8bit": 14, "sgd": 10}


@pytest.mark.parametrize("fraction", [0.25, 1.0])
@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_an_optimizer_step_on_the_host_by_hand(device: Device, where, fraction: float) -> None:
    """(4 + 2) bytes over PCIe, 34 bytes of eight ranks through host memory, 12 to and from disk."""
    layout = Layout(dp=8, zero=1, offload_optimizer=where, offload_fraction=fraction)
    owned = fraction * exchange.shards(device, LLAMA, layout)[0].params / 8
    parts = exchange.update(device, LLAMA, layout, optimizer="adam")
    parts = parts[1:] if fraction < 1 else parts
    assert parts[0].seconds == pytest.approx(6 * owned / host_rate(device, 8).value)
    node = H100.node
    eta = min(device["cpu_adam_efficiency"], 8 * device["cpu_adam_rank_efficiency"])
    assert parts[1].seconds == pytest.approx(8 * owned * 34 / (node.host_bandwidth.value * eta))
    if where == "nvme":
        disk = 8 * owned * 12
        read = node.local_storage.value * device["local_storage_read_efficiency"]
        write = node.local_storage.value * device["local_storage_write"]
        assert parts[2].seconds == pytest.approx(disk / read + disk / write)
    stay = replace(layout, zero=3, offload_params="cpu")
    down = exchange.update(device, LLAMA, stay, optimizer="adam")[1 if fraction < 1 else 0]
    assert down.seconds == pytest.approx(4 * owned / host_rate(device, 8).value)


def test_weights_from_the_host_and_what_fp32_sums_read_by_hand(device: Device) -> None:
    layout = Layout(dp=8, zero=3, offload_params="cpu")
    owned, link = exchange.shards(device, LLAMA, layout)[0].params / 8, host_rate(device, 8).value
    (alone, none) = exchange.fetches(device, LLAMA, layout, 3, 0.0)
    assert (alone.seconds, none.seconds) == (pytest.approx(6 * owned / link), 0.0)
    work, hidden = 4 * owned / link, device["overlap_dp"]
    fetched, back = exchange.fetches(device, LLAMA, layout, 3, work, width=4.0, returned=2)
    assert fetched.seconds == pytest.approx(12 * owned / link - hidden * work)
    assert back.seconds == pytest.approx(8 * owned / link)
    low, high = (12 * owned / link * bound for bound in alone.spread)
    assert (fetched.low, fetched.high) == (
        pytest.approx(low - hidden * work),
        pytest.approx(high - hidden * work),
    )
    first_layer = exchange.fetches(device, LLAMA, layout, 3, 1e6)[0].seconds
    assert first_layer == pytest.approx(6 * owned / link / LLAMA.num_layers)
    rate = H100.hbm.value * device["optimizer_hbm_efficiency"]
    sums = exchange.summed(device, LLAMA, layout, 5, share=1.0)
    assert sums.seconds == pytest.approx(5 * owned * 4 / rate)
    whole = exchange.summed(device, LLAMA, Layout(dp=8, zero=1), 5, share=1.0)
    assert whole.seconds == pytest.approx(8 * sums.seconds)


def test_a_4_bit_base_is_read_and_written_in_every_pass_by_hand(device: Device) -> None:
    rate = H100.hbm.value * device["nf4_dequantise_efficiency"]
    held = 32 * layers.layer_params(LLAMA, 2, kind=DENSE) / 2
    each = 0.5 + (1 + 4 / 256) / 64 + 2
    got = exchange.dequantised(device, LLAMA, Layout(tp=2, pp=2, dp=2), 3.0)
    assert got.seconds == pytest.approx(3 * held * each / rate)


# --- one optimizer step -----------------------------------------------------------------------------------


def _lengths(count: int = 64, *, deviation: float = 0.0) -> Sequences:
    return Sequences(count=count, mean=1000.0, mean_square=1000.0**2 + deviation**2, maximum=3000.0)


@pytest.mark.parametrize(
    ("layout", "sequences", "steps", "pack", "expected"),
    [
        (Layout(dp=4, micro_batch=2), _lengths(), 2, None, (2000, 4)),
        (Layout(dp=4, micro_batch=3), _lengths(), 2, None, (8000 / 3, 3)),
        (Layout(dp=3, micro_batch=1), _lengths(), 1, None, (1000, 22)),  # the fullest rank has 22 of 64
        (Layout(dp=3, micro_batch=1), _lengths(deviation=1.0), 1, None, (1000 * 64 / 3 / 22, 22)),
        (Layout(dp=64, micro_batch=8), _lengths(), 2, None, (1000, 1)),
        (Layout(dp=4, micro_batch=1), _lengths(), 1, 4000.0, (4000, 4)),
        # chunks of 2 c t tokens: half of seven more a sequence
        (
            Layout(dp=4, cp=2, tp=2, micro_batch=2),
            _lengths(deviation=1.0),
            2,
            None,
            (2000 * (1 + 3.5 / 1000), 4),
        ),
        (Layout(dp=4, cp=2, tp=2, micro_batch=2), _lengths(), 2, None, (2000, 4)),
        (Layout(dp=4, tp=2, micro_batch=2), _lengths(deviation=1.0), 2, None, (2000, 4)),
    ],
)
def test_micro_batches_by_hand(layout, sequences, steps: int, pack, expected) -> None:
    assert step.micro_batches(layout, sequences, steps, pack) == pytest.approx(expected)


def test_the_work_of_a_micro_batch_is_that_of_its_layout(device: Device) -> None:
    software = Software(flash2=True)
    work = step.work_of(device, Layout(tp=2, dp=2, cp=2, ep=2), _lengths(), 4000.0, "fp8", software, MOE)
    assert (work.tokens, work.length, work.tp, work.cp, work.ep) == (2000, 1000, 2, 2, 2)
    assert work.skew == device["ep_hot_rank_factor"] > 1
    assert work.attention_slowdown == device["flash2_on_hopper"] > 1
    assert work.low_precision_gain == device["training_fp8_gain"] * device["fp8_speed_megatron"]
    assert work.sequence_parallel == Layout(tp=2).sequence_parallel
    even = step.work_of(device, Layout(ep=2, dp=2), _lengths(), 4000.0, "bf16", Software(balanced=True), MOE)
    assert (even.skew, even.attention_slowdown, even.sequence_parallel) == (1, 1, False)
    assert step.work_of(device, Layout(dp=2), _lengths(), 4000.0, "bf16", Software(), MOE).skew == 1
    assert step.work_of(device, Layout(dp=2, ep=2), _lengths(), 4000.0, "bf16", Software(), LLAMA).skew == 1


def test_exposed_parts_by_resource_by_hand(device: Device) -> None:
    layout = Layout(tp=2, cp=8, dp=4, ep=4)
    shown = Pass(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    parts = step.work_parts(device, layout, shown, 40.0)
    assert [(p.resource, p.seconds, p.rests_on) for p in parts] == [
        ("compute", 1, "training_kernel_efficiency"),
        ("compute", 2, "training_attention_efficiency"),
        ("hbm", 3, "hbm_efficiency"),
        ("compute", 7, "scan_efficiency"),
        ("compute", 8, "indexer_efficiency"),
        ("nvlink", 4, "overlap_tp"),
        ("nvlink", 5, "overlap_ep"),
        ("network", 6, "nic_efficiency"),
        ("overhead", 4, "host_layer_time"),
    ]
    assert [p.spread for p in parts[5:7]] == [(0.6, 1.4), (0.5, 1.5)]
    assert step.work_parts(device, layout, shown, 40.0, (0.1, 3.0))[6].spread == (0.1, 3.0)
    assert parts[7].spread == device.inverse_spread("nic_efficiency")
    bare = step.work_parts(device, Layout(dp=1), Pass(1.0, 0.0, 0.0, 0.0, 0.0, 0.0), 1.0)
    assert [p.seconds for p in bare] == [1]
    near = step.work_parts(device, Layout(cp=2, dp=2), Pass(1.0, 0.0, 0.0, 0.0, 0.0, 0.5), 1.5)
    assert (near[1].resource, near[1].rests_on) == ("nvlink", "nvlink_efficiency")


def test_sends_between_stages_by_hand(device: Device) -> None:
    """pp 4 over two nodes: the middle hop is far; tokens outside the tensor-parallel regions, BF16."""
    work = Work(tokens=1000.0, length=1000.0, tp=2)
    layout = Layout(tp=2, cp=1, dp=2, pp=4)
    near, far = step.send_parts(device, LLAMA, layout, work.held, 10, 0.5)
    count = pipeline.sends((False, True, False), 10)
    size = 2 * 500 * 4096.0
    assert (near.resource, far.resource) == ("nvlink", "network")
    assert near.seconds == pytest.approx(0.5 * count.near * collectives.p2p(device, size, False))
    assert far.seconds == pytest.approx(0.5 * count.far * collectives.p2p(device, size, True))
    assert step.send_parts(device, LLAMA, Layout(tp=2, dp=2), work.held, 10, 0.5) == []
    ahead = step.send_parts(device, LLAMA, Layout(tp=2, cp=2, dp=2, pp=2), work.held, 10, 1.0, back=False)
    assert [p.seconds for p in ahead] == pytest.approx([0, 10 * collectives.p2p(device, size, True)])


def test_share_of_adapters_by_hand() -> None:
    layer = {"qkv": (6144, 4096), "out": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336)}
    whole, added = sum(n * k for n, k in layer.values()), sum(8 * (n + k) for n, k in layer.values())
    assert step.adapter_share(LLAMA, Lora(rank=8)) == pytest.approx(added / whole)
    assert step.adapter_share(LLAMA, None) == 1
    experts = step.adapter_share(MOE, Lora(rank=8))
    sides = sum(8 * (m.n + m.k) * m.experts for m in layers.layer_matrices(MOE, kind=EXPERTS))
    assert experts == pytest.approx(sides / sum(m.params for m in layers.layer_matrices(MOE, kind=EXPERTS)))
    tiny = replace(
        LLAMA, hidden=128, ffn=128, attention=replace(LLAMA.attention, num_heads=1, num_kv_heads=1)
    )
    assert step.adapter_share(tiny, Lora(rank=256)) == 1


def test_room_that_collectives_leave_on_their_links(device: Device) -> None:
    raw = Pass(1.0, 1.0, 1.0, 4.0, 6.0, 10.0)
    room = step._room(device, Layout(tp=2, cp=8, ep=4, pp=2, dp=4), 50.0, raw)
    assert (room.seconds, dict(room.held)) == (25, {"nvlink": 5, "network": 5})


@pytest.mark.parametrize(("pp", "vp"), [(1, 1), (4, 1), (4, 2)])
def test_a_step_of_equal_sequences_by_hand(device: Device, pp: int, vp: int) -> None:
    """Compute, ramp, sends and the update of one optimizer step of a pipeline without data parallelism."""
    layout = Layout(pp=pp, vp=vp, dp=1, zero=0, micro_batch=1, recompute="none")
    sequences = _lengths(8)
    cost = train(device, LLAMA, layout, sequences, backend="megatron")
    work = step.work_of(device, layout, sequences, 1000.0, "bf16", Software(), LLAMA)
    through = passes.slowed(
        passes.passes(device, LLAMA, work, Software(), "none"), passes.contention(device, layout.gpus)
    )
    times = pipeline.split(32, pp, vp).times(through.layer, *through.ends)
    visible = 0.5 if vp > 1 else 1.0
    sends = sum(p.seconds for p in step.send_parts(device, LLAMA, layout, work.held, vp * 8, visible))
    update = sum(p.seconds for p in exchange.update(device, LLAMA, layout, optimizer="adam"))
    whole = pipeline.makespan(times, 8, vp)
    assert cost.seconds == pytest.approx(whole + sends + update)
    bubble = sum(p.seconds for p in cost.parts if p.resource == "bubble")
    assert bubble == pytest.approx(whole - 8 * sum(times) / pp)
    twice = train(device, LLAMA, layout, _lengths(16), backend="megatron", steps=2)
    assert twice.seconds == pytest.approx(2 * cost.seconds)


def test_data_parallel_traffic_of_a_step_by_hand(device: Device) -> None:
    layout = Layout(dp=8, zero=1, micro_batch=1, recompute="none")
    sequences = _lengths(64)
    cost = train(device, LLAMA, layout, sequences, backend="megatron")
    work = step.work_of(device, layout, sequences, 1000.0, "bf16", Software(), LLAMA)
    through = passes.slowed(
        passes.passes(device, LLAMA, work, Software(), "none"), passes.contention(device, 8)
    )
    ahead = through.layer_forward * 32 + sum(through.ends_forward)
    back = through.layer * 32 + sum(through.ends) - ahead
    traffic = exchange.exchange(
        device,
        LLAMA,
        layout,
        8,
        forward=step._room(device, layout, ahead, through.sent[0]),
        backward=step._room(device, layout, back, through.sent[1]),
        sums=exchange.GradientSums(BACKENDS["megatron"].reduce_bytes),
    )
    update = exchange.update(device, LLAMA, layout, optimizer="adam")
    busy = 8 * (through.layer * 32 + sum(through.ends))
    assert cost.seconds == pytest.approx(busy + sum(p.seconds for p in (*traffic, *update)))


def test_what_4_bit_bases_and_weights_on_the_host_add_to_a_step(device: Device) -> None:
    layout = Layout(dp=8, zero=1, micro_batch=1, recompute="none")
    asked = {"backend": "megatron", "lora": Lora(rank=8)}
    plain = train(device, LLAMA, layout, _lengths(64), **asked).seconds
    quantised = train(device, LLAMA, layout, _lengths(64), backend="megatron", lora=Lora(rank=8, base="nf4"))
    each = exchange.dequantised(device, LLAMA, layout, 16).seconds
    assert quantised.seconds - plain == pytest.approx(each)
    full = replace(layout, recompute="full")
    plain = train(device, LLAMA, full, _lengths(64), **asked).seconds
    quantised = train(device, LLAMA, full, _lengths(64), backend="megatron", lora=Lora(rank=8, base="nf4"))
    assert quantised.seconds - plain == pytest.approx(each * 1.5)
    three = Layout(dp=8, zero=3, micro_batch=1)
    host = replace(three, offload_params="cpu")
    for backend, width, returned in (("deepspeed", 2.0, 0), ("fsdp2", 4.0, 7)):
        here, away = (train(device, LLAMA, x, _lengths(64), backend=backend).seconds for x in (three, host))
        busy = here - sum(p.seconds for p in exchange.update(device, LLAMA, three, optimizer="adam"))
        fetched = exchange.fetches(device, LLAMA, host, 16, busy, width=width, returned=returned)
        assert away - here == pytest.approx(sum(p.seconds for p in fetched))


@pytest.mark.parametrize("pp", [1, 4])
def test_a_forward_by_hand(device: Device, pp: int) -> None:
    layout = Layout(pp=pp, dp=1, zero=0, micro_batch=1)
    sequences = _lengths(8)
    got = forward(device, LLAMA, layout, sequences, backend="megatron")
    work = step.work_of(device, layout, sequences, 1000.0, "bf16", Software(), LLAMA)
    through = passes.slowed(
        passes.passes(device, LLAMA, work, Software(), "none", scoring=True),
        passes.contention(device, layout.gpus),
    )
    times = pipeline.split(32, pp).times(through.layer_forward, *through.ends_forward)
    sends = sum(p.seconds for p in step.send_parts(device, LLAMA, layout, work.held, 8, 1.0, back=False))
    assert got.seconds == pytest.approx(7 * max(times) + sum(times) + sends)
    value = forward(device, LLAMA, layout, sequences, backend="megatron", head="value")
    critic = forward(device, LLAMA.with_value_head(), layout, sequences, backend="megatron", head="value")
    assert value.seconds == critic.seconds < got.seconds


def test_a_forward_of_sharded_unequal_and_quantised_weights_by_hand(device: Device) -> None:
    layout, sequences = Layout(dp=8, zero=3, micro_batch=1), _lengths(64, deviation=500.0)
    got = forward(device, LLAMA, layout, sequences, backend="megatron")
    length = step.micro_batches(layout, sequences, 1, None)[0]
    work = step.work_of(device, layout, sequences, length, "bf16", Software(), LLAMA)
    through = passes.slowed(
        passes.passes(device, LLAMA, work, Software(), "none", scoring=True), passes.contention(device, 8)
    )
    busy = 8 * (through.layer_forward * 32 + sum(through.ends_forward))
    gathers = exchange.gathers(device, LLAMA, layout, 8, busy)
    spread = unequal_lengths.spread_of(sequences, layout, 1, 8, None)
    late = unequal_lengths.late_parts(device, 8 * sum(through.forward), 8 * through.launch / 2, spread, 1.0)
    assert got.seconds == pytest.approx(busy + sum(p.seconds for p in (*gathers, *late)))
    host = replace(layout, offload_params="cpu")
    away = forward(device, LLAMA, host, sequences, backend="megatron")
    fetch = exchange.fetches(device, LLAMA, host, 8, busy)[0].seconds
    assert away.seconds - got.seconds == pytest.approx(fetch)
    frozen, trained = (
        forward(device, LLAMA, host, sequences, backend="fsdp2", trained=trained).seconds
        for trained in (False, True)
    )
    assert trained > frozen  # FP32 shards
    plain, small = (
        forward(device, LLAMA, layout, sequences, backend="megatron", lora=Lora(rank=8, base=base))
        for base in ("bf16", "nf4")
    )
    assert small.seconds - plain.seconds == pytest.approx(
        exchange.dequantised(device, LLAMA, layout, 8).seconds
    )


def test_packs_hold_what_a_rank_has_or_whole_padded_sequences() -> None:
    work = Workload(
        model="llama-3.1-8b",
        algorithm="grpo",
        prompts=16,
        samples=4,
        mini_batches=2,
        prompt_len=Fixed(value=100),
        response_len=Fixed(value=400),
    )
    layout = Layout(dp=4, pack_tokens=1600)
    assert packing.pack_len(work, Layout(dp=4)) is None
    assert packing.pack_len(work, layout) == pytest.approx(32 * 500 / 11)  # three of 500 fit: 11 packs of 32
    padded = replace(work, packing=False)
    assert packing.pack_len(padded, layout) == 1500
    assert packing.pack_len(padded, layout, (900.0, 200.0)) == 1000
    assert packing.pack_len(padded, Layout(dp=4, pack_tokens=300)) == 500
    few = replace(layout, dp=32)
    assert packing.pack_len(work, few) == 500  # one sequence a rank and optimizer step
    assert packing.pack_len(work, few, scoring=True) == 1000
    assert packing.fill(work, 3, 1000.0, (300.0, 500.0, 900.0)) == (1000 + 600 + 400) / 2
    assert packing._rank(work, 8, 4, None) == 1000
    assert packing._rank(work, 4, 4, (300.0, 5000.0)) == 5100


# --- the other side of a branch -----------------------------------------------------------------------------


def test_context_parallel_ranks_hold_the_same_gradients(device: Device) -> None:
    (shard,) = exchange.shards(device, LLAMA, Layout(dp=2, cp=4))
    assert shard.ranks.ranks == 8
    _, narrow = exchange.shards(device, MOE, Layout(tp=2, dp=8, ep=2, etp=2))
    assert (narrow.ranks.ranks, narrow.params) == (4, 48 * layers.layer_expert_params(MOE, 2, 2))
    own = exchange.update(device, LLAMA, Layout(dp=1, cp=2, zero=1), optimizer="adam")[-1]
    assert own.seconds == 0.02
    tied = preset("llama-3.2-1b")
    rate = H100.hbm.value * device["nf4_dequantise_efficiency"]
    held = 16 * layers.layer_params(tied, 1, kind=DENSE)
    got = exchange.dequantised(device, tied, Layout(dp=1), 1.0)
    assert got.seconds == pytest.approx(held * (2.5 + (1 + 4 / 256) / 64) / rate)


def test_intervals_of_what_is_exposed(device: Device) -> None:
    layout = Layout(dp=8, zero=3)
    room = Room(0.0, {})
    parts = exchange.exchange(
        device, LLAMA, layout, 1, forward=room, backward=room, sums=exchange.GradientSums(4.0)
    )
    assert [p.spread for p in parts[:2]] == [(0.4, 1.8), (0.3, 1.5)]
    gathers = exchange.gathers(device, LLAMA, layout, 4, 1e9)
    assert gathers[0].spread == (0.4, 1.8)
    half = exchange.gathers(device, LLAMA, Layout(dp=8, zero=3, pp=2), 4, 1e9)
    (shard,) = exchange.shards(device, LLAMA, Layout(dp=8, zero=3, pp=2))
    raw = 4 * collectives.all_gather(device, 2 * shard.params, shard.ranks)
    assert half[0].seconds == pytest.approx(raw / 16)


def test_products_of_experts_are_grouped_and_those_of_fp8_have_their_gain(device: Device) -> None:
    work = Work(tokens=4000.0, length=1000.0, precision="fp8", low_precision_gain=1.25)
    router, up, down = layers.expert_matrices(MOE, 1)
    rows = layer_time._rows(up, work)
    forward, data, weight, by_name = layer_time._gemms(device, (router, up, down), work)

    def grouped(m: float, n: float, k: float, params: int) -> float:
        least = 2 * params / (H100.hbm.value * 0.8)
        return layer_time._gemm(device, "fp8", 1.25, m, n, k, True, least)

    plain = layer_time._gemm(device, "bf16", 1.0, 4000.0, 128.0, 2048.0, False, 0.0)
    assert by_name["router"] == pytest.approx(plain)
    assert by_name["expert_up"] == pytest.approx(grouped(rows, 1536.0, 2048.0, up.params))
    assert forward == pytest.approx(sum(by_name.values()))
    own = grouped(rows, 2048.0, 1536.0, up.params) + grouped(rows, 768.0, 2048.0, down.params)
    assert data == pytest.approx(
        own + layer_time._gemm(device, "bf16", 1.0, 4000.0, 2048.0, 128.0, False, 0.0)
    )
    own = grouped(2048.0, 1536.0, rows, up.params) + grouped(768.0, 2048.0, rows, down.params)
    assert weight == pytest.approx(
        own + layer_time._gemm(device, "bf16", 1.0, 2048.0, 128.0, 4000.0, False, 0.0)
    )
    one = layer_time.layer(device, NEMOTRON, replace(work, precision="bf16"), kind=NEMOTRON.kinds[0])
    assert one.backward.scan == pytest.approx(2.5 * one.forward.scan)
    ends = layer_time.head(device, LLAMA, work)
    assert [*ends.forward[1:2], *ends.forward[3:], *ends.backward[1:2], *ends.backward[3:], ends.core] == [
        0
    ] * 13
    software = Software(stack="eager")
    none, core = (
        passes._backward(one, software, recompute, False).scan for recompute in ("none", "selective")
    )
    assert core == pytest.approx(none + one.forward.scan)


def test_narrow_windows_are_bound_by_their_bytes(device: Device, hbm: float) -> None:
    narrow = preset("gpt-oss-20b")
    narrow = replace(narrow, attention=replace(narrow.attention, sliding_window=1))
    work = Work(tokens=20000.0, length=10000.0, flash=False)
    full = mixer_time._unfused(device, layers.heads(narrow.attention, 1), 2.0, 10000.0)
    io = 2 * 20000 * 2 * (64 + 8) * 64 / hbm
    assert mixer_time.attention(device, narrow, work) == pytest.approx((full + io) / 2)
    sparse, short = preset("deepseek-v3.2"), Work(tokens=1024.0, length=1024.0, flash=False)
    whole = mixer_time._unfused(device, layers.heads(sparse.attention, 1), 1.0, 1024.0)
    assert mixer_time.attention(device, sparse, short) == pytest.approx(whole * 320 / 384)
    cut = Work(tokens=500.0, length=1000.0, cp=2)
    rate = H100.peak["fp8"].value * device["indexer_efficiency"]
    flop = sparse.attention.index_flop(1000**2 / 2) / 2
    assert mixer_time.index(device, sparse, cut) == pytest.approx(flop / rate)
    quick = Work(tokens=1000.0, length=1000.0)
    flash = mixer_time._flash(device, layers.heads(LLAMA.attention, 1), 1.0, 1000.0)
    assert mixer_time.attention(device, LLAMA, quick) == pytest.approx(flash)


def test_small_seconds_and_small_spreads_count(device: Device) -> None:
    shown = Pass(0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08)
    assert len(step.work_parts(device, Layout(tp=2, cp=2, ep=2, dp=2), shown, 0.5)) == 9
    layout = Layout(tp=8, cp=2, dp=2)
    far = step.work_parts(device, layout, Pass(0.0, 0.0, 0.0, 0.04, 0.0, 0.0), 0.04)
    assert far[0].resource == "nvlink"
    little = Sequences(count=8, mean=100.0, mean_square=10000.25, maximum=101.0)
    assert unequal_lengths.spread_of(little, Layout(dp=2), 1, 4, None).micro_batch == pytest.approx(0.005)
    assert unequal_lengths.spread_of(little, Layout(dp=2, zero=3), 1, 4, None).slowest == pytest.approx(0.005)
    wide = pipeline.split(31, 8)  # 33 units in chunks of five: the six in the middle hold 30
    assert (wide.first, wide.middle) == (0.5, 5)


def test_experts_in_fp4_run_as_in_fp8_and_other_matrices_in_fp4(device: Device) -> None:
    work = Work(tokens=4000.0, length=1000.0, precision="fp4", low_precision_gain=1.25)
    router, up, _ = layers.expert_matrices(MOE, 1)
    eight = replace(work, precision="fp8")
    assert layer_time._gemms(device, (router, up), work) == layer_time._gemms(device, (router, up), eight)
    assert layer_time._precision(up, eight) == ("fp8", 1.25)
    own = device_of(
        NodeGroup(profile=load_profile("b200_sxm"), gpus=8, gpus_per_node=8)
    )  # has a table of FP4
    assert layer_time._gemms(own, (up,), work) == layer_time._gemms(own, (up,), eight)
    single = replace(up, experts=1)
    assert layer_time._gemms(own, (single,), work)[0] < layer_time._gemms(own, (single,), eight)[0]
    (qkv, out) = layers.layer_matrices(LLAMA, kind=DENSE)[:2]
    assert [layer_time._precision(x, work) for x in (router, qkv)] == [("bf16", 1.0), ("fp4", 1.25)]
    kept = replace(work, bf16_matrices=("qkv",))
    assert [layer_time._precision(x, kept) for x in (qkv, out)] == [("bf16", 1.0), ("fp4", 1.25)]


def test_last_layers_stay_in_bf16_where_a_recipe_keeps_them(device: Device) -> None:
    """A quarter of the layers: a quarter of the time of BF16 and three quarters of that of FP8."""
    low = Work(tokens=4000.0, length=1000.0, precision="fp8")
    kept = Software(bf16_layers=LLAMA.num_layers // 4)

    def seconds(work: Work, software: Software) -> tuple[float, float]:
        one = passes.passes(device, LLAMA, work, software, "none")
        return one.forward.gemm, one.layer

    whole = replace(low, precision="bf16")
    plain, fast = seconds(whole, Software()), seconds(low, Software())
    assert fast < plain
    share = [0.75 * quick + 0.25 * slow for quick, slow in zip(fast, plain, strict=True)]
    end = _head_product(device, low) - _head_product(device, whole)
    assert seconds(low, kept) == pytest.approx((share[0] + 0.25 * end, share[1]))
    assert seconds(low, Software(bf16_layers=10 * LLAMA.num_layers))[1] == pytest.approx(plain[1])
    assert seconds(whole, kept) == plain


def _head_product(device: Device, work: Work) -> float:
    """Forward product of the head in a whole step."""
    return passes.exposed(device, layer_time.head(device, LLAMA, work).forward, Software()).gemm
