"""Kinds of layer: what each holds, computes and keeps, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.flop import attended_pairs, attention_flop
from rlhfsim.kernels.layers import layer_matrices
from rlhfsim.kernels.sequences import uniform
from rlhfsim.memory import kv_cache
from rlhfsim.memory.states import lora_params, shard, stage_layers
from rlhfsim.specs.loading import Source
from rlhfsim.specs.model.config import read_config
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import preset
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.step.measured import distance, measured_runs, mixer_of
from rlhfsim.units import GIB
from rlhfsim.weight_sync.endpoints import weights_of

NEXT, NANO, SUPER = (
    preset(name) for name in ("qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b")
)
V32, VL = preset("deepseek-v3.2"), preset("qwen2.5-vl-7b")


def test_layers_are_counted_by_kind():
    assert [tuple(k) for k in NEXT.kinds] == [(36, "recurrent", "experts"), (12, "attention", "experts")]
    assert [tuple(k) for k in NANO.kinds] == [
        (23, "recurrent", "none"),
        (6, "attention", "none"),
        (23, "none", "experts"),
    ]
    assert [tuple(k) for k in preset("deepseek-v3").kinds] == [
        (3, "attention", "dense"),
        (58, "attention", "experts"),
    ]
    assert (NANO.launched_layers, NEXT.launched_layers) == (26, 48)


def test_a_state_of_constant_size_stands_beside_the_cache_of_the_attention_layers():
    # 12 layers x 2 heads x (256 + 256) x 2 B; 36 x (32 x 128 x 128 x 2 B + 8192 channels x 3 x 2 B)
    assert NEXT.kv_bytes_per_token() == 12 * 2 * 512 * 2
    assert NEXT.state_bytes == 36 * (32 * 128 * 128 * 2 + 8192 * 3 * 2)
    assert NANO.state_bytes == 23 * (64 * 64 * 128 * 4 + 6144 * 3 * 2)
    assert NANO.kv_bytes(1000) == 1000 * 6 * 2 * 256 * 2 + NANO.state_bytes
    assert preset("llama-3.1-8b").state_bytes == 0


def test_a_latent_narrows_the_routed_experts_only():
    assert SUPER.params_expert == 2 * 1024 * 2688
    assert SUPER.params_shared_expert == 2 * 4096 * 5376
    assert SUPER.params_latent == 2 * 4096 * 1024


@pytest.mark.parametrize("model", [NEXT, NANO, SUPER])
def test_the_matrices_of_all_kinds_hold_the_active_matrix_parameters(model: ModelSpec):
    used = 0.0
    for kind in model.kinds:
        used += kind.layers * sum(
            m.n * m.k * m.rows for m in layer_matrices(model, ep=model.moe.num_experts, kind=kind)
        )
    gates = model.num_moe_layers * (model.hidden if model.moe.shared_gate else 0)
    assert used + gates + model.params_lm_head == pytest.approx(model.num_matmul_params_active, rel=1e-9)


@pytest.mark.parametrize("model", [NEXT, NANO, SUPER, VL])
def test_a_shard_and_an_engine_hold_the_whole_model(model: ModelSpec):
    held = shard(model, Layout(dp=1, zero=1), "megatron")
    assert held.dense + held.expert == pytest.approx(model.num_params, rel=2e-4)
    engine = kv_cache.rollout_weights(model, RolloutLayout(dp=1))
    assert engine == pytest.approx(2 * model.num_params, rel=2e-3)
    assert lora_params(model, 8) > 0


def test_tensors_are_named_as_in_the_checkpoint():
    # 24,147 names in the NVFP4 checkpoint less 3 a quantised matrix (5,968 of them)
    assert weights_of(NANO).tensors == 24_147 - 3 * 5_968


def test_stages_of_a_pipeline_share_alternating_kinds():
    assert [(k.layers, k.mixer) for k in stage_layers(NEXT, 4, "first")] == [
        (9, "recurrent"),
        (3, "attention"),
    ]
    assert sum(k.layers for k in stage_layers(NANO, 4, "last")) == 13


def test_flop_of_the_core_follow_the_kind_of_layer():
    one, two = (uniform(1, s) for s in (4096.0, 8192.0))
    scan = replace(NEXT, attention=replace(NEXT.attention, num_heads=2, num_kv_heads=2, head_dim=1))
    assert attention_flop(scan, two) == pytest.approx(2 * attention_flop(scan, one), rel=0.01)
    pairs, seen = attended_pairs(8192), attended_pairs(8192, 2048)
    expected = 61 * (2 * 128 * (192 + 128) * seen + 2 * 64 * 128 * pairs)
    assert attention_flop(V32, two) == pytest.approx(expected)


def test_states_take_their_part_of_the_pool():
    layout = RolloutLayout(dp=1, tp=4, max_num_seqs=64)
    assert kv_cache.states_bytes(NEXT, layout, 40e9) == 64 * NEXT.state_bytes / 4
    assert kv_cache.states_bytes(NEXT, replace(layout, max_num_seqs=100_000), 40e9) == 0.9 / 1.9 * 40e9
    assert kv_cache.states_bytes(V32, layout, 40e9) == 0


def test_sparse_attention_keeps_the_keys_of_its_indexer():
    assert V32.kv_bytes_per_token() == 61 * (576 * 2 + 132)


def test_heads_of_both_mixers_bound_tensor_parallelism():
    assert NANO.tp_degrees(64) == [1, 2, 4, 8, 16, 32]
    with pytest.raises(RlhfsimError, match="tensor parallelism 64"):
        NANO.check_tp(64)


def test_an_image_becomes_tokens_and_flop():
    assert VL.vision is not None
    assert VL.vision.tokens(1024, 1024) == 37 * 37
    assert VL.vision.flop(1369) == pytest.approx(2 * 4 * 1369 * VL.params_vision, rel=0.2)
    assert preset("gemma-3-4b").vision.tokens(4000, 3000) == 256


@pytest.mark.parametrize(
    ("width", "height", "tiles"), [(448, 448, 1), (1024, 1024, 10), (1920, 1080, 9), (640, 480, 13)]
)
def test_an_image_is_cut_into_the_grid_of_its_aspect(width, height, tiles):
    """3 x 3 and 4 x 2 tiles with a thumbnail, by hand; 640 x 480 is exactly 4 x 3."""
    vision = preset("internvl3-8b").vision
    assert vision.tokens(width, height) == 256 * tiles
    assert vision.flop(256) == pytest.approx(2 * 1024 * vision.num_params, rel=0.3)
    assert vision.flop(2560) == pytest.approx(10 * vision.flop(256))  # a tile does not see another


def test_a_tower_says_its_size_once_or_twice():
    """The config of transformers has sides as pairs and other names."""
    theirs = {"model_type": "internvl_vision", "patch_size": [14, 14], "image_size": [448, 448]}
    theirs |= {"attention_bias": True, "use_qk_norm": False, "norm_type": "layer_norm"}
    text = {"model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14}
    text |= {"num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151674}
    config = {"model_type": "internvl", "text_config": text, "vision_config": theirs}
    config |= {"tie_word_embeddings": False}
    assert read_config(Source("x", "", config), "x").num_params == preset("internvl3-1b").num_params
    whole = {**config, "dynamic_image_size": False}
    assert read_config(Source("x", "", whole), "x").vision.tokens(1024, 1024) == 256


def test_a_pattern_with_an_unknown_letter_is_refused_with_its_place():
    config = {"model_type": "nemotron_h", "hybrid_override_pattern": "MX", "hidden_size": 64}
    with pytest.raises(RlhfsimError, match="'X', which is no kind of layer"):
        read_config(Source("x", "", config), "x")


def test_other_mixers_are_far_from_runs_of_attention_and_the_answer_says_so():
    assert (NEXT.mixer, NANO.mixer, V32.mixer, VL.mixer) == (
        "gated delta net",
        "Mamba-2",
        "sparse attention",
        "attention",
    )
    known = measured_runs()[0].conditions
    assert distance(replace(known, mixer="Mamba-2"), known) == pytest.approx(0.6)
    assert mixer_of("nemotron-3-nano") == "Mamba-2"


def test_weights_cache_and_state_are_those_that_vllm_logs_for_qwen3_next():
    # 2 H200, TP 2, BF16: 74.28 GiB of weights; 44.59 GiB of cache are 14.77 sequences of 262,144 tokens
    # (lab/scoreboard/data/memory.csv, public log of vLLM)
    layout = RolloutLayout(dp=1, tp=2)
    assert kv_cache.rollout_weights(NEXT, layout) / GIB == pytest.approx(74.28, rel=0.001)
    each = 262_144 * kv_cache.kv_bytes_per_token(NEXT, layout) + NEXT.state_bytes / 2
    assert 44.59 * GIB / each == pytest.approx(14.77, abs=0.01)
