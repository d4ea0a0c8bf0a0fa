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
        return sum(m.flop_per_token for m in layers.expert_matrices(QWEN, ep))

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
