"""Parts of an engine's step by hand, on an H100 with planted coefficients."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lab.decode.serving import Terms, output_time, serving_terms
from rlhfsim.kernels import collectives, layers
from rlhfsim.kernels.cost import Cost, part
from rlhfsim.kernels.device import Device, Group
from rlhfsim.kernels.devices import device_of
from rlhfsim.kernels.layers import Matrix
from rlhfsim.kernels.routing import Routing
from rlhfsim.rollout import (
    collective_time,
    decode,
    environment,
    experts,
    generation,
    prefill,
    schedule,
    steady_state,
    untimed,
)
from rlhfsim.rollout.batches import one_after_the_other
from rlhfsim.rollout.collective_time import collective, tp_all_reduce
from rlhfsim.rollout.continuous_batching import continuous_timeline, start_steps, tabulate
from rlhfsim.rollout.engine_step import CURVE_SPREAD, EngineStep, gemm, kernel, on, weight_only
from rlhfsim.rollout.oversampling import aborted
from rlhfsim.rollout.schedule import Requests
from rlhfsim.rollout.speculative import speculative_step
from rlhfsim.rollout.turns import Waiting, _odds, delayed
from rlhfsim.rollout.turns import waits as environment_waits
from rlhfsim.rollout.untimed import UNTIMED_SPREAD, kernel_spread
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile, node_group
from rlhfsim.specs.model.presets import preset
from rlhfsim.specs.placement.layout import Dispatcher, RolloutLayout
from rlhfsim.specs.placement.speculation import Speculation
from rlhfsim.specs.workload.lengths import Fixed, LogNormal
from rlhfsim.specs.workload.workload import Environment

H100 = load_profile("h100_sxm")
LLAMA, MOE, LITE = preset("llama-3.1-8b"), preset("qwen3-30b-a3b"), preset("deepseek-v2-lite")
NEMOTRON, SPARSE, OSS = preset("nemotron-h-8b"), preset("deepseek-v3.2"), preset("gpt-oss-20b")
PLANTED = {
    "hbm_efficiency": 0.8,
    "decode_step_overhead": 1e-3,
    "decode_layer_overhead": 2e-5,
    "decode_sequence_overhead": 3e-6,
    "eager_layer_overhead": 4e-4,
    "eager_decode_layer_time": 7e-4,
    "prefill_overhead": 5e-3,
    "prefill_efficiency": 0.6,
    "prompt_reuse": 0.9,
    "adapter_layer_time": 1e-3,
    "adapter_sequence_time": 1e-4,
    "rollout_step_overhead": 4e-3,
    "sampling_passes": 6.0,
}


@pytest.fixture(scope="module")
def device() -> Device:
    known = {n: c for n, c in H100.coefficients.items() if not any(n.startswith(f"{p}_") for p in PLANTED)}
    for name, value in PLANTED.items():
        known[name] = replace(known[name], value=value, low=value * 0.9, high=value * 1.1)
    profile = replace(H100, coefficients=known)
    return device_of(NodeGroup(profile=profile, gpus=64, gpus_per_node=8))


def total(step: EngineStep) -> float:
    return float(np.sum(step.seconds))


# --- kernels ----------------------------------------------------------------------------------------------


def test_a_kernel_is_on_the_larger_of_its_two_roofs(device: Device) -> None:
    flop, size = H100.peak["bf16"].value, H100.hbm.value
    compute = kernel(device, 0.1, flop=2 * flop, size=size, precision="bf16")
    assert (float(compute.compute), float(compute.hbm)) == (2, 0)
    read = kernel(device, 5.0, flop=flop, size=2 * size, precision="bf16")
    assert (float(read.compute), float(read.hbm)) == (0, 5)
    assert device.peak("fp8") == H100.peak["fp8"].value
    assert device.peak("fp4") == H100.peak["bf16"].value
    parts = on("network", 2.0) + on("nvlink", 3.0) + on("overhead", 4.0) + compute + read
    assert parts == (2, 5, 3, 2, 4)
    assert parts.scaled(2.0) == (4, 10, 6, 4, 8)
    assert total(parts) == 16


def test_products_take_the_curve_of_their_format(device: Device) -> None:
    matrix = Matrix(name="x", n=4096, k=8192)
    rows = np.array(64.0)
    bf16, fp8 = (float(device.curves.gemm(64, 4096, 8192, p)) for p in ("bf16", "fp8"))
    assert total(gemm(device, matrix, rows, "bf16")) == pytest.approx(bf16)
    assert total(gemm(device, matrix, rows, "fp8")) == pytest.approx(fp8)
    assert total(gemm(device, matrix, rows, "fp8", fused=True)) == pytest.approx(min(fp8, bf16))
    assert total(gemm(device, replace(matrix, linear=False), rows, "fp8")) == pytest.approx(bf16)
    assert total(gemm(device, matrix, np.array(0.0), "bf16")) == pytest.approx(
        float(device.curves.gemm(1, 4096, 8192))
    )


def test_products_of_weights_stored_in_4_bit_keep_the_efficiency_of_bf16(device: Device) -> None:
    """Read-bound: 4.25 of 16 bits; compute-bound: as long as the BF16 kernel."""
    matrix = Matrix(name="x", n=4096, k=8192)
    one = total(gemm(device, matrix, np.array(1.0), "bf16"))
    narrow = 17 / 32 / 2
    assert total(gemm(device, matrix, np.array(1.0), "mxfp4")) == pytest.approx(one * narrow)
    many = np.array(16384.0)
    assert total(gemm(device, matrix, many, "mxfp4")) == pytest.approx(
        total(gemm(device, matrix, many, "bf16"))
    )
    flop = np.array(H100.peak["bf16"].value)  # one second of products, two of reading in BF16
    step = weight_only(device, on("hbm", 3.0), flop, H100.hbm.value, "mxfp4")
    assert total(step) == pytest.approx(3 * 1 / 2)


def test_nvfp4_is_computed_in_fp4_where_the_gpu_can_and_widened_elsewhere(device: Device) -> None:
    matrix, rows = Matrix(name="x", n=4096, k=8192), np.array(1.0)
    bf16 = total(gemm(device, matrix, rows, "bf16"))
    assert total(gemm(device, matrix, rows, "nvfp4")) == pytest.approx(bf16 * (0.5 + 1 / 16) / 2)
    blackwell = device_of(node_group("b200", 8))
    assert total(gemm(blackwell, matrix, rows, "nvfp4")) == pytest.approx(
        float(blackwell.curves.gemm(1, 4096, 8192, "fp4"))
    )
    layout, many = RolloutLayout(tp=8, ep=8, precision="nvfp4"), np.array(64.0)
    moe, curves = OSS.moe, blackwell.curves
    assert moe is not None
    assert total(experts.expert_work(blackwell, OSS, layout, many, "nvfp4")) == pytest.approx(
        float(curves.moe(64.0, OSS.hidden, moe.expert_ffn, moe.top_k, moe.num_experts, 1, 8, "fp4"))
    )


@pytest.mark.parametrize(
    ("model", "gpu", "precision", "wide"),
    [
        ("qwen3-32b", "h100", "fp8", False),
        ("qwen3-32b", "b200", "nvfp4", False),
        ("qwen3-32b", "h100", "nvfp4", True),  # widened to BF16: a prior
        ("gpt-oss-20b", "b200", "mxfp4", True),
        ("qwen3.5-397b-a17b", "b200", "bf16", True),  # states of the delta net
        ("glm-5", "b200", "fp8", True),  # the indexer
    ],
)
def test_kernels_that_nobody_timed_have_a_wide_interval(
    model: str, gpu: str, precision: Any, wide: bool
) -> None:
    gpus, layout = device_of(node_group(gpu, 64)), RolloutLayout(tp=8, ep=8, precision=precision)
    spread = kernel_spread(gpus, preset(model), layout)
    assert spread == (UNTIMED_SPREAD if wide else CURVE_SPREAD)
    asked = Requests(prompts=8, samples=1, prompt_lengths=Fixed(value=100), response_lengths=Fixed(value=50))
    parts = generation.generate(gpus, preset(model), layout, asked, kv_tokens=1e6).cost.parts
    assert {p.spread for p in parts if p.resource in ("compute", "hbm")} == {gpus.borrowed(spread)}


def test_collectives_of_one_replica(device: Device) -> None:
    assert total(collective(device, "all_reduce", np.array(1e6), 1)) == 0
    inside = float(
        min(device.curves.collective("all_reduce", 1e6, 4), device.curves.custom_all_reduce(1e6, 4))
    )
    near = collective(device, "all_reduce", np.array(1e6), 4)
    assert (float(near.nvlink), total(near)) == (pytest.approx(inside), pytest.approx(inside))
    gather = collective(device, "all_gather", np.array(1e6), 4)
    assert total(gather) == pytest.approx(float(device.curves.collective("all_gather", 1e6, 4)))
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        far = collective(device, op, np.array(1e6), 16)
        expected = getattr(collectives, op)(device, 1e6, Group(ranks=16, per_domain=8))
        assert float(far.network) == pytest.approx(expected)
    assert total(tp_all_reduce(device, LLAMA, np.array(10.0), 4)) == pytest.approx(
        total(collective(device, "all_reduce", np.array(10 * 4096 * 2.0), 4))
    )


# --- what nobody timed ------------------------------------------------------------------------------------


def test_scans_states_and_indexers_by_hand(device: Device) -> None:
    bf16, hbm = H100.peak["bf16"].value, H100.hbm.value
    scan = 24 * NEMOTRON.recurrent.scan_flop * 1000 / 2 / (bf16 * device["scan_efficiency"])
    assert total(untimed.scan(device, NEMOTRON, 2, 1000.0)) == pytest.approx(scan)
    state = 2 * NEMOTRON.state_bytes * 10 * 3 / 2 / (hbm * device["state_efficiency"])
    assert total(untimed.state_update(device, NEMOTRON, 2, np.array(10.0), 3)) == pytest.approx(state)
    assert total(untimed.state_update(device, NEMOTRON, 2, np.array(10.0))) == pytest.approx(state / 3)
    for step in (
        untimed.scan(device, LLAMA, 1, 10.0),
        untimed.state_update(device, LLAMA, 1, np.array(1.0)),
        untimed.index(device, LLAMA, 1e9, 1e6),
    ):
        assert total(step) == 0
    at = SPARSE.attention
    flop, size = 61 * at.index_flop(1.0), 61 * at.index_bytes
    compute = flop * 1e9 / (H100.peak["fp8"].value * device["indexer_efficiency"])
    assert total(untimed.index(device, SPARSE, 1e9, 1.0)) == pytest.approx(compute)
    assert total(untimed.index(device, SPARSE, 1.0, 1e9)) == pytest.approx(size * 1e9 / (hbm * 0.8))


# --- decode -----------------------------------------------------------------------------------------------


def test_work_of_tokens_adds_up_products_and_reductions(device: Device) -> None:
    rows, layout = np.array(64.0), RolloutLayout(tp=2)
    memory = 14 * 64 * 4096 * 2 / (H100.hbm.value * 0.8)
    products = sum(
        total(gemm(device, m, rows, "bf16")) for m in layers.layer_matrices(LLAMA, 2, kind=LLAMA.kinds[0])
    )
    reduce = total(tp_all_reduce(device, LLAMA, rows, 2))
    got = total(decode.token_work(device, LLAMA, layout, rows))
    assert got == pytest.approx(LLAMA.launched_layers * memory + 32 * (products + 2 * reduce))
    fp8 = total(decode.token_work(device, LLAMA, RolloutLayout(tp=2, precision="fp8"), rows))
    some = total(decode.token_work(device, LLAMA, RolloutLayout(tp=2, precision="fp8", bf16_layers=8), rows))
    assert some == pytest.approx(0.25 * got + 0.75 * fp8)
    mixed = decode.token_work(device, LLAMA, RolloutLayout(tp=2, precision="fp8", bf16_attention=True), rows)
    attention = {
        p: sum(total(gemm(device, m, rows, p, fused=True)) for m in layers.attention_matrices(LLAMA, 2))
        for p in ("bf16", "fp8")
    }
    assert total(mixed) == pytest.approx(fp8 + 32 * (attention["bf16"] - attention["fp8"]))


def test_the_head_multiplies_gathers_and_samples(device: Device) -> None:
    rows = np.array(64.0)
    sampling = 6 * 4 * 64 * 128256 / 2 / (H100.hbm.value * 0.8)
    gather = total(collective(device, "all_gather", np.array(64 * 128256 * 2.0), 2))
    product = total(gemm(device, layers.head_matrix(LLAMA, 2), rows, "bf16"))
    assert total(decode.head_work(device, LLAMA, RolloutLayout(tp=2), rows)) == pytest.approx(
        sampling + gather + product
    )


def test_attention_of_new_tokens_by_hand(device: Device) -> None:
    n, c = np.array(64.0), np.array(4000.0)

    def core(model, context, tokens=1) -> float:
        return total(
            decode._decode_core(device, model, RolloutLayout(), n, np.array(float(context)), "vllm", tokens)
        )

    assert core(LLAMA, 4000) == pytest.approx(float(device.curves.decode_attention(64, 4000, 32, 8, 128)))
    assert core(LLAMA, 0) == core(LLAMA, 1)
    full = total(decode.decode_attention(device, LLAMA, RolloutLayout(), n, c))
    assert full == pytest.approx(32 * core(LLAMA, 4000))
    mixed = total(decode.decode_attention(device, OSS, RolloutLayout(), n, c))
    assert mixed == pytest.approx(12 * core(OSS, 4000) + 12 * core(OSS, 128))
    sparse = total(decode.decode_attention(device, SPARSE, RolloutLayout(), n, c))
    scores = total(untimed.index(device, SPARSE, 64 * 4000.0, 64 * 4000.0))
    assert sparse == pytest.approx(61 * core(SPARSE, 2048) + scores)
    state = total(untimed.state_update(device, NEMOTRON, 1, n, 2))
    hybrid = total(decode.decode_attention(device, NEMOTRON, RolloutLayout(), n, c, tokens=2))
    assert hybrid == pytest.approx(4 * core(NEMOTRON, 4000, 2) + state)


def test_attention_is_never_below_its_bytes_and_flop(device: Device) -> None:
    """Many tokens that share one reading of the cache are bound by 4 a d n c FLOP each."""
    n, c = np.array(64.0), np.array(4000.0)
    step = decode._decode_core(device, LLAMA, RolloutLayout(), n, c, "vllm", 1000)
    flop = 2 * 32 * 256 * 64 * 4000 * 1000.0
    assert float(step.compute) == pytest.approx(flop / H100.peak["bf16"].value)
    mla = decode._decode_core(device, LITE, RolloutLayout(), n, c, "vllm", 1000)
    flop = 2 * 16 * (2 * 512 + 64) * 64 * 4000 * 1000.0
    assert float(mla.compute) == pytest.approx(flop / H100.peak["bf16"].value)


def test_a_pipeline_is_bound_by_the_way_of_a_token_or_by_its_slowest_stage(device: Device) -> None:
    layout = RolloutLayout(pp=4)
    layers_, head = on("hbm", 8.0), on("hbm", 1.0)
    hop = total(decode.pipeline_hop(device, LLAMA, layout, np.array(8.0)))
    one = total(decode.pipelined(device, LLAMA, layout, np.array(1.0), layers_, head))
    assert one == pytest.approx(9 + 4 * total(decode.pipeline_hop(device, LLAMA, layout, np.array(1.0))))
    many = total(decode.pipelined(device, LLAMA, layout, np.array(32.0), layers_, head))
    assert many == pytest.approx(4 * (8 / 4 + 1 + hop))
    assert total(decode.pipelined(device, LLAMA, RolloutLayout(), np.array(32.0), layers_, head)) == 9
    near = collectives.p2p(device, 8 * 4096 * 2.0, False)
    assert hop == pytest.approx(near)
    far = decode.pipeline_hop(device, LLAMA, RolloutLayout(pp=4, tp=4), np.array(8.0))
    assert float(far.network) == pytest.approx(collectives.p2p(device, 8 * 4096 * 2.0, True))


def test_time_that_kernels_do_not_show_by_hand(device: Device) -> None:
    """Two micro-batches of a scheduler, 32 layers, 100 sequences; without graphs 32 launches at least."""

    def of(layout: RolloutLayout, n: float, gpu: float, **options) -> float:
        return total(
            decode.overhead(device, LLAMA, layout, np.array(n), np.array(gpu), engine="vllm", **options)
        )

    launched = LLAMA.launched_layers
    base = 1e-3 + launched * 2e-5
    assert of(RolloutLayout(), 100, 1e-3) == pytest.approx(base + 3e-4)
    assert of(RolloutLayout(pp=2), 100, 1e-3) == pytest.approx(base + 1e-3 + 3e-4)
    bare = RolloutLayout(cuda_graphs=False)
    assert of(bare, 100, 1e-3) == pytest.approx(base + 3e-4 + launched * 7e-4 - 1e-3)
    assert of(bare, 100, 1.0) == pytest.approx(base + 3e-4)
    assert of(RolloutLayout(), 1000, 1e-3) == pytest.approx(base + 3e-3 + launched * 4e-4 - 1e-3)
    assert of(RolloutLayout(), 100, 1e-3, rows=np.array(1000.0)) == pytest.approx(
        base + 3e-4 + launched * 4e-4 - 1e-3
    )
    assert of(RolloutLayout(pp=2), 1000, 1e-3) == pytest.approx(base + 1e-3 + 3e-3)


def test_a_step_of_drafts_by_hand(device: Device) -> None:
    n, c = np.array(16.0), np.array(1000.0)
    grams = Speculation(method="ngram", draft_tokens=3, acceptance=0.5)
    layout = RolloutLayout(speculation=grams)
    verify = decode.gpu_work(device, LLAMA, layout, n, c, tokens=4)
    own = total(decode.overhead(device, LLAMA, layout, n, verify.seconds, engine="vllm", rows=n * 4))
    got = total(speculative_step(device, LLAMA, layout, grams, n, c))
    assert got == pytest.approx(total(verify) + own)


# --- experts ----------------------------------------------------------------------------------------------


def test_experts_of_a_step_by_hand(device: Device) -> None:
    """Four attention ranks of 100 rows each meet in the experts of eight GPUs."""
    layout, rows = RolloutLayout(tp=2, attention_dp=4, ep=4), np.array(100.0)
    assert experts.expert_layout(layout) == (4, 2)
    assert experts.expert_layout(replace(layout, ep=8)) == (8, 1)
    work = total(experts.expert_work(device, MOE, layout, np.array(400.0), "bf16"))
    assert work == pytest.approx(float(device.curves.moe(400, 2048, 768, 8, 128, 2, 4, "bf16")))
    router = total(gemm(device, layers.expert_matrices(MOE, 1)[0], rows, "bf16"))
    assert total(experts.experts(device, MOE, layout, rows, "bf16")) == pytest.approx(work + router)
    shared = sum(total(gemm(device, m, rows, "bf16")) for m in layers.shared_matrices(LITE, 2))
    lite = total(experts.expert_work(device, LITE, layout, np.array(400.0), "bf16"))
    router = total(gemm(device, layers.expert_matrices(LITE, 1)[0], rows, "bf16"))
    assert total(experts.experts(device, LITE, layout, rows, "bf16")) == pytest.approx(lite + router + shared)
    assert experts.expert_precision("fp8") == "fp8_block"
    assert experts.expert_precision("bf16") == "bf16"


def test_every_layer_with_experts_brings_tokens_to_them(device: Device) -> None:
    """Two dispatchers of one layout: the passes differ by what their exchanges do, once a layer."""
    rows, wide = np.array(100.0), RolloutLayout(tp=2, attention_dp=8, ep=16)
    ways = [replace(wide, dispatcher=by) for by in ("allgather", "deepep-ll")]
    passes = [total(decode.token_work(device, LITE, way, rows)) for way in ways]
    each = [total(collective_time.exchange(device, LITE, way, rows)) for way in ways]
    assert each[0] != pytest.approx(each[1])
    assert passes[0] - passes[1] == pytest.approx(LITE.num_moe_layers * (each[0] - each[1]))


def test_tokens_come_to_experts_and_go_back_by_hand(device: Device) -> None:
    rows = np.array(100.0)
    plain = total(collective_time.exchange(device, MOE, RolloutLayout(tp=4, ep=4), rows))
    assert plain == pytest.approx(total(tp_all_reduce(device, MOE, rows, 4)))
    size = np.array(100 * 4 * 2048 * 2.0)
    both = sum(total(collective(device, op, size, 8)) for op in ("all_gather", "reduce_scatter"))
    assert total(
        collective_time.exchange(device, MOE, RolloutLayout(tp=2, attention_dp=4, ep=8), rows)
    ) == pytest.approx(both)
    wide = RolloutLayout(tp=2, attention_dp=8, ep=16, precision="fp8")
    where = Group(ranks=16, per_domain=8)
    sent = np.array(50 * 8 * 2048.0)
    there = collectives.one_sided(device, sent * (1 + 4 / 128), where) + collectives.one_sided(
        device, sent * 2, where
    )
    ring = sum(total(collective(device, op, 2 * size, 16)) for op in ("all_gather", "reduce_scatter"))
    got = collective_time.exchange(device, MOE, wide, rows)
    assert float(got.network) == pytest.approx(min(ring, float(there)))
    bf16 = collective_time.exchange(device, MOE, replace(wide, precision="bf16"), rows)
    assert float(bf16.network) == pytest.approx(
        min(ring, 2 * float(collectives.one_sided(device, sent * 2, where)))
    )
    cut = collective_time.exchange(device, MOE, replace(wide, ep=8), rows)
    assert total(cut) == pytest.approx(ring)


def test_a_named_dispatcher_of_the_rollout_is_priced_by_hand(device: Device) -> None:
    """50 tokens of a GPU to 8 of 128 experts: all gathered, or sent there in FP8 with scales and back in BF16."""
    wide = RolloutLayout(tp=2, attention_dp=8, ep=16, precision="fp8")
    where = Group(ranks=16, per_domain=8)

    def network(by: Dispatcher | None, rows: float = 100.0) -> float:
        return float(
            collective_time.exchange(device, MOE, replace(wide, dispatcher=by), np.array(rows)).network
        )

    def sent(by: Dispatcher, tokens: float, there: float = 1 + 4 / 128) -> float:
        ways = (2048 * there, 2048 * 2.0)
        return sum(
            collectives.dispatch(device, tokens, size, Routing(top_k=8), where, by=by) for size in ways
        )

    size = np.array(100 * 8 * 2048 * 2.0)
    ring = sum(total(collective(device, op, size, 16)) for op in ("all_gather", "reduce_scatter"))
    assert network("allgather") == pytest.approx(ring)
    assert network("deepep-ll") == pytest.approx(sent("deepep-ll", 50))
    assert network("deepep-ll", 8192) == pytest.approx(sent("deepep", 4096))
    assert network("deepep") == pytest.approx(sent("deepep", 50))
    assert network("alltoall") == pytest.approx(sent("alltoall", 50, there=2.0))
    one_domain = RolloutLayout(tp=1, attention_dp=8, ep=8, dispatcher="deepep-ll")
    inside = collective_time.exchange(device, MOE, one_domain, np.array(50.0))
    assert float(inside.nvlink) == pytest.approx(total(inside))
    assert not replace(wide, dispatcher="deepep").captured


def test_a_dispatcher_that_is_not_said_spans_the_cheapest_and_the_dearest(device: Device) -> None:
    wide = RolloutLayout(tp=2, attention_dp=8, ep=16)
    low, high = collective_time.exchange_spread(device, MOE, wide)
    rows = np.array(float(wide.max_num_seqs))
    one = total(collective_time.exchange(device, MOE, wide, rows))
    ways = [replace(wide, dispatcher=by) for by in collective_time.GENERATES_WITH]
    each = [total(collective_time.exchange(device, MOE, way, rows)) / one for way in ways]
    assert (low, high) == (min(1.0, *each), max(each))
    assert high > 1.5
    for said in (ways[0], RolloutLayout(tp=8, ep=8)):
        assert collective_time.exchange_spread(device, MOE, said) == (1.0, 1.0)
    cost = Cost(parts=(part("network", 2.0, "nic_efficiency"), part("hbm", 3.0, "hbm_efficiency")))
    assert cost.widened("network", (0.5, 2.0)).interval == pytest.approx((4.0, 7.0))


def test_experts_in_4_bit_read_those_that_tokens_touch(device: Device) -> None:
    """gpt-oss-20b: 4 of 32; ten tokens touch 32 (1 - (7/8)^10) = 23.6 experts."""
    layout = RolloutLayout(precision="mxfp4", ep=1)
    step = experts.expert_work(device, OSS, replace(layout, precision="bf16"), np.array(10.0), "bf16")
    params = (3 if OSS.gated else 2) * OSS.expert_width * OSS.moe.expert_ffn
    touched = 32 * (1 - (7 / 8) ** 10)
    expected = weight_only(device, step, np.array(2.0 * params * 10 * 4), params * touched, "mxfp4")
    got = total(experts.expert_work(device, OSS, layout, np.array(10.0), "bf16"))
    assert got == pytest.approx(total(expected))
    assert got < total(step)


# --- prefill ----------------------------------------------------------------------------------------------


def test_pairs_of_a_prompt_by_hand() -> None:
    assert prefill._pairs(100, 0, None) == 5000
    assert prefill._pairs(100, 30, None) == 5000 + 3000
    assert prefill._pairs(128, 0, 1000) == pytest.approx(128 * 128 / 2)
    assert prefill._pairs(128, 500, 100) == 128 * 100
    # the first 32 of 128 queries see all before them, the rest 32: in 64 pieces of two
    assert prefill._pairs(128, 0, 32) == pytest.approx(16 * 32 + 96 * 32, rel=0.01)


def test_attention_of_prompts_by_hand(device: Device) -> None:
    one = total(prefill._prefill_core(device, LLAMA, RolloutLayout(), 4.0, 1000.0, 0.0))
    assert one == pytest.approx(float(device.curves.prefill_attention(4, 1000, 32, 8, 128, 0)))
    assert total(prefill.prefill_attention(device, LLAMA, RolloutLayout(), 4.0, 1000.0)) == pytest.approx(
        32 * one
    )
    core = total(prefill._prefill_core(device, OSS, RolloutLayout(), 4.0, 1000.0, 0.0))
    share = prefill._pairs(1000, 0, 128) / 500_000
    got = total(prefill.prefill_attention(device, OSS, RolloutLayout(), 4.0, 1000.0))
    assert got == pytest.approx(12 * core + 12 * share * core)
    core = total(prefill._prefill_core(device, SPARSE, RolloutLayout(), 2.0, 8192.0, 0.0))
    assert core == pytest.approx(float(device.curves.mla_prefill(2, 8192, 128, 0)))
    share = prefill._pairs(8192, 0, 2048) / (8192**2 / 2)
    index = total(untimed.index(device, SPARSE, 8192.0**2, 2 * 8192.0))
    got = total(prefill.prefill_attention(device, SPARSE, RolloutLayout(), 2.0, 8192.0))
    assert got == pytest.approx(61 * share * core + index)
    scan = total(untimed.scan(device, NEMOTRON, 1, 4000.0))
    core = total(prefill._prefill_core(device, NEMOTRON, RolloutLayout(), 4.0, 1000.0, 0.0))
    assert total(prefill.prefill_attention(device, NEMOTRON, RolloutLayout(), 4.0, 1000.0)) == pytest.approx(
        4 * core + scan
    )


@pytest.mark.parametrize(("pp", "prompts"), [(1, 16.0), (2, 16.0), (1, 2.0)])
def test_prefill_in_passes_of_a_budget_by_hand(device: Device, pp: int, prompts: float) -> None:
    """16 prompts of 1000 tokens in passes of 4000: four, and one more to fill a pipeline of two."""
    layout = RolloutLayout(max_batched_tokens=4000, pp=pp)
    tokens = min(4000.0, prompts * 1000)
    passes = prompts * 1000 / tokens
    work = total(decode.token_work(device, LLAMA, layout, np.array(tokens)))
    work += total(decode.head_work(device, LLAMA, layout, np.array(prompts / passes)))
    work += pp * total(decode.pipeline_hop(device, LLAMA, layout, np.array(tokens))) if pp > 1 else 0
    work += total(prefill.prefill_attention(device, LLAMA, layout, prompts, 1000.0)) / passes
    gpu = work / 0.6
    eager = 5e-3 + max(0.0, LLAMA.launched_layers * 4e-4 - gpu)
    expected = (gpu + eager) * (passes + pp - 1) / pp
    assert total(prefill.prefill(device, LLAMA, layout, prompts, 1000.0)) == pytest.approx(expected)


def test_prompts_of_a_group_are_computed_once_where_they_are_kept(device: Device) -> None:
    layout = RolloutLayout()

    def alone(prompts: float, model=LLAMA) -> float:
        return total(prefill.prefill(device, model, layout, prompts, 1000.0))

    group = total(prefill.group_prefill(device, LLAMA, layout, 64.0, 8.0, 1000.0))
    assert group == pytest.approx(alone(0.9 * 8 + 0.1 * 64))
    each = total(prefill.group_prefill(device, LLAMA, layout, 64.0, 8.0, 1000.0, shared=False))
    assert each == pytest.approx(alone(64.0))
    states = total(prefill.group_prefill(device, NEMOTRON, layout, 64.0, 8.0, 1000.0))
    assert states == pytest.approx(alone(64.0, NEMOTRON))
    assert alone(0.0) == total(prefill.prefill(device, LLAMA, layout, 4.0, 0.0)) == 0


def test_time_between_tokens_solves_its_quadratic() -> None:
    """X = (o - 1) tau + (n - 1) P X / (X + P + tau)."""
    terms = Terms(
        decode=0.01, mixed=0.3, spared=0.1, chunks=2.0, layers=10.0, sequences=5.0, steps=20.0, launch=0.4
    )
    tau = 0.01 + 0.002 + 1e-4 * 10 + 1e-3 * 5
    each = 0.5 * 0.2 + 2 * (0.03 + 0.4 - 0.15)
    x = 20 * output_time(terms, layer=1e-4, step=0.002, sequence=1e-3, interference=0.5, overhead=0.03)
    assert x == pytest.approx(20 * tau + 4 * each * x / (x + each + tau))
    quick = replace(terms, mixed=0.9, spared=1.0)  # nothing but the overhead delays
    x = 20 * output_time(quick, layer=1e-4, step=0.002, sequence=1e-3, interference=0.5, overhead=0.03)
    assert x == pytest.approx(20 * tau + 4 * 0.06 * x / (x + 0.06 + tau))
    one = replace(terms, sequences=1.0)
    assert output_time(
        one, layer=1e-4, step=0.002, sequence=1e-3, interference=0.5, overhead=0.03
    ) == pytest.approx(0.014)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_terms_of_serving_by_hand(device: Device, engine) -> None:
    """64 requests of 2000 and 101 tokens: 100 steps, chunks of what is left of 1024."""
    layout = RolloutLayout(max_batched_tokens=1024)
    alone = engine == "sglang"
    got = serving_terms(device, LLAMA, layout, 64.0, 2000.0, 101.0, engine=engine)
    chunks = 2.0 if alone else 3.0  # 1024, or 960 beside the decode tokens
    assert (got.steps, got.chunks, got.sequences) == (100, chunks, 64)
    rows = np.array(2000 / chunks + (0 if alone else 64))
    mixed = chunks * total(decode.token_work(device, LLAMA, layout, rows, engine))
    mixed += total(prefill.prefill_attention(device, LLAMA, layout, 1.0, 2000.0))
    assert got.mixed == pytest.approx(mixed)
    base = total(decode.token_work(device, LLAMA, layout, np.array(64.0), engine))
    assert got.spared == pytest.approx(0 if alone else 3 * base)
    assert got.launch == pytest.approx(LLAMA.launched_layers * 4e-4)
    work = decode.gpu_work(device, LLAMA, layout, np.array(64.0), np.array(2050.5), engine=engine)
    assert got.decode == pytest.approx(total(work))
    short = serving_terms(device, LLAMA, layout, 64.0, 100.0, 9.0, engine=engine)
    assert short.chunks == pytest.approx(1 / 8)  # eight end in a step and share a pass


# --- batches ----------------------------------------------------------------------------------------------


def test_steps_of_a_table_by_hand(device: Device) -> None:
    layout = RolloutLayout(tp=2)
    table = generation.step_table(device, LLAMA, layout, 100.0, 1000.0)
    assert (table.sequences[0], table.sequences[-1], table.context[0], table.context[-1]) == (1, 128, 1, 1024)
    assert set(table.sequences.tolist()) == {1, 2, 4, 8, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128}
    own = float(decode.decode_step(device, LLAMA, layout, 48.0, 1024.0).seconds)
    row = table.sequences.tolist().index(48)
    assert table.seconds[5, row, -1] == pytest.approx(own)
    worker = generation.step_table(device, LLAMA, layout, 100.0, 1000.0, worker=True)
    assert worker.seconds[5, row, -1] == pytest.approx(own + 4e-3)
    lora = generation.step_table(device, LLAMA, layout, 100.0, 1000.0, adapters=True)
    assert lora.seconds[5, row, -1] == pytest.approx(max(own, 32e-3 + 48e-4))
    tiny = generation.step_table(device, LLAMA, layout, 1.0, 10.0)
    assert (tiny.sequences.tolist(), tiny.context[1], tiny.context[-1]) == ([1, 2], 8, 16)
    drafts = Speculation(method="ngram", draft_tokens=3, acceptance=0.5)
    quick = generation.step_table(device, LLAMA, replace(layout, speculation=drafts), 100.0, 1000.0)
    whole = total(
        speculative_step(
            device, LLAMA, replace(layout, speculation=drafts), drafts, np.array(48.0), np.array(1024.0)
        )
    )
    assert quick.seconds[5, row, -1] == pytest.approx(whole / (1 + 0.5 + 0.25 + 0.125))
    ranks = generation.step_table(device, MOE, RolloutLayout(attention_dp=4, ep=4), 100.0, 1000.0)
    each = float(decode.decode_step(device, MOE, RolloutLayout(attention_dp=4, ep=4), 12.0, 1024.0).seconds)
    assert ranks.seconds[5, row, -1] == pytest.approx(each)


def test_host_seconds_of_steps_rest_on_what_they_are_for(device: Device) -> None:
    busy = {"compute": 1.0, "hbm": 2.0, "nvlink": 0.0, "network": 0.0, "overhead": 3.0, "tail": 0.5}
    cost = generation.steps_cost(device, RolloutLayout(), busy, 1000.0, "vllm", True)
    host = {p.rests_on: p.seconds for p in cost.parts if p.resource == "overhead"}
    assert host == {"decode_step_overhead": pytest.approx(1.0), "rollout_step_overhead": pytest.approx(2.0)}
    assert cost.seconds == pytest.approx(6.5)
    cost = generation.steps_cost(device, RolloutLayout(pp=2, cuda_graphs=False), busy, 1000.0, "vllm", False)
    host = {p.rests_on: p.seconds for p in cost.parts if p.resource == "overhead"}
    assert host == {"decode_step_overhead": pytest.approx(2.0), "eager_decode_layer_time": pytest.approx(1.0)}


def test_sequences_that_lose_their_cache_prefill_it_again() -> None:
    """10 of 20 fit 100 tokens each at the start, four at the end: 1000 ln(10/4) tokens."""
    assert schedule._preemption(20, 4, 16, 84.0, 1000.0) == (6, pytest.approx(1000 * math.log(10 / 4)))
    assert schedule._preemption(20, 4, 8, 84.0, 1000.0) == (4, pytest.approx(1000 * math.log(2)))
    assert schedule._preemption(20, 10, 16, 84.0, 1000.0) == (0, 0)
    assert schedule._preemption(4, 4, 16, 84.0, 1000.0) == (0, 0)


def test_expected_lengths_end_with_the_expected_longest() -> None:
    lengths = LogNormal(mean=1000, sigma=0.8, max=8192)
    asked = Requests(prompts=16, samples=4, prompt_lengths=Fixed(value=10), response_lengths=lengths)
    drawn = schedule.expected_lengths(asked)
    assert len(drawn) == 64
    assert (np.diff(drawn) >= 0).all()
    longest = schedule.stats(lengths).expected_max(64)
    assert drawn[-1] == round(max(longest, schedule.stats(lengths).representative(64).max()))
    one = replace(asked, prompts=1, samples=1)
    assert schedule.expected_lengths(one).tolist() == [
        round(float(schedule.stats(lengths).representative(1)[0]))
    ]
    short = replace(asked, response_lengths=Fixed(value=1))
    assert schedule.expected_lengths(short).tolist() == [1] * 64


def test_prompts_are_dealt_with_their_samples() -> None:
    lengths = np.arange(1.0, 13.0)
    dealt = schedule.deal(lengths, 2, 3, 0)
    assert dealt.shape == (2, 6)
    assert sorted(dealt.ravel().tolist()) == lengths.tolist()
    groups = np.random.default_rng(0).permutation(lengths).reshape(4, 3)
    assert dealt[0].tolist() == [*groups[0], *groups[2]]
    spread = schedule.deal(lengths, 5, 3, 0)  # four prompts on five replicas: samples apart
    assert spread.shape == (5, 3)
    assert int((spread == 0).sum()) == 3


def test_two_buffers_take_turns_by_hand() -> None:
    """Generation of 2 s and answers of 3 s a turn, 4 turns: (T - 1) max(2 g, g + a) + 2 g + a."""
    cost = Cost(parts=(part("hbm", 8.0, "x"),))

    def ends(workers: int, buffers: int = 2) -> tuple[float, ...]:
        world = Environment(turns=4, seconds_per_turn=3.0, workers=workers, sigma=0.0)
        return environment.Turns(
            buffers=(cost,) * buffers, sequences=(10,) * buffers, environment=world
        ).ends()

    assert max(ends(20)) == 3 * max(4, 5) + 4 + 3
    assert max(ends(10)) == 2 * 4 * 3 + 2
    assert ends(10, 1) == (4 * 5,)
    assert ends(5, 1) == (4 * 8,)
    assert environment.halves(7, True) == (4, 3)
    assert (environment.halves(7, False), environment.halves(1, True), environment.halves(2, True)) == (
        (7,),
        (1,),
        (1, 1),
    )
    assert environment._finish((3.0, 1.0), (16, 48)) == (1.0,) * 48 + (3.0,) * 16


def test_odds_of_turns_and_delays_by_hand() -> None:
    odds = _odds(2.0, 4)
    assert (1 - (1 - odds) ** 4) / odds == pytest.approx(2)
    assert _odds(1.0, 4) == pytest.approx(1)
    late = delayed(np.array([10.0, 30.0]), np.array([4.0, 0.0]), 0.2)
    assert late == pytest.approx([30 * 40 / 60, 30 * 40 / 60])


def test_sequences_that_run_on_an_engine_that_never_drains() -> None:
    asked = Requests(prompts=16, samples=4, prompt_lengths=Fixed(value=10), response_lengths=Fixed(value=100))
    run = steady_state._running
    assert run(RolloutLayout(max_num_seqs=8, dp=2), asked, 2.0, 1e9) == 8
    assert run(RolloutLayout(dp=2), asked, 2.0, 5.0) == 5
    assert run(RolloutLayout(dp=2), asked, 2.0, 1e9) == pytest.approx(2 * 64 / 2)
    assert run(RolloutLayout(dp=2), asked, 0.25, 1e9) == pytest.approx(0.75 * 64 / 2)
    assert run(RolloutLayout(dp=1000), asked, 1.0, 1e9) == 1
    assert [steady_state.batches_at_once(s) for s in (0.0, 0.25, 0.75, 3.0)] == [0.5, 0.75, 1, 3]


def test_a_steady_state_by_hand(device: Device) -> None:
    """40 sequences run of 80; a step takes 1 + 0.1 n + 0.001 n c."""
    layout = RolloutLayout(dp=2)
    asked = Requests(
        prompts=20, samples=4, prompt_lengths=Fixed(value=100), response_lengths=Fixed(value=400)
    )
    got = steady_state.steady_state(
        device, LLAMA, layout, asked, staleness=1.0, interrupted=False, kv_tokens=1e9
    )
    assert (got.running, got.context) == (pytest.approx(40), 300)
    table = generation.step_table(device, LLAMA, layout, 40.0, 500.0)
    step = sum(steady_state._one_step(table, 40.0, 300.0).values())
    assert got.step == pytest.approx(step)
    first = total(prefill.group_prefill(device, LLAMA, layout, 40.0, 4.0, 100.0))
    work = first + step * 80 * 400 / (2 * 40)
    assert got.latency == pytest.approx(400 * step)
    assert got.cost.seconds == pytest.approx(max(work, got.latency))
    cut = steady_state.steady_state(
        device, LLAMA, layout, asked, staleness=1.0, interrupted=True, kv_tokens=1e9
    )
    again = total(prefill.prefill(device, LLAMA, layout, 40.0, 300.0))
    assert cut.interrupt.seconds == pytest.approx(again)
    assert cut.cost.seconds == pytest.approx(work + again)
    own = 100 / 4 + 200 + 8  # a quarter of the prompt, half of the response, half a block
    tight = steady_state.steady_state(
        device, LLAMA, layout, asked, staleness=1.0, interrupted=False, kv_tokens=10 * own
    )
    assert tight.running == pytest.approx(10)


def test_a_step_over_one_token_of_context() -> None:
    n, c = np.array([1.0, 2, 64]), np.array([0.0, 10, 1000])
    zero = np.zeros(())
    tau = 1 + 0.1 * n[:, None] + 0.001 * n[:, None] * c[None, :]
    table = tabulate(n, c, EngineStep(compute=zero, hbm=tau, nvlink=zero, network=zero, overhead=zero))
    one = steady_state._one_step(table, 40.0, 300.0)
    assert one["hbm"] == pytest.approx(1 + 4 + 12)


# --- which roof binds -------------------------------------------------------------------------------------


def _crossing(step_at, low: float, high: float) -> float:
    """Where a kernel turns from memory to compute, by bisection."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if float(step_at(middle).compute) > 0 else (middle, high)
    return high


def test_a_product_is_compute_bound_from_the_rows_where_its_flop_outweigh_its_bytes(device: Device) -> None:
    """2 m n k / F against (2 n k + m (2 k + 2 n)) / B."""
    n, k, ratio = 4096, 8192, H100.peak["bf16"].value / H100.hbm.value
    rows = 2 * n * k / (2 * n * k / ratio - 2 * k - 2 * n)
    matrix = Matrix(name="x", n=n, k=k)
    assert _crossing(lambda m: gemm(device, matrix, np.array(m), "bf16"), 1, 2000) == pytest.approx(rows)
    ratio = H100.peak["fp8"].value / H100.hbm.value
    rows = n * k / (2 * n * k / ratio - k - 2 * n)
    assert _crossing(lambda m: gemm(device, matrix, np.array(m), "fp8"), 1, 4000) == pytest.approx(rows)


@pytest.mark.parametrize("ep", [4, 16])
def test_experts_are_compute_bound_from_the_tokens_where_their_flop_outweigh_their_bytes(
    device: Device, ep: int
) -> None:
    """2 n k / e products of each weight against max(1, k / e) readings of it in BF16."""
    ratio = H100.peak["bf16"].value / H100.hbm.value
    tokens = ratio * max(1, 8 / ep) / (8 / ep)
    layout = RolloutLayout(tp=4, attention_dp=4, ep=ep)
    assert _crossing(
        lambda n: experts.expert_work(device, MOE, layout, np.array(n), "bf16"), 1, 4000
    ) == pytest.approx(tokens)


def test_prefill_is_compute_bound_from_the_length_where_its_pairs_outweigh_its_tokens(device: Device) -> None:
    """2 a (d_k + d_v) s^2 / 2 FLOP against s (g + a) (d_k + d_v) x 2 bytes."""
    ratio = H100.peak["bf16"].value / H100.hbm.value
    length = 2 * (8 + 32) / 32 * ratio
    core = _crossing(lambda s: prefill._prefill_core(device, LLAMA, RolloutLayout(), 2.0, s, 0.0), 1, 9000)
    assert core == pytest.approx(length)


def test_experts_in_4_bit_by_hand(device: Device) -> None:
    """t max(flop / F, w4 / B) / max(flop / F, w2 / B) on both sides of the roofs."""
    params, hbm, bf16 = 3 * OSS.hidden * OSS.moe.expert_ffn, H100.hbm.value, H100.peak["bf16"].value
    assert OSS.gated
    for tokens, ep in ((3.0, 1), (400.0, 1), (3.0, 2)):
        layout = RolloutLayout(tp=2, ep=ep)
        e, t = (ep, 2 / ep) if ep > 1 else (1, 2)
        step = total(experts.expert_work(device, OSS, layout, np.array(tokens), "bf16"))
        own = params / t
        read = own * 32 / e * (1 - (7 / 8) ** tokens)
        compute = 2 * own * tokens * 4 / e / bf16
        share = max(compute, 17 / 32 * read / hbm) / max(compute, 2 * read / hbm)
        got = total(
            experts.expert_work(device, OSS, replace(layout, precision="mxfp4"), np.array(tokens), "bf16")
        )
        assert got == pytest.approx(step * share)


# --- schedules and stages ---------------------------------------------------------------------------------


def test_groups_of_a_schedule_end_with_their_longest_sample() -> None:
    asked = Requests(
        prompts=4, samples=2, prompt_lengths=Fixed(value=10), response_lengths=Fixed(value=8), wanted=3
    )
    lengths = np.array([1.0, 2, 3, 4, 5, 6, 7, 8])
    made = schedule.schedule(lengths, asked, 2, 100, 1e9)
    dealt = schedule.deal(lengths, 2, 2, 0).reshape(2, 2, 2)
    assert made.group_ends is not None
    assert made.group_ends.tolist() == dealt.max(axis=2).tolist()
    assert made.group_tokens.tolist() == dealt.sum(axis=2).tolist()
    assert (made.wanted, made.shared, made.tokens, made.longest) == (3, 5, 36, 8)
    few = schedule.schedule(lengths, asked, 5, 100, 1e9)  # samples apart: each counts alone
    assert (few.wanted, few.group_ends.shape) == (6, (5, 2))
    one = schedule.schedule(lengths, asked, 1, 1, 1e9)  # one after the other
    assert one.group_ends.max() == 36
    first = schedule.first_to_finish(asked, tuple(lengths.tolist()))
    groups = np.random.default_rng(0).permutation(lengths).reshape(4, 2)
    kept = groups[np.argsort(groups.max(axis=1))[:3]]
    assert list(first) == kept.ravel().tolist()


def test_a_prompt_that_is_shared_costs_its_group_one_cache() -> None:
    asked = Requests(prompts=2, samples=4, prompt_lengths=Fixed(value=100), response_lengths=Fixed(value=10))
    lengths = np.full(8, 10.0)
    alone = schedule.schedule(lengths, replace(asked, prompts=8, samples=1), 1, 100, 1e9)
    shared = schedule.schedule(lengths, asked, 1, 100, 1e9)
    assert (alone.kv_tokens, shared.shared, shared.kv_tokens) == (8 * 110, 75, 8 * 35)


def test_slots_are_lowered_until_the_peak_fits() -> None:
    """Sequences of 100 after prompts of 28, half a block beside: 136 tokens each at their end."""
    dealt = np.full((1, 10), 100.0)
    line, slots = schedule._fitted(dealt, 28.0, 0.0, 100, 10 * 136.0)
    assert (slots, float(line.running[0])) == (10, 10)
    line, slots = schedule._fitted(dealt, 28.0, 0.0, 100, 10 * 136.0 - 1)
    assert slots == 9
    assert schedule._peak(line, 0.0) == 9 * 136
    assert schedule._fitted(dealt, 28.0, 0.0, 4, 1e9)[1] == 4
    assert schedule._fitted(dealt, 28.0, 0.0, 100, 50.0)[1] == 1
    saved = schedule._fitted(dealt, 28.0, 20.0, 100, 10 * 116.0)
    assert (saved[1], schedule._peak(saved[0], 20.0)) == (10, 1160)
    two = np.array([[100.0, 100.0], [200.0, 200.0]])
    line, _ = schedule._fitted(two, 28.0, 0.0, 100, 1e9)
    assert (schedule._fullest(line, 0.0), schedule._peak(line, 0.0)) == (1, 2 * 236)


def test_a_stage_by_hand(device: Device) -> None:
    """Sixteen sequences of one length on two replicas: eight start and end together."""
    asked = Requests(
        prompts=16, samples=1, prompt_lengths=Fixed(value=100), response_lengths=Fixed(value=200)
    )
    got = generation.generate(device, LLAMA, RolloutLayout(dp=2), asked, kv_tokens=1e9)
    table = generation.step_table(device, LLAMA, RolloutLayout(dp=2), 8.0, 300.0)
    decode_s = float(table.between(np.array([8.0]), np.array([100.0]), np.array([300.0]))[0])
    first = total(prefill.group_prefill(device, LLAMA, RolloutLayout(dp=2), 8.0, 1.0, 100.0))
    assert got.seconds == pytest.approx(first + decode_s)
    assert (got.decode_tokens, got.decode_steps, got.running, got.waves) == (3200, 200, 8, 1)
    assert got.mean_step == pytest.approx(decode_s / 200)
    assert got.tokens_per_s == pytest.approx(3200 / got.seconds)
    assert (got.preemptions, got.discarded_tokens, got.longest_context, got.mean_running) == (0, 0, 300, 8)
    assert got.finish == pytest.approx([got.seconds] * 64)
    one = float(table.between(np.ones(1), np.array([100.0]), np.array([300.0]))[0])
    assert got.lower_bound == pytest.approx(one)
    twice = got.scaled(2.0)
    assert (twice.seconds, twice.mean_step, twice.lower_bound) == pytest.approx(
        (2 * got.seconds, 2 * got.mean_step, 2 * one)
    )
    assert twice.finish == pytest.approx([2 * got.seconds] * 64)
    assert got.scaled(1.0) is got
    own = np.array([100.0] * 8 + [200.0] * 8)
    drawn = generation.generate(device, LLAMA, RolloutLayout(), asked, kv_tokens=1e9, lengths=own)
    assert drawn.finish[31] == pytest.approx(drawn.finish[0])
    assert drawn.finish[32] == pytest.approx(drawn.seconds)
    assert drawn.decode_tokens == 2400


def test_evicted_sequences_prefill_their_context_again(device: Device) -> None:
    asked = Requests(prompts=40, samples=1, prompt_lengths=Fixed(value=84), response_lengths=Fixed(value=100))
    got = generation.generate(device, LLAMA, RolloutLayout(), asked, kv_tokens=2000.0)
    plan = schedule.expected_schedule(asked, 1, 1024, 2000.0)
    assert plan.preempted > 0
    first = total(prefill.group_prefill(device, LLAMA, RolloutLayout(), 40.0, 1.0, 84.0))
    again = total(
        prefill.prefill(device, LLAMA, RolloutLayout(), plan.preempted, plan.recomputed / plan.preempted)
    )
    assert got.prefill_seconds == pytest.approx(first + again)
    assert got.waves == 40 / plan.slots


def test_batches_of_a_step_follow_each_other_by_hand(device: Device) -> None:
    asked = Requests(
        prompts=16, samples=1, prompt_lengths=Fixed(value=100), response_lengths=Fixed(value=200)
    )
    small = generation.generate(device, LLAMA, RolloutLayout(dp=4), asked, kv_tokens=1e9)
    large = generation.generate(device, LLAMA, RolloutLayout(), asked, kv_tokens=1e9)
    got = one_after_the_other([small, large], 3.0, 5000.0)
    assert got.seconds == pytest.approx(1.5 * (small.seconds + large.seconds))
    assert (got.decode_tokens, got.discarded_tokens, got.decode_steps) == (9600, 4600, 600)
    assert got.kv_tokens == large.kv_tokens
    assert got.mean_step == pytest.approx((small.mean_step + large.mean_step) / 2)
    assert got.lower_bound == pytest.approx(1.5 * (small.lower_bound + large.lower_bound))
    assert got.prefill_seconds == pytest.approx(1.5 * (small.prefill_seconds + large.prefill_seconds))
    assert one_after_the_other([small], 1.0, 1e9).discarded_tokens == 0
    assert got.finish == (got.seconds,) * 64


def test_waits_are_drawn_with_the_expected_mean() -> None:
    world = Environment(turns=4, seconds_per_turn=3.0, workers=8, sigma=0.7)
    drawn = environment_waits(world, 200, 3)
    assert float(drawn.mean()) == pytest.approx(world.seconds_each)
    rng = np.random.default_rng([3, 200])
    each = rng.lognormal(-(0.7**2) / 2, 0.7, 800).reshape(200, 4).sum(axis=1)
    assert drawn == pytest.approx(each * world.seconds_each / each.mean())


def test_paced_sequences_solve_their_queue(device: Device) -> None:
    """n' of n sequences decode: n' / n = tau(n') / (tau(n') + a); few workers answer no faster."""
    n, c = np.array([1.0, 2, 64]), np.array([0.0, 10, 1000])
    zero = np.zeros(())
    tau = 1 + 0 * n[:, None] + 0 * n[:, None] * c[None, :]
    table = tabulate(n, c, EngineStep(compute=zero, hbm=tau, nvlink=zero, network=zero, overhead=zero))
    running, start, end = np.array([20.0]), np.array([0.0]), np.array([100.0])
    seconds, decoding, bound = Waiting(per_token=3.0, workers=1e9).paced(table, running, start, end)
    assert (float(seconds[0]), float(decoding[0]), bool(bound[0])) == (
        pytest.approx(400),
        pytest.approx(5),
        False,
    )
    seconds, decoding, bound = Waiting(per_token=3.0, workers=6.0).paced(table, running, start, end)
    assert (float(seconds[0]), float(decoding[0]), bool(bound[0])) == (
        pytest.approx(1000),
        pytest.approx(2),
        True,
    )


def test_an_engine_that_never_drains_is_no_faster_than_its_workers() -> None:
    world = Environment(turns=4, seconds_per_turn=3.0, workers=8)
    asked = SimpleNamespace(environment=world, num_sequences=64)
    cost = Cost(parts=(part("hbm", 1.0, "x"),))
    assert environment.answered_at_least(cost, asked).seconds == pytest.approx(64 * world.seconds_each / 8)
    slow = Cost(parts=(part("hbm", 1e6, "x"),))
    assert environment.answered_at_least(slow, asked) is slow
    assert environment.answered_at_least(cost, SimpleNamespace(environment=None)) is cost


# --- the other side of a branch -----------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "ep"), [(0.0, 1), (8.0, 1), (12.0, 2), (20.0, 1)])
def test_experts_in_4_bit_on_a_gpu_of_few_flop(device: Device, tokens: float, ep: int) -> None:
    """A hundredth of the FLOP/s: products and readings take about as long for ten tokens."""
    peak16 = H100.peak["bf16"]
    slow = replace(H100, peak={**H100.peak, "bf16": replace(peak16, value=peak16.value / 100)})
    small = replace(device, profile=slow)
    layout = RolloutLayout(tp=2, ep=ep)
    etp, n = 2 / ep, max(tokens, 1.0)
    own = 3 * OSS.hidden * OSS.moe.expert_ffn / etp
    read = own * 32 / ep * (1 - (7 / 8) ** n)
    compute, hbm = 2 * own * n * 4 / ep / (peak16.value / 100), H100.hbm.value
    share = max(compute, 17 / 32 * read / hbm) / max(compute, 2 * read / hbm)
    step = on("hbm", 1.0)
    got = experts._weight_only(small, OSS, replace(layout, precision="mxfp4"), np.array(tokens), step)
    assert total(got) == pytest.approx(share)


def test_steps_of_pipelines_ranks_and_drafters(device: Device) -> None:
    n, c = np.array(32.0), np.array(1000.0)
    layout = RolloutLayout(pp=2)
    rows = np.array(16.0)
    parts = decode.token_work(device, LLAMA, layout, rows) + decode.decode_attention(
        device, LLAMA, layout, rows, c
    )
    head = decode.head_work(device, LLAMA, layout, rows)
    expected = total(decode.pipelined(device, LLAMA, layout, n, parts, head))
    assert total(decode.gpu_work(device, LLAMA, layout, n, c)) == pytest.approx(expected)
    assert total(
        decode.pipelined(device, LLAMA, RolloutLayout(pp=4), np.array(0.5), on("hbm", 8.0), head)
    ) == pytest.approx(
        8 + total(head) + 4 * total(decode.pipeline_hop(device, LLAMA, RolloutLayout(pp=4), np.array(1.0)))
    )
    near = decode.pipeline_hop(device, LLAMA, layout, rows)
    assert float(near.nvlink) == total(near)
    wide = decode.pipeline_hop(device, MOE, RolloutLayout(pp=2, tp=2, attention_dp=4), rows)
    assert float(wide.network) == total(wide)
    several = total(decode.decode_attention(device, SPARSE, RolloutLayout(), n, c, tokens=3))
    index = total(untimed.index(device, SPARSE, 3 * 32_000.0, 32_000.0))
    core = total(decode._decode_core(device, SPARSE, RolloutLayout(), n, c, "vllm", 3))
    assert several == pytest.approx(61 * core + index)
    whole = Speculation(method="draft", draft_tokens=3, acceptance=0.5, model="llama-3.2-1b")
    drafted = RolloutLayout(speculation=whole)
    verify = decode.gpu_work(device, LLAMA, drafted, n, c, tokens=4)
    own = total(
        verify + decode.overhead(device, LLAMA, drafted, n, verify.seconds, engine="vllm", rows=n * 4)
    )
    small = preset("llama-3.2-1b")
    draft = total(decode.gpu_work(device, small, RolloutLayout(), n, c)) + 1e-3 + 16 * 2e-5
    assert total(speculative_step(device, LLAMA, drafted, whole, n, c)) == pytest.approx(own + 3 * draft)
    assert total(collective(device, "all_reduce", np.array(1e6), 2)) > 0
    eight = collective_time.exchange(device, MOE, RolloutLayout(tp=2, attention_dp=8, ep=16), np.array(1.0))
    where, sent = Group(ranks=16, per_domain=8), np.array(8 * 2048 * 2.0)
    assert float(eight.network) <= 2 * float(collectives.one_sided(device, sent, where))


def test_a_coefficient_of_an_engine_s_own_is_taken_first(device: Device) -> None:
    known = dict(device.profile.coefficients)
    known["prefill_overhead_sglang"] = replace(known["prefill_overhead"], value=7.0, low=6.0, high=8.0)
    other = device_of(
        NodeGroup(profile=replace(device.profile, coefficients=known), gpus=64, gpus_per_node=8)
    )
    assert decode.coefficient(other, "prefill_overhead", "sglang") == 7
    assert decode.coefficient(other, "prefill_overhead", "vllm") == 5e-3


def test_parts_of_a_step_rest_on_their_coefficients(device: Device) -> None:
    cost = (on("network", 1.0) + on("overhead", 1.0) + on("hbm", 1.0)).cost(device)
    spreads = {p.resource: p.spread for p in cost.parts}
    assert spreads["network"] == device.spread("nic_efficiency")
    assert spreads["hbm"] == device.borrowed(CURVE_SPREAD)


def test_the_time_of_an_environment_is_added_to_a_stage(device: Device) -> None:
    asked = Requests(
        prompts=16, samples=1, prompt_lengths=Fixed(value=100), response_lengths=Fixed(value=200)
    )
    made = generation.generate(device, LLAMA, RolloutLayout(), asked, kv_tokens=1e9)
    world = Environment(turns=4, seconds_per_turn=3.0, workers=16)
    turns = environment.Turns(buffers=(made.cost,), sequences=(16,), environment=world)
    got = environment.with_environment(made, turns)
    assert got.seconds == pytest.approx(made.seconds + 12)
    assert got.finish == pytest.approx([got.seconds] * 64)


def test_a_rollout_ends_with_the_groups_that_are_wanted(device: Device) -> None:
    """Two replicas of 1 s a step: groups end after 2, 4 and 6, 8 steps; three are wanted."""
    n, c = np.array([1.0, 2, 64]), np.array([0.0, 10, 1000])
    zero = np.zeros(())
    table = tabulate(
        n, c, EngineStep(compute=zero, hbm=np.ones((3, 3)), nvlink=zero, network=zero, overhead=zero)
    )
    asked = Requests(
        prompts=4, samples=1, prompt_lengths=Fixed(value=0.0001), response_lengths=Fixed(value=8), wanted=3
    )
    lengths = np.array([2.0, 4.0, 6.0, 8.0])
    plan = schedule.schedule(lengths, asked, 2, 100, 1e9)
    cut = aborted(plan, table, 3)
    assert cut.finish.tolist() == pytest.approx([2, 4, 6])
    assert (cut.trained_tokens, cut.plan.tokens) == (12, pytest.approx(2 + 4 + 6 + 6))
    points = generation._points(cut, 1.0)
    assert points == pytest.approx([3.0] * 21 + [5.0] * 21 + [7.0] * 22)
    held = float(np.max(cut.plan.timeline.start + cut.plan.timeline.steps))
    assert held == pytest.approx(6, abs=0.001)


def test_a_steady_state_of_several_attention_ranks_and_drafts(device: Device) -> None:
    layout = RolloutLayout(dp=2, attention_dp=4, ep=4, max_num_seqs=8)
    asked = Requests(
        prompts=40, samples=4, prompt_lengths=Fixed(value=100), response_lengths=Fixed(value=400)
    )
    got = steady_state.steady_state(
        device, MOE, layout, asked, staleness=1.0, interrupted=False, kv_tokens=1e9
    )
    assert got.running == 32
    assert got.interrupt.seconds == 0
    first = total(prefill.group_prefill(device, MOE, layout, 20.0, 4.0, 100.0))
    work = first + got.step * 160 * 400 / (2 * 32)
    assert got.cost.seconds == pytest.approx(max(work, 400 * got.step))
    uniform = LogNormal(mean=1000, sigma=0.5, max=8192)
    one = steady_state.mean_of_longest(uniform, 1)
    assert one == pytest.approx(schedule.stats(uniform).mean, rel=0.01)
    assert steady_state.mean_of_longest(Fixed(value=7), 5) == 7


def test_slots_of_sequences_of_unequal_age() -> None:
    """Half a block, the prompt, and E[l^2] / 2 E[l] = 80 of lengths 100 and 200 in equal parts and more."""
    dealt = np.array([[100.0, 200.0] * 20])
    age = (100**2 + 200**2) / 2 / (2 * 150)
    line, slots = schedule._fitted(dealt, 28.0, 10.0, 100, 8 * (26 + age) + 1)
    assert slots <= 8
    assert schedule._peak(line, 10.0) <= 8 * (26 + age) + 1
    loose, more = schedule._fitted(dealt, 28.0, 10.0, 8, 1e6)
    assert more == 8
    assert schedule._peak(loose, 10.0) == float(np.max(loose.running * (loose.start + loose.steps - 2)))
    starts = start_steps(np.tile([3.0, 1.0, 2.0, 5.0, 1.0], (6, 1)), 2)
    assert starts.tolist() == [[0, 0, 1, 3, 3]] * 6
    assert start_steps(np.array([[3.0, 1.0, 2.0, 5.0, 1.0]]), 2).tolist() == [[0, 0, 1, 3, 3]]
    equal = np.array([[3.0, 3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 0.0, 0.0], [3.0, 3.0, 0.0, 0.0, 0.0]])
    assert start_steps(equal, 2).tolist() == [[0, 0, 3, 3, 6], [0, 0, 3, 3, 3], [0, 0, 3, 3, 3]]
    late = np.full((2, 40), 0.1)
    assert (start_steps(late, 2)[:, 2:] == (start_steps(late, 2) + late)[:, :-2]).all()
    assert (continuous_timeline(late, 2, 28.0).running == 2).all()


def test_an_engine_waits_for_its_longest_response_within_the_staleness(device: Device) -> None:
    layout = RolloutLayout(dp=2)
    asked = Requests(
        prompts=20, samples=4, prompt_lengths=Fixed(value=100), response_lengths=Fixed(value=400)
    )
    got = steady_state.steady_state(
        device, LLAMA, layout, asked, staleness=0.25, interrupted=False, kv_tokens=1e9
    )
    assert got.cost.seconds == pytest.approx(got.latency / 0.25)
    cut = steady_state.steady_state(
        device, LLAMA, layout, asked, staleness=0.25, interrupted=True, kv_tokens=1e9
    )
    assert cut.cost.seconds < got.cost.seconds
    drafts = Speculation(method="ngram", draft_tokens=3, acceptance=0.5)
    quick = steady_state.steady_state(
        device,
        LLAMA,
        replace(layout, speculation=drafts),
        asked,
        staleness=1.0,
        interrupted=True,
        kv_tokens=1e9,
    )
    steps = 80 * 400 / (2 * 40) / drafts.tokens_per_step
    scheduler = next(p for p in quick.cost.parts if p.rests_on == "decode_step_overhead")
    assert scheduler.seconds == pytest.approx(steps * 1e-3)


def test_latents_ranks_and_short_responses_on_the_other_side(device: Device) -> None:
    model, layout, rows = preset("nemotron-3-super-120b-a12b"), RolloutLayout(tp=2, ep=2), np.array(50.0)
    work = total(experts.expert_work(device, model, layout, rows, "bf16"))
    latent = sum(total(gemm(device, m, rows, "bf16")) for m in layers.expert_matrices(model, 1)[3:])
    shared = sum(total(gemm(device, m, rows, "bf16")) for m in layers.shared_matrices(model, 2))
    router = total(gemm(device, layers.expert_matrices(model, 1)[0], rows, "bf16"))
    got = total(experts.experts(device, model, layout, rows, "bf16"))
    assert got == pytest.approx(work + latent + shared + router)
    assert len(layers.expert_matrices(model, 1)) == 5
    ranks = RolloutLayout(attention_dp=4, ep=4)
    table = generation.step_table(device, MOE, ranks, 4.0, 1000.0)
    one = float(decode.decode_step(device, MOE, ranks, 1.0, 1024.0).seconds)
    assert table.seconds[5, :, -1] == pytest.approx([one] * 3)
    asked = Requests(prompts=4, samples=1, prompt_lengths=Fixed(value=10), response_lengths=Fixed(value=8))
    short = generation.generate(device, LLAMA, RolloutLayout(), asked, kv_tokens=1e9, lengths=np.full(4, 0.2))
    assert short.decode_tokens == 4
    mla = decode._decode_core(
        device, LITE, RolloutLayout(kv_precision="fp8"), np.array(64.0), np.array(4000.0), "vllm", 1
    )
    faster = min(float(device.curves.mla_decode(64, 4000, 16, b)) for b in (1.0, 2.0))
    assert total(mla) == pytest.approx(faster)
    costs = generation.steps_cost(
        device,
        RolloutLayout(),
        {"compute": 0.0, "hbm": 1.0, "nvlink": 0.0, "network": 0.0, "overhead": 3.0},
        1.0,
        "vllm",
        False,
    )
    assert costs.parts[-1].rests_on == "decode_sequence_overhead"
    evicted = RolloutLayout(attention_dp=2, ep=2)
    asked = Requests(prompts=40, samples=1, prompt_lengths=Fixed(value=84), response_lengths=Fixed(value=100))
    plan = schedule.expected_schedule(asked, 1, 2048, 2000.0)
    first = total(prefill.group_prefill(device, MOE, evicted, 20.0, 1.0, 84.0))
    context = plan.recomputed / plan.preempted
    again = total(prefill.prefill(device, MOE, evicted, plan.preempted / 2, context))
    made = generation.generate(device, MOE, evicted, asked, kv_tokens=2000.0)
    assert made.prefill_seconds == pytest.approx(first + again)
