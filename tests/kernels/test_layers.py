from __future__ import annotations

import pytest

from rlhfsim.kernels import layers
from rlhfsim.specs.model.mixers import DENSE, EXPERTS
from rlhfsim.specs.model.presets import preset

LLAMA, QWEN, DEEPSEEK = preset("llama-3-8b"), preset("qwen3-30b-a3b"), preset("deepseek-v3")


def test_llama_s_qkv_is_4096_by_6144() -> None:
    qkv, out = layers.attention_matrices(LLAMA, 1)
    assert (qkv.k, qkv.n) == (4096, 6144)
    assert (out.k, out.n) == (4096, 4096)


@pytest.mark.parametrize("model", [LLAMA, QWEN, DEEPSEEK])
def test_the_matrices_of_a_layer_hold_its_matrix_parameters(model) -> None:
    experts = model.moe is not None
    held = sum(m.params for m in layers.layer_matrices(model, kind=model.kinds[-1]))
    mlp = model.params_layer_dense_mlp
    if experts:
        mlp = model.moe.num_experts * model.params_expert + model.params_shared_expert + model.params_router
    assert held == pytest.approx(model.attention.matrix_params(model.hidden) + mlp, rel=1e-4)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallelism_divides_the_parameters(tp: int) -> None:
    whole = sum(m.params for m in layers.layer_matrices(LLAMA, kind=DENSE))
    part = sum(m.params for m in layers.layer_matrices(LLAMA, tp, kind=DENSE))
    assert part == whole / tp


def test_kv_heads_are_copied_where_there_are_fewer_than_gpus() -> None:
    assert layers.heads(QWEN.attention, 8).kv == 1  # 4 KV heads on 8 GPUs
    assert layers.heads(LLAMA.attention, 8).kv == 1


def test_flop_of_a_moe_layer_do_not_depend_on_expert_parallelism() -> None:
    def flop(ep: int) -> float:
        return sum(2 * m.n * m.k * m.rows for m in layers.expert_matrices(QWEN, ep))

    assert flop(1) == flop(8) == flop(64)
    assert layers.layer_expert_params(QWEN, 8) == layers.layer_expert_params(QWEN, 1) / 8


def test_only_linear_layers_take_part_in_fp8() -> None:
    names = {m.name for m in layers.layer_matrices(DEEPSEEK, kind=EXPERTS) if not m.linear}
    assert names == {"router"}
    assert not layers.head_matrix(DEEPSEEK, 1).linear


def test_a_value_head_is_one_wide_on_every_rank() -> None:
    critic = LLAMA.with_value_head()
    assert layers.head_matrix(critic, 8).n == 1
    assert layers.head_matrix(LLAMA, 8).n == 128256 / 8


def test_a_dense_model_has_no_expert_matrices() -> None:
    assert layers.expert_matrices(LLAMA, 1) == ()
    assert layers.shared_matrices(QWEN, 1) == ()


@pytest.mark.parametrize(
    "name",
    [
        "llama-3-8b",
        "qwen3-30b-a3b",
        "deepseek-v3",
        "deepseek-v2-lite",
        "glm-4.5-air-106b-a12b",
        "qwen1.5-moe-a2.7b",
        "gemma-2-2b",
        "phi-2",
        "nemotron-h-8b",
        "nemotron-3-super-120b-a12b",
        "qwen3-next-80b-a3b",
        "qwen3.5-9b",
    ],
)
def test_layers_and_tables_add_up_to_the_model(name: str) -> None:
    """What the layers hold on one GPU, with both tables, is the model's own count (biases left out)."""
    model = preset(name)
    layers_held = sum(
        kind.layers
        * (
            layers.layer_params(model, 1, kind=kind)
            + (layers.layer_expert_params(model, 1) if kind.ffn == "experts" else 0)
        )
        for kind in model.kinds
    )
    head = 0 if model.tied_embeddings else model.params_lm_head
    ends = model.params_embedding + head + model.params_vision
    assert layers_held + ends == pytest.approx(model.num_params, rel=3e-4)


@pytest.mark.parametrize(
    "name",
    ["llama-3-8b", "deepseek-v2-lite", "nemotron-h-8b", "nemotron-3-super-120b-a12b", "qwen3-next-80b-a3b"],
)
def test_every_matrix_is_in_its_kind_of_layer(name: str) -> None:
    """The matrices of all kinds, expert by expert, hold what the layers hold but norms, vectors and biases."""
    model = preset(name)
    for kind in model.kinds:
        held = sum(m.params for m in layers.layer_matrices(model, kind=kind))
        experts = layers.layer_expert_params(model, 1) if kind.ffn == "experts" else 0
        vectors = model.recurrent.vector_params if kind.mixer == "recurrent" else 0
        biases = model.params_router - model.hidden * model.moe.num_experts if experts else 0
        small = model.params_layer_norms + vectors + biases
        assert layers.layer_params(model, 1, kind=kind) + experts == held + small


def test_projections_of_mla_by_hand() -> None:
    """DeepSeek-V3: 128 heads of 128 + 64 and 128; V2-Lite: 16 heads without a compressed query."""
    big = [(m.n, m.k) for m in layers.attention_matrices(DEEPSEEK, 4)]
    assert big == [(1536, 7168), (32 * 192, 1536), (512 + 64, 7168), (32 * 256, 512), (7168, 32 * 128)]
    lite = [(m.n, m.k) for m in layers.attention_matrices(preset("deepseek-v2-lite"), 1)]
    assert lite == [(16 * 192, 2048), (512 + 64, 2048), (16 * 256, 512), (2048, 16 * 128)]


def test_an_output_gate_doubles_the_queries() -> None:
    """Qwen3-Next: 16 query heads and 2 KV heads of 256."""
    gated = layers.attention_matrices(preset("qwen3-next-80b-a3b"), 1)[0]
    assert (gated.n, gated.k) == (2 * 16 * 256 + 2 * (256 + 256), 2048)


def test_experts_on_one_of_eight_gpus_by_hand() -> None:
    """Qwen3-30B-A3B: 128 experts of 768, eight a token; two GPUs split the width of an expert."""
    router, up, down = layers.expert_matrices(QWEN, 8, 2)
    assert (router.n, router.k, router.params, router.linear) == (128, 2048, 128 * 2048, False)
    assert (up.n, up.k, up.rows, up.experts) == (2 * 384, 2048, 16, 16)
    assert (down.n, down.k, down.rows, down.experts) == (2048, 384, 16, 16)
    assert down.params == 2048 * 384 * 16
    assert 2 * down.n * down.k * down.rows == 2 * 2048 * 384 * 16


def test_all_shared_experts_are_one_wide_mlp() -> None:
    """DeepSeek-V2-Lite: two of 1408; halving them would halve the FLOP of every token."""
    up, down = layers.shared_matrices(preset("deepseek-v2-lite"), 2)
    assert (up.n, up.k, down.n, down.k) == (2 * 1408, 2048, 2048, 1408)
    assert layers.shared_matrices(QWEN, 1) == ()


def test_a_plain_mlp_has_one_matrix_up_and_a_gated_one_two() -> None:
    plain, gated = layers.mlp_matrices(preset("phi-2"), 1), layers.mlp_matrices(LLAMA, 1)
    assert [(m.n, m.k) for m in plain] == [(10240, 2560), (2560, 10240)]
    assert [(m.n, m.k) for m in gated] == [(2 * 14336, 4096), (4096, 14336)]


def test_recurrent_projections_are_cut_over_their_heads() -> None:
    model = preset("nemotron-h-8b")
    into, out = layers.recurrent_matrices(model, 2)
    assert (into.n, into.k) == (model.recurrent.in_width / 2, 4096)
    assert (out.n, out.k) == (4096, model.recurrent.inner / 2)
    assert layers.recurrent_matrices(LLAMA, 2) == ()


def test_a_latent_of_experts_is_a_matrix_there_and_one_back() -> None:
    model = preset("nemotron-3-super-120b-a12b")
    names = {m.name: (m.n, m.k) for m in layers.expert_matrices(model, 1)}
    assert names["latent_down"] == (model.expert_width, model.hidden)
    assert names["latent_up"] == (model.hidden, model.expert_width)
    assert names["expert_down"][0] == model.expert_width
