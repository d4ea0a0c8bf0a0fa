"""Elements and states on one GPU, by hand on a shard of round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhfsim.kernels import layers
from rlhfsim.memory import kv_cache, states
from rlhfsim.memory.role_bytes import role_memory, software_of
from rlhfsim.memory.states import Shard, States
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.presets import preset
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.workload import Lora, Workload

H100 = load_profile("h100_sxm")
PART = Shard(
    dense=800, expert=600, dense_ranks=8, expert_ranks=2, layer=100, root=40, matrix=30, num_layers=7
)
LLAMA, LITE, NEMOTRON = preset("llama-3.1-8b"), preset("deepseek-v2-lite"), preset("nemotron-h-8b")


@pytest.mark.parametrize(
    ("backend", "zero", "gradients", "expected"),
    [
        ("megatron", 1, None, (2, 4, 1.5)),
        ("megatron", 0, 2.0, (2, 2, 12)),
        ("deepspeed", 0, None, (2, 2, 12)),
        ("deepspeed", 2, None, (2, 0.25, 1.5)),
        ("deepspeed", 3, 4.0, (0.25, 0.5, 1.5)),
        ("fsdp2", 3, None, (0.5, 0.5, 1)),
        ("fsdp2", 1, None, (4, 4, 1)),
        ("fsdp2", 0, None, (4, 4, 8)),
    ],
)
def test_bytes_of_an_element_over_eight_ranks(backend, zero, gradients, expected) -> None:
    assert states.bytes_per_element(backend, zero, 8, "adam", gradients) == expected


def test_eight_bit_moments_carry_a_scale_for_each_block_of_256() -> None:
    assert states.MOMENTS == {"adam": 8, "adam8bit": 2 + 2 * 4 / 256}
    assert states.bytes_per_element("deepspeed", 0, 1, "adam8bit")[2] == 4 + 2 + 1 / 32
    assert states.bytes_per_element("deepspeed", 0, 1, "adam", None, 5.0)[2] == 9
    assert states.BASE_BYTES == {"bf16": 2, "nf4": 0.5 + (1 + 4 / 256) / 64}


def test_dense_and_expert_elements_are_sharded_over_their_own_ranks() -> None:
    held = states.trained_states(PART, Layout(dp=8, zero=3), "deepspeed")
    assert held == States(
        weights=2 * 100 + 2 * 300,
        gradients=2 * 100 + 2 * 300,
        optimizer=12 * 100 + 12 * 300,
        between=2 * 400 + 2 * 1400,  # and a bucket of all elements, for they are fewer than it holds
    )
    assert held.total == 16 * 400


@pytest.mark.parametrize(
    ("backend", "zero", "layout", "expected"),
    [
        # FP32 gradients go to the host beside master and moments: 16 bytes of the 400 elements that it owns
        ("deepspeed", 2, {"offload_optimizer": "cpu"}, States(2800, 0, 0, 16 * 400)),
        ("deepspeed", 1, {"offload_optimizer": "cpu"}, States(2800, 2800, 0, 16 * 400)),
        ("megatron", 1, {"offload_optimizer": "cpu"}, States(2800, 5600, 0, 16 * 400, 5600)),
        ("deepspeed", 2, {"offload_optimizer": "nvme"}, States(2800, 0, 0, 0)),
        (
            "deepspeed",
            3,
            {"offload_optimizer": "cpu", "offload_params": "cpu"},
            States(0, 0, 0, 18 * 400, 2800),
        ),
        ("deepspeed", 3, {"offload_optimizer": "nvme", "offload_params": "nvme"}, States(between=2800)),
    ],
)
def test_offloaded_states_by_hand(backend, zero, layout, expected) -> None:
    assert states.trained_states(PART, Layout(dp=8, zero=zero, **layout), backend) == expected


@pytest.mark.parametrize(
    ("backend", "zero", "gradient_bytes", "kept"),
    [
        ("deepspeed", 0, None, 0),
        ("deepspeed", 1, None, 0),
        ("deepspeed", 2, None, 0),
        ("deepspeed", 1, 4.0, 4 * 1400),
        ("deepspeed", 3, None, 2 * 400 + 2 * 1400),
        ("fsdp2", 3, None, 0),
        ("megatron", 1, None, 4 * 1400),
    ],
)
def test_gradients_that_stay_from_step_to_step(backend, zero, gradient_bytes, kept) -> None:
    held = states.trained_states(PART, Layout(dp=8, zero=zero), backend, gradient_bytes=gradient_bytes)
    assert held.between == kept


def test_a_bucket_holds_no_more_than_its_elements() -> None:
    large = replace(PART, dense=8e9)
    held = states.trained_states(large, Layout(dp=8, zero=3), "deepspeed")
    assert held.between == held.gradients + 2 * 500e6


def test_a_quarter_of_the_optimizer_on_the_host() -> None:
    quarter = Layout(dp=8, zero=1, offload_optimizer="cpu", offload_fraction=0.25)
    held = states.trained_states(PART, quarter, "megatron")
    assert held == States(2800, 5600, 0.75 * 12 * 400, 0.25 * 16 * 400, 5600)


def test_frozen_weights_by_hand() -> None:
    one = Layout(dp=8, zero=1)
    assert states.frozen_states(PART, one) == States(weights=2800)
    assert states.frozen_states(PART, replace(one, zero=3)) == States(weights=2 * (100 + 300))
    quantised = states.frozen_states(PART, one, width=0.5, root_width=2.0)
    assert quantised.weights == 0.5 * 1400 + 1.5 * 40
    sharded = states.frozen_states(PART, replace(one, zero=3), width=0.5, root_width=2.0)
    assert sharded.weights == 0.5 * 400 + 1.5 * 5
    assert states.frozen_states(PART, replace(one, offload_params="cpu")) == States(host=2800)
    assert states.frozen_states(PART, replace(one, offload_params="nvme")) == States()


def test_gathered_weights_by_hand() -> None:
    big = replace(PART, dense=3e9, layer=1e8, root=4e8, matrix=3e7)
    three = Layout(dp=8, zero=3)
    assert states.gathered_bytes(PART, three, "deepspeed") == 2 * (1400 + 100)
    assert states.gathered_bytes(big, three, "deepspeed") == 2 * (1e9 + 8e7)
    assert states.gathered_bytes(replace(big, matrix=9e7), three, "deepspeed") == 2 * (1e9 + 1e8), "a layer"
    assert states.gathered_bytes(PART, Layout(dp=8, zero=2), "deepspeed") == 0
    away = Layout(dp=8, zero=0, offload_params="cpu")
    assert states.gathered_bytes(PART, away, "megatron") == 2 * 200
    assert states.gathered_bytes(replace(PART, layer=900), away, "megatron") == 2 * 1400
    # running layer and root, and beside them what was written: a layer beside the root or another layer
    # and before it the rank's own eighth of a layer, where shards are FP32
    assert states.gathered_bytes(PART, three, "fsdp2") == 2 * (140 + 200 + 12.5)
    assert states.gathered_bytes(PART, three, "fsdp2", cast=False) == 2 * (140 + 200)
    assert states.gathered_bytes(big, three, "fsdp2") == 2 * (5e8 + 5e8 + 1.25e7)
    assert states.gathered_bytes(big, three, "fsdp2", flat=True) == 2 * (4e8 + 2 * 1e8), "FSDP1: two layers"
    assert states.gathered_bytes(big, Layout(dp=8, zero=2), "fsdp2", flat=True) == 2 * big.elements
    assert states.gathered_bytes(replace(PART, dense=100, expert=0), three, "fsdp2") == 2 * (100 + 112.5)
    assert states.gathered_bytes(PART, Layout(dp=1, zero=3), "fsdp2") == 2 * 240
    assert states.gathered_bytes(replace(PART, dense=200, expert=0), Layout(dp=1, zero=3), "fsdp2") == 2 * 200
    assert states.gathered_bytes(PART, Layout(dp=8, zero=2), "fsdp2") == 2 * (1400 + 100 + 100 + 12.5)
    assert states.gathered_bytes(PART, Layout(dp=8, zero=0), "fsdp2") == 2 * 1400
    assert states.gathered_bytes(PART, Layout(dp=1, zero=2), "fsdp2") == 2 * 1400


@pytest.mark.parametrize(
    ("zero", "options", "buckets"),
    [(0, {}, 0), (1, {}, 1), (1, {"fp32_sums": True}, 0), (2, {}, 2), (2, {"overlap": False}, 1), (3, {}, 2)],
)
def test_deepspeed_allocates_whole_buckets(zero: int, options: dict, buckets: int) -> None:
    layout = Layout(dp=8, zero=zero)
    assert states.gradient_buffer_bytes(PART, layout, "deepspeed", **options) == 2 * buckets * 1400
    big = replace(PART, dense=3e9)
    assert states.gradient_buffer_bytes(big, layout, "deepspeed", **options) == 2 * buckets * 5e8


def test_experts_stay_gathered_under_zero_3_alone_but_for_the_last_layer_s() -> None:
    three = Layout(dp=8, zero=3)
    assert states.experts_kept(PART, three, "deepspeed") == 2 * (600 - 100)
    assert states.experts_kept(replace(PART, expert=0), three, "deepspeed") == 0
    wide = replace(PART, expert=9e9, layer=3e9)
    assert states.experts_kept(wide, three, "deepspeed") == 2 * (9e9 - 1e9), "of which a billion may live"
    assert states.experts_kept(PART, three, "fsdp2") == 0
    assert states.experts_kept(PART, Layout(dp=8, zero=2), "deepspeed") == 0


def test_our_executor_lets_experts_go_and_others_on_deepspeed_keep_them() -> None:
    mixture, three = preset("qwen3-30b-a3b"), Layout(dp=8, zero=3, recompute="none")

    def gathered(framework: str, recompute: Any = "none") -> float:
        memory = role_memory(
            Models(actor=mixture),
            "actor",
            Workload(algorithm="sft", model="qwen3-30b-a3b"),
            backend="deepspeed",
            profile=H100,
            software=software_of(None, framework, "deepspeed"),
        )
        layout = replace(three, recompute=recompute)
        return float(memory.of(RolePlacement(pool="all", layout=layout)).train.gathered)

    kept = gathered("openrlhf") - gathered("rlhfsim")
    assert 50e9 < kept < 60e9
    assert gathered("openrlhf", "full") == gathered("rlhfsim", "full") == gathered("rlhfsim")


def test_fsdp2_sums_a_further_micro_batch_in_the_pool_that_reduces() -> None:
    three = Layout(dp=8, zero=3)
    assert states.summed_again(PART, three, "fsdp2") == 4 * 100 / 8
    assert states.summed_again(replace(PART, root=240), three, "fsdp2") == 4 * 240 / 8
    assert states.summed_again(PART, Layout(dp=8, zero=1), "fsdp2") == 0


def test_fsdp1_holds_gradients_of_two_layers_and_the_root_and_fsdp2_of_one_in_fp32() -> None:
    sharded = states.gradient_buffer_bytes(PART, Layout(dp=8, zero=3), "fsdp2")
    assert sharded == 4 * 100
    flat = states.gradient_buffer_bytes(PART, Layout(dp=8, zero=3), "fsdp2", flat=True)
    assert flat == 2 * (2 * 100 + 40) + 4 * 100
    assert states.gradient_buffer_bytes(PART, Layout(dp=8, zero=1), "fsdp2") == 0
    assert states.gradient_buffer_bytes(PART, Layout(dp=1, zero=3), "fsdp2") == 0
    assert states.gradient_buffer_bytes(PART, Layout(dp=1, cp=2, zero=3), "fsdp2") == sharded
    assert states.gradient_buffer_bytes(PART, Layout(dp=8, zero=1), "megatron") == 0


def test_bytes_of_the_optimizer_step_by_hand() -> None:
    def step(zero: int, backend="deepspeed", *, fp32_sums=False, part=PART, **layout) -> float:
        return states.step_bytes(part, Layout(dp=8, zero=zero, **layout), backend, fp32_sums=fp32_sums)

    assert step(0) == 4 * 1400
    assert step(1) == step(3, "fsdp2") == 4 * 400
    assert step(3) == (4 + 2) * 400, "and one BF16 tensor of them"
    assert step(1, "megatron") == 0
    assert step(1, offload_optimizer="cpu") == 0
    assert step(1, offload_optimizer="cpu", offload_fraction=0.25) == 0.75 * 4 * 400
    assert step(1, fp32_sums=True) == 2 * 1400
    assert step(2, fp32_sums=True) == 0
    assert step(3, fp32_sums=True) == 4 * 400
    assert step(3, part=replace(PART, dense=3e10)) == 6 * 1e9


def test_a_communicator_for_each_dimension_above_one() -> None:
    assert states.communicators(*states.parted(Layout(dp=1))) == 0
    assert states.communicators(*states.parted(Layout(tp=2, pp=2, dp=2, ep=2))) == 4
    assert states.communicators(*states.parted(Layout(dp=1, cp=2))) == 1
    assert states.communicators(*states.parted(Layout(dp=4, zero=3, shards=2))) == 2


def test_tables_of_the_ends_by_hand() -> None:
    """Llama's 128256 words of 4096; Megatron pads them to a multiple of 128 t."""
    table = 128256 * 4096
    assert states.root_params(LLAMA, 1) == 2 * table + 4096
    assert states.root_params(LLAMA, 1, "first") == table
    assert states.root_params(LLAMA, 1, "last") == table + 4096
    assert states.root_params(LLAMA, 4, "first") == 128512 / 4 * 4096
    critic = LLAMA.with_value_head()
    assert states.root_params(critic, 1) == table + 4096 + 4096
    tied = preset("llama-3.2-1b")
    assert states.root_params(tied, 1) == 128256 * 2048 + 2048
    assert states.root_params(tied, 1, "last") == 128256 * 2048 + 2048
    gpt2 = preset("gpt2")
    assert states.root_params(gpt2, 1, "first") == (50257 + 1024) * 768
    seen = preset("qwen3-vl-8b")
    assert states.root_params(seen, 1, "first") - seen.params_vision == seen.vocab * seen.hidden


@pytest.mark.parametrize(
    ("name", "pp", "stage", "counts"),
    [
        ("llama-3.1-8b", 3, "first", [11]),
        ("deepseek-v3", 4, "first", [3, 13]),
        ("deepseek-v3", 4, "last", [16]),
        ("deepseek-v3", 61, "first", [1]),
        ("deepseek-v3", 1, "only", [3, 58]),
        ("llama-4-maverick", 4, "first", [6, 6]),
        ("nemotron-h-8b", 4, "first", [6, 1, 6]),
    ],
)
def test_layers_of_a_stage_by_hand(name: str, pp: int, stage, counts: list[int]) -> None:
    assert [kind.layers for kind in states.stage_layers(preset(name), pp, stage)] == counts


def test_a_shard_adds_its_layers_and_its_ends() -> None:
    layout = Layout(tp=2, dp=4, ep=4)
    part = states.shard(LITE, layout, "megatron")
    dense, sparse = (layers.layer_params(LITE, 2, kind=kind) for kind in LITE.kinds)
    experts = 3 * 2048 * 1408 * 16
    assert part.dense == dense + 26 * sparse + states.root_params(LITE, 2)
    assert part.expert == 26 * experts
    assert (part.dense_ranks, part.expert_ranks, part.num_layers) == (4, 2, 27)
    assert part.layer == sparse + experts
    assert part.elements == part.dense + part.expert
    copies = states.shard(LITE, Layout(dp=8, zero=3, shards=2), "fsdp2")
    assert (copies.dense_ranks, copies.expert_ranks) == (2, 2)
    cut = states.shard(LITE, Layout(tp=2, dp=2, zero=1), "deepspeed")
    assert cut.expert == 26 * 3 * 2048 * 704 * 64
    whole = states.shard(LITE, Layout(tp=2, dp=2), "megatron")
    assert (whole.expert, whole.expert_ranks) == (26 * 3 * 2048 * 1408 * 64, 4)


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-8b",
        "opt-1.3b",
        "deepseek-v2-lite",
        "deepseek-v3",
        "qwen3-30b-a3b",
        "nemotron-h-8b",
        "qwen3-next-80b-a3b",
    ],
)
def test_adapters_stand_on_both_sides_of_every_matrix(name: str) -> None:
    """r (n + k) of each matrix of `kernels.layers`, with gate, up, Q, K and V apart; routers have none."""
    model, gates = preset(name), 2 if preset(name).gated else 1
    sides = 0
    for kind in model.kinds:
        for m in layers.layer_matrices(model, kind=kind):
            parts = {"qkv": 3, "mlp_up": gates, "expert_up": gates}.get(m.name, 1)
            if m.name == "router":
                continue
            sides += kind.layers * m.experts * (m.n + parts * m.k)
    assert states.lora_params(model, 16) == pytest.approx(16 * sides, rel=1e-3)


def test_adapters_of_one_stage_and_half_of_their_sides() -> None:
    lora = Lora(rank=8)
    part = replace(PART, num_layers=4)
    own = states.adapter_shard(LLAMA, part, Layout(tp=4, pp=2), lora)
    elements = states.lora_params(LLAMA, 8) * (1 + 1 / 4) / 2 / 2
    assert (own.dense, own.expert, own.layer, own.root) == (elements, 0, elements / 4, 0)
    base, trained = states.lora_states(LLAMA, part, Layout(dp=8), "megatron", Lora(rank=8, base="nf4"))
    assert base.weights == pytest.approx(states.BASE_BYTES["nf4"] * 1360 + 2 * 40)
    assert trained.weights == 2 * states.lora_params(LLAMA, 8)
    wide, _ = states.lora_states(LLAMA, part, Layout(dp=8), "megatron", lora, base_width=4.0)
    assert wide.weights == 4 * 1400


# --- the engine -----------------------------------------------------------------------------------


def test_weights_of_an_engine_by_hand() -> None:
    """Llama-3.1-8B over two GPUs; FP8 leaves tables and norms, BF16 attention where it is asked for."""
    table = 128256 * 4096 / 2 * 2
    norms, attention, mlp = 2 * 4096 * 2, 2 * 4096**2 + 2 * 4096 * 1024, 3 * 4096 * 14336

    def weights(**options) -> float:
        return kv_cache.rollout_weights(LLAMA, RolloutLayout(tp=2, **options))

    assert weights() == 2 * table + 32 * (norms + 2 * (attention + mlp) / 2)
    assert weights(precision="fp8") == 2 * table + 32 * (norms + (attention + mlp) / 2)
    mixed = 2 * table + 32 * (norms + 2 * attention / 2 + mlp / 2)
    assert weights(precision="fp8", bf16_attention=True) == mixed
    assert weights(pp=2) == table + 16 * (norms + 2 * (attention + mlp) / 2)
    kept = 8 / 32
    some = kept * weights() + (1 - kept) * weights(precision="fp8")
    assert weights(precision="fp8", bf16_layers=8) == pytest.approx(some)


def test_experts_of_an_engine_are_spread_over_all_its_gpus() -> None:
    """DeepSeek-V2-Lite on 4 x 2 GPUs: experts over eight, the rest over two or on every GPU."""
    got = kv_cache.rollout_weights(
        LITE, RolloutLayout(tp=2, attention_dp=4), expert_bytes=1.0, linear_bytes=2.0
    )
    attention = sum(m.params for m in layers.attention_matrices(LITE, 2))
    dense, shared = 3 * 2048 * 10944 / 2, 3 * 2048 * 2 * 1408 / 2
    routed, norms = 64 * 3 * 2048 * 1408 / 8, 2 * LITE.params_layer_norms
    table = 2 * 102400 / 2 * 2048 * 2
    expected = 27 * (2 * attention + norms) + 2 * dense + 26 * (2 * shared + routed + 2 * LITE.params_router)
    assert got == pytest.approx(expected + table)


def test_an_engine_of_recurrent_layers_holds_their_vectors_in_16_bit() -> None:
    layout = RolloutLayout(tp=2)
    mamba = sum(m.params for m in layers.recurrent_matrices(NEMOTRON, 2))
    attention = sum(m.params for m in layers.attention_matrices(NEMOTRON, 2))
    mlp = sum(m.params for m in layers.mlp_matrices(NEMOTRON, 2))
    vectors, norms = NEMOTRON.recurrent.vector_params / 2, NEMOTRON.params_layer_norms
    table = 131072 / 2 * 4096 * 2 * 2
    expected = 24 * (mamba + vectors) + 4 * attention + 24 * mlp + 52 * norms
    assert kv_cache.rollout_weights(NEMOTRON, layout) == pytest.approx(2 * expected + table)


def test_bytes_of_a_token_in_a_forward_pass_by_hand() -> None:
    """Residual and norm, and the widest of attention, MLP, experts and scan; BF16."""
    assert kv_cache.forward_bytes(LLAMA, 2) == 2 * (2 * 4096 + 3 * 14336 / 2)
    narrow = replace(LLAMA, ffn=512)
    assert kv_cache.forward_bytes(narrow, 1) == 2 * (2 * 4096 + 40 * 128 + 2 * 32 * 128)
    experts = 6 * (2048 + 3 * 1408 / 2) + 3 * 2 * 1408 / 2
    assert kv_cache.forward_bytes(LITE, 2) == 2 * (2 * 2048 + max(3 * 10944 / 2, experts))
    assert experts > 3 * 10944 / 2
    block = NEMOTRON.recurrent
    scan = (block.in_width + 2 * block.inner) / 2
    assert kv_cache.forward_bytes(NEMOTRON, 2) == 2 * (2 * 4096 + max(scan, 2 * NEMOTRON.ffn / 2))
    thin = replace(NEMOTRON, ffn=1024)
    assert kv_cache.forward_bytes(thin, 2) == 2 * (2 * 4096 + scan)


def test_an_engine_keeps_the_larger_of_a_forward_pass_and_its_sampling() -> None:
    few = RolloutLayout(max_num_seqs=1, max_batched_tokens=8192)
    many = RolloutLayout(max_num_seqs=1024, max_batched_tokens=16)
    forward = kv_cache.profile_peak(LLAMA, few, sampler_bytes_per_logit=10)
    assert forward == 8192 * kv_cache.forward_bytes(LLAMA, 1)
    assert kv_cache.profile_peak(LLAMA, many, sampler_bytes_per_logit=10) == 1024 * 128256 * 10


def test_kv_bytes_of_a_token_are_those_of_the_layers_of_a_stage() -> None:
    """2 x 8 heads x 128 x 2 bytes x 32 layers; 11 of 32 on a stage of three."""
    assert kv_cache.kv_bytes_per_token(LLAMA, RolloutLayout()) == 2 * 8 * 128 * 2 * 32
    assert kv_cache.kv_bytes_per_token(LLAMA, RolloutLayout(kv_precision="fp8")) == 2 * 8 * 128 * 32
    assert kv_cache.kv_bytes_per_token(LLAMA, RolloutLayout(pp=3)) == pytest.approx(2 * 8 * 128 * 2 * 11)


def test_states_of_recurrent_layers_take_at_most_their_share() -> None:
    each = NEMOTRON.state_bytes / 2
    layout = RolloutLayout(tp=2, max_num_seqs=10)
    assert kv_cache.states_bytes(NEMOTRON, layout, 1e15) == pytest.approx(10 * each)
    assert kv_cache.states_bytes(NEMOTRON, layout, 19.0) == pytest.approx(9.0)
    assert kv_cache.states_bytes(NEMOTRON, layout, -5.0) == 0
    assert kv_cache.states_bytes(NEMOTRON, replace(layout, pp=2), 1e15) == pytest.approx(10 * each / 2)
    assert kv_cache.states_bytes(LLAMA, layout, 1e15) == 0


@pytest.mark.parametrize("captured", [True, False])
def test_cuda_graphs_lie_inside_the_share_of_an_engine(captured: bool) -> None:
    """vLLM since 0.21: KV cache = share - weights - peak - libraries - graphs, so that all of it is the share."""
    role = RolloutPlacement(pool="all", layout=RolloutLayout(memory_utilization=0.5, cuda_graphs=captured))
    held = kv_cache.engine_bytes(LLAMA, role, profile=H100)
    assert held.cuda_graphs == (H100["cuda_graph_bytes"] if captured else 0)
    inside = held.weights + held.kv_cache + held.profile_peak + held.non_torch + held.cuda_graphs
    assert inside == pytest.approx(0.5 * H100.usable_memory.value)


def test_an_engine_s_communicators_sleep_and_shortfall_by_hand() -> None:
    layout = RolloutLayout(tp=2, pp=2, attention_dp=2, memory_utilization=0.5)
    role = RolloutPlacement(pool="all", layout=layout, sleep=1)
    held = kv_cache.engine_bytes(LLAMA, role, profile=H100, shared_weights=1e9)
    full = kv_cache.rollout_weights(LLAMA, layout)
    assert held.weights == full - 1e9
    assert held.host == held.weights
    assert held.non_torch == H100["vllm_non_torch_bytes"] + 3 * H100["nccl_bytes"]
    assert held.retained == H100["sleeping_engine_bytes"]
    assert held.framework == H100["framework_bytes"]
    assert (held.shortfall, held.recreated) == (0, False)
    alone = replace(role, layout=RolloutLayout(memory_utilization=0.1), sleep=2)
    short = kv_cache.engine_bytes(LLAMA, alone, profile=H100, shared_weights=1e15)
    assert (short.weights, short.kv_cache, short.kv_tokens, short.retained, short.host) == (0, 0, 0, 0, 0)
    needs = kv_cache.rollout_weights(LLAMA, alone.layout) + short.profile_peak + short.non_torch
    assert short.shortfall == pytest.approx(needs + short.cuda_graphs - 0.1 * H100.usable_memory.value)
    awake = kv_cache.engine_bytes(LLAMA, replace(role, sleep=0), profile=H100)
    assert awake.retained == 0


def test_several_teachers_lie_there_together_and_one_runs_at_a_time() -> None:
    layout, both = Layout(dp=4, tp=2, zero=3), replace(LLAMA, others=(LITE,))
    one, other, together = (states.shard(model, layout, "deepspeed") for model in (LLAMA, LITE, both))
    assert together.elements == one.elements + other.elements
    assert together.expert == other.expert > 0
    assert (together.layer, together.root) == (max(one.layer, other.layer), max(one.root, other.root))
    assert states.frozen_states(together, layout).weights == pytest.approx(
        states.frozen_states(one, layout).weights + states.frozen_states(other, layout).weights
    )
