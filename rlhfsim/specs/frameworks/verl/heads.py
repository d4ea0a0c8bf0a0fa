"""Which of verl's heads (`heads.yaml`) a trainer without fused kernels has."""

from __future__ import annotations

from rlhfsim.specs.frameworks.files import heads_of
from rlhfsim.specs.placement.heads import Head

HEADS = heads_of("verl")


def head_of(*, packing: bool, entropy: bool, scaled: Head = HEADS["unpadded"]) -> Head:
    """The head under FSDP without fused kernels; `entropy`: the loss holds it; `scaled`: else, without
    padding."""
    if entropy:
        return HEADS["entropy_in_loss" if packing else "entropy_padded"]
    return scaled if packing else HEADS["padded"]
