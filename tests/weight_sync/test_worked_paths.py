"""Stages and paths of a weight sync by hand, on an H100 with planted coefficients."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.kernels.device import Device
from rlhfsim.kernels.devices import device_of
from rlhfsim.kernels.links import (
    gather_rate,
    hbm,
    host_rate,
    network,
    pageable_rate,
    read_rate,
    scale_up,
    write_rate,
)
from rlhfsim.memory.states import lora_params, shard
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.presets import preset
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.dataflow import dataflow
from rlhfsim.specs.workload.workload import Lora, Workload
from rlhfsim.units import GB
from rlhfsim.weight_sync import offload, paths, reshard, stages, storage
from rlhfsim.weight_sync.endpoints import PoolPair, Route, mean_bytes, route, weights_of, without_ffn
from rlhfsim.weight_sync.offload import MovedBytes
from rlhfsim.weight_sync.weight_sync import VARIANTS, SyncCost, quantised, sync

H100 = load_profile("h100_sxm")
DENSE, MOE, LITE = preset("llama-3.1-8b"), preset("qwen3-30b-a3b"), preset("deepseek-v2-lite")
PLANTED = {
    "sync_start_latency": 0.3,
    "sync_rpc_latency": 0.02,
    "sync_gather_latency": 1e-4,
    "sync_unshard_latency": 3e-4,
    "sync_far_latency": 7e-4,
    "sync_quantise_latency": 2e-4,
    "sync_load_latency": 5e-4,
    "sync_scan_latency": 1e-7,
    "sync_staging_time": 0.04,
    "sync_network_efficiency": 0.6,
    "sync_bucket_bytes": 2e9,
    "sync_stage_streams": 2.0,
    "sync_delta_density": 0.01,
    "sync_quantised_on_arrival": 0.0,
    "nccl_start_latency": 0.9,
    "pageable_fraction": 0.25,
    "fresh_host_memory_time": 0.11,
    "pcie_latency": 2e-5,
    "engine_sleep_fraction": 0.5,
    "sleep_latency": 0.4,
    "wake_latency": 0.7,
    "process_start": 20.0,
    "unload_latency": 0.13,
    "group_restart_time": 0.17,
    "blocking_moves": 0.0,
}


def made(**values: float) -> Device:
    known = dict(H100.coefficients)
    for name, value in (PLANTED | values).items():
        known[name] = replace(known[name], value=value, low=value * 0.9, high=value * 1.1)
    return device_of(NodeGroup(profile=replace(H100, coefficients=known), gpus=64, gpus_per_node=8))


@pytest.fixture(scope="module")
def device() -> Device:
    return made()


def ends(device: Device, train: Layout, rollout: RolloutLayout, model=DENSE, **options) -> Route:
    backend, lora = options.pop("backend", "megatron"), options.pop("lora", None)
    pools = PoolPair(
        **{"source": device, "target": device, "same": options.pop("same_pool", False)} | options
    )
    return route(model, train, rollout, pools, backend, lora)


def seconds(stage) -> list[float]:
    return [part.seconds for part in stage]


def total(stage) -> float:
    return sum(seconds(stage))


# --- both ends --------------------------------------------------------------------------------------------


def test_tensors_of_a_checkpoint_are_counted_by_name() -> None:
    """Llama: 32 layers of 4 + 3 matrices and 2 norms, three more; Qwen3-MoE: norms of Q and K, a router."""
    dense = weights_of(DENSE)
    assert (dense.dense_tensors, dense.expert_tensors) == (32 * 9 + 3, 0)
    assert (dense.ffn, dense.ffn_tensors) == (32 * 3 * 4096 * 14336, 32 * 3)
    assert (dense.params, dense.tensors) == (DENSE.num_params, 291)
    moe = weights_of(MOE)
    assert (moe.dense_tensors, moe.expert_tensors) == (48 * (4 + 2 + 2 + 1) + 3, 48 * 128 * 3)
    assert moe.experts == 48 * 128 * 3 * 2048 * 768
    assert (moe.num_experts, moe.ffn, moe.largest) == (128, 0, 151936 * 2048)
    lite = weights_of(LITE)  # 5 of MLA, 2 norms; one dense layer; 26 with router and three shared matrices
    assert lite.dense_tensors == 27 * (5 + 2) + 3 + 26 * (1 + 3) + 3
    v3 = weights_of(preset("deepseek-v3"))  # 7 of MLA; the router has a bias
    assert v3.dense_tensors == 61 * 9 + 3 * 3 + 58 * (2 + 3) + 3
    assert weights_of(preset("qwen2.5-7b")).dense_tensors == 28 * (7 + 3 + 2) + 3
    assert weights_of(preset("llama-3.2-1b")).dense_tensors == 16 * 9 + 2
    assert weights_of(preset("gpt-oss-20b")).dense_tensors == 24 * (4 + 4 + 2 + 1 + 1) + 3
    mamba = preset("nemotron-h-8b")
    assert weights_of(mamba).dense_tensors == 4 * 4 + 24 * mamba.recurrent.tensors + 52 + 24 * 2 + 3
    latent = preset("nemotron-3-super-120b-a12b")
    names = 8 * 4 + 40 * latent.recurrent.tensors + 88 + 40 * (1 + latent.moe.router_bias + 2 + 2) + 3
    assert weights_of(latent).dense_tensors == names
    phi = weights_of(preset("phi-2"))
    assert phi.ffn_tensors == 32 * 2
    assert phi.largest == max(51200 * 2560, 2560 * 10240)


def test_a_mean_element_of_a_rollout_that_keeps_parts_in_bf16() -> None:
    w = weights_of(DENSE)
    assert mean_bytes(w, RolloutLayout()) == 2
    assert mean_bytes(w, RolloutLayout(precision="fp8")) == 1
    share = w.ffn / w.params
    assert mean_bytes(w, RolloutLayout(precision="fp8", bf16_attention=True)) == pytest.approx(2 - share)
    assert mean_bytes(w, RolloutLayout(precision="fp8", bf16_layers=8)) == pytest.approx(0.75 + 0.25 * 2)
    moe = weights_of(MOE)
    share = moe.experts / moe.params
    assert mean_bytes(moe, RolloutLayout(precision="fp8", bf16_attention=True)) == pytest.approx(2 - share)


def test_everything_but_the_mlps() -> None:
    w, lite = weights_of(DENSE), weights_of(LITE)
    rest = without_ffn(w)
    assert (rest.dense, rest.dense_tensors, rest.ffn, rest.ffn_tensors) == (w.dense - w.ffn, 291 - 96, 0, 0)
    assert (without_ffn(lite).experts, without_ffn(lite).expert_tensors) == (0, 0)
    assert without_ffn(lite, scales=True).expert_tensors == lite.expert_tensors


def test_shares_of_both_ends_by_hand(device: Device) -> None:
    w = weights_of(MOE)
    e = ends(device, Layout(tp=2, pp=2, dp=4, ep=4), RolloutLayout(tp=2, attention_dp=4, ep=8), MOE)
    assert e.train_share == (1 / 4, 1 / 8)
    assert e.rollout_share == (1 / 2, 1 / 8)
    assert e.train_shard == 2 * (w.dense / 4 + w.experts / 8)
    assert e.rollout_shard == 2 * (w.dense / 2 + w.experts / 8)
    assert (e.stored, e.sent, e.tensors) == (2 * w.params, 2 * w.params, w.tensors)
    assert e.gather_ranks == 4
    assert e.local_tensors == w.dense_tensors + 2 * 48
    assert not e.one_domain
    small = replace(e, rollout=RolloutLayout(tp=1, pp=2, precision="fp8"))
    assert (small.sent, small.tensors) == (w.params, 2 * w.tensors)
    assert small.local_tensors == (w.dense_tensors + 96) / 2
    cut = replace(e, train=Layout(tp=4, dp=2))
    assert (cut.train_share, cut.gather_ranks) == ((1 / 4, 1 / 4), 4)
    etp = replace(e, train=Layout(tp=2, dp=4, ep=2, etp=2))
    assert etp.train_share == (1 / 2, 1 / 4)
    zero = replace(e, train=Layout(dp=4, zero=3))
    assert (zero.train_share, zero.gather_ranks) == ((1 / 4, 1 / 4), 4)
    dense = ends(device, Layout(tp=2, dp=2), RolloutLayout(dp=4))
    assert (dense.gather_ranks, dense.local_tensors, dense.one_domain) == (2, 291, True)
    assert dense.adapters == lora_params(DENSE, Lora().rank)
    own = ends(device, Layout(dp=1), RolloutLayout(), lora=Lora(rank=4))
    assert (own.adapters, own.has_adapters, dense.has_adapters) == (lora_params(DENSE, 4), True, False)


# --- stages -----------------------------------------------------------------------------------------------


def test_a_gather_inside_a_node_by_hand(device: Device) -> None:
    """tp 4: each GPU receives three quarters, renames 291 tensors and passes the model twice."""
    e, w = ends(device, Layout(tp=4, dp=2), RolloutLayout(dp=8)), weights_of(DENSE)
    stored = 2 * w.params
    assert stages.gathered(e, all_stages=False) == (stored, 0.75 * stored)
    got = seconds(stages.gather(e, all_stages=False))
    expected = [0, 0.75 * stored / gather_rate(device, 4).value, 2 * stored / hbm(device).value, 291e-4]
    assert got == pytest.approx(expected)


def test_a_gather_of_pipeline_stages_in_other_nodes_by_hand(device: Device) -> None:
    """tp 8, pp 4 in four nodes: shards of three far stages cross the network, then the group gathers."""
    e, w = ends(device, Layout(tp=8, pp=4), RolloutLayout(dp=8)), weights_of(DENSE)
    stored, shard = 2 * w.params, 2 * w.params / 32
    rate = network(device).value * 0.6
    got = seconds(stages.gather(e, all_stages=True))
    assert got == pytest.approx(
        [
            3 * shard / rate,
            (stored - shard - 3 * shard) / gather_rate(device, 8).value,
            2 * stored / hbm(device).value,
            291e-4,
            291 * 7e-4,
        ]
    )
    own = seconds(stages.gather(e, all_stages=False))
    assert own == pytest.approx(
        [
            0,
            (stored / 4 - shard) / gather_rate(device, 8).value,
            stored / 2 / hbm(device).value,
            291 / 4 * 1e-4,
        ]
    )
    near = seconds(stages.gather(ends(device, Layout(tp=2, pp=4), RolloutLayout(dp=8)), all_stages=True))
    assert near[0] == 0
    assert len(near) == 4


def test_a_gather_of_shards_over_two_nodes_by_hand(device: Device) -> None:
    """ZeRO-3 on 16 GPUs: tensor by tensor over NICs that reach 0.6 of their rate, eight to a node."""
    e, w = ends(device, Layout(dp=16, zero=3), RolloutLayout(dp=8)), weights_of(DENSE)
    stored = 2 * w.params
    rate = min(scale_up(device).value, 8 * 0.6 * network(device).value)
    got = seconds(stages.gather(e, all_stages=False))
    assert got == pytest.approx(
        [0, stored * 15 / 16 / rate, 2 * stored / hbm(device).value, 291 * 3e-4, 291 * 7e-4]
    )
    link = stages.shared_network(device)
    low, high = device.spread("sync_network_efficiency")
    nic = device.spread("nic_efficiency")
    assert link.spread == pytest.approx((nic[0] * low, nic[1] * high))


def test_quantising_reads_two_bytes_and_writes_one(device: Device) -> None:
    e = ends(device, Layout(tp=4, dp=2), RolloutLayout(dp=8, precision="fp8"))
    got = seconds(stages.quantise(e, 1e9, 100))
    assert got == pytest.approx([3e9 / hbm(device).value, 0.02])
    assert seconds(stages.quantise_all(e)) == pytest.approx(
        [3 * DENSE.num_params / hbm(device).value, 291 * 2e-4]
    )
    assert stages.quantise(replace(e, rollout=RolloutLayout(dp=8)), 1e9, 100) == ()


def test_loading_copies_the_slice_and_looks_for_every_expert(device: Device) -> None:
    w = weights_of(MOE)
    e = ends(device, Layout(tp=4, dp=2), RolloutLayout(tp=2, pp=2, ep=2, precision="fp8"), MOE)
    mine, scans = w.dense_tensors + w.expert_tensors / 2, w.expert_tensors * 128
    got = seconds(stages.load(e))
    assert got == pytest.approx(
        [2 * e.rollout_shard / hbm(device).value, mine * 2 / 2 * 5e-4, scans * 2 / 2 * 1e-7]
    )
    assert seconds(stages.load(e, routed=True)) == pytest.approx([*got[:2], 0])
    assert seconds(stages.load(ends(device, Layout(dp=8), RolloutLayout(dp=8))))[1:] == pytest.approx(
        [291 * 5e-4, 0]
    )


def test_wires_buckets_and_calls_by_hand(device: Device) -> None:
    apart = ends(device, Layout(dp=8), RolloutLayout(dp=8))
    nic, fast = network(device).value, scale_up(device).value
    assert seconds(stages.wire(apart, 1e9)) == pytest.approx([1e9 / nic])
    assert seconds(stages.wire(apart, 1e9, 4)) == pytest.approx([1e9 / min(4 * nic, fast)])
    near = ends(device, Layout(dp=4), RolloutLayout(dp=4))
    assert seconds(stages.wire(near, 1e9)) == pytest.approx([1e9 / fast])
    assert stages.bucket(apart) == 2e9
    assert (
        stages.bucket(ends(made(sync_bucket_bytes=1e8), Layout(dp=8), RolloutLayout(dp=8)))
        == 2 * 128256 * 4096
    )
    assert (stages.num_buckets(apart, 5e9), stages.num_buckets(apart, 1e9)) == (2.5, 1)
    assert seconds(stages.calls(apart, 3)) == pytest.approx([0.06])
    assert (seconds(stages.start(apart)), seconds(stages.group(apart))) == ([0.3], [0.9])
    assert seconds(stages.staging(apart)) == pytest.approx([apart.sent / GB * 0.04])
    gather = stages.gather(ends(device, Layout(tp=4, dp=2), RolloutLayout(dp=8)), all_stages=False)
    bytes_, names = stages.split(gather)
    assert seconds(names) == pytest.approx([291e-4])
    assert total(bytes_) + total(names) == pytest.approx(total(gather))
    assert total(gather + names) == pytest.approx(total(gather) + total(names))


# --- paths ------------------------------------------------------------------------------------------------


def _pipe(times: list[float], k: float) -> float:
    """(sum of all) / k and the rest of the slowest."""
    k = max(1.0, k)
    return sum(times) / k + (1 - 1 / k) * max(times)


def test_pointers_over_ipc_by_hand(device: Device) -> None:
    e = ends(device, Layout(tp=4, dp=2), RolloutLayout(tp=2, dp=4, precision="fp8"), MOE, same_pool=True)
    gather, load = total(stages.gather(e, all_stages=True)), total(stages.load(e))
    count = e.stored / stages.bucket(e)
    got = paths.ipc(e)
    assert got.cost.seconds == pytest.approx(
        0.3 + 0.02 * count + gather + total(stages.quantise_all(e)) + load
    )
    assert got.train_bytes == 2 * stages.bucket(e)
    assert got.bytes_moved == pytest.approx(8 * 0.75 * e.stored)
    w = e.weights
    early = replace(e, train=Layout(tp=2, pp=2, dp=2, ep=2))
    own = total(stages.quantise(early, early.train_shard / 2, w.dense_tensors / 2 + w.expert_tensors / 4))
    gather = total(stages.gather(early, all_stages=True))
    first, routed = paths.ipc(early, prequantised=True).cost.seconds, total(stages.load(early, routed=True))
    assert first == pytest.approx(0.3 + 0.02 * count + gather + own + routed)
    each = paths.ipc_per_parameter(e)
    serial = 0.3 + total(stages.gather(e, all_stages=True)) + total(stages.quantise_all(e)) + load
    assert each.cost.seconds == pytest.approx(serial + 2 * w.tensors * 0.02)
    assert each.train_bytes == 2 * w.largest
    assert each.bytes_moved == got.bytes_moved


def test_a_broadcast_by_hand(device: Device) -> None:
    e = ends(device, Layout(tp=2, pp=2, dp=2), RolloutLayout(dp=8))
    wire, load, stage = total(stages.wire(e, e.sent)), total(stages.load(e)), total(stages.staging(e))
    count = e.sent / 2e9
    for lanes in (True, False):
        gather = [total(s) for s in stages.split(stages.gather(e, all_stages=not lanes))]
        before = 0.3 + 0.02 * count
        got = paths.broadcast(e, lanes=lanes)
        assert got.cost.seconds == pytest.approx(before + _pipe([*gather, wire, load, stage], count))
        slow = paths.broadcast(e, lanes=lanes, overlapped=False).cost.seconds
        assert slow == pytest.approx(before + sum(gather) + wire + load + stage)
        bare = paths.broadcast(e, lanes=lanes, loaded=False).cost.seconds
        assert bare == pytest.approx(before + _pipe([*gather, wire], count))
    assert (got.bytes_moved, got.train_bytes, got.rollout_bytes) == (e.sent, 4e9, 4e9)
    four = paths.broadcast(e, nics=4, loaded=False, overlapped=False).cost.seconds
    one = paths.broadcast(e, loaded=False, overlapped=False).cost.seconds
    assert one - four == pytest.approx(wire - total(stages.wire(e, e.sent, 4)))


def test_a_broadcast_that_is_quantised_before_or_after_the_wire(device: Device) -> None:
    e = ends(device, Layout(tp=2, pp=2, dp=2), RolloutLayout(dp=8, precision="fp8"))
    gather = total(stages.gather(e, all_stages=False))
    small = total(stages.quantise(e, e.weights.params / 2, 291 / 2))
    rest = total(stages.wire(e, e.sent)) + total(stages.load(e)) + total(stages.staging(e))
    count = e.sent / 2e9
    got = paths.broadcast(e, overlapped=False).cost.seconds
    assert got == pytest.approx(0.3 + 0.02 * count + gather + small + rest)
    arrives = made(sync_quantised_on_arrival=1.0)
    late = replace(e, source=arrives, target=arrives)
    wide = replace(late, rollout=RolloutLayout(dp=8))
    placed = total(stages.quantise_all(late)) + total(stages.load(late))
    rest = total(stages.wire(wide, wide.sent)) + placed + total(stages.staging(wide))
    got = paths.broadcast(late, overlapped=False).cost.seconds
    assert got == pytest.approx(0.3 + 0.02 * wide.sent / 2e9 + gather + rest)


def test_a_broadcast_of_each_parameter_by_hand(device: Device) -> None:
    e = ends(device, Layout(tp=2, pp=2, dp=2), RolloutLayout(dp=8, precision="fp8"))
    parts = [
        stages.gather(e, all_stages=False),
        stages.quantise_all(e),
        stages.wire(e, e.sent),
        stages.load(e),
    ]
    got = paths.broadcast_per_parameter(e)
    assert got.cost.seconds == pytest.approx(0.3 + sum(map(total, parts)) + 582 * 0.02)
    assert got.train_bytes == got.rollout_bytes == 2 * e.weights.largest


@pytest.mark.parametrize("sliced", [False, True])
def test_shards_sent_to_shards_by_hand(device: Device, sliced: bool) -> None:
    """16 + 16 GPUs, four stages of which two send at a time: a sender carries twice its part."""
    train, rollout = Layout(tp=2, pp=4, dp=2, ep=2), RolloutLayout(tp=4, dp=4, ep=2)
    e, w = ends(device, train, rollout, MOE), weights_of(MOE)
    received = 2 * w.experts / 4
    experts = w.expert_tensors / 8
    slices = experts * 4 / 2 if sliced else 0
    sends = max(received, received * 16 / (16 * 2 / 4)) / network(device).value
    got = paths.p2p(e, sliced=sliced)
    rest = replace(e, weights=without_ffn(w))
    after = paths.broadcast(rest, nics=8, lanes=False)
    local = 2 * 48
    expected = 0.3 + sends + (experts + slices + local) * 1e-4 + after.cost.seconds
    assert got.cost.seconds == pytest.approx(expected)
    assert got.bytes_moved == pytest.approx(16 * received + 2 * (w.dense - w.ffn))
    assert got.train_bytes == got.rollout_bytes == 2e9


def test_whole_models_by_shards_and_quantised_ones_by_hand(device: Device) -> None:
    train, rollout = Layout(tp=2, dp=8), RolloutLayout(tp=4, dp=4)
    e, w = ends(device, train, rollout), weights_of(DENSE)
    received = 2 * w.params / 4
    whole = paths.p2p(e, whole=True)
    assert whole.cost.seconds == pytest.approx(0.3 + received / network(device).value + 291e-4)
    assert whole.bytes_moved == 16 * received
    small = replace(e, rollout=replace(rollout, precision="fp8", pp=1))
    ffn = 2 * w.ffn / 4
    sent = 0.3 + ffn / network(device).value + 96e-4
    cast = total(stages.quantise(small, ffn / 2, 96))
    rest = replace(e, weights=without_ffn(w))
    after = paths.broadcast(rest, nics=8, lanes=False).cost.seconds
    assert paths.p2p(small).cost.seconds == pytest.approx(sent + cast + after)
    stored = paths.p2p(small, trained_fp8=True).cost.seconds
    scales = replace(e, weights=without_ffn(w, scales=True))
    after = paths.broadcast(scales, nics=8, lanes=False).cost.seconds
    assert stored == pytest.approx(0.3 + ffn / 2 / network(device).value + 96e-4 + after)


def test_staged_shards_by_hand(device: Device) -> None:
    """Four senders of a stage, eight rollout GPUs in one replica: two shards each, the last of them overlaps."""
    e = ends(device, Layout(tp=4, pp=2), RolloutLayout(tp=8))
    shard = e.rollout_shard / 2
    write = shard * 2 / network(device).value
    shape = 2 / 2 * total(stages.load(e)) + 2 * shard / host_rate(device).value
    ready = total(stages.gather(e, all_stages=False)) + shape + write / 2
    got = paths.p2p_staged(e)
    assert got.cost.seconds == pytest.approx(0.3 + _pipe([ready, write / 2], e.sent / 2e9))
    assert got.bytes_moved == 8 * e.rollout_shard
    assert (got.train_bytes, got.host_bytes) == (4e9, 8 * e.rollout_shard)


@pytest.mark.parametrize("same", [True, False])
def test_adapters_by_hand(device: Device, same: bool) -> None:
    e = ends(device, Layout(tp=2, dp=4), RolloutLayout(dp=8), lora=Lora(rank=8), same_pool=same)
    size, names = 2 * lora_params(DENSE, 8), 582
    link = hbm(device) if same else network(device)
    got = paths.adapters(e)
    expected = (
        0.3 + 0.02 + size / gather_rate(device, 2).value + names * 1e-4 + size / link.value + names * 5e-4
    )
    assert got.cost.seconds == pytest.approx(expected)
    assert got.bytes_moved == got.train_bytes == got.rollout_bytes == size
    sharded = paths.adapters(replace(e, train=Layout(dp=8, zero=3))).cost.seconds
    more = size / gather_rate(device, 8).value - size / gather_rate(device, 2).value
    assert sharded == pytest.approx(expected + names * 2e-4 + more)


@pytest.mark.parametrize("same", [True, False])
def test_a_delta_by_hand(device: Device, same: bool) -> None:
    """One of a hundred elements, two bytes and four of position."""
    e = ends(device, Layout(tp=2, dp=4), RolloutLayout(dp=8), same_pool=same)
    size = DENSE.num_params * 0.01 * 6
    compare = e.train_shard / host_rate(device).value + 2 * e.train_shard / hbm(device).value
    collect = size / gather_rate(device, 2).value + 291e-4
    send = size / (hbm(device) if same else network(device)).value
    got = paths.delta(e)
    assert got.cost.seconds == pytest.approx(0.3 + compare + _pipe([collect, send, 291 * 5e-4], size / 2e9))
    assert (got.bytes_moved, got.train_bytes, got.rollout_bytes) == (size, 4e9, 2e9)
    assert got.host_bytes == 8 * e.train_shard


def test_a_delta_through_a_shared_folder_by_hand(device: Device) -> None:
    """Written once, read by both nodes of the rollout, loaded as a whole."""
    e = ends(device, Layout(tp=2, dp=4), RolloutLayout(dp=16))
    size = DENSE.num_params * 0.01 * 6
    compare = e.train_shard / host_rate(device).value + 2 * e.train_shard / hbm(device).value
    collect = size / gather_rate(device, 2).value + 291e-4
    write, read = (size / rate(device, shared=True).value for rate in (write_rate, read_rate))
    copy, count = e.rollout_shard / host_rate(device).value, size / 2e9
    got = paths.delta_disk(e)
    expected = 0.3 + compare + _pipe([collect, write], count)
    expected += _pipe([read, copy, total(stages.load(e))], count)
    assert got.cost.seconds == pytest.approx(expected)
    assert got.bytes_moved == pytest.approx(3 * size)


# --- disk and host ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_a_disk_by_hand(device: Device, shared: bool) -> None:
    """Two nodes write a pipeline's stages; two replicas of 16 GPUs, each node reads half of the model."""
    e = ends(device, Layout(tp=8, pp=2), RolloutLayout(tp=16, dp=2))
    count = e.sent / 2e9
    gather = total(stages.gather(e, all_stages=False))
    save = e.sent / (2 * write_rate(device, shared=shared).value)
    fetch = e.sent / 2 / read_rate(device, shared=shared).value
    copy = e.rollout_shard / host_rate(device).value
    got = storage.disk(e, shared=shared)
    expected = 0.3 + _pipe([gather, save], count) + _pipe([fetch, copy, total(stages.load(e))], count)
    assert got.cost.seconds == pytest.approx(expected)
    assert got.bytes_moved == e.sent + e.sent / 2 * 4
    assert (got.train_bytes, got.rollout_bytes, got.host_bytes) == (2e9, 2e9, e.sent / 2)
    one = storage.disk(ends(device, Layout(tp=8, dp=2), RolloutLayout(tp=2, dp=8)), shared=shared)
    assert one.host_bytes == e.sent


def test_host_memory_by_hand(device: Device) -> None:
    e = ends(device, Layout(tp=2, dp=4), RolloutLayout(tp=2, dp=8))
    count, load = e.sent / 2e9, total(stages.load(e))
    copy = e.sent / 16 / host_rate(device).value
    spread = e.sent / gather_rate(device, 16).value
    got = storage.host_update(e)
    update = 0.3 + 0.9 + 0.02 * count + copy + _pipe([spread, load], count)
    assert got.cost.seconds == pytest.approx(update)
    assert (got.bytes_moved, got.rollout_bytes, got.host_bytes) == (16 * e.sent, 6e9, e.sent / 2)
    gather = total(stages.gather(e, all_stages=False))
    out = e.sent / 8 / host_rate(device).value
    far = e.sent / 16 / min(host_rate(device).value, network(device).value)
    whole = storage.host(e)
    assert whole.cost.seconds == pytest.approx(_pipe([gather, out], count) + update - copy + far)
    assert (whole.bytes_moved, whole.train_bytes) == (17 * e.sent, 4e9)
    near = storage.host(replace(e, same_pool=True))
    assert near.cost.seconds == pytest.approx(_pipe([gather, out], count) + update)


# --- in place ---------------------------------------------------------------------------------------------


def test_resharding_in_place_by_hand(device: Device) -> None:
    """Eight stages to tp 8: every GPU keeps 1/64 and receives 7/64; one call a tensor."""
    e = ends(device, Layout(pp=8), RolloutLayout(tp=8), same_pool=True)
    got = reshard.received(e)
    assert (got.inside, got.across) == (pytest.approx(7 / 64 * e.stored), 0)
    priced = reshard.reshard(e)
    assert priced.cost.seconds == pytest.approx(7 / 64 * e.stored / scale_up(device).value + 291e-4 + 0.3)
    assert priced.bytes_moved == pytest.approx(8 * 7 / 64 * e.stored)
    vanilla = reshard.reshard_vanilla(ends(device, Layout(tp=2, pp=2, dp=2), RolloutLayout(dp=8)))
    volume = 3 / 4 * e.stored
    assert vanilla.cost.seconds == pytest.approx(volume / gather_rate(device, 4).value + 291e-4 + 0.3)
    assert (vanilla.bytes_moved, vanilla.rollout_bytes) == (8 * volume, e.stored)
    sharded = reshard.reshard_vanilla(ends(device, Layout(dp=8, zero=3), RolloutLayout(dp=8)))
    assert sharded.bytes_moved == pytest.approx(8 * 7 / 8 * e.stored)
    chat = reshard.reshard_deepspeed_chat(ends(device, Layout(tp=2, pp=2, dp=2, cp=2), RolloutLayout(dp=16)))
    volume = 15 / 16 * e.stored
    assert chat.cost.seconds == pytest.approx(volume / gather_rate(device, 16).value + 291e-4 + 0.3)


def test_parts_that_nest_are_kept(device: Device) -> None:
    cut = reshard.Cut(train=4, rollout=2, near=0.5)
    assert (cut.kept, cut.inside) == (1 / 4, 0.5)
    far = cut._replace(reach=0.25)
    assert far.kept == 1 / 2 * 1 / 4
    assert far._replace(rollout=8).kept == 0.25 / 8
    spread = far._replace(spread=True)
    assert (spread.kept, spread.inside) == (1 / 4, 1.0)
    assert spread._replace(rollout=1).inside == 0.5
    assert reshard.Received(inside=1.0, across=2.0).total == 3


def test_directions_in_which_weights_are_cut_by_hand(device: Device) -> None:
    e = ends(device, Layout(tp=4, pp=2, dp=2, ep=4), RolloutLayout(tp=4, attention_dp=2, ep=8), MOE)
    layer, width = reshard._dense_cuts(e)
    assert (layer.train, layer.rollout, layer.near, layer.spread) == (2, 1, 0.5, True)
    assert (width.train, width.rollout, width.near, width.reach) == (4, 4, 1, 1)
    _, experts, inner = reshard._expert_cuts(e)
    assert (experts.train, experts.rollout, inner.train, inner.rollout) == (4, 8, 1, 1)
    plain = replace(e, train=Layout(tp=16), rollout=RolloutLayout(tp=4))
    _, width = reshard._dense_cuts(plain)
    assert (width.train, width.near, width.reach) == (16, 0.5, 0.5)
    _, experts, inner = reshard._expert_cuts(plain)
    assert (experts.train, experts.rollout, inner.train, inner.rollout) == (1, 1, 16, 4)
    sharded = replace(e, train=Layout(dp=16, zero=3))
    layer, experts, inner = reshard._expert_cuts(sharded)
    assert (layer.train, experts.train, inner.train) == (1, 16, 1)
    wide = replace(e, train=Layout(tp=2, dp=8, ep=4, etp=2))
    _, experts, inner = reshard._expert_cuts(wide)
    assert (experts.train, experts.near, inner.train) == (4, 1, 2)


# --- moves of a role --------------------------------------------------------------------------------------


def test_copies_of_a_role_by_hand(device: Device) -> None:
    pinned, pageable = host_rate(device, 4).value, pageable_rate(device, 4).value
    assert offload.copy_in(device, 1e10, copying=4).seconds == pytest.approx(1e10 / pinned + 2e-5)
    out = offload.copy_out(device, 1e10, copying=4, pinned=False).seconds
    assert out == pytest.approx(1e10 / pageable + 1e10 / GB * 0.11 + 2e-5)
    back = offload.copy_in(device, 1e10, copying=4, pinned=False).seconds
    assert back == pytest.approx(1e10 / pageable + 2e-5)
    assert offload.copy_out(device, 1e10, copying=4).seconds == pytest.approx(1e10 / pinned + 2e-5)
    assert offload.copy_in(device, 0).seconds == 0
    disk = write_rate(device, shared=False).value / 4
    assert offload.copy_out(device, 1e10, to="nvme", copying=4).seconds == pytest.approx(
        1e10 / min(disk, pinned) + 2e-5
    )
    disk = read_rate(device, shared=False).value / 8
    assert offload.copy_in(device, 1e10, source="nvme").seconds == pytest.approx(
        1e10 / min(disk, host_rate(device).value) + 2e-5
    )


def test_sleep_wake_and_new_processes_by_hand(device: Device) -> None:
    copy = 1e10 / host_rate(device).value + 2e-5
    assert [offload.sleep(device, 1e10, level=n).seconds for n in (0, 1, 2)] == pytest.approx(
        [0, copy + 0.2, 0.2]
    )
    assert [offload.wake(device, 1e10, level=n).seconds for n in (0, 1, 2)] == pytest.approx(
        [0, copy + 0.7, 0.7]
    )
    assert offload.recreate(device, 1e10).seconds == pytest.approx(20 + copy)
    assert offload.destroy(device).seconds == pytest.approx(0.4)


@pytest.mark.parametrize("pinned", [True, False])
def test_moves_around_a_call_by_hand(device: Device, pinned: bool) -> None:
    role = MovedBytes(frozen=1e9, learned=2e9, optimizer=4e9)

    def seconds_of(**placed) -> list[float]:
        place = RolePlacement(pool="all", layout=Layout(dp=8), **placed)
        return [cost.seconds for cost in offload._around_role(device, place, role, pinned=pinned)]

    def into(size: float) -> float:
        return offload.copy_in(device, size, pinned=pinned).seconds

    def out(size: float) -> float:
        return offload.copy_out(device, size, pinned=pinned).seconds

    assert seconds_of() == [0, 0]
    assert seconds_of(offload_between=True) == pytest.approx([into(4e9), out(4e9) + 0.13])
    assert seconds_of(residency="offloaded") == pytest.approx([into(7e9) + 0.17, out(6e9) + 0.13])
    fast = offload.copy_in(device, 2e9).seconds
    assert seconds_of(residency="swapped") == pytest.approx([2 * fast, fast])
    start = 20 + offload.copy_in(device, 7e9).seconds
    assert seconds_of(residency="recreated") == pytest.approx([start, out(6e9) + 0.4])


def test_what_a_role_moves_by_hand() -> None:
    """8 ranks of Megatron's distributed optimizer: 2 bytes of weights each, 12 / 8 of the optimizer."""
    elements = 8_030_261_248
    trained = offload.held(DENSE, Layout(dp=8, zero=1), "megatron", optimizer="adam")
    assert trained == MovedBytes(frozen=0, learned=2 * elements, optimizer=pytest.approx(1.5 * elements))
    frozen = offload.held(DENSE, Layout(dp=8, zero=1), "megatron", optimizer=None)
    assert (frozen.frozen, frozen.learned, frozen.optimizer) == (2 * elements, 0, 0)
    lora = offload.held(DENSE, Layout(dp=8, zero=1), "megatron", optimizer="adam", lora=Lora(rank=8))
    adapters = lora_params(DENSE, 8)
    assert (lora.frozen, lora.learned, lora.optimizer) == (
        2 * elements,
        2 * adapters,
        pytest.approx(1.5 * adapters),
    )
    w = weights_of(MOE)
    shard = offload.rollout_shard(MOE, RolloutLayout(tp=2, pp=2, attention_dp=2, precision="fp8"))
    assert shard == pytest.approx(w.dense / 4 + w.experts / 8)


# --- which paths there are --------------------------------------------------------------------------------


def _refused(found: SyncCost) -> bool:
    return found.why_not is not None


def test_paths_say_between_which_ends_they_work(device: Device) -> None:
    near = ends(device, Layout(dp=8), RolloutLayout(dp=8), same_pool=True)
    apart = replace(near, same_pool=False)
    slow = replace(apart, rdma=False)
    small = replace(slow, train=Layout(dp=4), rollout=RolloutLayout(dp=4))
    answers = {
        name: [_refused(VARIANTS[name](e)) for e in (near, apart, slow, small)]
        for name in ("none", "reshard", "ipc", "broadcast", "p2p", "disk-local", "disk-shared", "host")
    }
    assert answers == {
        "none": [False, True, True, True],
        "reshard": [False, True, True, True],
        "ipc": [False, True, True, True],
        "broadcast": [True, False, False, False],
        "p2p": [True, False, True, False],
        "disk-local": [False, True, True, False],
        "disk-shared": [False, False, False, False],
        "host": [False, False, True, True],
    }
    assert _refused(VARIANTS["lora"](near))
    for other in (
        {"rollout": RolloutLayout(tp=2, dp=4)},
        {"rollout": RolloutLayout(dp=8, precision="fp8")},
        {"train": Layout(dp=8, zero=3)},
    ):
        assert _refused(VARIANTS["none"](replace(near, **other)))
    assert VARIANTS["none"](near).bytes_per_s == 0
    found = VARIANTS["ipc"](near)
    assert found.bytes_per_s == pytest.approx(found.model_bytes / found.cost.seconds)
    assert (
        quantised(near).cost
        == VARIANTS["ipc"](replace(near, rollout=RolloutLayout(dp=8, precision="fp8"))).cost
    )
    assert quantised(apart).available
    for name in ("delta", "delta-disk"):
        assert _refused(VARIANTS[name](near))
        assert VARIANTS[name](apart).available


def test_moves_of_an_engine_by_hand(device: Device) -> None:
    size = offload.rollout_shard(DENSE, RolloutLayout(tp=2))
    pools = (ResourcePool(name="all", gpus=2),)
    actor = RolePlacement(pool="all", layout=Layout(tp=2))

    def around(path="ipc", **options) -> list[float]:
        role = RolloutPlacement(pool="all", layout=RolloutLayout(tp=2), **options)
        placed = Placement(pools=pools, actor=actor, rollout=role, weight_path=path)
        return [cost.seconds for cost in offload._around_rollout(device, DENSE, role, placed)]

    copy = offload.copy_in(device, size).seconds
    assert around(sleep=0) == [0, 0]
    assert around(sleep=1) == pytest.approx([copy + 0.7, copy + 0.2])
    assert around(sleep=2) == pytest.approx([0.7, 0.2])
    assert around(sleep=0, residency="offloaded") == around(sleep=1)
    assert around(sleep=2, residency="offloaded") == around(sleep=2)
    assert around(sleep=0, residency="recreated") == pytest.approx([20, 0.4])
    assert around("lora", sleep=0, residency="recreated") == pytest.approx([20 + copy, 0.4])
    assert around("none", sleep=0, residency="recreated") == pytest.approx([20 + copy, 0.4])


def test_a_role_that_leaves_takes_weights_and_optimizer_along(device: Device) -> None:
    """16 ranks of Megatron's distributed optimizer: 2 bytes of weights each and 12 / 8 of the optimizer."""
    size = (2 + 12 / 8) * DENSE.num_params
    got = offload.leaving(device, DENSE, Layout(dp=8, zero=1), "megatron").seconds
    assert got == pytest.approx(offload.copy_out(device, size, pinned=False).seconds + 0.13)
    shards = offload.held(MOE, Layout(dp=8, ep=4, pp=2, zero=1), "megatron", optimizer="adam")
    first, last = (
        shard(MOE, Layout(dp=8, ep=4, pp=2, zero=1), "megatron", stage) for stage in ("first", "last")
    )
    fuller = max(first, last, key=lambda p: p.dense / 8 + p.expert / 2)
    assert shards.learned == 2 * fuller.elements


def test_calls_move_the_states_that_they_need(device: Device) -> None:
    """A scoring call brings the weights, training also the optimizer; blocking moves bring all for both."""
    work = Workload(model="llama-3.1-8b", algorithm="grpo", prompts=8)
    role = RolePlacement(pool="all", layout=Layout(dp=8, zero=1), residency="offloaded")
    placed = Placement(
        pools=(ResourcePool(name="all", gpus=8),),
        actor=role,
        reference=role,
        weight_path="none",
        backend="megatron",
    )
    calls = {call.name: call for call in dataflow(work)}

    def into(name: str, on: Device, workload: Workload = work) -> float:
        return offload.moves(on, DENSE, role, calls[name], workload, placed)[0].seconds

    def copied(size: float) -> float:
        return offload.copy_in(device, size, pinned=False).seconds

    n, blocking = DENSE.num_params, made(blocking_moves=1.0)
    assert into("actor.train", device) == pytest.approx(copied(3.5 * n) + 0.17)
    assert into("reference.logprob", device) == pytest.approx(copied(2 * n))
    assert into("actor.logprob", device) == pytest.approx(copied(2 * n))
    assert into("actor.logprob", blocking) == pytest.approx(copied(3.5 * n) + 0.17)
    assert into("reference.logprob", blocking) == pytest.approx(copied(2 * n))
    lora = replace(work, lora=Lora(rank=8))
    adapters = lora_params(DENSE, 8)
    assert into("actor.train", device, lora) == pytest.approx(copied(2 * n + 3.5 * adapters) + 0.17)
    home = replace(placed, actor=replace(role, residency="resident"))
    swapped = replace(role, residency="swapped")
    shared = replace(home, reference=swapped)
    assert offload.moves(device, DENSE, swapped, calls["reference.logprob"], lora, shared)[0].seconds == 0
    two = offload.copy_in(device, 2 * n).seconds
    own = offload.moves(device, DENSE, swapped, calls["reference.logprob"], work, shared)
    assert [cost.seconds for cost in own] == pytest.approx([2 * two, two])


def test_a_plan_s_disk_is_shared_where_nodes_must_read_each_other(device: Device) -> None:
    def name(train: Layout, rollout: RolloutLayout, same: bool) -> str:
        return sync("disk", DENSE, train, rollout, PoolPair(device, device, same), "megatron").name

    assert name(Layout(dp=8), RolloutLayout(dp=8), True) == "disk-local"
    assert name(Layout(dp=16), RolloutLayout(dp=16), True) == "disk-shared"
    assert name(Layout(dp=4), RolloutLayout(dp=4), False) == "disk-shared"


def test_staged_shards_that_are_quantised_on_their_way(device: Device) -> None:
    e = ends(device, Layout(tp=2, pp=2), RolloutLayout(tp=8, precision="fp8"))
    shard_ = e.rollout_shard / 2
    write = shard_ * 4 / network(device).value
    cast = total(stages.quantise(e, DENSE.num_params / 2, 291 / 2))
    shape = 4 / 2 * total(stages.load(e)) + 4 * shard_ / host_rate(device).value
    ready = total(stages.gather(e, all_stages=False)) + cast + shape + 0.75 * write
    got = paths.p2p_staged(e)
    assert got.cost.seconds == pytest.approx(0.3 + _pipe([ready, write / 4], e.sent / 2e9))
    assert got.host_bytes == 4 * e.rollout_shard
    sharded = paths.delta(ends(device, Layout(dp=8, zero=3), RolloutLayout(dp=8)))
    plain = paths.delta(ends(device, Layout(tp=8), RolloutLayout(dp=8)))
    assert sharded.cost.seconds - plain.cost.seconds == pytest.approx(291 * 2e-4, rel=0.05)


def test_what_crosses_domains_is_passed_on_inside_them(device: Device) -> None:
    """Sixteen stages to tp 2: half of what a GPU lacks lies in the other node; four replicas share it."""
    e = ends(device, Layout(pp=16), RolloutLayout(tp=2, dp=8), same_pool=True)
    got = reshard.received(e)
    assert got.across == pytest.approx(e.stored / 4)
    assert got.inside == pytest.approx(e.stored / 4 - e.stored / 32)
    wire = got.across / 4 / network(device).value
    fabric = (got.total - got.across / 4) / scale_up(device).value
    assert reshard.reshard(e).cost.seconds == pytest.approx(max(wire, fabric) + 291e-4 + 0.3)
    wide = replace(e, rollout=RolloutLayout(tp=16))
    crossing = reshard.received(wide).across / network(device).value
    assert reshard.reshard(wide).cost.seconds == pytest.approx(crossing + 291e-4 + 0.3)
