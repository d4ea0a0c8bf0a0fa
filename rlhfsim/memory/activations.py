"""Bytes of activations: what a layer keeps for its backward pass, and what it needs while it runs.

Everything is per token of the micro-batch on one GPU (after context parallelism) unless a name
says otherwise. Two ways of writing a block are told apart: fused (Megatron with Transformer
Engine: fused norm, rotary and SwiGLU) and eager (Hugging Face modules under DeepSpeed or FSDP:
norms in FP32, one kernel per operation, each keeping its own inputs).

Legend: h hidden, a query heads, g KV heads, d_k and d_v head widths, f FFN width, k experts per
token, t tensor parallelism, s the factor 1/t of sequence parallelism (1 without it).

Not known here: offloaded activations, and what `torch.compile` saves by recomputing element-wise
operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from rlhfsim.kernels.layers import heads
from rlhfsim.memory.states import Stage, stage_layers
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.backends import BACKENDS, Backend
from rlhfsim.specs.placement.layout import Layout

BF16, FP32 = 2.0, 4.0
LOGIT_BYTES_TRAIN = BF16 + 2 * FP32
"""Per logit while the loss runs: BF16 logits, their FP32 copy, and one FP32 of softmax or gradient."""
LOGIT_BYTES_FORWARD = BF16 + 2 * FP32
"""Per logit in a log-prob forward: BF16 logits, FP32 copy, exponentials of the log-sum-exp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """Bytes per token of one layer."""

    saved: dict[str, float]
    """Tensors that the backward pass needs, by name."""
    input: float
    """The layer's input alone: what full recomputation keeps."""
    transient: float
    """Largest set of gradients and temporaries that stand beside the saved ones in backward."""
    forward: float
    """Largest set of tensors alive at once in a forward pass without gradients."""

    @property
    def total(self) -> float:
        """All saved bytes."""
        return sum(self.saved.values())


@lru_cache(maxsize=65536)
def layer_tensors(
    model: ModelSpec,
    tp: int,
    etp: int = 1,
    *,
    sequence_parallel: bool = False,
    fused: bool = True,
    experts: bool = False,
    imbalance: float = 1.0,
    fp8: bool = False,
    score_length: float = 0.0,
) -> LayerTensors:
    """The tensors of one layer; flash attention leaves no s^2 term.

    `fp8`: matrix products keep their inputs in one byte. `score_length`: keys that a query sees
    where attention is not flash: scores, softmax and dropout mask then take 5 a s bytes per token
    (Korthikanti et al., arXiv 2205.05198, section 4.1).
    """
    s = 1.0 / tp if sequence_parallel else 1.0
    h = model.hidden
    saved = {"attention_norm": _norm(h, fused) * s, "attention_input": BF16 * h * s}
    saved |= _attention(model, tp, fused)
    saved |= {"mlp_norm": _norm(h, fused) * s, "mlp_input": BF16 * h * s}
    if score_length:
        saved["attention_scores"] = 5 * heads(model.attention, tp).query * score_length
    widest = _attention_width(model, tp)
    if experts and model.moe:
        extra, wide = _moe(model, tp, etp, s, fused, imbalance)
        saved |= extra
        widest = max(widest, wide)
    else:
        saved |= _mlp(model, model.ffn / tp, fused)
        widest = max(widest, (3 if model.gated else 2) * model.ffn / tp)
    stream = BF16 * 2 * h * s
    if fp8:  # norm outputs and products are kept quantised; the attention output in both forms
        half = ("attention_input", "mlp_input", "mlp_activation", "dispatched")
        saved |= {k: v / 2 for k, v in saved.items() if k.endswith(half)}
        saved["attention_output"] *= 1.5
    return LayerTensors(
        saved=saved, input=BF16 * h * s, transient=stream + BF16 * widest, forward=2 * stream + BF16 * widest
    )


def _norm(width: float, fused: bool) -> float:
    """Saved by one RMSNorm: its input; eager ones keep it in FP32 and the normalised values in BF16."""
    return (BF16 if fused else FP32 + BF16) * width


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
    if at.qk_norm != "none":
        saved["query_key_norm"] = _norm(q + k, fused)
    return saved


def _attention_width(model: ModelSpec, tp: int) -> float:
    local = heads(model.attention, tp)
    return 2 * (local.query + local.kv) * local.qk_dim + 2 * local.query * local.v_dim


def _mlp(model: ModelSpec, width: float, fused: bool) -> dict[str, float]:
    """Two (SwiGLU: three) matrices of local width f: inputs of the activation, and its output.

    Fused SwiGLU keeps gate, up and product (6 f bytes); eager also keeps silu(gate) (8 f).
    """
    gates = 2 if model.gated else 1
    eager = BF16 * width if model.gated and not fused else 0.0
    return {"mlp_activation_input": BF16 * gates * width, "mlp_activation": BF16 * width + eager}


def _moe(
    model: ModelSpec, tp: int, etp: int, s: float, fused: bool, imbalance: float
) -> tuple[dict[str, float], float]:
    """Router, dispatched copies, experts; and the widest set of temporaries.

    A GPU's tokens go out k times and, balanced, as many come back: k s copies per token (times
    `etp`, whose group works on the union of its tokens), times the imbalance of the fullest rank.
    """
    moe = model.moe
    assert moe is not None
    copies = moe.top_k * s * etp * imbalance
    width = moe.expert_ffn / etp
    saved = {"router": FP32 * 2 * moe.num_experts * s, "dispatched": BF16 * copies * model.hidden}
    saved |= {f"expert_{k}": copies * v for k, v in _mlp(model, width, fused).items()}
    saved["combined"] = BF16 * copies * model.hidden
    if moe.num_shared_experts:
        shared = moe.num_shared_experts * moe.shared_ffn / tp
        saved |= {f"shared_{k}": v for k, v in _mlp(model, shared, fused).items()}
    return saved, copies * (2 * model.hidden + 3 * width)


class Activations(NamedTuple):
    """Bytes of activations of one call on one GPU."""

    saved: float
    """Kept for backward over all layers and micro-batches in flight."""
    working: float
    """The layer that runs: temporaries, gradients, and its tensors while it is recomputed."""
    logits: float
    """Logits and loss on the last stage."""

    @property
    def peak(self) -> float:
        """Saved tensors plus the larger of logits (at the loss) and working set (in backward)."""
        return self.saved + max(self.working, self.logits)


def in_flight(pp: int, vp: int, micro_batches: int, stage: Stage) -> float:
    """Micro-batches whose activations a stage holds under 1F1B.

        first stage: min(p, m), interleaved p (1 + (p-1)/(p v))      last stage: 1

    Source: Korthikanti et al., arXiv 2205.05198, section 4.2.3. Interleaving needs m >= p.
    """
    if stage != "first":
        return 1.0 if vp == 1 else 1.0 + (pp - 1) / (pp * vp)
    if vp == 1 or micro_batches < pp:
        return float(min(pp, micro_batches))
    return min(pp * (1 + (pp - 1) / (pp * vp)), float(micro_batches))


_SHAPE = attrgetter("tp", "pp", "etp", "sequence_parallel", "recompute")
"""Fields of a layout that decide the bytes of a token."""


def training_activations(
    model: ModelSpec,
    layout: Layout,
    backend: Backend,
    *,
    tokens: float,
    micro_batches: int,
    stage: Stage = "only",
    imbalance: float = 1.0,
    fp8: bool = False,
    score_length: float = 0.0,
    logit_bytes: float = LOGIT_BYTES_TRAIN,
) -> Activations:
    """Activations of a training call whose micro-batch has `tokens` tokens over all cp ranks.

    full recomputation: layer inputs, and the tensors of one layer while it is recomputed
    selective: scores of attention are dropped; with flash attention there are none to drop
    none: every tensor
    """
    local = tokens / layout.cp
    saved, working = _kept_and_working(model, backend, _SHAPE(layout), stage, imbalance, fp8, score_length)
    held = in_flight(layout.pp, layout.vp, micro_batches, stage)
    logits = logits_bytes(model, layout, local, logit_bytes) if stage != "first" else 0.0
    return Activations(saved=local * saved * held, working=local * working, logits=logits)


@lru_cache(maxsize=65536)
def _kept_and_working(
    model: ModelSpec,
    backend: Backend,
    shape: tuple[Any, ...],
    stage: Stage,
    imbalance: float,
    fp8: bool,
    score_length: float,
) -> tuple[float, float]:
    """Bytes per token of one micro-batch: kept by all layers of a stage, and of the layer that runs."""
    tp, pp, etp, sequence_parallel, recompute = shape
    length = 0.0 if recompute == "selective" else score_length
    layers, moe_layers = stage_layers(model, pp, stage)
    plain, sparse = _tensors(model, backend, tp, etp, sequence_parallel, imbalance, fp8, length)
    dense_layers = layers - moe_layers
    running = [t for t, number in ((plain, dense_layers), (sparse, moe_layers)) if number]
    transient = max(t.transient for t in running)
    if recompute == "full":
        return plain.input * layers, transient + max(t.total for t in running)
    return dense_layers * plain.total + moe_layers * sparse.total, transient


def forward_activations(
    model: ModelSpec,
    layout: Layout,
    backend: Backend,
    *,
    tokens: float,
    imbalance: float = 1.0,
    score_length: float = 0.0,
    logit_bytes: float = LOGIT_BYTES_FORWARD,
) -> Activations:
    """Activations of a scoring call: one layer at a time, then the logits."""
    local = tokens / layout.cp
    working = _alive(model, backend, layout.tp, layout.etp, layout.sequence_parallel, imbalance, score_length)
    logits = logits_bytes(model, layout, local, logit_bytes)
    return Activations(saved=0.0, working=local * working, logits=logits)


@lru_cache(maxsize=65536)
def _alive(
    model: ModelSpec,
    backend: Backend,
    tp: int,
    etp: int,
    sequence_parallel: bool,
    imbalance: float,
    score_length: float,
) -> float:
    """Bytes per token alive at once in the widest layer of a forward without gradients."""
    plain, sparse = _tensors(model, backend, tp, etp, sequence_parallel, imbalance)
    running = (t for t, number in ((plain, model.num_dense_layers), (sparse, model.num_moe_layers)) if number)
    working = max(t.forward for t in running)
    if score_length:  # scores and softmax of one layer
        working += 4 * heads(model.attention, tp).query * score_length
    return working


def logits_bytes(model: ModelSpec, layout: Layout, tokens: float, bytes_per_logit: float) -> float:
    """Bytes around the logits of `tokens` local tokens (M4); a value head has one per token."""
    return tokens * (1.0 if model.value_head else model.vocab / layout.tp) * bytes_per_logit


def _tensors(
    model: ModelSpec,
    backend: Backend,
    tp: int,
    etp: int,
    sequence_parallel: bool,
    imbalance: float,
    fp8: bool = False,
    score_length: float = 0.0,
) -> tuple[LayerTensors, LayerTensors]:
    """One dense and one MoE layer under a layout."""
    options: dict[str, Any] = {
        "sequence_parallel": sequence_parallel and tp > 1 and BACKENDS[backend].sequence_parallel,
        "fused": backend == "megatron",
        "fp8": fp8,
        "score_length": score_length,
    }
    plain = layer_tensors(model, tp, **options)
    if not model.num_moe_layers:
        return plain, plain
    sparse = layer_tensors(model, tp, etp, experts=True, imbalance=imbalance, **options)
    return plain, sparse
