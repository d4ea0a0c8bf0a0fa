"""Decode step, prefill and serving terms on a GPU with closed-form kernels, and on measured ones."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lab.decode.serving import Terms, output_time, serving_terms, time_per_output_token
from rlhfsim.kernels.collectives import one_sided
from rlhfsim.kernels.device import Device, Group
from rlhfsim.kernels.devices import device_of
from rlhfsim.rollout.collective_time import FP8_BLOCK_BYTES
from rlhfsim.rollout.decode import decode_attention, decode_step, gpu_work, padded, pipeline_hop, pipelined
from rlhfsim.rollout.engine_step import on
from rlhfsim.rollout.prefill import group_prefill, prefill
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import RolloutLayout

H100 = load_profile("h100")
DENSE = resolve_model("llama-3.1-8b")
MOE = resolve_model("qwen3-30b-a3b")
MLA = resolve_model("deepseek-v3")
ONE = RolloutLayout(tp=1)


def device(name: str = "h100", gpus: int = 8) -> Device:
    profile = load_profile(name)
    return device_of(NodeGroup(profile=profile, gpus=gpus, gpus_per_node=min(gpus, profile.node.gpus)))


def seconds(model, layout, n, c, at=None):  # type: ignore[no-untyped-def]
    return float(decode_step(at or device(), model, layout, n, c).seconds)


def test_batch_sizes_round_up_to_captured_ones():
    rows = np.array([1.0, 2, 3, 5, 9, 250, 257, 511, 600])
    assert padded(rows).tolist() == [1, 2, 4, 8, 16, 256, 272, 512, 600]


@pytest.mark.parametrize("model", [DENSE, MOE, MLA], ids=["dense", "moe", "mla"])
def test_a_step_never_beats_one_pass_over_weights_and_cache(model):
    layout = RolloutLayout(tp=8, ep=8 if model.moe else 1, precision="fp8")
    for n, context in ((1, 1.0), (64, 2000.0), (256, 8000.0)):
        cache = n * context * model.kv_bytes_per_token_per_gpu(8, 2)
        step = gpu_work(device(), model, layout, np.asarray(float(n)), np.asarray(context))
        weights = (model.num_matmul_params_active if n == 1 else 0) / 8
        assert float(step.seconds) > (weights + cache) / H100.hbm.value


def test_a_step_at_one_sequence_and_no_context_is_near_the_weights_over_bandwidth():
    weights = 2 * (DENSE.num_params - DENSE.params_embedding) / H100.hbm.value
    step = float(gpu_work(device(), DENSE, ONE, np.asarray(1.0), np.asarray(0.0)).seconds)
    assert weights < step < 2.5 * weights


def test_a_step_grows_with_sequences_and_context():
    n = np.array([1.0, 8, 64, 256])[:, None]
    context = np.array([1.0, 512, 4096, 16384])[None, :]
    for model in (DENSE, MOE):
        taken = decode_step(device(), model, ONE, n, context).seconds
        assert taken.shape == (4, 4)
        assert (np.diff(taken, axis=0) >= -1e-9).all()
        assert (np.diff(taken, axis=1) >= -1e-9).all()


def test_a_window_bounds_the_attention_of_its_layers():
    attention = replace(DENSE.attention, sliding_window=1024, num_windowed_layers=DENSE.num_layers)
    windowed = replace(DENSE, attention=attention)
    assert seconds(windowed, ONE, 64, 16000) == pytest.approx(seconds(DENSE, ONE, 64, 1024))
    assert seconds(windowed, ONE, 64, 500) == pytest.approx(seconds(DENSE, ONE, 64, 500))


def test_more_hbm_bandwidth_is_never_slower():
    fast = replace(H100.hbm, value=2 * H100.hbm.value)
    quick = replace(H100, hbm=fast)
    other = device_of(NodeGroup(profile=quick, gpus=8, gpus_per_node=8))
    for n in (1, 32, 256):
        assert seconds(DENSE, ONE, n, 4000.0, other) <= seconds(DENSE, ONE, n, 4000.0)


def test_fp8_weights_and_cache_are_faster_than_bf16():
    small = RolloutLayout(tp=1, precision="fp8", kv_precision="fp8")
    assert seconds(DENSE, small, 32, 4000) < seconds(DENSE, ONE, 32, 4000)


def test_tensor_parallelism_beyond_the_node_is_paid_on_the_network():
    across = decode_step(device(gpus=16), DENSE, RolloutLayout(tp=16), 32.0, 1000.0)
    assert float(across.network) > 0
    assert float(across.nvlink) == 0
    inside = decode_step(device(), DENSE, RolloutLayout(tp=8), 32.0, 1000.0)
    assert float(inside.network) == 0
    assert float(inside.nvlink) > 0


def test_pipeline_stages_do_not_shorten_a_step_of_one_sequence():
    piped = seconds(DENSE, RolloutLayout(tp=1, pp=2), 1, 1000)
    assert piped >= seconds(DENSE, ONE, 1, 1000)


def test_the_last_stage_with_the_head_sets_the_pace_of_a_pipeline():
    layers, head = on("hbm", 0.010), on("hbm", 0.002)
    layout = RolloutLayout(tp=8, pp=4)
    full = pipelined(device(gpus=32), DENSE, layout, np.asarray(64.0), layers, head)
    hop = float(pipeline_hop(device(gpus=32), DENSE, layout, np.asarray(16.0)).seconds)
    share = math.ceil(DENSE.num_layers / 4) / DENSE.num_layers
    assert float(full.seconds) == pytest.approx(4 * (0.010 * share + 0.002 + hop))
    one = pipelined(device(gpus=32), DENSE, layout, np.asarray(1.0), layers, head)
    alone = float(pipeline_hop(device(gpus=32), DENSE, layout, np.asarray(1.0)).seconds)
    assert float(one.seconds) == pytest.approx(0.012 + 4 * alone)


@pytest.mark.parametrize(
    ("ranks", "dispatch", "combine"),
    [(16, 118, 195), (32, 155, 273), (64, 173, 314), (128, 192, 369), (256, 194, 360)],
)
def test_experts_across_nodes_are_reached_as_fast_as_deepep_publishes(ranks, dispatch, combine):
    # low-latency kernels, H800 with 400 Gb/s: 128 tokens of 7168, 8 experts each, FP8 there and BF16 back
    # (deepseek-ai/DeepEP@docs/legacy.md, commit 0297fc8); nothing is fitted to it
    at = Group(ranks=ranks, per_domain=8)
    for width, published in ((FP8_BLOCK_BYTES, dispatch), (2.0, combine)):
        taken = one_sided(device(gpus=ranks), np.asarray(128 * 8 * 7168 * width), at)
        assert float(taken) == pytest.approx(published * 1e-6, rel=0.1)


def test_attention_dp_across_nodes_sends_its_tokens_to_their_experts():
    wide, at = RolloutLayout(tp=1, attention_dp=64, ep=64, precision="fp8"), device(gpus=64)
    step = decode_step(at, MLA, wide, 128.0, 1000.0)
    # per layer: 128 tokens to 8 experts, 56 of 64 ranks on other nodes, and back in BF16
    sent = 128 * 8 * 7168 * (FP8_BLOCK_BYTES + 2) * 56 / 64
    rate = at.network_bandwidth * at["nic_efficiency"]
    assert float(step.network) == pytest.approx(
        MLA.num_moe_layers * (sent / rate + 2 * max(at["nic_latency"], at["deepep_ll_latency"]))
    )
    # fewer ranks: all tokens to every node, once
    few = decode_step(device(gpus=16), MLA, replace(wide, attention_dp=16, ep=16), 128.0, 1000.0)
    assert 0 < float(few.network) < float(step.network)


def test_without_cuda_graphs_the_launches_bound_a_small_step():
    eager = seconds(DENSE, RolloutLayout(tp=8, cuda_graphs=False), 1, 100)
    assert eager >= device()["eager_decode_layer_time"] * DENSE.num_layers
    assert eager > seconds(DENSE, RolloutLayout(tp=8), 1, 100)


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_an_engine_without_cuda_graphs_is_never_the_faster_one(model):
    for n in (1, 5, 9, 33, 100, 250, 270, 512, 513, 700):
        for tp in (1, 4):
            graphs, eager = (RolloutLayout(tp=tp, cuda_graphs=captured) for captured in (True, False))
            assert seconds(model, eager, n, 3000.0) >= seconds(model, graphs, n, 3000.0)


def test_an_fp8_cache_is_read_at_the_rate_of_the_engine_that_runs():
    model, n, context = resolve_model("llama-3.1-70b"), np.asarray(16.0), np.asarray(8192.0)
    size = 16 * 8192 * model.num_layers * 2 * 8 * 128  # keys and values of 8 heads of 128, a byte each
    layout, shares = RolloutLayout(kv_precision="fp8"), {}
    for engine in ("vllm", "trtllm", "sglang"):
        taken = decode_attention(device("h200"), model, layout, n, context, engine=engine).seconds
        shares[engine] = size / float(taken) / load_profile("h200").hbm.value
    assert 0.65 < shares["trtllm"] < 0.9
    assert 0.35 < shares["sglang"] < shares["vllm"] < 0.6


@pytest.mark.parametrize("gpu", ["h100", "h200", "h20"])
def test_fp8_weights_never_slow_a_large_model_down(gpu):
    model, n = resolve_model("qwen2.5-72b"), np.array([1.0, 16, 64, 128, 256, 512])
    for tp in (4, 8):
        plain, fp8 = (
            decode_step(device(gpu), model, RolloutLayout(tp=tp, precision=precision), n, 2000.0).seconds
            for precision in ("bf16", "fp8")
        )
        assert (fp8 <= plain * (1 + 1e-9)).all()


def test_scales_of_a_checkpoint_spare_their_computation():
    fp8 = RolloutLayout(precision="fp8")
    own, static = (
        float(gpu_work(device(), DENSE, fp8, np.asarray(256.0), np.asarray(100.0), engine=engine).seconds)
        for engine in ("trtllm", "trtllm_static")
    )
    assert 0.6 < static / own < 0.95


def test_attention_data_parallelism_pays_gather_and_scatter():
    dp = RolloutLayout(tp=1, attention_dp=8, ep=8, precision="fp8")
    step = decode_step(device("h200"), MLA, dp, 16.0, 1000.0)
    assert float(step.nvlink) > 0


def test_prefill_is_at_least_the_flop_over_the_peak():
    taken = float(prefill(device(), DENSE, ONE, 8, 4096).seconds)
    flop = 2 * (DENSE.num_matmul_params_active - DENSE.params_lm_head) * 8 * 4096
    assert taken > flop / H100.peak["bf16"].value


def test_a_group_pays_its_prompt_once_when_it_shares_it():
    shared = float(group_prefill(device(), DENSE, ONE, 64, 8, 1024).seconds)
    alone = float(group_prefill(device(), DENSE, ONE, 64, 8, 1024, shared=False).seconds)
    assert 6 * shared < alone < 10 * shared
    assert float(group_prefill(device(), DENSE, ONE, 0, 8, 1024).seconds) == 0


def test_output_time_of_one_request_is_its_step_and_prefill_of_others_adds_to_it():
    terms = Terms(
        decode=0.010, mixed=0.05, spared=0.01, chunks=1, layers=10, sequences=1, steps=100, launch=0
    )
    known = {"layer": 1e-4, "step": 1e-3, "sequence": 0.0, "interference": 1.0, "overhead": 0.0}
    assert output_time(terms, **known) == pytest.approx(0.012)
    many = replace(terms, sequences=11)
    x = output_time(many, **known) * 100
    assert x == pytest.approx(100 * 0.012 + 10 * 0.04 * x / (x + 0.04 + 0.012))
    assert output_time(replace(many, mixed=0.01), **known) == pytest.approx(0.012)


def test_serving_is_slower_than_decode_alone():
    layout = RolloutLayout(tp=1)
    busy = time_per_output_token(device(), DENSE, layout, 32, 1024, 256)
    assert busy > seconds(DENSE, layout, 32, 1024 + 128)
    alone = serving_terms(device(), DENSE, layout, 32, 1024, 256, engine="sglang")
    assert alone.spared == 0
    assert alone.chunks == 1
