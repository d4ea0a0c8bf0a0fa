"""FLOP counts: what the model needs (model FLOP) and what the hardware does (hardware FLOP).

Kaplan et al. (arXiv 2001.08361) and Chinchilla accounting: 2 N_a per token forward, twice that
backward, N_a without the embedding table and with the LM head; attention counted causal, over the
lengths as they are (physics T1). Cross-check: NVIDIA-NeMo/RL nemo_rl/utils/flops_formulas.py.
"""

from __future__ import annotations

from rlhfsim.kernels.sequences import Sequences
from rlhfsim.specs.model.model import ModelSpec

FLASH_BACKWARD = 2.5
"""FLOP of the flash backward over its forward: five products for two (Dao, arXiv 2307.08691, section
3.1.2)."""


def attended_pairs(length: float, window: float | None = None) -> float:
    """Query-key pairs of one causal sequence.

    s^2/2, or w s - w^2/2 where a window w < s hides the rest
    """
    if window is None or window >= length:
        return length * length / 2
    return window * length - window * window / 2


def attention_flop(model: ModelSpec, sequences: Sequences, *, causal: bool = True) -> float:
    """Forward FLOP of the attention cores of all layers.

        2 a (d_k + d_v) pairs  a layer and sequence;  = 2 L a d_k sum(s^2) for d_v = d_k (G6)

    Sparse attention computes the pairs that its indexer chose, and the indexer scores all; recurrent layers
    have their scan (`Recurrent.scan_flop`). Windowed layers see fewer pairs; they take sum(s^2)/sum(s) as the
    length of every sequence.
    `causal=False` counts the whole square, the convention of Megatron and llm-foundry.
    """
    at = model.attention
    per_pair = 2.0 * at.num_heads * (at.head_dim + at.value_dim)
    length = sequences.attention_length
    copies = sequences.tokens / length
    windowed = at.num_windowed_layers
    everything = attended_pairs(length) * (1 if causal else 2)
    whole = attended_pairs(length, at.index_topk) if causal else everything
    seen = attended_pairs(length, at.sliding_window) if causal else everything
    full = model.num_attention_layers - windowed
    chosen = copies * model.num_attention_layers * at.index_flop(everything)
    scan = model.num_recurrent_layers * model.recurrent.scan_flop if model.recurrent else 0.0
    return per_pair * copies * (full * whole + windowed * seen) + chosen + scan * sequences.tokens


def matmul_flop(model: ModelSpec, tokens: float) -> float:
    """Forward FLOP of all weight matrices: 2 N_a per token."""
    return 2.0 * model.num_matmul_params_active * tokens


def forward_flop(model: ModelSpec, sequences: Sequences) -> float:
    """Model FLOP of one forward pass: 2 N_a T + 2 L a d_k sum(s^2)."""
    if model.others:
        shared = zip(model.each, sequences.dealt(len(model.each)), strict=True)
        return sum(forward_flop(one, its) for one, its in shared)
    return matmul_flop(model, sequences.tokens) + attention_flop(model, sequences)


def training_flop(model: ModelSpec, sequences: Sequences, *, causal: bool = True) -> float:
    """Model FLOP of forward and backward: 6 N_a T + 6 L a d_k sum(s^2) (T1)."""
    matrices = matmul_flop(model, sequences.tokens)
    return 3.0 * (matrices + attention_flop(model, sequences, causal=causal))
