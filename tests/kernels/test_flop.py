from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfsim.kernels import flop
from rlhfsim.kernels.sequences import Sequences, uniform
from rlhfsim.specs.model.presets import preset


def test_llama_8b_trains_one_token_for_six_times_its_matrices_plus_attention() -> None:
    model = preset("llama-3-8b")
    # 32 layers of 2 x 4096^2 + 2 x 4096 x 1024 + 3 x 4096 x 14336, and a head of 4096 x 128256
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    matrices = 6 * (32 * layer + 4096 * 128256)
    attention = 6 * 32 * 4096 * 8192
    assert flop.training_flop(model, uniform(1, 8192)) == pytest.approx((matrices + attention) * 8192)


def test_megatron_s_formula_counts_the_same_for_gpt_3() -> None:
    model = preset("gpt-175b")
    s, layers, h, v = 2048, 96, 12288, model.vocab
    eq = 72 * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    ours = flop.training_flop(model, uniform(1, s), causal=False)
    assert ours == pytest.approx(eq, rel=1e-3)  # arXiv 2104.04473, without recomputation


def test_full_recomputation_adds_a_third_and_lora_saves_one() -> None:
    model, short = preset("llama-3-8b"), uniform(64, 16)
    base = flop.hardware_flop(model, short, "none")
    assert flop.hardware_flop(model, short, "full") == pytest.approx(base * 4 / 3, rel=1e-3)
    assert flop.hardware_flop(model, short, "none", lora=True) == pytest.approx(base * 2 / 3, rel=1e-3)


def test_hardware_flop_exceed_model_flop_by_the_flash_backward() -> None:
    model, long = preset("llama-3-8b"), uniform(1, 32768)
    extra = flop.hardware_flop(model, long, "none") - flop.training_flop(model, long)
    assert extra == pytest.approx(0.5 * flop.attention_flop(model, long))


def test_a_window_hides_most_pairs_of_a_long_sequence() -> None:
    assert flop.attended_pairs(1000) == 500_000
    assert flop.attended_pairs(1000, 100) == 100 * 1000 - 5000
    assert flop.attended_pairs(50, 100) == 1250


@given(mean=st.floats(100, 1000), extra=st.floats(1.0, 4.0))
def test_spread_lengths_cost_more_attention_than_equal_ones(mean: float, extra: float) -> None:
    model = preset("qwen2.5-7b")
    spread = Sequences(count=8, mean=mean, mean_square=extra * mean**2, maximum=10 * mean)
    equal = uniform(8, mean)
    assert flop.attention_flop(model, spread) == pytest.approx(extra * flop.attention_flop(model, equal))
    assert flop.matmul_flop(model, spread.tokens) == pytest.approx(flop.matmul_flop(model, equal.tokens))


def test_deepseek_v3_needs_about_250_gflop_a_token_to_train() -> None:
    # NVIDIA-NeMo/Megatron-Bridge prints 6288 tokens/s and 1635 TFLOP/s together: 260 GFLOP a token,
    # one multi-token-prediction layer included
    per_token = flop.training_flop(preset("deepseek-v3"), uniform(1, 4096)) / 4096
    assert 0.93 * 1635e12 / 6288 < per_token < 1635e12 / 6288
