"""Shapes, parameter counts and KV bytes of one model, worked out by hand."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.model.model import Attention, ModelSpec, Moe
from rlhfsim.specs.model.presets import preset, preset_names

TINY = ModelSpec(
    name="tiny",
    num_layers=2,
    hidden=8,
    vocab=10,
    ffn=16,
    attention=Attention(num_heads=4, num_kv_heads=2, head_dim=2),
)


def test_a_two_layer_model_has_the_parameters_counted_by_hand():
    attention = 8 * 8 + 2 * 8 * 4 + 8 * 8  # q, k and v, o
    layer = attention + 3 * 8 * 16 + 2 * 8  # SwiGLU, two norms
    assert TINY.params_layer_attention == attention
    assert TINY.num_params == 10 * 8 + 2 * layer + 8 + 10 * 8


def test_biases_norms_and_positions_are_counted():
    model = replace(
        TINY,
        gated=False,
        mlp_bias=True,
        norm="layernorm",
        learned_positions=5,
        tied_embeddings=True,
        attention=replace(TINY.attention, qkv_bias=True, out_bias=True, qk_norm="head", sinks=True),
    )
    attention = 192 + (8 + 4 + 4) + 8 + 2 * 2 + 4
    layer = attention + 2 * 8 * 16 + 16 + 8 + 4 * 8
    assert model.num_params == 10 * 8 + 5 * 8 + 2 * layer + 16


def test_matmul_parameters_hold_the_head_but_not_the_look_up():
    tied = replace(TINY, tied_embeddings=True)
    layers = 2 * (192 + 3 * 8 * 16)
    assert TINY.num_matmul_params_active == layers + 80
    assert tied.num_matmul_params_active == TINY.num_matmul_params_active
    assert tied.num_params == TINY.num_params - 80


def test_inactive_experts_are_left_out_of_the_active_parameters():
    moe = Moe(num_experts=4, top_k=1, expert_ffn=6, num_moe_layers=1, num_shared_experts=1, shared_ffn=5)
    model = replace(TINY, moe=moe)
    assert model.params_expert == 3 * 8 * 6
    assert model.params_shared_expert == 3 * 8 * 5
    assert model.params_router == 4 * 8
    assert model.num_params - model.num_active_params == 3 * model.params_expert
    dense, sparse = 3 * 8 * 16, 3 * 8 * 6 + 3 * 8 * 5 + 4 * 8
    assert model.num_matmul_params_active == 2 * 192 + dense + sparse + 80


def test_latent_attention_counts_its_four_projections():
    mla = Attention(
        num_heads=2,
        num_kv_heads=2,
        head_dim=5,
        v_head_dim=4,
        q_lora_rank=6,
        kv_lora_rank=7,
        qk_nope_head_dim=3,
        qk_rope_head_dim=2,
    )
    matrices = 8 * 6 + 6 * 10 + 8 * (7 + 2) + 7 * 2 * (3 + 4) + 2 * 4 * 8
    assert mla.kind == "mla"
    assert mla.matrix_params(8) == matrices
    assert mla.vector_params(8) == 6 + 7
    assert mla.kv_elements == 7 + 2


def test_the_kind_of_attention_follows_from_the_heads():
    assert preset("llama-2-7b").attention.kind == "mha"
    assert preset("llama-3.1-8b").attention.kind == "gqa"
    assert preset("deepseek-v3").attention.kind == "mla"


def test_kv_bytes_of_llama_8b_are_128_kib_a_token():
    model = preset("llama-3.1-8b")
    assert model.kv_bytes_per_token() == 2 * 32 * 8 * 128 * 2
    assert model.kv_bytes_per_token(1) == model.kv_bytes_per_token() / 2
    assert model.kv_bytes(1000) == 1000 * model.kv_bytes_per_token()


def test_kv_heads_are_replicated_beyond_their_number():
    model = preset("llama-3.1-8b")
    whole = model.kv_bytes_per_token()
    assert [whole / model.kv_bytes_per_token_per_gpu(t) for t in (1, 2, 8, 32)] == [1, 2, 8, 8]


def test_the_latent_cache_is_on_every_gpu():
    model = preset("deepseek-v3")
    assert model.kv_bytes_per_token() == 61 * (512 + 64) * 2
    assert model.kv_bytes_per_token_per_gpu(8) == model.kv_bytes_per_token()


def test_windowed_layers_stop_growing_at_their_window():
    model = preset("gpt-oss-20b")
    window = model.attention.sliding_window
    assert window == 128
    assert model.kv_bytes(window) == window * model.kv_bytes_per_token()
    grown = model.kv_bytes(10 * window) - model.kv_bytes(9 * window)
    assert grown == pytest.approx(window * model.kv_bytes_per_token() / 2)


def test_a_value_head_replaces_the_lm_head():
    untied, tied = preset("llama-3.1-8b"), preset("llama-3.2-1b")
    assert untied.with_value_head().num_params == untied.num_params - 128256 * 4096 + 4096
    assert tied.with_value_head().num_params == tied.num_params + 2048
    assert untied.with_value_head().params_lm_head == 4096


def test_a_value_head_on_projected_embeddings_has_their_width():
    assert preset("opt-350m").with_value_head().params_lm_head == 512


@given(st.sampled_from(preset_names()))
def test_scaling_to_the_same_depth_changes_the_name_only(name):
    model = preset(name)
    assert replace(model.scaled(model.num_layers), name=model.name) == model


def test_a_shallow_proxy_keeps_dense_layers_and_windows_in_place():
    deepseek = preset("deepseek-v3").scaled(16)
    assert (deepseek.num_dense_layers, deepseek.num_moe_layers) == (3, 13)
    maverick = preset("llama-4-maverick").scaled(12)
    assert (maverick.num_moe_layers, maverick.attention.num_windowed_layers) == (6, 9)
    assert preset("deepseek-v3").scaled(2).moe is None


@given(st.sampled_from(preset_names()), st.integers(min_value=1, max_value=200))
def test_any_depth_gives_a_valid_model_that_grows_with_depth(name, layers):
    model = preset(name)
    assert model.scaled(layers).num_params < model.scaled(layers + 1).num_params


@given(st.sampled_from(preset_names()))
def test_counts_are_ordered(name):
    model = preset(name)
    assert 0 < model.num_matmul_params_active <= model.num_active_params + model.params_lm_head
    assert model.num_active_params <= model.num_params


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_tensor_parallelism_may_replicate_key_value_heads(tp):
    preset("llama-3.1-8b").check_tp(tp)


@pytest.mark.parametrize(
    ("name", "tp"),
    [("llama-3.1-8b", 3), ("llama-3.1-8b", 64), ("qwen2.5-7b", 8), ("gpt2-xl", 2), ("llama-2-7b", 0)],
)
def test_tensor_parallelism_must_not_split_heads(name, tp):
    with pytest.raises(RlhfsimError, match="tensor parallelism") as caught:
        preset(name).check_tp(tp)
    assert "use tp of 1" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 0},
        {"num_layers": -1},
        {"num_layers": 10**9},
        {"hidden": 2**40},
        {"vocab": 0},
        {"vocab": True},
        {"ffn": 1.5},
        {"max_position": 0},
        {"norms_per_layer": 99},
        {"embed_dim": 0},
    ],
)
def test_absurd_numbers_are_refused(change):
    with pytest.raises(RlhfsimError, match=next(iter(change))):
        replace(TINY, **change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_kv_heads": 3}, "3 key/value heads do not divide 4 query heads"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"head_dim": -1}, "head_dim is -1"),
        ({"num_windowed_layers": 1}, "sliding_window is missing"),
        ({"kv_lora_rank": 16}, "kv_lora_rank is given, so"),
        ({"sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_inconsistent_attention_is_refused(change, said):
    with pytest.raises(RlhfsimError, match=said):
        replace(TINY.attention, **change)


def test_more_experts_than_there_are_cannot_be_visited():
    with pytest.raises(RlhfsimError, match="top_k"):
        Moe(num_experts=4, top_k=5, expert_ffn=6, num_moe_layers=1)


def test_a_model_is_a_hashable_constant():
    assert hash(TINY) == hash(replace(TINY))
    with pytest.raises(FrozenInstanceError):
        TINY.hidden = 9
