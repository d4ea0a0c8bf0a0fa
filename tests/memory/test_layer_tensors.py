"""Tensors of one layer, by hand: bytes per token in the order of the forward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.memory.layer_tensors import BackwardPhase, RoutedExperts, layer_tensors, norm_bytes
from rlhfsim.specs.model.mixers import DENSE, EXPERTS, LayerKind
from rlhfsim.specs.model.presets import preset

LLAMA, OPT, GEMMA = preset("llama-3.1-8b"), preset("opt-1.3b"), preset("gemma-2-2b")
QWEN, LITE, NEXT, MAMBA = (
    preset("qwen3-30b-a3b"),
    preset("deepseek-v2-lite"),
    preset("qwen3-next-80b-a3b"),
    preset("nemotron-h-8b"),
)
H = 4096


def test_a_fused_llama_layer_by_hand() -> None:
    """32 query heads and 8 KV heads of 128, MLP of 14336; two bytes each, the log-sum-exp four."""
    t = layer_tensors(LLAMA, 1)
    assert t.saved == {
        "attention_norm": 2 * H,
        "attention_input": 2 * H,
        "query_key_value": 2 * (4096 + 1024 + 1024),
        "attention_output": 2 * 4096,
        "log_sum_exp": 4 * 32,
        "mlp_norm": 2 * H,
        "mlp_input": 2 * H,
        "output_norms": 0,
        "mlp_activation_input": 2 * 2 * 14336,
        "mlp_activation": 2 * 14336,
    }
    assert t.input == 2 * H
    assert t.backward == (
        BackwardPhase(2 * H + 2 * H + 2 * 3 * 14336),
    )  # stream, its gradient, gates and product
    assert t.forward == 4 * 2 * H + 2 * 3 * 14336
    assert t.total == sum(t.saved.values())


def test_a_layer_with_a_small_mlp_is_widest_in_attention() -> None:
    """2 (32 + 8) heads of 128 in, and twice the outputs."""
    narrow = layer_tensors(replace(LLAMA, ffn=1024), 1)
    width = 2 * 40 * 128 + 2 * 32 * 128
    assert narrow.backward == (BackwardPhase(2 * 2 * H + 2 * width),)
    assert narrow.forward == 4 * 2 * H + 2 * width


def test_an_eager_llama_layer_by_hand() -> None:
    """RMSNorm keeps its input in FP32 and the normalised values; SiLU keeps its output beside the product."""
    t, fused = layer_tensors(LLAMA, 1, fused=False), layer_tensors(LLAMA, 1)
    changed = {k: v for k, v in t.saved.items() if v != fused.saved[k]}
    assert changed == {"attention_norm": 6 * H, "mlp_norm": 6 * H, "mlp_activation": 2 * 2 * 14336}
    assert t.backward == (
        BackwardPhase(2 * H + 2 * 14336, 2 * H * 14336),
        BackwardPhase(2 * H + 2 * 2 * 14336),
    )
    assert t.forward == 4 * 2 * H + 2 * 3 * 14336


def test_an_eager_opt_layer_has_layer_norms_and_one_matrix_up() -> None:
    t = layer_tensors(OPT, 1, fused=False)
    assert t.saved["attention_norm"] == 2 * 2048
    assert t.saved["mlp_activation_input"] == t.saved["mlp_activation"] == 2 * 8192
    assert t.backward == (BackwardPhase(2 * 2048 + 2 * 8192, 2 * 2048 * 8192),)
    assert t.forward == 4 * 2 * 2048 + 2 * 2 * 8192
    fused = layer_tensors(OPT, 1)
    assert fused.backward == (BackwardPhase(2 * 2 * 2048 + 2 * 2 * 8192),)


def test_gemma_norms_outputs_too_and_keeps_all_in_fp32() -> None:
    t = layer_tensors(GEMMA, 1, fused=False)
    assert t.saved["attention_norm"] == t.saved["mlp_norm"] == 8 * 2304
    assert t.saved["output_norms"] == 2 * 8 * 2304
    assert norm_bytes(GEMMA, 10, fused=True) == 20
    assert norm_bytes(LLAMA, 10, fused=False) == 60
    assert norm_bytes(OPT, 10, fused=False) == 20


def test_sequence_parallelism_cuts_the_stream_and_tensor_parallelism_the_rest() -> None:
    plain, cut = layer_tensors(LLAMA, 4), layer_tensors(LLAMA, 4, sequence_parallel=True)
    assert plain.saved["attention_input"] == 2 * H == 4 * cut.saved["attention_input"]
    assert plain.saved["mlp_input"] == 2 * H == 4 * cut.saved["mlp_input"]
    assert plain.saved["attention_norm"] == 4 * cut.saved["attention_norm"]
    assert plain.saved["query_key_value"] == cut.saved["query_key_value"] == 2 * (1024 + 256 + 256)
    assert plain.saved["mlp_activation"] == 2 * 14336 / 4
    assert (plain.input, cut.input) == (2 * H, H / 2)
    eager = layer_tensors(LLAMA, 4, fused=False)
    assert eager.backward == (
        BackwardPhase(2 * H + 2 * 3584, 2 * H * 3584),
        BackwardPhase(2 * H + 2 * 2 * 3584),
    )


@pytest.mark.parametrize(("fused", "each"), [(True, 5), (False, 8)])
def test_attention_without_flash_keeps_its_scores(fused: bool, each: int) -> None:
    t = layer_tensors(LLAMA, 2, fused=fused, score_length=1000)
    assert t.saved["attention_scores"] == each * 16 * 1000
    assert "attention_scores" not in layer_tensors(MAMBA, 1, kind=MAMBA.kinds[0], score_length=1000).saved


def test_fp8_keeps_inputs_of_products_in_one_byte_and_the_attention_output_in_three() -> None:
    plain, eight = layer_tensors(LLAMA, 1).saved, layer_tensors(LLAMA, 1, fp8=True).saved
    halved = {"attention_input", "mlp_input", "mlp_activation"}
    for name, size in plain.items():
        share = 0.5 if name in halved else 1.5 if name == "attention_output" else 1.0
        assert eight[name] == share * size
    assert layer_tensors(MAMBA, 1, kind=MAMBA.kinds[2], fp8=True).saved["attention_output"] == 0


def test_a_layer_of_experts_by_hand() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts of 768, hidden 2048, four KV heads of 128 and norms of Q and K."""
    t = layer_tensors(QWEN, 1, RoutedExperts(imbalance=1.5), kind=EXPERTS)
    copies = 8 * 1.5
    assert t.saved["query_key_norm"] == 2 * (4096 + 512)
    assert t.saved["router"] == 4 * 2 * 128
    assert t.saved["dispatched"] == t.saved["combined"] == 2 * copies * 2048
    assert t.saved["expert_mlp_activation_input"] == copies * 2 * 2 * 768
    assert t.saved["expert_mlp_activation"] == copies * 2 * 768
    assert t.backward == (BackwardPhase(2 * 2 * 2048 + 2 * copies * (2 * 2048 + 3 * 768)),)
    assert t.forward == 4 * 2 * 2048 + 2 * copies * (2 * 2048 + 3 * 768)


def test_eager_experts_run_as_grouped_products() -> None:
    """transformers 5: three tensors of weighted copies, then gradients of all experts' matrices at once."""
    t = layer_tensors(QWEN, 1, kind=EXPERTS, fused=False)
    stream, h, activation = 2 * 2048, 8 * 2048, 2 * 8 * 768
    matrix = 2 * 128 * 2048 * 768
    assert t.backward == (
        BackwardPhase(stream + 3 * 2 * h),
        BackwardPhase(stream + activation - 2 * h, matrix),
        BackwardPhase(stream - 2 * activation, 2 * matrix),
    )
    assert t.forward == 4 * stream + max(2 * (2 * 36 * 128 + 2 * 32 * 128), 2 * h + 4 * activation, 8 * h)
    fp32 = replace(QWEN, moe=replace(QWEN.moe, fp32_combine=True))
    other = layer_tensors(fp32, 1, kind=EXPERTS, fused=False)
    assert other.backward[0] == BackwardPhase(stream + 3 * 4 * h)
    assert other.forward == 4 * stream + (2 * 4 + 2) * h
    wide = layer_tensors(replace(QWEN, moe=replace(QWEN.moe, expert_ffn=20480)), 1, kind=EXPERTS, fused=False)
    assert wide.forward == 4 * stream + 2 * h + 4 * 2 * 8 * 20480
    half = layer_tensors(QWEN, 1, RoutedExperts(fused=False), kind=EXPERTS)
    assert half.backward == t.backward


def test_experts_cut_over_two_gpus_see_twice_the_tokens_at_half_the_width() -> None:
    one, two = layer_tensors(QWEN, 2, kind=EXPERTS), layer_tensors(QWEN, 2, RoutedExperts(2), kind=EXPERTS)
    assert two.saved["dispatched"] == 2 * one.saved["dispatched"]
    assert two.saved["expert_mlp_activation"] == one.saved["expert_mlp_activation"] == 8 * 2 * 768
    cut = layer_tensors(QWEN, 2, RoutedExperts(2), kind=EXPERTS, sequence_parallel=True)
    assert cut.saved["router"] == 4 * 2 * 128 / 2
    assert cut.saved["dispatched"] == one.saved["dispatched"]


def test_shared_experts_keep_an_mlp_of_all_their_widths() -> None:
    """DeepSeek-V2-Lite: two shared experts of 1408 on every token; four GPUs cut them."""
    t = layer_tensors(LITE, 4, kind=EXPERTS)
    assert t.saved["shared_mlp_activation_input"] == 2 * 2 * 2 * 1408 / 4
    assert t.saved["shared_mlp_activation"] == 2 * 2 * 1408 / 4
    assert "shared_mlp_activation" not in layer_tensors(QWEN, 1, kind=EXPERTS).saved


def test_latents_of_mla_by_hand() -> None:
    """V2-Lite: 16 heads of 128 + 64 and 128, latent 512 + 64; V3 compresses queries to 1536 too."""
    fused, eager = layer_tensors(LITE, 1), layer_tensors(LITE, 1, fused=False)
    assert fused.saved["query_key_value"] == 2 * 16 * (192 + 192 + 128)
    assert fused.saved["latents"] == 2 * (512 + 64 + 512)
    assert eager.saved["latents"] == 2 * (512 + 64 + 512) + 2 * (16 * 192 + 16 * (128 + 128))
    v3 = layer_tensors(preset("deepseek-v3"), 1)
    assert v3.saved["latents"] == 2 * (512 + 64 + 2 * 1536 + 512)


def test_a_gated_delta_net_by_hand() -> None:
    """Qwen3-Next: input and output of the convolution, the values, and their norm, cut over two GPUs."""
    block, kind = NEXT.recurrent, NEXT.kinds[0]
    for fused, norm in ((True, 2), (False, 8)):
        t = layer_tensors(NEXT, 2, kind=kind, fused=fused)
        assert t.saved["state_input"] == 2 * (block.in_width + block.conv_width) / 2
        assert t.saved["state_output"] == 2 * block.inner / 2
        assert t.saved["state_norm"] == norm * block.inner / 2
        assert "query_key_value" not in t.saved
    attention = layer_tensors(NEXT, 1, kind=NEXT.kinds[1])
    assert attention.saved["output_gate"] == 2 * 2 * 16 * 256
    assert "state_input" not in attention.saved


def test_mamba_computes_its_convolution_again_where_it_is_fused() -> None:
    block, kind = MAMBA.recurrent, MAMBA.kinds[0]
    fused, eager = (layer_tensors(MAMBA, 1, kind=kind, fused=f) for f in (True, False))
    assert fused.saved["state_input"] == 2 * block.in_width
    assert eager.saved["state_input"] == 2 * (block.in_width + block.conv_width)
    wide = 2 * 2 * (block.in_width + block.inner)
    assert fused.backward == (BackwardPhase(2 * 2 * 4096 + wide),)
    assert eager.backward == (BackwardPhase(2 * 4096),)
    assert fused.forward == eager.forward == 4 * 2 * 4096 + wide


def test_layers_of_one_block_have_one_norm() -> None:
    mlp = layer_tensors(MAMBA, 1, kind=MAMBA.kinds[2])
    assert mlp.saved == {
        "attention_norm": 2 * 4096,
        "attention_input": 2 * 4096,
        "mlp_activation_input": 2 * MAMBA.ffn,
        "mlp_activation": 2 * MAMBA.ffn,
    }
    assert mlp.forward == 4 * 2 * 4096 + 2 * 2 * MAMBA.ffn
    assert LayerKind(1, "attention", "dense") == DENSE
