"""Packed and padded micro-batches give the same log-probs, losses and gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from executor.algorithms import losses
from executor.engines.packing import filler, micro_batch, micro_batches
from executor.engines.transformers import heads
from executor.samples import LossSpec, Sample

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
    monkeypatch.setattr(heads, "CHUNK_BYTES", 1)  # 16 places a chunk
    chunked = learn(model, False)
    for name, gradient in whole[2].items():
        torch.testing.assert_close(gradient, chunked[2][name], atol=1e-6, rtol=1e-5)


def test_micro_batches_keep_the_order() -> None:
    batches = micro_batches(SAMPLES, 3, packed=False)
    assert [[s.id for s in batch.samples] for batch in batches] == [[0, 1, 2], [3]]
    assert batches[0].tokens.shape == (3, 9)


def test_packed_rows_have_no_padding() -> None:
    (batch,) = micro_batches(SAMPLES, 4, packed=True)
    assert batch.tokens.shape == (1, sum(one.length for one in SAMPLES))
    assert batch.positions[0, :10].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]


def test_pairs_share_a_micro_batch() -> None:
    mixed = [SAMPLES[0], SAMPLES[2], SAMPLES[3], SAMPLES[1]]
    batches = micro_batches(mixed, 3, packed=False, paired=True)
    assert [[s.id for s in batch.samples] for batch in batches] == [[0, 1], [2, 3]]


def test_the_last_token_of_each_sequence_is_scored() -> None:
    for packed in (False, True):
        batch = micro_batch(SAMPLES, packed=packed, select="last")
        found = batch.tokens.flatten()[batch.index].tolist()
        assert found == [int(one.response[-1]) for one in SAMPLES]


def test_a_filler_holds_no_samples() -> None:
    assert filler().empty
    assert not micro_batch(SAMPLES, packed=False).empty
