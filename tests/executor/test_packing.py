"""Packed and padded micro-batches give the same log-probs, losses and gradients."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from executor.algorithms import losses
from executor.engines.packing import MicroBatch, filler, micro_batch, micro_batches
from executor.engines.protocols import EngineSpec
from executor.engines.scoring import ForwardPasses
from executor.engines.transformers import attention, heads
from executor.samples import LossSpec, Sample
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.placement.layout import Layout

FAMILIES = ("llama", "qwen2", "qwen3")


def sample(number: int, prompt: int, response: int) -> Sample:
    draw = np.random.default_rng(number)
    return Sample(
        id=number,
        group=number // 2,
        prompt=draw.integers(0, 64, prompt),  # the pad id 0 may be in it
        response=draw.integers(0, 64, response),
        advantages=draw.normal(size=response).astype(np.float32),
        old_logprobs=draw.normal(-4, 0.3, response).astype(np.float32),
    )


SAMPLES = [sample(0, 3, 5), sample(1, 6, 1), sample(2, 1, 8), sample(3, 4, 4)]


def tiny(family: str, folder: Path) -> heads.Model:
    import transformers as hf

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    kinds = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),
    }
    config, causal = kinds[family]
    torch.manual_seed(0)
    causal(config(**sizes, tie_word_embeddings=family == "qwen2")).save_pretrained(folder)
    return heads.load(str(folder), "causal", "fp32", temperature=0.7)


def learn(model: heads.Model, packed: bool) -> tuple[list[np.ndarray], float, dict[str, torch.Tensor]]:
    """Log-probs, loss and gradients of all samples as one micro-batch."""
    batch = micro_batch(SAMPLES, packed=packed)
    flat, entropy = model(batch.tokens, batch.positions, batch.index, batch.targets, True)
    spec = LossSpec(name="policy", settings={"entropy_coefficient": 0.1})
    value, _ = losses.compute(
        spec,
        losses.collate(
            SAMPLES, num_tokens=18, num_sequences=4, logprobs=batch.rows(flat), entropy=batch.rows(entropy)
        ),
    )
    model.zero_grad()
    value.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return batch.split(flat), value.item(), gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_learns_as_padded_does(family: str, tmp_path: Path) -> None:
    model = tiny(family, tmp_path)
    padded, packed = learn(model, False), learn(model, True)
    for first, second in zip(padded[0], packed[0], strict=True):
        np.testing.assert_allclose(first, second, atol=1e-5)
    assert padded[1] == pytest.approx(packed[1], abs=1e-5)
    assert set(padded[2]) == set(packed[2])
    for name, gradient in padded[2].items():
        torch.testing.assert_close(gradient, packed[2][name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_each_sequence_alone(family: str, tmp_path: Path) -> None:
    import transformers as hf

    model = tiny(family, tmp_path)
    batch = micro_batch(SAMPLES, packed=True)
    together = batch.split(model(batch.tokens, batch.positions, batch.index, batch.targets)[0])
    causal = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for one, found in zip(SAMPLES, together, strict=True):
        row = torch.from_numpy(np.concatenate([one.prompt, one.response]))[None]
        logits = causal(row).logits[0, len(one.prompt) - 1 : -1] / 0.7
        wanted = torch.log_softmax(logits, -1).gather(-1, torch.from_numpy(one.response)[:, None])
        np.testing.assert_allclose(found, wanted[:, 0].detach().numpy(), atol=1e-5)


def test_logits_in_chunks_give_the_same_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", tmp_path)
    whole = learn(model, False)
    monkeypatch.setattr(heads, "LOGIT_CHUNK_BYTES", 1)  # 16 places a chunk
    chunked = learn(model, False)
    for name, gradient in whole[2].items():
        torch.testing.assert_close(gradient, chunked[2][name], atol=1e-6, rtol=1e-5)


def placed(batches: list[MicroBatch]) -> list[tuple[int, ...]]:
    return [batch.places for batch in batches]


def test_padded_micro_batches_hold_sequences_of_like_length_up_to_their_tokens() -> None:
    batches = micro_batches(SAMPLES, 18, packed=False)  # 8, 7, 9 and 8 tokens
    assert placed(batches) == [(2, 0), (3, 1)], "2 x 9, then 2 x 8"
    assert [batch.tokens.shape for batch in batches] == [(2, 9), (2, 8)]
    assert placed(micro_batches(SAMPLES, 24, packed=False)) == [(2, 0), (3, 1)], "3 x 9 are more than 24"
    assert placed(micro_batches(SAMPLES, 1, packed=False)) == [(2,), (0,), (3,), (1,)]


def test_packs_are_as_few_as_fit_and_about_equal() -> None:
    (batch,) = micro_batches(SAMPLES, 32, packed=True)
    assert batch.tokens.shape == (1, sum(one.length for one in SAMPLES))
    assert sorted(batch.positions[0].tolist()).count(0) == 4
    assert placed(micro_batches(SAMPLES, 31, packed=True)) == [(2, 1), (0, 3)], "16 tokens each"
    assert len(micro_batches(SAMPLES, 14, packed=True)) == 4, "no two fit in 14"


@pytest.mark.parametrize("packed", [False, True])
def test_no_micro_batch_has_more_tokens_than_were_priced(packed: bool) -> None:
    draw = np.random.default_rng(5)
    many = [sample(i, *draw.integers(1, 40, 2)) for i in range(64)]
    batches = micro_batches(many, 200, packed=packed)
    assert max(batch.tokens.numel() for batch in batches) <= 200
    assert sorted(i for batch in batches for i in batch.places) == list(range(64))
    tokens = sum(one.length for one in many)
    assert tokens / sum(batch.tokens.numel() for batch in batches) > 0.85, "0.60 in the order they come"


@pytest.mark.parametrize("packed", [False, True])
def test_a_rank_without_samples_has_no_micro_batches(packed: bool) -> None:
    assert micro_batches([], 8, packed=packed) == []


def test_pairs_share_a_micro_batch() -> None:
    mixed = [SAMPLES[0], SAMPLES[2], SAMPLES[3], SAMPLES[1]]
    for packed in (False, True):
        batches = micro_batches(mixed, 20, packed=packed, paired=True)
        assert sorted(placed(batches)) == [(0, 3), (1, 2)]


@pytest.mark.parametrize("packed", [False, True])
def test_loss_and_gradients_do_not_depend_on_the_micro_batches(packed: bool, tmp_path: Path) -> None:
    model, spec = tiny("llama", tmp_path), LossSpec(name="policy", settings={})

    def step(tokens: int, samples: list[Sample]) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        total = 0.0
        for batch in micro_batches(samples, tokens, packed=packed):
            flat, _ = model(batch.tokens, batch.positions, batch.index, batch.targets)
            rows = losses.collate(batch.samples, num_tokens=18, num_sequences=4, logprobs=batch.rows(flat))
            value, _ = losses.compute(spec, rows)
            value.backward()
            total += value.item()
        return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    whole = step(100, SAMPLES)
    for tokens, samples in ((9, SAMPLES), (18, SAMPLES[::-1])):
        other = step(tokens, samples)
        assert other[0] == pytest.approx(whole[0], abs=1e-6)
        torch.testing.assert_close(other[1], whole[1], atol=1e-6, rtol=1e-5)


def test_results_come_back_in_the_order_of_the_samples(tmp_path: Path) -> None:
    model = tiny("qwen3", tmp_path)
    spec = EngineSpec(role="actor", model="", layout=Layout(micro_batch=1), micro_tokens=16, packing=True)
    engine = ForwardPasses(spec, model, model)
    together = engine.logprobs(SAMPLES)
    for one, found in zip(SAMPLES, together, strict=True):
        np.testing.assert_allclose(found, engine.logprobs([one])[0], atol=1e-5)


def test_attention_over_a_pack_makes_nothing_between_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = tiny("qwen2", tmp_path), []
    product = attention.scaled_dot_product_attention

    def recorded(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        seen.append((query.shape[2], options.get("attn_mask")))
        return product(query, *args, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", recorded)
    batch = micro_batch(SAMPLES, packed=True)
    model(batch.tokens, batch.positions, batch.index, batch.targets)
    assert seen == [(8, None), (7, None), (9, None), (8, None)] * 2, "of each sequence, in two layers"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"model_type": "llama"}, attention.VARLEN),
        (
            {"model_type": "qwen2", "sliding_window": None, "layer_types": ["full_attention"]},
            attention.VARLEN,
        ),
        ({"model_type": "mistral", "sliding_window": 4096}, "sdpa"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention", "full_attention"]}, "sdpa"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "eager"),
        ({"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"]}, "eager"),
    ],
)
def test_models_whose_attention_does_more_are_padded(fields: dict[str, Any], name: str) -> None:
    found = attention.implementation(SimpleNamespace(**fields), torch.float32)
    assert found == name
    assert attention.packs(SimpleNamespace(_attn_implementation=found)) == (name == attention.VARLEN)


def test_a_model_that_hides_the_lengths_from_attention_is_refused() -> None:
    query = torch.zeros(1, 2, 4, 8)
    with pytest.raises(RlhfsimError, match="which attention over packed sequences does not do"):
        attention.attend(torch.nn.Identity(), query, query, query, None)


def test_gpus_run_all_sequences_in_one_kernel_with_int32_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen

    calls: list[tuple[Any, ...]] = []
    bound = inspect.signature(varlen.varlen_attn).bind

    def kernel(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(bound(*args, **options).args)
        return torch.zeros_like(args[0])

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    query, key = torch.zeros(1, 4, 9, 8), torch.zeros(1, 2, 9, 8)
    output = attention._varlen(query, key, key, (4, 5), None)
    assert output.shape == (1, 9, 4, 8)
    q, k, _, ends, _, longest, _ = calls[0]
    assert (q.shape, k.shape, ends.tolist(), ends.dtype, longest) == (
        (9, 4, 8),
        (9, 2, 8),
        [0, 4, 9],
        torch.int32,
        5,
    )


def test_values_narrower_than_keys_are_filled_up_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """deepseek_v3's are; PyTorch's kernel takes one head size (flash_api.cpp, mha_varlen_fwd)."""
    from torch.nn.attention import varlen

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        assert v.shape == k.shape
        return v.clone()

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    key, value = torch.zeros(1, 4, 9, 24), torch.rand(1, 4, 9, 16)
    output = attention._varlen(key, key, value, (4, 5), None)
    assert torch.equal(output, value.transpose(1, 2))


@pytest.mark.parametrize(("width", "dtype"), [(20, torch.bfloat16), (264, torch.half), (64, torch.float)])
def test_heads_that_the_kernel_refuses_are_not_given_to_it(width: int, dtype: torch.dtype) -> None:
    assert not attention._in_one_kernel(torch.zeros(1, 2, 3, width, dtype=dtype))
    assert attention._in_one_kernel(torch.zeros(1, 2, 3, 64, dtype=torch.bfloat16))


def test_the_last_token_of_each_sequence_is_scored() -> None:
    for packed in (False, True):
        batch = micro_batch(SAMPLES, packed=packed, select="last")
        found = batch.tokens.flatten()[batch.index].tolist()
        assert found == [int(one.response[-1]) for one in SAMPLES]


def test_a_filler_holds_no_samples() -> None:
    assert filler().empty
    assert not micro_batch(SAMPLES, packed=False).empty
