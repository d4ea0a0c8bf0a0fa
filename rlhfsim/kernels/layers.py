"""The matrix products and the attention of one transformer layer as one GPU computes them.

Legend: T tokens on the GPU, h hidden, a query heads, g KV heads, d_k and d_v head widths, f FFN
width, E experts, k experts per token, t tensor, e expert and x expert-tensor parallelism. A
`Matrix` is y[m, n] = x[m, k] w[k, n] with m = T x rows; column-parallel matrices divide n by t,
row-parallel ones k (Megatron-LM, Shoeybi et al., arXiv 1909.08053). Used by training, forward,
prefill and decode.
"""

from __future__ import annotations

from functools import lru_cache

from rlhfsim.elementwise import Size, kept
from rlhfsim.frozen import frozen
from rlhfsim.specs.model.mixers import LayerKind
from rlhfsim.specs.model.model import Attention, ModelSpec


@frozen
class Matrix:
    """One weight matrix on one GPU of a layout, or of each of a column."""

    name: str
    n: Size
    """Output width on this GPU."""
    k: Size
    """Input width on this GPU."""
    rows: Size = 1.0
    """Rows per token that the GPU holds, summed over its experts."""
    experts: Size = 1
    """Equal matrices that share the rows (grouped GEMM)."""
    linear: bool = True
    """Takes part in FP8/FP4 training; routers and the LM head stay BF16."""

    @property
    def params(self) -> Size:
        """Elements on this GPU."""
        return self.n * self.k * self.experts


@frozen
class Heads:
    """Attention on one GPU; its heads are arrays where its tp is."""

    query: int
    kv: int
    qk_dim: int
    v_dim: int


def _ceil(value: int, parts: Size) -> Size:
    return -(-value // parts)


@kept(4096)
def heads(attention: Attention, tp: Size) -> Heads:
    """Heads on one of `tp` GPUs; KV heads are copied where there are fewer than GPUs."""
    return Heads(
        query=_ceil(attention.num_heads, tp),
        kv=_ceil(attention.num_kv_heads, tp),
        qk_dim=attention.head_dim,
        v_dim=attention.value_dim,
    )


@kept(4096)
def attention_matrices(model: ModelSpec, tp: Size) -> tuple[Matrix, ...]:
    """Projections of one attention block: QKV column-parallel, output row-parallel.

    MLA: the two compressions run on every GPU, the expansions and the output are split over heads
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.1).
    """
    at, h = model.attention, model.hidden
    local = heads(at, tp)
    out = Matrix(name="out", n=h, k=local.query * local.v_dim)
    if at.kv_lora_rank is None:
        gate = 2 if at.output_gate else 1
        width = gate * local.query * local.qk_dim + local.kv * (local.qk_dim + local.v_dim)
        return Matrix(name="qkv", n=width, k=h), out
    rope, nope = at.qk_rope_head_dim or 0, at.qk_nope_head_dim or 0
    queries = local.query * local.qk_dim
    query = (
        (Matrix(name="q", n=queries, k=h),)
        if at.q_lora_rank is None
        else (Matrix(name="q_down", n=at.q_lora_rank, k=h), Matrix(name="q_up", n=queries, k=at.q_lora_rank))
    )
    return (
        *query,
        Matrix(name="kv_down", n=at.kv_lora_rank + rope, k=h),
        Matrix(name="kv_up", n=local.query * (nope + local.v_dim), k=at.kv_lora_rank),
        out,
    )


@kept(4096)
def recurrent_matrices(model: ModelSpec, tp: Size) -> tuple[Matrix, ...]:
    """Projections of one recurrent block, cut over its heads; () in a model without any."""
    block = model.recurrent
    if block is None:
        return ()
    into = Matrix(name="state_in", n=_ceil(block.in_width, tp), k=model.hidden)
    return into, Matrix(name="state_out", n=model.hidden, k=_ceil(block.inner, tp))


def mixer_matrices(model: ModelSpec, tp: Size, kind: LayerKind) -> tuple[Matrix, ...]:
    """Projections of what mixes the tokens in one layer of a kind."""
    if kind.mixer == "none":
        return ()
    return attention_matrices(model, tp) if kind.mixer == "attention" else recurrent_matrices(model, tp)


@kept(4096)
def mlp_matrices(model: ModelSpec, tp: Size, ffn: int | None = None) -> tuple[Matrix, ...]:
    """The dense MLP (or a shared expert of width `ffn`): gate and up fused, then down."""
    width = _ceil(model.ffn if ffn is None else ffn, tp)
    gates = 2 if model.gated else 1
    return (
        Matrix(name="mlp_up", n=gates * width, k=model.hidden),
        Matrix(name="mlp_down", n=model.hidden, k=width),
    )


@kept(4096)
def expert_matrices(model: ModelSpec, ep: Size, etp: Size = 1) -> tuple[Matrix, ...]:
    """Router, shared experts and the routed experts that one GPU holds; () in a dense model.

    With balanced routing each of `ep` GPUs receives as many token copies as it sends: T k rows,
    shared by its E/e experts. `etp` splits each expert's width; the copies then come from the
    whole group, T k etp rows.
    """
    moe = model.moe
    if moe is None:
        return ()
    local, width = _ceil(moe.num_experts, ep), _ceil(moe.expert_ffn, etp)
    gates = 2 if model.gated else 1
    rows = 1.0 * moe.top_k * etp
    router = Matrix(name="router", n=moe.num_experts, k=model.hidden, linear=False)
    up = Matrix(name="expert_up", n=gates * width, k=model.expert_width, rows=rows, experts=local)
    down = Matrix(name="expert_down", n=model.expert_width, k=width, rows=rows, experts=local)
    return router, up, down, *_latent_matrices(model)


def _latent_matrices(model: ModelSpec) -> tuple[Matrix, ...]:
    """Projections to the latent of the routed experts and back, on every GPU; () without a latent."""
    if not model.params_latent:
        return ()
    there = Matrix(name="latent_down", n=model.expert_width, k=model.hidden)
    return there, Matrix(name="latent_up", n=model.hidden, k=model.expert_width)


@kept(4096)
def shared_matrices(model: ModelSpec, tp: Size) -> tuple[Matrix, ...]:
    """All shared experts of a layer as one MLP; () without any."""
    moe = model.moe
    if moe is None or not moe.num_shared_experts:
        return ()
    return mlp_matrices(model, tp, moe.num_shared_experts * moe.shared_ffn)


def layer_matrices(
    model: ModelSpec, tp: Size = 1, ep: Size = 1, etp: Size = 1, *, kind: LayerKind
) -> tuple[Matrix, ...]:
    """Every matrix of one layer of a kind on one GPU."""
    block = mixer_matrices(model, tp, kind)
    if kind.ffn == "none":
        return block
    if kind.ffn == "dense":
        return block + mlp_matrices(model, tp)
    return block + expert_matrices(model, ep, etp) + shared_matrices(model, tp)


@kept(4096)
def head_matrix(model: ModelSpec, tp: Size) -> Matrix:
    """The LM head split over the vocabulary, or the one-wide value head (not split)."""
    n = 1 if model.value_head else _ceil(model.vocab, tp)
    return Matrix(name="head", n=n, k=model.embedding_width, linear=False)


@lru_cache(maxsize=4096)
def layer_params(model: ModelSpec, tp: int, *, kind: LayerKind) -> int:
    """Elements of one layer on one GPU that follow the dense data-parallel group (no experts)."""
    matrices, router = mixer_matrices(model, tp, kind), 0
    if kind.ffn == "dense":
        matrices += mlp_matrices(model, tp)
    if kind.ffn == "experts":
        matrices += shared_matrices(model, tp)
        router = model.params_router + model.params_latent
    if kind.mixer == "recurrent" and model.recurrent:
        router += _ceil(model.recurrent.vector_params, tp)
    return int(sum(m.params for m in matrices) + router + model.params_layer_norms)


@lru_cache(maxsize=4096)
def layer_expert_params(model: ModelSpec, ep: int, etp: int = 1) -> int:
    """Elements of the routed experts of one layer on one GPU."""
    return int(sum(m.params for m in expert_matrices(model, ep, etp) if m.experts > 1 or m.rows != 1))
