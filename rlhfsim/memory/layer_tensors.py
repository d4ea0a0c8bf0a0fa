"""Bytes of one layer: what it keeps for its backward pass, and what it needs while it runs.

Everything is per token of the micro-batch on one GPU (after context parallelism) unless a name
says otherwise. Two ways of writing a block are told apart: fused (Megatron with Transformer
Engine: fused norm, rotary and SwiGLU) and eager (Hugging Face modules under DeepSpeed or FSDP:
norms in FP32, one kernel per operation, each keeping its own inputs). The eager ones are held to
transformers' own modules on fake tensors, operation by operation (tests/memory/test_oracle.py).

Legend: h hidden, a query heads, g KV heads, d_k and d_v head widths, f FFN width, k experts per
token, t tensor parallelism, s the factor 1/t of sequence parallelism (1 without it), V vocabulary,
N tokens.

Not known here: dropout masks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from rlhfsim.frozen import frozen
from rlhfsim.kernels.layers import heads
from rlhfsim.memory.logits import BF16, FP32
from rlhfsim.specs.model.mixers import DENSE, LayerKind
from rlhfsim.specs.model.model import ModelSpec


class BackwardPhase(NamedTuple):
    """A moment of a layer's backward pass: what it holds next to the tensors that its forward pass saved."""

    token: float
    """Bytes per token; saved tensors that are free by then count negative."""
    fixed: float = 0.0
    """Bytes whatever the tokens: the gradient of a weight, before its bucket takes it."""


@frozen
class LayerTensors:
    """Bytes per token of one layer."""

    saved: dict[str, float]
    """Tensors that the backward pass needs, by name."""
    input: float
    """The layer's input alone: what full recomputation keeps."""
    backward: tuple[BackwardPhase, ...]
    """The moments one of which is the peak of the backward pass."""
    forward: float
    """Largest set of tensors alive at once in a forward pass without gradients."""

    @property
    def total(self) -> float:
        """All saved bytes."""
        return sum(self.saved.values())


@lru_cache(maxsize=256)
def one_layer(kind: LayerKind) -> LayerKind:
    """A kind of layer, once."""
    return kind._replace(layers=1)


class RoutedExperts(NamedTuple):
    """How one layer's experts run."""

    tp: int = 1
    """Tensor parallelism of an expert."""
    imbalance: float = 1.0
    """Tokens of the fullest expert rank over the mean."""
    fused: bool | None = None
    """Whether one kernel runs them; None: as the rest of the layer."""


@lru_cache(maxsize=65536)
def layer_tensors(
    model: ModelSpec,
    tp: int,
    routed: RoutedExperts = RoutedExperts(),  # noqa: B008  immutable
    *,
    sequence_parallel: bool = False,
    fused: bool = True,
    kind: LayerKind = DENSE,
    fp8: bool = False,
    score_length: float = 0.0,
) -> LayerTensors:
    """The tensors of one layer of a kind; flash attention leaves no s^2 term.

    `fp8`: matrix products keep their inputs in one byte. `score_length`: keys that a query sees
    where attention is not flash. Fused, scores, softmax and dropout mask then take 5 a s bytes per token
    (Korthikanti et al., arXiv 2205.05198, section 4.1); eager, scores, their softmax in FP32 and its
    copy 8 a s (transformers 4.2x, `OPTAttention.forward`).
    """
    s = 1.0 / tp if sequence_parallel else 1.0
    h = model.hidden
    norm = norm_bytes(model, h, fused) * s
    saved = {"attention_norm": norm, "attention_input": BF16 * h * s}
    saved |= _recurrent(model, tp, fused) if kind.mixer == "recurrent" else {}
    saved |= _attention(model, tp, fused) if kind.mixer == "attention" else {}
    if model.norms_per_layer > 1:
        saved |= {
            "mlp_norm": norm,
            "mlp_input": BF16 * h * s,
            "output_norms": norm * (model.norms_per_layer - 2),
        }
    experts = kind.ffn == "experts"
    if score_length and kind.mixer == "attention":
        saved["attention_scores"] = (5 if fused else 8) * heads(model.attention, tp).query * score_length
    by_kernel = fused if routed.fused is None else routed.fused
    if experts and model.moe:
        copies = model.moe.top_k * s * routed.tp * routed.imbalance
        width = model.moe.expert_ffn / routed.tp
        saved |= _moe(model, tp, s, by_kernel, copies, width)
        backward, forward = _moe_phases(model, copies, width)
        widest = copies * (2 * model.expert_width + 3 * width)
    elif kind.ffn == "none":
        backward, forward, widest = (BackwardPhase(0.0),), 0.0, 0.0
    else:
        saved |= _mlp(model, model.ffn / tp, fused)
        widest = (3 if model.gated else 2) * model.ffn / tp
        backward, forward = _mlp_phases(model, model.ffn / tp), BF16 * widest
    stream = BF16 * h * s
    attention = BF16 * _mixer_width(model, tp, kind)
    if fused and (by_kernel or not (experts and model.moe)):
        backward = (BackwardPhase(stream + max(attention, BF16 * widest)),)
        forward = BF16 * widest
    if fp8:  # norm outputs and products are kept quantised; the attention output in both forms
        half = ("attention_input", "mlp_input", "mlp_activation", "dispatched")
        saved |= {k: v / 2 for k, v in saved.items() if k.endswith(half)}
        saved["attention_output"] = 1.5 * saved.get("attention_output", 0.0)
    return LayerTensors(
        saved=saved,
        input=stream,
        backward=tuple(BackwardPhase(stream + phase.token, phase.fixed) for phase in backward),
        forward=4 * stream + max(attention, forward),
    )


def norm_bytes(model: ModelSpec, width: float, fused: bool) -> float:
    """Saved by one norm: its input.

    Eager RMSNorms keep it in FP32, and the normalised values that the weight multiplies, in BF16 or (Gemma)
    FP32; PyTorch's LayerNorm is one kernel.
    """
    if fused or model.norm.startswith("layernorm"):
        return BF16 * width
    return (FP32 + (FP32 if model.norm == "offset_rmsnorm" else BF16)) * width


def normalised_bytes(model: ModelSpec, tensors: LayerTensors) -> float:
    """Bytes of the normalised values of eager norms: needed for the gradient of their weight alone."""
    if model.norm.startswith("layernorm"):
        return 0.0
    kept = FP32 if model.norm == "offset_rmsnorm" else BF16
    return kept / (FP32 + kept) * sum(size for name, size in tensors.saved.items() if "norm" in name)


def _attention(model: ModelSpec, tp: int, fused: bool) -> dict[str, float]:
    at, local = model.attention, heads(model.attention, tp)
    q, k = local.query * local.qk_dim, local.kv * local.qk_dim
    v, out = local.kv * local.v_dim, local.query * local.v_dim
    saved = {
        "query_key_value": BF16 * (q + k + v),
        "attention_output": BF16 * out,
        "log_sum_exp": FP32 * local.query,
    }
    if at.kv_lora_rank is not None:  # latents and their norms; keys are joined from two parts
        latent = at.kv_lora_rank + (at.qk_rope_head_dim or 0) + 2 * (at.q_lora_rank or 0)
        up = local.query * ((at.qk_nope_head_dim or 0) + local.v_dim)
        saved["latents"] = BF16 * (latent + at.kv_lora_rank) + (0.0 if fused else BF16 * (q + up))
    if at.output_gate:
        saved["output_gate"] = BF16 * 2 * out
    if at.qk_norm != "none":
        saved["query_key_norm"] = norm_bytes(model, q + k, fused)
    return saved


def _recurrent(model: ModelSpec, tp: int, fused: bool) -> dict[str, float]:
    """What enters the convolution and (gated delta net) leaves it, and both sides of the gated norm.

    The states between chunks (a d n every 64 or more tokens) are computed again by the backward kernels.
    Eager norms keep what `_norm` says. Source: counting; fla `chunk_gated_delta_rule`; Mamba-2's
    `mamba_split_conv1d_scan_combined`, which computes the convolution again.
    """
    block = model.recurrent
    assert block is not None
    kept = 0 if block.kind == "mamba2" and fused else block.conv_width
    return {
        "state_input": BF16 * (block.in_width + kept) / tp,
        "state_output": BF16 * block.inner / tp,
        "state_norm": norm_bytes(model, block.inner, fused) / tp,
    }


def _mixer_width(model: ModelSpec, tp: int, kind: LayerKind) -> float:
    """Elements per token that are held at once where the tokens are mixed."""
    if kind.mixer == "recurrent" and model.recurrent:
        return 2.0 * (model.recurrent.in_width + model.recurrent.inner) / tp
    if kind.mixer == "none":
        return 0.0
    local = heads(model.attention, tp)
    return 2 * (local.query + local.kv) * local.qk_dim + 2 * local.query * local.v_dim


def _mlp(model: ModelSpec, width: float, fused: bool) -> dict[str, float]:
    """Two (SwiGLU: three) matrices of local width f: inputs of the activation, and its output.

    Fused SwiGLU keeps gate, up and product (6 f bytes); eager also keeps silu(gate) (8 f).
    """
    gates = 2 if model.gated else 1
    eager = BF16 * width if model.gated and not fused else 0.0
    return {"mlp_activation_input": BF16 * gates * width, "mlp_activation": BF16 * width + eager}


def _mlp_phases(model: ModelSpec, width: float) -> tuple[BackwardPhase, ...]:
    """Eager: the gradient of the product and of the last matrix; then, gated, of both factors."""
    first = BackwardPhase(BF16 * width, BF16 * model.hidden * width)
    return (first, BackwardPhase(2 * BF16 * width)) if model.gated else (first,)


def _moe(model: ModelSpec, tp: int, s: float, fused: bool, copies: float, width: float) -> dict[str, float]:
    """Router, dispatched copies and experts of local width.

    A GPU's tokens go out k times and, balanced, as many come back: k s copies per token (times
    `etp`, whose group works on the union of its tokens), times the imbalance of the fullest rank.
    """
    moe = model.moe
    assert moe is not None
    saved = {"router": FP32 * 2 * moe.num_experts * s, "dispatched": BF16 * copies * model.expert_width}
    saved |= {f"expert_{k}": copies * v for k, v in _mlp(model, width, fused).items()}
    saved["combined"] = BF16 * copies * model.expert_width
    if moe.num_shared_experts:
        shared = moe.num_shared_experts * moe.shared_ffn / tp
        saved |= {f"shared_{k}": v for k, v in _mlp(model, shared, fused).items()}
    return saved


def _moe_phases(model: ModelSpec, copies: float, width: float) -> tuple[tuple[BackwardPhase, ...], float]:
    """Eager: moments of the backward pass, and the widest of the forward pass, as grouped GEMM runs them.

    Where router weights are FP32, the copies that come back are multiplied in FP32; three such tensors are
    held in the backward pass. Then the gradient of all experts' last matrices is one tensor, and of the
    others. Source: transformers 5.19, integrations/moe.py, grouped_mm_experts_forward.
    """
    assert model.moe is not None
    h, activation = model.expert_width * copies, BF16 * copies * width
    matrix = BF16 * model.moe.num_experts * model.expert_width * width
    gates, weighted = 2 if model.gated else 1, FP32 if model.moe.fp32_combine else BF16
    backward = (
        BackwardPhase(3 * weighted * h),
        BackwardPhase(activation - BF16 * h, matrix),
        BackwardPhase(-2 * activation, gates * matrix),
    )
    return backward, max(BF16 * h + 4 * activation, 2 * weighted * h + (FP32 + BF16 - weighted) * h)
