"""What a language model is made of: shapes, exact parameter counts, KV-cache bytes.

Counts are those of the checkpoint: every matrix, bias, norm and learned position, tied matrices
once, and of a vision tower that is described. Left out: multi-token-prediction modules (DeepSeek-V3's
checkpoint holds one more layer), audio towers, rotary tables and other buffers without gradient.

What frameworks pad, so that their tensors are larger than these counts: the vocabulary (Megatron
to a multiple of 128 tp, vLLM to 64 tp), and the FFN width where a quantised kernel asks for it.
Heads are never padded here: see `ModelSpec.check_tp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlhfsim.elementwise import Size, least
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.hashing import Hashed, hashed_once
from rlhfsim.specs.loading import checked
from rlhfsim.specs.model.blocks import (
    MAX_LAYERS,
    MAX_POSITION,
    MAX_VOCAB,
    MAX_WIDTH,
    Attention,
    Moe,
    Norm,
    check,
    check_optional,
)
from rlhfsim.specs.model.mixers import LayerKind, Recurrent
from rlhfsim.specs.model.vision import Vision

__all__ = ["Attention", "LayerKind", "ModelSpec", "Moe", "Recurrent", "Vision"]

_NORM_VECTORS: Mapping[Norm, int] = {
    "rmsnorm": 1,
    "offset_rmsnorm": 1,
    "layernorm": 2,
    "layernorm_without_bias": 1,
    "without_weights": 0,
}


@hashed_once
@checked
@frozen
class ModelSpec(Hashed):
    """A decoder-only language model: a sequence of kinds of layer between embedding and LM head."""

    name: str
    """Preset name, or what the user called the file."""
    num_layers: int
    """Transformer layers (L)."""
    hidden: int
    """Width of the residual stream (h)."""
    vocab: int
    """Rows of the embedding table as in the checkpoint (V)."""
    attention: Attention
    ffn: int
    """Intermediate width of a dense layer; not used where every layer has experts."""
    tied_embeddings: bool = False
    """The LM head is the embedding table."""
    gated: bool = True
    """SwiGLU or GeGLU: three matrices in an MLP instead of two."""
    mlp_bias: bool = False
    """Biases in the MLPs, experts included."""
    norm: Norm = "rmsnorm"
    norms_per_layer: int = 2
    """Norms of width `hidden` in one layer (4 in Gemma 2, 1 where attention and MLP run side by side)."""
    extra_norms: int = 1
    """Norms outside the layers: the final one, and one after the embedding in BLOOM."""
    learned_positions: int = 0
    """Rows of a learned position table (OPT has two more than its context)."""
    max_position: int | None = None
    """Longest context the checkpoint was made for, tokens; absent where the config does not say."""
    moe: Moe | None = None
    recurrent: Recurrent | None = None
    """Layers with a state of constant size in place of attention; the others attend."""
    num_dense: int | None = None
    """Layers with an ordinary MLP, where they are not just those without experts (Nemotron-H)."""
    vision: Vision | None = None
    """What turns images into tokens."""
    embed_dim: int | None = None
    """Width of the embedding where it is projected to `hidden` and back (OPT-350M: 512)."""
    lm_head_bias: bool = False
    """Bias on the LM head (GPT-J, Phi-2)."""
    value_head: bool = False
    """The LM head is replaced by one scalar output: critic or reward model."""
    others: tuple[ModelSpec, ...] = ()
    """Further models of the same role (several teachers), each for as many samples as this one."""
    source: str = ""
    """Where the shape comes from."""

    def __post_init__(self) -> None:
        """Check the numbers alone and together."""
        check("num_layers", self.num_layers, 1, MAX_LAYERS)
        for name in ("hidden", "ffn"):
            check(name, getattr(self, name), 1, MAX_WIDTH)
        check("vocab", self.vocab, 1, MAX_VOCAB)
        check("norms_per_layer", self.norms_per_layer, 0, 8)
        check("extra_norms", self.extra_norms, 0, 8)
        check("learned_positions", self.learned_positions, 0, MAX_POSITION)
        check_optional("max_position", self.max_position, MAX_POSITION)
        check_optional("embed_dim", self.embed_dim, MAX_WIDTH)
        check("num_windowed_layers", self.attention.num_windowed_layers, 0, self.num_layers)
        if self.moe:
            check("num_moe_layers", self.moe.num_moe_layers, 1, self.num_layers)
        if self.recurrent:
            check("num_recurrent_layers", self.recurrent.num_layers, 1, self.num_layers - 1)
        check("num_dense_layers", self.num_dense_layers, 0, self.num_layers)

    @property
    def each(self) -> tuple[ModelSpec, ...]:
        """The models of its role."""
        return (replace(self, others=()), *self.others) if self.others else (self,)

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return self.moe.num_moe_layers if self.moe else 0

    @property
    def num_dense_layers(self) -> int:
        """Layers with an ordinary MLP."""
        return self.num_layers - self.num_moe_layers if self.num_dense is None else self.num_dense

    @property
    def num_recurrent_layers(self) -> int:
        """Layers with a state of constant size."""
        return self.recurrent.num_layers if self.recurrent else 0

    @property
    def one_block_layers(self) -> bool:
        """Mixer and FFN are layers of their own (Nemotron-H)."""
        return self.num_dense is not None

    @property
    def num_attention_layers(self) -> int:
        """Layers with an attention block, windowed ones among them."""
        others = self.num_recurrent_layers
        if self.one_block_layers:
            others += self.num_dense_layers + self.num_moe_layers
        return self.num_layers - others

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layer with their numbers, dense ones first; windowed layers count as attention."""
        attention, recurrent = self.num_attention_layers, self.num_recurrent_layers
        dense, sparse = self.num_dense_layers, self.num_moe_layers
        if self.one_block_layers:
            kinds = (
                LayerKind(recurrent, "recurrent", "none"),
                LayerKind(attention, "attention", "none"),
                LayerKind(dense, "none", "dense"),
                LayerKind(sparse, "none", "experts"),
            )
        else:
            both = dense * recurrent // self.num_layers
            kinds = (
                LayerKind(both, "recurrent", "dense"),
                LayerKind(dense - both, "attention", "dense"),
                LayerKind(recurrent - both, "recurrent", "experts"),
                LayerKind(attention - dense + both, "attention", "experts"),
            )
        return tuple(kind for kind in kinds if kind.layers)

    @property
    def mixer(self) -> str:
        """What is particular in how tokens are mixed, in words: `attention` where nothing is."""
        if self.recurrent:
            return self.recurrent.words
        return "sparse attention" if self.attention.index_topk else "attention"

    @property
    def launched_layers(self) -> float:
        """Layers of two blocks that a host launches: a block alone is half of one."""
        if self.others:
            return sum(model.launched_layers for model in self.each) / len(self.each)
        return self.num_layers / 2 if self.one_block_layers else float(self.num_layers)

    @property
    def embedding_width(self) -> int:
        """Width of the embedding table and of the LM head."""
        return self.embed_dim or self.hidden

    @property
    def params_embedding(self) -> int:
        """Elements of the input embedding table."""
        return self.vocab * self.embedding_width

    @property
    def params_lm_head(self) -> int:
        """Elements of the output matrix, whether or not it is tied; of the value head in a critic."""
        return (1 if self.value_head else self.vocab) * self.embedding_width

    @property
    def params_vision(self) -> int:
        """Elements of the vision tower; 0 without one."""
        return self.vision.num_params if self.vision else 0

    @property
    def params_layer_attention(self) -> int:
        """Elements of one attention block with its biases and inner norms."""
        return self.attention.matrix_params(self.hidden) + self.attention.vector_params(self.hidden)

    @property
    def params_layer_norms(self) -> int:
        """Elements of the norms of width `hidden` in one layer."""
        return self.norms_per_layer * _NORM_VECTORS[self.norm] * self.hidden

    @property
    def params_layer_dense_mlp(self) -> int:
        """Elements of the MLP of one dense layer with its biases."""
        return self._mlp(self.ffn)

    @property
    def params_layer_recurrent(self) -> int:
        """Elements of one recurrent block; 0 without any."""
        block = self.recurrent
        return block.matrix_params(self.hidden) + block.vector_params if block else 0

    @property
    def expert_width(self) -> int:
        """Width at which routed experts take tokens in: a latent where they have one, else `hidden`."""
        return (self.moe.latent if self.moe else None) or self.hidden

    @property
    def params_expert(self) -> int:
        """Elements of one routed expert; 0 in a dense model."""
        return self._mlp(self.moe.expert_ffn, self.expert_width) if self.moe else 0

    @property
    def params_latent(self) -> int:
        """Elements of one layer's projections to the latent of its routed experts and back."""
        return 2 * self.hidden * self.expert_width if self.moe and self.moe.latent else 0

    @property
    def params_shared_expert(self) -> int:
        """Elements of all shared experts of one layer with their gate; 0 without any."""
        if not self.moe or not self.moe.num_shared_experts:
            return 0
        gate = self.hidden if self.moe.shared_gate else 0
        return self.moe.num_shared_experts * self._mlp(self.moe.shared_ffn) + gate

    @property
    def params_router(self) -> int:
        """Elements of the router of one layer; 0 in a dense model."""
        if not self.moe:
            return 0
        return self.moe.num_experts * (self.hidden + (1 if self.moe.router_bias else 0))

    @property
    def num_params(self) -> int:
        """All elements of the checkpoint, tied ones once (N)."""
        experts = self.moe.num_experts if self.moe else 0
        return self._params(experts)

    @property
    def num_active_params(self) -> int:
        """Elements that one token uses: all but the routed experts it does not visit.

        The embedding table is counted, as in vendors' figures (Mixtral 12.9B, Qwen3-30B-A3B 3.3B).
        """
        return self._params(self.moe.top_k if self.moe else 0)

    @property
    def num_matmul_params_active(self) -> int:
        """Matrix elements that one token is multiplied with (N_a): 2 N_a FLOP forward, 6 N_a trained.

        Without the embedding table (a look-up), biases and norms; with the LM head, tied or not.
        """
        dense = self._mlp_matrix(self.ffn) * self.num_dense_layers
        projections = 2 * self.embed_dim * self.hidden if self.embed_dim else 0
        attention = self.num_attention_layers * self.attention.matrix_params(self.hidden)
        if self.recurrent:
            attention += self.num_recurrent_layers * self.recurrent.matrix_params(self.hidden)
        return attention + dense + self._moe_matrix() + projections + self.params_lm_head

    def _moe_matrix(self) -> int:
        if not self.moe:
            return 0
        moe = self.moe
        shared = moe.num_shared_experts * self._mlp_matrix(moe.shared_ffn)
        gate = self.hidden if moe.shared_gate else 0
        routed = moe.top_k * self._mlp_matrix(moe.expert_ffn, self.expert_width) + self.params_latent
        return moe.num_moe_layers * (shared + gate + routed + moe.num_experts * self.hidden)

    def _mlp_matrix(self, ffn: int, width: int | None = None) -> int:
        return (3 if self.gated else 2) * (width or self.hidden) * ffn

    def _mlp(self, ffn: int, width: int | None = None) -> int:
        bias = (2 if self.gated else 1) * ffn + self.hidden if self.mlp_bias else 0
        return self._mlp_matrix(ffn, width) + bias

    def _params(self, experts: int) -> int:
        moe = experts * self.params_expert + self.params_shared_expert + self.params_router
        moe += self.params_latent
        layers = (
            self.num_attention_layers * self.params_layer_attention
            + self.num_recurrent_layers * self.params_layer_recurrent
            + self.num_layers * self.params_layer_norms
            + self.num_dense_layers * self.params_layer_dense_mlp
            + self.num_moe_layers * moe
        )
        norms = self.extra_norms * _NORM_VECTORS[self.norm] * self.hidden
        positions = self.learned_positions * self.hidden
        projections = 2 * self.embed_dim * self.hidden if self.embed_dim else 0
        tied = self.tied_embeddings and not self.value_head
        head = (0 if tied else self.params_lm_head) + (self.vocab if self.lm_head_bias else 0)
        ends = self.params_embedding + positions + projections + norms + head
        return ends + layers + self.params_vision

    def kv_bytes_per_token(self, bytes_per_element: float = 2) -> float:
        """Bytes that one token adds to the KV cache of the whole model, windows not yet full (kappa)."""
        at = self.attention
        each = at.kv_elements * bytes_per_element + at.index_bytes
        return self.num_attention_layers * each

    @property
    def state_bytes(self) -> float:
        """Bytes that one sequence keeps in recurrent layers, however long it is."""
        return self.num_recurrent_layers * self.recurrent.state_bytes if self.recurrent else 0.0

    def kv_bytes_per_token_per_gpu(self, tp: Size, bytes_per_element: float = 2) -> Size:
        """Bytes of KV cache per token on each of `tp` GPUs.

            GQA: kappa / min(t, g)      MLA: kappa, the latent is on every GPU

        Beyond g GPUs the key/value heads are replicated. Source: vLLM and Megatron sharding rules.
        """
        shares = 1 if self.attention.kind == "mla" else least(tp, self.attention.num_kv_heads)
        return self.kv_bytes_per_token(bytes_per_element) / shares

    def kv_bytes(self, context: int, bytes_per_element: float = 2) -> float:
        """Cache of one sequence of `context` tokens with its state; windowed layers keep their window."""
        windowed = self.attention.num_windowed_layers
        in_window = min(context, self.attention.sliding_window or context)
        tokens = (self.num_attention_layers - windowed) * context + windowed * in_window
        each = self.attention.kv_elements * bytes_per_element + self.attention.index_bytes
        return tokens * each + self.state_bytes

    def with_value_head(self) -> ModelSpec:
        """The critic or reward model on this trunk: one scalar output in place of the LM head."""
        return replace(self, value_head=True, lm_head_bias=False)

    def scaled(self, num_layers: int) -> ModelSpec:
        """The same model with another depth: a proxy for benchmarks.

        Dense layers at the front stay, alternating kinds and windowed layers keep their share.
        """
        share = self.attention.num_windowed_layers * num_layers / self.num_layers
        attention = replace(self.attention, num_windowed_layers=round(share))
        name = f"{self.name}-{num_layers}l"
        recurrent, dense = self.recurrent, self.num_dense
        if recurrent:
            count = min(num_layers - 1, round(recurrent.num_layers * num_layers / self.num_layers))
            recurrent = replace(recurrent, num_layers=count) if count > 0 else None
        if dense is not None:
            dense = round(dense * num_layers / self.num_layers)
        cut = replace(
            self,
            name=name,
            num_layers=num_layers,
            attention=attention,
            moe=None,
            recurrent=recurrent,
            num_dense=dense,
        )
        if not self.moe:
            return cut
        if self.one_block_layers:
            moe_layers = round(self.num_moe_layers * num_layers / self.num_layers)
        elif self.moe.period == 1:
            moe_layers = num_layers - self.num_dense_layers
        else:
            moe_layers = num_layers // self.moe.period
        return replace(cut, moe=replace(self.moe, num_moe_layers=moe_layers) if moe_layers > 0 else None)

    def tp_degrees(self, most: int) -> list[int]:
        """Tensor-parallel degrees up to `most` that split no head."""
        return [t for t in range(1, most + 1) if self._splits(t)]

    def _splits(self, tp: int) -> bool:
        """Whether `tp` GPUs share heads evenly; key/value heads and groups are copied beyond their number."""
        heads, groups = [self.attention.num_heads], [self.attention.num_kv_heads]
        if self.recurrent:
            heads.append(self.recurrent.num_heads)
            groups.append(self.recurrent.num_groups)
        return not any(n % tp for n in heads) and not any(n % tp and tp % n for n in groups)

    def check_tp(self, tp: int) -> None:
        """Refuse a tensor-parallel degree that would split a head.

        The vocabulary and the FFN width are padded by the frameworks; heads are not.

        Raises:
            RlhfsimError: `tp` divides neither the query heads nor agrees with the key/value heads.
        """
        for other in self.others:
            other.check_tp(tp)
        heads, kv_heads = self.attention.num_heads, self.attention.num_kv_heads
        if tp < 1 or not self._splits(tp):
            raise RlhfsimError(
                "tp-does-not-divide-heads",
                f"tensor parallelism {tp} does not divide the {heads} heads "
                f"({kv_heads} key/value heads) of {self.name}",
                help=f"use tp of {', '.join(map(str, self.tp_degrees(heads)[:12]))}",
            )
