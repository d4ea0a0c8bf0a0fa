"""What the trainers behind published peaks keep in memory otherwise than their backend's default."""

from __future__ import annotations

import re

from rlhfsim.frozen import frozen
from rlhfsim.specs.placement.heads import UNFUSED, Head
from rlhfsim.validation.rows import Row


@frozen
class Trainer:
    """Facts of one trainer, read in its source."""

    head: Head | None = UNFUSED
    """None: log-probs in chunks of tokens, as our own engines take them."""
    compiled: bool = False
    """Its layers run through torch.compile."""
    base_bytes: float = 2.0
    """Bytes of an element of the frozen base under adapters."""
    adapters: int = 1
    """Sets of adapters that are held side by side; all have gradients, one has an optimizer."""
    fp32_combine: bool = False
    """Router weights multiply what comes back from experts in FP32."""
    inflight: int = 5
    """Inputs of layers that stay on the GPU where activations are offloaded."""


EAGER_LOSS = Head(
    train_bytes=12,
    score_bytes=10,
    source="torchtitan 9dec370, train.py: the loss is not compiled and `pred` is deleted before the backward "
    "pass; saved FP32 log-softmax, its gradient and that of the FP32 logits",
)
PARALLEL_LOSS = Head(
    train_bytes=16,
    score_bytes=14,
    source="torch/distributed/tensor/parallel/loss.py, _nll_loss_and_log_softmax_backward: log-softmax, a "
    "gradient of zeros, exponentials and their sum, FP32 each",
)
COMPILED_LOSS = Head(
    train_bytes=4,
    score_bytes=2,
    source="torchtitan since 2025-04 (bbb1b616e) compiles the loss with the model (components/loss.py, "
    "build_cross_entropy_loss): BF16 logits and their BF16 gradient",
)
SFT_LOSS = Head(
    train_bytes=16,
    score_bytes=10,
    source="prime-rl b798a90d6, trainer/sft/train.py and models/layers/lm_head.py: FP32 logits that `out` "
    "still holds, saved log-softmax, and two FP32 gradients",
)
VOCABULARY_CHUNKS = Head(
    train_bytes=22,
    score_bytes=14,
    vocab=2048,
    source="prime-rl b798a90d6, models/layers/lm_head.py, _ChunkedLogProbEntropyFn.backward: BF16 logits, "
    "FP32 logits, probabilities, their gradient, scaled, and temporaries, for 2048 entries of the vocabulary "
    "(`fused_lm_head_chunk_size: auto` in RL)",
)


def trainer(row: Row) -> Trainer:
    """The facts of the row's framework; of an unknown one the defaults."""
    framework, notes = row.framework.lower(), row.words("notes").lower()
    if "rlhfsim" in framework:
        return Trainer(head=None)
    if "titan" in framework:
        compiled = "torch.compile" in notes or "fp8" in row.words("precision")
        if "202412" in row.source or not compiled:
            split = (row.integer("tp") or 1) > 1
            return Trainer(head=PARALLEL_LOSS if split else EAGER_LOSS, compiled=compiled)
        return Trainer(head=COMPILED_LOSS, compiled=True)
    if "prime-rl" in framework:
        sft = re.search(r"\bsft (full|lora|trainer)", notes)
        return Trainer(
            head=SFT_LOSS if sft else VOCABULARY_CHUNKS,
            compiled=True,
            base_bytes=4.0,
            adapters=4,
            fp32_combine=True,
        )
    return Trainer()
