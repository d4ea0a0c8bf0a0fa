"""The vision tower of a multi-modal model: its parameters, its FLOP, and the tokens that an image becomes.

Source of shapes: huggingface/transformers, modeling files of qwen2_5_vl, qwen3_vl, qwen3_5 and siglip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhfsim.specs.hashing import Hashed, hashed_once
from rlhfsim.specs.loading import checked
from rlhfsim.specs.model.blocks import MAX_LAYERS, MAX_POSITION, MAX_WIDTH, check


@hashed_once
@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Vision(Hashed):
    """A transformer over patches, and what projects its output into the stream of the language model."""

    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    patch: int
    """Pixels on a side of a patch."""
    patch_params: int
    """Elements of the patch embedding with its positions."""
    layer_params: int
    """Elements of one layer, biases and norms included."""
    merger_params: int
    """Elements of what joins patches and projects them, all of it."""
    merge: int
    """Patches on a side that become one token (2 in Qwen-VL)."""
    window: int | None = None
    """Patches that see each other in a windowed layer (Qwen2.5-VL: 64); absent where all layers see all."""
    num_full_layers: int = 0
    """Layers in which all patches of an image see each other, where the others are windowed."""
    tokens_per_image: int | None = None
    """Tokens of every image, where the tower resizes them to one size (Gemma 3: 256)."""
    image_size: int | None = None
    """Pixels on a side to which every image is resized."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        check("num_layers", self.num_layers, 1, MAX_LAYERS)
        for name in ("hidden", "ffn", "num_heads", "patch", "merge"):
            check(name, getattr(self, name), 1, MAX_WIDTH)
        for name in ("patch_params", "layer_params", "merger_params"):
            check(name, getattr(self, name), 0, MAX_POSITION)

    @property
    def num_params(self) -> int:
        """All elements of the tower and its projection."""
        return self.patch_params + self.num_layers * self.layer_params + self.merger_params

    def tokens(self, width: int, height: int) -> int:
        """Tokens of an image: one for `merge` x `merge` patches, sides rounded up to whole ones."""
        if self.tokens_per_image is not None:
            return self.tokens_per_image
        side = self.patch * self.merge
        return math.ceil(width / side) * math.ceil(height / side)

    def flop(self, tokens: float) -> float:
        """Forward FLOP for one image that becomes `tokens` tokens: 2 a parameter and patch, and attention."""
        per_token = self.merge**2
        if self.tokens_per_image and self.image_size:
            per_token = (self.image_size // self.patch) ** 2 // self.tokens_per_image
        patches = tokens * per_token
        layers = 2.0 * patches * self.num_layers * self.layer_params
        full = self.num_layers if self.window is None else self.num_full_layers
        seen = full * patches + (self.num_layers - full) * min(patches, float(self.window or patches))
        core = 4.0 * self.hidden * patches * seen
        return layers + core + 2.0 * tokens * self.merger_params
