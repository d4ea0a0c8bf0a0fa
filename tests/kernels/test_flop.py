from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfsim.kernels import flop
from rlhfsim.kernels.sequences import Sequences, uniform
from rlhfsim.specs.model.presets import preset
from tests.oracles import hardware_flop


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
    base = hardware_flop(model, short, "none")
    assert hardware_flop(model, short, "full") == pytest.approx(base * 4 / 3, rel=1e-3)
    assert hardware_flop(model, short, "none", lora=True) == pytest.approx(base * 2 / 3, rel=1e-3)


def test_hardware_flop_exceed_model_flop_by_the_flash_backward() -> None:
    model, long = preset("llama-3-8b"), uniform(1, 32768)
    extra = hardware_flop(model, long, "none") - flop.training_flop(model, long)
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


def test_a_forward_pass_is_two_flop_a_parameter_and_the_cores() -> None:
    model, batch = preset("llama-3-8b"), uniform(3, 100)
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    matrices = 2 * (32 * layer + 4096 * 128256) * 300
    assert flop.matmul_flop(model, 300) == matrices
    assert flop.forward_flop(model, batch) == matrices + 3 * 2 * 32 * 4096 * 100**2
    assert flop.training_flop(model, batch) == 3 * flop.forward_flop(model, batch)


def test_windowed_layers_see_their_window_by_hand() -> None:
    """gpt-oss-20b: 64 heads of 64, 12 of 24 layers see 128 tokens back; 128 x 1000 - 128^2/2 pairs."""
    model = preset("gpt-oss-20b")
    pairs = 12 * 500_000 + 12 * (128_000 - 8192)
    assert flop.attention_flop(model, uniform(5, 1000)) == pytest.approx(5 * 2 * 64 * 128 * pairs)
    assert flop.attention_flop(model, uniform(5, 1000), causal=False) == 5 * 2 * 64 * 128 * 24 * 1000**2


def test_sparse_attention_pays_for_chosen_pairs_and_an_index_of_all() -> None:
    """DeepSeek-V3.2 attends to 2048 tokens; its indexer scores every pair with 64 heads of 128."""
    model = preset("deepseek-v3.2")
    chosen = 2048 * 8192 - 2048**2 / 2
    scores = 8192**2 / 2 * 2 * 64 * (128 + 1)
    cores = 2 * 128 * (192 + 128) * chosen
    assert flop.attention_flop(model, uniform(1, 8192)) == pytest.approx(61 * (cores + scores), rel=0.01)


def test_recurrent_layers_pay_for_each_token_once() -> None:
    model = preset("qwen3.5-4b")
    twice = flop.attention_flop(model, uniform(2, 1000)) - 2 * flop.attention_flop(model, uniform(1, 1000))
    assert twice == 0
    cores = 8 * 2 * 16 * 512 * 500_000
    scan = 24 * model.recurrent.scan_flop * 1000
    assert flop.attention_flop(model, uniform(1, 1000)) == pytest.approx(cores + scan)


@pytest.mark.parametrize(("recompute", "cores"), [("none", 3.5), ("selective", 4.5), ("full", 4.5)])
@pytest.mark.parametrize("lora", [False, True])
def test_passes_of_matrices_and_cores_by_hand(recompute, cores: float, lora: bool) -> None:
    model, batch = preset("llama-3-8b"), uniform(1, 4096)
    passes = (2 if lora else 3) + (recompute == "full")
    expected = passes * flop.matmul_flop(model, 4096) + cores * flop.attention_flop(model, batch)
    assert hardware_flop(model, batch, recompute, lora=lora) == pytest.approx(expected)


def test_padding_computes_the_longest_length_for_all() -> None:
    batch = Sequences(count=4, mean=10, mean_square=125, maximum=20, packed=False)
    assert (batch.tokens, batch.square_tokens, batch.attention_length) == (80, 1600, 20)
    packed = Sequences(count=4, mean=10, mean_square=125, maximum=20)
    assert (packed.tokens, packed.square_tokens, packed.attention_length) == (40, 500, 12.5)
    assert packed.deviation == 5
