"""Heads of verl next to what torch keeps when the lines run that they were counted in."""

from __future__ import annotations

from typing import Any

import pytest

from rlhfsim.specs.frameworks.files import heads_of

torch = pytest.importorskip("torch")
LiveBytes = pytest.importorskip("lab.oracle.live_bytes").LiveBytes
VERL = heads_of("verl")
HEADS = {"as it is": "unpadded", "copied": "scaled", "in place on a view": "scaled_in_place"}


@pytest.mark.parametrize("way", HEADS)
def test_heads_are_what_torch_keeps_of_the_logits(way: str) -> None:
    """Logits of 256 tokens, 4,096 entries and 4 hidden elements; cross-entropy as flash-attn allocates it."""
    known = VERL[HEADS[way]]
    tokens, vocab = 256, 4096

    class CrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(logits)
            return logits.new_zeros(tokens, dtype=torch.float32)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return ctx.saved_tensors[0]  # written in place

    def loss(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        raw = torch.nn.functional.linear(hidden, head)
        logits = raw.squeeze(0)
        if way == "copied":
            logits = logits / 0.9
        elif way == "in place on a view":
            logits.div_(0.9)
        return CrossEntropy.apply(logits).sum()

    for train, expected in ((True, known.train_bytes), (False, known.score_bytes)):
        hidden = torch.randn(1, tokens, 4, dtype=torch.bfloat16, requires_grad=train)
        head = torch.randn(vocab, 4, dtype=torch.bfloat16, requires_grad=train)
        with torch.set_grad_enabled(train), LiveBytes() as live:
            found = loss(hidden, head)
            if train:
                found.backward()
        assert live.peak / (tokens * vocab) == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("padded", [True, False])
def test_heads_of_the_sft_trainer_until_070_are_what_torch_keeps_of_the_logits(padded: bool) -> None:
    """Its own lines on 2 samples of 256 tokens; under CUDA's autocast the cross-entropy has an FP32 copy."""
    known = VERL["eager_padded" if padded else "eager_unpadded"]
    batch, tokens, vocab = 2, 257, 4096

    def loss(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, head)
        shifted = logits[..., :-1, :].contiguous().view(-1, vocab) if padded else logits.view(-1, vocab)
        labels = torch.zeros(shifted.shape[0], dtype=torch.long)
        found = torch.nn.CrossEntropyLoss(reduction="none")(shifted.float(), labels).sum()
        if found.requires_grad:
            found.backward()  # where the tensors above are still there
        return found

    for train, expected in ((True, known.train_bytes), (False, known.score_bytes)):
        hidden = torch.randn(batch, tokens, 4, dtype=torch.bfloat16, requires_grad=train)
        head = torch.randn(vocab, 4, dtype=torch.bfloat16, requires_grad=train)
        with torch.set_grad_enabled(train), LiveBytes() as live:
            loss(hidden, head)
        assert live.peak / (batch * tokens * vocab) == pytest.approx(expected, abs=0.15)
