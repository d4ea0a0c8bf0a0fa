"""What stands around the logits of a micro-batch in verl: padding, entropy in the loss, fused kernels.

Bytes of a logit at the peak. Sources: verl/workers/actor/dp_actor.py and verl/utils/torch_functional.py of
0.2 (also in Jiayi-Pan/TinyZero de61e6aad), 0.5.0 and 1dda039b9; verl/utils/experimental.

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

from rlhfsim.frameworks.configuration.settings import FrameworkSettings
from rlhfsim.frameworks.verl.versions import ENTROPY, VERSION, default
from rlhfsim.specs.placement.heads import Head
from rlhfsim.specs.placement.software import Software, default_software

UNPADDED = Head(
    train_bytes=4,
    score_bytes=4,
    source="verl 1dda039b9, utils/torch_functional.py: cross-entropy of flash-attn on BF16 logits "
    "without padding, their BF16 gradient; entropy while scoring",
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


def head_of(*, packing: bool, entropy: bool) -> Head:
    """The head under FSDP without fused kernels; `entropy`: the loss holds it."""
    if entropy:
        return ENTROPY_IN_LOSS if packing else ENTROPY_PADDED
    return UNPADDED if packing else PADDED


def software(s: FrameworkSettings, *, packing: bool) -> Software | None:
    """What the keys say of FSDP and of the head under it; None: as `runs` has it.

    The strategy `fsdp`, which is the default, is FSDP1 in every release
    (verl/workers/engine/fsdp/transformer_impl.py; before, verl/workers/fsdp_workers.py).
    """
    weight = s.share(ENTROPY, default=default(ENTROPY, s.find(VERSION)))
    head = head_of(packing=packing, entropy=weight != 0)
    if packing and s.flag("actor_rollout_ref.actor.entropy_from_logits_with_chunking"):
        head = replace(head, score_bytes=2)  # entropy of 2,048 tokens at a time
    if s.flag("actor_rollout_ref.model.use_fused_kernels"):
        head = FUSED
    usual = default_software("fsdp2")
    flat = s.find("actor_rollout_ref.actor.strategy") != "fsdp2"
    known = replace(usual, head=None if head in (UNPADDED, PADDED) else head, flat_parameters=flat)
    return None if known == usual else known
