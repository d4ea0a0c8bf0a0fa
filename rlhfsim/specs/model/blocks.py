"""The parts of a layer that come in many kinds: attention, mixture of experts and norm."""

from __future__ import annotations

from typing import Literal

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.hashing import Hashed, hashed_once
from rlhfsim.specs.loading import checked

MAX_LAYERS, MAX_WIDTH, MAX_VOCAB = 4096, 2**20, 2**24
"""No model comes near these; a larger number is a typing error."""
MAX_POSITION, MAX_EXPERTS = 2**30, 2**16
Norm = Literal["rmsnorm", "offset_rmsnorm", "layernorm", "layernorm_without_bias", "without_weights"]
"""Kind of normalisation; `offset_rmsnorm` multiplies by 1 + weight in FP32 (Gemma), the last two are
LayerNorm without bias (MPT) and without both (OLMo 1)."""


def check(name: str, value: int, low: int, high: int) -> None:
    """Refuse a number outside its bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RlhfsimError(
            "bad-model-shape",
            f"{name} is {value!r}, it must be a whole number from {low} to {high}",
            help=f"give {name} as in the model's config.json",
        )


def check_optional(name: str, value: int | None, high: int) -> None:
    """The same for a number that may be absent."""
    if value is not None:
        check(name, value, 1, high)


@hashed_once
@checked
@frozen
class Attention(Hashed):
    """The attention block of every layer; all of them have the same shape."""

    num_heads: int
    """Query heads (a)."""
    num_kv_heads: int
    """Key and value heads (g); equal to `num_heads` in MHA and MLA."""
    head_dim: int
    """Query and key width of a head (d_k); in MLA `qk_nope_head_dim + qk_rope_head_dim`."""
    v_head_dim: int | None = None
    """Value width of a head; `head_dim` when absent."""
    q_lora_rank: int | None = None
    """MLA: width of the compressed query; absent where queries are not compressed (V2-Lite)."""
    kv_lora_rank: int | None = None
    """MLA: width of the cached latent (d_c); its presence makes the attention MLA."""
    qk_nope_head_dim: int | None = None
    """MLA: part of a head without rotary positions."""
    qk_rope_head_dim: int | None = None
    """MLA: rotary part, one key of it for all heads (d_rope)."""
    qkv_bias: bool = False
    """Bias on the query, key and value projections."""
    out_bias: bool = False
    """Bias on the output projection."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm of queries and keys: one weight per head dim (Qwen3), or per dim of all heads (OLMo 2)."""
    sinks: bool = False
    """One learned sink logit per head (gpt-oss)."""
    sliding_window: int | None = None
    """Tokens that a windowed (or chunked, Llama 4) layer can see."""
    num_windowed_layers: int = 0
    """Layers with the window; the others see the whole context."""
    output_gate: bool = False
    """Queries bring a gate of their width for the attention's output (Qwen3-Next)."""
    index_num_heads: int = 0
    """DeepSeek sparse attention: heads of the indexer; 0 when attention is dense."""
    index_head_dim: int = 0
    """DeepSeek sparse attention: width of an indexer head."""
    index_topk: int | None = None
    """DeepSeek sparse attention: cached tokens that a query attends to."""

    def __post_init__(self) -> None:
        """Check the numbers alone and together."""
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            check(name, getattr(self, name), 1, MAX_WIDTH)
        for name in ("v_head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
            check_optional(name, getattr(self, name), MAX_WIDTH)
        for name in ("sliding_window", "index_topk"):
            check_optional(name, getattr(self, name), MAX_POSITION)
        for name in ("num_windowed_layers", "index_num_heads", "index_head_dim"):
            check(name, getattr(self, name), 0, MAX_WIDTH)
        if self.num_heads % self.num_kv_heads:
            raise RlhfsimError(
                "kv-heads-do-not-divide-heads",
                f"{self.num_kv_heads} key/value heads do not divide {self.num_heads} query heads",
                help="each key/value head serves the same number of query heads",
            )
        if self.num_windowed_layers and self.sliding_window is None:
            raise RlhfsimError(
                "window-without-width",
                f"{self.num_windowed_layers} layers are windowed but sliding_window is missing",
                help="give sliding_window in tokens",
            )
        self._check_mla()

    def _check_mla(self) -> None:
        parts = (self.qk_nope_head_dim, self.qk_rope_head_dim)
        if self.kv_lora_rank is None:
            return
        if None in parts or self.v_head_dim is None:
            raise RlhfsimError(
                "incomplete-mla",
                "kv_lora_rank is given, so qk_nope_head_dim, qk_rope_head_dim and v_head_dim must be",
                help="give all of them as in the model's config.json",
            )
        if self.num_kv_heads != self.num_heads or self.head_dim != sum(p or 0 for p in parts):
            raise RlhfsimError(
                "inconsistent-mla",
                f"MLA with {self.num_heads} heads of {parts[0]} + {parts[1]} dims cannot have "
                f"{self.num_kv_heads} key/value heads and head_dim {self.head_dim}",
                help="leave num_kv_heads equal to num_heads, head_dim = nope + rope",
            )

    @property
    def kind(self) -> Literal["mha", "gqa", "mla"]:
        """Which family the numbers describe; multi-query is `gqa` with one key/value head."""
        if self.kv_lora_rank is not None:
            return "mla"
        return "mha" if self.num_kv_heads == self.num_heads else "gqa"

    @property
    def value_dim(self) -> int:
        """Value width of one head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def kv_elements(self) -> int:
        """Elements that one token leaves in the KV cache of one layer.

            MHA, GQA: g (d_k + d_v)        MLA: d_c + d_rope

        The indexer's keys of sparse attention come in addition (`index_bytes`).
        """
        if self.kv_lora_rank is not None:
            return self.kv_lora_rank + (self.qk_rope_head_dim or 0)
        return self.num_kv_heads * (self.head_dim + self.value_dim)

    @property
    def index_bytes(self) -> float:
        """Bytes that one token leaves in the indexer's cache of one layer: FP8 keys, one FP32 scale (132).

        Source: vllm-project/vllm, `DeepseekV32IndexerCache` of model_executor/models/deepseek_v2.py.
        """
        return self.index_head_dim + 4.0 * -(-self.index_head_dim // 128)

    @property
    def query_width(self) -> int:
        """Outputs of the query projection, the output gate with it."""
        return self.num_heads * self.head_dim * (2 if self.output_gate else 1)

    def seen(self, context: float) -> float:
        """Cached tokens that one query attends to in a layer without window: all, or the indexer's choice."""
        return context if self.index_topk is None else min(context, float(self.index_topk))

    def index_flop(self, pairs: float) -> float:
        """FLOP with which the indexer scores `pairs` of query and key: 2 heads x width each, in FP8."""
        return 2.0 * self.index_num_heads * self.index_head_dim * pairs

    def matrix_params(self, hidden: int) -> int:
        """Elements of the projection matrices of one layer."""
        out = self.num_heads * self.value_dim * hidden
        if self.kv_lora_rank is None:
            keys = self.num_kv_heads * (self.head_dim + self.value_dim)
            return hidden * (self.query_width + keys) + out + self._indexer(hidden)
        queries = self.num_heads * self.head_dim
        rank = self.q_lora_rank
        query = hidden * queries if rank is None else rank * (hidden + queries)
        down = hidden * (self.kv_lora_rank + (self.qk_rope_head_dim or 0))
        up = self.kv_lora_rank * self.num_heads * ((self.qk_nope_head_dim or 0) + self.value_dim)
        return query + down + up + out + self._indexer(hidden)

    def vector_params(self, hidden: int) -> int:
        """Biases, norms inside the block and sinks of one layer."""
        bias = hidden if self.out_bias else 0
        sinks = self.num_heads if self.sinks else 0
        index = 2 * self.index_head_dim  # LayerNorm of the indexer's key
        if self.kv_lora_rank is not None:
            norms = (self.q_lora_rank or 0) + self.kv_lora_rank
            down = (self.q_lora_rank or 0) + self.kv_lora_rank + (self.qk_rope_head_dim or 0)
            return bias + sinks + index + norms + (down if self.qkv_bias else 0)
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        values = self.num_kv_heads * self.value_dim
        norm = {"none": 0, "head": 2 * self.head_dim, "full": queries + keys}[self.qk_norm]
        return bias + sinks + index + norm + (queries + keys + values if self.qkv_bias else 0)

    def _indexer(self, hidden: int) -> int:
        heads, dim = self.index_num_heads, self.index_head_dim
        return (self.q_lora_rank or hidden) * heads * dim + hidden * (dim + heads)


@checked
@frozen
class Moe:
    """The mixture-of-experts layers; the remaining layers are dense."""

    num_experts: int
    """Routed experts of one layer (E)."""
    top_k: int
    """Routed experts that a token visits (k)."""
    expert_ffn: int
    """Intermediate width of one routed expert."""
    num_moe_layers: int
    """Layers with experts."""
    groups: int = 1
    """Groups of routed experts (G); 1: a token chooses among all."""
    token_groups: int = 1
    """Groups that the experts of one token come from (g)."""
    num_shared_experts: int = 0
    """Experts that every token visits."""
    shared_ffn: int = 0
    """Intermediate width of one shared expert."""
    latent: int | None = None
    """Width of the latent in which routed experts work, between two projections of the layer (Nemotron 3)."""
    shared_gate: bool = False
    """A learned sigmoid gate on the shared expert (Qwen2-MoE)."""
    router_bias: bool = False
    """One bias or correction per expert in the router (DeepSeek-V3, gpt-oss)."""
    fp32_combine: bool = True
    """Hugging Face modules keep router weights in FP32, and so what they multiply (not Qwen's, OLMoE's)."""
    period: int = 1
    """Every `period`-th layer has experts (2 in Llama-4 Maverick); 1 when the dense ones come first."""

    def __post_init__(self) -> None:
        """Check the numbers alone and together."""
        check("num_experts", self.num_experts, 1, MAX_EXPERTS)
        check("top_k", self.top_k, 1, self.num_experts)
        check("groups", self.groups, 1, self.num_experts)
        check("token_groups", self.token_groups, 1, self.groups)
        check("expert_ffn", self.expert_ffn, 1, MAX_WIDTH)
        check("num_moe_layers", self.num_moe_layers, 1, MAX_LAYERS)
        check("num_shared_experts", self.num_shared_experts, 0, MAX_EXPERTS)
        check("shared_ffn", self.shared_ffn, 1 if self.num_shared_experts else 0, MAX_WIDTH)
        check_optional("latent", self.latent, MAX_WIDTH)
        check("period", self.period, 1, MAX_LAYERS)
