"""Models read by parts are those that transformers reads, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from executor.engines.transformers import heads
from executor.tasks import tiny
from rlhfsim.errors import RlhfsimError

MOE = {
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}


def same(first: Any, second: Any) -> bool:
    """Parameters and buffers, those too that are not saved."""
    pairs = [dict((*m.named_parameters(), *m.named_buffers())) for m in (first, second)]
    assert pairs[0].keys() == pairs[1].keys()
    return all(torch.equal(tensor, pairs[1][name]) for name, tensor in pairs[0].items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True), ("qwen3", False)])
def test_weights_and_buffers_are_those_of_transformers(
    family: tiny.Family, tied: bool, precision: Any, tmp_path: Path
) -> None:
    folder = str(tiny.build(tmp_path / "model", family=family, tied=tied, layers=2))
    model = heads.load(folder, "causal", precision)
    wanted = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=heads.DTYPES[precision])
    assert same(model.backbone, wanted.model)
    assert torch.equal(model.head.weight, wanted.lm_head.weight)
    assert (model.head.weight is model.backbone.embed_tokens.weight) == tied  # type: ignore[union-attr]


def test_a_drawn_head_depends_on_the_seed_alone(tmp_path: Path) -> None:
    folder = str(tiny.build(tmp_path / "model", layers=1))
    first, again, other = (heads.load(folder, "score", "fp32", seed=seed).head.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_stored_head_is_read(tmp_path: Path) -> None:
    folder = tiny.config(tmp_path / "model", layers=1)
    config = hf.AutoConfig.from_pretrained(folder, num_labels=1)
    scored = hf.AutoModelForSequenceClassification.from_config(config)
    scored.save_pretrained(folder)
    model = heads.load(str(folder), "score", "fp32")
    assert torch.equal(model.head.weight, scored.score.weight)
    assert same(model.backbone, scored.model)


def test_only_buffers_have_values_before_parameters_are_read(tmp_path: Path) -> None:
    folder = str(tiny.build(tmp_path / "model", layers=2))
    model, unread = heads.outline(folder, "causal", "bf16")
    assert unread is not None
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert len(unread.names) == len(list(model.parameters()))


def test_experts_that_transformers_merges_are_read_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    wanted = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**MOE))
    wanted.save_pretrained(tmp_path)
    model, unread = heads.outline(str(tmp_path), "causal", "fp32")
    assert unread is None
    assert same(model.backbone, wanted.model)


def test_files_that_do_not_fit_the_configuration_are_refused(tmp_path: Path) -> None:
    tiny.build(tmp_path, layers=1, hidden=64)
    tiny.config(tmp_path, layers=1, hidden=128)
    with pytest.raises(RlhfsimError, match="has the shape"):
        heads.load(str(tmp_path), "causal", "fp32")


def test_dropout_is_off_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny.build(tmp_path / "model", layers=1)
    config = hf.AutoConfig.from_pretrained(folder)
    config.attention_dropout = 0.5
    config.save_pretrained(folder)
    model = heads.load(str(folder), "causal", "fp32")
    assert model.backbone.config.attention_dropout == 0.0
    assert "attention_dropout 0.5 is off" in caplog.text
