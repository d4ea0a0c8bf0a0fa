"""The vision tower of a multi-modal model: its parameters, its FLOP, and the tokens that an image becomes.

Source of shapes: huggingface/transformers, modeling files of qwen2_5_vl, qwen3_vl, qwen3_5, siglip and
internvl.
"""

from __future__ import annotations

import math

from rlhfsim.frozen import frozen
from rlhfsim.specs.hashing import Hashed, hashed_once
from rlhfsim.specs.loading import checked
from rlhfsim.specs.model.blocks import MAX_LAYERS, MAX_POSITION, MAX_WIDTH, check


@hashed_once
@checked
@frozen
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
    """Pixels on a side to which every image, or every tile of one, is resized."""
    max_tiles: int | None = None
    """Tiles into which an image is cut at most, a thumbnail in addition (InternVL: 12); absent: whole."""

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
        if self.max_tiles is not None and self.image_size is not None:
            tile = (self.image_size // self.patch // self.merge) ** 2
            return self.tiles(width, height) * tile
        side = self.patch * self.merge
        return math.ceil(width / side) * math.ceil(height / side)

    def tiles(self, width: int, height: int) -> int:
        """Tiles of an image: the grid whose aspect is the nearest, the larger one where the image fills half.

        Source: OpenGVLab/InternVL, `dynamic_preprocess` (`find_closest_aspect_ratio`).
        """
        assert self.max_tiles is not None
        assert self.image_size is not None
        sides = range(1, self.max_tiles + 1)
        grids = sorted((i * j, i, j) for i in sides for j in sides if i * j <= self.max_tiles)
        best, nearest = 1, math.inf
        for count, columns, rows in grids:
            off = abs(width / height - columns / rows)
            if off < nearest or (off == nearest and 2 * width * height > self.image_size**2 * count):
                best, nearest = count, off
        return best + (best > 1)

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
