"""The work of one micro-batch on one GPU, of which layers, embedding and head are timed.

What follows from the layout is a number or a word, or an array with an entry a layout.
"""

from __future__ import annotations

from rlhfsim.elementwise import Size, where
from rlhfsim.frozen import frozen

LOW = ("fp8", "fp4")
"""Precisions in which linear layers leave BF16."""


@frozen
class Work:
    """One micro-batch on one GPU, and how the layer is cut."""

    tokens: Size
    """T, after context parallelism."""
    length: float
    """Length that attention sees, before context parallelism."""
    tp: Size = 1
    cp: Size = 1
    ep: Size = 1
    etp: Size = 1
    sequence_parallel: Size = True
    precision: str = "bf16"
    """Precision of the linear layers; attention cores, router and head stay in BF16."""
    bf16_matrices: tuple[str, ...] = ()
    """Matrices that stay in BF16 whatever the precision, by their names in `kernels.layers`."""
    low_precision_gain: float = 1.0
    """Speed of its FP8 and FP4 products over the timed serving kernels."""
    fused: bool = True
    """Element-wise chains run as one kernel (Megatron with Transformer Engine, torch.compile)."""
    attention_slowdown: float = 1.0
    """Time of the attention kernel over that of the measured one (an older FlashAttention)."""
    flash: bool = True
    """False: scores are written to memory (kernels before FlashAttention)."""
    fp8_attention: bool = False
    """The attention core runs in FP8."""
    fused_experts: bool = False
    """Activation and quantisation of the experts happen inside their grouped GEMMs."""
    dispatcher: Size = None
    """What brings tokens to their experts; None: not said."""
    ep_overlap: Size = None
    """It works while another micro-batch computes; None: not said."""
    skew: Size = 1.0
    """Busiest over mean expert-parallel rank."""

    @property
    def held(self) -> Size:
        """T': tokens outside the tensor-parallel regions."""
        return where(self.sequence_parallel, self.tokens / self.tp, self.tokens)
