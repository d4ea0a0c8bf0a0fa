"""Bytes of activations: what a layer keeps for its backward pass, and what it needs while it runs.

Everything is per token of the micro-batch on one GPU (after context parallelism) unless a name
says otherwise. Two ways of writing a block are told apart: fused (Megatron with Transformer
Engine: fused norm, rotary and SwiGLU) and eager (Hugging Face modules under DeepSpeed or FSDP:
norms in FP32, one kernel per operation, each keeping its own inputs). The eager ones are held to
transformers' own modules on fake tensors, operation by operation (tests/memory/test_oracle.py).

Legend: h hidden, a query heads, g KV heads, d_k and d_v head widths, f FFN width, k experts per
token, t tensor parallelism, s the factor 1/t of sequence parallelism (1 without it), V vocabulary,
N tokens.

Not known here: offloaded activations and dropout masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from rlhfsim.kernels.layers import heads
from rlhfsim.memory.logits import BF16, FP32, head_gradient, head_peak
from rlhfsim.memory.states import Stage, stage_layers
from rlhfsim.specs.model.mixers import DENSE, LayerKind
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.backends import BACKENDS, Backend
from rlhfsim.specs.placement.heads import Head
from rlhfsim.specs.placement.layout import Layout


class Phase(NamedTuple):
    """A moment of a layer's backward pass, beside the tensors that its forward pass saved."""

    token: float
    """Bytes per token; saved tensors that are free by then count negative."""
    fixed: float = 0.0
    """Bytes whatever the tokens: the gradient of a weight, before its bucket takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """Bytes per token of one layer."""

    saved: dict[str, float]
    """Tensors that the backward pass needs, by name."""
    input: float
    """The layer's input alone: what full recomputation keeps."""
    backward: tuple[Phase, ...]
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


@lru_cache(maxsize=65536)
def layer_tensors(
    model: ModelSpec,
    tp: int,
    etp: int = 1,
    *,
    sequence_parallel: bool = False,
    fused: bool = True,
    fused_experts: bool | None = None,
    kind: LayerKind = DENSE,
    imbalance: float = 1.0,
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
    norm = _norm(model, h, fused) * s
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
    by_kernel = fused if fused_experts is None else fused_experts
    if experts and model.moe:
        copies, width = model.moe.top_k * s * etp * imbalance, model.moe.expert_ffn / etp
        saved |= _moe(model, tp, s, by_kernel, copies, width)
        backward, forward = _moe_phases(model, copies, width)
        widest = copies * (2 * model.expert_width + 3 * width)
    elif kind.ffn == "none":
        backward, forward, widest = (Phase(0.0),), 0.0, 0.0
    else:
        saved |= _mlp(model, model.ffn / tp, fused)
        widest = (3 if model.gated else 2) * model.ffn / tp
        backward, forward = _mlp_phases(model, model.ffn / tp), BF16 * widest
    stream = BF16 * h * s
    attention = BF16 * _mixer_width(model, tp, kind)
    if fused and (by_kernel or not (experts and model.moe)):
        backward = (Phase(stream + max(attention, BF16 * widest)),)
        forward = BF16 * widest
    if fp8:  # norm outputs and products are kept quantised; the attention output in both forms
        half = ("attention_input", "mlp_input", "mlp_activation", "dispatched")
        saved |= {k: v / 2 for k, v in saved.items() if k.endswith(half)}
        saved["attention_output"] = 1.5 * saved.get("attention_output", 0.0)
    return LayerTensors(
        saved=saved,
        input=stream,
        backward=tuple(Phase(stream + phase.token, phase.fixed) for phase in backward),
        forward=4 * stream + max(attention, forward),
    )


def _norm(model: ModelSpec, width: float, fused: bool) -> float:
    """Saved by one norm: its input.

    Eager RMSNorms keep it in FP32, and the normalised values that the weight multiplies, in BF16 or (Gemma)
    FP32; PyTorch's LayerNorm is one kernel.
    """
    if fused or model.norm.startswith("layernorm"):
        return BF16 * width
    return (FP32 + (FP32 if model.norm == "offset_rmsnorm" else BF16)) * width


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
        saved["query_key_norm"] = _norm(model, q + k, fused)
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
        "state_norm": _norm(model, block.inner, fused) / tp,
    }


def _mixer_width(model: ModelSpec, tp: int, kind: LayerKind) -> float:
    """Elements per token that stand at once where the tokens are mixed."""
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


def _mlp_phases(model: ModelSpec, width: float) -> tuple[Phase, ...]:
    """Eager: the gradient of the product and of the last matrix; then, gated, of both factors."""
    first = Phase(BF16 * width, BF16 * model.hidden * width)
    return (first, Phase(2 * BF16 * width)) if model.gated else (first,)


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


def _moe_phases(model: ModelSpec, copies: float, width: float) -> tuple[tuple[Phase, ...], float]:
    """Eager: moments of the backward pass, and the widest of the forward pass, as grouped GEMM runs them.

    Where router weights are FP32, the copies that come back are multiplied in FP32; three such tensors stand
    in the backward pass. Then the gradient of all experts' last matrices is one tensor, and of the others.
    Source: transformers 5.19, integrations/moe.py, grouped_mm_experts_forward.
    """
    assert model.moe is not None
    h, activation = model.expert_width * copies, BF16 * copies * width
    matrix = BF16 * model.moe.num_experts * model.expert_width * width
    gates, weighted = 2 if model.gated else 1, FP32 if model.moe.fp32_combine else BF16
    backward = (
        Phase(3 * weighted * h),
        Phase(activation - BF16 * h, matrix),
        Phase(-2 * activation, gates * matrix),
    )
    return backward, max(BF16 * h + 4 * activation, 2 * weighted * h + (FP32 + BF16 - weighted) * h)


class Activations(NamedTuple):
    """Bytes of activations of one call on one GPU."""

    saved: float
    """Kept for backward over all layers and micro-batches in flight."""
    working: float
    """The layer that runs: temporaries, gradients, and its tensors while it is recomputed."""
    logits: float
    """Final norm, logits and loss on the last stage."""

    @property
    def peak(self) -> float:
        """Saved tensors plus the larger of logits (at the loss) and working set (in backward)."""
        return self.saved + max(self.working, self.logits)

    def beside(self, buffers: float) -> float:
        """What `buffers` of the backward pass add to the peak: none of them is there at the loss."""
        return max(0.0, self.working + buffers - max(self.working, self.logits))


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
    head: Head | None = None,
    frozen: bool = False,
    compiled: bool = False,
) -> Activations:
    """Activations of a training call whose micro-batch has `tokens` tokens over all cp ranks.

    full recomputation: layer inputs, and the tensors of one layer while it is recomputed
    selective: Megatron drops the scores of attention (with flash attention there are none), FSDP2 keeps
    what `_kept_by_operation` lists
    none: every tensor

    `head`: see `head_peak`. `frozen`: the weights get no gradients (adapters). `compiled`: by torch.compile,
    layer by layer.
    """
    local = tokens / layout.cp
    saved, phases = _kept_and_running(
        model, backend, _SHAPE(layout), stage, imbalance, fp8, score_length, compiled
    )
    held = in_flight(layout.pp, layout.vp, micro_batches, stage)
    # DeepSpeed's hooks take a gradient when it is whole; FSDP2's are counted with its buffers
    gradients = backend == "deepspeed" and not frozen
    working = max(local * token + (fixed if gradients else 0.0) for token, fixed in phases)
    if gradients and model.tied_embeddings and stage == "only" and not model.value_head:
        working += head_gradient(model, layout)  # complete only after the embedding's own
    logits = 0.0
    if stage != "first":
        norm = _norm(model, 1.0, fused=False)
        logits = head_peak(model, layout, backend, local, head, norm=norm, gradients=gradients)
    return Activations(saved=local * saved * held, working=working, logits=logits)


@lru_cache(maxsize=65536)
def _kept_and_running(
    model: ModelSpec,
    backend: Backend,
    shape: tuple[Any, ...],
    stage: Stage,
    imbalance: float,
    fp8: bool,
    score_length: float,
    compiled: bool,
) -> tuple[float, tuple[Phase, ...]]:
    """Bytes per token that a stage keeps of one micro-batch, and moments of the layer that runs."""
    tp, pp, etp, sequence_parallel, recompute = shape
    length = 0.0 if recompute == "selective" else score_length
    kinds = stage_layers(model, pp, stage)
    running = _tensors(model, backend, kinds, tp, etp, sequence_parallel, imbalance, fp8, length, compiled)
    layers, first = sum(kind.layers for kind in kinds), running[0]
    by_operation = recompute == "selective" and backend == "fsdp2"
    if recompute != "full" and not by_operation:
        phases = tuple(phase for tensors in running for phase in tensors.backward)
        return sum(k.layers * t.total for k, t in zip(kinds, running, strict=True)), phases
    kept = first.input + (_kept_by_operation(model, tp) if by_operation else 0.0)
    phases = tuple(
        Phase(phase.token + tensors.total + first.input - kept, phase.fixed)
        for tensors in running
        for phase in tensors.backward
    )
    return kept * layers, phases


def _kept_by_operation(model: ModelSpec, tp: int) -> float:
    """Outputs that selective recomputation by operation keeps of a layer, beside its input.

    Attention's, and every second matrix product's: of q, k, v, output, gate, up and down the first, third,
    fifth and seventh. Experts are computed again. Source: torchtitan 9dec370, `_save_list` and
    `_apply_ac_to_transformer_block` of torchtitan/parallelisms/parallelize_llama.py.
    """
    local = heads(model.attention, tp)
    attention = local.query * (local.qk_dim + local.v_dim) + local.kv * local.v_dim
    mlp = model.ffn / tp + model.hidden if model.num_dense_layers else 0.0
    return BF16 * (attention + mlp) + FP32 * local.query


def forward_activations(
    model: ModelSpec,
    layout: Layout,
    backend: Backend,
    *,
    tokens: float,
    imbalance: float = 1.0,
    score_length: float = 0.0,
    head: Head | None = None,
) -> Activations:
    """Activations of a scoring call: one layer at a time, then the logits (as in `training_activations`)."""
    local = tokens / layout.cp
    working = _alive(model, backend, layout.tp, layout.etp, layout.sequence_parallel, imbalance, score_length)
    logits = head_peak(model, layout, backend, local, head)
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
    running = _tensors(model, backend, model.kinds, tp, etp, sequence_parallel, imbalance)
    working = max(t.forward for t in running)
    if score_length:  # scores and softmax of one layer
        working += 4 * heads(model.attention, tp).query * score_length
    return working


# --- the head -------------------------------------------------------------------------------------


def _tensors(
    model: ModelSpec,
    backend: Backend,
    kinds: tuple[LayerKind, ...],
    tp: int,
    etp: int,
    sequence_parallel: bool,
    imbalance: float,
    fp8: bool = False,
    score_length: float = 0.0,
    compiled: bool = False,
) -> list[LayerTensors]:
    """A layer of each kind under a layout; the compiler fuses norms and activations, not experts."""
    options: dict[str, Any] = {
        "sequence_parallel": sequence_parallel and tp > 1 and BACKENDS[backend].sequence_parallel,
        "fused": backend == "megatron" or compiled,
        "fused_experts": backend == "megatron",
        "fp8": fp8,
        "score_length": score_length,
    }
    experts = {"etp": etp, "imbalance": imbalance}
    return [
        layer_tensors(
            model, tp, kind=one_layer(kind), **options, **(experts if kind.ffn == "experts" else {})
        )
        for kind in kinds
    ]
