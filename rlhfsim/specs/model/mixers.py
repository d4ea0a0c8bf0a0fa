"""Layers that keep a state of constant size in place of a KV cache, and what kinds of layer a model has.

Legend: h hidden, a heads, d head width, g groups of keys, n width of a key (the state of a head is d x n), k
taps of the convolution. Sources: Gated DeltaNet, arXiv 2412.06464; Mamba-2, arXiv 2405.21060; in
huggingface/transformers models/qwen3_next/modeling_qwen3_next.py and nemotron_h/modeling_nemotron_h.py.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from rlhfsim.frozen import frozen
from rlhfsim.specs.hashing import Hashed, hashed_once
from rlhfsim.specs.loading import checked
from rlhfsim.specs.model.blocks import MAX_LAYERS, MAX_WIDTH, check

Mixer = Literal["attention", "recurrent", "none"]
Ffn = Literal["dense", "experts", "none"]
BF16 = 2.0


class LayerKind(NamedTuple):
    """Layers that are alike."""

    layers: int
    mixer: Mixer
    """What mixes the tokens: the model's attention (full, windowed, sparse), its recurrent block, nothing."""
    ffn: Ffn

    @property
    def blocks(self) -> int:
        """Residual blocks: 2 in a transformer layer, 1 where mixer and FFN are layers of their own."""
        return (self.mixer != "none") + (self.ffn != "none")


DENSE = LayerKind(1, "attention", "dense")
EXPERTS = LayerKind(1, "attention", "experts")
"""One layer of a transformer."""


@hashed_once
@checked
@frozen
class Recurrent(Hashed):
    """The block of every layer that carries a state: a gated delta net or a Mamba-2 scan."""

    kind: Literal["gated_delta_net", "mamba2"]
    num_layers: int
    """Layers that have it in place of attention."""
    num_heads: int
    """Heads of the values (a): `linear_num_value_heads`, `mamba_num_heads`."""
    head_dim: int
    """Width of a head (d)."""
    num_groups: int
    """Heads of queries and keys (g): `linear_num_key_heads`, `n_groups`."""
    state_dim: int
    """Width of a key (n): `linear_key_head_dim`, `ssm_state_size`."""
    conv_kernel: int
    """Taps of the causal convolution before the scan (k)."""
    conv_bias: bool = False
    state_bytes_per_element: float = 4.0
    """How an engine stores the state: `mamba_ssm_dtype` of the config, FP32 where it says nothing."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        check("num_layers", self.num_layers, 1, MAX_LAYERS)
        for name in ("num_heads", "head_dim", "num_groups", "state_dim", "conv_kernel"):
            check(name, getattr(self, name), 1, MAX_WIDTH)

    @property
    def words(self) -> str:
        """What people call it."""
        return {"gated_delta_net": "gated delta net", "mamba2": "Mamba-2"}[self.kind]

    @property
    def inner(self) -> int:
        """Width of the values (a d)."""
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: values, keys and queries (a d + 2 g n)."""
        return self.inner + 2 * self.num_groups * self.state_dim

    @property
    def in_width(self) -> int:
        """Outputs of the projections in: convolution, output gate, and one step or two gates a head."""
        gates = 2 if self.kind == "gated_delta_net" else 1
        return self.conv_width + self.inner + gates * self.num_heads

    def matrix_params(self, hidden: int) -> int:
        """Elements of the projections of one layer."""
        return hidden * (self.in_width + self.inner)

    @property
    def vector_params(self) -> int:
        """Convolution, decay, step bias, skip (Mamba-2) and the norm before the output, of one layer."""
        conv = self.conv_width * (self.conv_kernel + self.conv_bias)
        if self.kind == "gated_delta_net":
            return conv + 2 * self.num_heads + self.head_dim
        return conv + 3 * self.num_heads + self.inner

    @property
    def tensors(self) -> int:
        """Names of one layer in its checkpoint, without the layer's norm."""
        return 7 if self.kind == "gated_delta_net" else 7 + self.conv_bias

    @property
    def scan_flop(self) -> float:
        """FLOP of one token through the scan of one layer, whatever the context.

            gated delta net: 8 a d n (K K^T, V K^T, the update of the state, S Q)     Mamba-2: 7 a d n

        and 2 k FLOP a channel of the convolution. Source: NVIDIA/Megatron-LM d98e8a64, `gdn_layer_flops` and
        `mamba_layer_flops` of megatron/training/training.py. Chunked kernels compute more.
        """
        each = 8.0 if self.kind == "gated_delta_net" else 7.0
        return each * self.inner * self.state_dim + 2.0 * self.conv_kernel * self.conv_width

    @property
    def state_bytes(self) -> float:
        """Bytes that one sequence keeps in one layer: the state, and k - 1 inputs of the convolution."""
        state = self.state_bytes_per_element * self.inner * self.state_dim
        return state + BF16 * self.conv_width * (self.conv_kernel - 1)
