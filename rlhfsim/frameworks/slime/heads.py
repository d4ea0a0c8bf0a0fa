"""What stands around the logits of a micro-batch in slime with `--log-probs-chunk-size`."""

from __future__ import annotations

from rlhfsim.specs.placement.heads import Head

CHUNK_ROWS = 1024
"""Tokens of a chunk where an export asks for chunks."""
CHUNKED = Head(
    train_bytes=10,
    score_bytes=6,
    source="slime, utils/ppo_utils.py, calculate_log_probs_and_entropy: copies of a chunk of tokens alone "
    "stand beside the FP32 logits and their BF16 origin while scoring; in training those that the backward "
    "pass needs stay",
)
