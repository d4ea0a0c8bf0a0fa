"""What stands around the logits of a micro-batch in verl: release, temperature, padding, entropy, kernels.

Bytes of a logit at the peak. Sources: verl/workers/actor/dp_actor.py and verl/utils/torch_functional.py of
0.2 (also in Jiayi-Pan/TinyZero de61e6aad) to 0.7.1, transformer_impl.py of verl/workers/engine/fsdp and of
megatron of 0.8.0 to 0.9.1; verl/utils/experimental. The sums are what lives when these lines run on a CPU
(`lab.oracle.live_bytes`), kernels of flash-attn and torch.compile taken to allocate what they return.

Bytes that padded losses move by logit of the micro-batch, the response taken as half of it, counted kernel by
kernel (read + written) in the same places. Not known here: transformers before 4.45 return FP32 logits.

    scoring          temperature 4; half of: cross-entropy 2, FP32 copy 6, softmax 8, log-sum-exp 24,
                     product 12, sum 4                                                            32
    training         temperature 4, half a cross-entropy 1                                        5
      its backward   cross-entropy 2, the slice of the response 4, temperature 4                  10
    with entropy     as scoring                                                                   32
      its backward   half of: products 16, softmax 12, log-sum-exp 24, their sums 24; cast 3, cross-entropy
                     and its sum 5, slice 4, temperature 4                                        54
"""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.specs.placement.heads import Head

UNPADDED = Head(
    train_bytes=2,
    score_bytes=2,
    source="verl 0.9.1 at temperature 1: BF16 logits, over which cross-entropy of flash-attn writes their "
    "gradient; the compiled entropy of scoring keeps nothing of their size",
)
SCALED = Head(
    train_bytes=4,
    score_bytes=4,
    source="verl 0.9.0, and 0.9.1 at another temperature: BF16 logits and their copy divided by it, or its "
    "gradient and theirs",
)
SCALED_IN_PLACE = Head(
    train_bytes=8,
    score_bytes=2,
    source="verl until 0.8: `logits_rmpad.div_(temperature)` on a view, whose backward pass (CopySlices) has "
    "the gradient, its copy over the base, a copy of that part and the quotient, BF16 each",
)
PADDED = Head(
    train_bytes=6,
    score_bytes=14,
    score_traffic=32,
    forward_traffic=5,
    backward_traffic=10,
    source="verl from 0.4 without remove_padding: BF16 logits, a copy of the response's and the gradient "
    "of all; while scoring the entropy as in ENTROPY_PADDED (verl/workers/actor/dp_actor.py)",
)
ENTROPY_IN_LOSS = Head(
    train_bytes=10,
    score_bytes=10,
    source="verl with entropy in the loss (its default until 0.3): BF16 logits and their gradients by "
    "cross-entropy and by the compiled entropy, one FP32 of softmax between (verl/workers/actor/dp_actor.py)",
)
ENTROPY_PADDED = Head(
    train_bytes=14,
    score_bytes=14,
    score_traffic=32,
    forward_traffic=32,
    backward_traffic=54,
    source="verl without remove_padding: entropy_from_logits runs eagerly under autocast, so the BF16 logits "
    "have an FP32 copy, an FP32 softmax and its product beside them (verl/workers/actor/dp_actor.py)",
)
FUSED = Head(
    train_bytes=16,
    score_bytes=12,
    tokens=512,
    source="verl use_fused_kernels: FusedLinearForPPO goes through 512 tokens at a time, their FP32 logits, "
    "softmax and gradients (verl/utils/experimental/torch_functional.py)",
)


MEGATRON = Head(
    train_bytes=8,
    score_bytes=12,
    reference_bytes=6,
    source="verl 0.5 to 0.9.1 with Megatron-Core: FP32 logits, whose gradient takes their place and is "
    "divided by the temperature into another; while scoring a copy for the entropy and its softmax too",
)
MEGATRON_FUSED = Head(
    train_bytes=4,
    score_bytes=2,
    vocab=1024,
    source="verl use_fused_kernels with Megatron-Core: gradients of 1,024 entries at a time "
    "(efficient_entropy_backward of verl/utils/kernel/kernels.py)",
)
MEGATRON_ENTROPY = replace(MEGATRON, train_bytes=12, source=f"{MEGATRON.source}; entropy in the loss too")
EAGER_PADDED = Head(
    train_bytes=16,
    score_bytes=12,
    source="verl's fsdp_sft_trainer: BF16 logits, a copy without the last token, and in FP32 log-softmax, "
    "its gradient and that of the logits (_compute_loss_and_backward of 0.7.0)",
)
EAGER_UNPADDED = replace(
    EAGER_PADDED,
    train_bytes=14,
    score_bytes=10,
    source="the same across the ranks of a sequence, whose logits are not copied",
)


def head_of(*, packing: bool, entropy: bool, scaled: Head = UNPADDED) -> Head:
    """The head under FSDP without fused kernels; `entropy`: the loss holds it; `scaled`: else, without
    padding."""
    if entropy:
        return ENTROPY_IN_LOSS if packing else ENTROPY_PADDED
    return scaled if packing else PADDED
