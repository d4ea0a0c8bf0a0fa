"""What stands around the logits of a micro-batch in TRL, by trainer and release.

Read in trl/trainer/*_trainer.py, trl/trainer/utils.py (`add_fused_lm_head`) and trl/kernels of 1.0.0 to
1.16.0: since 1.15 all trainers but DPO's go through tiles, since 1.14 SFT's by default.
"""

from __future__ import annotations

from rlhfsim.specs.placement.heads import Head

WHOLE = Head(
    train_bytes=4,
    score_bytes=2,
    source="TRL, trainer/utils.py, selective_log_softmax: its kernel reads BF16 logits and writes their "
    "gradient",
)
TILED = Head(
    train_bytes=2,
    score_bytes=2,
    tokens=4096,
    vocab=32_768,
    matrix_bytes=6,
    state_bytes=6,
    computed_again=True,
    score_traffic=2,
    forward_traffic=2,
    backward_traffic=12,
    source="TRL 1.16.0, kernels/chunked_logprob.py: one BF16 tile, computed again in the backward pass and "
    "turned into its gradient in place; FP32 sums of both gradients, and their copies in BF16. Read and "
    "written: the tile, and with its gradient FP32 sums of the matrix (8 B by hidden/4,096)",
)
LIGER = Head(
    train_bytes=16,
    score_bytes=10,
    source="LigerFusedLinearGRPOLoss, chunk_size 1: logits of one response in BF16 and FP32, their "
    "log-softmax and gradients (linkedin/Liger-Kernel, src/liger_kernel/chunked_loss/grpo_loss.py)",
)
